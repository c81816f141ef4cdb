"""Emitted tokens are distributed as the target's own: by enumeration, exactly, and by chi-square.

Every check is also run on mutants of the reference and must find each of them out.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import Any, Callable, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from implementations import IMPLEMENTATIONS

from specverify_dpex import reference

Array = npt.NDArray[Any]
Verify = Callable[..., Any]

UNIT = 16
"""Probabilities of the enumerations are multiples of 1/16."""

MAX_ROWS = 40_000
"""Of one enumeration: larger ones are left out of the random choice."""

FALSE_ALARM = 1e-6
"""The chance that a chi-square test finds fault with a right implementation, had its seed not been fixed."""


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def implementation(request) -> Verify:
    return request.param


# Mutants of the reference, each with one step gone wrong


def replaced(name: str, step: Callable[..., Any]) -> Verify:
    """The reference with another function for one of its steps."""

    def mutant(*arguments: Any, **keywords: Any) -> Any:
        with mock.patch.object(reference, name, step):
            return reference.verify(*arguments, **keywords)

    return mutant


def one_buffer(tokens: Array, draft: Array | None, target: Array, uniform_accept: Array, uniform_sample: Array) -> Any:
    """The reference with the acceptance uniforms used again for the draws."""
    reused = np.concatenate([uniform_accept, uniform_sample[:, -1:]], axis=1)
    return reference.verify(tokens, draft, target, uniform_accept, reused)


# The true steps, which the mutants call after the reference has had its own replaced.
_accepts, _draw, _rows_at, _threshold = (
    reference._accepts,
    reference._draw,
    reference._rows_at,
    reference._threshold,
)

MUTANTS: dict[str, Verify] = {
    "resample-from-the-target": replaced("_residual", lambda target, draft: target),
    "unnormalised-residual": replaced(
        "_threshold",
        lambda fraction, high, low: _threshold(fraction, np.full_like(high, 2**12), np.zeros_like(low)),
    ),
    "reused-uniform": one_buffer,
    "token-off-by-one": replaced("_draw", lambda weights, uniform: (_draw(weights, uniform) + 1) % weights.shape[1]),
    "position-off-by-one": replaced(
        "_rows_at", lambda probs, rows, positions: _rows_at(probs, rows, (positions + 1) % probs.shape[1])
    ),
    "always-accept": replaced("_accepts", lambda target, draft, uniform: np.ones(target.shape, bool)),
    "flipped-ratio": replaced("_accepts", lambda target, draft, uniform: _accepts(draft, target, uniform)),
}


@pytest.fixture(params=MUTANTS.values(), ids=MUTANTS.keys())
def mutant(request) -> Verify:
    return request.param


# Enumeration. Probabilities are written as integers, in sixteenths. A grid of n uniforms gives every
# subinterval that begins and ends at multiples of 1/n its exact share of points, so counts come out exact
# when n is a multiple
#   - for acceptance, of the draft's sixteenths of each token, since the chance is target / draft;
#   - for sampling, of the sixteenths of each total that is drawn from.
# The draft's own draw is enumerated too: every token once, counted as often as its sixteenths say.


def edges(points: int) -> Array:
    """0, 1/n, 2/n, …: the points fall on the boundaries. Exact in float32 only for powers of two."""
    assert points & (points - 1) == 0
    return (np.arange(points) / points).astype(np.float32)


def midpoints(points: int) -> Array:
    """1/2n, 3/2n, …: half a step from every boundary, so that rounding to float32 moves none across it."""
    assert points < 2**22
    return ((2 * np.arange(points) + 1) / (2 * points)).astype(np.float32)


class Model(NamedTuple):
    """What two models say about every continuation, in sixteenths.

    `target[k]` and `draft[k]` have one axis for each token before position k and a last one for the token
    itself. `draft` is None where the drafted token is certain; `proposed` then says which it is.
    """

    target: list[Array]
    draft: list[Array] | None
    proposed: tuple[int, ...] = ()

    @property
    def num_draft(self) -> int:
        return len(self.target) - 1

    @property
    def vocab(self) -> int:
        return self.target[0].shape[-1]

    def draft_rows(self, position: int) -> Array:
        """The draft's sixteenths; a certain token has all of them."""
        if self.draft is not None:
            return self.draft[position]
        rows = np.zeros_like(self.target[position])
        rows[..., self.proposed[position]] = UNIT
        return rows

    def proposals(self, position: int) -> Array:
        """The tokens that the draft may propose."""
        return np.arange(self.vocab) if self.draft is not None else np.array([self.proposed[position]])

    def grids(self) -> tuple[int, int]:
        """The smallest numbers of acceptance and sampling uniforms that make all counts exact."""
        accept, sample = 1, UNIT
        for position in range(self.num_draft):
            draft = self.draft_rows(position)
            residual = np.maximum(self.target[position] - draft, 0).sum(axis=-1)
            accept = math.lcm(accept, *np.unique(draft[draft > 0]).tolist())
            sample = math.lcm(sample, *np.unique(residual[residual > 0]).tolist())
        return accept, sample

    def rows(self) -> int:
        """How many sequences the enumeration runs."""
        accept, sample = self.grids()
        drafts = math.prod(len(self.proposals(position)) for position in range(self.num_draft))
        return drafts * accept**self.num_draft * sample


