"""How the work of a call is cut up. The choice never changes a result, only the time it takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import dpctl

MAX_WORK_GROUP = 1024
"""Work-items of a work-group: the limbs of as many 64-bit sums fit in 32 bits when they are added."""
MAX_TILE_STEPS = 64
"""Elements of a tile for each work-item: each of its four sums of upper limbs holds 16 of them."""


class LaunchShape(NamedTuple):
    """Work-group size and the cut of the vocabulary."""

    work_group: int  # work-items
    tile_steps: int  # elements of a tile for each work-item, at most MAX_TILE_STEPS
    slices: int  # work-groups for each sequence; each has whole tiles


# A CPU's compiler turns neighbouring work-items into lanes of a vector and runs the vectors of a work-group one after
# the other, each over the whole tile: with more work-items than lanes, each vector uses a part of every cache line.
_CPU_WORK_GROUP = 8
_GPU_WORK_GROUP = 256
# Work-groups that a compute unit wants, to even out rows that read one array with those that read two and, on a GPU, to
# hide the latency of loads.
_GROUPS_PER_UNIT = 2
# Tokens of a slice, at least. On the CPU a shorter one costs more to launch than it spreads. On a GPU work-groups start
# side by side, and this is what one loads at a time, twice over: each work-item has 32 bytes on their way, a work-group
# 8 kB, and a large GPU needs hundreds to keep its memory busy (bandwidth times latency: 300 kB at 512 GB/s and 0.6 us),
# at a batch of 1 as well.
_CPU_SMALLEST_SLICE = 8192
_GPU_SMALLEST_SLICE = 2048
# Each work-item writes its sum once for each tile, 8 bytes: long tiles write and search fewer sums, short ones leave
# less to search inside, twice over.
# CPU: one cost grows with the number of tiles and the other with their length, so the best length grows as the square
# root of the vocabulary. Of 8, 16, 32 and 64 elements for each work-item, 16 were the fastest at 2,048 and at 8,192
# tokens, 32 at 16,384, and 64 from 50,257 on.
# GPU: a tile is a slice, up to where the sums are a thirtieth of what is read.
_CPU_STEPS_OF_ROOT = 1 / 4
_GPU_MOST_STEPS = 32
_STEPS_AT_A_TIME = 4  # what the kernel's loop takes


def launch_shape(batch: int, vocab: int, device: dpctl.SyclDevice) -> LaunchShape:
    """Slices enough that the batch fills the device, and no more."""
    cpu = device.is_cpu
    work_group = min(_CPU_WORK_GROUP if cpu else _GPU_WORK_GROUP, device.max_work_group_size)
    smallest_slice = _CPU_SMALLEST_SLICE if cpu else _GPU_SMALLEST_SLICE
    slices = min(-(-device.max_compute_units * _GROUPS_PER_UNIT // batch), -(-vocab // smallest_slice))
    if cpu:
        steps, most = math.sqrt(vocab) * _CPU_STEPS_OF_ROOT, MAX_TILE_STEPS
    else:
        steps, most = vocab / (slices * work_group), _GPU_MOST_STEPS
    return LaunchShape(work_group, min(math.ceil(steps / _STEPS_AT_A_TIME) * _STEPS_AT_A_TIME, most), slices)
