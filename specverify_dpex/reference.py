"""The specification in code: what verification computes, twice, without a device.

`verify` is vectorised numpy, fast enough to check every step of a decoding loop. `verify_scalar` is plain
Python on one number at a time, slow, and shares no arithmetic with it. The two agree bit for bit with each
other and with the kernels. Both are written in the order of the specification: acceptance, weights, draw, and
the walk of greedy sequences, which needs none of the three.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Callable, NamedTuple

import numpy as np
import numpy.typing as npt

from specverify_dpex.philox import (
    STREAM_ACCEPT,
    STREAM_SAMPLE,
    check_offset,
    row_keys,
    uniform_scalar,
    uniforms,
)
from specverify_dpex.result import VerifyResult

WEIGHT_BITS = 44
"""Weights are integers in units of 2**-44: up to 2**20 of them add up in 64 bits, in any order."""

SMALLEST_NORMAL = 2.0**-126
"""The smallest normal float32. A target below it rejects, since devices may flush subnormals to zero."""

# About 10 MB of temporaries: small vocabularies run many rows at a time, large ones stay in the cache.
_ELEMENTS_AT_ONCE = 2**18

_Array = npt.NDArray[Any]


def verify(
    draft_tokens: npt.ArrayLike,
    draft_probs: npt.ArrayLike | None,
    target_probs: npt.ArrayLike,
    uniform_accept: npt.ArrayLike | None = None,
    uniform_sample: npt.ArrayLike | None = None,
    *,
    num_draft: npt.ArrayLike | None = None,
    deterministic_draft: npt.ArrayLike | None = None,
    greedy: npt.ArrayLike | None = None,
    dtype: str | None = None,
    seed: Any = None,
    offset: int = 0,
) -> VerifyResult:
    """Verify a batch of drafts with numpy: the accepted prefix of each, and the token that follows it.

    The emitted tokens are distributed as the target model's own, whatever the draft model proposed: Leviathan
    et al., "Fast inference from transformers via speculative decoding", 2023, Algorithm 1. Equal inputs give
    equal outputs: sums are over integers and comparisons are exact, so nothing depends on the machine or on
    the order of work.

    Parameters
    ----------
    draft_tokens : (batch, K) int64 or int32
        The tokens that the draft model proposed. A negative token ends the draft of its row (padding); one
        beyond the target's vocabulary is rejected.
    draft_probs : (batch, K, draft_vocab) float32, float16 or bfloat16, or None
        The distributions that `draft_tokens` were drawn from, draft_vocab <= vocab: columns that are missing
        count as probability 0. None: each token was chosen with probability 1.
    target_probs : (batch, K + 1, vocab) float32, float16 or bfloat16, whichever `draft_probs` has
        The target model's distributions; the last row is the bonus row. vocab is at most 2**20.
    uniform_accept : (batch, K) float32 in [0, 1), optional
        One uniform for each acceptance test. Missing: drawn from Philox with `seed` and `offset`.
    uniform_sample : (batch, K + 1) float32 in [0, 1), optional
        The draw at position j uses column j. Missing: drawn likewise. The two must be independent of each
        other and of the draft's own noise: one buffer passed for both biases the output.
    num_draft : (batch,) int64 or int32, optional
        How many of its K positions hold proposals of a sequence, which end at its first negative token if
        that comes before. Values outside [0, K] count as the nearer end. Missing: K.
    deterministic_draft : (batch,) bool, optional
        The sequences whose tokens count as chosen with probability 1, whatever `draft_probs` holds for them.
        None where `draft_probs` is: all do.
    greedy : (batch,) bool, optional
        The sequences that follow the target's largest value: a token is accepted iff it is the argmax of the
        target row, and next_token is the argmax of the row where the walk stopped. The argmax is the lowest
        index among the largest of the values that are not NaN, compared as float32 numbers: -0 equals 0 and
        subnormals count. A row of NaN alone has none: it rejects, and next_token is -1. Any values will do,
        logits as well; draft probabilities, uniforms and seeds have no part in it.
    dtype : "bfloat16", optional
        uint16 probabilities are bfloat16 bit patterns. Those of another dtype are what their dtype says.
    seed : int in [0, 2**64), or (batch,) of them, optional
        See `specverify_dpex.philox.uniforms`. Missing: taken from the operating system.
    offset : int in [0, 2**32)
        The caller's step counter.

    Returns
    -------
    VerifyResult
        `accepted` (batch,) int64 in [0, K] and `next_token` (batch,) int64 in [0, vocab), or -1 where the
        target row has no mass, or no number at all if the sequence is greedy.

    Raises
    ------
    TypeError, ValueError
        If `seed` or `offset` is not an integer in its range, needed or not; if `dtype` is unknown, or missing
        where probabilities are uint16; if `deterministic_draft` is given without `draft_probs`.

    Notes
    -----
    Other shapes and dtypes are assumed valid: `specverify_dpex.verify` checks them. Values are not assumed to
    be anything: NaN, infinities, negatives and rows that do not sum to 1 have defined answers and raise no
    warning. float16 and bfloat16 are widened to float32 before anything is computed. Of each sequence's rows
    only the one where the walk stopped is read in full, and those before it if the sequence is greedy, a few
    rows at a time.

    Examples
    --------
    The target halves the probability of token 0, and 0.75 is not below one half: rejected. The residual is
    all on token 1.

    >>> import numpy as np
    >>> result = verify(
    ...     np.array([[0]]),
    ...     np.array([[[0.5, 0.5]]], np.float32),
    ...     np.array([[[0.25, 0.75], [1.0, 0.0]]], np.float32),
    ...     uniform_accept=np.array([[0.75]], np.float32),
    ...     uniform_sample=np.array([[0.1, 0.1]], np.float32),
    ... )
    >>> result.accepted.tolist(), result.next_token.tolist()
    ([0], [1])
    """
    offset = check_offset(offset)
    target = _probabilities(target_probs, "target_probs", dtype)
    batch, positions, _ = target.shape
    draft = _Draft(
        _proposals(draft_tokens, num_draft, positions),
        None if draft_probs is None else _probabilities(draft_probs, "draft_probs", dtype),
        _certain(draft_probs, deterministic_draft, batch),
    )
    is_greedy = np.zeros(batch, dtype=bool) if greedy is None else np.asarray(greedy, dtype=bool)
    drawn = _missing_uniforms(uniform_accept, uniform_sample, seed, offset, batch, positions - 1)
    accept, sample = (np.asarray(uniform, dtype=np.float32) for uniform in drawn)

    next_token = np.empty(batch, dtype=np.int64)
    sampled, followed = np.flatnonzero(~is_greedy), np.flatnonzero(is_greedy)
    # NaN, inf - inf and overflow are inputs with defined answers, not accidents.
    with np.errstate(all="ignore"):
        accepted = _accepted_prefix(draft, target, accept)
        next_token[sampled] = _next_tokens(sampled, accepted[sampled], draft, target, sample)
        accepted[followed], next_token[followed] = _follow(followed, draft.tokens, target)
    return VerifyResult(accepted, next_token)


class _Draft(NamedTuple):
    """What the draft model proposed, and how it chose."""

    tokens: _Array
    """(batch, K + 1) int64: the proposals, -1 where there is none, as in the last column."""

    probs: _Array | None
    """(batch, K, draft_vocab): None where no sequence needs it."""

    certain: _Array
    """(batch,) bool: the sequences whose proposals had probability 1, which do not read `probs`."""


def _proposals(draft_tokens: npt.ArrayLike, num_draft: npt.ArrayLike | None, positions: int) -> _Array:
    """The tokens that are proposed, -1 from where `num_draft` ends them: (batch, positions) int64."""
    tokens = np.asarray(draft_tokens, dtype=np.int64)
    proposals = np.full((len(tokens), positions), -1, dtype=np.int64)
    proposals[:, :-1] = tokens
    if num_draft is not None:
        proposals[np.arange(positions) >= np.asarray(num_draft, dtype=np.int64)[:, None]] = -1
    return proposals


def _certain(draft_probs: object, deterministic_draft: npt.ArrayLike | None, batch: int) -> _Array:
    """The sequences whose proposals count as chosen with probability 1: (batch,) bool."""
    if deterministic_draft is None:
        return np.full(batch, draft_probs is None)
    _check_deterministic(draft_probs)
    return np.asarray(deterministic_draft, dtype=bool)


def _check_deterministic(draft_probs: object) -> None:
    """Raise if a `deterministic_draft` has no draft probabilities to choose from."""
    if draft_probs is None:
        raise ValueError(
            "`deterministic_draft` must be None where `draft_probs` is: expected None, got a mask. "
            "Leave it out: the drafts of all sequences are deterministic."
        )


def _probabilities(probs: npt.ArrayLike, name: str, dtype: str | None) -> _Array:
    """An array as it is, bfloat16 as uint16 bit patterns; nested sequences of Python floats as float32."""
    _holds_bits(probs, name, dtype)
    if not hasattr(probs, "dtype"):
        return np.asarray(probs, dtype=np.float32)
    array = np.asarray(probs)
    # The dtype of that name is another package's, and numpy does not compute with it.
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _holds_bits(probs: object, name: str, dtype: str | None) -> bool:
    """Whether an array is of uint16, which must then be said to be bfloat16 bit patterns."""
    if dtype not in (None, "bfloat16"):
        raise ValueError(
            f'`dtype` must be None or "bfloat16": expected one of them, got {dtype!r}. '
            "Only bfloat16 in uint16 arrays has to be named."
        )
    bits = getattr(getattr(probs, "dtype", None), "name", None) == "uint16"
    if bits and dtype is None:
        raise TypeError(
            f"`{name}` must hold floating-point numbers: expected float32, float16 or bfloat16, got uint16. "
            'Pass dtype="bfloat16" if these are bfloat16 bit patterns.'
        )
    return bits


def _widened(values: _Array) -> _Array:
    """float32 of an array of probabilities; uint16 is the upper half of a float32, which bfloat16 is."""
    if values.dtype.name == "uint16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def _missing_uniforms(
    uniform_accept: npt.ArrayLike | None,
    uniform_sample: npt.ArrayLike | None,
    seed: Any,
    offset: int,
    batch: int,
    num_draft: int,
) -> tuple[npt.ArrayLike, npt.ArrayLike]:
    """The uniforms that were given, and Philox for those that were not."""
    if uniform_accept is not None and uniform_sample is not None:
        row_keys(seed, batch)  # a wrong seed is an error even where none is needed
        return uniform_accept, uniform_sample
    accept, sample = uniforms(seed, offset, batch, num_draft)
    return (
        accept if uniform_accept is None else uniform_accept,
        sample if uniform_sample is None else uniform_sample,
    )


# 1. Acceptance


def _accepted_prefix(draft: _Draft, target_probs: _Array, uniform: _Array) -> _Array:
    """How many positions come before the first that does not accept: (batch,) int64."""
    tokens = draft.tokens[:, :-1]
    # Padding ends the walk and a token beyond the vocabulary rejects; neither is looked up.
    proposed = (tokens >= 0) & (tokens < target_probs.shape[2])
    target_at = _at_tokens(target_probs, tokens)
    draft_at = np.ones_like(target_at)
    if draft.probs is not None:
        draft_at = np.where(draft.certain[:, None], draft_at, _at_tokens(draft.probs, tokens))
    accepts = proposed & _accepts(target_at, draft_at, uniform)
    return np.logical_and.accumulate(accepts, axis=1).sum(axis=1, dtype=np.int64)


def _at_tokens(probs: _Array, tokens: _Array) -> _Array:
    """The probability of one token of each row, 0 where the row lacks its column: (batch, K) float32."""
    at = np.zeros(tokens.shape, dtype=np.float32)
    rows, positions = np.nonzero((tokens >= 0) & (tokens < probs.shape[2]))
    at[rows, positions] = _widened(probs[rows, positions, tokens[rows, positions]])
    return at


def _accepts(target: _Array, draft: _Array, uniform: _Array) -> _Array:
    """Whether each proposal is accepted, given its target and draft probabilities and its uniform."""
    target_capped = np.minimum(target, np.float32(1)).astype(np.float64)
    draft_capped = np.minimum(draft, np.float32(1)).astype(np.float64)
    # Exact: 24 bits times 24 bits fit the 53 of a float64, and wherever this decides, 2**-126 < draft <= 1,
    # so no finite uniform comes near the ends of its range.
    below_ratio = uniform.astype(np.float64) * draft_capped < target_capped
    return (
        ~np.isnan(target)
        & ~np.isnan(draft)
        & (target_capped >= SMALLEST_NORMAL)
        & ((target_capped >= draft_capped) | below_ratio)
    )


# 2. Weights


def _next_tokens(
    rows: _Array, positions: _Array, draft: _Draft, target_probs: _Array, uniform_sample: _Array
) -> _Array:
    """Draw the token at a position of each of `rows`, a block of them at a time: (rows,) int64."""
    next_token = np.empty(len(rows), dtype=np.int64)
    for block in _blocks(len(rows), target_probs):
        weights = _weights(rows[block], positions[block], draft, target_probs)
        next_token[block] = _draw(weights, uniform_sample[rows[block], positions[block]])
    return next_token


def _blocks(count: int, probs: _Array) -> list[slice]:
    """Cut `count` rows of `probs` into slices that are worked on at once."""
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // probs.shape[2])
    return [slice(start, start + rows_at_once) for start in range(0, count, rows_at_once)]


def _weights(rows: _Array, positions: _Array, draft: _Draft, target_probs: _Array) -> _Array:
    """The weights that the next token of each of `rows` is drawn from: (rows, vocab) uint64."""
    target = _rows_at(target_probs, rows, positions)
    # What stopped the walk: a rejected token, or a negative one where the draft ended or was all accepted.
    stopped_by = draft.tokens[rows, positions]
    rejected, certain = stopped_by >= 0, draft.certain[rows]

    residual = target.copy()
    known = np.flatnonzero(rejected & certain & (stopped_by < target.shape[1]))
    residual[known, stopped_by[known]] = 0
    if draft.probs is not None:
        drawn = np.flatnonzero(rejected & ~certain)
        columns = draft.probs.shape[2]  # behind them the draft has 0 and the residual is the target
        draft_rows = _rows_at(draft.probs, rows[drawn], positions[drawn])
        residual[drawn, :columns] = _residual(target[drawn, :columns], draft_rows)
    weights = _weight(residual)
    empty = ~weights.any(axis=1)
    weights[empty] = _weight(target[empty])
    return weights


def _rows_at(probs: _Array, rows: _Array, positions: _Array) -> _Array:
    """One row of each sequence, widened to float32: (rows, vocab)."""
    return _widened(probs[rows, positions])


def _residual(target: _Array, draft: _Array) -> _Array:
    """What the target has more than the draft, in float32; a weight takes its positive part."""
    return target - draft


def _weight(probs: _Array) -> _Array:
    """floor(2**44 * min(max(r, 0), 1)) and 0 for NaN, as uint64."""
    # By comparison, which NaN fails; fmax would pass a signalling NaN on. The product by a power of two is
    # exact in float32, and the cast truncates, which is floor here. By way of int64, for processors that
    # cannot cast to uint64.
    capped = np.where(probs > 0, np.minimum(probs, np.float32(1)), np.float32(0))
    return (capped * np.float32(2**WEIGHT_BITS)).astype(np.int64).view(np.uint64)


# 3. Draw


def _draw(weights: _Array, uniform: _Array) -> _Array:
    """The first token of each row whose running total exceeds the threshold, -1 where there is no weight."""
    running = np.cumsum(weights, axis=1, dtype=np.uint64)
    total = running[:, -1]
    # 2**20 weights of 2**44 make 2**64, which wraps to zero: the only total that does. Its last weight tells
    # it from a row without weight.
    wrapped = (total == 0) & (weights[:, -1] > 0)
    high = np.where(wrapped, np.uint64(2**32), total >> np.uint64(32))
    low = total & np.uint64(2**32 - 1)
    threshold = _threshold(_fixed_point(uniform), high, low)
    # The threshold is below the total, so the last running total, which may have wrapped, is not compared.
    token = np.count_nonzero(running[:, :-1] <= threshold[:, None], axis=1)
    return np.where((total == 0) & ~wrapped, -1, token)


def _fixed_point(uniform: _Array) -> _Array:
    """floor(2**32 * uniform), clamped to 32 bits and 0 for NaN, as uint64."""
    scaled = uniform.astype(np.float64) * 2.0**32
    return np.where(scaled > 0, np.minimum(scaled, 2.0**32 - 1), 0.0).astype(np.uint64)


def _threshold(fraction: _Array, total_high: _Array, total_low: _Array) -> _Array:
    """floor(fraction * total / 2**32) for a 32-bit fraction: a product of 96 bits, by halves of the total."""
    return fraction * total_high + ((fraction * total_low) >> np.uint64(32))


# Greedy sequences


def _follow(rows: _Array, tokens: _Array, target_probs: _Array) -> tuple[_Array, _Array]:
    """Walk along the target's largest values: how far each of `rows` comes, and the token there."""
    accepted = np.zeros(len(rows), dtype=np.int64)
    next_token = np.empty(len(rows), dtype=np.int64)
    walking = np.arange(len(rows))
    for position in range(tokens.shape[1]):
        next_token[walking] = _largest(rows[walking], position, target_probs)
        proposed = tokens[rows[walking], position]
        # A row of NaN and a missing proposal are both -1, and do not agree.
        walking = walking[(proposed >= 0) & (proposed == next_token[walking])]
        accepted[walking] += 1
    return accepted, next_token


