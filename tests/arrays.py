"""Every kind of array that verify takes, made from numpy arrays and read back."""

from __future__ import annotations

import importlib
from typing import Any, Callable, NamedTuple

import dpctl
import numpy as np
from dpctl._sycl_queue_manager import get_device_cached_queue as cached_queue

from specverify_dpex import UsmArray

__all__ = ["Interface", "Kind", "cached_queue", "kinds", "tensor_module", "usm_array"]


class Kind(NamedTuple):
    """A kind of array."""

    name: str
    make: Callable[[np.ndarray, dpctl.SyclQueue], Any]  # copies a numpy array to a queue's device
    read: Callable[[Any], np.ndarray]
    result_class: type
    strided: bool  # whether its library makes views of its arrays


class Interface:
    """An object of a library nobody knows: the interface is all that it has."""

    def __init__(self, interface: dict[str, Any], owner: Any = None):
        self.__sycl_usm_array_interface__ = interface
        self._owner = owner


def tensor_module() -> Any | None:
    """dpctl.tensor, or dpnp.tensor where dpctl has none any more."""
    for name in ("dpctl.tensor", "dpnp.tensor"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def usm_array(array: np.ndarray, queue: dpctl.SyclQueue) -> UsmArray:
    return UsmArray.from_buffer(array.tobytes(), array.shape, array.dtype.name, sycl_queue=queue)


def _interface(array: np.ndarray, queue: dpctl.SyclQueue) -> Interface:
    owner = usm_array(array, queue)
    return Interface(owner.__sycl_usm_array_interface__, owner)


def _read_usm(array: UsmArray) -> np.ndarray:
    return np.array(array.tolist(), dtype=array.dtype).reshape(array.shape)


def kinds() -> list[Kind]:
    """The kinds whose libraries are installed."""
    found = [
        Kind("numpy", lambda array, queue: array, lambda array: array, np.ndarray, True),
        Kind("usm-array", usm_array, _read_usm, UsmArray, False),
        Kind("interface", _interface, _read_usm, UsmArray, False),
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
