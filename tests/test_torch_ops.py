"""The operators: the answers of verify() and emitted_tokens(), torch's own opcheck, and graphs without a break."""

from __future__ import annotations

import doctest
from typing import Any

import arrays
import generate
import numpy as np
import pytest

from specverify_dpex import emitted_tokens, reference, uniforms

torch: Any = arrays.optional("torch")
if torch is None:
    pytest.skip(
        "torch is not installed: the session `current` of noxfile.py has it, and fails without it",
        allow_module_level=True,
    )

import torch._dynamo.testing  # noqa: E402

from specverify_dpex import torch_ops  # noqa: E402


def tensors(seed: int = 0, shape: tuple[int, int, int] = (3, 4, 257)) -> tuple[generate.Case, list[Any]]:
    case = generate.random_case(seed, shape=shape, dtype="float32", token_dtype="int64", with_draft_probs=True)
    return case, [torch.from_numpy(array) for array in case.arrays]


def as_tensor(array: Any) -> Any:
    """A tensor of a numpy array; uint16 of an option case holds bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.uint16 else tensor


def option_tensors(case: generate.Case) -> tuple[list[Any], dict[str, Any]]:
    options = {name: value for name, value in case.options.items() if name != "dtype"}
    return (
        [array if array is None else as_tensor(array) for array in case.arrays],
        {name: as_tensor(value) if isinstance(value, np.ndarray) else value for name, value in options.items()},
    )


def assert_right(result: Any, expected: Any) -> None:
    assert [tensor.dtype for tensor in result] == [torch.int64] * 2
    np.testing.assert_array_equal(result[0].numpy(), expected.accepted)
    np.testing.assert_array_equal(result[1].numpy(), expected.next_token)


def samples() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    _, (tokens, draft, target, accept, sample) = tensors()
    seeds = torch.from_numpy(np.array([5, 2**64 - 1, 0], dtype="u8"))
    lengths, some = torch.tensor([4, 0, 2]), torch.tensor([True, False, False])
    masks = {"num_draft": lengths, "deterministic_draft": some, "greedy": some.flip(0)}
    return {
        "uniforms": ([tokens, draft, target, accept, sample], {}),
        "no-draft-probs": ([tokens, None, target, accept, sample], {}),
        "seed": ([tokens, draft, target], {"seed": -3, "offset": 9}),
        "seeds": ([tokens, draft, target, accept], {"seeds": seeds}),
        "one-sequence": ([array[:1] for array in (tokens, draft, target, accept, sample)], {}),
        "no-sequence": ([array[:0] for array in (tokens, draft, target, accept, sample)], {}),
        "options": ([tokens, draft, target], {**masks, "seed": 3}),
        "narrow": (
            [tokens.int(), draft[..., :100].half(), target.bfloat16(), accept],
            {"seeds": seeds, **masks, "num_draft": lengths.int()},
        ),
        "views": ([tokens, draft[..., :200], target[..., :200], accept, sample], {}),
        "gradients": ([tokens, draft.clone().requires_grad_(), target.clone().requires_grad_(), accept, sample], {}),
    }


@pytest.mark.parametrize("name", samples())
def test_opcheck(device, name):
    arguments, options = samples()[name]
    done = torch.library.opcheck(torch.ops.specverify_dpex.verify.default, arguments, options)
    assert set(done.values()) == {"SUCCESS"}


def test_operator_equals_the_reference(device):
    for seed in range(20):
        case, inputs = tensors(seed)
        assert_right(torch.ops.specverify_dpex.verify(*inputs), reference.verify(*case.arrays))
        assert_right(torch_ops.verify(*inputs), reference.verify(*case.arrays))


def test_options_equal_the_reference(device):
    for case in generate.option_cases(0, 60):
        inputs, options = option_tensors(case)
        assert_right(torch_ops.verify(*inputs, **options), reference.verify(*case.arrays, **case.options))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_options_compile_as_one_graph(device, dynamic):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch_ops.verify, fullgraph=True, dynamic=dynamic, backend=counter)
    shapes = [(3, 4, 257), (5, 2, 100), *([(2, 7, 33), (9, 3, 1000)] if dynamic else [])]
    for seed, shape in enumerate(shapes):
        fixed = {"shape": shape, "dtype": "float32", "with_draft_probs": True, "clean": True}
        tokens, draft, target, *_ = generate.random_case(seed, **fixed).arrays
        rng = np.random.default_rng(seed)
        tokens, draft, target = tokens.astype("i4"), draft[..., :-3].astype("f2"), generate.as_dtype(target, "bfloat16")
        masks = {
            "num_draft": rng.integers(-1, shape[1] + 2, shape[0]),
            "deterministic_draft": rng.random(shape[0]) < 0.5,
            "greedy": rng.random(shape[0]) < 0.5,
            "seed": rng.integers(0, 2**64, shape[0], dtype="u8"),
        }
        expected = reference.verify(tokens, draft, target, **masks, dtype="bfloat16")
        options = {name: as_tensor(array) for name, array in masks.items()}
        assert_right(compiled(as_tensor(tokens), as_tensor(draft), as_tensor(target), **options), expected)
    assert counter.frame_count == (1 if dynamic else len(shapes))


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**63, 2**64 - 1, [1, 2**64 - 1, 0]], ids=str)
def test_seeds_draw_the_uniforms_that_uniforms_returns(device, seed):
    case, (tokens, draft, target, *_) = tensors()
    own = np.array(seed, dtype="u8") if isinstance(seed, list) else seed
    expected = reference.verify(*case.arrays[:3], *uniforms(own, 11, 3, 4))
    given = torch.from_numpy(own) if isinstance(seed, list) else seed
    torch._dynamo.reset()
    assert_right(torch_ops.verify(tokens, draft, target, seed=given, offset=11), expected)
    compiled = torch.compile(torch_ops.verify, fullgraph=True)
    assert_right(compiled(tokens, draft, target, seed=given, offset=11), expected)


def test_seeds_that_change_compile_a_few_times(device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch_ops.verify, fullgraph=True, backend=counter)
    case, (tokens, draft, target, *_) = tensors()
    for seed in (7, 1, 2**63 - 1, 2**63, 2**64 - 1, 3, 2**63 + 5):
        assert_right(compiled(tokens, draft, target, seed=seed), reference.verify(*case.arrays[:3], seed=seed))
    assert counter.frame_count <= 5


def test_without_a_seed_torchs_generator_draws(device):
    _, (tokens, draft, target, *_) = tensors(shape=(64, 3, 257))
    torch.manual_seed(1)
    first, second = torch_ops.verify(tokens, draft, target), torch_ops.verify(tokens, draft, target)
    assert (first.next_token != second.next_token).any()
    torch.manual_seed(1)
    again = torch_ops.verify(tokens, draft, target)
    assert torch.equal(first.next_token, again.next_token) and torch.equal(first.accepted, again.accepted)


def test_the_operator_itself_wants_a_seed(device):
    _, inputs = tensors()
    with pytest.raises(ValueError, match="^`seed` must be given where uniforms are not: "):
        torch.ops.specverify_dpex.verify(*inputs[:3])


def decode(tokens: Any, draft: Any, target: Any, accept: Any, sample: Any) -> Any:
    """A step of a decoding loop, with work of torch's before and after the operator."""
    result = torch_ops.verify(tokens, torch.softmax(draft, -1), torch.softmax(target, -1), accept, sample)
    position = torch.arange(tokens.shape[1] + 1).unsqueeze(0)
    kept = torch.where(position < result.accepted[:, None], torch.nn.functional.pad(tokens, (0, 1)), -1)
    return torch.where(position == result.accepted[:, None], result.next_token[:, None], kept), result.accepted.sum()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_functions_that_call_it_compile_as_one_graph(device, dynamic):
    torch._dynamo.reset()
    graphs = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return torch._inductor.compile(module, example)

    compiled = torch.compile(decode, fullgraph=True, dynamic=dynamic, backend=backend)
    shapes = [(3, 4, 257), (3, 4, 257), (5, 2, 100), *([(2, 7, 33), (9, 3, 1000)] if dynamic else [])]
    for seed, shape in enumerate(shapes):
        _, inputs = tensors(seed, shape)
        logits = [inputs[0], *(torch.log(tensor.clamp(1e-6, 1)) for tensor in inputs[1:3]), *inputs[3:]]
        for found, expected in zip(compiled(*logits), decode(*logits)):
            assert torch.equal(found, expected)
    assert len(graphs) == (1 if dynamic else len(set(shapes)))


