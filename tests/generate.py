"""Random cases for the tests of every implementation: clean rows, garbage rows, boundaries hit on purpose.

Everything is a function of its seed. A case is small enough for the scalar reference unless its shape is
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Callable, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]

VOCABS = (1, 2, 7, 257, 4096, 8193, 32000, 128256)
# The scalar reference takes about 0.5 µs an element, so most cases are small.
VOCAB_ODDS = (0.08, 0.15, 0.3, 0.3, 0.08, 0.05, 0.025, 0.015)
MAX_BATCH = 64
MAX_DRAFT = 8
MAX_WALKED_ELEMENTS = 2**17  # batch * vocab: what verification reads
MAX_ELEMENTS = 2**20  # of both models' rows together: what generation writes

# Option cases come by the thousands, and greedy sequences read every row up to the stop: smaller still.
OPTION_VOCAB_ODDS = (0.08, 0.17, 0.38, 0.31, 0.03, 0.02, 0.007, 0.003)
MAX_OPTION_BATCH = 16
MAX_OPTION_ELEMENTS = 2**15  # of the target's rows; one sequence, of one draft at least, may have more

DTYPES = ("float32", "float16", "bfloat16")
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
# The same in each dtype's own bits, with what float32 loses on the way there: NaN of both signs, quiet and
# signalling, both zeros, the ends of the subnormals, both infinities, 1 and the number after it.
ODD_PATTERNS = {
    "float32": (
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0, 0x80000000, 1, 0x80000001),
        *(0x7FFFFF, 0x807FFFFF, 0x800000, 0x7F800000, 0xFF800000, 0x3F800000, 0x3F800001),
    ),
    "float16": (
        *(0x7E00, 0xFE00, 0x7C01, 0xFC01, 0, 0x8000, 1, 0x8001),
        *(0x3FF, 0x83FF, 0x400, 0x7C00, 0xFC00, 0x3C00, 0x3C01),
    ),
    "bfloat16": (
        *(0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0, 0x8000, 1, 0x8001),
        *(0x7F, 0x807F, 0x80, 0x7F80, 0xFF80, 0x3F80, 0x3F81),
    ),
}
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
    """One input of verify, as numpy arrays, with the id that a failing test shows.

    Uniforms are None in option cases that leave them to a seed.
    """

    id: str
    draft_tokens: Array
    draft_probs: Array | None
    target_probs: Array
    uniform_accept: Array | None
    uniform_sample: Array | None
    options: Mapping[str, Any] = MappingProxyType({})
    """The keyword arguments of verify."""

    @property
    def arrays(self) -> tuple[Array, Array | None, Array, Array | None, Array | None]:
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


# Rows of greedy sequences: any numbers, of which the largest may be several.


def logits(rng: np.random.Generator, vocab: int) -> Array:
    """Of the size that language models have."""
    return (rng.standard_normal(vocab) * 8).astype(np.float32)


def levels(rng: np.random.Generator, vocab: int) -> Array:
    """A few numbers, many times each."""
    return rng.integers(-2, 3, vocab).astype(np.float32)


def tied(rng: np.random.Generator, vocab: int) -> Array:
    """Logits whose largest stands at three places."""
    row = logits(rng, vocab)
    row[rng.integers(0, vocab, 3)] = row.max() + np.float32(1)
    return row


def tiny(rng: np.random.Generator, vocab: int) -> Array:
    """Zeros of both signs and subnormals about them, of float32, bfloat16 or float16; negative alone now and then."""
    unit = rng.choice([SMALLEST_SUBNORMAL, 2.0**-133, 2.0**-24])
    count = rng.integers(-2, rng.integers(0, 4), vocab)
    return np.copysign(count * unit, rng.choice([-1, 1], vocab) * (count == 0) + count).astype(np.float32)


def not_finite(rng: np.random.Generator, vocab: int) -> Array:
    """NaN alone, or beside one or both infinities, or beside numbers."""
    values = [[np.nan], [np.nan, -np.inf], [-np.inf], [np.nan, np.inf, -np.inf, 0.5], [np.nan, -1, -2]]
    row = rng.choice(values[rng.integers(len(values))], vocab).astype(np.float32)
    return np.copysign(row, np.where(np.isnan(row), rng.choice([-1, 1], vocab), row))


CLEAN_GREEDY_ROWS: tuple[RowKind, ...] = (logits, levels, tied, peaked, one_hot)
GREEDY_ROWS: tuple[RowKind, ...] = (*CLEAN_GREEDY_ROWS, signed, tiny, tiny, not_finite, not_finite, bits)


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


def blocks(first_seeds: range, count: int) -> list[Any]:
    """Parameters of a test that takes a block of seeds at a time: all but the first `count` are bulk."""
    return [*first_seeds[:count], *(pytest.param(seed, marks=pytest.mark.bulk) for seed in first_seeds[count:])]


def random_cases(count: int, *, first_seed: int = 0, **fixed: Any) -> Iterator[Case]:
    """`count` cases of consecutive seeds."""
    return (random_case(seed, **fixed) for seed in range(first_seed, first_seed + count))


def option_case(
    seed: int,
    *,
    shape: tuple[int, int, int] | None = None,
    target_dtype: str | None = None,
    draft_dtype: str | None = None,
    token_dtype: str | None = None,
    with_draft_probs: bool | None = None,
    clean: bool | None = None,
) -> Case:
    """The case of a seed with random `options` and dtypes; what is not fixed by keyword is random.

    Where an option or the walk leaves something unread, half of the cases hold NaN there. A seed is given
    where uniforms are missing, and only there.

    Parameters
    ----------
    seed : int
    shape : (batch, K, vocab), optional
        The draft's rows may have fewer columns.
    target_dtype, draft_dtype : "float32", "float16" or "bfloat16", optional
        bfloat16 is uint16 bit patterns, with dtype="bfloat16" in `options`.
    token_dtype : "int64" or "int32", optional
    with_draft_probs : bool, optional
    clean : bool, optional
        As in `random_case`; `num_draft` is in [0, K] then, and the rows of greedy sequences have no NaN.
    """
    batch, num_draft, vocab = shape or random_option_shape(np.random.default_rng([seed, 2]))
    rng = np.random.default_rng([seed, 3])
    target_dtype = target_dtype or str(rng.choice(DTYPES, p=(0.5, 0.2, 0.3)))
    draft_dtype = draft_dtype or (target_dtype if rng.random() < 0.4 else str(rng.choice(DTYPES)))
    token_dtype = token_dtype or str(rng.choice(["int64", "int32"]))
    with_draft_probs = rng.random() < 0.85 if with_draft_probs is None else with_draft_probs
    clean = rng.random() < 0.4 if clean is None else clean
    columns = vocab if rng.random() < 0.5 else int(rng.choice([max(1, vocab - 1), (vocab + 1) // 2, 1]))
    deterministic = random_mask(rng, batch) if with_draft_probs else None
    greedy = random_mask(rng, batch)
    follows = np.zeros(batch, bool) if greedy is None else greedy
    certain = np.full(batch, not with_draft_probs) if deterministic is None else deterministic

    with np.errstate(all="ignore"):
        target, draft = option_rows(rng, follows, num_draft, vocab, columns, clean)
        target, draft = as_dtype(target, target_dtype), as_dtype(draft, draft_dtype)
        if not clean:
            scatter_patterns(rng, target, target_dtype)
            scatter_patterns(rng, draft, draft_dtype)
        target_read, draft_read = widened(target), widened(draft)
        tokens = draft_tokens(rng, draft_read, vocab, clean, token_dtype)
        follow_largest(rng, tokens, follows, target_read)
        effective = np.zeros((batch, num_draft, vocab), np.float32)
        effective[:, :, :columns] = draft_read
        effective[certain] = np.arange(vocab) == tokens[certain][:, :, None]
        uniform_accept = accept_uniforms(rng, tokens, effective, target_read, clean)
        uniform_sample = sample_uniforms(rng, effective, target_read, clean)

    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["num_draft"] = random_lengths(rng, batch, num_draft, clean)
    if deterministic is not None:
        options["deterministic_draft"] = deterministic
    if greedy is not None:
        options["greedy"] = greedy
    if "bfloat16" in (target_dtype, draft_dtype) or rng.random() < 0.1:
        options["dtype"] = "bfloat16"
    given = str(rng.choice(["both", "accept", "sample", "neither"], p=(0.4, 0.15, 0.15, 0.3)))
    if given != "both":
        options["seed"] = random_seed(rng, batch)
    if rng.random() < 0.5:
        options["offset"] = int(rng.choice([1, 2**31, 2**32 - 1, rng.integers(2**32)]))

    if rng.random() < 0.5:
        ends = proposals(tokens, options.get("num_draft"))[:, None]
        behind = np.arange(num_draft + 1) >= ends
        draft[behind[:, :-1] | (certain | follows)[:, None]] = as_dtype(np.float32(np.nan), draft_dtype)
        target[np.arange(num_draft + 1) > ends] = as_dtype(np.float32(np.nan), target_dtype)
        tokens[np.arange(num_draft) > ends] = rng.integers(0, vocab)
        uniform_accept[behind[:, :-1] | follows[:, None]] = np.nan
        uniform_sample[(np.arange(num_draft + 1) > ends) | follows[:, None]] = np.nan

    case_id = "-".join(
        [
            f"b{batch}-k{num_draft}-v{vocab}",
            target_dtype,
            f"draft{columns}:{draft_dtype}" if with_draft_probs else "certain",
            token_dtype,
            *(name for name in ("num_draft", "deterministic_draft", "greedy", "offset") if name in options),
            f"given:{given}",
            "clean" if clean else "odd",
            f"option-seed{seed}",
        ]
    )
    return Case(
        case_id,
        tokens,
        draft if with_draft_probs else None,
        target,
        uniform_accept if given in ("both", "accept") else None,
        uniform_sample if given in ("both", "sample") else None,
        options,
    )


def option_cases(seed: int, count: int, **fixed: Any) -> Iterator[Case]:
    """The option cases of `count` consecutive seeds from `seed` on."""
    return (option_case(one, **fixed) for one in range(seed, seed + count))


def random_option_shape(rng: np.random.Generator) -> tuple[int, int, int]:
    """A (batch, K, vocab) within the bounds above, all sizes represented, small ones the most."""
    vocab = int(rng.choice(VOCABS, p=OPTION_VOCAB_ODDS))
    num_draft = int(rng.integers(MAX_DRAFT + 1))
    num_draft = min(num_draft, max(1, MAX_OPTION_ELEMENTS // vocab - 1))
    batch = int(np.exp(rng.uniform(0, np.log(MAX_OPTION_BATCH + 0.99))))
    return max(1, min(batch, MAX_OPTION_ELEMENTS // ((num_draft + 1) * vocab))), num_draft, vocab


def random_mask(rng: np.random.Generator, batch: int) -> Array | None:
    """(batch,) bool: all, none, or some; or no mask."""
    kind = rng.choice(["missing", "all", "none", "mixed"], p=(0.4, 0.15, 0.05, 0.4))
    return {"missing": None, "all": np.ones(batch, bool), "none": np.zeros(batch, bool)}.get(
        str(kind), rng.random(batch) < 0.5
    )


def random_lengths(rng: np.random.Generator, batch: int, num_draft: int, clean: bool) -> Array:
    """(batch,) int64 or int32: numbers of proposals, many of them all; outside of [0, K] too if not clean."""
    dtype = str(rng.choice(["int64", "int32"]))
    lengths = np.where(rng.random(batch) < 0.5, num_draft, rng.integers(0, num_draft + 1, batch))
    if not clean:
        limits = np.iinfo(dtype)
        odd = rng.random(batch) < 0.2
        lengths[odd] = rng.choice([-1, -5, limits.min, num_draft + 1, limits.max], int(odd.sum()))
    return lengths.astype(dtype)


def random_seed(rng: np.random.Generator, batch: int) -> int | Array:
    """One seed for all, or (batch,) uint64; the smallest and the largest often."""
    seeds = rng.integers(0, 2**64, batch, dtype=np.uint64)
    seeds = np.where(rng.random(batch) < 0.2, rng.choice(np.array([0, 2**64 - 1], np.uint64), batch), seeds)
    return int(seeds[0]) if rng.random() < 0.5 else seeds


def option_rows(
    rng: np.random.Generator, follows: Array, num_draft: int, vocab: int, columns: int, clean: bool
) -> tuple[Array, Array]:
    """Both models' rows in float32: those of greedy sequences of their own kinds."""
    target = np.empty((len(follows), num_draft + 1, vocab), np.float32)
    draft = np.empty((len(follows), num_draft, columns), np.float32)
    kinds = CLEAN_ROWS if clean else ROWS
    greedy_kinds = CLEAN_GREEDY_ROWS if clean else GREEDY_ROWS
    for row, follow in enumerate(follows):
        own = greedy_kinds if follow else kinds
        for position in range(num_draft + 1):
            target[row, position] = own[rng.integers(len(own))](rng, vocab)
            if position < num_draft:
                draft[row, position] = related_row(rng, target[row, position, :columns], kinds)
    if not clean:
        scatter(rng, target, ODD_PROBABILITIES)
        scatter(rng, draft, ODD_PROBABILITIES)
    return target, draft


