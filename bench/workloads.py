"""What the benchmark verifies: drafts made to look like a language model's, with their right answers."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, NamedTuple

import dpctl
import numpy as np
import numpy.typing as npt

from specverify_dpex import UsmArray, VerifyResult, reference

Array = npt.NDArray[Any]

# Standard deviations of the target's logits and of what the draft's add to them. A row's likeliest token has
# about 0.3, a few hundred tokens share most of the rest, and a draft is accepted with probability 0.75: a
# language model's rows with a small draft model. Neither depends much on the vocabulary.
LOGIT_SPREAD = 5.0
DRAFT_ERROR = 0.8
# A uniform keeps this far from the edge of acceptance, as a share of its interval, so that routes which round
# the ratio accept what the exact comparison accepts.
MARGIN = 2.0**-10
LARGEST_UNIFORM = np.float32(1 - 2.0**-24)


class Workload(NamedTuple):
    """The shape of one call."""

    batch: int
    num_draft: int
    vocab: int

    @classmethod
    def parse(cls, name: str) -> Workload:
        """The workload of a name such as "b8-k5-v32000".

        Raises
        ------
        ValueError
            If the name has another form, or nothing to verify.
        """
        match = re.fullmatch(r"b([1-9]\d*)-k([1-9]\d*)-v([1-9]\d*)", name)
        if match is None:
            raise ValueError(
                f"`workload` must name a batch, a number of drafts and a vocabulary: expected for example "
                f"'b8-k5-v32000', got {name!r}"
            )
        return cls(*map(int, match.groups()))

    @property
    def name(self) -> str:
        return f"b{self.batch}-k{self.num_draft}-v{self.vocab}"

    def __str__(self) -> str:
        return f"{self.batch} × {self.num_draft} × {self.vocab}"


class DeviceArrays(NamedTuple):
    """The arguments of verify() in USM memory."""

    draft_tokens: Any
    draft_probs: Any
    target_probs: Any
    uniform_accept: Any
    uniform_sample: Any


class Inputs:
    """A workload's arrays on the host and on the device, and what verification must answer.

    The accepted lengths are spread evenly over 0 to num_draft, so the mean is the middle and a batch of one
    stops there. Given its length, a sequence is drawn as if that had been luck: an accepted token from
    min(target, draft), the rejected one from the positive part of draft - target, and each uniform from the
    interval that has that outcome.
    """

    def __init__(self, workload: Workload, queue: dpctl.SyclQueue, seed: int = 0):
        self.workload = workload
        self.queue = queue
        batch, num_draft, vocab = workload
        rng = np.random.default_rng([seed, *workload])
        lengths = rng.permutation(((np.arange(batch) + 0.5) * (num_draft + 1) / batch).astype(np.int64))
        self.draft_tokens = np.empty((batch, num_draft), np.int64)
        self.draft_probs = np.empty((batch, num_draft, vocab), np.float32)
        self.target_probs = np.empty((batch, num_draft + 1, vocab), np.float32)
        self.uniform_accept = np.empty((batch, num_draft), np.float32)
        self.uniform_sample = rng.random((batch, num_draft + 1), np.float32)
        for sequence, length in enumerate(lengths):
            logits = LOGIT_SPREAD * rng.standard_normal((num_draft + 1, vocab), np.float32)
            error = DRAFT_ERROR * rng.standard_normal((num_draft, vocab), np.float32)
            target = self.target_probs[sequence] = _softmax(logits)
            draft = self.draft_probs[sequence] = _softmax(logits[:num_draft] + error)
            for position in range(num_draft):
                self.draft_tokens[sequence, position], self.uniform_accept[sequence, position] = _proposal(
                    rng,
                    draft[position],
                    target[position],
                    accepted=position < length,
                    walked=position <= length,
                )
        self.expected: VerifyResult = reference.verify(*self.on_host)
        if not np.array_equal(self.expected.accepted, lengths):
            raise RuntimeError(f"{workload.name}: accepts {self.expected.accepted}, made to accept {lengths}")

    @property
    def on_host(self) -> tuple[Array, Array, Array, Array, Array]:
        return (
            self.draft_tokens,
            self.draft_probs,
            self.target_probs,
            self.uniform_accept,
            self.uniform_sample,
        )

    @cached_property
    def on_device(self) -> DeviceArrays:
        """The arrays on the queue: dpnp's where dpnp is installed, else the library's own."""
        try:
            import dpnp
        except ImportError:
            return DeviceArrays(*(_usm_array(array, self.queue) for array in self.on_host))
        arrays = DeviceArrays(*(dpnp.asarray(array, sycl_queue=self.queue) for array in self.on_host))
        self.queue.wait()
        return arrays

    @property
    def rejected(self) -> Array:
        """Whether a token of each sequence was rejected: (batch,) bool."""
        return self.expected.accepted < self.workload.num_draft

    @property
    def bytes_read(self) -> int:
        """What every route must read: the target's row at each stop, the draft's where it was a rejection."""
        return 4 * self.workload.vocab * (self.workload.batch + int(self.rejected.sum()))

    def supports(self, next_token: Array) -> Array:
        """Whether each sequence's token has weight in the row that it must be drawn from: (batch,) bool."""
        inside = (next_token >= 0) & (next_token < self.workload.vocab)
        token = np.where(inside, next_token, 0)
        sequence, position = np.arange(self.workload.batch), self.expected.accepted
        weight = self.target_probs[sequence, position, token].copy()
        stopped = np.flatnonzero(self.rejected)
        weight[stopped] -= self.draft_probs[stopped, position[stopped], token[stopped]]
        return inside & (weight > 0)


def _softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _proposal(rng: np.random.Generator, draft: Array, target: Array, accepted: bool, walked: bool) -> tuple[int, float]:
    """A token and its uniform, given the outcome of the test; positions behind the stop have none."""
    if not walked:
        return _draw(rng, draft), float(rng.random(dtype=np.float32))
    token = _draw(rng, np.minimum(target, draft) if accepted else np.maximum(draft - target, 0))
    ratio = min(target[token] / draft[token], np.float32(1))
    share = MARGIN + (1 - 2 * MARGIN) * rng.random()
    uniform = ratio * share if accepted else ratio + (1 - ratio) * share
    return token, float(min(np.float32(uniform), LARGEST_UNIFORM))


def _draw(rng: np.random.Generator, weights: Array) -> int:
    running = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(running, rng.random() * running[-1], side="right"))


def _usm_array(array: Array, queue: dpctl.SyclQueue) -> UsmArray:
    copy = UsmArray(array.shape, array.dtype.name, sycl_queue=queue)
    if array.nbytes:
        copy.memory.copy_from_host(array.reshape(-1).view(np.uint8))
    return copy
