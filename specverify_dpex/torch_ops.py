"""verify() as an operator of torch's, so that functions that call it compile as one graph.

Importing this module imports torch and registers `specverify_dpex::verify`, which `torch.ops.specverify_dpex.verify`
reaches too. Where a copy of the package is loaded under another name, as the kernels library does, the operator is
registered under that name, so that copies do not meet.
"""

from __future__ import annotations

from typing import Any

import torch

from specverify_dpex import philox
from specverify_dpex.result import VerifyResult
from specverify_dpex.verify import verify as _verify

__all__ = ["verify"]

NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")

# torch's integers have 64 bits and a sign: a seed is passed as the signed one with the same bits.
_SCHEMA = (
    "(Tensor draft_tokens, Tensor? draft_probs, Tensor target_probs, Tensor? uniform_accept=None, "
    "Tensor? uniform_sample=None, Tensor? seeds=None, *, SymInt? seed=None, SymInt offset=0) "
    "-> (Tensor accepted, Tensor next_token)"
)


@torch.library.custom_op(f"{NAMESPACE}::verify", mutates_args=(), schema=_SCHEMA)
def _operator(
    draft_tokens: Any,
    draft_probs: Any,
    target_probs: Any,
    uniform_accept: Any = None,
    uniform_sample: Any = None,
    seeds: Any = None,
    *,
    seed: int | None = None,
    offset: int = 0,
) -> tuple[Any, Any]:
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
    *,
    seed: int | None = None,
    offset: int = 0,
) -> tuple[Any, Any]:
    shape = (draft_tokens.shape[0],)
    return draft_tokens.new_empty(shape, dtype=torch.int64), draft_tokens.new_empty(shape, dtype=torch.int64)


def verify(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    uniform_accept: torch.Tensor | None = None,
    uniform_sample: torch.Tensor | None = None,
    *,
    seed: Any | None = None,
    offset: int = 0,
) -> VerifyResult:
    """Keep the longest acceptable prefix of each draft and draw the token that follows it, in code that compiles.

    The same results as `specverify_dpex.verify`, bit for bit, under `torch.compile(fullgraph=True)` too.

    Parameters
    ----------
    draft_tokens : (batch, num_draft) int64
    draft_probs : (batch, num_draft, vocab) float32, or None
    target_probs : (batch, num_draft + 1, vocab) float32
    uniform_accept : (batch, num_draft) float32 in [0, 1), optional
    uniform_sample : (batch, num_draft + 1) float32 in [0, 1), optional
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
    seeds = None
    if isinstance(seed, torch.Tensor):
        seed, seeds = None, seed
    elif seed is None and (uniform_accept is None or uniform_sample is None):
        shape = tuple(draft_tokens.shape)
        if uniform_accept is None:
            uniform_accept = torch.rand(shape, dtype=torch.float32, device=draft_tokens.device)
        if uniform_sample is None:
            uniform_sample = torch.rand((shape[0], shape[1] + 1), dtype=torch.float32, device=draft_tokens.device)
    elif seed is not None:
        if not isinstance(seed, torch.SymInt):
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
            seed=seed,
            offset=offset,
        )
    )
