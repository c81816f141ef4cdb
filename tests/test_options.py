"""The options of verify() on a device: lengths, masks, dtypes, out, seeds, stats, check and events."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import arrays
import dpctl
import generate
import numpy as np
import pytest
from test_check import good
from test_dlpack import Producer
from test_stats import Step, expected_counts
from test_verify import SLICES, TILE_STEPS, WORK_GROUPS, assert_same, force_cut

from specverify_dpex import AcceptanceStats, UsmArray, VerifyResult, launch, plan, prepare, reference, tuning, verify

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


@pytest.mark.parametrize("first_seed", generate.blocks(range(0, CASES, CHUNK), 4))
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


# Arrays for the results.


def blank(kind: arrays.Kind, queue: Any, batch: int = SHAPE[0]) -> tuple[Any, Any]:
    """A pair for `out`, of a kind."""
    return kind.make(np.full(batch, -7), queue), kind.make(np.full(batch, -7), queue)


def made(kind: arrays.Kind, queue: Any, case: generate.Case) -> dict[str, Any]:
    """A case's arguments of verify(), by name, as arrays of a kind."""
    names = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")
    given = {**dict(zip(names, case.arrays)), **case.options}
    return {name: on(kind, queue, value) for name, value in given.items()}


@pytest.fixture
def refusing(launched: list[str]) -> Iterator[Callable[..., None]]:
    """Calls a function, which must raise this before it launches anything; a good call still works afterwards."""

    def refuse(error: type[Exception], begin: str, function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
        before = len(launched)
        with pytest.raises(error) as raised:
            function(*inputs, **options)
        assert str(raised.value).startswith(begin), str(raised.value)
        assert len(launched) == before

    yield refuse
    case = VARIANTS["all"]
    assert_same(verify(*case.arrays, **case.options), expected_of(case))


def test_out_is_written_and_returned(kind, queue):
    out = blank(kind, queue)
    for case in VARIANTS.values():
        if len(case.draft_tokens) != SHAPE[0]:
            continue
        result = verify(**made(kind, queue, case), out=out)
        assert type(result) is VerifyResult
        assert result.accepted is out[0] and result.next_token is out[1]
        assert_same(VerifyResult(*(contents(kind, array) for array in out)), expected_of(case))


def test_an_earlier_result_is_an_out(kind, queue):
    first, second = VARIANTS["greedy"], VARIANTS["all"]
    earlier = verify(**made(kind, queue, first))
    result = verify(**made(kind, queue, second), out=earlier)
    assert result is not earlier and result.accepted is earlier.accepted and result.next_token is earlier.next_token
    assert_same(VerifyResult(*map(kind.read, result)), expected_of(second))
    result = verify(**made(kind, queue, first), out=list(result))
    assert_same(VerifyResult(*map(kind.read, result)), expected_of(first))


def test_out_of_an_empty_batch(kind, queue):
    case = generate.option_case(7, shape=(0, 3, 5))
    out = blank(kind, queue, 0)
    stats = AcceptanceStats()
    result = verify(**made(kind, queue, case), out=out, stats=stats, check=True, depends_on=[])
    assert result.accepted is out[0] and result.next_token is out[1] and result.event is None
    assert stats.read().steps == 0


def test_out_of_the_plain_kind_that_results_are_of(queue):
    """An object with an interface alone comes back as a UsmArray, which then serves as its out."""
    for kind in arrays.kinds():
        plain = NUMPY if kind.name in ("numpy", "torch", "dlpack-host") else OWN
        if kind.name == "torch-xpu":
            continue  # on a queue of its own
        out = blank(plain, queue)
        case = VARIANTS["all"]
        result = verify(**made(kind, queue, case), out=out)
        assert result.accepted is out[0]
        assert_same(VerifyResult(*map(plain.read, out)), expected_of(case))


def prepare_without_offset(inputs: Mapping[str, Any], out: Any = None) -> Any:
    return prepare(**{name: value for name, value in inputs.items() if name != "offset"}, out=out)


@pytest.mark.parametrize("index", [0, 1])
def test_out_of_other_types_and_shapes_is_refused(kind, queue, refusing, index):
    inputs = made(kind, queue, VARIANTS["all"])
    batch = SHAPE[0]

    def refuse(error: type[Exception], text: str, other: Any) -> None:
        out = list(blank(kind, queue))
        out[index] = other
        refusing(error, f"`out[{index}]` must {text}", verify, **inputs, out=out)

    for dtype in ("int32", "float32", "uint64"):
        refuse(TypeError, f"have dtype int64: got {dtype}", kind.make(np.zeros(batch, dtype), queue))
    for shape in ((batch + 1,), (batch - 1,), (0,), (batch, 1), (1, batch)):
        text = f"have shape (batch,): expected ({batch},), got {shape}"
        refuse(ValueError, text, kind.make(np.zeros(shape, "i8"), queue))
    other = OWN if kind.name in ("numpy", "torch", "dlpack-host") else NUMPY
    refuse(TypeError, "be of the same kind as `draft_tokens`: expected ", other.make(np.zeros(batch, "i8"), queue))
    for wrong in (None, [0] * batch, 3, "text"):
        refuse(TypeError, "be an array: expected one of dpnp, dpctl.tensor, ", wrong)


def test_out_that_is_no_pair_is_refused(queue, refusing):
    inputs = made(NUMPY, queue, VARIANTS["all"])
    one = np.zeros(SHAPE[0], "i8")
    for wrong in (one, (one,), (one, one.copy(), one.copy()), [], {"accepted": one}, 3, np.zeros((2, SHAPE[0]), "i8")):
        text = "`out` must be a pair of arrays: expected (accepted, next_token), such as an earlier result, got "
        refusing(TypeError, text + type(wrong).__name__, verify, **inputs, out=wrong)


def test_out_of_other_strides_is_refused(strided_kind, queue, refusing):
    kind, batch = strided_kind, SHAPE[0]
    inputs = made(kind, queue, VARIANTS["all"])
    for view, stride in ((np.s_[::2], 2), (np.s_[::-2], -2)):
        for index in (0, 1):
            out = list(blank(kind, queue))
            out[index] = kind.make(np.zeros(2 * batch, "i8"), queue)[view]
            text = (
                f"`out[{index}]` must be contiguous: expected strides (1,) in elements, got ({stride},). Pass an array"
            )
            refusing(ValueError, text, verify, **inputs, out=out)
    one = {name: value for name, value in made(kind, queue, batch_of([Request(0)], 5, 0)).items()}
    out = [kind.make(np.zeros(2, "i8"), queue)[::2] for _ in range(2)]  # one element: any stride will do
    assert verify(**one, out=out).accepted is out[0]
    assert_same(VerifyResult(*map(kind.read, out)), expected_of(batch_of([Request(0)], 5, 0)))


def test_out_on_another_queue_is_refused(device, refusing):
    queue, other = dpctl.SyclQueue(device), dpctl.SyclQueue(device)
    inputs = made(OWN, queue, VARIANTS["all"])
    out = (blank(OWN, queue)[0], blank(OWN, other)[1])
    refusing(ValueError, "`out[1]` must be on the queue of `target_probs`: ", verify, **inputs, out=out)


def read_only(kind: arrays.Kind, queue: Any) -> Any:
    """An array that its library says must not be written to; None where it cannot say so."""
    array = np.full(SHAPE[0], -7)
    if kind.name in ("torch", "torch-xpu", "usm-array"):
        return None
    if kind.name == "dlpack":
        return Producer(arrays.usm_array(array, queue), flags=1)
    if kind.name == "dlpack-host":
        return Producer(array, flags=1)
    made = kind.make(array, queue)
    if kind is NUMPY:
        made.flags.writeable = False
    elif kind.name == "interface":
        pointer, _ = made.__sycl_usm_array_interface__["data"]
        made.__sycl_usm_array_interface__["data"] = (pointer, True)
    else:
        (made.get_array() if kind.name == "dpnp" else made).flags.writable = False
    return made


@pytest.mark.parametrize("index", [0, 1])
def test_a_read_only_out_is_refused(kind, queue, refusing, index):
    out = list(blank(kind, queue))
    out[index] = read_only(kind, queue)
    inputs = made(kind, queue, VARIANTS["all"])
    if kind.name.startswith("dlpack"):  # kinds are found by class: all arguments are Producers

        def produced(value: Any) -> Any:
            on_device = arrays.usm_array(value, queue) if kind.name == "dlpack" else value
            return Producer(on_device) if value.dtype != bool else None

        host = made(NUMPY, queue, VARIANTS["seed"])
        inputs = {name: produced(on) if isinstance(on, np.ndarray) else on for name, on in host.items()}
        out[1 - index] = produced(np.full(SHAPE[0], -7))
    if out[index] is None:
        assert verify(**inputs, out=blank(kind, queue)).accepted is not None
        return
    text = f"`out[{index}]` must be writable: got a read-only array. Pass a copy, or leave it out"
    refusing(ValueError, text, verify, **inputs, out=out)


def overlapping(base: Any, first: int) -> Any:
    """(batch,) int64 over elements from `first` on of an array of 8-byte elements, as one of its kind."""
    batch = SHAPE[0]
    if isinstance(base, np.ndarray):
        return base.reshape(-1).view("i8")[first : first + batch]
    if isinstance(base, UsmArray):
        return UsmArray((batch,), "int64", sycl_queue=base.sycl_queue, memory=base.memory, byte_offset=8 * first)
    if isinstance(base, arrays.Interface):
        part = overlapping(base._owner, first)
        return arrays.Interface(part.__sycl_usm_array_interface__, part)
    if isinstance(base, arrays.Dlpack):
        return arrays.Dlpack(overlapping(base._owner, first))
    if hasattr(base, "data_ptr") and hasattr(base, "array"):
        return type(base)(overlapping(base.array, first), base.device)
    if hasattr(base, "data_ptr"):
        import torch

        return base.reshape(-1).view(torch.int64)[first : first + batch]
    if hasattr(base, "get_array"):
        return type(base)._create_from_usm_ndarray(overlapping(base.get_array(), first))
    return type(base)((batch,), dtype="i8", buffer=base.usm_data, offset=first)


def test_out_that_overlaps_is_refused(kind, queue, refusing):
    batch, num_draft, _ = SHAPE
    case = VARIANTS["seeds"]
    inputs = made(kind, queue, case._replace(options={**case.options, "num_draft": np.array([4, 3, 2, 1, 0])}))
    one, two = blank(kind, queue)

    def refuse(out: tuple[Any, Any], name: str, other: str) -> None:
        text = f"`{name}` must not overlap `{other}`: expected memory of its own. Pass another array"
        refusing(ValueError, text, verify, **inputs, out=out)

    refuse((one, one), "out[1]", "out[0]")
    both = kind.make(np.full(2 * batch, -7), queue)
    for first in range(1, batch):
        refuse((overlapping(both, 0), overlapping(both, first)), "out[1]", "out[0]")
        refuse((overlapping(both, first), overlapping(both, 0)), "out[1]", "out[0]")
    for other in ("seed", "num_draft"):
        refuse((overlapping(inputs[other], 0), two), "out[0]", other)
        refuse((one, overlapping(inputs[other], 0)), "out[1]", other)
    for first in (0, 3, batch * num_draft - batch):
        refuse((one, overlapping(inputs["draft_tokens"], first)), "out[1]", "draft_tokens")
    for out in ((0, batch), (batch, 0)):  # side by side is apart
        result = verify(**inputs, out=[overlapping(both, first) for first in out])
        expected = reference.verify(*case.arrays, **case.options, num_draft=[4, 3, 2, 1, 0])
        assert_same(VerifyResult(*(contents(kind, array) for array in result)), expected)


def test_prepare_takes_out(usm_kind, queue, refusing):
    kind, case = usm_kind, VARIANTS["all"]
    inputs = made(kind, queue, case)
    del inputs["offset"]
    out = blank(kind, queue)
    prepared = prepare(**inputs, out=out)
    assert prepared.result.accepted is out[0] and prepared.result.next_token is out[1]
    for offset in (5, 0, 2**32 - 1, 5):
        assert prepared(offset) is prepared.result
        expected = reference.verify(*case.arrays, **{**case.options, "offset": offset})
        assert_same(VerifyResult(*(contents(kind, array) for array in out)), expected)
    refusing(ValueError, "`out[1]` must not overlap `out[0]`", prepare, **inputs, out=(out[0], out[0]))
    wrong = (out[0], kind.make(np.zeros(SHAPE[0], "i4"), queue))
    refusing(TypeError, "`out[1]` must have dtype int64: got int32", prepare, **inputs, out=wrong)
    if kind.strided:
        refusing(ValueError, "`out[0]` must be writable", prepare, **inputs, out=(read_only(kind, queue), out[1]))


def test_prepare_keeps_its_out_alive(queue):
    case = VARIANTS["all"]
    inputs = made(OWN, queue, case)
    del inputs["offset"]
    prepared = prepare(**inputs, out=blank(OWN, queue))
    del inputs
    for _ in range(100):
        UsmArray((SHAPE[0],), "int64", sycl_queue=queue)
    assert_same(VerifyResult(*map(OWN.read, prepared(5))), expected_of(case))


# Counters.


def step_of(case: generate.Case, expected: Any) -> Step:
    step = Step(0, 1, 1)
    step.tokens, step.lengths = case.draft_tokens, case.options.get("num_draft")
    step.accepted, step.next_token = expected
    return step


def test_stats_of_calls_with_options(kind, queue):
    stats = AcceptanceStats()
    steps = []
    for seed, case in enumerate(generate.option_cases(94_000, 12)):
        out = {"out": blank(kind, queue, len(case.draft_tokens))} if seed % 2 else {}
        depends_on = {"depends_on": [queue.submit_barrier()]} if seed % 3 else {}
        result = verify(**made(kind, queue, case), **out, **depends_on, stats=stats)
        steps.append(step_of(case, expected_of(case)))
        if seed in (0, 11):
            assert stats.read() == expected_counts(steps)
        if result.event is not None:
            result.event.wait()
        values = [contents(kind, array) if out else kind.read(array) for array in result]
        assert_same(VerifyResult(*values), expected_of(case))


def test_stats_of_prepared_calls(usm_kind, queue):
    stats = AcceptanceStats()
    case = VARIANTS["all"]
    inputs = made(usm_kind, queue, case)
    del inputs["offset"]
    prepared = prepare(**inputs)
    steps = []
    for offset in range(8):
        counted = {"stats": stats} if offset != 3 else {}
        depends_on = {"depends_on": []} if offset % 2 else {}
        result = prepared(offset, **counted, **depends_on)
        result.event.wait()
        expected = reference.verify(*case.arrays, **{**case.options, "offset": offset})
        assert_same(VerifyResult(*map(usm_kind.read, result)), expected)
        if counted:
            steps.append(step_of(case, expected))
    assert stats.read() == expected_counts(steps)


def test_stats_are_refused_before_a_launch(device, refusing):
    queue, other = dpctl.SyclQueue(device), dpctl.SyclQueue(device)
    inputs, elsewhere = (made(OWN, one, VARIANTS["all"]) for one in (queue, other))
    stats = AcceptanceStats()
    refusing(TypeError, "`stats` must be an AcceptanceStats: got dict", verify, **inputs, stats={})
    verify(**inputs, stats=stats)
    refusing(ValueError, "`stats` must be used on one queue", verify, **elsewhere, stats=stats)
    prepared = prepare_without_offset(elsewhere)
    refusing(ValueError, "`stats` must be used on one queue", prepared, 0, stats=stats)
    assert stats.read().steps == SHAPE[0]


# Values checked first.


def good_options() -> dict[str, Any]:
    """Arguments with every option, whose values pass the check."""
    arguments = good(0, 4, 6, 257, 200)
    garbage = np.float32(np.nan)
    arguments.update(
        draft_tokens=arguments["draft_tokens"].astype("i4"),
        num_draft=np.array([6, 0, 6, 3], "i4"),
        greedy=np.array([False, False, True, False]),
        deterministic_draft=np.array([False, False, False, True]),
    )
    arguments["draft_tokens"][0, 2] = -1
    arguments["draft_tokens"][0, 3:] = 10**6
    arguments["draft_probs"][0, 2:] = arguments["draft_probs"][1:] = garbage
    arguments["target_probs"][0, 3:] = arguments["target_probs"][1, 1:] = arguments["target_probs"][3, 4:] = garbage
    arguments["target_probs"][2] *= -100
    for name in ("uniform_accept", "uniform_sample"):
        arguments[name][2] = garbage
    return arguments


def faults() -> dict[str, tuple[dict[str, Any], str]]:
    """Arguments with one bad value, and how the error begins."""
    texts = {
        "draft_tokens": "hold tokens of the vocabulary: expected less than 257, got 257 at sequence 0, position 1. ",
        "num_draft": "count positions of `draft_tokens`: expected 0 to 6, got 7 at sequence 1. ",
        "draft_probs": "hold probabilities: expected values in [0, 1], got -0.5 at sequence 0, position 1, token 7. ",
        "target_probs": "not hold NaN: expected numbers, got nan at sequence 2, position 6, token 3. ",
        "uniform_accept": "hold uniforms: expected values in [0, 1), got 1.0 at sequence 3, position 2. ",
        "uniform_sample": "hold uniforms: expected values in [0, 1), got -1.0 at sequence 3, position 3. ",
    }
    values = [((0, 1), 257), ((1,), 7), ((0, 1, 7), -0.5), ((2, 6, 3), np.nan), ((3, 2), 1), ((3, 3), -1)]
    found = {}
    for (name, text), (place, value) in zip(texts.items(), values):
        arguments = good_options()
        if name == "num_draft":
            arguments["target_probs"][1] = 1 / 257
            arguments["draft_probs"][1] = 1 / 200
        arguments[name][place] = value
        found[name] = (arguments, f"`{name}` must {text}")
    return found


@pytest.mark.parametrize("name", faults())
def test_check_raises_before_the_launch(kind, queue, launched, name):
    arguments, text = faults()[name]
    given = {key: on(kind, queue, value) for key, value in arguments.items()}
    out, stats = blank(kind, queue, 4), AcceptanceStats()
    launched.clear()
    for depends_on in (None, []):
        with pytest.raises(ValueError) as raised:
            verify(**given, out=out, stats=stats, check=True, depends_on=depends_on)
        assert str(raised.value).startswith(text), str(raised.value)
    assert set(launched) <= {"check_proposals", "check_rows_f32"} and launched
    assert [contents(kind, array).tolist() for array in out] == [[-7] * 4] * 2
    assert stats.read().steps == 0

    fine = good_options()
    result = verify(**{key: on(kind, queue, value) for key, value in fine.items()}, out=out, stats=stats, check=True)
    assert launched[-2:] == ["verify_f32_f32", "stats"]
    assert_same(VerifyResult(*(contents(kind, array) for array in result)), reference.verify(**fine))
    assert stats.read().steps == 4
    unchecked = verify(**given)  # what is bad is defined all the same
    assert_same(VerifyResult(*map(kind.read, unchecked)), reference.verify(**arguments))


def test_check_refuses_one_buffer_for_both_uniforms(kind, queue, launched):
    arguments = {name: kind.make(array, queue) for name, array in good(0, 2, 0, 5).items() if name != "uniform_accept"}
    arguments["uniform_accept"] = kind.make(np.zeros((2, 0), "f4"), queue)
    verify(**arguments, check=True)  # nothing is drawn from one of them
    arguments = {name: kind.make(array, queue) for name, array in good(0, 2, 3, 5).items()}
    assert verify(**arguments, check=True) is not None
    if kind.strided:
        arguments["uniform_accept"] = arguments["uniform_sample"][:, :3]
        launched.clear()
        with pytest.raises(
            ValueError, match="^`uniform_accept` and `uniform_sample` must be independent: expected two"
        ):
            verify(**arguments, check=True)
        assert "verify_f32_f32" not in launched
    else:
        verify(**arguments, check=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_check_of_narrow_rows(kind, queue, dtype):
    arguments = good(0, 3, 4, 257)
    for name in ("draft_probs", "target_probs"):
        arguments[name] = generate.as_dtype(arguments[name], dtype)
    given = {name: kind.make(array, queue) for name, array in arguments.items()}
    result = verify(**given, dtype="bfloat16", check=True)
    expected = reference.verify(**arguments, dtype="bfloat16")
    assert_same(VerifyResult(*map(kind.read, result)), expected)
    arguments["target_probs"][2, 4, 0] = generate.as_dtype(np.array([np.inf], "f4"), dtype)[0]
    given = {name: kind.make(array.copy(), queue) for name, array in arguments.items()}
    text = (
        r"^`target_probs` must hold probabilities: expected values in \[0, 1\], got inf at sequence 2, position 4, tok"
    )
    with pytest.raises(ValueError, match=text):
        verify(**given, dtype="bfloat16", check=True)


# Events.


class Slow:
    """Work that keeps a queue's device busy for the better part of a second."""

    POSITIONS = 80

    def __init__(self, queue: dpctl.SyclQueue):
        row = np.zeros(2**20, "f4")
        row[0] = 1
        shape = (1, self.POSITIONS + 1, row.size)
        made = [
            arrays.Interface(owner.__sycl_usm_array_interface__, owner)
            for owner in (
                arrays.usm_array(array, queue) for array in (np.zeros((1, self.POSITIONS), "i8"), row, np.ones(1, bool))
            )
        ]
        self._tokens, self._target, self._greedy = made
        self._target.__sycl_usm_array_interface__.update(shape=shape, strides=(0, 0, 1))
        verify(self._tokens, None, self._target, greedy=self._greedy, depends_on=[]).event.wait()

    def start(self) -> dpctl.SyclEvent:
        event = verify(self._tokens, None, self._target, greedy=self._greedy, depends_on=[]).event
        assert event.execution_status in INCOMPLETE
        return event


@pytest.fixture
def free_queue(device: dpctl.SyclDevice) -> dpctl.SyclQueue:
    """A queue without an order, which no array library uses."""
    return dpctl.SyclQueue(device)


def on_device(queue: Any, case: generate.Case) -> dict[str, Any]:
    """A case's arguments as UsmArrays; the same was verified once, so that nothing has to be built."""
    given = made(OWN, queue, case)
    verify(**given)
    return given


def held(array: UsmArray) -> list[int]:
    """What an int64 array holds now, without a wait for its queue."""
    first = array._byte_offset
    return np.asarray(array.memory.copy_to_host())[first : first + 8 * array.shape[0]].view("i8").tolist()


def assert_holds(result: VerifyResult, expected: VerifyResult) -> None:
    assert [held(array) for array in result] == [array.tolist() for array in expected]


@pytest.mark.parametrize("form", ["new", "out", "prepared"])
def test_depends_on_returns_before_the_device_is_done(free_queue, form):
    case = VARIANTS["all"]
    given, slow = on_device(free_queue, case), Slow(free_queue)
    out = blank(OWN, free_queue)
    prepared = prepare_without_offset(given, out)
    stats = AcceptanceStats()
    verify(**given, stats=stats)
    verify(**given, out=out)  # the first call on arrays like these fills its scratch memory, which may wait
    busy = slow.start()
    if form == "prepared":
        result = prepared(5, stats=stats, depends_on=(busy,))
    else:
        result = verify(**given, stats=stats, depends_on=[busy], **({"out": out} if form == "out" else {}))
    assert result.event.execution_status in INCOMPLETE
    assert busy.execution_status in INCOMPLETE
    given.clear()  # the call keeps what it reads
    for _ in range(50):
        UsmArray((SHAPE[0], SHAPE[1], SHAPE[2]), "float32", sycl_queue=free_queue)
    result.event.wait()
    assert busy.execution_status is COMPLETE
    assert_holds(result, expected_of(case))
    assert stats.read() == expected_counts([step_of(case, expected_of(case))] * 2)


@pytest.mark.parametrize("form", ["new", "out", "prepared"])
def test_without_depends_on_the_call_waits_where_nothing_else_keeps_the_order(free_queue, form):
    case = VARIANTS["all"]
    given, slow = on_device(free_queue, case), Slow(free_queue)
    out = blank(OWN, free_queue)
    prepared = prepare_without_offset(given, out)
    slow.start()
    result = prepared(5) if form == "prepared" else verify(**given, **({"out": out} if form == "out" else {}))
    assert result.event.execution_status is COMPLETE
    assert_holds(result, expected_of(case))


@pytest.mark.parametrize("form", ["verify", "prepared"])
def test_plain_results_are_complete_at_return(free_queue, form):
    """Whatever the arguments are: nothing orders what reads a UsmArray after what writes it."""
    tensor = arrays.tensor_module()
    case = VARIANTS["all"]
    given = {
        name: tensor.asarray(value, sycl_queue=free_queue) if isinstance(value, np.ndarray) else value
        for name, value in made(NUMPY, free_queue, case).items()
    }
    out = blank(OWN, free_queue)
    prepared = prepare_without_offset(given, out)
    slow = Slow(free_queue)
    slow.start()
    result = verify(**given, out=out) if form == "verify" else prepared(5)
    assert result.event.execution_status is COMPLETE
    assert_holds(result, expected_of(case))


@pytest.mark.parametrize("in_order", [False, True], ids=["out-of-order", "in-order"])
def test_an_event_of_a_call_orders_what_follows(free_queue, monkeypatch, in_order):
    """The calls of a chain, each on the results of the one before, on two queues of one context."""
    properties = {"property": "in_order"} if in_order else {}
    queues = [dpctl.SyclQueue(free_queue.sycl_context, free_queue.sycl_device, **properties) for _ in range(2)]
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.full(31, 0.3), (16, 2)).astype("f4")
    tokens = rng.integers(0, 31, (16, 1))
    targets = [arrays.usm_array(target, queue) for queue in queues]
    source = arrays.usm_array(tokens, free_queue)
    slow = Slow(free_queue)
    expected = []
    for step in range(12):
        expected.append(reference.verify(tokens, None, target, seed=7, offset=step))
        tokens = expected[-1].next_token[:, None]
    assert len({tuple(right.next_token.tolist()) for right in expected}) == 12

    def fill_scratch() -> None:
        """For as many calls in flight: memory is filled at its first use, which may wait for the device."""
        for one in plan._plans.values():
            for block in [one.scratch.take() for _ in range(6)]:
                one.scratch.give_back(block)

    monkeypatch.setattr(plan, "_plans", {})
    for last in (False, True):
        first = arrays.usm_array(np.full((16, 1), -1), free_queue)
        outs = [blank(OWN, queues[step % 2], 16) for step in range(12)]
        event = free_queue.memcpy_async(first.memory, source.memory, first.memory.nbytes, [slow.start()])
        memory, results = first.memory, []
        for step, out in enumerate(outs):
            drafts = UsmArray((16, 1), "int64", sycl_queue=queues[step % 2], memory=memory)
            given = (drafts, None, targets[step % 2])
            results.append(verify(*given, seed=7, offset=step, out=out, depends_on=[event]))
            event, memory = results[-1].event, out[1].memory
        if last and (launch.SequentialOrderManager is not None or not in_order):  # in dpctl 0.17 the host waits
            assert results[0].event.execution_status in INCOMPLETE
        event.wait()
        for result, right in zip(results, expected):
            assert_holds(result, right)
        fill_scratch()


def test_inputs_that_are_still_being_written(free_queue):
    """Every array of a call arrives by a copy that has not begun yet, on another queue of the context."""
    case = VARIANTS["all"]
    given, slow = on_device(free_queue, case), Slow(free_queue)
    other = dpctl.SyclQueue(free_queue.sycl_context, free_queue.sycl_device)
    late = {
        name: UsmArray.from_buffer(np.zeros(value.memory.nbytes, "u1"), value.shape, value.dtype, sycl_queue=free_queue)
        for name, value in given.items()
        if isinstance(value, UsmArray)
    }
    busy = slow.start()
    events = [
        other.memcpy_async(array.memory, given[name].memory, array.memory.nbytes, [busy])
        for name, array in late.items()
    ]
    result = verify(**{**given, **late}, depends_on=events)
    assert result.event.execution_status in INCOMPLETE
    result.event.wait()
    assert_holds(result, expected_of(case))


def test_check_waits_for_the_events(free_queue):
    fine = good_options()
    given = {name: arrays.usm_array(value, free_queue) for name, value in fine.items()}
    slow = Slow(free_queue)
    for name in ("num_draft", "target_probs", "uniform_sample"):
        late = arrays.usm_array(np.full_like(fine[name], -1), free_queue)
        with pytest.raises(ValueError, match=f"^`{name}` must "):
            verify(**{**given, name: late}, check=True, depends_on=[])
        source = given[name].memory
        event = free_queue.memcpy_async(late.memory, source, source.nbytes, [slow.start()])
        result = verify(**{**given, name: late}, check=True, depends_on=[event])
        result.event.wait()
        assert_holds(result, reference.verify(**fine))


def test_copies_wait_for_the_events(free_queue):
    """A vocabulary with strides is copied before the launch, which must not be before it is written."""
    tensor = arrays.tensor_module()
    case = VARIANTS["seed"]
    given = {
        name: tensor.asarray(value, sycl_queue=free_queue) if isinstance(value, np.ndarray) else value
        for name, value in made(NUMPY, free_queue, case).items()
    }
    whole = tensor.asarray(np.repeat(case.target_probs, 2, axis=-1), sycl_queue=free_queue)
    late = tensor.zeros(whole.shape, dtype="f4", sycl_queue=free_queue)
    free_queue.wait()
    given["target_probs"] = late[..., ::2]
    slow = Slow(free_queue)
    event = free_queue.memcpy_async(late.usm_data, whole.usm_data, whole.nbytes, [slow.start()])
    result = verify(**given, depends_on=[event])
    result.event.wait()
    assert_same(VerifyResult(*map(tensor.asnumpy, result)), expected_of(case))


def test_host_arrays_take_events_and_come_back_complete(queue):
    slow = Slow(queue)
    case = VARIANTS["all"]
    for kind in arrays.kinds():
        if kind.name not in ("numpy", "torch", "dlpack-host"):
            continue
        given = made(kind, queue, case)
        out = blank(kind, queue)
        stats = AcceptanceStats()
        for options in ({}, {"out": out}, {"stats": stats}):
            busy = slow.start()
            result = verify(**given, depends_on=[busy], **options)
            assert busy.execution_status is COMPLETE
            values = [contents(kind, array) if "out" in options else kind.read(array) for array in result]
            assert_same(VerifyResult(*values), expected_of(case))
        assert stats.read() == expected_counts([step_of(case, expected_of(case))])
        assert_same(VerifyResult(*map(kind.read, verify(**given, depends_on=[]))), expected_of(case))


def test_events_of_every_kind_of_array(kind, queue):
    case = VARIANTS["all"]
    given = made(kind, queue, case)
    event = None
    for _ in range(3):
        result = verify(**given, depends_on=[] if event is None else [event, queue.submit_barrier()])
        event = result.event
        event.wait()
        assert event.execution_status is COMPLETE
        assert_same(VerifyResult(*map(kind.read, result)), expected_of(case))


def test_events_of_any_origin(free_queue):
    case = VARIANTS["all"]
    given = on_device(free_queue, case)
    device = free_queue.sycl_device
    other = dpctl.SyclQueue(device)
    elsewhere = dpctl.SyclQueue(dpctl.SyclContext(device), device)
    ordered = dpctl.SyclQueue(device, property="in_order")
    source, copied = (arrays.usm_array(np.zeros(4096), free_queue) for _ in range(2))
    copy = free_queue.memcpy_async(copied.memory, source.memory, 8 * 4096, [])
    barriers = [one.submit_barrier() for one in (free_queue, other, elsewhere, ordered)]
    done = verify(**given).event
    for depends_on in ((), [dpctl.SyclEvent()], [copy], barriers, [done] * 100, tuple(barriers), copy):
        result = verify(**given, depends_on=depends_on)
        result.event.wait()
        assert_holds(result, expected_of(case))


@pytest.mark.parametrize(
    "wrong",
    [[None], [3], "text", 3, {}, object(), [[]]],
    ids=["none", "int", "str", "number", "dict", "object", "list"],
)
def test_what_is_no_event_is_refused(free_queue, refusing, wrong):
    given = made(OWN, free_queue, VARIANTS["all"])
    prepared = prepare_without_offset(given)
    text = "`depends_on` must hold SYCL events: expected dpctl.SyclEvent, got "
    for depends_on in (wrong, [dpctl.SyclEvent(), wrong]):
        refusing(TypeError, text, verify, **given, depends_on=depends_on)
        refusing(TypeError, text, prepared, depends_on=depends_on)
    refusing(TypeError, text + "SyclQueue", verify, **given, depends_on=[free_queue])
    assert_same(VerifyResult(*map(OWN.read, prepared(5))), expected_of(VARIANTS["all"]))


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
