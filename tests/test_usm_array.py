"""UsmArray takes values of every element type to the device and back."""

from __future__ import annotations

import arrays
import numpy as np
import pytest

from specverify_dpex import UsmArray
from specverify_dpex.usm_array import DTYPE_NAMES

DTYPES = pytest.mark.parametrize("dtype", DTYPE_NAMES.values())


def extremes(dtype: str) -> np.ndarray:
    if dtype == "bool":
        return np.array([[True, False, True], [False, False, True]])
    info = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
    return np.array([[0, 1, 2], [info.min, info.max, 3]], dtype)


@DTYPES
def test_values_come_back(queue, dtype):
    values = extremes(dtype)
    for array in (
        UsmArray.from_list(values.tolist(), dtype, sycl_queue=queue),
        UsmArray.from_buffer(values, values.shape, dtype, sycl_queue=queue),
    ):
        assert (array.shape, array.dtype, array.itemsize) == (values.shape, dtype, values.itemsize)
        assert array.tolist() == values.tolist()
        assert {type(item) for row in array.tolist() for item in row} == {type(values.tolist()[0][0])}


@DTYPES
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (1, 2, 3)], ids=str)
def test_shapes_come_back(queue, dtype, shape):
    values = np.ones(shape, dtype)
    array = UsmArray.from_list(values.tolist(), dtype, sycl_queue=queue)
    assert array.shape == shape
    assert array.tolist() == values.tolist()


@DTYPES
def test_array_libraries_read_it(queue, dtype):
    tensor = arrays.tensor_module()
    values = extremes(dtype)
    read = tensor.asnumpy(tensor.asarray(UsmArray.from_list(values.tolist(), dtype, sycl_queue=queue)))
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, values)


def test_numbers_that_do_not_fit_are_refused(queue):
    for value, dtype in [(2**31, "int32"), (-1, "uint16"), (2**16, "uint16"), (65520.0, "float16")]:
        with pytest.raises(OverflowError):
            UsmArray.from_list([value], dtype, sycl_queue=queue)
