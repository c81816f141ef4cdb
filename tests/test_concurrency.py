"""Several threads, several queues and several calls in flight: every answer is right."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import arrays
import dpctl
import generate
import numpy as np
import pytest
from test_stats import Step, expected_counts

from specverify_dpex import AcceptanceStats, UsmArray, launch, prepare, reference, verify

THREADS = 8
CALLS = 60
LOADED_CALLS = 160


def cases(count: int) -> list[tuple[generate.Case, object]]:
    made = [
        generate.random_case(seed, shape=(1 + seed % 5, seed % 4, 257), dtype="float32", token_dtype="int64")
        for seed in range(count)
    ]
    return [(case, reference.verify(*case.arrays)) for case in made]


@arrays.QUEUES_FOR_THREADS
@pytest.mark.parametrize("shared", [True, False], ids=["one-queue", "queue-per-thread"])
def test_threads_get_their_own_answers(kind, device, shared, in_order):
    options = {"property": "in_order"} if in_order else {}
    queues = [dpctl.SyclQueue(device, **options) for _ in range(1 if shared else THREADS)]
    start = threading.Barrier(THREADS, timeout=300)  # one that fails before must not leave the others waiting
    kept = []  # until all are done: oneAPI 2024.2 may abort where one thread frees while another launches

    def work(thread: int) -> None:
        queue = queues[thread % len(queues)]
        inputs = [
            ([None if array is None else kind.make(array, queue) for array in case.arrays], expected)
            for case, expected in cases(10)
        ]
        kept.append(inputs)
        start.wait()
        for call in range(CALLS):
            arguments, expected = inputs[(call + thread) % len(inputs)]
            result = verify(*arguments)
            np.testing.assert_array_equal(kind.read(result.accepted), expected.accepted)
            np.testing.assert_array_equal(kind.read(result.next_token), expected.next_token)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, thread) for thread in range(THREADS)]:
            done.result()


def option_inputs(queue: Any, seed: int) -> list[tuple[generate.Case, dict[str, Any]]]:
    """Cases with options whose uniforms are drawn, and their arguments on a queue."""
    names = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")
    made = []
    for one, case in enumerate(generate.option_cases(seed, 8, shape=(5, 4, 257))):
        options = {name: value for name, value in case.options.items() if name not in ("seed", "offset")}
        options["seed"] = seed if one % 2 else np.arange(seed, seed + 5, dtype="u8")
        case = generate.Case(case.id, *case.arrays[:3], None, None, options)
        given = {**dict(zip(names, case.arrays)), **options}
        on_device = {
            name: arrays.usm_array(value, queue) if isinstance(value, np.ndarray) else value
            for name, value in given.items()
        }
        made.append((case, on_device))
    return made


@arrays.QUEUES_FOR_THREADS
@pytest.mark.parametrize("shared", [True, False], ids=["one-queue", "queue-per-thread"])
def test_threads_get_their_own_answers_with_options(device, shared, in_order):
    """New results and given ones, counters of all threads and of one, events, seeds and prepared calls, mixed."""
    options = {"property": "in_order"} if in_order else {}
    queues = [dpctl.SyclQueue(device, **options) for _ in range(1 if shared else THREADS)]
    own = [AcceptanceStats() for _ in range(THREADS)]
    of_all = AcceptanceStats() if shared else None
    start = threading.Barrier(THREADS, timeout=300)
    steps: list[list[Step]] = [[] for _ in range(THREADS)]
    steps_of_all: list[list[Step]] = [[] for _ in range(THREADS)]
    kept: list[Any] = []  # until all are done: oneAPI 2024.2 may abort where one thread frees while another launches

    def work(thread: int) -> None:
        queue = queues[thread % len(queues)]
        rng = np.random.default_rng(thread)
        inputs = option_inputs(queue, 1000 * thread)
        outs = [[UsmArray((5,), "int64", sycl_queue=queue) for _ in range(2)] for _ in range(20)]
        ready = [prepare(**given, out=[UsmArray((5,), "int64", sycl_queue=queue) for _ in range(2)])
                 for _, given in inputs]  # fmt: skip
        kept.append((inputs, outs, ready))
        pending: list[tuple[Any, list[Any], Any, str]] = []
        last: Any = None
        start.wait()
        for call in range(LOADED_CALLS):
            index = int(rng.integers(len(inputs)))
            case, given = inputs[index]
            form = str(rng.choice(["new", "out", "prepared"], p=(0.4, 0.4, 0.2)))
            chosen: dict[str, Any] = {}
            if rng.random() < 0.5:
                chosen["depends_on"] = [] if last is None or rng.random() < 0.3 else [last]
            step = Step(0, 1, 1)
            counted = rng.choice(["none", "own", "all"])
            if counted == "own" or (counted == "all" and of_all is None):
                chosen["stats"] = own[thread]
                steps[thread].append(step)
            elif counted == "all":
                chosen["stats"] = of_all
                steps_of_all[thread].append(step)
            if form == "prepared":
                result = ready[index](call, **chosen)
            else:
                if form == "out":
                    chosen["out"] = outs[call % len(outs)]
                result = verify(**given, offset=call, **chosen)
            last = result.event
            kept.append(result)
            expected = reference.verify(*case.arrays, **case.options, offset=call)
            step.tokens, step.lengths = case.draft_tokens, case.options.get("num_draft")
            step.accepted, step.next_token = expected
            pending.append((result.event, list(result), expected, f"{form} {call} {case.id}"))
            # A few stay in flight; what is overwritten by the next call is read at once.
            while len(pending) > (0 if form == "prepared" else 10):
                event, arrays_of_call, right, what = pending.pop(0)
                event.wait()
                for array, values in zip(arrays_of_call, right):
                    first = array._byte_offset
                    content = np.asarray(array.memory.copy_to_host())[first : first + 40].view("i8")
                    np.testing.assert_array_equal(content, values, what)
        for event, arrays_of_call, right, what in pending:
            event.wait()
            for array, values in zip(arrays_of_call, right):
                np.testing.assert_array_equal(array.tolist(), values, what)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, thread) for thread in range(THREADS)]:
            done.result()
    for stats, counted in zip(own, steps):
        assert stats.read() == expected_counts(counted)
    if of_all is not None:
        assert of_all.read() == expected_counts([step for counted in steps_of_all for step in counted])


def test_many_calls_in_flight(kind, queue):
    prepared = [
        ([None if array is None else kind.make(array, queue) for array in case.arrays], expected)
        for case, expected in cases(200)
    ]
    results = [verify(*arguments) for arguments, _ in prepared]
    for result, (_, expected) in zip(results, prepared):
        np.testing.assert_array_equal(kind.read(result.accepted), expected.accepted)
        np.testing.assert_array_equal(kind.read(result.next_token), expected.next_token)


def test_work_is_ordered_with_the_array_library(queue):
    tensor = arrays.tensor_module()
    if tensor is None:
        pytest.fail("neither dpctl.tensor nor dpnp.tensor is installed: the sessions of noxfile.py have one")
    case = generate.accept_all(0, (4, 3, 8193))
    tokens, draft, target, accept, sample = (tensor.asarray(array, sycl_queue=queue) for array in case.arrays)
    for _ in range(50):
        produced = tensor.multiply(target, tensor.asarray(1, dtype="f4", sycl_queue=queue))  # still being written
        result = verify(tokens, draft, produced, accept, sample)
        after = tensor.add(result.accepted, result.next_token)  # reads the results
        expected = reference.verify(*case.arrays)
        np.testing.assert_array_equal(tensor.asnumpy(after), expected.accepted + expected.next_token)


def test_kernels_are_built_once_for_a_context_and_device(device, monkeypatch):
    monkeypatch.setattr(launch, "_kernels", {})
    built = []
    original = launch.Kernel.__init__
    monkeypatch.setattr(launch.Kernel, "__init__", lambda self, *a: (built.append(a[1]), original(self, *a))[1])
    context = dpctl.SyclContext(device)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: launch.kernel(dpctl.SyclQueue(context, device), "uniforms"), range(4 * THREADS)))
    assert built == ["uniforms"]
