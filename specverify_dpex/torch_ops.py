"""verify() and emitted_tokens() as operators of torch's, so that functions that call them compile as one graph.

Importing this module imports torch and registers `specverify_dpex::verify` and `specverify_dpex::emitted_tokens`, which
`torch.ops.specverify_dpex` reaches too. Where a copy of the package is loaded under another name, as the kernels
library does, the operators are registered under that name, so that copies do not meet.
"""

from __future__ import annotations

from typing import Any

import torch

from specverify_dpex import philox
from specverify_dpex.emitted import emitted_tokens as _emitted_tokens
from specverify_dpex.result import VerifyResult
from specverify_dpex.verify import verify as _verify

__all__ = ["emitted_tokens", "verify"]

NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")

# torch's integers have 64 bits and a sign: a seed is passed as the signed one with the same bits. Its custom operators
# take no tensors that are keyword-only; these may still be given by name.
_SCHEMA = (
    "(Tensor draft_tokens, Tensor? draft_probs, Tensor target_probs, Tensor? uniform_accept=None, "
    "Tensor? uniform_sample=None, Tensor? seeds=None, Tensor? num_draft=None, Tensor? deterministic_draft=None, "
    "Tensor? greedy=None, *, SymInt? seed=None, SymInt offset=0) -> (Tensor accepted, Tensor next_token)"
)


@torch.library.custom_op(f"{NAMESPACE}::verify", mutates_args=(), schema=_SCHEMA)
def _operator(
    draft_tokens: Any,
    draft_probs: Any,
    target_probs: Any,
    uniform_accept: Any = None,
    uniform_sample: Any = None,
    seeds: Any = None,
    num_draft: Any = None,
    deterministic_draft: Any = None,
    greedy: Any = None,
    *,
    seed: int | None = None,
    offset: int = 0,
) -> tuple[Any, Any]:
    _check_seeds(seed, seeds)
    if seed is None and seeds is None and (uniform_accept is None or uniform_sample is None):
        raise ValueError(
            "`seed` must be given where uniforms are not: compiled code may call an operator as often as it likes. "
            "Pass one, or call `specverify_dpex.torch_ops.verify`, which draws them from torch's generator"
        )
    accepted, next_token = _verify(
        draft_tokens,
        draft_probs,
        target_probs,
        uniform_accept,
        uniform_sample,
        num_draft=num_draft,
        deterministic_draft=deterministic_draft,
        greedy=greedy,
        seed=seeds if seed is None else seed % 2**64,
        offset=offset,
    )
    if accepted.untyped_storage().data_ptr() == next_token.untyped_storage().data_ptr():
        next_token = next_token.clone()  # results of an operator must not share their storage
    return accepted, next_token


@_operator.register_fake
def _(
    draft_tokens: Any,
    draft_probs: Any,
    target_probs: Any,
    uniform_accept: Any = None,
    uniform_sample: Any = None,
    seeds: Any = None,
    num_draft: Any = None,
    deterministic_draft: Any = None,
    greedy: Any = None,
    *,
    seed: int | None = None,
    offset: int = 0,
) -> tuple[Any, Any]:
    _check_seeds(seed, seeds)
    _check_like_tokens(
        draft_tokens,
        draft_probs=draft_probs,
        target_probs=target_probs,
        uniform_accept=uniform_accept,
        uniform_sample=uniform_sample,
        seeds=seeds,
        num_draft=num_draft,
        deterministic_draft=deterministic_draft,
        greedy=greedy,
    )
    shape = (draft_tokens.shape[0],)
    return draft_tokens.new_empty(shape, dtype=torch.int64), draft_tokens.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op(
    f"{NAMESPACE}::emitted_tokens",
    mutates_args=(),
    schema="(Tensor draft_tokens, Tensor accepted, Tensor next_token) -> Tensor",
)
def _emitted_operator(draft_tokens: Any, accepted: Any, next_token: Any) -> Any:
    return _emitted_tokens(draft_tokens, accepted, next_token)


@_emitted_operator.register_fake
def _(draft_tokens: Any, accepted: Any, next_token: Any) -> Any:
    _check_like_tokens(draft_tokens, accepted=accepted, next_token=next_token)
    batch, num_draft = draft_tokens.shape
    return draft_tokens.new_empty((batch, num_draft + 1), dtype=torch.int64)


def _check_seeds(seed: Any, seeds: Any) -> None:
    if seed is not None and seeds is not None:
        raise ValueError("`seed` and `seeds` must not both be given: the key is one for all or each sequence's own")


def _check_axes(draft_tokens: Any) -> None:
    """As `verify` checks it, where shapes are read before it does."""
    if draft_tokens.dim() != 2:
        raise ValueError(
            f"`draft_tokens` must have shape (batch, num_draft): expected (any, any), got {tuple(draft_tokens.shape)}"
        )


