"""The two references against the specification, corner by corner, and against each other on random input."""

from __future__ import annotations

import doctest
import json
import math
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import generate
import numpy as np
import pytest
from generate import LARGEST_UNIFORM, SMALLEST_NORMAL, SMALLEST_SUBNORMAL

from specverify_dpex import philox, reference
from specverify_dpex.result import VerifyResult

# Odd values have defined answers: no warning may come of them.
pytestmark = pytest.mark.filterwarnings("error")

NAN, INF = math.nan, math.inf
CASES = json.loads(Path(__file__).with_name("cases.json").read_text())
RANDOM_CASES, OPTION_CASES, CASES_PER_TEST = 2000, 1500, 50
KEEP_DRAFT = object()


@pytest.fixture(params=[reference.verify, reference.verify_scalar], ids=["verify", "verify_scalar"])
def function(request):
    return request.param


def arrays_of(tokens, draft, target, accept, sample):
    """The arguments of verify for one sequence, as arrays of batch 1."""
    target = np.array(target, np.float32)[None]
    _, positions, vocab = target.shape
    return (
        np.array(tokens, np.int64).reshape(1, positions - 1),
        None if draft is None else np.array(draft, np.float32).reshape(1, positions - 1, vocab),
        target,
        np.array(accept, np.float32).reshape(1, positions - 1),
        np.array(sample, np.float32).reshape(1, positions),
    )


def answer(function, tokens, draft, target, accept, sample):
    """(accepted, next_token) of one sequence."""
    accepted, next_token = function(*arrays_of(tokens, draft, target, accept, sample))
    return int(accepted[0]), int(next_token[0])


def outputs(function, *inputs, **options):
    """Both outputs, as lists."""
    accepted, next_token = function(*inputs, **options)
    return list(accepted), list(next_token)


def repeated(inputs, batch):
    """The arguments of verify for one sequence, several times."""
    return [None if array is None else np.repeat(array, batch, axis=0) for array in inputs]


def narrow(tokens, draft, target, accept, sample):
    """`arrays_of`, for draft rows of fewer columns than the target's."""
    tokens, _, *others = arrays_of(tokens, None, target, accept, sample)
    return tokens, np.array([draft], np.float32), *others


def chosen(mask, ones, others):
    """Of two results, the one that a mask chooses for each sequence."""
    return tuple([one if own else other for own, one, other in zip(mask, *pair)] for pair in zip(ones, others))


def accepts(function, target, draft, uniform):
    """Whether a proposal with these probabilities is accepted at this uniform."""
    accepted, _ = answer(function, [0], [[draft, 0]], [[target, 0], [1, 0]], [uniform], [0, 0])
    return bool(accepted)


def draw(function, target, uniform):
    """The token drawn from a target row without drafts."""
    return answer(function, [], [], [target], [], [uniform])[1]


def residual_draw(function, target, draft, uniform):
    """The token drawn after the rejection of one appended to the rows, which has no part in the residual."""
    rows = [[*target, 0], [0] * (len(target) + 1)]
    accepted, token = answer(function, [len(target)], [[*draft, 1]], rows, [0], [uniform, 0])
    assert accepted == 0
    return token


# The cases of the specification


@pytest.mark.parametrize("case", CASES, ids=[case["name"].replace(" ", "-") for case in CASES])
def test_verify_equals_the_answers_of_the_specification(function, case):
    inputs = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")
    assert answer(function, *(case[name] for name in inputs)) == (case["accepted"], case["next_token"])


# 1. Acceptance


@pytest.mark.parametrize("token", [-1, -7, -(2**63)])
def test_verify_ends_the_draft_at_a_negative_token(function, token):
    # From the target row itself: the residual would have all its mass on token 1.
    tokens, draft = [0, token, 0], [[1, 0], [1, 0], [1, 0]]
    target = [[1, 0], [0.5, 0.5], [1, 0], [1, 0]]
    assert answer(function, tokens, draft, target, [0, 0, 0], [0.9, 0.25, 0.9, 0.9]) == (1, 0)


@pytest.mark.parametrize("token", [-1, -(2**63)])
def test_verify_ends_the_draft_at_a_negative_token_without_draft_probs(function, token):
    assert answer(function, [token], None, [[0.5, 0.5], [1, 0]], [0], [0.25, 0]) == (0, 0)
    assert answer(function, [token], None, [[0.5, 0.5], [1, 0]], [0], [0.75, 0]) == (0, 1)


@pytest.mark.parametrize("token", [2, 3, 2**31, 2**63 - 1])
def test_verify_rejects_a_token_beyond_the_vocabulary(function, token):
    # The walk stops though the next position would accept; the residual is all on token 1.
    tokens, draft = [token, 0], [[0.5, 0.5], [1, 0]]
    target = [[0.25, 0.75], [1, 0], [1, 0]]
    assert answer(function, tokens, draft, target, [0, 0], [0, 0, 0]) == (0, 1)


@pytest.mark.parametrize("token", [2, 2**63 - 1])
def test_verify_rejects_a_token_beyond_the_vocabulary_without_draft_probs(function, token):
    # No token loses its weight.
    assert answer(function, [token], None, [[0.5, 0.5], [1, 0]], [0], [0.25, 0]) == (0, 0)
    assert answer(function, [token], None, [[0.5, 0.5], [1, 0]], [0], [0.75, 0]) == (0, 1)


def test_verify_counts_missing_draft_probs_as_one(function):
    target = [[0.25, 0.75], [1, 0]]
    below = float(np.nextafter(np.float32(0.25), np.float32(0)))
    assert answer(function, [0], None, target, [below], [0, 0]) == (1, 0)
    assert answer(function, [0], None, target, [0.25], [0, 0]) == (0, 1)


def test_verify_accepts_strictly_below_the_ratio(function):
    # 0.5 * 0.5 = 0.25 is not below 0.25.
    assert not accepts(function, target=0.25, draft=0.5, uniform=0.5)
    assert accepts(function, target=0.25, draft=0.5, uniform=0.5 - 2.0**-25)


def test_verify_compares_products_that_float32_rounds_up(function):
    # (1 - 2**-23) * (0.5 + 2**-24) = 0.5 - 2**-47, which rounds to 0.5 in float32.
    assert accepts(function, target=0.5, draft=0.5 + 2.0**-24, uniform=1 - 2.0**-23)
    assert not accepts(function, target=0.5, draft=0.5 + 2.0**-24, uniform=LARGEST_UNIFORM)


def test_verify_compares_products_that_float32_rounds_down(function):
    # (0.5 + 2**-24) * (0.5 + 2**-24) = 0.25 + 2**-24 + 2**-48 exceeds what it rounds to by 2**-48.
    rounded = 0.25 + 2.0**-24
    assert not accepts(function, target=rounded, draft=0.5 + 2.0**-24, uniform=0.5 + 2.0**-24)
    assert accepts(function, target=rounded + 2.0**-25, draft=0.5 + 2.0**-24, uniform=0.5 + 2.0**-24)


def test_verify_compares_products_below_the_float32_range(function):
    # 2**-125 * (0.5 - 2**-25) = 2**-126 - 2**-150 rounds to 2**-126 among the subnormals.
    assert accepts(function, target=SMALLEST_NORMAL, draft=2.0**-125, uniform=0.5 - 2.0**-25)
    assert not accepts(function, target=SMALLEST_NORMAL, draft=2.0**-125, uniform=0.5)
    assert accepts(function, target=2.0**-120, draft=2.0**-100, uniform=SMALLEST_SUBNORMAL)


@pytest.mark.parametrize("uniform", [0, 0.5, LARGEST_UNIFORM, 1, 1.5, INF, NAN])
def test_verify_accepts_equal_probabilities_at_every_uniform(function, uniform):
    for probability in (0.3, 0.1, 2.0**-23 / 3, SMALLEST_NORMAL, 1.0):
        assert accepts(function, probability, probability, uniform)


@pytest.mark.parametrize("draft", [0, SMALLEST_SUBNORMAL, -0.5, -INF])
@pytest.mark.parametrize("uniform", [0, LARGEST_UNIFORM, NAN])
def test_verify_accepts_what_the_draft_gives_nothing(function, draft, uniform):
    assert accepts(function, 2.0**-100, draft, uniform)


@pytest.mark.parametrize("target", [0, -0.0, -0.5, -INF, SMALLEST_SUBNORMAL, SMALLEST_NORMAL - SMALLEST_SUBNORMAL])
@pytest.mark.parametrize("draft", [0.5, 0, SMALLEST_SUBNORMAL, -INF])
def test_verify_rejects_targets_below_the_smallest_normal(function, target, draft):
    assert not accepts(function, target, draft, uniform=0)
    assert not accepts(function, target, draft, uniform=-1)


