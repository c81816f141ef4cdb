"""Random cases for the tests of every implementation: clean rows, garbage rows, boundaries hit on purpose.

Everything is a function of its seed. A case is small enough for the scalar reference unless its shape is
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

VOCABS = (1, 2, 7, 257, 4096, 8193, 32000, 128256)
# The scalar reference takes about 0.5 µs an element, so most cases are small.
VOCAB_ODDS = (0.08, 0.15, 0.3, 0.3, 0.08, 0.05, 0.025, 0.015)
MAX_BATCH = 64
MAX_DRAFT = 8
MAX_WALKED_ELEMENTS = 2**17  # batch * vocab: what verification reads
MAX_ELEMENTS = 2**20  # of both models' rows together: what generation writes

SMALLEST_SUBNORMAL = 2.0**-149
SMALLEST_NORMAL = 2.0**-126
LARGEST_UNIFORM = 1 - 2.0**-24

ODD_PROBABILITIES = (
    np.nan,
    np.inf,
    -np.inf,
    -0.25,
    -0.0,
    0.0,
    1.0,
    1 + 2.0**-23,
    3e38,
    SMALLEST_SUBNORMAL,
    SMALLEST_NORMAL,
    SMALLEST_NORMAL - SMALLEST_SUBNORMAL,
    2.0**-44,
    2.0**-45,
)
ODD_UNIFORMS = (
    0.0,
    2.0**-24,
    LARGEST_UNIFORM,
    1.0,
    1.5,
    -0.5,
    SMALLEST_SUBNORMAL,
    3e38,
    np.nan,
    np.inf,
    -np.inf,
)


class Case(NamedTuple):
    """One input of verify, as numpy arrays, with the id that a failing test shows."""

    id: str
    draft_tokens: Array
    draft_probs: Array | None
    target_probs: Array
    uniform_accept: Array
    uniform_sample: Array

    @property
    def arrays(self) -> tuple[Array, Array | None, Array, Array, Array]:
        """The five arguments of verify, in order."""
        return (
            self.draft_tokens,
            self.draft_probs,
            self.target_probs,
            self.uniform_accept,
            self.uniform_sample,
        )


# Rows of one model at one position. Each function returns float32 (vocab,).


def peaked(rng: np.random.Generator, vocab: int) -> Array:
    """Sums to 1; a few tokens hold most of it, as a language model's rows do."""
    mass = rng.standard_exponential(vocab) ** 4
    return (mass / mass.sum()).astype(np.float32)


def flat(rng: np.random.Generator, vocab: int) -> Array:
    """Sums to 1; all tokens within a factor of 3."""
    mass = rng.random(vocab) + 0.5
    return (mass / mass.sum()).astype(np.float32)


def sparse(rng: np.random.Generator, vocab: int) -> Array:
    """Mostly zeros, as top-k or top-p filtering leaves a row; the whole row is zero now and then."""
    return peaked(rng, vocab) * (rng.random(vocab) < 0.3)


def one_hot(rng: np.random.Generator, vocab: int) -> Array:
    """All mass on one token: greedy decoding."""
    row = np.zeros(vocab, np.float32)
    row[rng.integers(vocab)] = 1
    return row


def dyadic(rng: np.random.Generator, vocab: int) -> Array:
    """Multiples of 1/16 that sum to 1: thresholds fall on the edges between tokens."""
    return (rng.multinomial(16, np.full(vocab, 1 / vocab)) / 16).astype(np.float32)


def zeros(rng: np.random.Generator, vocab: int) -> Array:
    """No mass at all."""
    return np.zeros(vocab, np.float32)


def ones(rng: np.random.Generator, vocab: int) -> Array:
    """The largest total a row can have."""
    return np.ones(vocab, np.float32)


def scaled(rng: np.random.Generator, vocab: int) -> Array:
    """A row that does not sum to 1, by far or by little."""
    return peaked(rng, vocab) * np.float32(rng.choice([2.0**-40, 1e-3, 0.3, 1 + 2.0**-12, 3, 1e30]))


def signed(rng: np.random.Generator, vocab: int) -> Array:
    """Logits passed for probabilities."""
    return rng.standard_normal(vocab, dtype=np.float32)


