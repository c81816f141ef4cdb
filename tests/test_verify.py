"""verify() on a device: bit for bit the scalar reference, whatever the kind of array and the cut of the work."""

from __future__ import annotations

import itertools
import json
import types
from pathlib import Path
from typing import Any

import arrays
import generate
import numpy as np
import pytest

from specverify_dpex import VerifyResult, plan, reference, tuning, uniforms, verify

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())
WORK_GROUPS = (1, 2, 3, 8, 16, 64, 100, 256, 1024)
TILE_STEPS = (1, 2, 3, 4, 5, 8, 12, 48, 64, 512)
SLICES = (1, 2, 3, 8, 64, 300)
NUMPY = arrays.kinds()[0]
SHAPES = pytest.mark.parametrize(
    "shape", [(1, 1, 2), (3, 5, 257), (2, 7, 8193), (2, 3, 151936)], ids="b{0[0]}-k{0[1]}-v{0[2]}".format
)


def random_case(seed: int, *shape: int, **fixed: Any) -> generate.Case:
    """A random case of the types that the kernels take; of any shape if none is given."""
    return generate.random_case(seed, shape=shape or None, dtype="float32", token_dtype="int64", **fixed)


def case_arrays(case: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """The five arrays of a case of cases.json, a batch of one."""
    num_draft, vocab = len(case["draft_tokens"]), len(case["target_probs"][0])
    return (
        np.array(case["draft_tokens"], dtype="i8").reshape(1, num_draft),
        np.array(case["draft_probs"], dtype="f4").reshape(1, num_draft, vocab),
        np.array(case["target_probs"], dtype="f4").reshape(1, num_draft + 1, vocab),
        np.array(case["uniform_accept"], dtype="f4").reshape(1, num_draft),
        np.array(case["uniform_sample"], dtype="f4").reshape(1, num_draft + 1),
    )


def run(kind: arrays.Kind, queue: Any, inputs: tuple[Any, ...], **options: Any) -> VerifyResult:
    """verify() on arrays of a kind, its results as numpy arrays."""
    result = verify(*(None if array is None else kind.make(array, queue) for array in inputs), **options)
    assert type(result.accepted) is type(result.next_token) is kind.result_class
    return VerifyResult(*(kind.read(array) for array in result))


def assert_same(result: VerifyResult, expected: VerifyResult) -> None:
    assert result.accepted.dtype == result.next_token.dtype == np.int64
    np.testing.assert_array_equal(result.accepted, expected.accepted)
    np.testing.assert_array_equal(result.next_token, expected.next_token)


def force_cut(monkeypatch: pytest.MonkeyPatch, work_group: int, tile_steps: int, slices: int) -> None:
    """Have every call from here on cut its work like this."""
    monkeypatch.setattr(tuning, "launch_shape", lambda *_: tuning.LaunchShape(work_group, tile_steps, slices))
    monkeypatch.setattr(plan, "_plans", {})


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_verify_cases(kind, queue, case):
    result = run(kind, queue, case_arrays(case))
    assert (result.accepted.tolist(), result.next_token.tolist()) == ([case["accepted"]], [case["next_token"]])


@pytest.mark.parametrize("first_seed", generate.blocks(range(0, 2000, 250), 2))
def test_verify_equals_scalar_reference_on_random_cases(queue, first_seed, monkeypatch):
    rng = np.random.default_rng(first_seed)
    usm = arrays.kinds()[1]
    for case in map(random_case, range(first_seed, first_seed + 250)):
        force_cut(monkeypatch, *(int(rng.choice(options)) for options in (WORK_GROUPS, TILE_STEPS, SLICES)))
        result = run(usm, queue, case.arrays)
        expected = reference.verify_scalar(*case.arrays)
        assert (case.id, result.accepted.tolist()) == (case.id, expected.accepted)
        assert (case.id, result.next_token.tolist()) == (case.id, expected.next_token)


@pytest.mark.parametrize("vocab", generate.VOCABS)
def test_verify_equals_reference_on_each_vocabulary(kind, queue, vocab):
    for seed, batch in enumerate((1, 2, 3, 5)):
        case = random_case(seed, batch, 2 * seed, vocab)
        assert_same(run(kind, queue, case.arrays), reference.verify(*case.arrays))


@SHAPES
def test_verify_accepts_all_and_draws_the_bonus_token(queue, shape):
    case = generate.accept_all(0, shape)
    result = run(NUMPY, queue, case.arrays)
    assert result.accepted.tolist() == [shape[1]] * shape[0]
    assert_same(result, reference.verify(*case.arrays))


@SHAPES
def test_verify_rejects_at_the_first_position(queue, shape):
    case = generate.reject_first(0, shape)
    result = run(NUMPY, queue, case.arrays)
    assert result.accepted.tolist() == [0] * shape[0]
    assert_same(result, reference.verify(*case.arrays))


@SHAPES
def test_verify_rejects_nothing_of_identical_distributions(queue, shape):
    case = generate.identical(0, shape)
    assert run(NUMPY, queue, case.arrays).accepted.tolist() == [shape[1]] * shape[0]


def test_verify_is_the_same_for_every_work_group_and_slice(queue, monkeypatch):
    cases = [random_case(seed, 3, 2, vocab) for vocab in (1, 2, 257, 8193) for seed in range(3)]
    for work_group in WORK_GROUPS:
        for slices in SLICES:
            force_cut(monkeypatch, work_group, TILE_STEPS[(work_group + slices) % len(TILE_STEPS)], slices)
            for case in cases:
                assert_same(run(NUMPY, queue, case.arrays), reference.verify(*case.arrays))


@pytest.mark.parametrize("compute_units", [96, 512, 1024])
def test_verify_is_the_same_with_the_cuts_of_gpus(queue, monkeypatch, compute_units):
    gpu = types.SimpleNamespace(is_cpu=False, max_work_group_size=1024, max_compute_units=compute_units)
    choose = tuning.launch_shape
    monkeypatch.setattr(tuning, "launch_shape", lambda batch, vocab, device: choose(batch, vocab, gpu))
    monkeypatch.setattr(plan, "_plans", {})
    for batch, vocab in ((1, 1), (3, 257), (9, 8193), (1, 32000), (80, 32000), (2, 151936)):
        case = random_case(batch, batch, 3, vocab)
        assert_same(run(NUMPY, queue, case.arrays), reference.verify(*case.arrays))


@pytest.mark.parametrize("is_cpu", [True, False])
def test_launch_shape_is_one_that_the_kernel_can_have(is_cpu):
    choices = itertools.product((1, 2, 96, 1024), (1, 3, 64, 5000), (1, 31, 257, 32000, 2**20))
    for compute_units, batch, vocab in choices:
        device = types.SimpleNamespace(is_cpu=is_cpu, max_work_group_size=512, max_compute_units=compute_units)
        cut = tuning.launch_shape(batch, vocab, device)
        assert 1 <= cut.work_group <= 512
        assert 1 <= cut.tile_steps <= tuning.MAX_TILE_STEPS
        assert 1 <= cut.slices <= vocab


def test_verify_is_the_same_at_every_batch_position(queue):
    case = random_case(3, 1, 4, 257)
    once = run(NUMPY, queue, case.arrays)
    for batch in (2, 7, 64, 1000):
        repeated = run(NUMPY, queue, tuple(a if a is None else np.repeat(a, batch, axis=0) for a in case.arrays))
        assert set(repeated.accepted.tolist()) == set(once.accepted.tolist())
        assert set(repeated.next_token.tolist()) == set(once.next_token.tolist())


def test_verify_is_the_same_over_100_repeats(queue):
    case = random_case(5, 8, 5, 8193)
    expected = reference.verify(*case.arrays)
    inputs = [None if array is None else arrays.usm_array(array, queue) for array in case.arrays]
    for _ in range(100):
        result = verify(*inputs)
        assert result.accepted.tolist() == expected.accepted.tolist()
        assert result.next_token.tolist() == expected.next_token.tolist()


def test_verify_more_drafts_than_work_items(queue, monkeypatch):
    for num_draft in (63, 64, 65, 300):
        case = generate.accept_all(0, (2, num_draft, 7))
        for stop in (0, 62, 64, num_draft - 1):
            case.target_probs[1, min(stop, num_draft - 1)] = 0
            assert_same(run(NUMPY, queue, case.arrays), reference.verify(*case.arrays))


def test_verify_largest_vocabulary(queue):
    case = random_case(1, 1, 1, 2**20)
    assert_same(run(NUMPY, queue, case.arrays), reference.verify(*case.arrays))


@pytest.mark.parametrize("residual", [False, True], ids=["target", "residual"])
@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2.0**-24, 1.0])
def test_verify_total_of_2_to_the_64(queue, residual, uniform, monkeypatch):
    vocab = 2**20  # every weight 2**44: the total needs 65 bits, and the draw is among equal weights
    tokens = np.array([[vocab if residual else -1]])
    draft = np.zeros((1, 1, vocab), dtype="f4")
    target = np.ones((1, 2, vocab), dtype="f4")
    sample = np.full((1, 2), uniform, dtype="f4")
    inputs = (tokens, draft, target, np.zeros((1, 1), dtype="f4"), sample)
    expected = min(int(np.float32(uniform) * 2.0**32), 2**32 - 1) >> 12
    for cut in ((64, 64, 1), (64, 64, 8), (16, 512, 3)):
        force_cut(monkeypatch, *cut)
        assert run(NUMPY, queue, inputs).next_token.tolist() == [expected]
    assert_same(run(NUMPY, queue, inputs), reference.verify(*inputs))