def test_verify_accepts_the_smallest_normal_target(function):
    assert accepts(function, SMALLEST_NORMAL, draft=1, uniform=0)


@pytest.mark.parametrize("target, draft", [(NAN, 0.5), (1, NAN), (INF, NAN), (NAN, NAN), (NAN, -INF)])
def test_verify_rejects_nan_probabilities(function, target, draft):
    assert not accepts(function, target, draft, uniform=0)


def test_verify_counts_probabilities_above_one_as_one(function):
    assert accepts(function, target=2, draft=3, uniform=NAN)
    assert accepts(function, target=1, draft=INF, uniform=NAN)
    assert accepts(function, target=INF, draft=3e38, uniform=NAN)
    # Against 1, not against 5: the ratio is one half.
    assert accepts(function, target=0.5, draft=5, uniform=0.4)
    assert not accepts(function, target=0.5, draft=5, uniform=0.5)


def test_verify_accepts_at_nan_uniforms_only_where_the_target_is_not_below(function):
    assert accepts(function, target=0.5, draft=0.5, uniform=NAN)
    assert not accepts(function, target=0.5, draft=0.5 + 2.0**-24, uniform=NAN)


@pytest.mark.parametrize("uniform, accepted", [(-0.5, 1), (-3e38, 1), (-INF, 1), (1, 0), (1.5, 0), (3e38, 0), (INF, 0)])
def test_verify_compares_uniforms_outside_the_unit_interval_as_they_are(function, uniform, accepted):
    assert accepts(function, target=0.25, draft=0.5, uniform=uniform) == accepted


def test_verify_stops_at_the_first_rejection(function):
    tokens, draft = [0, 1, 0], [[1, 0], [0.5, 0.5], [1, 0]]
    target = [[1, 0], [1, 0], [1, 0], [0, 1]]
    assert answer(function, tokens, draft, target, [0, 0, 0], [0, 0, 0, 0]) == (1, 0)


# 2. Weights


def test_verify_weighs_in_units_of_2_to_the_minus_44(function):
    # Less than a unit is nothing, and the rest of a unit is dropped: 1.5 units weigh as 1.
    for uniform in (0, LARGEST_UNIFORM):
        assert draw(function, [2.0**-45, 2.0**-44], uniform) == 1
    assert draw(function, [1.5 * 2.0**-44, 2.0**-44], 0.5) == 1
    assert draw(function, [2 * 2.0**-44, 2.0**-44], 0.5) == 0


def test_verify_weighs_negatives_and_nan_as_zero(function):
    row = [-INF, NAN, -0.5, 0.25, -0.0, 0.25, NAN]
    assert draw(function, row, 0) == 3
    assert draw(function, row, 0.5) == 5
    assert draw(function, row, LARGEST_UNIFORM) == 5


@pytest.mark.parametrize("pattern", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF], ids=hex)
def test_verify_weighs_every_kind_of_nan_as_zero(function, pattern):
    # A signalling NaN, the first two, passes through C's fmax and fmin.
    tokens, draft, target, accept, sample = arrays_of([], [], [[0, 0.5, 0, 0.5]], [], [0.5])
    target.view(np.uint32)[0, 0, ::2] = pattern
    assert np.isnan(target[0, 0, ::2]).all()
    assert list(function(tokens, draft, target, accept, sample).next_token) == [3]
    sample.view(np.uint32)[0, 0] = pattern
    assert list(function(tokens, draft, target, accept, sample).next_token) == [1]


def test_verify_weighs_values_above_one_as_one(function):
    row = [INF, 3e38, 1.5, 1]
    assert [draw(function, row, quarter / 4) for quarter in range(4)] == [0, 1, 2, 3]


def test_verify_weighs_subnormals_as_zero(function):
    assert draw(function, [SMALLEST_SUBNORMAL, SMALLEST_NORMAL, 2.0**-44], 0) == 2


def test_verify_draws_from_the_residual_after_a_rejection(function):
    # 0.5 - 0.25 and 0.5 - 0: token 1 has two thirds.
    assert residual_draw(function, [0.5, 0.5], [0.25, 0], 0.33) == 0
    assert residual_draw(function, [0.5, 0.5], [0.25, 0], 0.34) == 1


def test_verify_rounds_the_residual_to_float32(function):
    # 0.5 - 2**-40 is 0.5 in float32. Left exact it would weigh 16 units less, and at one half the threshold
    # would be below the weight of token 0.
    assert residual_draw(function, [0.5, 0.5], [0, 2.0**-40], 0.5) == 1


def test_verify_rounds_the_residual_to_nearest_even(function):
    # The difference lies halfway between 0.5 - 2**-25, odd in its last bit, and 0.5: rounded up, token 0 has
    # exactly half of the weight.
    assert residual_draw(function, [0.5, 0.5], [2.0**-26, 0], 0.5) == 1
    # Halfway between 0.5 - 2**-24, even, and 0.5 - 2**-25: rounded down, token 0 has exactly half again.
    row = [0.5 - 2.0**-25, 0.5 - 2.0**-24]
    assert residual_draw(function, row, [2.0**-26, 0], 0.5) == 1
    assert residual_draw(function, row, [2.0**-26, 2.0**-25], 0.5) == 0


@pytest.mark.parametrize(
    "target, draft, weight",
    [
        (INF, INF, 0),
        (-INF, -INF, 0),
        (INF, 0.5, 1),
        (0.5, -INF, 1),
        (3e38, -3e38, 1),
        (0.5, INF, 0),
        (NAN, 0, 0),
        (0.5, NAN, 0),
        (-0.5, -0.75, 0.25),
    ],
)
def test_verify_weighs_odd_residuals(function, target, draft, weight):
    # Beside a token of weight 0.5, so that the share of token 0 is weight / (weight + 0.5).
    share = weight / (weight + 0.5)
    assert residual_draw(function, [target, 0.5], [draft, 0], share) == 1
    if weight:
        assert residual_draw(function, [target, 0.5], [draft, 0], share - 2.0**-20) == 0


def test_verify_leaves_out_the_rejected_token_without_draft_probs(function):
    target = [[0.25, 0.5, 0.25], [1, 0, 0]]
    assert answer(function, [1], None, target, [0.5], [0.25, 0]) == (0, 0)
    assert answer(function, [1], None, target, [0.5], [0.5, 0]) == (0, 2)


def test_verify_draws_from_the_target_where_only_the_rejected_token_has_mass(function):
    assert answer(function, [1], None, [[0, 0.5, 0], [1, 0, 0]], [0.5], [0.9, 0]) == (0, 1)


def test_verify_draws_from_the_target_where_the_residual_is_empty(function):
    draft, target = [[0.5, 0.5]], [[0.25, 0.25], [1, 0]]
    assert answer(function, [0], draft, target, [0.9], [0.49, 0]) == (0, 0)
    assert answer(function, [0], draft, target, [0.9], [0.5, 0]) == (0, 1)


def test_verify_draws_from_the_target_where_the_residual_is_below_one_unit(function):
    # Token 1 has 2**-45 more in the target than in the draft, half a unit: no weight.
    draft, target = [[0.5, 2.0**-30]], [[0.25, 2.0**-30 + 2.0**-45], [1, 0]]
    assert answer(function, [0], draft, target, [0.9], [0.5, 0]) == (0, 0)


def test_verify_returns_minus_one_where_the_target_has_no_mass(function):
    for row in ([0, 0], [NAN, NAN], [-1, -INF], [2.0**-45, SMALLEST_SUBNORMAL]):
        assert draw(function, row, 0.5) == -1
        assert answer(function, [0], [[1, 0]], [row, [1, 0]], [0.5], [0.5, 0]) == (0, -1)
        assert answer(function, [0], None, [row, [1, 0]], [0.5], [0.5, 0]) == (0, -1)


# 3. Draw


@pytest.mark.parametrize(
    "uniform, token",
    [(-INF, 1), (-0.5, 1), (-0.0, 1), (NAN, 1), (SMALLEST_SUBNORMAL, 1), (1, 2), (1.5, 2), (INF, 2)],
)
def test_verify_clamps_the_sampling_uniform(function, uniform, token):
    assert draw(function, [0, 0.5, 0.5, 0], uniform) == token


def test_verify_takes_a_uniform_of_one_as_the_largest_32_bit_fraction(function):
    # Token 1 has 2**-25 of the weight. The largest float32 below 1 leaves 2**-24 above it, and so falls short
    # of token 1; 1 counts as 1 - 2**-32.
    assert draw(function, [1, 2.0**-25], LARGEST_UNIFORM) == 0
    assert draw(function, [1, 2.0**-25], 1) == 1


def test_verify_keeps_the_lowest_bits_of_small_uniforms(function):
    # At 2**-32, a fraction of 1, the threshold is floor((2**44 + 2**12) / 2**32) = 2**12: token 1 begins.
    assert draw(function, [2.0**-32, 1], 2.0**-32) == 1
    assert draw(function, [2.0**-32, 1], 0.99 * 2.0**-32) == 0


