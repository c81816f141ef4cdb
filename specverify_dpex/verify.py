"""The public function: look at the arguments, find the launch that fits them, run it, return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dpctl

from specverify_dpex import dlpack, launch, philox
from specverify_dpex.check import check_values
from specverify_dpex.constants import PHILOX_ROW_KEYS
from specverify_dpex.dlpack import ABSENT, Kind, View
from specverify_dpex.outputs import check_apart, output_pair, write_results
from specverify_dpex.plan import ARGUMENTS, OUTPUTS, Plan, check_array, common_queue, find_plan, needs_copy
from specverify_dpex.result import VerifyResult
from specverify_dpex.stats import AcceptanceStats, bind


def verify(
    draft_tokens: Any,
    draft_probs: Any | None,
    target_probs: Any,
    uniform_accept: Any | None = None,
    uniform_sample: Any | None = None,
    *,
    num_draft: Any | None = None,
    deterministic_draft: Any | None = None,
    greedy: Any | None = None,
    dtype: str | None = None,
    seed: Any | None = None,
    offset: int = 0,
    out: tuple[Any, Any] | None = None,
    stats: AcceptanceStats | None = None,
    check: bool = False,
    depends_on: Sequence[dpctl.SyclEvent] | None = None,
) -> VerifyResult:
    """Keep the longest acceptable prefix of each draft and draw the token that follows it.

    The emitted tokens are distributed exactly as the target model's, to within 2**-44 per token and the resolution of
    the uniforms, and both outputs equal `specverify_dpex.reference.verify_scalar` bit for bit on every device.
    Speculative sampling of Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2).

    Parameters
    ----------
    draft_tokens : (batch, num_draft) int64 or int32
        The tokens that the draft model proposed. A negative token ends a sequence's drafts; one beyond the vocabulary
        is rejected.
    draft_probs : (batch, num_draft, draft_vocab) float32, float16 or bfloat16, or None
        The draft model's distribution at each position. draft_vocab <= vocab: columns that it lacks are 0. None: it put
        probability 1 on its token.
    target_probs : (batch, num_draft + 1, vocab) float32, float16 or bfloat16
        The target model's distribution at each position; the last row follows the last draft. vocab <= 2**20.
    uniform_accept : (batch, num_draft) float32 in [0, 1), optional
        A uniform for each acceptance test; drawn on the device from `seed` if not given.
    uniform_sample : (batch, num_draft + 1) float32 in [0, 1), optional
        The draw at position j uses `uniform_sample[:, j]`; drawn on the device from `seed` if not given.
    num_draft : (batch,) int64 or int32, optional
        How many positions of each sequence hold a proposal, clamped to the length of the axis. What is behind them is
        not read.
    deterministic_draft : (batch,) bool, optional
        Sequences whose draft put probability 1 on its tokens, as prompt lookup and greedy drafts do; their draft_probs
        are not read. None where `draft_probs` is.
    greedy : (batch,) bool, optional
        Sequences that take the target's most probable token, of equal ones the first, and NaN never: a draft is
        accepted where it is that token. Their draft_probs and uniforms are not read, and target_probs may be logits.
        Each is the work of one work-group.
    dtype : "bfloat16", optional
        What uint16 probabilities hold, for array libraries that have no bfloat16.
    seed : int in [0, 2**64), or (batch,) uint64 array, optional
        Key of the uniforms that are not given. One number keys all sequences, which differ by their index in the
        batch; an array holds each sequence's own key, whatever its index. Taken from the operating system if None. Must
        be None where both uniforms are given.
    offset : int in [0, 2**32)
        The caller's step counter: uniforms of different offsets are independent.
    out : pair of (batch,) int64 arrays, optional
        Contiguous arrays of the kind that results have, to write them to; they are returned.
    stats : AcceptanceStats, optional
        Where to count what was proposed, accepted and emitted, on the device.
    check : bool
        Whether to look at all values first, in an extra pass for which the host waits, and to raise for the first that
        cannot be right. See the README for what is checked.
    depends_on : sequence of dpctl.SyclEvent, optional
        Events that the work waits for on the device. Given, even if empty, the call never waits for the device where
        the arrays are on one: the caller keeps the order, by `VerifyResult.event`.

    Returns
    -------
    VerifyResult
        `accepted` and `next_token`, each (batch,) int64, of the arguments' kind of array, on their device and queue,
        with the `event` that completes them.

    Raises
    ------
    TypeError
        If an argument is not an array, its kind differs from the others' or its dtype is not the one above.
    ValueError
        If a shape, `seed` or `offset` is not as above, the arrays are not on one queue, `out` is read-only or overlaps
        another array, or `check` finds a bad value.
    BufferError
        If the memory of an array cannot be reached.
    RuntimeError
        If arrays on the host are given and there is no device, or the device refuses a launch.

    Notes
    -----
    Work runs on the arrays' queue. dpnp and dpctl.tensor arrays with dpctl 0.18 or newer, and any array on an in-order
    queue with it, are returned without a host wait: what follows on the queue is ordered after it. Otherwise the call
    returns when the results are there, unless `depends_on` is given. Memory is kept alive until the device is done with
    it. The vocabulary axis must be contiguous, or is copied once where the array's library can; the other axes may have
    any strides.

    The uniforms of the two kinds and the noise that drew the drafts must be independent: one buffer passed for both
    biases the output.

    Examples
    --------
    >>> import numpy as np
    >>> from specverify_dpex import verify
    >>> draft_tokens = np.array([[2, 0]])
    >>> draft_probs = np.array([[[0.25, 0.25, 0.5], [1, 0, 0]]], dtype=np.float32)
    >>> target_probs = np.array([[[0, 0, 1], [0, 1, 0], [1, 0, 0]]], dtype=np.float32)
    >>> verify(draft_tokens, draft_probs, target_probs, seed=7)
    VerifyResult(accepted=array([1]), next_token=array([1]))
    """
    kinds, plan, views, key = _look_at(
        draft_tokens,
        target_probs,
        draft_probs,
        uniform_accept,
        uniform_sample,
        seed,
        num_draft,
        deterministic_draft,
        greedy,
        dtype,
        out,
    )
    kind = kinds[0]
    offset = philox.check_offset(offset)
    if stats is not None:
        bind(stats, plan.queue)
    events = () if depends_on is None else _events(depends_on)

    # The checks of all but values end here: what follows copies and launches.
    given = views
    outputs = views[len(ARGUMENTS) :]
    events = launch.awaited(plan.queue, events)
    if plan.copied:
        dpctl.SyclEvent.wait_for(list(events))
        views = [kind.copy(view) if copied else view for view, copied in zip(views, plan.copied)]
    if check:
        check_values(kind, plan.queue, dict(zip(ARGUMENTS, given)), dict(zip(ARGUMENTS, views)), events)
    if out is None or kind.on_host:
        memory, start = plan.results.allocate(16 * plan.batch)
        accepted = memory._pointer + start
        next_token = accepted + 8 * plan.batch
    else:
        memory, start = outputs, 0
        accepted, next_token = (view.pointer for view in outputs)
    event = None
    if plan.launch is not None:
        pointers = [view.pointer for view in views[: len(ARGUMENTS)]]
        values = (*pointers, key, offset, accepted, next_token)
        # Results on the host are copied there before the call returns: it waits, whoever keeps the order.
        held, by_events = (memory, views), depends_on is not None and not kind.on_host
        event = launch.run(
            plan.launch, plan.queue, plan.ordered, held, plan.scratch, *values, events=events, by_events=by_events
        )
        if stats is not None:
            tokens, lengths = views[0], views[ARGUMENTS.index("num_draft")]
            stats._record(plan.ordered, plan.queue, tokens, lengths, accepted, next_token, held, (event,), by_events)
    if out is None:
        result = _results(kind, plan, memory, start)
    else:
        if kind.on_host:
            write_results(kinds[1:], outputs, memory, start // 8)
        result = VerifyResult(*out)
    result.event = event
    return result


def _look_at(
    draft_tokens: Any,
    target_probs: Any,
    draft_probs: Any | None,
    uniform_accept: Any | None,
    uniform_sample: Any | None,
    seed: Any | None,
    num_draft: Any | None = None,
    deterministic_draft: Any | None = None,
    greedy: Any | None = None,
    dtype: str | None = None,
    out: Any | None = None,
) -> tuple[tuple[Kind, ...], Plan, list[View], int]:
    """The arguments' kind and those of the outputs, the plan, the views of all, and the key of all sequences.

    Views are in the order of `ARGUMENTS` and `OUTPUTS`, the latter where `out` is given.
    """
    kind = dlpack.kind_of(draft_tokens, "draft_tokens")
    key, keys = _key(seed, needed=uniform_accept is None or uniform_sample is None)
    optional = (draft_probs, uniform_accept, uniform_sample, keys, num_draft, deterministic_draft, greedy)
    views = [kind.view(draft_tokens, "draft_tokens"), _view(kind, target_probs, "target_probs")]
    for array, name in zip(optional, ARGUMENTS[2:]):
        views.append(ABSENT if array is None else _view(kind, array, name))
    if dtype is not None:
        _read_as(views, dtype)
    if out is None:
        return (kind,), find_plan((kind,), views), views, key
    out_kinds, out_views = output_pair(kind, out)
    views += out_views
    plan = find_plan((kind, *out_kinds), views)
    check_apart((*ARGUMENTS, *OUTPUTS), (*[kind] * len(ARGUMENTS), *out_kinds), views, plan.extents)
    return (kind, *out_kinds), plan, views, key


def _read_as(views: list[View], dtype: str) -> None:
    """Take uint16 probabilities for what their caller says that they are."""
    if dtype != "bfloat16":
        raise ValueError(f"`dtype` must say what uint16 probabilities hold: expected 'bfloat16' or None, got {dtype!r}")
    for name in ("target_probs", "draft_probs"):
        index = ARGUMENTS.index(name)
        if views[index].dtype == "u2":
            views[index] = views[index]._replace(dtype="bfloat16")


def _results(kind: Kind, plan: Plan, memory: Any, start: int) -> VerifyResult:
    """Both results, one behind the other from byte `start` of `memory`."""
    shape = (plan.batch,)
    first = start // 8
    return VerifyResult(
        kind.wrap(memory, first, shape, "i8", plan.queue),
        kind.wrap(memory, first + plan.batch, shape, "i8", plan.queue),
    )


class Prepared:
    """A call of `verify` on arrays that stay: `prepare` makes one.

    Attributes
    ----------
    result : VerifyResult
        Where every call writes.
    """

    def __init__(
        self,
        launch_: launch.Launch,
        queue: dpctl.SyclQueue,
        ordered: bool,
        counted: tuple[View, View, int, int],
        memory: object,
        result: VerifyResult,
    ):
        self._launch = launch_
        self._queue = queue
        self._ordered = ordered
        self._counted = counted  # what `AcceptanceStats._record` reads
        self._memory = memory
        self.result = result

    def __call__(
        self,
        offset: int = 0,
        *,
        stats: AcceptanceStats | None = None,
        depends_on: Sequence[dpctl.SyclEvent] | None = None,
    ) -> VerifyResult:
        """Verify what the arrays hold now; like `verify` with these arguments, but overwriting `result`."""
        offset = philox.check_offset(offset)
        if stats is not None:
            bind(stats, self._queue)
        events = () if depends_on is None else launch.awaited(self._queue, _events(depends_on))
        event = self.result.event = launch.run(
            self._launch,
            self._queue,
            self._ordered,
            self._memory,
            None,
            offset,
            events=events,
            by_events=depends_on is not None,
        )
        if stats is not None:
            stats._record(self._ordered, self._queue, *self._counted, self._memory, (event,), depends_on is not None)
        return self.result


def prepare(
    draft_tokens: Any,
    draft_probs: Any | None,
    target_probs: Any,
    uniform_accept: Any | None = None,
    uniform_sample: Any | None = None,
    *,
    num_draft: Any | None = None,
    deterministic_draft: Any | None = None,
    greedy: Any | None = None,
    dtype: str | None = None,
    seed: Any | None = None,
    out: tuple[Any, Any] | None = None,
) -> Prepared:
    """Prepare `verify` for a loop that writes its drafts into the same arrays at every step.

    The arguments are checked once and results are allocated once; a call then costs little more than its launch.

    Parameters
    ----------
    draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, num_draft, deterministic_draft, greedy, \
    dtype, seed, out
        As in `verify`; not arrays on the host, and with a contiguous vocabulary axis, since nothing is copied. They are
        kept alive. Without `seed` and uniforms, one seed is taken from the operating system for all calls.

    Returns
    -------
    Prepared
        `prepared(offset)` verifies what the arrays hold and returns `prepared.result`, always the same arrays: read
        them, or have the next operation on the queue read them, before the next call. It takes `stats` and `depends_on`
        as `verify` does.

    Raises
    ------
    TypeError, ValueError, BufferError
        As `verify` does, and if an argument would have to be copied.

    Notes
    -----
    Calls must not overlap: they share results and scratch. Those of one thread follow one another by themselves. Arrays
    of torch.xpu keep to the stream that was current when they were prepared.

    Examples
    --------
    >>> from specverify_dpex import UsmArray, prepare
    >>> draft_tokens = UsmArray.from_list([[1]], "int64")
    >>> draft_probs = UsmArray.from_list([[[0.5, 0.5]]], "float32")
    >>> target_probs = UsmArray.from_list([[[0.0, 1.0], [1.0, 0.0]]], "float32")
    >>> verify_step = prepare(draft_tokens, draft_probs, target_probs, seed=7)
    >>> [verify_step(offset).accepted.tolist() for offset in range(3)]
    [[1], [1], [1]]
    """
    kinds, plan, views, key = _look_at(
        draft_tokens,
        target_probs,
        draft_probs,
        uniform_accept,
        uniform_sample,
        seed,
        num_draft,
        deterministic_draft,
        greedy,
        dtype,
        out,
    )
    kind = kinds[0]
    for name, copied in zip(ARGUMENTS, plan.copied):
        if copied:
            raise ValueError(
                f"`{name}` must be in USM memory with its last axis contiguous: expected an array that kernels read in "
                f"place, got one that has to be copied ({kind.name}). Copy it to the device before, or use `verify`"
            )
    batch = plan.batch
    if batch == 0:
        raise ValueError("`draft_tokens` must have a sequence: expected batch >= 1, got 0")
    arguments = views[: len(ARGUMENTS)]
    memory: Any = None
    if out is None:
        memory, start = plan.results.allocate(16 * batch)
        result = _results(kind, plan, memory, start)
        accepted = memory._pointer + start
        next_token = accepted + 8 * batch
    else:
        result = VerifyResult(*out)
        accepted, next_token = (view.pointer for view in views[len(ARGUMENTS) :])
    block = plan.scratch.take()
    pointers = [view.pointer for view in arguments]
    bound = plan.launch_on(block._pointer, *pointers, key, 0, accepted, next_token)
    counted = (views[0], views[ARGUMENTS.index("num_draft")], accepted, next_token)
    owners = (memory, block, [view.owner for view in views])
    return Prepared(bound, plan.queue, plan.ordered, counted, owners, result)


def _view(kind: Kind, array: Any, argument: str) -> View:
    own = dlpack.kind_of(array, argument)
    if own is not kind:
        raise TypeError(
            f"`{argument}` must be of the same kind as `draft_tokens`: expected {kind.name}, got {own.name}. "
            "Convert one of them"
        )
    return kind.view(array, argument)


def _events(depends_on: Any) -> tuple[dpctl.SyclEvent, ...]:
    events = tuple(depends_on) if isinstance(depends_on, (list, tuple)) else (depends_on,)
    for event in events:
        if not isinstance(event, dpctl.SyclEvent):
            raise TypeError(f"`depends_on` must hold SYCL events: expected dpctl.SyclEvent, got {type(event).__name__}")
    return events


def _key(seed: Any | None, needed: bool) -> tuple[int, Any | None]:
    """The key of all sequences, or the array of each one's own."""
    if not needed:
        if seed is not None:
            raise ValueError(
                "`seed` must be None where both uniforms are given: nothing is drawn from it. "
                "Leave out the uniforms that it should draw"
            )
        return 0, None
    if seed is None:
        return philox.entropy_seed(), None
    if dlpack.is_array(seed):
        return 0, seed
    return philox.check_seed(seed), None


