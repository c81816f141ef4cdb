"""What the benchmark verifies: drafts made to look like a language model's, with their right answers."""

from __future__ import annotations

import re
from functools import cached_property
from itertools import product
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
# Sequences of a batch that are made anew; a larger batch repeats them, each copy in memory of its own.
DISTINCT = 16
# Sequences ranked evenly from 0 to 1 accept the share rank**power of their drafts, "all" aside: about a quarter of the
# drafts, a half (every length alike) and three quarters.
ACCEPTANCE = {"low": 3.0, "middle": 1.0, "high": 1 / 3, "all": 0.0}

BATCHES = (1, 4, 8, 16, 64, 256)
DRAFTS = (1, 3, 5, 8)
VOCABS = (32000, 50257, 128256, 151936, 262144)


class Workload(NamedTuple):
    """The shape of one call, and how much of the drafts the target accepts."""

    batch: int
    num_draft: int
    vocab: int
    acceptance: str = "middle"

    @classmethod
    def parse(cls, name: str) -> Workload:
        """The workload of a name such as "b8-k5-v32000" or "b8-k5-v32000-low".

        Raises
        ------
        ValueError
            If the name has another form, or nothing to verify.
        """
        match = re.fullmatch(rf"b([1-9]\d*)-k([1-9]\d*)-v([1-9]\d*)(?:-({'|'.join(ACCEPTANCE)}))?", name)
        if match is None:
            raise ValueError(
                f"`workload` must name a batch, a number of drafts and a vocabulary, and may name an acceptance of "
                f"{', '.join(ACCEPTANCE)}: expected for example 'b8-k5-v32000' or 'b8-k5-v32000-low', got {name!r}"
            )
        *shape, acceptance = match.groups()
        return cls(*map(int, shape), acceptance or "middle")

    @property
    def name(self) -> str:
        suffix = "" if self.acceptance == "middle" else f"-{self.acceptance}"
        return f"b{self.batch}-k{self.num_draft}-v{self.vocab}{suffix}"

    def __str__(self) -> str:
        suffix = "" if self.acceptance == "middle" else f", {self.acceptance} acceptance"
        return f"{self.batch} × {self.num_draft} × {self.vocab}{suffix}"

    @property
    def target_bytes(self) -> int:
        """Of the largest array, (batch, num_draft + 1, vocab) float32."""
        return 4 * self.batch * (self.num_draft + 1) * self.vocab

    @property
    def input_bytes(self) -> int:
        """Of the arrays that matter: both models' distributions."""
        return 4 * self.batch * (2 * self.num_draft + 1) * self.vocab


def short_set() -> list[Workload]:
    """One axis at a time, the smallest first.

    Batches at 5 drafts and a vocabulary of 128256, vocabularies at a batch of 8 and of 1, drafts where all are accepted
    (every position is walked and the rows that are read stay the same), and acceptances.
    """
    workloads = {
        *(Workload(batch, 5, 128256) for batch in BATCHES),
        *(Workload(8, 5, vocab) for vocab in VOCABS),
        *(Workload(1, 5, vocab) for vocab in (32000, 262144)),
        *(Workload(8, num_draft, 32000, "all") for num_draft in DRAFTS),
        *(Workload(8, 5, 32000, acceptance) for acceptance in ACCEPTANCE),
    }
    return sorted(workloads, key=_size)


def full_set() -> list[Workload]:
    """Every batch with every number of drafts, vocabulary and acceptance, the smallest first."""
    return sorted((Workload(*choice) for choice in product(BATCHES, DRAFTS, VOCABS, ACCEPTANCE)), key=_size)


def _size(workload: Workload) -> tuple[Any, ...]:
    return workload.input_bytes, workload


class DeviceArrays(NamedTuple):
    """The arguments of verify() in USM memory."""

    draft_tokens: Any
    draft_probs: Any
    target_probs: Any
    uniform_accept: Any
    uniform_sample: Any


