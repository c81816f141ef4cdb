"""emitted_tokens(): the accepted prefix, the token after it, then -1."""

from __future__ import annotations

from typing import Any

import arrays
import dpctl
import generate
import numpy as np
import pytest

from specverify_dpex import emitted, emitted_tokens, launch, verify

SHAPES = [(1, 0), (1, 1), (3, 5), (7, 64), (2, 65), (5, 200)]


def random_step(seed: int, batch: int, num_draft: int, dtype: str = "i8") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-1, 2**31, (batch, num_draft))
    if dtype == "i8":
        tokens |= rng.integers(0, 2, tokens.shape) << 40  # both words of an element count
    return tokens.astype(dtype), rng.integers(0, num_draft + 1, batch), rng.integers(-1, 2**40, batch)


def expected_tokens(tokens: np.ndarray, accepted: np.ndarray, next_token: np.ndarray) -> np.ndarray:
    batch, num_draft = tokens.shape
    expected = np.full((batch, num_draft + 1), -1, dtype="i8")
    for row, (prefix, following) in enumerate(zip(np.clip(accepted, 0, num_draft), next_token)):
        expected[row, :prefix] = tokens[row, :prefix]
        expected[row, prefix] = following
    return expected


@pytest.mark.parametrize("dtype", ["i8", "i4"])
@pytest.mark.parametrize("shape", SHAPES, ids="b{0[0]}-k{0[1]}".format)
def test_emitted_tokens_of_random_steps(kind, queue, shape, dtype):
    for seed in range(5):
        step = random_step(seed, *shape, dtype)
        result = emitted_tokens(*(kind.make(array, queue) for array in step))
        assert type(result) is kind.result_class
        assert kind.read(result).dtype == np.int64
        np.testing.assert_array_equal(kind.read(result), expected_tokens(*step))


def test_emitted_tokens_of_what_verify_returns(kind, queue):
    case = generate.random_case(1, shape=(5, 4, 257), dtype="float32", token_dtype="int64")
    inputs = [None if array is None else kind.make(array, queue) for array in case.arrays]
    result = verify(*inputs)
    expected = expected_tokens(case.arrays[0], kind.read(result.accepted), kind.read(result.next_token))
    np.testing.assert_array_equal(kind.read(emitted_tokens(inputs[0], *result)), expected)


def test_emitted_tokens_writes_to_out(kind, queue):
    read = kind.read_argument or kind.read
    for seed, shape in enumerate(SHAPES):
        step = random_step(seed, *shape)
        out = kind.make(np.full((shape[0], shape[1] + 1), 77, "i8"), queue)
        assert emitted_tokens(*(kind.make(array, queue) for array in step), out=out) is out
        np.testing.assert_array_equal(read(out), expected_tokens(*step))


def test_emitted_tokens_of_an_empty_batch(kind, queue):
    step = [kind.make(array, queue) for array in random_step(0, 0, 3)]
    assert kind.read(emitted_tokens(*step)).shape == (0, 4)
    out = kind.make(np.zeros((0, 4), "i8"), queue)
    assert emitted_tokens(*step, out=out) is out


def test_emitted_tokens_clamps_accepted(kind, queue):
    tokens, _, next_token = random_step(0, 6, 5)
    accepted = np.array([-1, 6, 2**62, -(2**63), 5, 0])
    result = emitted_tokens(*(kind.make(array, queue) for array in (tokens, accepted, next_token)))
    np.testing.assert_array_equal(kind.read(result), expected_tokens(tokens, accepted, next_token))


def test_emitted_tokens_reads_views(strided_kind, queue):
    kind = strided_kind
    for dtype in ("i8", "i4"):
        step = random_step(3, 4, 6, dtype)
        doubled = [kind.make(np.repeat(array, 2, axis=-1), queue)[..., ::2] for array in step]
        backwards = [kind.make(array[::-1].copy(), queue)[::-1] for array in step]
        for views in (doubled, backwards):
            np.testing.assert_array_equal(kind.read(emitted_tokens(*views)), expected_tokens(*step))


def test_emitted_tokens_takes_big_endian_numpy(device):
    step = random_step(4, 3, 4)
    out = np.zeros((3, 5), ">i8")
    emitted_tokens(*(array.astype(">i8") for array in step), out=out)
    np.testing.assert_array_equal(out, expected_tokens(*step))


def test_emitted_tokens_is_ordered_and_does_not_wait(queue, monkeypatch):
    tensor = arrays.tensor_module()
    if tensor is None or launch.SequentialOrderManager is None:
        pytest.skip("dpctl 0.17 waits")
    step = random_step(5, 64, 5)
    inputs = [tensor.asarray(array, sycl_queue=queue) for array in step]
    emitted_tokens(*inputs)
    waited: list[Any] = []
    monkeypatch.setattr(dpctl, "SyclEvent", type("Event", (dpctl.SyclEvent,), {"wait": waited.append}))
    result = emitted_tokens(*inputs)
    assert not waited
    monkeypatch.undo()
    for _ in range(50):
        produced = tensor.add(inputs[0], tensor.asarray(1, sycl_queue=queue))  # still being written
        result = tensor.add(emitted_tokens(produced, *inputs[1:]), tensor.asarray(0, sycl_queue=queue))
        np.testing.assert_array_equal(tensor.asnumpy(result), expected_tokens(step[0] + 1, *step[1:]))


