"""How the work of a call is cut up. The choice never changes a result, only the time it takes."""

from __future__ import annotations

from typing import NamedTuple

import dpctl


class LaunchShape(NamedTuple):
    """Work-group sizes and the cut of the vocabulary."""

    mass_work_group: int
    draw_work_group: int
    slices: int


# Enough neighbouring loads for the widest vector units, few enough that a work-group's collectives stay cheap.
_CPU_WORK_GROUP = 64
_GPU_WORK_GROUP = 256
# Work-groups that a compute unit wants at once to hide the latency of its loads.
_CPU_GROUPS_PER_UNIT = 4
_GPU_GROUPS_PER_UNIT = 2
# A slice shorter than this costs more to launch and to add up than it spreads.
_SMALLEST_SLICE = 4096


def launch_shape(batch: int, vocab: int, device: dpctl.SyclDevice) -> LaunchShape:
    """Slices enough that the batch fills the device, and no more."""
    cpu = device.is_cpu
    work_group = min(_CPU_WORK_GROUP if cpu else _GPU_WORK_GROUP, device.max_work_group_size)
    wanted = device.max_compute_units * (_CPU_GROUPS_PER_UNIT if cpu else _GPU_GROUPS_PER_UNIT)
    slices = max(1, min(-(-wanted // batch), vocab // _SMALLEST_SLICE))
    return LaunchShape(work_group, work_group, slices)