class Inputs:
    """A workload's arrays on the host and on the device, and what verification must answer.

    The accepted lengths follow `ACCEPTANCE`, evenly over the batch. Given its length, a sequence is drawn as if that
    had been luck: an accepted token from min(target, draft), the rejected one from the positive part of
    draft - target, and each uniform from the interval that has that outcome.

    Attributes
    ----------
    rows : (batch,) int64
        Which of the distinct sequences each sequence of the batch repeats.
    distinct_draft, distinct_target : arrays
        The distributions of the distinct sequences.
    """

    def __init__(self, workload: Workload, queue: dpctl.SyclQueue, seed: int = 0):
        self.workload = workload
        self.queue = queue
        batch, num_draft, vocab, acceptance = workload
        rng = np.random.default_rng([seed, batch, num_draft, vocab])
        distinct = min(batch, DISTINCT)
        self.rows = np.arange(batch) % distinct
        lengths = rng.permutation(_lengths(distinct, num_draft, acceptance))
        self.distinct_draft = np.empty((distinct, num_draft, vocab), np.float32)
        self.distinct_target = np.empty((distinct, num_draft + 1, vocab), np.float32)
        tokens = np.empty((distinct, num_draft), np.int64)
        accept = np.empty((distinct, num_draft), np.float32)
        for sequence, length in enumerate(lengths):
            logits = LOGIT_SPREAD * rng.standard_normal((num_draft + 1, vocab), np.float32)
            error = DRAFT_ERROR * rng.standard_normal((num_draft, vocab), np.float32)
            target = self.distinct_target[sequence] = _softmax(logits)
            draft = self.distinct_draft[sequence] = _softmax(logits[:num_draft] + error)
            for position in range(num_draft):
                tokens[sequence, position], accept[sequence, position] = _proposal(
                    rng,
                    draft[position],
                    target[position],
                    accepted=position < length,
                    walked=position <= length,
                )
        self.draft_tokens = tokens[self.rows]
        self.uniform_accept = accept[self.rows]
        self.uniform_sample = rng.random((batch, num_draft + 1), np.float32)  # the draws differ all over the batch
        self.expected = self._verify()
        if not np.array_equal(self.expected.accepted, lengths[self.rows]):
            raise RuntimeError(f"{workload.name}: accepts {self.expected.accepted}, made to accept {lengths}")

    def _verify(self) -> VerifyResult:
        """The reference's answers, without the memory of the whole batch."""
        distinct = len(self.distinct_target)
        parts = []
        for first in range(0, self.workload.batch, distinct):
            part = slice(first, first + distinct)
            rows = self.rows[part]
            parts.append(
                reference.verify(
                    self.draft_tokens[part],
                    self.distinct_draft[: len(rows)],
                    self.distinct_target[: len(rows)],
                    self.uniform_accept[part],
                    self.uniform_sample[part],
                )
            )
        return VerifyResult(*map(np.concatenate, zip(*parts)))

    @cached_property
    def on_host(self) -> tuple[Array, Array, Array, Array, Array]:
        """The arguments of verify(), for the engines that run there."""
        return (
            self.draft_tokens,
            self._repeat(self.distinct_draft),
            self._repeat(self.distinct_target),
            self.uniform_accept,
            self.uniform_sample,
        )

    def _repeat(self, distinct: Array) -> Array:
        return distinct if len(distinct) == self.workload.batch else distinct[self.rows]

    @cached_property
    def on_device(self) -> DeviceArrays:
        """The arrays on the queue: dpnp's where dpnp is installed, else the library's own."""
        try:
            import dpnp
        except ImportError:
            return DeviceArrays(*(_usm_array(array, self.queue) for array in self.on_host))

        def copy(array: Array) -> Any:
            return dpnp.asarray(array, sycl_queue=self.queue)

        def repeat(distinct: Array) -> Any:
            if len(distinct) == self.workload.batch:
                return copy(distinct)
            return dpnp.take(copy(distinct), copy(self.rows), axis=0)

        arrays = DeviceArrays(
            copy(self.draft_tokens),
            repeat(self.distinct_draft),
            repeat(self.distinct_target),
            copy(self.uniform_accept),
            copy(self.uniform_sample),
        )
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

    def stop_rows(self) -> tuple[Array, Array]:
        """For each distinct sequence the target's row where the walk stopped, and the draft's if that was a rejection,
        else zeros."""
        sequence = np.arange(len(self.distinct_target))
        position = self.expected.accepted[sequence]
        draft = self.distinct_draft[sequence, np.minimum(position, self.workload.num_draft - 1)]
        draft[~self.rejected[sequence]] = 0
        return self.distinct_target[sequence, position], draft

    def supports(self, next_token: Array) -> Array:
        """Whether each sequence's token has weight in the row that it must be drawn from: (batch,) bool."""
        inside = (next_token >= 0) & (next_token < self.workload.vocab)
        token = np.where(inside, next_token, 0)
        position = self.expected.accepted
        weight = self.distinct_target[self.rows, position, token]
        stopped = np.flatnonzero(self.rejected)
        weight[stopped] -= self.distinct_draft[self.rows[stopped], position[stopped], token[stopped]]
        return inside & (weight > 0)


def _lengths(count: int, num_draft: int, acceptance: str) -> Array:
    """Accepted lengths of `count` sequences, ascending."""
    if acceptance == "all":
        return np.full(count, num_draft)
    rank = (np.arange(count) + 0.5) / count
    return ((num_draft + 1) * rank ** ACCEPTANCE[acceptance]).astype(np.int64)


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