def test_verify_never_draws_a_token_without_weight(function):
    row = [0, 0.25, 0, 0, 0.25, 0, 0.5, 0]
    drawn = {draw(function, row, step / 64) for step in range(64)} | {draw(function, row, LARGEST_UNIFORM)}
    assert drawn == {1, 4, 6}


def test_verify_draws_with_the_uniform_of_the_position_where_the_walk_stopped(function):
    draft, target = [[1, 0], [1, 0]], [[1, 0], [1, 0], [0.5, 0.5]]
    for stop, tokens in enumerate([[-1, 0], [0, -1], [0, 0]]):
        for uniform, token in ((0.25, 0), (0.75, 1)):
            rows = [*target[:stop], [0.5, 0.5], *target[stop + 1 :]]
            sample = [NAN] * 3
            sample[stop] = uniform
            assert answer(function, tokens, draft, rows, [0, 0], sample) == (stop, token)


def test_verify_draws_from_a_vocabulary_of_one(function):
    assert answer(function, [0], [[1]], [[1], [1]], [0.5], [0.5, 0.5]) == (1, 0)
    assert answer(function, [1], [[1]], [[1], [1]], [0.5], [0.5, 0.5]) == (0, 0)
    assert answer(function, [0], None, [[0.5], [1]], [0.5], [0.5, 0.5]) == (0, 0)


@pytest.mark.parametrize(
    "uniform, token", [(0, 0), (0.3, 314572), (LARGEST_UNIFORM, 2**20 - 1), (1, 2**20 - 1), (2, 2**20 - 1)]
)
def test_verify_is_exact_where_the_total_is_2_to_the_64(function, uniform, token):
    # 2**20 weights of 2**44. The threshold is the 32-bit fraction times 2**32, and each token spans 2**44 of
    # it: the token is fraction >> 12.
    fraction = min(int(float(np.float32(uniform)) * 2**32), 2**32 - 1)
    assert token == fraction >> 12
    target = np.ones((1, 1, 2**20), np.float32)
    empty = np.zeros((1, 0), np.int64), None
    result = function(*empty, target, np.zeros((1, 0), np.float32), np.array([[uniform]], np.float32))
    assert (int(result.accepted[0]), int(result.next_token[0])) == (0, token)


@pytest.mark.parametrize("light, uniform", [(0, 0.5), (2**19, 0.5), (2**20 - 1, LARGEST_UNIFORM), (2**20 - 1, 1)])
def test_verify_is_exact_just_below_a_total_of_2_to_the_64(function, light, uniform):
    # One weight is 2**44 - 2**20 instead of 2**44.
    target = np.ones((1, 1, 2**20), np.float32)
    target[0, 0, light] = LARGEST_UNIFORM
    fraction = min(int(float(np.float32(uniform)) * 2**32), 2**32 - 1)
    threshold = fraction * (2**64 - 2**20) >> 32
    token = threshold >> 44 if threshold < light << 44 else (threshold + 2**20) >> 44
    empty = np.zeros((1, 0), np.int64), None
    result = function(*empty, target, np.zeros((1, 0), np.float32), np.array([[uniform]], np.float32))
    assert int(result.next_token[0]) == token


@pytest.mark.parametrize("value", [0, NAN, -1])
def test_verify_returns_minus_one_for_the_largest_vocabulary_without_mass(function, value):
    target = np.full((1, 1, 2**20), value, np.float32)
    empty = np.zeros((1, 0), np.int64), None
    result = function(*empty, target, np.zeros((1, 0), np.float32), np.array([[0.5]], np.float32))
    assert int(result.next_token[0]) == -1


# Inputs and outputs


def test_verify_returns_int64_arrays():
    case = generate.random_case(0, shape=(3, 2, 7))
    result = reference.verify(*case.arrays)
    assert isinstance(result, VerifyResult)
    for output in result:
        assert (type(output), output.dtype, output.shape) == (np.ndarray, np.int64, (3,))


def test_verify_scalar_returns_lists_of_ints():
    case = generate.random_case(0, shape=(3, 2, 7))
    result = reference.verify_scalar(*case.arrays)
    assert isinstance(result, VerifyResult)
    for output in result:
        assert [type(value) for value in output] == [int] * 3


@pytest.mark.parametrize("with_draft_probs", [True, False], ids=["draft", "certain"])
def test_verify_takes_an_empty_batch(function, with_draft_probs):
    draft = np.zeros((0, 2, 5), np.float32) if with_draft_probs else None
    arrays = np.zeros((0, 2), np.int64), draft, np.zeros((0, 3, 5), np.float32)
    accepted, next_token = function(*arrays, np.zeros((0, 2), np.float32), np.zeros((0, 3), np.float32))
    assert (len(accepted), len(next_token)) == (0, 0)
    accepted, next_token = function(*arrays, seed=1)
    assert (len(accepted), len(next_token)) == (0, 0)