def test_verify_empty_residual_falls_back_at_every_shape(queue, monkeypatch):
    rng = np.random.default_rng(0)
    for vocab in (2, 257, 8193):
        target = rng.random((2, 2, vocab), dtype="f4") / vocab
        draft = np.maximum(target[:, :1] * 2, np.float32(2.0**-100))
        inputs = (
            np.zeros((2, 1), dtype="i8"), draft, target,
            np.full((2, 1), 0.9, dtype="f4"), rng.random((2, 2), dtype="f4"),
        )  # fmt: skip
        for work_group, slices in ((1, 1), (16, 3), (64, 8), (256, 300)):
            force_cut(monkeypatch, work_group, 5, slices)
            result = run(NUMPY, queue, inputs)
            assert result.accepted.tolist() == [0, 0]
            assert_same(result, reference.verify(*inputs))


def test_verify_empty_batch_and_no_drafts(kind, queue):
    def shapes(batch, num_draft):
        return (
            np.zeros((batch, num_draft), "i8"),
            np.zeros((batch, num_draft, 3), "f4"),
            np.ones((batch, num_draft + 1, 3), "f4"),
            np.zeros((batch, num_draft), "f4"),
            np.zeros((batch, num_draft + 1), "f4"),
        )

    empty = run(kind, queue, shapes(0, 2))
    assert empty.accepted.shape == empty.next_token.shape == (0,)
    no_drafts = run(kind, queue, shapes(2, 0))
    assert (no_drafts.accepted.tolist(), no_drafts.next_token.tolist()) == ([0, 0], [0, 0])


