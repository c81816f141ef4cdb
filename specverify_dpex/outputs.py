"""Arrays that the caller gives for results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specverify_dpex import dlpack
from specverify_dpex.dlpack import Kind, View
from specverify_dpex.plan import OUTPUTS


def companion(kind: Kind, array: Any, argument: str) -> tuple[Kind, View]:
    """The kind and view of an array that goes with arrays of `kind`: of that kind, or of that of its results.

    Raises
    ------
    TypeError
        If it is of neither.
    """
    own = dlpack.kind_of(array, argument)
    if own is not kind and not (own.plain and own.on_host == kind.on_host):
        raise TypeError(
            f"`{argument}` must be of the same kind as `draft_tokens`: expected {kind.name}, got {own.name}. "
            "Convert one of them"
        )
    return own, own.view(array, argument)


def output(kind: Kind, array: Any, argument: str) -> tuple[Kind, View]:
    """The kind and view of an array that results are written to.

    Raises
    ------
    TypeError
        As `companion` does.
    ValueError
        If it is read-only.
    """
    own, view = companion(kind, array, argument)
    if own.read_only(array, argument):
        raise ValueError(f"`{argument}` must be writable: got a read-only array. Pass a copy, or leave it out")
    return own, view


def output_pair(kind: Kind, out: Any) -> tuple[tuple[Kind, ...], tuple[View, ...]]:
    """The kinds and views of verify's argument `out`, in the order of `plan.OUTPUTS`.

    Raises
    ------
    TypeError
        If it is no pair, or as `companion` does.
    ValueError
        If one is read-only.
    """
    if not isinstance(out, (tuple, list)) or len(out) != len(OUTPUTS):
        raise TypeError(
            "`out` must be a pair of arrays: expected (accepted, next_token), such as an earlier result, got "
            f"{type(out).__name__}"
        )
    kinds, views = zip(*(output(kind, array, name) for array, name in zip(out, OUTPUTS)))
    return kinds, views


def check_apart(
    names: Sequence[str], kinds: Sequence[Kind], views: Sequence[View], extents: Sequence[tuple[int, int]]
) -> None:
    """Check that arrays for results, those named `out`, overlap neither one another nor an argument.

    Raises
    ------
    ValueError
        If they do.
    """
    spans = []
    for name, own, view, (first, last) in zip(names, kinds, views, extents):
        if last > first:
            address = own.address(view)
            spans.append((name, address + first, address + last))
    for at, (name, first, last) in enumerate(spans):
        if not name.startswith("out"):
            continue
        for other, other_first, other_last in spans[:at]:
            if first < other_last and other_first < last:
                raise ValueError(f"`{name}` must not overlap `{other}`: expected memory of its own. Pass another array")


def write_results(kinds: Sequence[Kind], views: Sequence[View], memory: Any, first: int) -> None:
    """Copy results, one behind the other from element `first` of `memory`, to arrays on the host."""
    for own, view in zip(kinds, views):
        if 0 not in view.shape:
            own.write(view, memory, first)
        first += view.shape[0]