def _check_like_tokens(draft_tokens: Any, **others: Any) -> None:
    """What a fake checks: without it, an operator of tensors with and without data would return memory as it is."""
    _check_axes(draft_tokens)
    for name, tensor in others.items():
        if tensor is not None and tensor.device != draft_tokens.device:
            raise TypeError(
                f"`{name}` must be on the device of `draft_tokens`: expected {draft_tokens.device}, got "
                f"{tensor.device}. Copy one of them"
            )


def verify(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    uniform_accept: torch.Tensor | None = None,
    uniform_sample: torch.Tensor | None = None,
    *,
    num_draft: torch.Tensor | None = None,
    deterministic_draft: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    seed: Any | None = None,
    offset: int = 0,
) -> VerifyResult:
    """Keep the longest acceptable prefix of each draft and draw the token that follows it, in code that compiles.

    The same results as `specverify_dpex.verify`, bit for bit, under `torch.compile(fullgraph=True)` too. Its `out`,
    `stats`, `check` and `depends_on` are side effects, which an operator does not have.

    Parameters
    ----------
    draft_tokens : (batch, num_draft) int64 or int32
    draft_probs : (batch, num_draft, draft_vocab) float32, float16 or bfloat16, or None
    target_probs : (batch, num_draft + 1, vocab) float32, float16 or bfloat16
    uniform_accept : (batch, num_draft) float32 in [0, 1), optional
    uniform_sample : (batch, num_draft + 1) float32 in [0, 1), optional
    num_draft : (batch,) int64 or int32, optional
    deterministic_draft : (batch,) bool, optional
    greedy : (batch,) bool, optional
    seed : int in [0, 2**64), or (batch,) uint64 tensor, optional
        Key of the uniforms that are not given. Without it they are drawn by `torch.rand`, from torch's own generator.
    offset : int in [0, 2**32)

    Returns
    -------
    VerifyResult
        `accepted` and `next_token`, each (batch,) int64, on the tensors' device.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError
        As `specverify_dpex.verify` does.

    Examples
    --------
    >>> import torch
    >>> from specverify_dpex.torch_ops import verify
    >>> draft_tokens = torch.tensor([[2, 0]])
    >>> target_probs = torch.tensor([[[0.0, 0, 1], [0, 1, 0], [1, 0, 0]]])
    >>> verify(draft_tokens, None, target_probs, seed=7)
    VerifyResult(accepted=tensor([1]), next_token=tensor([1]))
    """
    if not torch.compiler.is_compiling():  # the operator checks it too, but takes no integer of more than 64 bits
        offset = philox.check_offset(offset)
    seeds = None
    if isinstance(seed, torch.Tensor):
        seed, seeds = None, seed
    elif seed is None and (uniform_accept is None or uniform_sample is None):
        if not isinstance(draft_tokens, torch.Tensor):
            raise TypeError(f"`draft_tokens` must be a tensor: got {type(draft_tokens).__name__}")
        _check_axes(draft_tokens)
        shape = tuple(draft_tokens.shape)
        if uniform_accept is None:
            uniform_accept = torch.rand(shape, dtype=torch.float32, device=draft_tokens.device)
        if uniform_sample is None:
            uniform_sample = torch.rand((shape[0], shape[1] + 1), dtype=torch.float32, device=draft_tokens.device)
    elif seed is not None:
        if type(seed) not in (int, torch.SymInt) or not 0 <= seed < 2**64:  # compiled once, not once for each value
            seed = philox.check_seed(seed)
        if seed >= 2**63:
            seed -= 2**64
    return VerifyResult(
        *_operator(
            draft_tokens,
            draft_probs,
            target_probs,
            uniform_accept,
            uniform_sample,
            seeds,
            num_draft,
            deterministic_draft,
            greedy,
            seed=seed,
            offset=offset,
        )
    )


def emitted_tokens(draft_tokens: torch.Tensor, accepted: torch.Tensor, next_token: torch.Tensor) -> torch.Tensor:
    """Put the accepted prefix of each draft and the token that follows it into one tensor, in code that compiles.

    The same result as `specverify_dpex.emitted_tokens`, under `torch.compile(fullgraph=True)` too.

    Parameters
    ----------
    draft_tokens : (batch, num_draft) int64 or int32
    accepted : (batch,) int64
    next_token : (batch,) int64

    Returns
    -------
    (batch, num_draft + 1) int64
        Row i is `draft_tokens[i, :accepted[i]]`, `next_token[i]`, then -1 to the end.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError
        As `specverify_dpex.emitted_tokens` does.

    Examples
    --------
    >>> import torch
    >>> from specverify_dpex.torch_ops import emitted_tokens
    >>> emitted_tokens(torch.tensor([[5, 6, 7], [8, 9, -1]]), torch.tensor([1, 2]), torch.tensor([3, 4]))
    tensor([[ 5,  3, -1, -1],
            [ 8,  9,  4, -1]])
    """
    return _emitted_operator(draft_tokens, accepted, next_token)