def _largest(rows: _Array, position: int, probs: _Array) -> _Array:
    """The argmax of the row at a position of each of `rows`, a block of them at a time: (rows,) int64."""
    largest = np.empty(len(rows), dtype=np.int64)
    for block in _blocks(len(rows), probs):
        positions = np.full(len(rows[block]), position)
        largest[block] = _argmax(_rows_at(probs, rows[block], positions))
    return largest


def _argmax(values: _Array) -> _Array:
    """The first of the largest numbers of each row, -1 where all are NaN."""
    # As integers in the order of the numbers, so that no processor's mode flushes subnormals. Both zeros are 0.
    bits = values.view(np.int32)
    magnitude = bits & np.int32(0x7FFFFFFF)
    order = np.where(bits < 0, -magnitude, magnitude)
    nan = np.iinfo(np.int32).min
    order[magnitude > np.int32(0x7F800000)] = nan
    first = order.argmax(axis=1)
    return np.where(order[np.arange(len(order)), first] == nan, -1, first)


# What a batch emits


def emitted_tokens(
    draft_tokens: npt.ArrayLike, accepted: npt.ArrayLike, next_token: npt.ArrayLike
) -> npt.NDArray[np.int64]:
    """Put the accepted prefix of each sequence and the token that follows it into one array, -1 behind them.

    Parameters
    ----------
    draft_tokens : (batch, K) int64 or int32
    accepted, next_token : (batch,) int64
        What `verify` returned. An `accepted` outside [0, K] counts as the nearer end.

    Returns
    -------
    (batch, K + 1) int64
        The draft's token at positions below `accepted`, `next_token` at `accepted`, -1 behind.

    Examples
    --------
    >>> emitted_tokens([[7, 8, 9], [4, 5, 6]], accepted=[2, 0], next_token=[3, 1]).tolist()
    [[7, 8, 3, -1], [1, -1, -1, -1]]
    """
    tokens = np.asarray(draft_tokens, dtype=np.int64)
    batch, max_draft = tokens.shape
    last = np.clip(np.asarray(accepted, dtype=np.int64), 0, max_draft)
    emitted = np.full((batch, max_draft + 1), -1, dtype=np.int64)
    emitted[:, :-1] = tokens
    emitted[np.arange(max_draft + 1) > last[:, None]] = -1
    emitted[np.arange(batch), last] = next_token
    return emitted