def random_parts(rng: np.random.Generator, shape: tuple[int, ...], unit: int = UNIT) -> Array:
    """Rows of sixteenths: random compositions, many with zeros. A coarser unit keeps the grids small."""
    vocab = shape[-1]
    # Sorted cuts in [0, unit], the differences of which are the parts.
    cuts = np.sort(rng.integers(0, unit + 1, (*shape[:-1], vocab - 1)), axis=-1)
    ends = [np.zeros((*shape[:-1], 1), int), cuts, np.full((*shape[:-1], 1), unit)]
    return np.diff(np.concatenate(ends, axis=-1), axis=-1) * (UNIT // unit)


def random_model(
    seed: int, num_draft: int, vocab: int, *, with_draft_probs: bool = True, powers_of_two: bool = False
) -> Model:
    """A model whose enumeration is small enough, and whose grids are powers of two where asked for."""
    rng = np.random.default_rng([seed, num_draft, vocab])
    while True:
        unit = int(rng.choice([4, 8, UNIT]))
        target = [random_parts(rng, (vocab,) * (position + 1), unit) for position in range(num_draft + 1)]
        draft = [random_parts(rng, (vocab,) * (position + 1), unit) for position in range(num_draft)]
        proposed = tuple(rng.integers(0, vocab, num_draft).tolist())
        model = Model(target, draft if with_draft_probs else None, proposed)
        fits = all(grid & (grid - 1) == 0 for grid in model.grids()) or not powers_of_two
        if fits and model.rows() <= MAX_ROWS:
            return model


def enumerated(verify: Verify, model: Model, grid: Callable[[int], Array]) -> tuple[Array, Array]:
    """Count what is emitted over all drafts and all uniforms, and what the target says the counts must be.

    Counts are of whole sequences of num_draft + 1 tokens. Where verification stops early the target itself
    supplies the tokens after, as the next steps of decoding would.

    Returns
    -------
    counts, expected : (vocab, …, vocab) int64, one axis for each emitted token
    """
    num_draft, vocab = model.num_draft, model.vocab
    accept_points, sample_points = model.grids()
    proposals = [model.proposals(position) for position in range(num_draft)]
    axes = np.indices([*map(len, proposals), *[accept_points] * num_draft, sample_points])
    axes = axes.reshape(2 * num_draft + 1, -1).T
    accept_index, sample_index = axes[:, num_draft:-1], axes[:, -1]
    tokens = np.empty((len(axes), num_draft), np.int64)
    for position in range(num_draft):
        tokens[:, position] = proposals[position][axes[:, position]]
    # Only one draw of a sequence is used: each position runs through the whole grid, in an order of its own.
    orders = [np.random.default_rng(position).permutation(sample_points) for position in range(num_draft + 1)]
    uniform_accept = grid(accept_points)[accept_index]
    uniform_sample = grid(sample_points)[np.stack([order[sample_index] for order in orders], axis=1)]
    contexts = [tuple(tokens[:, :position].T) for position in range(num_draft + 1)]
    target = np.empty((len(tokens), num_draft + 1, vocab), np.float32)
    draft = np.empty((len(tokens), num_draft, vocab), np.float32)
    times = np.ones(len(tokens), np.int64)  # how often the draft model draws these tokens
    for position, context in enumerate(contexts):
        target[:, position] = model.target[position][context] / UNIT
        if position < num_draft:
            rows = model.draft_rows(position)
            draft[:, position] = rows[context] / UNIT
            times *= rows[(*context, tokens[:, position])]

    draft_probs = None if model.draft is None else draft
    accepted, next_token = verify(tokens, draft_probs, target, uniform_accept, uniform_sample)

    counts: Array = np.zeros((), np.int64)
    joint: Array = np.ones((), np.int64)
    for position in range(num_draft + 1):
        # What stopped at this position; a token of -1 is counted nowhere, and is missed in the sum.
        stopped = (accepted == position) & (next_token >= 0)
        emitted = (*(tokens[stopped, k] for k in range(position)), next_token[stopped])
        stopped_counts = np.zeros((vocab,) * (position + 1), np.int64)
        np.add.at(stopped_counts, emitted, times[stopped])
        # What stopped before goes on as the target says, which multiplies it by 16 in all at each position.
        counts = counts[..., None] * model.target[position] + UNIT**position * stopped_counts
        joint = joint[..., None] * model.target[position]
    # The joint probabilities sum to 16 ** (num_draft + 1), the counts to 16 ** num_draft times the sequences.
    sequences = UNIT**num_draft * accept_points**num_draft * sample_points
    return counts, joint * (sequences // UNIT)


def is_exact(verify: Verify, model: Model, grid: Callable[[int], Array]) -> bool:
    """Whether the counts of an enumeration are the target's."""
    counts, expected = enumerated(verify, model, grid)
    return np.array_equal(counts, expected)


BY_HAND = Model(
    target=[np.array([1, 3, 4, 8]), np.array([[8, 4, 2, 2], [0, 0, 16, 0], [4, 4, 4, 4], [1, 2, 5, 8]])],
    draft=[np.array([8, 4, 2, 2])],
)


def test_enumeration_of_a_model_worked_by_hand():
    # Residual (0, 0, 2, 6): grids of 8 and of lcm(16, 8) points.
    assert BY_HAND.grids() == (8, 16)
    counts, expected = enumerated(reference.verify, BY_HAND, edges)
    # 16 * 8 * 16 = 2048 sequences, each counted 16 times: once for every sixteenth of its second token.
    assert counts.sum(axis=1).tolist() == [2048, 3 * 2048, 4 * 2048, 8 * 2048]
    assert np.array_equal(counts, expected)


@pytest.mark.parametrize("grid", [edges, midpoints], ids=["edges", "midpoints"])
def test_enumeration_finds_out_mutants(mutant, grid):
    assert is_exact(reference.verify, BY_HAND, grid)
    assert not is_exact(mutant, BY_HAND, grid)


def test_verify_emits_the_target_exactly_for_all_pairs_of_eighths(implementation):
    for target in range(0, UNIT + 1, 2):
        for draft in range(0, UNIT + 1, 2):
            rows = np.array([target, UNIT - target]), np.array([[4, 12], [16, 0]])
            model = Model(list(rows), [np.array([draft, UNIT - draft])])
            assert is_exact(implementation, model, midpoints), (target, draft)


@pytest.mark.parametrize("vocab", [1, 2, 3, 4])
@pytest.mark.parametrize("num_draft", [0, 1, 2])
@pytest.mark.parametrize("with_draft_probs", [True, False], ids=["draft", "certain"])
@pytest.mark.parametrize("grid", [edges, midpoints], ids=["edges", "midpoints"])
def test_verify_emits_the_target_exactly(implementation, grid, with_draft_probs, num_draft, vocab):
    for seed in range(6 if num_draft == 2 else 20):
        model = random_model(seed, num_draft, vocab, with_draft_probs=with_draft_probs, powers_of_two=grid is edges)
        counts, expected = enumerated(implementation, model, grid)
        assert np.array_equal(counts, expected), (seed, model)


@pytest.mark.parametrize("with_draft_probs", [True, False], ids=["draft", "certain"])
@pytest.mark.parametrize("grid", [edges, midpoints], ids=["edges", "midpoints"])
def test_verify_emits_the_target_exactly_where_the_draft_ended(implementation, grid, with_draft_probs):
    row = np.array([1, 0, 6, 9])
    target = np.broadcast_to((row / UNIT).astype(np.float32), (UNIT, 2, 4)).copy()
    target[:, 1] = target[:, 1, ::-1]
    draft = np.ones((UNIT, 1, 4), np.float32) if with_draft_probs else None
    uniform_sample = np.stack([grid(UNIT), grid(UNIT)[::-1]], axis=1)
    tokens = np.full((UNIT, 1), -1, np.int64)
    accepted, next_token = implementation(tokens, draft, target, np.zeros((UNIT, 1), np.float32), uniform_sample)
    assert (accepted == 0).all()
    assert np.array_equal(np.bincount(next_token, minlength=4), row)


# Chi-square, at vocabularies too large to enumerate


class Experiment(NamedTuple):
    """Rows of both models, the same for every sequence, and how many sequences to draw."""

    target: Array  # (num_draft + 1, vocab) float32
    draft: Array  # (num_draft, vocab) float32
    sequences: int


@functools.cache
def experiment(vocab: int) -> Experiment:
    """Rows that fall off as a language model's do; the draft has too much of every other token, by rank.

    So the residual is on half of the tokens, and far from the target. A few tokens that the target excludes
    have some of the draft's mass.
    """
    num_draft = 2
    rng = np.random.default_rng(vocab)
    fall = np.arange(1, vocab + 1) ** -1.3
    tilt = np.where(np.arange(vocab) % 2, 0.4, 1.6)
    target, draft = np.empty((num_draft + 1, vocab)), np.empty((num_draft, vocab))
    for position in range(num_draft + 1):
        order = rng.permutation(vocab)
        target[position] = fall[order]
        target[position, order >= vocab - vocab // 8] = 0  # the last ranks, as top-k leaves them out
        if position < num_draft:
            draft[position] = (fall * tilt)[order]
    target /= target.sum(axis=1, keepdims=True)
    draft /= draft.sum(axis=1, keepdims=True)
    return Experiment(target.astype(np.float32), draft.astype(np.float32), 20_000 if vocab < 1000 else 4_000)


def emitted_counts(verify: Verify, trial: Experiment, seed: int = 0) -> Array:
    """How often each token was emitted at each position, where one was emitted: (num_draft + 1, vocab)."""
    num_draft, vocab = trial.draft.shape
    rng = np.random.default_rng([seed, vocab])
    running = np.cumsum(trial.draft, axis=1, dtype=np.float64)
    batch = min(trial.sequences, max(1, 2**21 // vocab))
    target = np.repeat(trial.target[None], batch, axis=0)
    draft = np.repeat(trial.draft[None], batch, axis=0)
    counts = np.zeros((num_draft + 1, vocab), np.int64)
    for start in range(0, trial.sequences, batch):
        size = min(batch, trial.sequences - start)
        noise = rng.random((size, num_draft))
        noise *= running[:, -1]
        drawn = [np.searchsorted(running[k], noise[:, k], side="right") for k in range(num_draft)]
        tokens = np.stack(drawn, axis=1)
        uniform_accept = rng.random((size, num_draft), dtype=np.float32)
        uniform_sample = rng.random((size, num_draft + 1), dtype=np.float32)
        accepted, next_token = verify(tokens, draft[:size], target[:size], uniform_accept, uniform_sample)
        for position in range(num_draft + 1):
            emitted = [tokens[accepted > position, position]] if position < num_draft else []
            emitted.append(next_token[accepted == position])
            counts[position] += np.bincount(np.concatenate(emitted), minlength=vocab)
    return counts


def pooled(counts: Array, expected: Array, least: float = 5.0) -> tuple[Array, Array]:
    """Counts and expectations with small bins put together until each expects at least `least`.

    From the largest down, so that bins are pooled only with bins as small; a remainder joins the last.
    """
    order = np.argsort(-expected, kind="stable")
    counts, expected = counts[order], expected[order]
    starts, mass = [0], 0.0
    for index, value in enumerate(expected.tolist()):
        if mass >= least:
            starts.append(index)
            mass = 0.0
        mass += value
    if mass < least and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(counts, starts), np.add.reduceat(expected, starts)


def critical_value(freedom: int, chance: float) -> float:
    """What a chi-square statistic exceeds with this chance.

    By Wilson and Hilferty (1931): the cube root of a chi-square over its degrees of freedom is nearly normal
    with mean 1 - 2 / 9k and variance 2 / 9k. Good to 1 % here, a margin that the tests do not come near.
    """
    variance = 2 / (9 * freedom)
    return freedom * (1 - variance + NormalDist().inv_cdf(1 - chance) * math.sqrt(variance)) ** 3


def excess(counts: Array, probs: Array) -> float:
    """The chi-square statistic over its critical value: above 1 the counts are not of this distribution."""
    probs = probs.astype(np.float64) / probs.sum(dtype=np.float64)
    if counts[probs == 0].any():
        return math.inf  # emitted what has no probability
    pooled_counts, expected = pooled(counts, probs * counts.sum())
    statistic = float(((pooled_counts - expected) ** 2 / expected).sum())
    return statistic / critical_value(len(expected) - 1, FALSE_ALARM)


def worst_excess(verify: Verify, trial: Experiment) -> float:
    """The largest excess over the positions."""
    counts = emitted_counts(verify, trial)
    assert counts[0].sum() == trial.sequences and counts[-1].sum() > 500
    return max(map(excess, counts, trial.target))


VOCABS = [8, 111, 32000]


@pytest.mark.parametrize("vocab", VOCABS)
def test_verify_emits_the_target_by_chi_square(implementation, vocab):
    assert worst_excess(implementation, experiment(vocab)) < 1


@pytest.mark.parametrize("vocab", VOCABS)
def test_chi_square_finds_out_mutants(mutant, vocab):
    assert worst_excess(mutant, experiment(vocab)) > 1


@pytest.mark.parametrize(
    "freedom, chance, value",
    # Tables of the chi-square distribution.
    [(1, 0.05, 3.841), (7, 0.05, 14.067), (7, 0.001, 24.322), (100, 0.001, 149.449), (1000, 0.05, 1074.679)],
)
def test_critical_value_is_near_the_tables(freedom, chance, value):
    assert abs(critical_value(freedom, chance) / value - 1) < 0.03


def test_pooled_puts_small_bins_together():
    counts, expected = pooled(np.array([1, 20, 2, 3, 4, 0]), np.array([1.0, 18.0, 3.0, 4.0, 3.0, 1.0]))
    # In order: 18; 4 + 3; 3 + 1 + 1, which is enough.
    assert counts.tolist() == [20, 5, 5] and expected.tolist() == [18, 7, 5]
    counts, expected = pooled(np.array([1, 20, 2]), np.array([1.0, 18.0, 3.0]))
    assert counts.tolist() == [23] and expected.tolist() == [22]