def grains(rng: np.random.Generator, vocab: int) -> Array:
    """A few units of 2**-46, of which the weights keep the whole units of 2**-44."""
    return (rng.integers(0, 12, vocab) * 2.0**-46).astype(np.float32)


def subnormal(rng: np.random.Generator, vocab: int) -> Array:
    """Around the smallest normal float32, above and below."""
    return (rng.integers(0, 2**24, vocab) * SMALLEST_SUBNORMAL).astype(np.float32)


def bits(rng: np.random.Generator, vocab: int) -> Array:
    """Any float32 at all: uninitialised memory."""
    return rng.integers(0, 2**32, vocab, dtype=np.uint32).view(np.float32)


RowKind = Callable[[np.random.Generator, int], Array]
CLEAN_ROWS: tuple[RowKind, ...] = (peaked, flat, sparse, one_hot, dyadic)
ROWS: tuple[RowKind, ...] = (*CLEAN_ROWS, zeros, ones, scaled, signed, grains, subnormal, bits)


def related_row(rng: np.random.Generator, target: Array, kinds: tuple[RowKind, ...]) -> Array:
    """A draft row for a target row: equal, one ulp off, tilted, reversed or unrelated."""
    relation = rng.choice(["equal", "ulp", "tilted", "reversed", "unrelated"])
    if relation == "equal":
        return target.copy()
    if relation == "ulp":
        toward = np.where(rng.random(target.size) < 0.5, -np.inf, np.inf).astype(np.float32)
        return np.where(rng.random(target.size) < 0.5, np.nextafter(target, toward), target)
    if relation == "tilted":
        return (target * rng.uniform(0.6, 1.4, target.size)).astype(np.float32)
    if relation == "reversed":
        return target[::-1].copy()
    return kinds[rng.integers(len(kinds))](rng, target.size)