def test_verify_leaves_its_inputs_unchanged(kind, queue):
    case = random_case(11, 4, 3, 257)
    inputs = [None if array is None else kind.make(array.copy(), queue) for array in case.arrays]
    verify(*inputs)
    for before, after in zip(case.arrays, inputs):
        if before is not None:
            np.testing.assert_array_equal((kind.read_argument or kind.read)(after), before)


# Views. A view is a numpy array whose twin on the device is the same view of the same base.


def swap_first_axes(array: Any) -> Any:
    if hasattr(array, "swapaxes"):
        return array.swapaxes(0, 1)
    return arrays.tensor_module().permute_dims(array, (1, 0, 2)[: array.ndim])


def views_of(case: generate.Case) -> list[tuple[str, list[tuple[np.ndarray, Any]]]]:
    """(id, (base, function from the base to the argument) of each argument) for ways to lie in memory."""

    def padded(array, axis, after=5, before=0):
        widths = [(0, 0)] * array.ndim
        widths[axis] = (before, after)
        return np.pad(array, widths, constant_values=1)

    def cut_axis(axis, extent, before=0):
        return lambda base: base[(slice(None),) * axis + (slice(before, before + extent),)]

    plans = []
    for axis in (0, 1, 2):
        plan = []
        for array in case.arrays:
            own = min(axis, array.ndim - 1)
            plan.append((padded(array, own, before=2), cut_axis(own, array.shape[own], before=2)))
        plans.append((f"cut-axis{axis}", plan))
    plans.append(("reversed-batch", [(array[::-1].copy(), lambda base: base[::-1]) for array in case.arrays]))
    plans.append(("every-other", [(np.repeat(array, 2, axis=0), lambda base: base[::2]) for array in case.arrays]))
    plans.append(
        (
            "position-first",
            [
                (np.ascontiguousarray(np.swapaxes(array, 0, 1)),
                 swap_first_axes)
                for array in case.arrays
            ],
        )
    )  # fmt: skip
    plans.append(
        ("every-other-token", [(np.repeat(array, 2, axis=-1), lambda base: base[..., ::2]) for array in case.arrays])
    )
    return plans


