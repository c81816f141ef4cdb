"""How the work of a call is cut up. The choice never changes a result, only the time it takes."""

from __future__ import annotations

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
# Each work-item writes its sum once for each tile, 8 bytes: long tiles write and search fewer sums, short ones leave
# less to search inside, twice over.
_TILE_STEPS = 32
# Work-groups that a compute unit wants, to hide the latency of loads and to even out rows that read one array with
# those that read two.
_CPU_GROUPS_PER_UNIT = 4
_GPU_GROUPS_PER_UNIT = 2
# A slice shorter than this costs more to launch than it spreads.
_SMALLEST_SLICE = 8192


def launch_shape(batch: int, vocab: int, device: dpctl.SyclDevice) -> LaunchShape:
    """Slices enough that the batch fills the device, and no more."""
    cpu = device.is_cpu
    work_group = min(_CPU_WORK_GROUP if cpu else _GPU_WORK_GROUP, device.max_work_group_size)
    wanted = device.max_compute_units * (_CPU_GROUPS_PER_UNIT if cpu else _GPU_GROUPS_PER_UNIT)
    slices = min(-(-wanted // batch), -(-vocab // _SMALLEST_SLICE))
    return LaunchShape(work_group, _TILE_STEPS, slices)
