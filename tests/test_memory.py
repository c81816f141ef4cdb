"""No input makes a kernel read or write outside its arrays, and memory lives as long as it is used."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import arrays
import generate
import numpy as np
import pytest
from dpctl.memory import MemoryUSMDevice

from specverify_dpex import UsmArray, launch, plan, prepare, reference, tuning, verify

GUARD = 4096  # bytes
SENTINEL = 0xA5
PROTECTED_MEMORY = Path(__file__).with_name("protected_memory.py")


class Guarded:
    """Stands in for a memory object between two guard zones of one larger allocation."""

    def __init__(self, nbytes: int, queue: Any, fill: int = SENTINEL):
        self.whole = MemoryUSMDevice(nbytes + 2 * GUARD, queue=queue)
        self.whole.copy_from_host(np.full(self.whole.nbytes, fill, "u1"))
        self.nbytes = nbytes
        self.sycl_queue = queue
        self._pointer = self.whole._pointer + GUARD

    def copy_from_host(self, source: Any) -> None:
        whole = np.asarray(self.whole.copy_to_host()).copy()
        whole[GUARD : GUARD + self.nbytes] = np.frombuffer(bytes(source), "u1")
        self.whole.copy_from_host(whole)

    def copy_to_host(self) -> np.ndarray:
        return np.asarray(self.whole.copy_to_host())[GUARD : GUARD + self.nbytes]

    def guards(self) -> np.ndarray:
        whole = np.asarray(self.whole.copy_to_host())
        return np.concatenate([whole[:GUARD], whole[GUARD + self.nbytes :]])


def run_protected(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROTECTED_MEMORY), *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ((0, 250), "250 cases touched nothing outside their arrays\n"),
        pytest.param((10_000, 250), "250 cases touched nothing outside their arrays\n", marks=pytest.mark.bulk),
        (("steps", 0, 200), "200 steps touched nothing outside their arrays\n"),
        (("check", 0, 200), "200 checks touched nothing outside their arrays\n"),
        (("options", 50_000, 250), "250 cases with options touched nothing outside their arrays\n"),
        pytest.param(
            ("options", 60_000, 250),
            "250 cases with options touched nothing outside their arrays\n",
            marks=pytest.mark.bulk,
        ),
        (("rows", 70_000, 250), "250 cases touched no row that did not matter\n"),
        pytest.param(("rows", 80_000, 250), "250 cases touched no row that did not matter\n", marks=pytest.mark.bulk),
    ],
    ids=lambda value: "-".join(map(str, value[:-1])) if isinstance(value, tuple) else "",
)
def test_kernels_touch_no_page_that_they_must_not(device, arguments, printed):
    if not device.is_cpu:
        pytest.skip("page protection is the host's: test_verify_writes_nothing_beside_its_results covers other devices")
    done = run_protected(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


@pytest.mark.parametrize("what", ["touch", "touch-row"])
def test_a_touch_of_protected_memory_kills_the_process(device, what):
    assert run_protected(what).returncode < 0


@pytest.mark.parametrize("slices", [1, 8, 300])
def test_verify_writes_nothing_beside_its_results(queue, monkeypatch, slices):
    allocated: list[Guarded] = []

    def allocate(nbytes: int, queue: Any) -> Guarded:
        allocated.append(Guarded(nbytes, queue))
        return allocated[-1]

    monkeypatch.setattr(launch.Arena, "allocate", lambda arena, nbytes: (allocate(nbytes, queue), 0))
    monkeypatch.setattr(launch, "MemoryUSMDevice", allocate)  # for scratch
    monkeypatch.setattr(tuning, "launch_shape", lambda *_: tuning.LaunchShape(64, 4, slices))
    monkeypatch.setattr(plan, "_plans", {})
    for seed in range(40):
        case = generate.random_case(seed, dtype="float32", token_dtype="int64")
        result = verify(*(None if array is None else arrays.usm_array(array, queue) for array in case.arrays))
        expected = reference.verify(*case.arrays)
        assert result.accepted.tolist() == expected.accepted.tolist()
        assert result.next_token.tolist() == expected.next_token.tolist()
        assert len(allocated) == 2
        for memory in allocated:
            assert (memory.guards() == SENTINEL).all()
        allocated.clear()
        plan._plans.clear()


def test_scratch_of_many_shapes_is_let_go(queue, monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(tuning, "launch_shape", lambda *_: tuning.LaunchShape(1, 1, 1))
    block = 8 * 1000 + 64  # bytes of a sequence: a mass for each token, and a cache line for the slice's and a count
    monkeypatch.setattr(plan, "_MOST_SCRATCH", 20 * block)
    for batch in [*range(1, 12), 11, 30, 2, 3]:
        tokens = UsmArray((batch, 0), "int64", sycl_queue=queue)
        target = UsmArray.from_buffer(bytes(4000 * batch), (batch, 1, 1000), "float32", sycl_queue=queue)
        assert verify(tokens, None, target, seed=1).next_token.tolist() == [-1] * batch
        queue.wait()
        launch.in_flight.release()
        batches = [found.batch for found in plan._plans.values()]
        kept = sum(found.scratch.kept for found in plan._plans.values())
        assert kept == block * sum(batches)
        assert batches[-1] == batch and sum(batches[:-1]) <= 20
    assert batches == [2, 3]  # those before went where 30 had been made


def test_the_oldest_of_many_plans_is_let_go(queue, monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_MOST_PLANS", 3)
    for batch in (1, 2, 3, 1, 4, 1):
        tokens = UsmArray((batch, 0), "int64", sycl_queue=queue)
        verify(tokens, None, UsmArray.from_list([[[1.0]]] * batch, "float32", sycl_queue=queue))
    assert [found.batch for found in plan._plans.values()] == [3, 4, 1]


@pytest.mark.parametrize("fill", [0x00, 0x3F, 0x7F, 0xFF], ids=["zeros", "halves", "huge", "nan"])
def test_verify_writes_nothing_into_its_inputs_and_reads_no_neighbour(queue, fill):
    for seed in range(20):
        case = generate.random_case(seed, dtype="float32", token_dtype="int64")
        inputs, guarded = [], []
        for array in case.arrays:
            if array is None:
                inputs.append(None)
                continue
            memory = Guarded(array.nbytes, queue, fill)
            memory.copy_from_host(array.tobytes())
            guarded.append((memory, np.asarray(memory.whole.copy_to_host()).copy()))
            inputs.append(UsmArray(array.shape, array.dtype.name, sycl_queue=queue, memory=memory))
        result = verify(*inputs)
        expected = reference.verify(*case.arrays)
        assert result.accepted.tolist() == expected.accepted.tolist()
        assert result.next_token.tolist() == expected.next_token.tolist()
        for memory, before in guarded:
            np.testing.assert_array_equal(np.asarray(memory.whole.copy_to_host()), before)


def test_results_of_two_calls_share_no_memory(kind, queue):
    one = generate.accept_all(0, (3, 2, 7))
    other = generate.reject_first(0, (3, 2, 7))
    first = verify(*(kind.make(array, queue) for array in one.arrays))
    second = verify(*(kind.make(array, queue) for array in other.arrays))
    assert kind.read(first.accepted).tolist() == [2, 2, 2]
    assert kind.read(second.accepted).tolist() == [0, 0, 0]


def test_inputs_may_be_dropped_while_the_device_works(kind, queue):
    case = generate.random_case(3, shape=(16, 2, 32000), dtype="float32", token_dtype="int64", with_draft_probs=True)
    expected = reference.verify(*case.arrays)
    results = []
    for _ in range(8):
        results.append(verify(*(kind.make(array, queue) for array in case.arrays)))
        gc.collect()
        np.zeros(case.target_probs.size, "f4").fill(np.nan)
    for result in results:
        np.testing.assert_array_equal(kind.read(result.accepted), expected.accepted)
        np.testing.assert_array_equal(kind.read(result.next_token), expected.next_token)


def test_results_outlive_one_another_and_the_inputs(kind, queue):
    case = generate.random_case(4, shape=(4, 3, 257), dtype="float32", token_dtype="int64", with_draft_probs=True)
    expected = reference.verify(*case.arrays)
    next_token = verify(*(kind.make(array, queue) for array in case.arrays)).next_token
    gc.collect()
    np.testing.assert_array_equal(kind.read(next_token), expected.next_token)


def test_thousands_of_calls_leak_nothing(queue):
    resource = pytest.importorskip("resource", reason="only POSIX counts a process's memory this way")
    case = generate.random_case(5, shape=(8, 5, 257), dtype="float32", token_dtype="int64", with_draft_probs=True)
    inputs = [arrays.usm_array(array, queue) for array in case.arrays]

    def kilobytes_after(calls: int) -> int:
        for _ in range(calls):
            verify(*inputs)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = kilobytes_after(1000)
    assert kilobytes_after(4000) - before < 4000  # less than 1 kB a call; an event or a result that stays is more


@pytest.mark.parametrize("prepared", [False, True], ids=["verify", "prepared"])
def test_an_interrupted_call_leaves_the_next_one_working(usm_kind, queue, monkeypatch, prepared):
    case = generate.random_case(6, shape=(4, 3, 32000), dtype="float32", token_dtype="int64", with_draft_probs=True)
    expected = reference.verify(*case.arrays)
    monkeypatch.setattr(tuning, "launch_shape", lambda *_: tuning.LaunchShape(8, 4, 8))  # slices that count arrivals
    monkeypatch.setattr(plan, "_plans", {})
    inputs = [usm_kind.make(array, queue) for array in case.arrays]
    call = prepare(*inputs) if prepared else functools.partial(verify, *inputs)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(launch, "_new_capsule", interrupted)  # the kernel is launched, its event not yet known
            with pytest.raises(KeyboardInterrupt):
                call()
        result = call()
        np.testing.assert_array_equal(usm_kind.read(result.accepted), expected.accepted)
        np.testing.assert_array_equal(usm_kind.read(result.next_token), expected.next_token)
