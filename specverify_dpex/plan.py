"""Plans: all of a call that depends on what its arrays are and not on where they lie.

A serving loop calls with the same shapes, strides and queue at every step. Its arguments are then checked once, and the
launch with its cut of the work is bound once; later calls find it by one look-up.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import dpctl

from specverify_dpex import dlpack, launch, tuning
from specverify_dpex.constants import (
    DETERMINISTIC_MASK,
    DRAFT_PROBS,
    GREEDY_MASK,
    INT32_NUM_DRAFT,
    INT32_TOKENS,
    MAX_DRAFT,
    MAX_VOCAB,
    NUM_DRAFT,
    PHILOX_ACCEPT,
    PHILOX_ROW_KEYS,
    PHILOX_SAMPLE,
)
from specverify_dpex.dlpack import ABSENT, Kind, View, contiguous_strides
from specverify_dpex.usm_array import DTYPE_NAMES, default_queue

ARGUMENTS = (
    "draft_tokens",
    "target_probs",
    "draft_probs",
    "uniform_accept",
    "uniform_sample",
    "seed",
    "num_draft",
    "deterministic_draft",
    "greedy",
)
"""The array arguments of verify, in the order in which they are checked."""
OUTPUTS = ("out[0]", "out[1]")
"""The arrays for its results, which follow them."""

# What changes between calls with one plan, in the order in which `launch.run` is given it after the scratch.
_VARYING = (
    "scratch",
    "draft_tokens",
    "target_probs",
    "draft_probs",
    "uniform_accept",
    "uniform_sample",
    "keys",
    "num_draft",
    "deterministic",
    "greedy",
    "seed",
    "offset",
    "accepted",
    "next_token",
)

INTEGERS = ("i8", "i4")
_PROBABILITIES = {"f4": "f32", "f2": "f16", "bfloat16": "bf16"}  # and what modules call them

_MOST_PLANS = 512
_MOST_SCRATCH = 256 << 20  # bytes that all plans together keep for their next calls
_plans: dict[tuple[Any, ...], Plan] = {}
_adding = threading.RLock()  # memory that is dropped may run code that calls verify


def find_plan(kinds: tuple[Kind, ...], views: Sequence[View]) -> Plan:
    """The plan for arrays like these.

    Parameters
    ----------
    kinds : tuple of Kind
        That of the arguments, and then that of each given output.
    views : sequence of View
        Those of `ARGUMENTS`, and then of the given outputs.

    Raises
    ------
    TypeError
        If a dtype is wrong.
    ValueError
        If a shape is wrong or the arrays are not on one queue.
    """
    signature = (kinds, *[view[1:5] for view in views])  # all of a view but its pointer and owner
    plan = _plans.get(signature)
    if plan is None:
        plan = Plan(kinds, views)
        with _adding:
            _make_room()
            plan = _plans.setdefault(signature, plan)
    return plan


def _make_room() -> None:
    """Drop the oldest plans while there are too many, or they keep too much scratch."""
    plans = list(_plans.items())
    kept = sum(plan.scratch.kept for _, plan in plans)
    for signature, plan in plans:
        if len(_plans) < _MOST_PLANS and kept <= _MOST_SCRATCH:
            break
        _plans.pop(signature, None)
        kept -= plan.scratch.kept


class Plan:
    """A checked call.

    Attributes
    ----------
    batch : int
    queue : dpctl.SyclQueue
    ordered : bool
        Whether dpctl's manager orders all that touches the arrays.
    copied : tuple of bool
        Which arguments are copied before the launch; empty if none is.
    extents : list of (int, int)
        Where each array of the call begins and ends, in bytes from its first element.
    results : launch.Arena, or what the kind has in its place
        Where the results go.
    launch : launch.Launch, or None if the batch is empty
    scratch : launch.Scratch
    """

    def __init__(self, kinds: Sequence[Kind], views: Sequence[View]):
        kind = kinds[0]
        batch, max_draft, vocab = _check(kinds, views)
        # The target's queue comes first: its array is the one that always has elements.
        named = dict(zip((*ARGUMENTS, *OUTPUTS), views))
        self.queue = common_queue({"target_probs": named["target_probs"], **named}, dict.fromkeys(ARGUMENTS, kind))
        arguments = {name: named[name] for name in ARGUMENTS}
        copied = [needs_copy(kind, view, name.endswith("probs"), name) for name, view in arguments.items()]
        self.copied = tuple(copied) if any(copied) else ()
        self.batch = batch
        self.ordered = all(own.ordered for own in kinds)
        self.extents = [extent_of(view) for view in views]
        self.results = kind.results(self.queue)
        self.launch: launch.Launch | None = None
        self.scratch = launch.Scratch(self.queue, 0)
        if batch:
            strides = {
                name: contiguous_strides(view.shape) if copy else view.strides
                for (name, view), copy in zip(arguments.items(), copied)
            }
            self._bind(arguments, strides, max_draft, vocab)

    def _bind(
        self, views: Mapping[str, View], strides: Mapping[str, tuple[int, ...]], max_draft: int, vocab: int
    ) -> None:
        target, draft = views["target_probs"], views["draft_probs"]
        element = _PROBABILITIES[target.dtype]
        entry_point = f"verify_{_PROBABILITIES.get(draft.dtype, element)}_{element}"
        kernel = launch.kernel(self.queue, entry_point)
        cut = tuning.launch_shape(self.batch, vocab, self.queue.sycl_device)
        work_group = min(cut.work_group, tuning.MAX_WORK_GROUP, kernel.max_work_group)
        tile_length = work_group * min(cut.tile_steps, tuning.MAX_TILE_STEPS)
        tiles = -(-vocab // tile_length)
        slice_tiles = -(-tiles // cut.slices)
        arguments = {
            "options": options_of(views),
            "keys_batch": strides["seed"][0],
            "num_draft_batch": strides["num_draft"][0],
            "deterministic_batch": strides["deterministic_draft"][0],
            "greedy_batch": strides["greedy"][0],
            "max_draft": max_draft,
            "draft_vocab": 0 if draft is ABSENT else draft.shape[2],
            "vocab": vocab,
            "tile_length": tile_length,
            "slice_tiles": slice_tiles,
            "tiles": tiles,
        }
        for name in ("draft_tokens", "target_probs", "draft_probs", "uniform_accept", "uniform_sample"):
            arguments[f"{name}_batch"], arguments[f"{name}_position"] = strides[name][:2]
        groups = (self.batch, -(-tiles // slice_tiles))
        self._bound = (kernel, self.queue, arguments, groups, work_group)
        self.launch = launch.Launch(*self._bound, _VARYING)
        words = tiles * work_group + 8 * (groups[1] // 8 + 1)  # of each sequence, as in kernels.py
        self.scratch = launch.Scratch(self.queue, 8 * self.batch * words)

    def launch_on(self, *addresses: int) -> launch.Launch:
        """A launch on these arrays alone: the values of `_VARYING`, of which only "offset" still varies."""
        kernel, queue, arguments, groups, work_group = self._bound
        arguments = {**arguments, **dict(zip(_VARYING, addresses))}
        return launch.Launch(kernel, queue, arguments, groups, work_group, ("offset",))


def extent_of(view: View) -> tuple[int, int]:
    """The bytes that an array lies in, from the address of its first element: equal numbers if it has no elements."""
    if view is ABSENT or 0 in view.shape:
        return 0, 0
    reach = [(extent - 1) * stride for extent, stride in zip(view.shape, view.strides)]
    itemsize = dlpack.itemsize(view.dtype)
    return itemsize * sum(min(step, 0) for step in reach), itemsize * (sum(max(step, 0) for step in reach) + 1)


def options_of(views: Mapping[str, View]) -> int:
    """The kernels' argument `options`: which of the arguments there are, and what their types are."""

    def given(name: str) -> bool:
        return views.get(name, ABSENT) is not ABSENT

    return (
        (not given("uniform_accept")) * PHILOX_ACCEPT
        | (not given("uniform_sample")) * PHILOX_SAMPLE
        | given("seed") * PHILOX_ROW_KEYS
        | given("draft_probs") * DRAFT_PROBS
        | given("deterministic_draft") * DETERMINISTIC_MASK
        | given("greedy") * GREEDY_MASK
        | given("num_draft") * NUM_DRAFT
        | (views.get("num_draft", ABSENT).dtype == "i4") * INT32_NUM_DRAFT
        | (views["draft_tokens"].dtype == "i4") * INT32_TOKENS
    )


