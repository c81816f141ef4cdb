"""AcceptanceStats: exact counts, on the device, without a wait."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import arrays
import dpctl
import generate
import numpy as np
import pytest

from specverify_dpex import AcceptanceStats, Counts, dlpack, launch, reference, stats, usm_array, verify
from specverify_dpex.dlpack import ABSENT

THREADS = 4


class Step:
    """What one call of verify saw and returned, on the host and as an array of a kind."""

    def __init__(self, seed: int, batch: int, num_draft: int, dtype: str = "i8", lengths: str | None = None):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, 2**31, (batch, num_draft))
        tokens[rng.random(tokens.shape) < 0.1] = -1
        accepted = rng.integers(0, num_draft + 1, batch)
        self.tokens = tokens.astype(dtype)
        self.accepted = accepted
        self.next_token = rng.integers(-1, 2, batch)
        self.lengths = None if lengths is None else rng.integers(-2, num_draft + 3, batch).astype(lengths)

    def on(self, kind: arrays.Kind, queue: Any) -> OnDevice:
        return OnDevice(*(None if array is None else kind.make(array, queue) for array in self.arrays))

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.tokens, self.accepted, self.next_token, self.lengths


class OnDevice:
    def __init__(self, tokens: Any, accepted: Any, next_token: Any, lengths: Any = None):
        self.kind = dlpack.kind_of(tokens, "draft_tokens")
        self.views = []
        for array in (tokens, accepted, next_token, lengths):
            view = ABSENT
            if array is not None:
                own = dlpack.kind_of(array, "an array")
                view = own.view(array, "an array")
                view = own.copy(view) if own.on_host else view
            self.views.append(view)

    def count(self, counting: AcceptanceStats) -> Any:
        tokens, accepted, next_token, lengths = self.views
        queue = accepted.queue or usm_array.default_queue()
        return counting._record(
            self.kind.ordered,
            queue,
            tokens,
            lengths,
            accepted.pointer,
            next_token.pointer,
            [view.owner for view in self.views],
        )


def expected_counts(steps: list[Step]) -> Counts:
    positions = max((step.tokens.shape[1] for step in steps if len(step.tokens)), default=0)
    proposed, accepted = [0] * positions, [0] * positions
    sequences = emitted = 0
    for step in steps:
        num_draft = step.tokens.shape[1]
        for row, (tokens, prefix, following) in enumerate(zip(step.tokens, step.accepted, step.next_token)):
            end = num_draft if step.lengths is None else min(max(int(step.lengths[row]), 0), num_draft)
            proposals = next((k for k in range(end) if tokens[k] < 0), end)
            for position in range(num_draft):
                proposed[position] += position < proposals
                accepted[position] += position < min(max(int(prefix), 0), num_draft)
            sequences += 1
            emitted += min(max(int(prefix), 0), num_draft) + int(following >= 0)
    return Counts(sequences, proposed, accepted, emitted)


@pytest.mark.parametrize("lengths", [None, "i4", "i8"])
@pytest.mark.parametrize("dtype", ["i8", "i4"])
def test_stats_count_random_steps(kind, queue, dtype, lengths):
    counting = AcceptanceStats()
    steps = [
        Step(seed, *shape, dtype, lengths)
        for seed, shape in enumerate([(1, 1), (3, 5), (300, 5), (1, 0), (0, 9), (5, 7), (2, 70), (64, 3), (513, 2)])
    ]
    for count, step in enumerate(steps, 1):
        step.on(kind, queue).count(counting)
        if count in (2, len(steps)):
            assert counting.read() == expected_counts(steps[:count])


def test_stats_of_verify(kind, queue):
    counting = AcceptanceStats()
    steps = []
    for seed in range(10):
        case = generate.random_case(seed, shape=(1 + seed, 4, 257), dtype="float32", token_dtype="int64")
        step = Step(0, 1, 1)
        step.tokens = case.arrays[0]
        step.accepted, step.next_token = reference.verify(*case.arrays)
        steps.append(step)
        inputs = [None if array is None else kind.make(array, queue) for array in case.arrays]
        OnDevice(inputs[0], *verify(*inputs)).count(counting)
    assert counting.read() == expected_counts(steps)


def test_stats_clamp_what_is_out_of_range(queue):
    step = Step(0, 4, 3)
    step.accepted = np.array([-5, 99, 2**62, -(2**63)])
    step.lengths = np.array([2**62, -(2**63), 99, -1])
    counting = AcceptanceStats()
    step.on(arrays.kinds()[1], queue).count(counting)
    assert counting.read() == expected_counts([step])


def test_stats_read_strides(strided_kind, queue):
    kind = strided_kind
    step = Step(0, 6, 5, "i4", "i4")
    made = [kind.make(np.repeat(array, 2, axis=-1), queue)[..., ::2] for array in (step.tokens, step.lengths)]
    results = [kind.make(array, queue) for array in (step.accepted, step.next_token)]
    counting = AcceptanceStats()
    OnDevice(made[0], *results, made[1]).count(counting)
    assert counting.read() == expected_counts([step])


@pytest.mark.parametrize("work_group", [1, 3, 64, 1024])
def test_stats_do_not_depend_on_the_work_group(queue, monkeypatch, work_group):
    monkeypatch.setattr(stats, "_launches", {})
    monkeypatch.setattr(stats, "_WORK_GROUP", work_group)
    steps = [Step(seed, 130, 1 + seed % 5) for seed in range(10)]
    counting = AcceptanceStats()
    for step in steps:
        step.on(arrays.kinds()[1], queue).count(counting)
    assert counting.read() == expected_counts(steps)


def test_stats_before_the_first_call():
    counting = AcceptanceStats()
    assert counting.read() == Counts(0, [], [], 0)
    assert math.isnan(counting.read().mean_tokens_per_step)
    assert counting.read().acceptance_rate == []
    counting.reset()


def test_counts_have_rates():
    counts = Counts(4, [4, 2, 0], [3, 1, 0], 8)
    assert counts.mean_tokens_per_step == 2.0
    assert counts.acceptance_rate[:2] == [0.75, 0.5]
    assert math.isnan(counts.acceptance_rate[2])


def test_stats_reset(queue):
    counting = AcceptanceStats()
    kind = arrays.kinds()[1]
    first, second = Step(0, 5, 9), Step(1, 5, 3)
    first.on(kind, queue).count(counting)
    counting.reset()
    assert counting.read() == Counts(0, [], [], 0)
    second.on(kind, queue).count(counting)
    assert counting.read() == expected_counts([second])


def test_stats_keep_to_one_queue(device):
    kind = arrays.kinds()[1]
    counting = AcceptanceStats()
    step = Step(0, 2, 3)
    one, other = dpctl.SyclQueue(device), dpctl.SyclQueue(device)
    stats.bind(counting, one)
    step.on(kind, one).count(counting)
    for call in (lambda: stats.bind(counting, other), lambda: step.on(kind, other).count(counting)):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == (
            "`stats` must be used on one queue: expected that of its first call, got another. "
            "Make one AcceptanceStats for each queue"
        )
    assert counting.read() == expected_counts([step])
    counting.reset()
    step.on(kind, other).count(counting)
    assert counting.read() == expected_counts([step])


def test_stats_refuse_what_is_none(queue):
    with pytest.raises(TypeError, match="^`stats` must be an AcceptanceStats: got dict$"):
        stats.bind({}, queue)


def test_stats_do_not_wait(queue, monkeypatch):
    tensor = arrays.tensor_module()
    if tensor is None or launch.SequentialOrderManager is None:
        pytest.skip("dpctl 0.17 waits")
    kind = next(kind for kind in arrays.kinds() if kind.name == tensor.__name__)
    counting = AcceptanceStats()
    steps = [Step(seed, 8, 1 + seed) for seed in range(5)]  # each with more positions than the one before
    calls = [step.on(kind, queue) for step in steps]
    calls[0].count(AcceptanceStats())
    waited: list[Any] = []
    event_class = dpctl.SyclEvent
    wait = {"wait": lambda event: (waited.append(event), event_class.wait(event))}
    monkeypatch.setattr(dpctl, "SyclEvent", type("Event", (event_class,), wait))
    for call in calls:
        call.count(counting)
    counting.reset()
    for call in calls:
        call.count(counting)
    assert not waited
    assert counting.read() == expected_counts(steps)
    assert waited


def test_stats_wait_where_nothing_else_keeps_the_order(device):
    queue = dpctl.SyclQueue(device)
    counting = AcceptanceStats()
    event = Step(0, 4, 3).on(arrays.kinds()[1], queue).count(counting)
    assert event.execution_status is dpctl.event_status_type.complete


@arrays.QUEUES_FOR_THREADS
def test_stats_of_several_threads(usm_kind, device, in_order):
    queue = dpctl.SyclQueue(device, **({"property": "in_order"} if in_order else {}))
    counting = AcceptanceStats()
    start = threading.Barrier(THREADS)
    steps = [[Step(100 * thread + call, 3, 1 + (thread + call) % 6) for call in range(40)] for thread in range(THREADS)]
    if usm_kind.name == "dlpack":
        queue = arrays.cached_queue(device)
    kept = []  # until all are done: oneAPI 2024.2 may abort where one thread frees while another launches

    def work(thread: int) -> None:
        calls = [step.on(usm_kind, queue) for step in steps[thread]]
        kept.append(calls)
        start.wait()
        for call in calls:
            call.count(counting)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, thread) for thread in range(THREADS)]:
            done.result()
    assert counting.read() == expected_counts([step for own in steps for step in own])
