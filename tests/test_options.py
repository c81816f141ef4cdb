"""The options of verify() on a device: lengths, masks, dtypes, out, seeds, stats, check and events."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import arrays
import dpctl
import generate
import numpy as np
import pytest
from test_verify import SLICES, TILE_STEPS, WORK_GROUPS, assert_same, force_cut

from specverify_dpex import VerifyResult, launch, plan, reference, tuning, verify

CASES = 5000
CHUNK = 250
SHAPE = (5, 4, 257)
NUMPY, OWN = arrays.kinds()[:2]
INCOMPLETE = (dpctl.event_status_type.submitted, dpctl.event_status_type.running)
COMPLETE = dpctl.event_status_type.complete


def on(kind: arrays.Kind, queue: Any, value: Any) -> Any:
    """A numpy array as one of a kind; what is none stays as it is."""
    return kind.make(value, queue) if isinstance(value, np.ndarray) else value


def run(kind: arrays.Kind, queue: Any, case: generate.Case, **options: Any) -> VerifyResult:
    """verify() on a case's arrays and options as arrays of a kind, its results as numpy arrays."""
    inputs = [on(kind, queue, array) for array in case.arrays]
    result = verify(*inputs, **{name: on(kind, queue, value) for name, value in {**case.options, **options}.items()})
    assert type(result.accepted) is type(result.next_token) is kind.result_class
    return VerifyResult(*map(kind.read, result))


def expected_of(case: generate.Case) -> VerifyResult:
    return reference.verify(*case.arrays, **case.options)