def _check(kinds: Sequence[Kind], views: Sequence[View]) -> tuple[int, int, int]:
    """Check dtypes and shapes of verify's arguments: batch, num_draft and vocab."""
    kind, *output_kinds = kinds
    tokens, target, draft, accept, sample, keys, num_draft, deterministic, greedy, *outputs = views
    check_array(kind, tokens, "draft_tokens", "(batch, num_draft)", (None, None), *INTEGERS)
    batch, max_draft = tokens.shape
    if max_draft > MAX_DRAFT:
        raise ValueError(
            f"`draft_tokens` must have fewer than 2**30 positions: got {max_draft}. Verify fewer at a time"
        )
    rows = (batch, max_draft + 1)
    check_array(kind, target, "target_probs", "(batch, num_draft + 1, vocab)", (*rows, None), *_PROBABILITIES)
    vocab = target.shape[2]
    if vocab == 0:
        raise ValueError("`target_probs` must have a token along its last axis: expected 1 to 2**20, got 0")
    if vocab > MAX_VOCAB:
        raise ValueError(
            f"`target_probs` must have at most 2**20 tokens along its last axis: got {vocab}. "
            "Cut the unused columns of a padded vocabulary off"
        )
    if draft is not ABSENT:
        axes = (batch, max_draft, None)
        check_array(kind, draft, "draft_probs", "(batch, num_draft, draft_vocab)", axes, *_PROBABILITIES)
        if draft.shape[2] > vocab:
            raise ValueError(
                f"`draft_probs` must not have more columns than `target_probs`: expected at most {vocab}, got "
                f"{draft.shape[2]}. The target cannot emit what is beyond: pass draft_probs[:, :, :{vocab}]"
            )
    elif deterministic is not ABSENT:
        raise ValueError(
            "`deterministic_draft` must be None where `draft_probs` is: all drafts are deterministic then. Leave it out"
        )
    if accept is not ABSENT:
        check_array(kind, accept, "uniform_accept", "(batch, num_draft)", (batch, max_draft), "f4")
    if sample is not ABSENT:
        check_array(kind, sample, "uniform_sample", "(batch, num_draft + 1)", rows, "f4")
    one_each: tuple[tuple[View, str, tuple[str, ...]], ...] = (
        (keys, "seed", ("u8",)),
        (num_draft, "num_draft", INTEGERS),
        (deterministic, "deterministic_draft", ("b1",)),
        (greedy, "greedy", ("b1",)),
    )
    for view, name, dtypes in one_each:
        if view is not ABSENT:
            check_array(kind, view, name, "(batch,)", (batch,), *dtypes)
    for own, view, name in zip(output_kinds, outputs, OUTPUTS):
        check_output(own, view, name, "(batch,)", (batch,))
    return batch, max_draft, vocab