@pytest.mark.parametrize("plan", range(7))
def test_verify_reads_views_in_place(strided_kind, queue, plan):
    kind = strided_kind
    case = random_case(21, 3, 4, 257, with_draft_probs=True)
    name, views = views_of(case)[plan]
    for (base, view), array in zip(views, case.arrays):
        np.testing.assert_array_equal(view(base), array, err_msg=name)
    result = verify(*(view(kind.make(base, queue)) for base, view in views))
    assert_same(VerifyResult(*map(kind.read, result)), reference.verify(*case.arrays))


def test_interface_strides(queue):
    case = random_case(22, 3, 4, 257, with_draft_probs=True)
    inputs = []
    for array in case.arrays:
        base = np.zeros((2 * array.shape[0] + 1, array.shape[1], *array.shape[2:]), dtype=array.dtype)
        base[1::2] = array
        owner = arrays.usm_array(base, queue)
        strides = tuple(stride // array.itemsize for stride in base.strides)
        interface = owner.__sycl_usm_array_interface__
        interface.update(shape=array.shape, strides=(2 * strides[0], *strides[1:]), offset=strides[0])
        inputs.append(arrays.Interface(interface, owner))
    result = verify(*inputs)
    expected = reference.verify(*case.arrays)
    assert (result.accepted.tolist(), result.next_token.tolist()) == (
        expected.accepted.tolist(),
        expected.next_token.tolist(),
    )


def test_verify_big_endian_numpy(queue):
    case = random_case(23, 3, 2, 257, with_draft_probs=True)
    swapped = tuple(array.astype(array.dtype.newbyteorder(">")) for array in case.arrays)
    assert_same(run(NUMPY, queue, swapped), reference.verify(*case.arrays))


# Uniforms drawn inside.


@pytest.mark.parametrize("given", ["neither", "accept", "sample"])
@pytest.mark.parametrize("per_row", [False, True], ids=["one-seed", "seed-per-row"])
def test_verify_draws_the_uniforms_that_uniforms_returns(kind, queue, given, per_row):
    case = random_case(31, 5, 70, 257, with_draft_probs=True)
    tokens, draft, target, own_accept, own_sample = case.arrays
    seed = np.array([2**64 - 1, 0, 7, 7, 1 << 40], dtype="u8") if per_row else 2**63 + 11
    accept, sample = uniforms(seed, 2**32 - 1, 5, 70)
    if given == "accept":
        accept = own_accept
    elif given == "sample":
        sample = own_sample
    expected = reference.verify(tokens, draft, target, accept, sample)
    result = run(
        kind,
        queue,
        (tokens, draft, target, accept if given == "accept" else None, sample if given == "sample" else None),
        seed=kind.make(seed, queue) if per_row else seed,
        offset=2**32 - 1,
    )
    assert_same(result, expected)


def test_uniforms_on_the_device_equal_the_host(kind, queue):
    seeds = np.array([3, 2**64 - 1, 0], dtype="u8")
    for seed in (5, seeds):
        for num_draft in (0, 1, 9, 100):
            like = kind.make(np.zeros(1, "f4"), queue)
            on_device = seed if isinstance(seed, int) else kind.make(seed, queue)
            drawn = uniforms(on_device, 12, 3, num_draft, like=like)
            for array, expected in zip(drawn, uniforms(seed, 12, 3, num_draft)):
                assert type(array) is kind.result_class
                np.testing.assert_array_equal(kind.read(array), expected)


def test_verify_without_seed_draws_anew(queue):
    tokens = np.full((64, 1), -1)
    probs = np.full((64, 2, 4096), 1 / 4096, dtype="f4")
    first, second = (run(NUMPY, queue, (tokens, probs[:, :1], probs)).next_token for _ in range(2))
    assert (first != second).any()


def test_verify_uniforms_differ_by_offset_and_row(queue):
    tokens = np.full((64, 1), -1)
    probs = np.full((64, 2, 4096), 1 / 4096, dtype="f4")
    one, two = (run(NUMPY, queue, (tokens, probs[:, :1], probs), seed=1, offset=o).next_token for o in (0, 1))
    assert (one != two).any()
    assert len(set(one.tolist())) > 32
