"""Arrays that the caller gives for results."""

from __future__ import annotations

from typing import Any

from specverify_dpex import dlpack
from specverify_dpex.dlpack import Kind, View, contiguous_strides
from specverify_dpex.plan import check_array


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


def check_output(kind: Kind, view: View, name: str, axes: str, shape: tuple[int, ...]) -> None:
    """Check that the view of an `output` is contiguous, int64 and of this shape."""
    check_array(kind, view, name, axes, shape, "i8")
    expected = contiguous_strides(shape)
    if 0 not in shape and any(n > 1 and got != want for n, got, want in zip(shape, view.strides, expected)):
        raise ValueError(
            f"`{name}` must be contiguous: expected strides {expected} in elements, got {tuple(view.strides)}. "
            "Pass an array of its own"
        )
