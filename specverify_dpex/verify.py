"""The public functions: check, choose the split, launch, return."""

from __future__ import annotations

from typing import Any

import dpctl
from dpctl.memory import MemoryUSMDevice

from specverify_dpex import dlpack, launch, philox, tuning
from specverify_dpex.constants import MAX_VOCAB, PHILOX_ACCEPT, PHILOX_ROW_KEYS, PHILOX_SAMPLE
from specverify_dpex.dlpack import ABSENT, DTYPE_NAMES, Kind, View
from specverify_dpex.result import VerifyResult


def verify(
    draft_tokens: Any,
    draft_probs: Any | None,
    target_probs: Any,
    uniform_accept: Any | None = None,
    uniform_sample: Any | None = None,
    *,
    seed: Any | None = None,
    offset: int = 0,
) -> VerifyResult:
    """Keep the longest acceptable prefix of each draft and draw the token that follows it.

    The emitted tokens are distributed exactly as the target model's, to within 2**-44 per token and the resolution of
    the uniforms, and both outputs equal `specverify_dpex.reference.verify_scalar` bit for bit on every device.
    Speculative sampling of Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2).

    Parameters
    ----------
    draft_tokens : (batch, num_draft) int64
        The tokens that the draft model proposed. A negative token ends a sequence's drafts; one beyond the vocabulary
        is rejected.
    draft_probs : (batch, num_draft, vocab) float32, or None
        The draft model's distribution at each position. None: it put probability 1 on its token.
    target_probs : (batch, num_draft + 1, vocab) float32
        The target model's distribution at each position; the last row follows the last draft. vocab <= 2**20.
    uniform_accept : (batch, num_draft) float32 in [0, 1), optional
        A uniform for each acceptance test; drawn on the device from `seed` if not given.
    uniform_sample : (batch, num_draft + 1) float32 in [0, 1), optional
        The draw at position j uses `uniform_sample[:, j]`; drawn on the device from `seed` if not given.
    seed : int in [0, 2**64), or (batch,) uint64 array, optional
        Key of the uniforms that are not given. One number keys all sequences, which differ by their index in the
        batch; an array holds each sequence's own key, whatever its index. Taken from the operating system if None.
    offset : int in [0, 2**32)
        The caller's step counter: uniforms of different offsets are independent.

    Returns
    -------
    VerifyResult
        `accepted` and `next_token`, each (batch,) int64, of the arguments' kind of array, on their device and queue.

    Raises
    ------
    TypeError
        If an argument is not an array, its kind differs from the others' or its dtype is not the one above.
    ValueError
        If a shape, `seed` or `offset` is not as above, or the arrays are not on one queue.
    BufferError
        If the memory of an array cannot be reached.
    RuntimeError
        If numpy arrays are given and there is no device, or the device refuses a launch.

    Notes
    -----
    Work runs on the arrays' queue. dpnp and dpctl.tensor arrays with dpctl 0.18 or newer, and any array on an in-order
    queue with it, are returned without a host wait: what follows on the queue is ordered after it. Otherwise the call
    returns when the results are there. Memory is kept alive until the device is done with it. The vocabulary axis must
    be contiguous, or is copied once where the array's library can; the other axes may have any strides.

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
    kind = dlpack.kind_of(draft_tokens, "draft_tokens")
    tokens = _describe(kind, "draft_tokens", draft_tokens, "(batch, num_draft)", (None, None), "i8")
    batch, num_draft = tokens.shape
    rows = (batch, num_draft + 1)
    target = _describe(kind, "target_probs", target_probs, "(batch, num_draft + 1, vocab)", (*rows, None), "f4")
    vocab = target.shape[2]
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(
            f"`target_probs` must have 1 to 2**20 tokens along its last axis: got {vocab}. "
            "Cut the unused columns of a padded vocabulary off"
        )
    draft = accept = sample = ABSENT
    philox_bits = 0
    if draft_probs is not None:
        shape = (batch, num_draft, vocab)
        draft = _describe(kind, "draft_probs", draft_probs, "(batch, num_draft, vocab)", shape, "f4")
    if uniform_accept is None:
        philox_bits |= PHILOX_ACCEPT
    else:
        accept = _describe(kind, "uniform_accept", uniform_accept, "(batch, num_draft)", tokens.shape, "f4")
    if uniform_sample is None:
        philox_bits |= PHILOX_SAMPLE
    else:
        sample = _describe(kind, "uniform_sample", uniform_sample, "(batch, num_draft + 1)", rows, "f4")
    key, keys = _key(kind, seed, batch, needed=philox_bits != 0)
    if keys is not ABSENT:
        philox_bits |= PHILOX_ROW_KEYS
    offset = philox.check_offset(offset)
    views = {
        "target_probs": target,
        "draft_tokens": tokens,
        "draft_probs": draft,
        "uniform_accept": accept,
        "uniform_sample": sample,
        "seed": keys,
    }
    queue = _common_queue(views)

    # The checks end here: what follows copies and launches.
    if batch == 0:
        memory = MemoryUSMDevice(1, queue=queue)
        return VerifyResult(*(kind.wrap(memory, 0, (0,), "i8", queue) for _ in range(2)))
    target, tokens, draft, accept, sample, keys = (kind.on_device(view, name) for name, view in views.items())
    mass = launch.kernel(queue, "mass_f32")
    draw = launch.kernel(queue, "draw_f32")
    cut = tuning.launch_shape(batch, vocab, queue.sycl_device)
    slice_length = -(-vocab // cut.slices)

    # Results and scratch are one allocation, of this call alone: calls in flight share nothing.
    memory = MemoryUSMDevice(8 * batch * (3 + cut.slices), queue=queue)
    accepted, next_token, stops, slice_mass = (memory._pointer + 8 * batch * part for part in range(4))

    drafts = (tokens.pointer, *tokens.strides, draft.pointer, *draft.strides[:2], target.pointer, *target.strides[:2])
    source = (philox_bits, keys.pointer, keys.strides[0], key, offset)
    has_draft = int(draft is not ABSENT)
    mass_arguments = (
        *drafts,
        accept.pointer,
        *accept.strides[:2],
        *source,
        has_draft,
        num_draft,
        vocab,
        slice_length,
        stops,
        slice_mass,
    )
    draw_arguments = (
        *drafts,
        sample.pointer,
        *sample.strides[:2],
        *source,
        has_draft,
        vocab,
        slice_length,
        cut.slices,
        stops,
        slice_mass,
        accepted,
        next_token,
    )
    owners = [memory, *(view.owner for view in (target, tokens, draft, accept, sample, keys))]
    with launch.Sequence(queue, kind.ordered, owners) as sequence:
        sequence.launch(mass, mass_arguments, (batch, cut.slices), cut.mass_work_group)
        sequence.launch(draw, draw_arguments, (batch,), cut.draw_work_group)
    return VerifyResult(*(kind.wrap(memory, first, (batch,), "i8", queue) for first in (0, batch)))


def device_uniforms(seed: Any, offset: int, batch: int, num_draft: int, like: Any) -> tuple[Any, Any]:
    """`philox.uniforms` on the queue of `like`, as arrays of its kind; batch and num_draft have been checked."""
    kind = dlpack.kind_of(like, "like")
    key, keys = _key(kind, seed, batch, needed=True)
    offset = philox.check_offset(offset)
    queue = _common_queue({"like": kind.view(like, "like"), "seed": keys})
    keys = kind.on_device(keys, "seed")

    accept_count = batch * num_draft
    memory = MemoryUSMDevice(max(4 * (2 * accept_count + batch), 1), queue=queue)
    if batch:
        arguments = (
            PHILOX_ROW_KEYS if keys is not ABSENT else 0,
            keys.pointer,
            keys.strides[0],
            key,
            offset,
            num_draft,
            memory._pointer,
            memory._pointer + 4 * accept_count,
        )
        with launch.Sequence(queue, kind.ordered, [memory, keys.owner]) as sequence:
            sequence.launch(launch.kernel(queue, "uniforms"), arguments, (batch,), min(num_draft + 1, 64))
    return (
        kind.wrap(memory, 0, (batch, num_draft), "f4", queue),
        kind.wrap(memory, accept_count, (batch, num_draft + 1), "f4", queue),
    )


def _describe(kind: Kind, name: str, array: Any, axes: str, shape: tuple[int | None, ...], dtype: str) -> View:
    """The view of an argument after its kind, dtype and every axis were checked; None in `shape` is any extent."""
    own = dlpack.kind_of(array, name)
    if own is not kind:
        raise TypeError(
            f"`{name}` must be of the same kind as `draft_tokens`: expected {kind.name}, got {own.name}. "
            "Convert one of them"
        )
    view = kind.view(array, name)
    if view.dtype != dtype:
        expected = DTYPE_NAMES[dtype]
        raise TypeError(
            f"`{name}` must have dtype {expected}: got {DTYPE_NAMES.get(view.dtype, view.dtype)}. "
            f"Convert it, for example with {name}.astype({expected!r})"
        )
    if len(view.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, view.shape)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(
            f"`{name}` must have shape {axes}: expected ({wanted}{',' if len(shape) == 1 else ''}), got {view.shape}"
        )
    return view


def _key(kind: Kind, seed: Any | None, batch: int, needed: bool) -> tuple[int, View]:
    """The key of all sequences, or the array of each one's own."""
    if not needed:
        if seed is not None:
            raise ValueError(
                "`seed` must be None where both uniforms are given: nothing is drawn from it. "
                "Leave out the uniforms that it should draw"
            )
        return 0, ABSENT
    if seed is None:
        return philox.entropy_seed(), ABSENT
    if not (getattr(seed, "shape", ()) or hasattr(seed, "__sycl_usm_array_interface__")):
        return philox.check_seed(seed), ABSENT
    return 0, _describe(kind, "seed", seed, "(batch,)", (batch,), "u8")


def _common_queue(views: dict[str, View]) -> dpctl.SyclQueue:
    """The one queue of the arguments; arrays without elements may be on none."""
    (first, view), *others = views.items()
    queue = view.queue or dlpack.default_queue()
    for name, view in others:
        if view.queue is not None and view.queue != queue:
            raise ValueError(
                f"`{name}` must be on the queue of `{first}`: expected {_place(queue)}, got {_place(view.queue)}. "
                f"Copy it there, for example with its `to_device({first}.sycl_queue)`"
            )
    return queue


def _place(queue: dpctl.SyclQueue) -> str:
    return f"the queue at {queue.addressof_ref():#x} of {queue.sycl_device.name.strip()}"