def check_array(kind: Kind, view: View, name: str, axes: str, shape: tuple[int | None, ...], *dtypes: str) -> None:
    """Check that an argument's dtype is one of `dtypes`, and every axis; None in `shape` is any extent."""
    if view.dtype not in dtypes:
        *others, last = (DTYPE_NAMES.get(dtype, dtype) for dtype in dtypes)
        expected = f"{', '.join(others)} or {last}" if others else last
        if view.dtype == "u2" and "bfloat16" in dtypes:
            remedy = "Where it holds the bits of bfloat16 values, pass dtype='bfloat16'"
        else:
            conversion = kind.conversion.format(name=name, dtype=DTYPE_NAMES[dtypes[0]])
            remedy = f"Convert it, for example with {conversion}"
        raise TypeError(f"`{name}` must have dtype {expected}: got {DTYPE_NAMES.get(view.dtype, view.dtype)}. {remedy}")
    if len(view.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, view.shape)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(
            f"`{name}` must have shape {axes}: expected ({wanted}{',' if len(shape) == 1 else ''}), got {view.shape}"
        )


def check_output(kind: Kind, view: View, name: str, axes: str, shape: tuple[int, ...]) -> None:
    """Check that the view of an `output` is contiguous, int64 and of this shape."""
    check_array(kind, view, name, axes, shape, "i8")
    expected = contiguous_strides(shape)
    if 0 not in shape and any(n > 1 and got != want for n, got, want in zip(shape, view.strides, expected)):
        raise ValueError(
            f"`{name}` must be contiguous: expected strides {expected} in elements, got {tuple(view.strides)}. "
            "Pass an array of its own"
        )


def common_queue(views: Mapping[str, View], kinds: Mapping[str, Kind]) -> dpctl.SyclQueue:
    """The one queue of the arguments, that of the first; arrays without elements may be on none.

    Raises
    ------
    ValueError
        If one is on another queue. What it tells to do depends on the kind of that array, where `kinds` has it.
    """
    first, *others = views
    queue = views[first].queue or default_queue()
    for name in others:
        other = views[name].queue
        if other is not None and other != queue:
            raise ValueError(
                f"`{name}` must be on the queue of `{first}`: expected {_place(queue)}, got {_place(other)}. "
                + kinds.get(name, Kind).transfer.format(name=name, first=first)
            )
    return queue


def _place(queue: dpctl.SyclQueue) -> str:
    return f"the queue at {queue.addressof_ref():#x} of {queue.sycl_device.name.strip()}"


def needs_copy(kind: Kind, view: View, row: bool, name: str = "seed") -> bool:
    """Whether an argument must be copied to be read; the last axis of a `row` must be contiguous.

    Raises
    ------
    ValueError
        If it must and the array's library has no copy to offer.
    """
    if view is ABSENT:
        return False
    if kind.on_host:
        return True
    if not row or 0 in view.shape or view.strides[-1] == 1 or view.shape[-1] == 1:
        return False
    if not kind.copies:
        raise ValueError(
            f"`{name}` must be contiguous along its last axis: expected a stride of 1, got {view.strides[-1]}. "
            "Copy it, or pass it as an array of a library that can"
        )
    return True
