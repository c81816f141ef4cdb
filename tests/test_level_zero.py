"""Intel's Level Zero driver on an emulated Iris Xe: `make levelzero` runs these, no other session does.

The driver does everything but execute: it builds the modules, allocates, copies, launches and signals, but no kernel
runs and no result is computed. So nothing here looks at values; the tests on the OpenCL CPU device do that.
"""

from __future__ import annotations

import json
from pathlib import Path

import arrays
import dpctl
import numpy as np
import pytest

from specverify_dpex import UsmArray, launch, tuning, uniforms, verify
from specverify_dpex.spirv import MANIFEST, MODULE_FOLDER

pytestmark = pytest.mark.level_zero

ENTRY_POINTS = json.loads((MODULE_FOLDER / MANIFEST).read_text())["modules"]
FLOOR = Path(__file__).parent.parent / "bench" / "floor_f32.spv"
COMPUTE_UNITS = 96
BATCHES = (1, 8, 64)
VOCABS = (257, 32000, 151936)


@pytest.fixture(scope="module")
def queue() -> dpctl.SyclQueue:
    """A queue of the emulated device. Without it these tests fail: who selects them wants them run."""
    devices = dpctl.get_devices(backend="level_zero")
    if not devices:
        pytest.fail("there is no Level Zero device: run these tests by `make levelzero`")
    return arrays.cached_queue(devices[0])


def zeros(queue: dpctl.SyclQueue, dtype: str, *shape: int) -> UsmArray:
    return UsmArray.from_buffer(bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), shape, dtype, sycl_queue=queue)


def verify_zeros(queue: dpctl.SyclQueue, batch: int, vocab: int, num_draft: int = 1) -> None:
    """verify() on all-zero arrays; its results must be of the right kind, shape and dtype and on the queue."""
    result = verify(
        zeros(queue, "int64", batch, num_draft),
        zeros(queue, "float32", batch, num_draft, vocab),
        zeros(queue, "float32", batch, num_draft + 1, vocab),
        zeros(queue, "float32", batch, num_draft),
        zeros(queue, "float32", batch, num_draft + 1),
    )
    queue.wait()
    for array in result:
        assert type(array) is UsmArray and array.shape == (batch,) and array.dtype == "int64"
        assert array.sycl_queue == queue
        assert len(array.tolist()) == batch  # what it holds is whatever the memory held


def test_device_is_an_iris_xe(queue):
    device = queue.sycl_device
    assert (device.is_gpu, device.max_compute_units, device.has_aspect_fp64) == (True, COMPUTE_UNITS, False)
    assert device.driver_version.startswith("1.3.")  # Level Zero 1.3: the driver of Debian 12


@pytest.mark.parametrize("entry_point", sorted(ENTRY_POINTS))
def test_module_builds_to_what_the_manifest_says(queue, entry_point):
    expected = ENTRY_POINTS[entry_point]
    kernel = launch.kernel(queue, entry_point).sycl_kernel
    assert kernel.get_function_name() == entry_point
    assert kernel.num_args == len(expected["arguments"])
    assert kernel.private_mem_size == expected["private_variables"] == 0
    limit = expected["work_group_limit"] or queue.sycl_device.max_work_group_size
    assert kernel.work_group_size == limit


def test_floor_builds(queue):
    kernel = launch.Kernel(queue, FLOOR.stem, FLOOR.read_bytes(), []).sycl_kernel
    assert kernel.private_mem_size == 0


@pytest.mark.parametrize("vocab", VOCABS, ids="v{}".format)
@pytest.mark.parametrize("batch", BATCHES, ids="b{}".format)
def test_verify_runs_its_whole_path(queue, batch, vocab):
    verify_zeros(queue, batch, vocab)


def split_choices(device: dpctl.SyclDevice) -> dict[int, tuple[int, int]]:
    """Every number of slices that the device is given for a batch of up to 64, with a batch and vocabulary for it."""
    return {
        tuning.launch_shape(batch, vocab, device).slices: (batch, vocab)
        for batch in range(64, 0, -1)
        for vocab in VOCABS
    }


def test_verify_runs_with_every_split_of_the_device(queue):
    choices = split_choices(queue.sycl_device)
    assert min(choices) == 1 and len(choices) > 3
    for batch, vocab in choices.values():
        verify_zeros(queue, batch, vocab)


def test_verify_takes_every_kind_of_array(queue, kind):
    inputs = [
        np.zeros((2, 3), "i8"),
        np.zeros((2, 3, 257), "f4"),
        np.zeros((2, 4, 257), "f4"),
    ]
    made = [kind.make(array, queue) for array in inputs]
    for draft_probs in (made[1], None):
        result = verify(made[0], draft_probs, made[2], seed=7)
        for array in result:
            assert type(array) is kind.result_class
            assert kind.read(array).shape == (2,) and kind.read(array).dtype == np.int64


def test_uniforms_run(queue):
    like = zeros(queue, "float32", 1)
    accept, sample = uniforms(7, 0, 5, 3, like=like)
    assert (accept.shape, sample.shape, accept.dtype) == ((5, 3), (5, 4), "float32")
    assert accept.sycl_queue == queue


def test_driver_leaves_no_record(queue):
    """The driver records into files of gigabytes unless it is told not to."""
    verify_zeros(queue, 8, 32000)
    assert not list(Path.cwd().glob("*.aub"))