# The same once more, on one number at a time: Python floats, which hold every float32, ints and fractions.


def verify_scalar(
    draft_tokens: Sequence[Sequence[int]] | _Array,
    draft_probs: Sequence[Sequence[Sequence[float]]] | _Array | None,
    target_probs: Sequence[Sequence[Sequence[float]]] | _Array,
    uniform_accept: Sequence[Sequence[float]] | _Array | None = None,
    uniform_sample: Sequence[Sequence[float]] | _Array | None = None,
    *,
    num_draft: Sequence[int] | _Array | None = None,
    deterministic_draft: Sequence[bool] | _Array | None = None,
    greedy: Sequence[bool] | _Array | None = None,
    dtype: str | None = None,
    seed: Any = None,
    offset: int = 0,
) -> VerifyResult:
    """Verify a batch of drafts in plain Python, one number at a time: the oracle of `verify` and the kernels.

    Parameters and guarantee are those of `verify`. The arrays may also be nested sequences; Python floats
    that float32 does not hold are rounded to it.

    Returns
    -------
    VerifyResult
        `accepted` and `next_token`, each a list of batch ints.

    Raises
    ------
    TypeError, ValueError
        As `verify` does.

    Notes
    -----
    Only what the walk reaches is read: tokens, rows and uniforms after the stop are not touched, nor the draft
    rows of sequences with a deterministic draft, nor the draft rows and uniforms of greedy sequences.

    Examples
    --------
    >>> verify_scalar([[0]], [[[0.5, 0.5]]], [[[0.25, 0.75], [1, 0]]], [[0.75]], [[0.1, 0.1]])
    VerifyResult(accepted=[0], next_token=[1])
    """
    offset = check_offset(offset)
    batch = len(target_probs)
    keys, key_rows = row_keys(seed, batch)
    target_numbers = _numbers_of(target_probs, "target_probs", dtype)
    draft_numbers = _numbers_of(draft_probs, "draft_probs", dtype)
    if deterministic_draft is not None:
        _check_deterministic(draft_probs)

    accepted, next_token = [], []
    for row in range(batch):
        max_draft = len(target_probs[row]) - 1
        certain = draft_probs is None if deterministic_draft is None else deterministic_draft[row]
        sequence = _Sequence(
            tokens=draft_tokens[row],
            length=max_draft if num_draft is None else min(int(num_draft[row]), max_draft),
            draft=None if draft_probs is None or certain else _Rows(draft_probs[row], draft_numbers),
            target=_Rows(target_probs[row], target_numbers),
        )
        if greedy is not None and greedy[row]:
            stop, token = _scalar_follow(sequence)
        else:
            drawn = keys[row], key_rows[row], offset
            accept = _Uniforms(None if uniform_accept is None else uniform_accept[row], drawn, STREAM_ACCEPT)
            sample = _Uniforms(None if uniform_sample is None else uniform_sample[row], drawn, STREAM_SAMPLE)
            stop, token = _scalar_sample(sequence, accept, sample)
        accepted.append(stop)
        next_token.append(token)
    return VerifyResult(accepted, next_token)