def contents(kind: arrays.Kind, array: Any) -> np.ndarray:
    """What an array that `kind.make` made holds."""
    return (kind.read_argument or kind.read)(array)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entry points of all launches from here on."""
    names: list[str] = []
    submit = launch.Launch.submit

    def spy(self: launch.Launch, *arguments: Any) -> Any:
        names.append(next(key[2] for key, kernel in launch._kernels.items() if kernel is self._kernel))
        return submit(self, *arguments)

    monkeypatch.setattr(launch.Launch, "submit", spy)
    return names


# Values: bit for bit the scalar reference.


@pytest.mark.parametrize("first_seed", range(0, CASES, CHUNK))
def test_options_equal_the_scalar_reference_on_random_cases(queue, first_seed, monkeypatch):
    rng = np.random.default_rng(first_seed)

    def any_cut(*_: Any) -> tuning.LaunchShape:
        return tuning.LaunchShape(*(int(rng.choice(choices)) for choices in (WORK_GROUPS, TILE_STEPS, SLICES)))

    monkeypatch.setattr(tuning, "launch_shape", any_cut)
    monkeypatch.setattr(plan, "_plans", {})
    for case in generate.option_cases(first_seed, CHUNK):
        result = run(OWN, queue, case)
        expected = reference.verify_scalar(*case.arrays, **case.options)
        assert (case.id, result.accepted.tolist()) == (case.id, expected.accepted)
        assert (case.id, result.next_token.tolist()) == (case.id, expected.next_token)


def variants() -> dict[str, generate.Case]:
    """Cases with each option by itself, with all of them, and with random ones."""
    batch, num_draft, vocab = SHAPE
    rng = np.random.default_rng(0)
    plain = generate.random_case(41, shape=SHAPE, dtype="float32", token_dtype="int64", with_draft_probs=True)
    tokens, draft, target, accept, sample = plain.arrays
    lengths = rng.permutation(batch) - (np.arange(batch) == 2) * 9
    mask, other = np.array([True, False, True, True, False]), np.array([False, True, True, False, True])
    keys = np.array([0, 2**64 - 1, 7, 7, 1 << 40], "u8")
    bits = {"dtype": "bfloat16"}
    greedy_tokens = tokens.copy()
    generate.follow_largest(rng, greedy_tokens, mask, target)
    bfloat16, float16 = (functools.partial(generate.as_dtype, dtype=dtype) for dtype in ("bfloat16", "float16"))

    def case(name: str, *changed: Any, **options: Any) -> generate.Case:
        return generate.Case(name, *changed, options)

    with np.errstate(over="ignore"):
        halves = float16(draft), float16(target)
    made = [
        case("int32-tokens", np.clip(tokens, -(2**31), 2**31 - 1).astype("i4"), *plain.arrays[1:]),
        case("float16", tokens, *halves, accept, sample),
        case("bfloat16", tokens, bfloat16(draft), bfloat16(target), accept, sample, **bits),
        case("float16-draft", tokens, halves[0], target, accept, sample),
        case("bfloat16-draft", tokens, bfloat16(draft), target, accept, sample, **bits),
        case("bfloat16-target", tokens, halves[0], bfloat16(target), accept, sample, **bits),
        case("fewer-columns", tokens, draft[:, :, :100].copy(), target, accept, sample),
        case("no-columns", tokens, draft[:, :, :0].copy(), target, accept, sample),
        case("num_draft-int64", *plain.arrays, num_draft=lengths),
        case("num_draft-int32", *plain.arrays, num_draft=lengths.astype("i4")),
        case("deterministic_draft", *plain.arrays, deterministic_draft=mask),
        case("greedy", greedy_tokens, *plain.arrays[1:], greedy=mask),
        case("certain", tokens, None, target, accept, sample, num_draft=lengths),
        case("seed", tokens, draft, target, None, None, seed=11, offset=2**32 - 1),
        case("seeds", tokens, draft, target, None, sample, seed=keys, offset=3),
        case(
            "all",
            greedy_tokens.astype("i4"),
            bfloat16(draft)[:, :, :200].copy(),
            halves[1],
            None,
            None,
            num_draft=lengths.astype("i4"),
            deterministic_draft=other,
            greedy=mask,
            seed=keys,
            offset=5,
            **bits,
        ),
        *generate.option_cases(90_000, 6),
    ]
    return {one.id: one for one in made}


VARIANTS = variants()
BFLOAT16 = [
    name
    for name, case in VARIANTS.items()
    if any(array is not None and array.dtype == np.uint16 for array in case.arrays)
]


@pytest.mark.parametrize("name", VARIANTS)
def test_options_of_every_kind_of_array(kind, queue, name):
    case = VARIANTS[name]
    assert_same(run(kind, queue, case), expected_of(case))


def test_the_options_change_the_answer():
    """So that a kind which lost one of them would not pass."""
    for name in ("num_draft-int64", "num_draft-int32", "deterministic_draft", "greedy", "certain"):
        case = VARIANTS[name]
        without = reference.verify(*case.arrays)
        assert [list(array) for array in expected_of(case)] != [list(array) for array in without], case.id


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_tensors_of_torch(device, name):
    torch = arrays.optional("torch")
    if torch is None:
        pytest.skip("torch is not installed: the session `current` of noxfile.py has it, and fails without it")
    case = VARIANTS[name]

    def tensor(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype == np.uint16:
            return torch.from_numpy(value.view("i2")).view(torch.bfloat16)
        return torch.from_numpy(value)

    inputs = list(map(tensor, case.arrays))
    assert any(one is not None and one.dtype == torch.bfloat16 for one in inputs)
    options = {key: tensor(value) for key, value in case.options.items() if key != "dtype"}
    result = verify(*inputs, **options)
    assert_same(VerifyResult(*(array.numpy() for array in result)), expected_of(case))


@pytest.mark.parametrize("view", ["every-other", "reversed", "one-for-all"])
def test_options_of_any_strides(strided_kind, queue, view):
    kind = strided_kind
    for case in generate.option_cases(91_000, 20, shape=(6, 5, 31)):
        options = {}
        for name, value in case.options.items():
            if not isinstance(value, np.ndarray):
                options[name] = value
            elif view == "every-other":
                options[name] = kind.make(np.repeat(value, 2), queue)[::2]
            elif view == "reversed":
                options[name] = kind.make(value[::-1].copy(), queue)[::-1]
            else:
                case.options[name][:] = value[0]
                make = np if kind is NUMPY else arrays.tensor_module()
                if kind.name == "dpnp":
                    import dpnp as make  # type: ignore[no-redef]
                options[name] = make.broadcast_to(kind.make(value[:1].copy(), queue), value.shape)
        tokens, *others = case.arrays
        tokens = kind.make(np.repeat(np.repeat(tokens, 2, axis=0), 3, axis=1), queue)[::2, ::3]
        result = verify(tokens, *(on(kind, queue, array) for array in others), **options)
        assert_same(VerifyResult(*map(kind.read, result)), expected_of(case))


def test_options_of_big_endian_numpy(queue):
    for case in generate.option_cases(92_000, 20, shape=(6, 5, 31)):
        options = {
            name: value.astype(value.dtype.newbyteorder(">")) if isinstance(value, np.ndarray) else value
            for name, value in case.options.items()
        }
        assert_same(verify(*case.arrays, **options), expected_of(case))


# Seeds for each sequence.


class Request:
    """A sequence with its own key, options and drafts, whatever batch it is verified in."""

    def __init__(self, seed: int, vocab: int = 257):
        rng = np.random.default_rng(seed)
        num_draft = int(rng.integers(0, 6))
        case = generate.random_case(seed, shape=(1, num_draft, vocab), dtype="float32", token_dtype="int64", clean=True)
        self.tokens, _, self.target = (array[0] if array is not None else None for array in case.arrays[:3])
        draft = generate.random_case(
            seed, shape=(1, num_draft, vocab), dtype="float32", token_dtype="int64", clean=True, with_draft_probs=True
        ).draft_probs
        self.draft = draft[0]
        self.key = np.uint64(rng.integers(2**64, dtype="u8"))
        self.deterministic, self.greedy = rng.random(2) < 0.25


def batch_of(requests: list[Request], num_draft: int, offset: int, by_tokens: bool = False) -> generate.Case:
    """Requests in one batch, their positions up to `num_draft` padded with what must not matter."""
    vocab = requests[0].target.shape[1]
    tokens = np.full((len(requests), num_draft), -1 if by_tokens else 3)
    draft = np.full((*tokens.shape, vocab), np.nan, "f4")
    target = np.full((len(requests), num_draft + 1, vocab), np.nan, "f4")
    for row, request in enumerate(requests):
        length = len(request.tokens)
        tokens[row, :length], draft[row, :length] = request.tokens, request.draft
        target[row, : length + 1] = request.target
    options = {
        "seed": np.array([request.key for request in requests], "u8"),
        "offset": offset,
        "deterministic_draft": np.array([request.deterministic for request in requests]),
        "greedy": np.array([request.greedy for request in requests]),
    }
    if not by_tokens:
        options["num_draft"] = np.array([len(request.tokens) for request in requests])
    return generate.Case("batch", tokens, draft, target, None, None, options)


def test_a_request_with_its_own_seed_keeps_its_tokens_in_every_batch(queue):
    requests = [Request(seed) for seed in range(24)]
    rng = np.random.default_rng(0)
    alone: dict[int, list[tuple[int, int]]] = {}
    for offset in (0, 1, 2**32 - 1):
        cases = [batch_of([request], len(request.tokens), offset) for request in requests]
        own = [run(OWN, queue, case) for case in cases]
        alone[offset] = [(int(result.accepted[0]), int(result.next_token[0])) for result in own]
        for case, result in zip(cases, own):
            assert_same(result, expected_of(case))
        for _ in range(15):
            chosen = rng.permutation(24)[: rng.integers(1, 25)]
            longest = max(len(requests[index].tokens) for index in chosen)
            case = batch_of(
                [requests[index] for index in chosen], longest + int(rng.integers(0, 80)), offset, rng.random() < 0.5
            )
            result = run(OWN, queue, case)
            for index, accepted, token in zip(chosen, result.accepted, result.next_token):
                assert (index, accepted, token) == (index, *alone[offset][index])
    free = [index for index, request in enumerate(requests) if not request.greedy]
    assert len({tuple(alone[offset][index] for index in free) for offset in alone}) == 3
    for index in set(range(24)) - set(free):
        assert len({alone[offset][index] for offset in alone}) == 1


# Greedy sequences.


def follow(target: np.ndarray, tokens: Any = (), **options: Any) -> tuple[int, int]:
    """verify() on one greedy sequence of (positions, vocab) rows."""
    tokens = np.array(tokens, "i8").reshape(1, len(target) - 1)
    result = verify(tokens, None, target[None], greedy=np.ones(1, bool), **options)
    expected = reference.verify_scalar(tokens, None, target[None], greedy=[True], **options)
    found = int(result.accepted[0]), int(result.next_token[0])
    assert found == (expected.accepted[0], expected.next_token[0])
    return found


SUBNORMAL = 2.0**-149
GREEDY_ROWS = {
    "one": ([0.5], 0),
    "last": ([1, 2, 3], 2),
    "tie": ([1, 5, 2, 5, 5], 1),
    "all-equal": ([0.25] * 4, 0),
    "nan-first": ([np.nan, 1, 2], 2),
    "nan-last": ([1, 2, np.nan], 1),
    "negative-nan": ([-3, np.copysign(np.nan, -1), -2], 2),
    "all-nan": ([np.nan, np.copysign(np.nan, -1)], -1),
    "minus-zero-first": ([-0.0, 0.0], 0),
    "zero-first": ([0.0, -0.0], 0),
    "minus-zero-beats-negatives": ([-1, -0.0, -SUBNORMAL], 1),
    "subnormal-beats-zero": ([0.0, SUBNORMAL, 0.0], 1),
    "zero-beats-negative-subnormal": ([-SUBNORMAL, 0.0], 1),
    "larger-subnormal": ([SUBNORMAL, 2 * SUBNORMAL, 1e-40], 2),
    "smaller-negative-subnormal": ([-1e-40, -SUBNORMAL], 1),
    "infinity": ([3e38, np.inf, np.nan, np.inf], 1),
    "minus-infinity-alone": ([np.nan, -np.inf, -np.inf], 1),
    "minus-infinity-beside-numbers": ([-np.inf, -3e38, -np.inf], 1),
    "logits": ([-4.5, 30.25, 17, 30.5], 3),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", GREEDY_ROWS)
def test_greedy_takes_the_largest_value(queue, monkeypatch, name, dtype):
    row, largest = GREEDY_ROWS[name]
    if dtype != "float32" and ("subnormal" in name or "3e38" in str(row) or "3e+38" in str(row)):
        row = [value / SUBNORMAL * {"float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype] if abs(value) < 1e-3 else value
               for value in row]  # fmt: skip
        row = [value if abs(value) < 1e38 or dtype == "bfloat16" else np.copysign(6e4, value) if np.isfinite(value)
               else value for value in row]  # fmt: skip
    options = {"dtype": dtype} if dtype == "bfloat16" else {}
    for work_group, slices in ((1, 1), (3, 8), (64, 2)):
        force_cut(monkeypatch, work_group, 1, slices)
        target = generate.as_dtype(np.array([row], "f4"), dtype)
        assert follow(target, **options) == (0, largest)
        if largest < 0:
            continue
        behind = np.full(len(row), -1, "f4")
        behind[-1] = 1
        target = generate.as_dtype(np.array([row, behind], "f4"), dtype)
        assert follow(target, [largest], **options) == (1, len(row) - 1)
        for other in {0, len(row) - 1, len(row), 2**62, -1} - {largest}:
            assert follow(target, [other], **options) == (0, largest)


def test_greedy_rejects_every_token_of_a_row_of_nan(queue):
    rows = np.full((2, 3), np.nan, "f4")
    for token in (-1, 0, 2, 3):
        assert follow(rows, [token]) == (0, -1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("vocab", [1, 2, 128256])
def test_greedy_walks_logits_of_every_vocabulary(queue, vocab, dtype):
    rng = np.random.default_rng(vocab)
    logits = generate.as_dtype(rng.normal(size=(4, 5, vocab)).astype("f4") * 9, dtype)
    tokens = generate.largest(generate.widened(logits))[0][:, :4]
    tokens[1, 2] = (tokens[1, 2] + 1) % vocab if vocab > 1 else 1
    tokens[2, 1] = -1
    case = generate.Case(
        "logits",
        tokens,
        np.full((4, 4, 1), np.nan, "f4"),
        logits,
        np.full((4, 4), np.nan, "f4"),
        np.full((4, 5), np.nan, "f4"),
        {"greedy": np.ones(4, bool), "num_draft": np.array([4, 4, 4, 3]), "dtype": "bfloat16"},
    )
    result = run(OWN, queue, case)
    assert result.accepted.tolist() == [4, 2, 1, 3]
    assert_same(result, expected_of(case))


def test_greedy_beside_sampled_sequences(queue):
    """NaN where greedy sequences must not look changes nothing, for either."""
    for case in generate.option_cases(93_000, 30, shape=(6, 4, 257), clean=True, with_draft_probs=True):
        greedy = np.array([True, False] * 3)
        options = {**case.options, "greedy": greedy}
        expected = reference.verify(*case.arrays, **options)
        if case.draft_probs.dtype == np.uint16:
            case.draft_probs[greedy] = 0x7FC0
        else:
            case.draft_probs[greedy] = np.nan
        for uniforms in case.arrays[3:]:
            if uniforms is not None:
                uniforms[greedy] = np.nan
        assert_same(run(OWN, queue, case, greedy=greedy), expected)


# Calls as they were before there were options.


def test_old_calls_are_unchanged(queue):
    parameters = list(inspect.signature(verify).parameters.values())
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == ["draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample"]
    case = generate.random_case(1, shape=(1, 2, 257), dtype="float32", token_dtype="int64", with_draft_probs=True)
    expected = reference.verify(*case.arrays)
    result = verify(*case.arrays)
    assert_same(result, expected)
    assert isinstance(result, tuple) and len(result) == 2
    accepted, next_token = result
    assert result[0] is accepted is result.accepted and result[1] is next_token is result.next_token
    assert result._fields == ("accepted", "next_token")
    assert repr(result) == f"VerifyResult(accepted={accepted!r}, next_token={next_token!r})"
    assert result == (accepted, next_token)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_results_are_copied_and_pickled_without_their_event(queue, copied):
    case = VARIANTS["all"]
    result = copied(verify(*case.arrays, **case.options))
    assert type(result) is VerifyResult and result.event is None
    assert_same(result, expected_of(case))
