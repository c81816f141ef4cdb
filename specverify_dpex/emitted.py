"""The tokens that a step emits, in one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specverify_dpex import dlpack, launch
from specverify_dpex.constants import MAX_DRAFT
from specverify_dpex.dlpack import ABSENT, Kind, View, contiguous_strides
from specverify_dpex.outputs import check_apart, companion, output
from specverify_dpex.plan import INTEGERS, check_array, check_output, common_queue, extent_of, needs_copy, options_of

_ARGUMENTS = ("draft_tokens", "accepted", "next_token", "out")
_VARYING = ("draft_tokens", "accepted", "next_token", "emitted")

_MOST_PLANS = 512
_plans: dict[tuple[Any, ...], _Plan] = {}


def emitted_tokens(draft_tokens: Any, accepted: Any, next_token: Any, *, out: Any | None = None) -> Any:
    """Put the accepted prefix of each draft and the token that follows it into one array.

    What a serving loop appends to its sequences: row i is `draft_tokens[i, :accepted[i]]`, `next_token[i]`, then -1 to
    the end.

    Parameters
    ----------
    draft_tokens : (batch, num_draft) int64 or int32
        As given to `verify`.
    accepted : (batch,) int64
        As returned by `verify`; clamped to [0, num_draft].
    next_token : (batch,) int64
        As returned by `verify`.
    out : (batch, num_draft + 1) int64, optional
        A contiguous array that is written to and returned. It must not overlap the others.

    Returns
    -------
    (batch, num_draft + 1) int64
        `out`, or a new array of the kind of `draft_tokens`, on its device and queue.

    Raises
    ------
    TypeError
        If an argument is not an array, its kind differs from the others' or its dtype is not the one above.
    ValueError
        If a shape is not as above, the arrays are not on one queue, or `out` is read-only or not contiguous.
    BufferError
        If the memory of an array cannot be reached.
    RuntimeError
        If arrays on the host are given and there is no device, or the device refuses a launch.

    Notes
    -----
    Ordered and asynchronous as `verify` is. Arrays may have any strides. Nothing is read or written outside the arrays,
    whatever `accepted` holds.

    Examples
    --------
    >>> import numpy as np
    >>> from specverify_dpex import emitted_tokens
    >>> emitted_tokens(np.array([[5, 6, 7], [8, 9, -1]]), np.array([1, 2]), np.array([3, 4]))
    array([[ 5,  3, -1, -1],
           [ 8,  9,  4, -1]])
    """
    kind = dlpack.kind_of(draft_tokens, "draft_tokens")
    kinds = [kind]
    views = [kind.view(draft_tokens, "draft_tokens")]
    for array, name in ((accepted, "accepted"), (next_token, "next_token")):
        own, view = companion(kind, array, name)
        kinds.append(own)
        views.append(view)
    own, view = (kind, ABSENT) if out is None else output(kind, out, "out")
    kinds.append(own)
    views.append(view)
    signature = (*kinds, *(view[1:5] for view in views))
    plan = launch.remembered(_plans, _MOST_PLANS, signature, lambda: _Plan(kinds, views))
    if out is not None:
        check_apart(_ARGUMENTS, kinds, views, plan.extents)

    # The checks end here: what follows copies and launches.
    in_place = out is not None and not kind.on_host
    if in_place:
        memory, start, target = None, 0, view.pointer
    else:
        memory, start = plan.results.allocate(8 * plan.count)
        target = memory._pointer + start
    if plan.launch is not None:
        inputs = views[:3]
        if kind.on_host:
            inputs = [own.copy(view) for own, view in zip(kinds, inputs)]
        pointers = [view.pointer for view in inputs]
        launch.run(plan.launch, plan.queue, plan.ordered, (memory, inputs, view), None, *pointers, target)
    if out is None:
        return kind.wrap(memory, start // 8, plan.shape, "i8", plan.queue)
    if not in_place and plan.count:
        own.write(view, memory, start // 8)
    return out


class _Plan:
    """A checked call: all of it that does not depend on where its arrays lie."""

    def __init__(self, kinds: Sequence[Kind], views: Sequence[View]):
        kind = kinds[0]
        tokens, accepted, next_token, out = views
        check_array(kind, tokens, "draft_tokens", "(batch, num_draft)", (None, None), *INTEGERS)
        batch, num_draft = tokens.shape
        if num_draft > MAX_DRAFT:
            raise ValueError(f"`draft_tokens` must have fewer than 2**30 positions: got {num_draft}")
        check_array(kinds[1], accepted, "accepted", "(batch,)", (batch,), "i8")
        check_array(kinds[2], next_token, "next_token", "(batch,)", (batch,), "i8")
        self.shape = (batch, num_draft + 1)
        if out is not ABSENT:
            check_output(kinds[3], out, "out", "(batch, num_draft + 1)", self.shape)
        # The queue of `accepted` comes first: an array without drafts may be on none.
        named = dict(zip(_ARGUMENTS, views))
        self.queue = common_queue({"accepted": accepted, **named}, dict(zip(_ARGUMENTS, kinds)))
        self.extents = [extent_of(view) for view in views]
        self.ordered = all(own.ordered for own in kinds)
        self.results = kind.results(self.queue)
        self.count = batch * (num_draft + 1)
        self.launch: launch.Launch | None = None
        if batch:
            strides = [
                contiguous_strides(view.shape) if needs_copy(kind, view, row=False) else view.strides
                for view in views[:3]
            ]
            arguments = {
                "draft_tokens_batch": strides[0][0],
                "draft_tokens_position": strides[0][1],
                "accepted_batch": strides[1][0],
                "next_token_batch": strides[2][0],
                "options": options_of({"draft_tokens": tokens}),
                "max_draft": num_draft,
            }
            kernel = launch.kernel(self.queue, "emitted")
            work_group = min(num_draft + 1, 64, kernel.max_work_group)
            self.launch = launch.Launch(kernel, self.queue, arguments, (batch,), work_group, _VARYING)
