"""prepare(): verify() on arrays that stay, with the same answers and errors."""

from __future__ import annotations

import gc

import arrays
import generate
import numpy as np
import pytest

from specverify_dpex import UsmArray, VerifyResult, prepare, reference, verify

OWN = next(kind for kind in arrays.kinds() if kind.name == "usm-array")


def case_on(kind, queue, seed=1, shape=(3, 4, 257)):
    case = generate.random_case(seed, shape=shape, dtype="float32", token_dtype="int64", with_draft_probs=True)
    return case, [kind.make(array, queue) for array in case.arrays]


def assert_reads(kind, result, expected):
    assert type(result.accepted) is type(result.next_token) is kind.result_class
    np.testing.assert_array_equal(kind.read(result.accepted), expected.accepted)
    np.testing.assert_array_equal(kind.read(result.next_token), expected.next_token)


def test_prepared_equals_verify(usm_kind, queue):
    kind = usm_kind
    case, inputs = case_on(kind, queue)
    prepared = prepare(*inputs)
    for _ in range(3):
        result = prepared()
        assert result is prepared.result
        assert_reads(kind, result, reference.verify(*case.arrays))


def test_prepared_reads_what_the_arrays_hold_now(queue):
    cases = [case_on(OWN, queue, seed, (8, 3, 8193))[0] for seed in range(5)]
    inputs = [arrays.usm_array(array, queue) for array in cases[0].arrays]
    prepared = prepare(*inputs)
    for case in cases:
        for array, values in zip(inputs, case.arrays):
            array.memory.copy_from_host(bytearray(values.tobytes()))
        result = prepared()
        expected = reference.verify(*case.arrays)
        assert result.accepted.tolist() == expected.accepted.tolist()
        assert result.next_token.tolist() == expected.next_token.tolist()


def test_prepared_draws_by_seed_and_offset(usm_kind, queue):
    kind = usm_kind
    case, inputs = case_on(kind, queue)
    prepared = prepare(*inputs[:3], seed=11)
    for offset in (0, 5, 2**32 - 1):
        assert_reads(kind, prepared(offset), reference.verify(*case.arrays[:3], seed=11, offset=offset))


def test_prepared_keeps_its_arrays_alive(queue):
    case, inputs = case_on(OWN, queue)
    prepared = prepare(*inputs)
    inputs.clear()
    gc.collect()
    for _ in range(100):
        UsmArray((1000,), "float32", sycl_queue=queue)
    assert_reads(OWN, prepared(), reference.verify(*case.arrays))


def test_prepared_calls_share_nothing_with_others(queue):
    case, inputs = case_on(OWN, queue, 1)
    other, other_inputs = case_on(OWN, queue, 2)
    prepared, second = prepare(*inputs), prepare(*other_inputs)
    kept = verify(*inputs)
    prepared(), second(), verify(*other_inputs)
    for result, expected in ((prepared.result, case), (second.result, other), (kept, case)):
        assert_reads(OWN, VerifyResult(*result), reference.verify(*expected.arrays))


def test_prepare_refuses_what_it_would_have_to_copy(queue):
    case = case_on(OWN, queue)[0]
    with pytest.raises(ValueError) as error:
        prepare(*case.arrays)
    assert str(error.value) == (
        "`draft_tokens` must be in USM memory with its last axis contiguous: expected an array that kernels read in "
        "place, got one that has to be copied (numpy.ndarray). Copy it to the device before, or use `verify`"
    )


def test_prepare_refuses_an_empty_batch(queue):
    with pytest.raises(ValueError, match="^`draft_tokens` must have a sequence: expected batch >= 1, got 0$"):
        prepare(*case_on(OWN, queue, 1, (0, 2, 3))[1])


def test_prepare_checks_as_verify_does(queue):
    inputs = case_on(OWN, queue)[1]
    with pytest.raises(TypeError, match="^`uniform_accept` must have dtype float32: got int64"):
        prepare(*inputs[:3], inputs[0], inputs[4])
    with pytest.raises(ValueError, match="^`offset` must fit in 32 bits"):
        prepare(*inputs[:3], seed=1)(-1)
