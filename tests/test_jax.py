"""JAX arrays on the CPU: in by DLPack, out as JAX arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arrays
import generate
import numpy as np
import pytest

from specverify_dpex import dlpack, reference, uniforms, verify

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())


@pytest.fixture
def jax() -> Iterator[Any]:
    found = arrays.optional("jax")
    if found is None:
        pytest.skip("jax is not installed: the session `current` of noxfile.py has it, and fails without it")
    before = found.config.jax_enable_x64
    found.config.update("jax_enable_x64", True)  # int64 tokens
    yield found
    found.config.update("jax_enable_x64", before)


def assert_right(jax: Any, result: Any, expected: Any) -> None:
    for array, right in zip(result, expected):
        assert isinstance(array, jax.Array)
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, right)


def test_jax_arrays_come_back_as_jax_arrays(device, jax):
    for seed in range(20):
        case = generate.random_case(seed, dtype="float32", token_dtype="int64")
        inputs = [None if array is None else jax.numpy.asarray(array) for array in case.arrays]
        assert_right(jax, verify(*inputs), reference.verify(*case.arrays))
        for array, before in zip(inputs, case.arrays):
            if before is not None:
                np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_jax_cases(device, jax, case):
    num_draft = len(case["draft_tokens"])
    made = [
        np.array(case[name], dtype).reshape(1, length, *rest)
        for name, dtype, length, rest in (
            ("draft_tokens", "i8", num_draft, ()),
            ("draft_probs", "f4", num_draft, (-1,) if num_draft else (len(case["target_probs"][0]),)),
            ("target_probs", "f4", num_draft + 1, (-1,)),
            ("uniform_accept", "f4", num_draft, ()),
            ("uniform_sample", "f4", num_draft + 1, ()),
        )
    ]
    result = verify(*map(jax.numpy.asarray, made))
    assert_right(jax, result, ([case["accepted"]], [case["next_token"]]))


def test_jax_seeds_and_uniforms(device, jax):
    case = generate.random_case(7, shape=(3, 4, 257), dtype="float32", token_dtype="int64", with_draft_probs=True)
    inputs = list(map(jax.numpy.asarray, case.arrays[:3]))
    seeds = np.array([2**64 - 1, 0, 7], "u8")
    drawn = uniforms(jax.numpy.asarray(seeds), 5, 3, 4, like=inputs[1])
    for array, expected in zip(drawn, uniforms(seeds, 5, 3, 4)):
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(array, expected)
    expected = reference.verify(*case.arrays[:3], *uniforms(seeds, 5, 3, 4))
    assert_right(jax, verify(*inputs, seed=jax.numpy.asarray(seeds), offset=5), expected)


def test_jax_work_that_is_under_way_comes_first(device, jax):
    case = generate.random_case(7, shape=(4, 3, 8193), dtype="float32", token_dtype="int64", with_draft_probs=True)
    tokens, draft, target, accept, sample = map(jax.numpy.asarray, case.arrays)
    for _ in range(20):
        assert_right(jax, verify(tokens, draft, target * 1, accept, sample), reference.verify(*case.arrays))


def test_jax_and_numpy_do_not_mix(device, jax):
    case = generate.random_case(7, shape=(3, 4, 257), dtype="float32", token_dtype="int64", with_draft_probs=True)
    inputs = list(map(jax.numpy.asarray, case.arrays))
    inputs[4] = case.arrays[4]
    with pytest.raises(
        TypeError, match="^`uniform_sample` must be of the same kind as `draft_tokens`: expected jaxlib"
    ):
        verify(*inputs)


def test_numpys_bfloat16_is_copied_bytewise(device, jax):
    import ml_dtypes  # jax has loaded it already

    base = np.arange(24, dtype="f4").reshape(2, 3, 4).astype(ml_dtypes.bfloat16)
    for array in (base, base[:, ::2], base.transpose(2, 0, 1), base[..., ::-1], base[:0], jax.numpy.asarray(base)):
        kind = dlpack.kind_of(array, "array")
        view = kind.view(array, "array")
        assert (view.dtype, view.shape) == ("bfloat16", array.shape)
        copied = kind.copy(view)
        assert (copied.dtype, copied.strides) == ("bfloat16", dlpack.contiguous_strides(array.shape))
        content = bytes(copied.owner.memory.copy_to_host())[: 2 * array.size]
        assert content == np.ascontiguousarray(np.asarray(array)).tobytes()


def test_jax_takes_the_options(device, jax):
    narrow = 0
    for case in generate.option_cases(95_000, 20):

        def made(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            if value.dtype == np.uint16:
                return jax.lax.bitcast_convert_type(jax.numpy.asarray(value), jax.numpy.bfloat16)
            return jax.numpy.asarray(value)

        inputs = list(map(made, case.arrays))
        narrow += any(array is not None and array.dtype == jax.numpy.bfloat16 for array in inputs)
        options = {name: made(value) for name, value in case.options.items() if name != "dtype"}
        expected = reference.verify(*case.arrays, **case.options)
        assert_right(jax, verify(*inputs, **options, depends_on=[]), expected)
    assert narrow > 5


def test_jax_arrays_are_no_out(device, jax):
    """They are immutable: compiled functions count on it."""
    case = generate.random_case(7, shape=(3, 4, 257), dtype="float32", token_dtype="int64", with_draft_probs=True)
    inputs = list(map(jax.numpy.asarray, case.arrays))
    out = [jax.numpy.full(3, -7) for _ in range(2)]
    with pytest.raises(ValueError, match=r"^`out\[0\]` must be writable: got a read-only array"):
        verify(*inputs, out=out)
    assert [array.tolist() for array in out] == [[-7] * 3] * 2
