"""Stands in for torch with an XPU, where there is no Intel GPU.

What is real: the memory, the kDLOneAPI capsules (dpctl.tensor or dpnp.tensor write them), and the in-order queues,
given as the integer that torch gives. What is not: everything else. Only what torch documents is here, so that nothing
else can be relied upon.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import arrays
import dpctl
import numpy as np

from specverify_dpex import dlpack

dtypes = ("bool", "uint8", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64")


class Device(NamedTuple):
    """torch.device"""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


class Dtype(NamedTuple):
    """torch.dtype"""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Stream(NamedTuple):
    """torch.xpu.Stream"""

    sycl_queue: int


class Tensor:
    """torch.Tensor on an XPU."""

    def __init__(self, array: Any, device: Device):
        self.array = array  # a usm_ndarray; the library must not look at it
        self.device = device
        self.layout = strided

    @property
    def dtype(self) -> Dtype:
        return Dtype(self.array.dtype.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def data_ptr(self) -> int:
        return self.array._pointer

    def contiguous(self) -> Tensor:
        return Tensor(arrays.tensor_module().copy(self.array, order="C"), self.device)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index], self.device)

    def view(self, other: Any) -> Tensor:
        if not isinstance(other, Dtype):
            return Tensor(arrays.tensor_module().reshape(self.array, other, copy=False), self.device)
        (count,) = self.shape
        if not count:
            return empty(0, dtype=other, device=self.device)
        count = count * self.array.itemsize // np.dtype(other.name).itemsize
        offset = self.array.__sycl_usm_array_interface__.get("offset", 0) * self.array.itemsize
        whole = self.array.usm_data
        return Tensor(
            arrays.tensor_module().usm_ndarray(
                (count,), dtype=other.name, buffer=whole, offset=offset // np.dtype(other.name).itemsize
            ),
            self.device,
        )


strided = object()
DEVICES = [Device("xpu", index) for index in range(len(dpctl.get_devices()))]
current = {device: dpctl.SyclQueue(sycl, property="in_order") for device, sycl in zip(DEVICES, dpctl.get_devices())}
"""The current stream of each device; a test may set another."""

allocated: list[Tensor] = []
"""What `empty` was asked for, latest last."""


def current_stream(device: Device) -> Stream:
    return Stream(current[device].addressof_ref())


def empty(*shape: int, dtype: Dtype, device: Device) -> Tensor:
    array = arrays.tensor_module().empty(shape, dtype=dtype.name, sycl_queue=current[device])
    del allocated[:-10]
    allocated.append(Tensor(array, device))
    return allocated[-1]


def to_dlpack(tensor: Tensor) -> Any:
    return tensor.array.__dlpack__()


module = types.ModuleType("torch")
module.__dict__.update(
    {name: Dtype(name) for name in dtypes},
    __file__=__file__,
    __version__="2.13.0+xpu",
    Tensor=Tensor,
    empty=empty,
    strided=strided,
    utils=types.SimpleNamespace(dlpack=types.SimpleNamespace(to_dlpack=to_dlpack)),
    xpu=types.SimpleNamespace(current_stream=current_stream),
)


def install() -> None:
    """Let the library find it as it finds torch, though the real one may be loaded too."""
    real = sys.modules.get("torch")
    sys.modules["torch"] = module
    try:
        dlpack.kind_of(Tensor(None, DEVICES[0]), "tensor")
    finally:
        del sys.modules["torch"]
        if real is not None:
            sys.modules["torch"] = real


def make(array: np.ndarray, queue: dpctl.SyclQueue) -> Tensor:
    device = DEVICES[dpctl.get_devices().index(queue.sycl_device)]
    return Tensor(arrays.tensor_module().asarray(array, sycl_queue=current[device]), device)


def read(tensor: Tensor) -> np.ndarray:
    current[tensor.device].wait()
    return arrays.tensor_module().asnumpy(tensor.array)
