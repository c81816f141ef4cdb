"""Acceptance counted on the device, over many calls of verify."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import dpctl
from dpctl.memory import MemoryUSMDevice

from specverify_dpex import launch
from specverify_dpex.dlpack import View
from specverify_dpex.plan import options_of

_VARYING = ("draft_tokens", "num_draft", "accepted", "next_token", "before", "before_positions", "counters", "fresh")
_WORK_GROUP = 256  # work-items: the kernel adds up counts of 16 bits

_MOST_LAUNCHES = 512
_launches: dict[tuple[Any, ...], launch.Launch] = {}


class Counts(NamedTuple):
    """What an `AcceptanceStats` has counted."""

    steps: int
    """Sequences verified: each call adds its batch."""

    proposed: list[int]
    """At each position, the sequences that had a proposal there."""

    accepted: list[int]
    """At each position, the sequences whose accepted prefix reached beyond it."""

    emitted: int
    """Tokens emitted: the accepted prefixes, and the token after each where there was one."""

    @property
    def acceptance_rate(self) -> list[float]:
        """At each position, the share of the proposals that were accepted; nan where nothing was proposed."""
        return [taken / given if given else math.nan for taken, given in zip(self.accepted, self.proposed)]

    @property
    def mean_tokens_per_step(self) -> float:
        """Tokens that a sequence grows by in a step; nan before the first."""
        return self.emitted / self.steps if self.steps else math.nan


class AcceptanceStats:
    """Counts what calls of `verify(..., stats=stats)` accept, on the device and without waiting for it.

    Nothing is allocated before the first call. Calls may come from several threads and with any numbers of drafts, but
    on one queue.

    Examples
    --------
    >>> import numpy as np
    >>> from specverify_dpex import AcceptanceStats
    >>> stats = AcceptanceStats()
    >>> stats.read()
    Counts(steps=0, proposed=[], accepted=[], emitted=0)
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory that a launch lets go of may run code that calls verify
        self._queue: dpctl.SyclQueue | None = None
        self._memory: MemoryUSMDevice | None = None
        self._positions = -1
        self._last: tuple[dpctl.SyclEvent, ...] = ()  # of the latest launch, which waits for those before it

    def read(self) -> Counts:
        """Wait for the calls so far and return their counts; each list is as long as the most drafts of a call."""
        with self._lock:
            if self._memory is None:
                return Counts(0, [], [], 0)
            for event in self._last:
                event.wait()
            counters = memoryview(bytes(self._memory.copy_to_host())).cast("q").tolist()
            positions = self._positions
        return Counts(counters[0], counters[2 : 2 + positions], counters[2 + positions :], counters[1])

    def reset(self) -> None:
        """Begin again at zero, on whichever queue the next call is."""
        with self._lock:
            self._queue = self._memory = None
            self._positions = -1
            self._last = ()

    def _bind(self, queue: dpctl.SyclQueue) -> None:
        """Keep to the queue of the first call; called before that launches.

        Raises
        ------
        ValueError
            If this is another one.
        """
        with self._lock:
            if self._queue is None:
                self._queue = queue
            elif self._queue != queue:
                raise ValueError(
                    "`stats` must be used on one queue: expected that of its first call, got another. "
                    "Make one AcceptanceStats for each queue"
                )

    def _record(
        self,
        ordered: bool,
        queue: dpctl.SyclQueue,
        tokens: View,
        lengths: View,
        accepted: int,
        next_token: int,
        memory: object,
        events: tuple[dpctl.SyclEvent, ...] = (),
        by_events: bool = False,
    ) -> dpctl.SyclEvent | None:
        """Launch what adds the results of a call, whose launch is before it on the queue or among `events`.

        Parameters
        ----------
        ordered, by_events : bool
            As `launch.run` takes them.
        tokens, lengths
            The call's draft_tokens and num_draft (or ABSENT) as the device sees them.
        accepted, next_token : int
            Addresses of its results, contiguous int64.
        memory : object
            What must stay alive until the work is done.

        Returns
        -------
        dpctl.SyclEvent, or None where the batch is empty
        """
        batch, num_draft = tokens.shape
        if batch == 0:
            return None
        with self._lock:
            self._bind(queue)
            before, before_positions = self._memory, self._positions
            fresh = before is None or num_draft > before_positions
            if fresh:
                counters, positions = MemoryUSMDevice(8 * (2 + 2 * num_draft), queue=queue), num_draft
            else:
                counters, positions = before, before_positions
            signature = (queue, *tokens[1:4], *lengths[1:4], positions)
            recorded = launch.run(
                launch.remembered(
                    _launches, _MOST_LAUNCHES, signature, lambda: _launch(queue, tokens, lengths, positions)
                ),
                queue,
                ordered,
                (memory, before, counters),
                None,
                tokens.pointer,
                lengths.pointer,
                accepted,
                next_token,
                before._pointer if before is not None else 0,
                before_positions,
                counters._pointer,
                int(fresh),
                events=(*events, *self._last),
                by_events=by_events,
            )
            self._memory, self._positions = counters, positions
            self._last = (recorded,)
        return recorded


def bind(stats: Any, queue: dpctl.SyclQueue) -> None:
    """Check the argument `stats` of a call on `queue`, before it launches.

    Raises
    ------
    TypeError
        If it is no AcceptanceStats.
    ValueError
        If it was used on another queue.
    """
    if not isinstance(stats, AcceptanceStats):
        raise TypeError(f"`stats` must be an AcceptanceStats: got {type(stats).__name__}")
    stats._bind(queue)


def _launch(queue: dpctl.SyclQueue, tokens: View, lengths: View, positions: int) -> launch.Launch:
    """The launch for arrays like these."""
    batch, num_draft = tokens.shape
    arguments = {
        "draft_tokens_batch": tokens.strides[0],
        "draft_tokens_position": tokens.strides[1],
        "num_draft_batch": lengths.strides[0],
        "options": options_of({"draft_tokens": tokens, "num_draft": lengths}),
        "batch": batch,
        "max_draft": num_draft,
        "positions": positions,
    }
    kernel = launch.kernel(queue, "stats")
    work_group = min(1 << (batch - 1).bit_length(), _WORK_GROUP, kernel.max_work_group)
    return launch.Launch(kernel, queue, arguments, (1,), work_group, _VARYING)