def test_verify_takes_drafts_of_no_tokens(function):
    target = np.array([[[0, 0.25, 0.75]], [[0.5, 0.5, 0]]], np.float32)
    for draft in (None, np.zeros((2, 0, 3), np.float32)):
        result = function(
            np.zeros((2, 0), np.int64),
            draft,
            target,
            np.zeros((2, 0), np.float32),
            np.float32([[0.25], [0.25]]),
        )
        assert [list(output) for output in result] == [[0, 0], [2, 0]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("token_dtype", ["int64", "int32"])
def test_verify_takes_every_dtype(function, dtype, token_dtype):
    # 0.1 differs between the two: each is exactly what its own widened values say.
    case = generate.random_case(5, shape=(16, 3, 7), dtype=dtype, token_dtype=token_dtype, with_draft_probs=True)
    tokens, draft, target, accept, sample = case.arrays
    result = function(*case.arrays)
    widened = function(tokens.astype(np.int64), draft.astype(np.float32), target.astype(np.float32), accept, sample)
    assert [list(output) for output in result] == [list(output) for output in widened]


def test_verify_subtracts_float16_rows_in_float32(function):
    # In float16 the residual 1 - 2**-13 would be 1, and token 1 would begin at one half.
    tokens, draft, target, accept, sample = arrays_of([2], [[2.0**-13, 0, 1]], [[1, 1, 0], [0, 0, 1]], [0.5], [0.5, 0])
    sample[0, 0] = 0.5 - 2.0**-15
    result = function(tokens, draft.astype(np.float16), target.astype(np.float16), accept, sample)
    assert (int(result.accepted[0]), int(result.next_token[0])) == (0, 1)


def test_verify_takes_nested_lists(function):
    result = function([[0]], [[[0.5, 0.5]]], [[[0.25, 0.75], [1, 0]]], [[0.75]], [[0.1, 0.1]])
    assert [list(output) for output in result] == [[0], [1]]


def test_verify_scalar_rounds_python_floats_to_float32():
    # As float64, 0.1 is below its float32, and 1e39 is not infinite, which it is as float32, with its sign.
    nearest = float(np.float32(0.1))
    assert nearest > 0.1
    bonus = [-1e39, 1e39, 1]
    result = reference.verify_scalar([[0]], [[[nearest, 0, 0]]], [[[0.1, 0, 0], bonus]], [[1.0]], [[0.5, 0.25]])
    assert result == ([1], [1])


def test_verify_takes_views(function):
    case = generate.random_case(8, shape=(6, 3, 257), with_draft_probs=True)
    expected = [list(output) for output in function(*case.arrays)]
    tokens, draft, target, accept, sample = case.arrays
    padded = np.full((6, 4, 300), 0.5, target.dtype)
    padded[:, :, :257] = target
    views = (
        np.asfortranarray(tokens),
        np.repeat(draft, 2, axis=2)[:, :, ::2],
        padded[:, :, :257],
        accept[::-1].copy()[::-1],
        np.asfortranarray(sample),
    )
    assert [list(output) for output in function(*views)] == expected


def test_verify_leaves_its_inputs_alone(function):
    for seed in range(20):
        case = generate.random_case(seed, shape=(4, 3, 7))
        before = [None if array is None else array.copy() for array in case.arrays]
        function(*case.arrays)
        for array, copy in zip(case.arrays, before):
            assert array is copy is None or array.tobytes() == copy.tobytes()


class Unreadable(Sequence):
    """A row that fails the test when it is read."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError("read a value that the walk does not reach")


def test_verify_scalar_reads_nothing_after_the_stop():
    row, unreadable = [0.5, 0.5], Unreadable(2)
    # Rejected at position 0, by a token that the target cannot emit.
    result = reference.verify_scalar(
        [[0, 1]], [[[1, 0], unreadable]], [[[0, 1], unreadable, unreadable]], [[0, 0]], [[0.5, 0, 0]]
    )
    assert result == ([0], [1])
    # Ended at position 1: the draft's row there is not read.
    result = reference.verify_scalar([[0, -1]], [[row, unreadable]], [[row, row, unreadable]], [[0, 0]], [[0, 0.75, 0]])
    assert result == ([1], [1])


def test_verify_scalar_reads_nothing_that_an_option_leaves_out():
    row, unreadable = [0.5, 0.5], Unreadable(2)
    # Ended by num_draft: neither the token there nor the draft's row.
    result = reference.verify_scalar(
        [Unreadable(1)], [[unreadable]], [[row, unreadable]], [[0]], [[0.75, 0]], num_draft=[0]
    )
    assert result == ([0], [1])
    # The draft's rows of a deterministic draft, accepted and rejected.
    tokens, target = [[0, 0]], [[row, row, unreadable]]
    result = reference.verify_scalar(
        tokens, Unreadable(1), target, [[0, 0.75]], [[0, 0, 0]], deterministic_draft=np.array([True])
    )
    assert result == ([1], [1])
    # All but the target's rows up to the stop of a greedy sequence.
    result = reference.verify_scalar(
        tokens, [Unreadable(2)], [[[2, 1], [1, 2], unreadable]], Unreadable(1), Unreadable(1), greedy=[True]
    )
    assert result == ([1], [1])


def test_verify_needs_memory_for_a_few_rows_only():
    # 64 sequences whose rows together would be 197 MB: the residuals of all of them never exist at once.
    batch, num_draft, vocab = 64, 2, 128256
    row = np.full(vocab, 1 / vocab, np.float32)
    target = np.broadcast_to(row, (batch, num_draft + 1, vocab))
    draft = np.broadcast_to(row[::-1] * np.float32(2), (batch, num_draft, vocab))
    tokens = np.zeros((batch, num_draft), np.int64)
    tracemalloc.start()
    try:
        reference.verify(tokens, draft, target, seed=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24e6


@pytest.mark.parametrize("dtype", generate.DTYPES)
def test_verify_with_options_needs_memory_for_a_few_rows_only(dtype):
    # Widened, the rows of the targets alone would be 98 MB, and the padding of the drafts half as much again.
    batch, num_draft, vocab = 64, 2, 128256
    row = generate.as_dtype(np.full(vocab, 1 / vocab, np.float32), dtype)
    target = np.broadcast_to(row, (batch, num_draft + 1, vocab))
    draft = np.broadcast_to(row[1:], (batch, num_draft, vocab - 1))
    options = {"greedy": np.arange(batch) % 2 == 0, "deterministic_draft": np.arange(batch) % 3 == 0}
    tokens = np.zeros((batch, num_draft), np.int64)
    tracemalloc.start()
    try:
        reference.verify(tokens, draft, target, seed=1, dtype="bfloat16", **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24e6


@pytest.mark.parametrize("seed", range(40))
def test_verify_does_not_depend_on_the_batch(seed):
    # The 300 rows take more than one block of work.
    case = generate.random_case(seed, shape=(300, 2, (1, 2, 257, 4096)[seed % 4]))
    accepted, next_token = reference.verify(*case.arrays)
    for row in range(0, 300, 13):
        one = [None if array is None else array[row : row + 1] for array in case.arrays]
        result = reference.verify(*one)
        assert (result.accepted[0], result.next_token[0]) == (accepted[row], next_token[row])


@pytest.mark.parametrize("seed", range(12))
def test_verify_with_options_does_not_depend_on_the_batch(seed):
    case = generate.option_case(seed, shape=(100, 2, (1, 2, 257, 4096)[seed % 4]))
    accepted, next_token = reference.verify(*case.arrays, **case.options)
    if isinstance(case.options.get("seed"), int):  # its uniforms depend on the index
        return
    for row in range(0, 100, 9):
        one = [None if array is None else array[row : row + 1] for array in case.arrays]
        options = {
            name: value[row : row + 1] if isinstance(value, np.ndarray) else value
            for name, value in case.options.items()
        }
        result = reference.verify(*one, **options)
        assert (result.accepted[0], result.next_token[0]) == (accepted[row], next_token[row])


# Uniforms drawn inside


@pytest.mark.parametrize("seed", [0, 2**64 - 1, [5, 6, 7, 8], np.array([5, 6, 2**63, 8], np.uint64)], ids=str)
@pytest.mark.parametrize("offset", [0, 2**32 - 1])
def test_verify_draws_what_uniforms_returns(function, seed, offset):
    tokens, draft, target, accept, sample = generate.random_case(3, shape=(4, 5, 257), clean=True).arrays
    drawn_accept, drawn_sample = philox.uniforms(seed, offset, batch=4, num_draft=5)

    def outputs(*uniforms, **keywords):
        return [list(output) for output in function(tokens, draft, target, *uniforms, **keywords)]

    drawn = {"seed": seed, "offset": offset}
    assert outputs(**drawn) == outputs(drawn_accept, drawn_sample)
    assert outputs(accept, None, **drawn) == outputs(accept, drawn_sample)
    assert outputs(None, sample, **drawn) == outputs(drawn_accept, sample)
    assert outputs(accept, sample, **drawn) == outputs(accept, sample)


def test_verify_without_a_seed_takes_one_from_the_operating_system(function, monkeypatch):
    monkeypatch.setattr(philox, "entropy_seed", lambda: 99)
    tokens, draft, target, _, _ = generate.random_case(3, shape=(4, 5, 257), clean=True).arrays
    result, expected = function(tokens, draft, target), function(tokens, draft, target, seed=99)
    assert [list(output) for output in result] == [list(output) for output in expected]


@pytest.mark.parametrize("given", [True, False], ids=["with-uniforms", "without-uniforms"])
def test_verify_refuses_wrong_seeds_and_offsets(function, given):
    arrays = generate.random_case(3, shape=(4, 5, 7)).arrays
    arrays = arrays if given else arrays[:3]
    with pytest.raises(TypeError, match="^`seed` must be an integer: expected int, got float"):
        function(*arrays, seed=1.0)
    with pytest.raises(ValueError, match="^`seed` must fit in 64 bits: .*, got -1"):
        function(*arrays, seed=-1)
    with pytest.raises(
        ValueError, match=r"^`seed` must be one integer or have shape \(batch,\): expected \(4,\), got \(3,\)"
    ):
        function(*arrays, seed=[1, 2, 3])
    with pytest.raises(TypeError, match="^`offset` must be an integer: expected int, got bool"):
        function(*arrays, seed=1, offset=True)
    with pytest.raises(ValueError, match="^`offset` must fit in 32 bits: .*, got 4294967296"):
        function(*arrays, seed=1, offset=2**32)


# Fewer proposals than positions


@pytest.mark.parametrize("length, accepted", [(-(2**31), 0), (-1, 0), (0, 0), (1, 1), (2, 2), (3, 3), (2**31 - 1, 3)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_verify_ends_the_drafts_at_num_draft(function, length, accepted, dtype):
    # All would be accepted. At one half, token 0 comes from the residual and token 1 from the target row itself.
    inputs = arrays_of([0, 0, 0], [[0.25, 0.75]] * 3, [[0.375, 0.625]] * 4, [0] * 3, [0.5] * 4)
    assert outputs(function, *inputs, num_draft=np.array([length], dtype)) == ([accepted], [1])
    assert outputs(function, *inputs, num_draft=[length]) == ([accepted], [1])


@pytest.mark.parametrize("draft", [[[0.5, 0.5]] * 2, None], ids=["draft", "certain"])
def test_verify_draws_from_the_target_where_num_draft_ends_the_drafts(function, draft):
    # Rejected, the token at position 1 leaves all weight to token 0; not proposed, it is drawn itself.
    inputs = arrays_of([0, 1], draft, [[1, 0], [0.75, 0.25], [1, 0]], [0, 0.9], [0, 0.75, 0])
    assert outputs(function, *inputs, num_draft=[2]) == ([1], [0])
    assert outputs(function, *inputs, num_draft=[1]) == ([1], [1])


@pytest.mark.parametrize("tokens, length, accepted", [([0, -1, 0], 3, 1), ([0, -1, 0], 2, 1), ([0, 0, -1], 1, 1)])
def test_verify_ends_the_drafts_at_what_comes_first(function, tokens, length, accepted):
    inputs = arrays_of(tokens, [[0.5, 0.5]] * 3, [[0.5, 0.5]] * 4, [0] * 3, [0.75] * 4)
    assert outputs(function, *inputs, num_draft=[length]) == ([accepted], [1])


def test_verify_does_not_look_at_tokens_behind_num_draft(function):
    # Rejected, the token beyond the vocabulary would leave the residual, which is all on token 0.
    inputs = arrays_of([2], [[0, 1]], [[0.5, 0.5], [1, 0]], [0], [0.75, 0])
    assert outputs(function, *inputs) == ([0], [0])
    assert outputs(function, *inputs, num_draft=[0]) == ([0], [1])


def test_verify_takes_a_length_for_each_sequence(function):
    inputs = repeated(arrays_of([0, 0], None, [[1, 0], [1, 0], [0, 1]], [0, 0], [0, 0, 0]), 3)
    for lengths in ([2, 0, 1], np.array([2, 9, 0, 9, 1, 9], np.int32)[::2]):
        assert outputs(function, *inputs, num_draft=lengths) == ([2, 0, 1], [1, 0, 0])


@pytest.mark.parametrize("seed", range(20))
def test_verify_with_num_draft_equals_negative_padding(function, seed):
    case = generate.random_case(seed, shape=(24, 4, 7))
    tokens, *others = case.arrays
    lengths = np.random.default_rng(seed).integers(-1, 6, 24)
    padded = np.where(np.arange(4) < lengths[:, None], tokens, -1).astype(tokens.dtype)
    assert outputs(function, tokens, *others, num_draft=lengths) == outputs(function, padded, *others)


# Deterministic drafts


def test_verify_counts_deterministic_drafts_as_certain(function):
    # 0.5 of 0.25 is accepted always; 0.5 of 1 is not at one half, and the token rejected loses its weight.
    inputs = repeated(arrays_of([0], [[0.25, 0.75]], [[0.5, 0.5], [1, 0]], [0.5], [0, 0]), 3)
    assert outputs(function, *inputs) == ([1, 1, 1], [0, 0, 0])
    for mask in ([True, False, True], np.array([True, True, False, False, True, True])[::2]):
        assert outputs(function, *inputs, deterministic_draft=mask) == ([0, 1, 0], [1, 0, 1])


def test_verify_accepts_deterministic_drafts_strictly_below_the_target(function):
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    inputs = arrays_of([0], [[0, 0]], [[0.5, 0.5], [1, 0]], [below], [0, 0])
    assert outputs(function, *inputs, deterministic_draft=[True]) == ([1], [0])


@pytest.mark.parametrize("value", [NAN, INF, 1])
def test_verify_does_not_read_the_probabilities_of_deterministic_drafts(function, value):
    draft = [[value] * 3] * 2
    inputs = arrays_of([0, 1], draft, [[1, 0, 0], [0.25, 0.5, 0.25], [1, 0, 0]], [0, 0.5], [0, 0.25, 0])
    assert outputs(function, *inputs, deterministic_draft=[True]) == ([1], [0])
    inputs[4][0, 1] = 0.5
    assert outputs(function, *inputs, deterministic_draft=[True]) == ([1], [2])


def test_verify_draws_from_the_target_where_a_deterministic_draft_has_all_mass(function):
    inputs = arrays_of([1], [[0.5, 0.25, 0.25]], [[0, 0.5, 0], [1, 0, 0]], [0.5], [0.9, 0])
    assert outputs(function, *inputs, deterministic_draft=[True]) == ([0], [1])


@pytest.mark.parametrize("token, expected", [(-1, 1), (3, 1), (2**63 - 1, 1)])
def test_verify_lets_no_token_lose_weight_to_a_deterministic_draft_outside_the_vocabulary(function, token, expected):
    inputs = arrays_of([token], [[1, 0, 0]], [[0.25, 0.25, 0.5], [1, 0, 0]], [0], [0.25, 0])
    assert outputs(function, *inputs, deterministic_draft=[True]) == ([0], [expected])


@pytest.mark.parametrize("seed", range(20))
def test_verify_with_deterministic_drafts_equals_draft_probs_none(function, seed):
    case = generate.random_case(seed, shape=(24, 4, 7), with_draft_probs=True)
    tokens, draft, *others = case.arrays
    sampled, certain = outputs(function, *case.arrays), outputs(function, tokens, None, *others)
    assert outputs(function, *case.arrays, deterministic_draft=np.ones(24, bool)) == certain
    assert outputs(function, *case.arrays, deterministic_draft=np.zeros(24, bool)) == sampled
    mask = np.random.default_rng(seed).random(24) < 0.5
    assert outputs(function, *case.arrays, deterministic_draft=mask) == chosen(mask, certain, sampled)


def test_verify_refuses_deterministic_drafts_without_draft_probs(function):
    tokens, _, *others = generate.random_case(3, shape=(4, 5, 7)).arrays
    with pytest.raises(ValueError, match="^`deterministic_draft` must be None where `draft_probs` is: .*Leave it out"):
        function(tokens, None, *others, deterministic_draft=np.zeros(4, bool))


# Drafts of a smaller vocabulary


@pytest.mark.parametrize("uniform", [0, LARGEST_UNIFORM, 1, NAN])
def test_verify_accepts_tokens_that_the_draft_lacks(function, uniform):
    inputs = narrow([2], [[0.5, 0.5]], [[0.5, 0.25, 2.0**-126], [0, 1, 0]], [uniform], [0, 0])
    assert outputs(function, *inputs) == ([1], [1])


@pytest.mark.parametrize("target", [0, -1, NAN, SMALLEST_NORMAL - SMALLEST_SUBNORMAL])
def test_verify_rejects_tokens_that_the_draft_lacks_and_the_target_cannot_emit(function, target):
    # The residual has 0.25 for token 0, 0 for token 1, the target's whole 0.25 for token 3.
    inputs = narrow([2], [[0.25, 0.75]], [[0.5, 0.25, target, 0.25], [0, 1, 0, 0]], [0], [0.5, 0])
    assert outputs(function, *inputs) == ([0], [3])
    inputs[4][0, 0] = 0.5 - 2.0**-24
    assert outputs(function, *inputs) == ([0], [0])


def test_verify_weighs_what_the_draft_lacks_as_the_target_does(function):
    # Token 0 is rejected. The residual is (0, 0.25, 0.125, 0.125), or (0, 0.5, 0.125, 0.125) after one column.
    target = [[0.25, 0.5, 0.125, 0.125], [1, 0, 0, 0]]
    quarters = [0, 0.5 - 2.0**-24, 0.5, 0.75]
    for draft, expected in (([[0.75, 0.25]], [1, 1, 2, 3]), ([[1]], [1, 1, 1, 2])):
        for uniform, token in zip(quarters, expected):
            inputs = narrow([0], draft, target, [0.5], [uniform, 0])
            assert outputs(function, *inputs) == ([0], [token])


def test_verify_falls_back_to_the_whole_target_row_of_a_draft_of_fewer_columns(function):
    inputs = narrow([0], [[0.5, 0.5]], [[0.25, 0.25, 0, -1], [1, 0, 0, 0]], [0.5], [0.5, 0])
    assert outputs(function, *inputs) == ([0], [1])


@pytest.mark.parametrize("columns", [0, 1, 3, 6])
@pytest.mark.parametrize("seed", range(10))
def test_verify_with_fewer_columns_equals_a_draft_padded_with_zeros(function, seed, columns):
    case = generate.random_case(seed, shape=(24, 4, 7), with_draft_probs=True)
    tokens, draft, *others = case.arrays
    padded = draft.copy()
    padded[:, :, columns:] = 0
    for mask in (None, np.random.default_rng(seed).random(24) < 0.5):
        shortened = outputs(function, tokens, draft[:, :, :columns], *others, deterministic_draft=mask)
        assert shortened == outputs(function, tokens, padded, *others, deterministic_draft=mask)


# float16 and bfloat16


@pytest.mark.parametrize(
    "pattern, token",
    [(0x3F00, 1), (0x3E80, 0), (0x3F80, 1), (0x3F81, 1), (0x7F80, 1), (0x7F7F, 1)]
    + [(0, 0), (0x8000, 0), (0xBF80, 0), (0xFF80, 0), (0x7FC0, 0), (0x7F81, 0), (0xFFFF, 0), (1, 0)],
)
def test_verify_reads_bfloat16_bit_patterns(function, pattern, token):
    # 0.5 and 0.25, 1 and the number after it, infinity and the largest number; and patterns without weight.
    # Drawn at one half, beside a token of 0.375: token 1 if it weighs as much at least.
    target = np.array([[[0x3EC0, pattern]]], np.uint16)
    empty = np.zeros((1, 0), np.int64), None
    uniforms = np.zeros((1, 0), np.float32), np.array([[0.5]], np.float32)
    assert outputs(function, *empty, target, *uniforms, dtype="bfloat16") == ([0], [token])


def test_verify_takes_each_model_in_a_dtype_of_its_own(function):
    # The ratio is 0.25 to 0.5, whatever holds the two; as integers the bits would not be near it.
    models = {
        "float32": lambda values: np.array(values, np.float32),
        "float16": lambda values: np.array(values, np.float16),
        "bfloat16": lambda values: generate.as_dtype(np.array(values, np.float32), "bfloat16"),
    }
    for draft_dtype, target_dtype in product(models, models):
        draft = models[draft_dtype]([[[0.5, 0.25, 0.25]]])
        target = models[target_dtype]([[[0.25, 0.25, 0.5], [0, 1, 0]]])
        for uniform, expected in ((0.5 - 2.0**-24, ([1], [1])), (0.5, ([0], [2]))):
            arrays = np.array([[0]]), draft, target, np.float32([[uniform]]), np.float32([[0, 0.5]])
            assert outputs(function, *arrays, dtype="bfloat16") == expected


def test_verify_subtracts_bfloat16_rows_in_float32(function):
    # In bfloat16 the residual 1 - 2**-13 would be 1, and token 1 would begin at one half.
    tokens, draft, target, accept, sample = arrays_of([2], [[2.0**-13, 0, 1]], [[1, 1, 0], [0, 0, 1]], [0.5], [0.5, 0])
    sample[0, 0] = 0.5 - 2.0**-15
    draft, target = generate.as_dtype(draft, "bfloat16"), generate.as_dtype(target, "bfloat16")
    assert outputs(function, tokens, draft, target, accept, sample, dtype="bfloat16") == ([0], [1])


def test_verify_rejects_bfloat16_targets_below_the_smallest_normal(function):
    for pattern, accepted in ((0x0080, 1), (0x007F, 0), (0x0001, 0)):
        target = np.array([[[pattern, 0], [0x3F80, 0]]], np.uint16)
        arrays = np.array([[0]]), np.zeros((1, 1, 2), np.float32), target, np.float32([[0]]), np.float32([[0, 0]])
        assert outputs(function, *arrays, dtype="bfloat16") == ([accepted], [0] if accepted else [-1])


@pytest.mark.parametrize("target_dtype", generate.DTYPES)
@pytest.mark.parametrize("draft_dtype", generate.DTYPES)
def test_verify_equals_itself_on_rows_widened_to_float32(function, draft_dtype, target_dtype):
    for case in generate.option_cases(100, 30, draft_dtype=draft_dtype, target_dtype=target_dtype):
        tokens, draft, target, *uniforms = case.arrays
        widened = [None if probs is None else generate.widened(probs) for probs in (draft, target)]
        options = {name: value for name, value in case.options.items() if name != "dtype"}
        expected = outputs(function, tokens, *widened, *uniforms, **options)
        assert outputs(function, *case.arrays, **case.options) == expected, case.id


def test_verify_reads_bfloat16_in_either_byte_order_and_with_strides(function):
    case = generate.option_case(8, shape=(6, 3, 257), target_dtype="bfloat16", draft_dtype="bfloat16")
    tokens, draft, target, *uniforms = case.arrays
    swapped = (draft.astype(">u2"), target.astype(">u2"))
    strided = (np.repeat(draft, 2, axis=2)[:, :, ::2], np.asfortranarray(target))
    for models in (swapped, strided):
        assert outputs(function, tokens, *models, *uniforms, **case.options) == outputs(
            function, *case.arrays, **case.options
        )


def test_verify_takes_arrays_whose_dtype_is_bfloat16(function):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    for case in generate.option_cases(0, 30, target_dtype="bfloat16", draft_dtype="bfloat16", with_draft_probs=True):
        tokens, draft, target, *uniforms = case.arrays
        options = {name: value for name, value in case.options.items() if name != "dtype"}
        # Neither named nor in need of a name.
        result = outputs(function, tokens, draft.view(bfloat16), target.view(bfloat16), *uniforms, **options)
        assert result == outputs(function, *case.arrays, **case.options), case.id


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_verify_leaves_other_dtypes_alone_where_bfloat16_is_named(function, dtype):
    case = generate.random_case(5, shape=(16, 3, 7), dtype=dtype, with_draft_probs=True)
    assert outputs(function, *case.arrays, dtype="bfloat16") == outputs(function, *case.arrays)
    nested = [[0]], [[[0.5, 0.5]]], [[[0.25, 0.75], [1, 0]]], [[0.75]], [[0.1, 0.1]]
    assert outputs(function, *nested, dtype="bfloat16") == ([0], [1])


@pytest.mark.parametrize("name, index", [("draft_probs", 1), ("target_probs", 2)])
def test_verify_refuses_uint16_that_is_not_said_to_be_bfloat16(function, name, index):
    inputs = list(generate.random_case(5, shape=(2, 3, 7), dtype="float32", with_draft_probs=True).arrays)
    inputs[index] = generate.as_dtype(inputs[index], "bfloat16")
    with pytest.raises(TypeError, match=f'^`{name}` must hold floating-point .*, got uint16. Pass dtype="bfloat16"'):
        function(*inputs)


@pytest.mark.parametrize("dtype", ["float16", "uint16", "", 16])
def test_verify_refuses_other_values_of_dtype(function, dtype):
    case = generate.random_case(5, shape=(2, 3, 7))
    with pytest.raises(ValueError, match=f'^`dtype` must be None or "bfloat16": .*, got {dtype!r}'):
        function(*case.arrays, dtype=dtype)


# Greedy sequences


@pytest.mark.parametrize(
    "row, largest",
    [
        ([1, 3, 2], 1),
        ([3, 1, 2], 0),
        ([1, 2, 3], 2),
        ([-5, -3, -4], 1),
        ([1e30, 7, -1e30], 0),
        # The lowest of equal ones.
        ([1, 3, 3, 3], 1),
        ([2, 2, 2], 0),
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([-1, -0.0, 0.0], 1),
        ([-1, 0.0, -0.0], 1),
        ([1, INF, INF], 1),
        ([-INF, -INF], 0),
        # The larger by one bit, of either sign.
        ([1, 1 + 2.0**-23], 1),
        ([1 + 2.0**-23, 1], 0),
        ([-1, -1 + 2.0**-24], 1),
        ([-1 + 2.0**-24, -1], 0),
        ([3.4028234663852886e38, INF], 1),
        ([-INF, -3.4028234663852886e38], 1),
        # Subnormals are numbers.
        ([0, 1e-40], 1),
        ([0, SMALLEST_SUBNORMAL], 1),
        ([-SMALLEST_SUBNORMAL, -0.0], 1),
        ([-1e-40, -SMALLEST_SUBNORMAL], 1),
        ([-SMALLEST_SUBNORMAL, -SMALLEST_NORMAL, -1e-40], 0),
        ([SMALLEST_SUBNORMAL, 2 * SMALLEST_SUBNORMAL, 2 * SMALLEST_SUBNORMAL], 1),
        ([SMALLEST_NORMAL - SMALLEST_SUBNORMAL, SMALLEST_NORMAL], 1),
        # NaN never wins.
        ([NAN, 1, 2], 2),
        ([2, NAN, 1], 0),
        ([1, NAN, 2, NAN, 2], 2),
        ([NAN, -INF], 1),
        ([-INF, NAN], 0),
        ([NAN, INF], 1),
        ([NAN, -0.0, 0.0], 1),
        ([-NAN, -5, NAN], 1),
        ([-5], 0),
        ([NAN, NAN, NAN], -1),
        ([-NAN, NAN], -1),
        ([NAN], -1),
    ],
    ids=str,
)
def test_verify_greedy_follows_the_largest(function, row, largest):
    vocab = len(row)
    ends = arrays_of([], None, [row], [], [0.5])
    assert outputs(function, *ends, greedy=[True]) == ([0], [largest])
    # As a proposal, each token is accepted if it is the one, and the walk ends at the next row.
    bonus = [0] * (vocab - 1) + [1]
    for token in range(vocab):
        inputs = arrays_of([token], None, [row, bonus], [0.5], [0.5, 0.5])
        expected = ([1], [vocab - 1]) if token == largest else ([0], [largest])
        assert outputs(function, *inputs, greedy=[True]) == expected


@pytest.mark.parametrize("pattern", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF], ids=hex)
def test_verify_greedy_passes_over_every_kind_of_nan(function, pattern):
    tokens, draft, target, accept, sample = arrays_of([], None, [[0, -1, 0, -2]], [], [0.5])
    target.view(np.uint32)[0, 0, ::2] = pattern
    assert outputs(function, tokens, draft, target, accept, sample, greedy=[True]) == ([0], [1])
    target.view(np.uint32)[:] = pattern
    assert outputs(function, tokens, draft, target, accept, sample, greedy=[True]) == ([0], [-1])


@pytest.mark.parametrize("dtype, subnormal", [("float16", 1), ("bfloat16", 1), ("float16", 0x3FF), ("bfloat16", 0x7F)])
def test_verify_greedy_counts_subnormals_of_every_dtype(function, dtype, subnormal):
    negative = 0x8000 | subnormal
    for row, largest in (([0, subnormal], 1), ([negative, 0x8000], 1), ([negative, negative + 1], 0)):
        target = np.array([[row]], np.uint16)
        target = target.view(np.float16) if dtype == "float16" else target
        arrays = np.zeros((1, 0), np.int64), None, target, np.zeros((1, 0), np.float32), np.float32([[0.5]])
        assert outputs(function, *arrays, greedy=[True], dtype="bfloat16") == ([0], [largest])


def test_verify_greedy_walks_to_the_first_other_token(function):
    target = [[0, 2, 1], [5, 2, 1], [0, -1, 7], [-3, -2, -4]]
    for tokens, expected in (
        ([1, 0, 2], ([3], [1])),
        ([1, 0, 1], ([2], [2])),
        ([1, 2, 2], ([1], [0])),
        ([0, 0, 2], ([0], [1])),
        ([1, 3, 2], ([1], [0])),
        ([1, 2**63 - 1, 2], ([1], [0])),
        ([1, -1, 2], ([1], [0])),
        ([1, -(2**63), 2], ([1], [0])),
        ([-1, 0, 2], ([0], [1])),
    ):
        inputs = arrays_of(tokens, [[0, 0, 0]] * 3, target, [NAN] * 3, [NAN] * 4)
        assert outputs(function, *inputs, greedy=[True]) == expected


@pytest.mark.parametrize("length, accepted, token", [(-1, 0, 1), (0, 0, 1), (1, 1, 0), (2, 2, 1), (3, 2, 1)])
def test_verify_greedy_ends_at_num_draft(function, length, accepted, token):
    inputs = arrays_of([1, 0], None, [[0, 1], [1, 0], [0, 1]], [0, 0], [0, 0, 0])
    assert outputs(function, *inputs, greedy=[True], num_draft=[length]) == ([accepted], [token])


@pytest.mark.parametrize("token", [-1, 0, 1])
def test_verify_greedy_stops_at_a_row_of_nan(function, token):
    # The token -1 is not the row's -1: both stop, at the row of NaN.
    inputs = arrays_of([0, token, 0], None, [[1, 0], [NAN, NAN], [1, 0], [1, 0]], [0] * 3, [0] * 4)
    assert outputs(function, *inputs, greedy=[True]) == ([1], [-1])


def test_verify_greedy_takes_the_rejected_token_again_where_it_is_the_largest_elsewhere(function):
    # What sampling would do with the row plays no part: no weight is taken off, no row is replaced.
    inputs = arrays_of([1], [[0, 1]], [[-1, -2], [0, 1]], [0], [0.9, 0])
    assert outputs(function, *inputs, greedy=[True]) == ([0], [0])


def test_verify_greedy_is_for_each_sequence_by_itself(function):
    # Sampled, 0.25 of 0.5 is rejected at one half and the residual is token 1; greedy, token 0 is not largest.
    inputs = repeated(arrays_of([1], [[0, 1]], [[0.375, 0.625], [1, 0]], [0.75], [0, 0]), 3)
    assert outputs(function, *inputs) == ([0, 0, 0], [0, 0, 0])
    for mask in ([False, True, False], np.array([False, True, True, False, False, True])[::2]):
        assert outputs(function, *inputs, greedy=mask) == ([0, 1, 0], [0, 0, 0])
    assert outputs(function, *inputs, greedy=[True, False, True], num_draft=[0, 1, 1]) == ([0, 0, 1], [1, 0, 0])


def test_verify_greedy_has_no_use_for_deterministic_drafts(function):
    case = generate.random_case(5, shape=(16, 3, 7), with_draft_probs=True)
    greedy = outputs(function, *case.arrays, greedy=np.ones(16, bool))
    assert outputs(function, *case.arrays, greedy=np.ones(16, bool), deterministic_draft=np.ones(16, bool)) == greedy
    tokens, _, *others = case.arrays
    assert outputs(function, tokens, None, *others, greedy=np.ones(16, bool)) == greedy


@pytest.mark.parametrize("seed", range(30))
def test_verify_greedy_equals_a_loop_over_argmax(function, seed):
    # On logits without NaN, where numpy's argmax is the rule.
    rng = np.random.default_rng(seed)
    target = rng.integers(-3, 4, (24, 5, (2, 7, 257)[seed % 3])).astype(np.float32)
    best = target.argmax(axis=2)
    tokens = np.where(rng.random((24, 4)) < 0.8, best[:, :4], rng.integers(-1, target.shape[2] + 1, (24, 4)))
    accepted, next_token = [], []
    for row in range(24):
        stop = 0
        while stop < 4 and tokens[row, stop] == best[row, stop]:
            stop += 1
        accepted.append(stop)
        next_token.append(int(best[row, stop]))
    assert outputs(function, tokens, None, target, greedy=np.ones(24, bool)) == (accepted, next_token)


@pytest.mark.parametrize("seed", range(20))
def test_verify_with_a_greedy_mask_mixes_greedy_and_sampled_sequences(function, seed):
    case = generate.random_case(seed, shape=(24, 4, 7))
    mask = np.random.default_rng(seed).random(24) < 0.5
    sampled, greedy = outputs(function, *case.arrays), outputs(function, *case.arrays, greedy=np.ones(24, bool))
    assert outputs(function, *case.arrays, greedy=np.zeros(24, bool)) == sampled
    assert outputs(function, *case.arrays, greedy=mask) == chosen(mask, greedy, sampled)


def test_verify_greedy_needs_no_uniforms(function):
    target = np.float32([[[0, 1], [1, 0]]])
    for seed in (None, 7, [7]):
        assert outputs(function, [[1]], None, target, greedy=[True], seed=seed) == ([1], [0])


# What a batch emits


def test_emitted_tokens_are_the_accepted_prefix_and_the_next_token():
    tokens = [[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, -1, 42], [50, 51, 52]]
    emitted = reference.emitted_tokens(tokens, [3, 2, 0, 1, 1], [13, 23, 33, 43, -1])
    assert emitted.dtype == np.int64
    assert emitted.tolist() == [
        [10, 11, 12, 13],
        [20, 21, 23, -1],
        [33, -1, -1, -1],
        [40, 43, -1, -1],
        [50, -1, -1, -1],
    ]


@pytest.mark.parametrize("accepted, clamped", [(-1, 0), (-(2**63), 0), (3, 2), (2**63 - 1, 2)])
def test_emitted_tokens_clamps_accepted(accepted, clamped):
    tokens = np.array([[5, 6]], np.int32)
    emitted = reference.emitted_tokens(tokens, np.array([accepted]), np.array([9]))
    assert emitted.tolist() == reference.emitted_tokens(tokens, np.array([clamped]), np.array([9])).tolist()
    assert emitted.tolist() == [[9, -1, -1] if clamped == 0 else [5, 6, 9]]


def test_emitted_tokens_takes_empty_batches_and_drafts_of_no_tokens():
    assert reference.emitted_tokens(np.zeros((0, 2), np.int64), [], []).shape == (0, 3)
    assert reference.emitted_tokens(np.zeros((2, 0), np.int32), [0, 0], [4, -1]).tolist() == [[4], [-1]]


def test_emitted_tokens_leaves_its_inputs_alone_and_takes_views():
    tokens, accepted, next_token = np.arange(24).reshape(4, 6), np.array([0, 9, 1, 9, 2, 9, 3, 9]), np.arange(100, 104)
    before = tokens.copy(), accepted.copy(), next_token.copy()
    emitted = reference.emitted_tokens(tokens[:, ::2], accepted[::2], next_token[::-1])
    assert emitted.tolist() == [[103, -1, -1, -1], [6, 102, -1, -1], [12, 14, 101, -1], [18, 20, 22, 100]]
    for array, copy in zip((tokens, accepted, next_token), before):
        np.testing.assert_array_equal(array, copy)


def test_emitted_tokens_of_what_verify_returned():
    for case in generate.option_cases(0, 50):
        result = reference.verify(*case.arrays, **case.options)
        emitted = reference.emitted_tokens(case.draft_tokens, *result).tolist()
        for tokens, stop, token, row in zip(case.draft_tokens.tolist(), *map(np.ndarray.tolist, result), emitted):
            assert row == tokens[:stop] + [token] + [-1] * (len(tokens) - stop), case.id


# One against the other, and cases whose answer is known beforehand


@pytest.mark.parametrize("first_seed", generate.blocks(range(0, RANDOM_CASES, CASES_PER_TEST), 8))
def test_verify_equals_verify_scalar_on_random_cases(first_seed):
    for case in generate.random_cases(CASES_PER_TEST, first_seed=first_seed):
        # Raised by a caller who set numpy to raise, a flag of this arithmetic would be an error.
        with np.errstate(all="raise"):
            accepted, next_token = reference.verify(*case.arrays)
        expected = reference.verify_scalar(*case.arrays)
        assert (accepted.tolist(), next_token.tolist()) == expected, case.id


@pytest.mark.parametrize("first_seed", generate.blocks(range(0, OPTION_CASES, CASES_PER_TEST), 6))
def test_verify_equals_verify_scalar_on_option_cases(first_seed):
    for case in generate.option_cases(first_seed, CASES_PER_TEST):
        with np.errstate(all="raise"):
            accepted, next_token = reference.verify(*case.arrays, **case.options)
        expected = reference.verify_scalar(*case.arrays, **case.options)
        assert (accepted.tolist(), next_token.tolist()) == expected, case.id


SHAPES = [(1, 1, 2), (3, 5, 257), (2, 7, 8193), (64, 2, 7)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "b{}-k{}-v{}".format(*shape))
def test_verify_accepts_all_of_what_it_must(function, shape, dtype):
    for make in (generate.accept_all, generate.identical):
        case = make(1, shape, dtype)
        accepted, next_token = function(*case.arrays)
        assert list(accepted) == [shape[1]] * shape[0], case.id
        # The next token is drawn from the bonus row, as if there had been no drafts.
        tokens, draft, target, accept, sample = case.arrays
        bonus = function(tokens[:, :0], draft[:, :0], target[:, -1:], accept[:, :0], sample[:, -1:])
        assert list(next_token) == list(bonus.next_token), case.id


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "b{}-k{}-v{}".format(*shape))
def test_verify_rejects_the_first_of_what_it_must(function, shape, dtype):
    case = generate.reject_first(1, shape, dtype)
    accepted, next_token = function(*case.arrays)
    assert list(accepted) == [0] * shape[0]
    assert all(token != rejected for token, rejected in zip(next_token, case.draft_tokens[:, 0]))


def test_random_cases_reach_every_branch():
    # A generator that stopped producing some kind of case would make the comparison above hollow.
    accepted_lengths, next_tokens, kinds, vocabs = set(), set(), set(), set()
    on_boundary = 0
    for case in generate.random_cases(400):
        tokens, draft, target, accept, _ = case.arrays
        batch, num_draft = tokens.shape
        vocab = target.shape[2]
        vocabs.add(vocab)
        accepted, next_token = reference.verify(*case.arrays)
        accepted_lengths |= set(accepted.tolist())
        next_tokens |= set(np.sign(next_token).tolist())
        for row in range(batch):
            stop = int(accepted[row])
            stopped_by = int(tokens[row, stop]) if stop < num_draft else None
            if stopped_by is None:
                kinds.add("all accepted")
            elif stopped_by < 0:
                kinds.add("ended")
            elif stopped_by >= vocab:
                kinds.add("beyond the vocabulary")
            else:
                kinds.add("rejected" if draft is not None else "rejected a certain token")
                target_at = float(target[row, stop, stopped_by])
                draft_at = 1.0 if draft is None else float(draft[row, stop, stopped_by])
                if 0 < target_at < draft_at <= 1:
                    with np.errstate(all="ignore"):
                        on_boundary += accept[row, stop] == np.float32(target_at / draft_at)
    assert accepted_lengths == set(range(generate.MAX_DRAFT + 1))
    assert next_tokens == {-1, 0, 1}
    assert vocabs == set(generate.VOCABS)
    assert kinds == {"all accepted", "ended", "beyond the vocabulary", "rejected", "rejected a certain token"}
    assert on_boundary > 50


def test_option_cases_reach_every_branch():
    vocabs, dtypes, token_dtypes, given, seeds, masks, columns = (set() for _ in range(7))
    kinds: Counter[object] = Counter()
    for case in generate.option_cases(0, 1000):
        tokens, draft, target, accept, sample = case.arrays
        (batch, num_draft), vocab = tokens.shape, target.shape[2]
        options = case.options
        vocabs.add(vocab)
        token_dtypes.add(tokens.dtype.name)
        dtypes.add((draft is not None and draft.dtype.name, target.dtype.name))
        given.add((accept is None, sample is None))
        seeds.add(type(options.get("seed")))
        # The kernels take a seed only where it is needed, and uint16 only where it is explained.
        assert (accept is None or sample is None) == ("seed" in options)
        assert options.get("dtype") == "bfloat16" or np.dtype(np.uint16) not in (
            target.dtype,
            getattr(draft, "dtype", 0),
        )
        for name in ("deterministic_draft", "greedy"):
            mask = options.get(name)
            masks.add((name, None if mask is None or batch < 2 else (bool(mask.all()), bool(mask.any()))))
        lengths = options.get("num_draft")
        if lengths is not None:
            kinds.update({(lengths.dtype.name, "below 0"): (lengths < 0).sum()})
            kinds.update({(lengths.dtype.name, "above K"): (lengths > num_draft).sum()})
            kinds.update({(lengths.dtype.name, "in between"): ((lengths > 0) & (lengths < num_draft)).sum()})
        if draft is not None and vocab > 2:
            columns.add(
                "all" if draft.shape[2] == vocab else {vocab - 1: "less one", 1: "one"}.get(draft.shape[2], "half")
            )

        accepted, next_token = reference.verify(*case.arrays, **options)
        ends = generate.proposals(tokens, lengths)
        values = generate.widened(target)
        first, last = generate.largest(values)
        for row, stop in enumerate(accepted.tolist()):
            greedy = bool(options["greedy"][row]) if "greedy" in options else False
            stopped_by = int(tokens[row, stop]) if stop < ends[row] else None
            kinds[greedy, "accepted", stop] += 1
            kinds[greedy, "ended" if stopped_by is None else "rejected"] += 1
            kinds[greedy, "no token"] += next_token[row] < 0
            if greedy:
                there = values[row, stop]
                best = float(there[first[row, stop]])
                kinds["rejected as large"] += stopped_by == last[row, stop] != first[row, stop]
                kinds["accepted one of several"] += bool((first != last)[row, :stop].any())
                kinds["subnormal"] += 0 < abs(best) < SMALLEST_NORMAL
                kinds["zeros"] += best == 0 and len(set(np.signbit(there[there == 0]))) == 2
                kinds["minus infinity beside NaN"] += best == -INF and bool(np.isnan(there).any())
                kinds["NaN first"] += bool(np.isnan(there[0])) and next_token[row] > 0
            elif draft is not None:
                certain = bool(options["deterministic_draft"][row]) if "deterministic_draft" in options else False
                lacking = tokens[row] >= draft.shape[2]
                kinds[certain, "accepted a token that the draft lacks"] += bool(lacking[:stop].any())
                if stopped_by is not None:
                    kinds[certain, "rejected one"] += stopped_by < draft.shape[2]
                    kinds[certain, "rejected one that the draft lacks"] += draft.shape[2] <= stopped_by < vocab
                    kinds[certain, "rejected one beyond the vocabulary"] += stopped_by >= vocab
    assert vocabs == set(generate.VOCABS)
    assert token_dtypes == {"int32", "int64"}
    names = ("float32", "float16", "uint16")
    assert dtypes == {*product(names, names), *((False, name) for name in names)}
    assert given == set(product([False, True], repeat=2))
    assert seeds == {type(None), int, np.ndarray}
    assert masks == set(product(["deterministic_draft", "greedy"], [None, (True, True), (False, True), (False, False)]))
    assert columns == {"all", "less one", "half", "one"}
    assert min(kinds.values()) >= 3, kinds
    assert len(kinds) == 2 * 3 + 2 * (generate.MAX_DRAFT + 1) + 2 * 3 + 6 + 2 * 4


@pytest.mark.parametrize("clean", [False, True], ids=["odd", "clean"])
def test_option_case_is_a_function_of_its_seed(clean):
    for seed in range(20):
        first, second = generate.option_case(seed, clean=clean), generate.option_case(seed, clean=clean)
        assert first.id == second.id
        assert first.options.keys() == second.options.keys()
        for array, other in zip((*first.arrays, *first.options.values()), (*second.arrays, *second.options.values())):
            same = array.tobytes() == other.tobytes() if isinstance(array, np.ndarray) else array == other
            assert same, (first.id, array)


def test_bfloat16_of_the_cases_rounds_to_nearest_even():
    values = np.float32(
        [1, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 3.4028234663852886e38, -INF, 2.0**-134]
    )
    assert generate.as_dtype(values, "bfloat16").tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0]
    patterns = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan(generate.widened(generate.as_dtype(patterns.view(np.float32), "bfloat16"))).all()


def test_random_case_is_a_function_of_its_seed():
    first, second = generate.random_case(12), generate.random_case(12)
    assert first.id == second.id
    for array, other in zip(first.arrays, second.arrays):
        assert array is other is None or array.tobytes() == other.tobytes()


def test_reference_examples_run():
    result = doctest.testmod(reference)
    assert result.attempted > 0 and result.failed == 0
