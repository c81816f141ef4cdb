"""Run kernels on arrays that end or begin at a page which nothing may touch: a stray access kills this process.

    python protected_memory.py FIRST_SEED COUNT        verify
    python protected_memory.py options FIRST_SEED COUNT  verify with options
    python protected_memory.py rows FIRST_SEED COUNT   verify with options, on rows of which only those that matter may
                                                       be touched
    python protected_memory.py steps FIRST_SEED COUNT  emitted_tokens and AcceptanceStats, on any values
    python protected_memory.py check FIRST_SEED COUNT  check_values, on any values

Run by test_memory.py in a process of its own. Only the OpenCL CPU device reads host pages like these.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
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
    usm_array,
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
    queue = usm_array.default_queue()
    rng = np.random.default_rng(first_seed)
    for seed in range(first_seed, first_seed + count):
        at_end = bool(seed % 2)
        protect_what_is_allocated(queue, at_end)
        cut_at_random(rng)
        case = generate.random_case(seed, dtype="float32", token_dtype="int64")
        result = verify(*(protected(array, queue, at_end) for array in case.arrays))
        expected = reference.verify(*case.arrays)
        accepted, next_token = np.frombuffer(result.accepted.memory.copy_to_host(), "i8").reshape(2, -1)
        np.testing.assert_array_equal(accepted, expected.accepted, case.id)
        np.testing.assert_array_equal(next_token, expected.next_token, case.id)
    print(f"{count} cases touched nothing outside their arrays")


def protect_what_is_allocated(queue: Any, at_end: bool) -> None:
    """Have results and scratch allocated from here on end, or begin, at a forbidden page."""
    launch.Arena.allocate = lambda _, nbytes: (ProtectedMemory(nbytes, queue, at_end), 0)
    launch.MemoryUSMDevice = lambda nbytes, queue: ProtectedMemory(nbytes, queue, at_end)


def cut_at_random(rng: np.random.Generator) -> None:
    cut = tuning.LaunchShape(*(int(rng.choice(options)) for options in CUTS))
    tuning.launch_shape = lambda *_, cut=cut: cut
    plan._plans.clear()


def assert_same(result: Any, expected: Any, case_id: str) -> None:
    for array, right in zip(result, expected):
        first = array._byte_offset
        content = array.memory.copy_to_host()[first : first + 8 * len(right)]
        np.testing.assert_array_equal(np.frombuffer(bytes(content), "i8"), right, case_id)


def options(first_seed: int, count: int) -> None:
    queue = usm_array.default_queue()
    rng = np.random.default_rng(first_seed)
    for seed in range(first_seed, first_seed + count):
        at_end = bool(seed % 2)
        protect_what_is_allocated(queue, at_end)
        cut_at_random(rng)
        case = generate.option_case(seed)
        given = {
            name: protected(value, queue, at_end) if isinstance(value, np.ndarray) else value
            for name, value in case.options.items()
        }
        if seed % 3:
            given["out"] = [protected(np.zeros(len(case.draft_tokens), "i8"), queue, at_end) for _ in range(2)]
        result = verify(*(protected(array, queue, at_end) for array in case.arrays), **given)
        assert_same(result, reference.verify(*case.arrays, **case.options), case.id)
    print(f"{count} cases with options touched nothing outside their arrays")


class Rows:
    """(batch, positions, columns) of which each row has pages of its own, as any library's object with an interface."""

    def __init__(self, array: np.ndarray, queue: Any):
        self._queue, self._shape, self._typestr = queue, array.shape, array.dtype.str
        batch, positions, columns = array.shape
        self._itemsize = array.itemsize
        self._pages = max(1, -(-columns * array.itemsize // PAGE))
        self._map = mmap.mmap(-1, (batch * positions * self._pages + 2) * PAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE
        # Flush with the end of the pages, where the element's size lets it.
        self._first = self._pages * PAGE - columns * array.itemsize
        for row, position in np.ndindex(batch, positions):
            content = array[row, position].tobytes()
            ctypes.memmove(self._row(row, position) + self._first, content, len(content))
        self._forbidden = np.ones(batch * positions * self._pages + 2, bool)

    def _row(self, row: int, position: int) -> int:
        return self._start + (row * self._shape[1] + position) * self._pages * PAGE

    def allow(self, row: int, position: int, token: int | None = None) -> None:
        """Let a row be read, or the page of one of its tokens."""
        page = 1 + (row * self._shape[1] + position) * self._pages
        if token is None:
            self._forbidden[page : page + self._pages] = False
        elif token < self._shape[2]:
            self._forbidden[page + (self._first + token * self._itemsize) // PAGE] = False

    def protect(self) -> None:
        """Forbid all pages that are not allowed."""
        edges = np.flatnonzero(np.diff(self._forbidden.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        for first, last in edges.tolist():
            if _libc.mprotect(self._start + (first - 1) * PAGE, (last - first) * PAGE, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    @property
    def forbidden(self) -> int:
        return int(self._forbidden[1:-1].sum())

    @property
    def __sycl_usm_array_interface__(self) -> dict[str, Any]:
        stride = self._pages * PAGE // self._itemsize
        return {
            "data": (self._start + self._first, False),
            "shape": self._shape,
            "strides": (self._shape[1] * stride, stride, 1),
            "typestr": self._typestr,
            "version": 1,
            "syclobj": self._queue,
        }


class Plain:
    """An array with an interface alone, as `Rows` are."""

    def __init__(self, array: np.ndarray, queue: Any):
        self._array = UsmArray.from_buffer(array.tobytes(), array.shape, array.dtype.name, sycl_queue=queue)
        self.__sycl_usm_array_interface__ = self._array.__sycl_usm_array_interface__


def allowed(case: generate.Case, accepted: Any) -> Iterator[tuple[str, int, int, int | None]]:
    """What verification may read: (argument, sequence, position, token), None where it is all tokens of a row."""
    batch, num_draft = case.draft_tokens.shape
    vocab = case.target_probs.shape[2]
    greedy, certain = (case.options.get(name, np.zeros(batch, bool)) for name in ("greedy", "deterministic_draft"))
    ends = generate.proposals(case.draft_tokens, case.options.get("num_draft"))
    limits = np.clip(case.options.get("num_draft", np.full(batch, num_draft)), 0, num_draft)
    for row in range(batch):
        stop = int(accepted[row])
        if greedy[row]:
            for position in range(stop + 1):
                yield "target_probs", row, position, None
            continue
        yield "target_probs", row, stop, None
        if stop < ends[row] and not certain[row]:
            yield "draft_probs", row, stop, None
        # Work-items look at all positions at once: at the token of each, whatever stops before it.
        for position in range(int(limits[row])):
            token = int(case.draft_tokens[row, position])
            if 0 <= token < vocab:
                yield "target_probs", row, position, token
                if not certain[row]:
                    yield "draft_probs", row, position, token


def rows(first_seed: int, count: int) -> None:
    """Rows, and pages of rows, that nothing of the result depends on are never touched."""
    dlpack._usm_type = lambda pointer, context: 1  # the CPU device reads any memory of the process
    queue = usm_array.default_queue()
    rng = np.random.default_rng(first_seed)
    forbidden = 0
    for seed in range(first_seed, first_seed + count):
        cut_at_random(rng)
        case = generate.option_case(seed)
        expected = reference.verify(*case.arrays, **case.options)
        models = {"target_probs": Rows(case.target_probs, queue), "draft_probs": None}
        if case.draft_probs is not None:
            models["draft_probs"] = Rows(case.draft_probs, queue)
        for name, *place in allowed(case, expected.accepted):
            model = models[name]
            if model is not None:
                model.allow(*place)
        for model in models.values():
            if model is not None:
                model.protect()
                forbidden += model.forbidden
        tokens, _, _, accept, sample = (None if array is None else Plain(array, queue) for array in case.arrays)
        given = {
            name: Plain(value, queue) if isinstance(value, np.ndarray) else value
            for name, value in case.options.items()
        }
        result = verify(tokens, models["draft_probs"], models["target_probs"], accept, sample, **given)
        assert_same(result, expected, case.id)
    assert forbidden > 10 * count, forbidden
    print(f"{count} cases touched no row that did not matter")


def touch_a_row() -> None:
    """Have verify read a forbidden row, to show that it kills the process."""
    dlpack._usm_type = lambda pointer, context: 1
    queue = usm_array.default_queue()
    target = Rows(np.full((1, 2, 5), 0.2, "f4"), queue)
    target.allow(0, 1)
    target.protect()
    verify(Plain(np.full((1, 1), -1), queue), None, target, seed=1)


def steps(first_seed: int, count: int) -> None:
    import test_emitted
    import test_stats

    queue = usm_array.default_queue()
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

    queue = usm_array.default_queue()
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
    elif sys.argv[1:] == ["touch-row"]:
        touch_a_row()
    elif sys.argv[1] == "options":
        options(*map(int, sys.argv[2:]))
    elif sys.argv[1] == "rows":
        rows(*map(int, sys.argv[2:]))
    elif sys.argv[1] == "steps":
        steps(*map(int, sys.argv[2:]))
    elif sys.argv[1] == "check":
        check_wild_values(*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:]))