class _Rows(NamedTuple):
    """The rows of one model for one sequence, made numbers where they are looked at."""

    rows: Any
    numbers: Callable[[Any], list[float]]

    def row(self, position: int) -> list[float]:
        """All values at a position."""
        return self.numbers(self.rows[position])

    def at(self, position: int, token: int) -> float:
        """The value of one token at a position, 0 where the row lacks its column."""
        row = self.rows[position]
        return self.numbers([row[token]])[0] if token < len(row) else 0.0


class _Sequence(NamedTuple):
    """One sequence of the batch; `draft` is None where the draft put probability 1 on its tokens."""

    tokens: Any
    length: int
    draft: _Rows | None
    target: _Rows

    def proposal(self, position: int) -> int | None:
        """The token proposed at a position, None where the drafts have ended."""
        if position >= self.length:
            return None
        token = int(self.tokens[position])
        return token if token >= 0 else None


class _Uniforms(NamedTuple):
    """One sequence's uniforms of one stream: given, or drawn with its key, row word and offset."""

    given: Any
    drawn: tuple[int, int, int]
    stream: int

    def at(self, position: int) -> float:
        if self.given is not None:
            return _float32(self.given[position])
        key, row, offset = self.drawn
        return uniform_scalar(key, position, row, offset, self.stream)


