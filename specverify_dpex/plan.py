"""Plans: all of a call that depends on what its arrays are and not on where they lie.

A serving loop calls with the same shapes, strides and queue at every step. Its arguments are then checked once, and the
launch with its cut of the work is bound once; later calls find it by one look-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dpctl

from specverify_dpex import dlpack, launch, tuning
from specverify_dpex.constants import MAX_DRAFT, MAX_VOCAB, PHILOX_ACCEPT, PHILOX_ROW_KEYS, PHILOX_SAMPLE
from specverify_dpex.dlpack import ABSENT, DTYPE_NAMES, Kind, View

ARGUMENTS = ("draft_tokens", "target_probs", "draft_probs", "uniform_accept", "uniform_sample", "seed")
"""The array arguments of verify, in the order in which they are checked."""

# What changes between calls with one plan, in the order in which `launch.run` is given it after the scratch.
_VARYING = (
    "tile_mass",
    "arrivals",
    "draft_tokens",
    "target_probs",
    "draft_probs",
    "uniform_accept",
    "uniform_sample",
    "keys",
    "seed",
    "offset",
    "accepted",
    "next_token",
)

_MOST_PLANS = 512
_plans: dict[tuple[Any, ...], Plan] = {}


def find_plan(kind: Kind, views: Sequence[View]) -> Plan:
    """The plan for arrays of one kind, `views` being those of `ARGUMENTS`.

    Raises
    ------
    TypeError
        If a dtype is wrong.
    ValueError
        If a shape is wrong or the arrays are not on one queue.
    """
    signature = (kind, *[view[1:5] for view in views])  # all of a view but its pointer and owner
    plan = _plans.get(signature)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[signature] = Plan(kind, views)
    return plan


class Plan:
    """A checked call.

    Attributes
    ----------
    batch : int
    queue : dpctl.SyclQueue
    copied : tuple of bool
        Which arguments are copied before the launch; empty if none is.
    results : launch.Arena, or what the kind has in its place
        Where the results go.
    launch : launch.Launch, or None if the batch is empty
    scratch : launch.Scratch
    """

    def __init__(self, kind: Kind, views: Sequence[View]):
        tokens, target, draft, accept, sample, keys = views
        check_array(kind, tokens, "draft_tokens", "(batch, num_draft)", (None, None), "i8")
        batch, num_draft = tokens.shape
        if num_draft > MAX_DRAFT:
            raise ValueError(
                f"`draft_tokens` must have fewer than 2**30 positions: got {num_draft}. Verify fewer at a time"
            )
        rows = (batch, num_draft + 1)
        check_array(kind, target, "target_probs", "(batch, num_draft + 1, vocab)", (*rows, None), "f4")
        vocab = target.shape[2]
        if not 1 <= vocab <= MAX_VOCAB:
            raise ValueError(
                f"`target_probs` must have 1 to 2**20 tokens along its last axis: got {vocab}. "
                "Cut the unused columns of a padded vocabulary off"
            )
        if draft is not ABSENT:
            check_array(kind, draft, "draft_probs", "(batch, num_draft, vocab)", (batch, num_draft, vocab), "f4")
        if accept is not ABSENT:
            check_array(kind, accept, "uniform_accept", "(batch, num_draft)", (batch, num_draft), "f4")
        if sample is not ABSENT:
            check_array(kind, sample, "uniform_sample", "(batch, num_draft + 1)", rows, "f4")
        if keys is not ABSENT:
            check_array(kind, keys, "seed", "(batch,)", (batch,), "u8")
        # The target's queue comes first: its array is the one that always has elements.
        named = dict(zip(ARGUMENTS, views))
        self.queue = common_queue({"target_probs": target, **named})
        copied = tuple(needs_copy(kind, view, name.endswith("probs"), name) for name, view in named.items())
        self.copied = copied if any(copied) else ()
        self.batch = batch
        self.results = kind.results(self.queue)
        self.launch: launch.Launch | None = None
        self.scratch = launch.Scratch(self.queue, ())
        if batch:
            strides = [
                dlpack.contiguous_strides(view.shape) if copy else view.strides for view, copy in zip(views, copied)
            ]
            self._bind(views, strides, num_draft, vocab)

    def _bind(self, views: Sequence[View], strides: Sequence[tuple[int, ...]], num_draft: int, vocab: int) -> None:
        _, _, draft, accept, sample, keys = views
        cut = tuning.launch_shape(self.batch, vocab, self.queue.sycl_device)
        kernel = launch.kernel(self.queue, "verify_f32")
        work_group = min(cut.work_group, tuning.MAX_WORK_GROUP, kernel.max_work_group)
        tile_length = work_group * min(cut.tile_steps, tuning.MAX_TILE_STEPS)
        tiles = -(-vocab // tile_length)
        slice_tiles = -(-tiles // cut.slices)
        arguments = {
            "philox": (accept is ABSENT) * PHILOX_ACCEPT
            | (sample is ABSENT) * PHILOX_SAMPLE
            | (keys is not ABSENT) * PHILOX_ROW_KEYS,
            "keys_batch": strides[5][0],
            "has_draft": int(draft is not ABSENT),
            "num_draft": num_draft,
            "vocab": vocab,
            "tile_length": tile_length,
            "slice_tiles": slice_tiles,
            "tiles": tiles,
        }
        for name, stride in zip(ARGUMENTS[:5], strides):
            arguments[f"{name}_batch"], arguments[f"{name}_position"] = stride[:2]
        groups = (self.batch, -(-tiles // slice_tiles))
        self._bound = (kernel, self.queue, arguments, groups, work_group)
        self.launch = launch.Launch(*self._bound, _VARYING)
        self.scratch = launch.Scratch(self.queue, (8 * self.batch * tiles, 4 * self.batch))

    def launch_on(self, *addresses: int) -> launch.Launch:
        """A launch on these arrays alone: the values of `_VARYING`, of which only "offset" still varies."""
        kernel, queue, arguments, groups, work_group = self._bound
        arguments = {**arguments, **dict(zip(_VARYING, addresses))}
        return launch.Launch(kernel, queue, arguments, groups, work_group, ("offset",))


def check_array(kind: Kind, view: View, name: str, axes: str, shape: tuple[int | None, ...], dtype: str) -> None:
    """Check an argument's dtype and every axis; None in `shape` is any extent."""
    if view.dtype != dtype:
        expected = DTYPE_NAMES[dtype]
        raise TypeError(
            f"`{name}` must have dtype {expected}: got {DTYPE_NAMES.get(view.dtype, view.dtype)}. "
            f"Convert it, for example with {kind.conversion.format(name=name, dtype=expected)}"
        )
    if len(view.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, view.shape)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(
            f"`{name}` must have shape {axes}: expected ({wanted}{',' if len(shape) == 1 else ''}), got {view.shape}"
        )


def common_queue(views: Mapping[str, View]) -> dpctl.SyclQueue:
    """The one queue of the arguments, that of the first; arrays without elements may be on none."""
    first, *others = views
    queue = views[first].queue or dlpack.default_queue()
    for name in others:
        other = views[name].queue
        if other is not None and other != queue:
            raise ValueError(
                f"`{name}` must be on the queue of `{first}`: expected {_place(queue)}, got {_place(other)}. "
                f"Copy it there, for example with its `to_device({first}.sycl_queue)`"
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