def scatter_patterns(rng: np.random.Generator, array: Array, dtype: str) -> None:
    """Overwrite a few elements with odd bit patterns of a dtype, and now and then a row with any at all."""
    patterns = array.view(np.uint32 if dtype == "float32" else np.uint16)
    scatter(rng, patterns, ODD_PATTERNS[dtype])
    anything = rng.random(array.shape[:2]) < 0.02
    patterns[anything] = rng.integers(0, 2 ** (8 * array.itemsize), patterns[anything].shape)


def follow_largest(rng: np.random.Generator, tokens: Array, follows: Array, target: Array) -> None:
    """Make tokens of greedy sequences the largest of their rows, most of them; or another one as large."""
    first, last = largest(target[:, :-1])
    odds = rng.choice([0.5, 0.9, 0.98])
    chosen = follows[:, None] & (rng.random(tokens.shape) < odds) & (first >= 0)
    other = rng.random(tokens.shape) < 0.1
    tokens[chosen] = np.where(other, last, first)[chosen]


def largest(rows: Array) -> tuple[Array, Array]:
    """Where the largest number of each row stands first and last; -1 and -1 where all are NaN."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        values = rows.astype(np.float64)
    numbers = ~np.isnan(values)
    best = np.where(numbers, values, -np.inf).max(axis=-1, keepdims=True)
    at = values == best
    first, last = at.argmax(axis=-1), at.shape[-1] - 1 - at[..., ::-1].argmax(axis=-1)
    found = at.any(axis=-1)
    return np.where(found, first, -1), np.where(found, last, -1)


def proposals(tokens: Array, num_draft: Array | None) -> Array:
    """How many proposals each sequence has: (batch,) int64."""
    count = np.logical_and.accumulate(tokens >= 0, axis=1).sum(axis=1)
    return count if num_draft is None else np.clip(num_draft, 0, count)


def as_dtype(values: Array, dtype: str) -> Array:
    """Round float32 to a dtype, to nearest even; bfloat16 as uint16 bit patterns."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    patterns = np.asarray(values, np.float32).view(np.uint32).astype(np.int64)
    rounded = (patterns + 0x7FFF + (patterns >> 16 & 1)) >> 16
    return np.where(np.isnan(values), patterns >> 16 | 0x40, rounded).astype(np.uint16)


def widened(array: Array) -> Array:
    """float32 of an array of any of the dtypes."""
    if array.dtype != np.uint16:
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)


def scatter(rng: np.random.Generator, array: Array, values: Sequence[float]) -> None:
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