def test_emitted_tokens_sees_overlaps_of_arrays_of_two_libraries(device):
    buffer = np.arange(20)
    given = (arrays.Dlpack(np.array([[1, 2], [3, 4]])), buffer[:2], buffer[2:4])
    with pytest.raises(ValueError, match="^`out` must not overlap `accepted`"):
        emitted_tokens(*given, out=buffer[:6].reshape(2, 3))
    out = buffer[4:10].reshape(2, 3)
    assert emitted_tokens(*given, out=out) is out
    assert out.tolist() == [[2, -1, -1], [3, 3, -1]]


def test_emitted_tokens_checks_a_signature_once(queue, monkeypatch):
    monkeypatch.setattr(emitted, "_plans", {})
    for seed in range(3):
        emitted_tokens(*(arrays.usm_array(array, queue) for array in random_step(seed, 2, 3)))
    assert len(emitted._plans) == 1
    monkeypatch.setattr(emitted, "_MOST_PLANS", 1)
    emitted_tokens(*(arrays.usm_array(array, queue) for array in random_step(0, 2, 4)))
    assert len(emitted._plans) == 1


# Errors.


def good() -> dict[str, Any]:
    return dict(zip(("draft_tokens", "accepted", "next_token"), random_step(0, 2, 3)), out=np.zeros((2, 4), "i8"))


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("accepted", [0, 1], TypeError, "`accepted` must be an array: expected one of dpnp"),
        (
            "draft_tokens",
            np.zeros((2, 3), "f4"),
            TypeError,
            "`draft_tokens` must have dtype int64 or int32: got float32",
        ),
        ("accepted", np.zeros(2, "i4"), TypeError, "`accepted` must have dtype int64: got int32"),
        ("next_token", np.zeros(2, "u8"), TypeError, "`next_token` must have dtype int64: got uint64"),
        ("out", np.zeros((2, 4), "i4"), TypeError, "`out` must have dtype int64: got int32"),
        (
            "draft_tokens",
            np.zeros(2, "i8"),
            ValueError,
            "`draft_tokens` must have shape (batch, num_draft): expected (any, any), got (2,)",
        ),
        ("accepted", np.zeros(3, "i8"), ValueError, "`accepted` must have shape (batch,): expected (2,), got (3,)"),
        (
            "next_token",
            np.zeros((2, 1), "i8"),
            ValueError,
            "`next_token` must have shape (batch,): expected (2,), got (2, 1)",
        ),
        (
            "out",
            np.zeros((2, 3), "i8"),
            ValueError,
            "`out` must have shape (batch, num_draft + 1): expected (2, 4), got (2, 3)",
        ),
        (
            "out",
            np.zeros((4, 2), "i8").T,
            ValueError,
            "`out` must be contiguous: expected strides (4, 1) in elements, got (1, 2). Pass an array of its own",
        ),
    ],
)
def test_emitted_tokens_refuses(device, name, value, error, text):
    with pytest.raises(error) as raised:
        emitted_tokens(**{**good(), name: value})
    assert str(raised.value).startswith(text)
    emitted_tokens(**good())


def test_emitted_tokens_refuses_too_many_drafts(device):
    tokens = np.broadcast_to(np.zeros(1, "i8"), (1, 2**30))
    with pytest.raises(ValueError, match=r"^`draft_tokens` must have fewer than 2\*\*30 positions: got 1073741824$"):
        emitted_tokens(tokens, np.zeros(1, "i8"), np.zeros(1, "i8"))


def test_emitted_tokens_refuses_other_kinds(queue):
    step = random_step(0, 2, 3)
    for name in ("accepted", "out"):
        with pytest.raises(TypeError) as raised:
            emitted_tokens(**{**good(), name: arrays.usm_array(step[1], queue)})
        assert str(raised.value) == (
            f"`{name}` must be of the same kind as `draft_tokens`: expected numpy.ndarray, got "
            "specverify_dpex.UsmArray. Convert one of them"
        )


def test_emitted_tokens_refuses_other_queues(device):
    step = random_step(0, 2, 3)
    one, other = dpctl.SyclQueue(device), dpctl.SyclQueue(device)
    inputs = [arrays.usm_array(array, one) for array in step]
    with pytest.raises(ValueError, match="^`next_token` must be on the queue of `accepted`: expected the queue at 0x"):
        emitted_tokens(*inputs[:2], arrays.usm_array(step[2], other))
    with pytest.raises(ValueError, match="^`out` must be on the queue of `accepted`"):
        emitted_tokens(*inputs, out=arrays.usm_array(np.zeros((2, 4), "i8"), other))


def read_only_arrays(queue: Any) -> list[tuple[Any, Any]]:
    """(kind, array that is read-only) for the kinds that know of such arrays."""
    found = []
    for kind in arrays.kinds():
        array = kind.make(np.zeros((2, 4), "i8"), queue)
        if kind.name == "numpy":
            array.flags.writeable = False
        elif kind.name == "interface":
            interface = array.__sycl_usm_array_interface__
            interface["data"] = (interface["data"][0], True)
        elif kind.name.endswith("tensor"):
            array.flags.writable = False
        elif kind.name == "dpnp":
            array.get_array().flags.writable = False
        else:
            continue
        found.append((kind, array))
    return found


def test_emitted_tokens_refuses_an_out_that_is_read_only(queue):
    for kind, out in read_only_arrays(queue):
        with pytest.raises(ValueError) as raised:
            emitted_tokens(*(kind.make(array, queue) for array in random_step(0, 2, 3)), out=out)
        assert str(raised.value) == "`out` must be writable: got a read-only array. Pass a copy, or leave it out"
