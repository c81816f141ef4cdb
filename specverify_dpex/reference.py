"""The specification in code: what verification computes, twice, without a device.

`verify` is vectorised numpy, fast enough to check every step of a decoding loop. `verify_scalar` is plain
Python on one number at a time, slow, and shares no arithmetic with it. The two agree bit for bit with each
other and with the kernels. Both are written in the order of the specification: acceptance, weights, draw.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

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
    draft_tokens : (batch, num_draft) int64 or int32
        The tokens that the draft model proposed. A negative token ends the draft of its row (padding).
    draft_probs : (batch, num_draft, vocab) float32 or float16, or None
        The distributions that `draft_tokens` were drawn from. None: each token was chosen with probability 1.
    target_probs : (batch, num_draft + 1, vocab), dtype as `draft_probs`
        The target model's distributions; the last row is the bonus row. vocab is at most 2**20.
    uniform_accept : (batch, num_draft) float32 in [0, 1), optional
        One uniform for each acceptance test. Missing: drawn from Philox with `seed` and `offset`.
    uniform_sample : (batch, num_draft + 1) float32 in [0, 1), optional
        The draw at position j uses column j. Missing: drawn likewise. The two must be independent of each
        other and of the draft's own noise: one buffer passed for both biases the output.
    seed : int in [0, 2**64), or (batch,) of them, optional
        See `specverify_dpex.philox.uniforms`. Missing: taken from the operating system.
    offset : int in [0, 2**32)
        The caller's step counter.

    Returns
    -------
    VerifyResult
        `accepted` (batch,) int64 in [0, num_draft] and `next_token` (batch,) int64 in [0, vocab), or -1 where
        the target row has no mass.

    Raises
    ------
    TypeError, ValueError
        If `seed` or `offset` is not an integer in its range, needed or not.

    Notes
    -----
    Shapes and dtypes are assumed valid: `specverify_dpex.verify` checks them. Values are not assumed to be
    anything: NaN, infinities, negatives and rows that do not sum to 1 have defined answers and raise no
    warning. Of each sequence's rows only the one where the walk stopped is read in full, a few rows at a
    time.

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
    tokens = np.asarray(draft_tokens, dtype=np.int64)
    draft = None if draft_probs is None else _probabilities(draft_probs)
    target = _probabilities(target_probs)
    batch, num_draft = target.shape[0], target.shape[1] - 1
    drawn = _missing_uniforms(uniform_accept, uniform_sample, seed, offset, batch, num_draft)
    accept, sample = (np.asarray(uniform, dtype=np.float32) for uniform in drawn)

    # NaN, inf - inf and overflow are inputs with defined answers, not accidents.
    with np.errstate(all="ignore"):
        accepted = _accepted_prefix(tokens, draft, target, accept)
        next_token = _next_tokens(accepted, tokens, draft, target, sample)
    return VerifyResult(accepted, next_token)


def _probabilities(probs: npt.ArrayLike) -> _Array:
    """An array as it is; nested sequences of Python floats as float32."""
    return np.asarray(probs) if hasattr(probs, "dtype") else np.asarray(probs, dtype=np.float32)


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


def _accepted_prefix(tokens: _Array, draft_probs: _Array | None, target_probs: _Array, uniform: _Array) -> _Array:
    """How many positions come before the first that does not accept: (batch,) int64."""
    num_draft, vocab = tokens.shape[1], target_probs.shape[2]
    # Padding ends the walk and a token beyond the vocabulary rejects; neither is looked up.
    proposed = (tokens >= 0) & (tokens < vocab)
    index = np.where(proposed, tokens, 0)
    target = _at_tokens(target_probs[:, :num_draft], index)
    draft = np.ones_like(target) if draft_probs is None else _at_tokens(draft_probs, index)
    accepts = proposed & _accepts(target, draft, uniform)
    return np.logical_and.accumulate(accepts, axis=1).sum(axis=1, dtype=np.int64)


def _at_tokens(probs: _Array, index: _Array) -> _Array:
    """The probability at one token of each row: (batch, num_draft) float32."""
    return np.take_along_axis(probs, index[:, :, None], axis=2)[:, :, 0].astype(np.float32)


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
    accepted: _Array,
    tokens: _Array,
    draft_probs: _Array | None,
    target_probs: _Array,
    uniform_sample: _Array,
) -> _Array:
    """Draw the token after each accepted prefix, a block of rows at a time: (batch,) int64."""
    batch, _, vocab = target_probs.shape
    # What stopped the walk: a rejected token, or a negative one where the draft ended or was all accepted.
    ends = np.full((batch, 1), -1, dtype=np.int64)
    stopped_by = np.take_along_axis(np.concatenate([tokens, ends], axis=1), accepted[:, None], axis=1)[:, 0]

    next_token = np.empty(batch, dtype=np.int64)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // vocab)
    for start in range(0, batch, rows_at_once):
        rows = np.arange(start, min(start + rows_at_once, batch))
        positions = accepted[rows]
        weights = _weights(rows, positions, stopped_by[rows], draft_probs, target_probs)
        next_token[rows] = _draw(weights, uniform_sample[rows, positions])
    return next_token


def _weights(
    rows: _Array, positions: _Array, stopped_by: _Array, draft_probs: _Array | None, target_probs: _Array
) -> _Array:
    """The weights that the next token of each of `rows` is drawn from: (rows, vocab) uint64."""
    target = _rows_at(target_probs, rows, positions)
    rejected = np.flatnonzero(stopped_by >= 0)
    if draft_probs is None:
        weights = _weight(target)
        known = rejected[stopped_by[rejected] < target.shape[1]]
        weights[known, stopped_by[known]] = 0
    else:
        residual = target.copy()
        residual[rejected] = _residual(target[rejected], _rows_at(draft_probs, rows[rejected], positions[rejected]))
        weights = _weight(residual)
    empty = ~weights.any(axis=1)
    weights[empty] = _weight(target[empty])
    return weights


def _rows_at(probs: _Array, rows: _Array, positions: _Array) -> _Array:
    """One row of each sequence, widened to float32: (rows, vocab)."""
    return probs[rows, positions].astype(np.float32, copy=False)


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


# The same once more, on one number at a time: Python floats, which hold every float32, ints and fractions.


def verify_scalar(
    draft_tokens: Sequence[Sequence[int]] | _Array,
    draft_probs: Sequence[Sequence[Sequence[float]]] | _Array | None,
    target_probs: Sequence[Sequence[Sequence[float]]] | _Array,
    uniform_accept: Sequence[Sequence[float]] | _Array | None = None,
    uniform_sample: Sequence[Sequence[float]] | _Array | None = None,
    *,
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
        If `seed` or `offset` is not an integer in its range, needed or not.

    Notes
    -----
    Only what the walk reaches is read: rows and uniforms after the stop are not touched.

    Examples
    --------
    >>> verify_scalar([[0]], [[[0.5, 0.5]]], [[[0.25, 0.75], [1, 0]]], [[0.75]], [[0.1, 0.1]])
    VerifyResult(accepted=[0], next_token=[1])
    """
    offset = check_offset(offset)
    batch = len(target_probs)
    keys, key_rows = row_keys(seed, batch)

    def uniform_at(given: Any, stream: int, row: int, position: int) -> float:
        if given is None:
            return uniform_scalar(keys[row], position, key_rows[row], offset, stream)
        return _float32(given[row][position])

    accepted, next_token = [], []
    for row in range(batch):
        num_draft = len(target_probs[row]) - 1
        stop, token = 0, -1
        while stop < num_draft:
            token = int(draft_tokens[row][stop])
            draft_row = None if draft_probs is None else draft_probs[row][stop]
            uniform = uniform_at(uniform_accept, STREAM_ACCEPT, row, stop)
            if not _proposal_accepts(token, draft_row, target_probs[row][stop], uniform):
                break
            stop += 1
        rejected = token if stop < num_draft and token >= 0 else None
        draft_row = None if draft_probs is None or rejected is None else draft_probs[row][stop]
        weights = _scalar_weights(rejected, draft_row, target_probs[row][stop])
        accepted.append(stop)
        next_token.append(_scalar_draw(weights, uniform_at(uniform_sample, STREAM_SAMPLE, row, stop)))
    return VerifyResult(accepted, next_token)


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


def _proposal_accepts(token: int, draft_row: Any, target_row: Any, uniform: float) -> bool:
    """Section 1 for one position; `draft_row` is None where the draft put probability 1 on its token."""
    if not 0 <= token < len(target_row):
        return False
    target = _float32(target_row[token])
    draft = 1.0 if draft_row is None else _float32(draft_row[token])
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


def _scalar_weights(rejected: int | None, draft_row: Any, target_row: Any) -> list[int]:
    """Section 2 for one row; `rejected` is None where the draft ended or was accepted throughout."""
    target = _float32_row(target_row)
    weights = [_scalar_weight(value) for value in target]
    if rejected is None:
        chosen = weights
    elif draft_row is None:
        chosen = [0 if token == rejected else weight for token, weight in enumerate(weights)]
    else:
        # Rounded twice, to float64 and to float32, yet equal to rounding once: 53 >= 2 * 24 + 2 bits
        # (Figueroa, "When is double rounding innocuous?", 1995), and differences among subnormals are exact.
        residual = _float32_row(list(map(operator.sub, target, _float32_row(draft_row))))
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