def device_uniforms(seed: Any, offset: int, batch: int, num_draft: int, like: Any) -> tuple[Any, Any]:
    """`philox.uniforms` on the queue of `like`, as arrays of its kind; batch and num_draft have been checked."""
    kind = dlpack.kind_of(like, "like")
    key, seeds = _key(seed, needed=True)
    keys = ABSENT if seeds is None else _view(kind, seeds, "seed")
    if keys is not ABSENT:
        check_array(kind, keys, "seed", "(batch,)", (batch,), "u8")
    offset = philox.check_offset(offset)
    queue = common_queue({"like": kind.view(like, "like"), "seed": keys}, {"seed": kind})
    if needs_copy(kind, keys, row=False):
        keys = kind.copy(keys)

    accept_count = batch * num_draft
    memory, start = kind.results(queue).allocate(4 * (2 * accept_count + batch))
    if batch:
        arguments = {
            "options": PHILOX_ROW_KEYS if keys is not ABSENT else 0,
            "keys": keys.pointer,
            "keys_batch": keys.strides[0],
            "seed": key,
            "offset": offset,
            "max_draft": num_draft,
            "uniform_accept": memory._pointer + start,
            "uniform_sample": memory._pointer + start + 4 * accept_count,
        }
        kernel = launch.kernel(queue, "uniforms")
        work_group = min(num_draft + 1, 64, kernel.max_work_group)
        draw = launch.Launch(kernel, queue, arguments, (batch,), work_group)
        launch.run(draw, queue, kind.ordered, (memory, keys.owner))
    return (
        kind.wrap(memory, start // 4, (batch, num_draft), "f4", queue),
        kind.wrap(memory, start // 4 + accept_count, (batch, num_draft + 1), "f4", queue),
    )