def test_a_step_counter_compiles_once_more_and_no_more(device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(torch_ops.verify, fullgraph=True, backend=counter)
    case, (tokens, draft, target, *_) = tensors()
    for offset in range(6):
        expected = reference.verify(*case.arrays[:3], *uniforms(3, offset, 3, 4))
        assert_right(compiled(tokens, draft, target, seed=3, offset=offset), expected)
    assert counter.frame_count <= 3


def test_two_calls_in_one_graph_are_two_calls(device):
    _, (tokens, draft, target, *_) = tensors(shape=(64, 3, 257))

    def twice(tokens: Any, draft: Any, target: Any) -> Any:
        return torch_ops.verify(tokens, draft, target), torch_ops.verify(tokens, draft, target)

    one, other = torch.compile(twice, fullgraph=True)(tokens, draft, target)
    assert (one.next_token != other.next_token).any()


def test_errors_name_the_argument(device):
    _, (tokens, draft, target, accept, sample) = tensors()
    with pytest.raises(ValueError, match=r"^`target_probs` must have shape \(batch, num_draft \+ 1, vocab\): "):
        torch_ops.verify(tokens, draft, target[:, 1:], accept, sample)
    with pytest.raises(TypeError, match="^`target_probs` must have dtype float32, float16 or bfloat16: got float64. "):
        torch_ops.verify(tokens, draft, target.double(), accept, sample)
    with pytest.raises(TypeError, match="^`greedy` must have dtype bool: got torch.uint8. "):
        torch_ops.verify(tokens, draft, target, accept, sample, greedy=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"^`num_draft` must have shape \(batch,\): expected \(3,\), got \(2,\)"):
        torch_ops.verify(tokens, draft, target, accept, sample, num_draft=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="^`draft_tokens` must be a tensor: got list$"):
        torch_ops.verify(tokens.tolist(), draft, target)


@pytest.mark.parametrize("axes", [0, 1, 3])
def test_draft_tokens_of_other_ranks(device, axes):
    _, (tokens, draft, target, accept, sample) = tensors()
    wrong = tokens.reshape(-1)[0] if axes == 0 else tokens[0] if axes == 1 else tokens[None]
    text = r"^`draft_tokens` must have shape \(batch, num_draft\): expected \(any, any\), got \("
    for given in ((), (accept, sample), (accept,)):
        with pytest.raises(ValueError, match=text):
            torch_ops.verify(wrong, draft, target, *given)
    with pytest.raises(ValueError, match=text):
        torch.ops.specverify_dpex.verify(wrong, draft, target, seed=1)
    with pytest.raises(ValueError, match=text):  # shapes alone
        torch.ops.specverify_dpex.verify(wrong.to("meta"), draft.to("meta"), target.to("meta"), seed=1)
    with pytest.raises(ValueError, match=text):
        torch_ops.emitted_tokens(wrong.to("meta"), *torch.zeros(2, 3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_the_operator_takes_one_kind_of_key(device, where):
    tokens, _, target, *_ = (tensor.to(where) for tensor in tensors()[1])
    seeds = torch.zeros(3, dtype=torch.uint64, device=where)
    with pytest.raises(ValueError, match="^`seed` and `seeds` must not both be given: "):
        torch.ops.specverify_dpex.verify(tokens, None, target, seed=1, seeds=seeds)


@pytest.mark.parametrize("offset", [-1, 2**32])
def test_offsets_out_of_range(device, offset):
    torch._dynamo.reset()
    _, (tokens, draft, target, *_) = tensors()
    compiled = torch.compile(torch_ops.verify, fullgraph=True, backend="aot_eager")
    for function in (torch.ops.specverify_dpex.verify, torch_ops.verify, compiled):
        with pytest.raises(ValueError, match="^`offset` must fit in 32 bits: "):
            function(tokens, draft, target, seed=1, offset=offset)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range(device, seed):
    torch._dynamo.reset()
    _, (tokens, draft, target, *_) = tensors()
    with pytest.raises(ValueError, match="^`seed` must fit in 64 bits: "):
        torch_ops.verify(tokens, draft, target, seed=seed)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="`seed` must fit in 64 bits|Observed exception"):
        torch.compile(torch_ops.verify, fullgraph=True, backend="aot_eager")(tokens, draft, target, seed=seed)


def test_the_wrapper_checks_offsets_that_no_operator_takes(device):
    _, (tokens, draft, target, *_) = tensors()
    with pytest.raises(ValueError, match="^`offset` must fit in 32 bits: .*, got 9223372036854775808"):
        torch_ops.verify(tokens, draft, target, offset=2**63)
    with pytest.raises(TypeError, match="^`offset` must be an integer: expected int, got float"):
        torch_ops.verify(tokens, draft, target, seed=1, offset=0.5)


def test_tensors_without_data(device):
    _, inputs = tensors()
    # Alone they tell shapes; beside others they must not make an operator return memory as it is.
    accepted, next_token = torch_ops.verify(*(tensor.to("meta") for tensor in inputs))
    assert {accepted.device.type, next_token.device.type} == {"meta"} and accepted.shape == next_token.shape == (3,)
    with pytest.raises(TypeError, match="^`target_probs` must be on the device of `draft_tokens`: expected cpu, got "):
        torch_ops.verify(inputs[0], inputs[1], inputs[2].to("meta"), seed=1)
    with pytest.raises(TypeError, match="^`accepted` must be on the device of `draft_tokens`: expected cpu, got meta"):
        torch_ops.emitted_tokens(inputs[0], accepted, next_token)


def test_xpu_results_of_the_operator_share_no_storage(monkeypatch):
    both = torch.arange(4)
    monkeypatch.setattr(torch_ops, "_verify", lambda *_, **__: (both[:2], both[2:]))
    tokens, target = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 2, 3)
    accepted, next_token = torch.ops.specverify_dpex.verify(tokens, None, target, seed=0)
    assert (accepted.tolist(), next_token.tolist()) == ([0, 1], [2, 3])
    assert accepted.untyped_storage().data_ptr() != next_token.untyped_storage().data_ptr()


def emitted_samples() -> dict[str, list[Any]]:
    tokens, accepted, following = torch.arange(15).reshape(3, 5), torch.tensor([0, 5, 2]), torch.tensor([7, -1, 2**40])
    return {
        "int64": [tokens, accepted, following],
        "int32": [tokens.int(), accepted, following],
        "views": [tokens.T.contiguous().T, accepted.repeat_interleave(2)[::2], following],
        "no-draft": [tokens[:, :0], torch.zeros(3, dtype=torch.int64), following],
        "no-sequence": [tokens[:0], accepted[:0], following[:0]],
    }


@pytest.mark.parametrize("name", emitted_samples())
def test_opcheck_of_emitted_tokens(device, name):
    done = torch.library.opcheck(torch.ops.specverify_dpex.emitted_tokens.default, emitted_samples()[name])
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_step_and_its_tokens_compile_as_one_graph(device, dynamic):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=counter)
    def step(*inputs: Any) -> Any:
        result = torch_ops.verify(*inputs)
        return torch_ops.emitted_tokens(inputs[0], *result) + 0

    for shape in ((3, 4, 257), (5, 2, 100)):
        case, inputs = tensors(1, shape)
        expected = emitted_tokens(case.arrays[0], *reference.verify(*case.arrays))
        for found in (step(*inputs), torch_ops.emitted_tokens(inputs[0], *torch_ops.verify(*inputs))):
            assert found.dtype is torch.int64
            np.testing.assert_array_equal(found.numpy(), expected)
    assert counter.frame_count == (1 if dynamic else 2)


def test_docstring_examples(device):
    failed, tried = doctest.testmod(torch_ops)
    assert (failed, tried > 0) == (0, True)