def _scalar_sample(sequence: _Sequence, accept: _Uniforms, sample: _Uniforms) -> tuple[int, int]:
    """Sections 1 to 3 for one sequence: how many are accepted, and the next token."""
    draft, target = sequence.draft, sequence.target
    stop = 0
    token = sequence.proposal(stop)
    while token is not None:
        draft_at = 1.0 if draft is None else draft.at(stop, token)
        if not _proposal_accepts(target.at(stop, token), draft_at, accept.at(stop)):
            break
        stop += 1
        token = sequence.proposal(stop)
    draft_row = None if draft is None or token is None else draft.row(stop)
    weights = _scalar_weights(token, draft_row, target.row(stop))
    return stop, _scalar_draw(weights, sample.at(stop))


def _scalar_follow(sequence: _Sequence) -> tuple[int, int]:
    """One greedy sequence: how many are accepted, and the next token."""
    position = 0
    while True:
        largest = _scalar_argmax(sequence.target.row(position))
        if sequence.proposal(position) != largest:
            return position, largest
        position += 1


def _scalar_argmax(values: list[float]) -> int:
    """The first of the largest numbers, -1 where all are NaN; no float32 is subnormal among Python floats."""
    numbers = [value for value in values if not math.isnan(value)]
    return values.index(max(numbers)) if numbers else -1