def random_shape(rng: np.random.Generator) -> tuple[int, int, int]:
    """A (batch, num_draft, vocab) within the bounds above, all sizes represented, small ones the most."""
    vocab = int(rng.choice(VOCABS, p=VOCAB_ODDS))
    batch = int(np.exp(rng.uniform(0, np.log(MAX_BATCH + 0.99))))
    batch = max(1, min(batch, MAX_WALKED_ELEMENTS // vocab))
    num_draft = int(rng.integers(MAX_DRAFT + 1))
    while num_draft > 0 and batch * (2 * num_draft + 1) * vocab > MAX_ELEMENTS:
        num_draft -= 1
    return batch, num_draft, vocab


def random_case(
    seed: int,
    *,
    shape: tuple[int, int, int] | None = None,
    dtype: str | None = None,
    token_dtype: str | None = None,
    with_draft_probs: bool | None = None,
    clean: bool | None = None,
) -> Case:
    """The case of a seed; what is not fixed by keyword is random.

    Parameters
    ----------
    seed : int
    shape : (batch, num_draft, vocab), optional
    dtype : "float32" or "float16", optional
    token_dtype : "int64" or "int32", optional
    with_draft_probs : bool, optional
        Without them the draft's tokens count as certain.
    clean : bool, optional
        Clean cases hold distributions, tokens in the vocabulary or padding, and uniforms in [0, 1). The
        others hold anything.
    """
    # A generator for the shape alone, so that fixing the shape does not move the other draws.
    batch, num_draft, vocab = shape or random_shape(np.random.default_rng([seed, 0]))
    rng = np.random.default_rng([seed, 1])
    odds = rng.random(4)
    dtype = dtype or ("float32" if odds[0] < 0.75 else "float16")
    token_dtype = token_dtype or ("int64" if odds[1] < 0.7 else "int32")
    with_draft_probs = odds[2] < 0.8 if with_draft_probs is None else with_draft_probs
    clean = odds[3] < 0.4 if clean is None else clean
    kinds = CLEAN_ROWS if clean else ROWS

    target = np.empty((batch, num_draft + 1, vocab), np.float32)
    draft = np.empty((batch, num_draft, vocab), np.float32)
    with np.errstate(all="ignore"):  # garbage rows are made of garbage arithmetic
        for row in range(batch):
            for position in range(num_draft + 1):
                kind = kinds[rng.integers(len(kinds))]
                target[row, position] = kind(rng, vocab)
                if position < num_draft:
                    draft[row, position] = related_row(rng, target[row, position], kinds)
        if not clean:
            scatter(rng, target, ODD_PROBABILITIES)
            scatter(rng, draft, ODD_PROBABILITIES)
        target, draft = target.astype(dtype), draft.astype(dtype)
        tokens = draft_tokens(rng, draft, vocab, clean, token_dtype)
        draft_probs = draft if with_draft_probs else None
        uniform_accept = accept_uniforms(rng, tokens, draft_probs, target, clean)
        uniform_sample = sample_uniforms(rng, draft_probs, target, clean)
    case_id = "-".join(
        [
            f"b{batch}-k{num_draft}-v{vocab}",
            dtype,
            token_dtype,
            "draft" if with_draft_probs else "certain",
            "clean" if clean else "odd",
            f"seed{seed}",
        ]
    )
    return Case(case_id, tokens, draft_probs, target, uniform_accept, uniform_sample)


def random_cases(count: int, *, first_seed: int = 0, **fixed: Any) -> Iterator[Case]:
    """`count` cases of consecutive seeds."""
    return (random_case(seed, **fixed) for seed in range(first_seed, first_seed + count))


def scatter(rng: np.random.Generator, array: Array, values: tuple[float, ...]) -> None:
    """Overwrite up to 1 % of an array, and a few elements at least, with odd values."""
    if array.size:
        count = int(rng.integers(0, 3 + array.size // 100))
        array.reshape(-1)[rng.integers(0, array.size, count)] = rng.choice(values, count)


def draft_tokens(rng: np.random.Generator, draft: Array, vocab: int, clean: bool, dtype: str) -> Array:
    """Tokens that the draft favours or random ones, some rows padded at the end, odd values if not clean."""
    batch, num_draft = draft.shape[:2]
    limits = np.iinfo(dtype)
    likely = np.nan_to_num(draft).argmax(axis=2)
    tokens = np.where(rng.random((batch, num_draft)) < 0.7, likely, rng.integers(0, vocab, (batch, num_draft)))
    lengths = np.where(rng.random(batch) < 0.2, rng.integers(0, num_draft + 1, batch), num_draft)
    tokens[np.arange(num_draft) >= lengths[:, None]] = -1
    if not clean:
        odd = rng.random(tokens.shape) < 0.05
        values = [-1, -7, limits.min, vocab, vocab + 1, limits.max]
        tokens[odd] = rng.choice(values, int(odd.sum()))
    return tokens.astype(dtype)


def random_uniforms(rng: np.random.Generator, shape: tuple[int, ...], clean: bool) -> Array:
    """Multiples of 2**-24 in [0, 1), biased to both ends, and odd values if not clean."""
    uniforms = (rng.integers(0, 2**24, shape) * 2.0**-24).astype(np.float32)
    ends = rng.random(shape) < 0.1
    uniforms[ends] = rng.choice([0.0, 2.0**-24, LARGEST_UNIFORM], int(ends.sum()))
    if not clean:
        odd = rng.random(shape) < 0.1
        uniforms[odd] = rng.choice(ODD_UNIFORMS, int(odd.sum()))
    return uniforms


def one_ulp_about(rng: np.random.Generator, values: Array) -> Array:
    """Each float32 value itself, or its neighbour below or above."""
    toward = rng.choice([-np.inf, np.inf], values.shape).astype(np.float32)
    return np.where(rng.random(values.shape) < 1 / 3, values, np.nextafter(values, toward))


def accept_uniforms(
    rng: np.random.Generator, tokens: Array, draft_probs: Array | None, target: Array, clean: bool
) -> Array:
    """Random uniforms, a third of them on the boundary target / draft of their token or one ulp off it."""
    batch, num_draft = tokens.shape
    # Half of the cases draw small uniforms, so that walks go deep.
    uniforms = random_uniforms(rng, (batch, num_draft), clean) * np.float32(rng.choice([1, 2.0**-6]))
    vocab = target.shape[2]
    index = np.clip(tokens.astype(np.int64), 0, vocab - 1)[:, :, None]
    target_at = np.take_along_axis(target[:, :num_draft], index, 2)[:, :, 0].astype(np.float64)
    if draft_probs is None:
        draft_at = np.ones_like(target_at)
    else:
        draft_at = np.minimum(np.take_along_axis(draft_probs, index, 2)[:, :, 0].astype(np.float64), 1)
    boundary = one_ulp_about(rng, (target_at / draft_at).astype(np.float32))
    # Of odd rows a boundary may be anything; it must stay a uniform.
    chosen = (rng.random(uniforms.shape) < 1 / 3) & (boundary >= 0) & (boundary < 1)
    return np.where(chosen, boundary, uniforms)


def sample_uniforms(rng: np.random.Generator, draft_probs: Array | None, target: Array, clean: bool) -> Array:
    """Random uniforms, a third of them on an edge between two tokens of the target or of the residual."""
    batch, positions, vocab = target.shape
    uniforms = random_uniforms(rng, (batch, positions), clean)
    for row, position in np.argwhere(rng.random((batch, positions)) < 1 / 3):
        mass = target[row, position].astype(np.float32)
        if draft_probs is not None and position < positions - 1 and rng.random() < 0.5:
            mass = mass - draft_probs[row, position].astype(np.float32)
        running = np.cumsum(np.clip(np.nan_to_num(mass), 0, 1), dtype=np.float64)
        if running[-1] > 0:
            edge = np.array(running[rng.integers(vocab)] / running[-1]).astype(np.float32)
            uniforms[row, position] = np.clip(one_ulp_about(rng, edge), 0, LARGEST_UNIFORM)
    return uniforms


# Cases whose `accepted` is known beforehand.


def accept_all(seed: int, shape: tuple[int, int, int], dtype: str = "float32") -> Case:
    """Every proposal has at least its draft probability in the target: all are accepted, at every uniform."""
    batch, num_draft, vocab = shape
    rng = np.random.default_rng(seed)
    target, draft = _random_rows(rng, shape, dtype)
    tokens = (target[:, :num_draft].astype(np.float32) - draft.astype(np.float32)).argmax(axis=2)
    return _clean_case(rng, f"accept-all-b{batch}-k{num_draft}-v{vocab}-{dtype}", tokens, draft, target)


def reject_first(seed: int, shape: tuple[int, int, int], dtype: str = "float32") -> Case:
    """The target gives the first proposal no probability: nothing is accepted. vocab is at least 2."""
    batch, num_draft, vocab = shape
    rng = np.random.default_rng(seed)
    target, draft = _random_rows(rng, shape, dtype)
    tokens = rng.integers(0, vocab, (batch, num_draft))
    target[np.arange(batch), 0, tokens[:, 0]] = 0
    return _clean_case(rng, f"reject-first-b{batch}-k{num_draft}-v{vocab}-{dtype}", tokens, draft, target)


def identical(seed: int, shape: tuple[int, int, int], dtype: str = "float32") -> Case:
    """The draft model is the target model: all are accepted, whatever token the draft drew."""
    batch, num_draft, vocab = shape
    rng = np.random.default_rng(seed)
    target, _ = _random_rows(rng, shape, dtype)
    draft = target[:, :num_draft].copy()
    tokens = rng.integers(0, vocab, (batch, num_draft))
    return _clean_case(rng, f"identical-b{batch}-k{num_draft}-v{vocab}-{dtype}", tokens, draft, target)


def _random_rows(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> tuple[Array, Array]:
    """Rows of both models that sum to 1 and leave every token a normal float32's probability."""
    batch, num_draft, vocab = shape
    target = rng.random((batch, num_draft + 1, vocab)) + 0.5
    draft = rng.random((batch, num_draft, vocab)) + 0.5
    target /= target.sum(axis=2, keepdims=True)
    draft /= draft.sum(axis=2, keepdims=True)
    return target.astype(dtype), draft.astype(dtype)


def _clean_case(rng: np.random.Generator, case_id: str, tokens: Array, draft: Array, target: Array) -> Case:
    batch, num_draft = tokens.shape
    uniform_accept = random_uniforms(rng, (batch, num_draft), clean=True)
    uniform_sample = random_uniforms(rng, (batch, num_draft + 1), clean=True)
    return Case(case_id, tokens.astype(np.int64), draft, target, uniform_accept, uniform_sample)
