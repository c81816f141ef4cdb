"""The benchmark's own kernels: the floor, which reads what verification must read and adds it up, and an empty one.

    python bench/floor.py           write bench/floor_f32.spv and bench/empty.spv
    python bench/floor.py --check   fail where they differ from a fresh compilation

They are compiled as the library's own kernels are, in the compiler stack (`pip install specverify-dpex[compile]`), and
committed, so that the benchmark runs on every stack.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import specverify_dpex.compile as compiler  # before numba_dpex: it makes the SYCL runtime findable

# isort: split
import numba_dpex as dpex
import numpy as np
from numba.core import types

from specverify_dpex.intrinsics import at, group_id, local_id, local_size, num_groups

# Two tokens of each row at a step: independent sums, so that no addition waits for the one before it.


@dpex.device_func
def _row_sum(row, first, last, lane, lanes):
    """This work-item's share of the sum over tokens [first, last): every lanes-th of them."""
    even = np.float32(0)
    odd = np.float32(0)
    v = first + lane
    for _ in range(np.int64(np.uint32(last - first) // np.uint32(2 * lanes))):
        even = np.float32(even + row[v])
        odd = np.float32(odd + row[v + lanes])
        v += 2 * lanes
    while v < last:
        even = np.float32(even + row[v])
        v += lanes
    return np.float32(even + odd)


@dpex.device_func
def _two_row_sum(row, other, first, last, lane, lanes):
    """The same of two rows at once."""
    even = np.float32(0)
    odd = np.float32(0)
    other_even = np.float32(0)
    other_odd = np.float32(0)
    v = first + lane
    for _ in range(np.int64(np.uint32(last - first) // np.uint32(2 * lanes))):
        even = np.float32(even + row[v])
        odd = np.float32(odd + row[v + lanes])
        other_even = np.float32(other_even + other[v])
        other_odd = np.float32(other_odd + other[v + lanes])
        v += 2 * lanes
    while v < last:
        even = np.float32(even + row[v])
        other_even = np.float32(other_even + other[v])
        v += lanes
    return np.float32(np.float32(even + odd) + np.float32(other_even + other_odd))


@dpex.kernel
def floor_kernel(
    draft_probs,   # IN   (batch, num_draft, vocab) float32, contiguous; read where a token was rejected
    target_probs,  # IN   (batch, num_draft + 1, vocab) float32, contiguous
    stops,         # IN   (batch,) int64: accepted * 2, plus 1 where nothing was rejected
    num_draft,
    vocab,
    slice_length,  # IN   tokens in each work-group's slice; slices * slice_length >= vocab
    sums,          # OUT  (batch, slices, work-group size) float32
):  # fmt: skip
    """Work-groups (slice, sequence): each work-item's sum of its share of the one or two rows at the stop."""
    lane = local_id(0)
    lanes = local_size(0)
    slice_index = group_id(0)
    sequence = group_id(1)

    stop = stops[sequence]
    position = stop >> 1
    rejected = (stop & 1) == 0
    first = slice_index * slice_length
    last = min(first + slice_length, vocab)
    target_row = at(target_probs, (sequence * (num_draft + 1) + position) * vocab)
    if rejected:
        draft_row = at(draft_probs, (sequence * num_draft + position) * vocab)
        total = _two_row_sum(target_row, draft_row, first, last, lane, lanes)
    else:
        total = _row_sum(target_row, first, last, lane, lanes)
    sums[(sequence * num_groups(0) + slice_index) * lanes + lane] = total


@dpex.kernel
def empty_kernel(
    unused,
):  # fmt: skip
    """What a launch costs by itself."""


def entry_points() -> tuple[compiler.EntryPoint, ...]:
    """The kernels with the types of their arguments."""
    float32s = types.CPointer(types.float32, addrspace=1)  # 1: global memory
    int64s = types.CPointer(types.int64, addrspace=1)
    named = {"draft_probs": float32s, "target_probs": float32s, "stops": int64s, "sums": float32s}

    def entry(name, kernel):
        parameters = inspect.signature(kernel.py_func).parameters
        return compiler.EntryPoint(name, kernel, tuple(named.get(parameter, types.int64) for parameter in parameters))

    return entry("floor_f32", floor_kernel), entry("empty", empty_kernel)


def module_path(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.spv")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python bench/floor.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files there")
    options = parser.parse_args(arguments)

    stale = 0
    for entry in entry_points():
        fresh, path = entry.compile(), module_path(entry.name)
        if not options.check:
            path.write_bytes(fresh)
            print(f"{path}: {len(fresh)} bytes")
        elif not path.exists() or path.read_bytes() != fresh:
            print(f"{path} is stale: run `python bench/floor.py`")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