def _numbers_of(probs: object, name: str, dtype: str | None) -> Callable[[Any], list[float]]:
    """What makes float32 numbers of the values of `probs`."""
    return _bfloat16_row if _holds_bits(probs, name, dtype) else _float32_row


def _bfloat16_row(values: Sequence[int] | _Array) -> list[float]:
    """The numbers that bfloat16 bit patterns stand for: each is the upper half of a float32."""
    words = [int(bits) << 16 for bits in values]
    return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *words)))


def _float32(value: float) -> float:
    """The float32 nearest to a number, as a Python float."""
    value = float(value)
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:  # how struct says that a finite value rounds to infinity
        rounded = math.copysign(math.inf, value)
    return rounded


def _float32_row(values: Sequence[float] | _Array) -> list[float]:
    """`_float32` of each number, in one call of struct where nothing overflows: rows are long."""
    layout = f"<{len(values)}f"
    try:
        return list(struct.unpack(layout, struct.pack(layout, *values)))
    except OverflowError:
        return [_float32(value) for value in values]


def _proposal_accepts(target: float, draft: float, uniform: float) -> bool:
    """Section 1 for one proposal; a token beyond the vocabulary has nothing in the target."""
    if math.isnan(target) or math.isnan(draft):
        return False
    target, draft = min(target, 1.0), min(draft, 1.0)
    if target < SMALLEST_NORMAL:
        return False
    if target >= draft:
        return True
    if not math.isfinite(uniform):
        return uniform == -math.inf  # the draft is positive here, and fractions have no infinity
    return Fraction(uniform) * Fraction(draft) < Fraction(target)


