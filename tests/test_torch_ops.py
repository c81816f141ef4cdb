"""The operator: the answers of verify(), the checks of torch's own opcheck, and graphs without a break."""

from __future__ import annotations

import doctest
from typing import Any

import arrays
import generate
import numpy as np
import pytest

from specverify_dpex import reference, uniforms

torch: Any = arrays.optional("torch")
if torch is None:
    pytest.skip(
        "torch is not installed: the session `current` of noxfile.py has it, and fails without it",
        allow_module_level=True,
    )

from specverify_dpex import torch_ops  # noqa: E402


def tensors(seed: int = 0, shape: tuple[int, int, int] = (3, 4, 257)) -> tuple[generate.Case, list[Any]]:
    case = generate.random_case(seed, shape=shape, dtype="float32", token_dtype="int64", with_draft_probs=True)
    return case, [torch.from_numpy(array) for array in case.arrays]


def assert_right(result: Any, expected: Any) -> None:
    assert [tensor.dtype for tensor in result] == [torch.int64] * 2
    np.testing.assert_array_equal(result[0].numpy(), expected.accepted)
    np.testing.assert_array_equal(result[1].numpy(), expected.next_token)


def samples() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    _, (tokens, draft, target, accept, sample) = tensors()
    seeds = torch.from_numpy(np.array([5, 2**64 - 1, 0], dtype="u8"))
    return {
        "uniforms": ([tokens, draft, target, accept, sample], {}),
        "no-draft-probs": ([tokens, None, target, accept, sample], {}),
        "seed": ([tokens, draft, target], {"seed": -3, "offset": 9}),
        "seeds": ([tokens, draft, target, accept], {"seeds": seeds}),
        "one-sequence": ([array[:1] for array in (tokens, draft, target, accept, sample)], {}),
        "no-sequence": ([array[:0] for array in (tokens, draft, target, accept, sample)], {}),
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


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**63, 2**64 - 1, [1, 2**64 - 1, 0]], ids=str)
def test_seeds_draw_the_uniforms_that_uniforms_returns(device, seed):
    case, (tokens, draft, target, *_) = tensors()
    own = np.array(seed, dtype="u8") if isinstance(seed, list) else seed
    expected = reference.verify(*case.arrays[:3], *uniforms(own, 11, 3, 4))
    given = torch.from_numpy(own) if isinstance(seed, list) else seed
    assert_right(torch_ops.verify(tokens, draft, target, seed=given, offset=11), expected)
    compiled = torch.compile(torch_ops.verify, fullgraph=True)
    assert_right(compiled(tokens, draft, target, seed=given, offset=11), expected)


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


def test_xpu_results_of_the_operator_share_no_storage(monkeypatch):
    both = torch.arange(4)
    monkeypatch.setattr(torch_ops, "_verify", lambda *_, **__: (both[:2], both[2:]))
    tokens, target = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 2, 3)
    accepted, next_token = torch.ops.specverify_dpex.verify(tokens, None, target, seed=0)
    assert (accepted.tolist(), next_token.tolist()) == ([0, 1], [2, 3])
    assert accepted.untyped_storage().data_ptr() != next_token.untyped_storage().data_ptr()


def test_docstring_examples(device):
    failed, tried = doctest.testmod(torch_ops)
    assert (failed, tried > 0) == (0, True)
