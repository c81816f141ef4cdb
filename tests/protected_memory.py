"""Run kernels on arrays that end or begin at a page which nothing may touch: a stray access kills this process.

    python protected_memory.py FIRST_SEED COUNT        verify
    python protected_memory.py steps FIRST_SEED COUNT  emitted_tokens and AcceptanceStats, on any values
    python protected_memory.py check FIRST_SEED COUNT  check_values, on any values

Run by test_memory.py in a process of its own. Only the OpenCL CPU device reads host pages like these.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import generate
import numpy as np

from specverify_dpex import (
    AcceptanceStats,
    UsmArray,
    check,
    dlpack,
    emitted_tokens,
    launch,
    plan,
    reference,
    stats,
    tuning,
    verify,
)

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE = 0
CUTS = ((1, 3, 8, 64, 256), (1, 3, 4, 64), (1, 2, 8, 300))  # work-groups, tile steps, slices


class ProtectedMemory:
    """Stands in for a dpctl memory object of exactly `nbytes` bytes, flush with a forbidden page at one side."""

    def __init__(self, nbytes: int, queue: Any, at_end: bool = True):
        pages = -(-max(nbytes, 1) // PAGE)
        self._map = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for forbidden in (start, start + (pages + 1) * PAGE):
            if _libc.mprotect(forbidden, PAGE, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.nbytes = nbytes
        self.sycl_queue = queue
        self._pointer = start + PAGE + (pages * PAGE - nbytes if at_end else 0)

    def copy_from_host(self, source: Any) -> None:
        ctypes.memmove(self._pointer, bytes(source), self.nbytes)

    def copy_to_host(self) -> bytes:
        return ctypes.string_at(self._pointer, self.nbytes)


def protected(array: np.ndarray | None, queue: Any, at_end: bool) -> UsmArray | None:
    if array is None:
        return None
    memory = ProtectedMemory(array.nbytes, queue, at_end)
    memory.copy_from_host(array.tobytes())
    return UsmArray(array.shape, array.dtype.name, sycl_queue=queue, memory=memory)


def main(first_seed: int, count: int) -> None:
    queue = dlpack.default_queue()
    rng = np.random.default_rng(first_seed)
    for seed in range(first_seed, first_seed + count):
        at_end = bool(seed % 2)
        launch.Arena.allocate = lambda _, nbytes, at_end=at_end: (ProtectedMemory(nbytes, queue, at_end), 0)
        launch.MemoryUSMDevice = lambda nbytes, queue, at_end=at_end: ProtectedMemory(nbytes, queue, at_end)
        cut = tuning.LaunchShape(*(int(rng.choice(options)) for options in CUTS))
        tuning.launch_shape = lambda *_, cut=cut: cut
        plan._plans.clear()
        case = generate.random_case(seed, dtype="float32", token_dtype="int64")
        result = verify(*(protected(array, queue, at_end) for array in case.arrays))
        expected = reference.verify(*case.arrays)
        accepted, next_token = np.frombuffer(result.accepted.memory.copy_to_host(), "i8").reshape(2, -1)
        np.testing.assert_array_equal(accepted, expected.accepted, case.id)
        np.testing.assert_array_equal(next_token, expected.next_token, case.id)
    print(f"{count} cases touched nothing outside their arrays")


def steps(first_seed: int, count: int) -> None:
    import test_emitted
    import test_stats

    queue = dlpack.default_queue()
    for seed in range(first_seed, first_seed + count):
        at_end = bool(seed % 2)
        launch.Arena.allocate = lambda _, nbytes, at_end=at_end: (ProtectedMemory(nbytes, queue, at_end), 0)
        stats.MemoryUSMDevice = lambda nbytes, queue, at_end=at_end: ProtectedMemory(nbytes, queue, at_end)
        rng = np.random.default_rng(seed)
        dtypes = rng.choice(["i4", "i8"], 2)
        step = test_stats.Step(seed, int(rng.integers(1, 80)), int(rng.integers(0, 80)), *map(str, dtypes))
        wild = rng.random(len(step.accepted)) < 0.3
        step.accepted[wild] = rng.choice([-1, -(2**63), 2**62, step.tokens.shape[1] + 1], wild.sum())
        made = [protected(array, queue, at_end) for array in step.arrays]
        result = emitted_tokens(*made[:3])
        emitted = np.frombuffer(result.memory.copy_to_host(), "i8").reshape(result.shape)
        np.testing.assert_array_equal(emitted, test_emitted.expected_tokens(*step.arrays[:3]))
        counting = AcceptanceStats()
        for _ in range(2):
            test_stats.OnDevice(*made).count(counting)
        assert counting.read() == test_stats.expected_counts([step, step])
    print(f"{count} steps touched nothing outside their arrays")


def check_wild_values(first_seed: int, count: int) -> None:
    import test_check

    queue = dlpack.default_queue()
    kind = dlpack.kind_of(UsmArray((1,), "int64"), "array")

    def view(array: np.ndarray, at_end: bool) -> dlpack.View:
        memory = ProtectedMemory(array.nbytes, queue, at_end)
        memory.copy_from_host(array.tobytes())
        strides = dlpack.contiguous_strides(array.shape)
        return dlpack.View(memory._pointer, array.shape, strides, array.dtype.str[1:], queue, memory)

    for seed in range(first_seed, first_seed + count):
        at_end = bool(seed % 2)
        launch.MemoryUSMDevice = lambda nbytes, queue, at_end=at_end: ProtectedMemory(nbytes, queue, at_end)
        rng = np.random.default_rng(seed)
        cut = tuning.LaunchShape(int(rng.choice(CUTS[0])), 1, 1)
        tuning.launch_shape = lambda *_, cut=cut: cut
        check._plans.clear()
        arguments = {name: array for name, array in test_check.random_faults(seed).items() if array is not None}
        for name in ("draft_tokens", "num_draft"):
            array = arguments.get(name)
            if array is not None and seed % 3:
                wild = rng.random(array.shape) < 0.2
                array[wild] = rng.choice([np.iinfo(array.dtype).min, np.iinfo(array.dtype).max], wild.sum())
        views = {name: view(array, at_end) for name, array in arguments.items()}
        complaint = ""
        try:
            check.check_values(kind, queue, views, views)
        except ValueError as error:
            complaint = str(error)
        for name in ("draft_probs", "uniform_accept", "uniform_sample"):
            arguments.setdefault(name, None)
        expected = next(test_check.problems(arguments), "")
        assert complaint.startswith(expected) and bool(complaint) == bool(expected), (seed, complaint, expected)
    print(f"{count} checks touched nothing outside their arrays")


def touch() -> None:
    """Step one byte outside, to show that it kills the process."""
    memory = ProtectedMemory(8, None)
    ctypes.memset(memory._pointer + memory.nbytes, 1, 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["touch"]:
        touch()
    elif sys.argv[1] == "steps":
        steps(*map(int, sys.argv[2:]))
    elif sys.argv[1] == "check":
        check_wild_values(*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:]))
