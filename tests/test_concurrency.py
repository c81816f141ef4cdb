"""Several threads, several queues and several calls in flight: every answer is right."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import arrays
import dpctl
import generate
import numpy as np
import pytest

from specverify_dpex import launch, reference, verify

THREADS = 8
CALLS = 60


def cases(count: int) -> list[tuple[generate.Case, object]]:
    made = [
        generate.random_case(seed, shape=(1 + seed % 5, seed % 4, 257), dtype="float32", token_dtype="int64")
        for seed in range(count)
    ]
    return [(case, reference.verify(*case.arrays)) for case in made]


@pytest.mark.parametrize("in_order", [False, True], ids=["out-of-order", "in-order"])
@pytest.mark.parametrize("shared", [True, False], ids=["one-queue", "queue-per-thread"])
def test_threads_get_their_own_answers(kind, device, shared, in_order):
    options = {"property": "in_order"} if in_order else {}
    queues = [dpctl.SyclQueue(device, **options) for _ in range(1 if shared else THREADS)]
    start = threading.Barrier(THREADS)
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