def _scalar_weights(token: int | None, draft: list[float] | None, target: list[float]) -> list[int]:
    """Section 2 for one row, after a rejected token; `token` is None where none was rejected.

    `draft` is None where it put probability 1 on its token, and may have fewer columns than the target.
    """
    weights = [_scalar_weight(value) for value in target]
    if token is None:
        chosen = weights
    elif draft is None:
        chosen = [0 if other == token else weight for other, weight in enumerate(weights)]
    else:
        # Rounded twice, to float64 and to float32, yet equal to rounding once: 53 >= 2 * 24 + 2 bits
        # (Figueroa, "When is double rounding innocuous?", 1995), and differences among subnormals are exact.
        padded = draft + [0.0] * (len(target) - len(draft))
        residual = _float32_row(list(map(operator.sub, target, padded)))
        chosen = [_scalar_weight(value) for value in residual]
    return chosen if any(chosen) else weights


def _scalar_weight(value: float) -> int:
    """floor(2**44 * min(max(value, 0), 1)) and 0 for NaN."""
    if not value > 0:
        return 0
    return int(math.ldexp(min(value, 1.0), WEIGHT_BITS))


def _scalar_draw(weights: list[int], uniform: float) -> int:
    """Section 3 for one row."""
    if not uniform > 0:
        fraction = 0
    elif uniform >= 1:
        fraction = 2**32 - 1
    else:
        fraction = int(math.ldexp(uniform, 32))
    threshold = fraction * sum(weights) >> 32
    return next((token for token, running in enumerate(accumulate(weights)) if running > threshold), -1)
