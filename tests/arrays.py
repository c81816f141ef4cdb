"""Every kind of array that verify takes, made from numpy arrays and read back."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, Callable, NamedTuple

import dpctl
import numpy as np
import pytest
from dpctl._sycl_queue_manager import get_device_cached_queue as cached_queue

from specverify_dpex import UsmArray

__all__ = [
    "QUEUES_FOR_THREADS",
    "Dlpack",
    "Interface",
    "Kind",
    "cached_queue",
    "kinds",
    "optional",
    "tensor_module",
    "usm_array",
]

REQUIRED = os.environ.get("SPECVERIFY_DPEX_REQUIRE", "").split()
"""Libraries that the session of noxfile.py installs: a test that finds one missing fails."""


def optional(name: str) -> Any | None:
    """A module that not every environment has; None if it is not there, and may be missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if name in REQUIRED:
            raise
        return None


# Before oneAPI 2026, CPU runtimes crash in their own waits and copies where many threads use out-of-order queues.
_ORDERS = [False, True] if tuple(map(int, dpctl.__version__.split(".")[:2])) >= (0, 22) else [True]
QUEUES_FOR_THREADS = pytest.mark.parametrize(
    "in_order", _ORDERS, ids=lambda in_order: "in-order" if in_order else "out-of-order"
)


class Kind(NamedTuple):
    """A kind of array."""

    name: str
    make: Callable[[np.ndarray, dpctl.SyclQueue], Any]  # copies a numpy array to a queue's device
    read: Callable[[Any], np.ndarray]
    result_class: type
    strided: bool  # whether its library makes views of its arrays, of any strides
    read_argument: Callable[[Any], np.ndarray] | None = None  # where `read` takes results only


class Interface:
    """An object of a library nobody knows: the interface is all that it has."""

    def __init__(self, interface: dict[str, Any], owner: Any = None):
        self.__sycl_usm_array_interface__ = interface
        self._owner = owner


class Dlpack:
    """An array of a library nobody knows: DLPack is all that it has. The capsules are those of a known one."""

    def __init__(self, owner: Any):
        self._owner = owner

    def __dlpack__(self, **options: Any) -> Any:
        return self._owner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._owner.__dlpack_device__()


@functools.cache
def tensor_module() -> Any | None:
    """dpctl.tensor, or dpnp.tensor where dpctl has none any more."""
    for name in ("dpctl.tensor", "dpnp.tensor"):
        try:
            tensor = importlib.import_module(name)
        except ImportError:
            continue
        if dpctl.get_devices():  # its first copies deadlock if several threads make them at once (a C++ static)
            tensor.asnumpy(tensor.asarray(np.zeros(1, "f4")))
        return tensor
    return None


def usm_array(array: np.ndarray, queue: dpctl.SyclQueue) -> UsmArray:
    return UsmArray.from_buffer(array.tobytes(), array.shape, array.dtype.name, sycl_queue=queue)


def _interface(array: np.ndarray, queue: dpctl.SyclQueue) -> Interface:
    owner = usm_array(array, queue)
    return Interface(owner.__sycl_usm_array_interface__, owner)


def dlpack_array(array: np.ndarray, queue: dpctl.SyclQueue) -> Dlpack:
    tensor = tensor_module()
    return Dlpack(usm_array(array, queue) if tensor is None else tensor.asarray(array, sycl_queue=queue))


def _read_dlpack(array: Dlpack) -> np.ndarray:
    owner = array._owner
    return _read_usm(owner) if isinstance(owner, UsmArray) else tensor_module().asnumpy(owner)


def _torch_kinds() -> list[Kind]:
    found = []
    torch = optional("torch")
    if torch is not None:
        found.append(
            Kind(
                "torch",
                lambda array, queue: torch.from_numpy(np.ascontiguousarray(array)),
                lambda array: array.numpy(),
                torch.Tensor,
                False,
            )
        )
    if tensor_module() is not None and dpctl.get_devices():
        import torch_stand_in

        torch_stand_in.install()
        found.append(Kind("torch-xpu", torch_stand_in.make, torch_stand_in.read, torch_stand_in.Tensor, False))
    return found


def _read_usm(array: UsmArray) -> np.ndarray:
    return np.array(array.tolist(), dtype=array.dtype).reshape(array.shape)


@functools.cache
def kinds() -> list[Kind]:
    """The kinds whose libraries are installed."""
    found = [
        Kind("numpy", lambda array, queue: array, lambda array: array, np.ndarray, True),
        Kind("usm-array", usm_array, _read_usm, UsmArray, False),
        Kind("interface", _interface, _read_usm, UsmArray, False, lambda array: _read_usm(array._owner)),
        Kind("dlpack", dlpack_array, _read_usm, UsmArray, False, _read_dlpack),
        Kind(
            "dlpack-host",
            lambda array, queue: Dlpack(array),
            lambda array: array,
            np.ndarray,
            False,
            lambda array: array._owner,
        ),
        *_torch_kinds(),
    ]
    tensor = tensor_module()
    if tensor is not None:
        found.append(
            Kind(
                tensor.__name__,
                lambda array, queue: tensor.asarray(array, sycl_queue=queue),
                tensor.asnumpy,
                tensor.usm_ndarray,
                True,
            )
        )
    try:
        dpnp = importlib.import_module("dpnp")
    except ImportError:
        return found
    found.append(
        Kind("dpnp", lambda array, queue: dpnp.asarray(array, sycl_queue=queue), dpnp.asnumpy, dpnp.ndarray, True)
    )
    return found
