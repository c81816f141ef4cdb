"""Arrays of any library <-> views of USM memory, on one queue per call.

A kind of array knows two things: how one of its arrays is seen as memory that a kernel can read, and how results in USM
memory become an array of its own. Other libraries' classes are found among the modules that the caller has loaded;
none is imported here.
"""

from __future__ import annotations

import array as host_array
import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import dpctl
from dpctl._sycl_queue_manager import get_device_cached_queue
from dpctl.memory import MemoryUSMDevice, as_usm_memory

DTYPE_NAMES = {
    "b1": "bool",
    "i4": "int32",
    "i8": "int64",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
}
"""Names of the element types, by the type string of the array interface without its byte order."""

# Of numpy's type characters, which are read faster than type strings.
_CHARACTERS = {"f": "f4", "d": "f8", "e": "f2", "i": "i4", "l": "i8", "q": "i8", "I": "u4", "L": "u8", "Q": "u8"}

_default_queue: dpctl.SyclQueue | None = None

_HOST_CODES = {"i4": "i", "i8": "q", "u4": "I", "u8": "Q", "f4": "f", "f8": "d"}  # of the array module


class View(NamedTuple):
    """An array as a kernel sees it."""

    pointer: int  # address of element (0, 0, …)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str  # key of DTYPE_NAMES, or the library's own name where it is not there
    queue: dpctl.SyclQueue | None  # None where there is no memory
    owner: Any  # keeps the memory alive


ABSENT = View(0, (), (0, 0, 0), "", None, None)
"""The view of an optional argument that was not given."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class UsmArray:
    """A C-contiguous array in USM memory, for programs that use no array library.

    It implements `__sycl_usm_array_interface__`, so dpctl.tensor and dpnp read it without a copy, and it is what
    `verify` returns for objects that offer this interface alone.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
        "int32", "int64", "uint32", "uint64", "float32" or "float64".
    sycl_queue : dpctl.SyclQueue, optional
        The queue whose device holds the memory; the default device's cached queue if not given.
    memory : dpctl.memory.MemoryUSMDevice, optional
        Memory to look at instead of new memory, which is not initialised.
    byte_offset : int
        Where in `memory` the array begins.

    Raises
    ------
    ValueError
        If `dtype` is none of these, or `memory` is too small.

    Examples
    --------
    >>> from specverify_dpex import UsmArray
    >>> UsmArray.from_list([[1, 2], [3, 4]], "int64").tolist()
    [[1, 2], [3, 4]]
    """

    __slots__ = ("_byte_offset", "_typestr", "memory", "shape", "sycl_queue")

    def __init__(
        self,
        shape: Iterable[int],
        dtype: str,
        *,
        sycl_queue: dpctl.SyclQueue | None = None,
        memory: Any | None = None,
        byte_offset: int = 0,
    ):
        typestr = {name: code for code, name in DTYPE_NAMES.items() if code in _HOST_CODES}.get(dtype)
        if typestr is None:
            raise ValueError(
                f"`dtype` must name an element type: expected one of "
                f"{[DTYPE_NAMES[code] for code in _HOST_CODES]}, got {dtype!r}"
            )
        self.shape = tuple(shape)
        self._typestr = typestr
        self._byte_offset = byte_offset
        nbytes = math.prod(self.shape) * self.itemsize
        if memory is None:
            memory = MemoryUSMDevice(max(nbytes, 1), queue=sycl_queue or default_queue())
        elif byte_offset + nbytes > memory.nbytes:
            raise ValueError(
                f"`memory` must hold the array: expected {byte_offset + nbytes} bytes, got {memory.nbytes}"
            )
        self.memory = memory
        self.sycl_queue = sycl_queue or memory.sycl_queue

    @classmethod
    def from_list(cls, values: Any, dtype: str, *, sycl_queue: dpctl.SyclQueue | None = None) -> UsmArray:
        """Copy nested lists of equal lengths, or one number, to the device."""
        shape: list[int] = []
        level = values
        while isinstance(level, (list, tuple)):
            shape.append(len(level))
            level = level[0] if level else None
        flat = [values]
        for axis, extent in enumerate(shape):
            if any(len(row) != extent for row in flat):
                raise ValueError(f"`values` must have rows of equal length: expected {extent} along axis {axis}")
            flat = [item for row in flat for item in row]
        result = cls(shape, dtype, sycl_queue=sycl_queue)
        result._fill(host_array.array(_HOST_CODES[result._typestr], flat).tobytes())
        return result

    @classmethod
    def from_buffer(
        cls, buffer: Any, shape: Iterable[int], dtype: str, *, sycl_queue: dpctl.SyclQueue | None = None
    ) -> UsmArray:
        """Copy a C-contiguous buffer of exactly these elements to the device, such as bytes or an array.array."""
        result = cls(shape, dtype, sycl_queue=sycl_queue)
        content = memoryview(buffer).tobytes()
        expected = math.prod(result.shape) * result.itemsize
        if len(content) != expected:
            raise ValueError(f"`buffer` must hold the array: expected {expected} bytes, got {len(content)}")
        result._fill(content)
        return result

    def _fill(self, content: bytes) -> None:
        if content:
            self.memory.copy_from_host(bytearray(content))

    def tolist(self) -> Any:
        """Wait for the queue and copy the elements to the host, as nested lists."""
        self.sycl_queue.wait()
        flat = host_array.array(_HOST_CODES[self._typestr])
        if 0 not in self.shape:
            flat.frombytes(as_usm_memory(self).copy_to_host())
        nested: list[Any] = flat.tolist()
        for extent in reversed(self.shape[1:]):
            rows = len(nested) // extent if extent else math.prod(self.shape[:-1])
            nested = [nested[row * extent : (row + 1) * extent] for row in range(rows)]
        return nested if self.shape else nested[0]

    @property
    def dtype(self) -> str:
        return DTYPE_NAMES[self._typestr]

    @property
    def itemsize(self) -> int:
        return int(self._typestr[1])

    @property
    def __sycl_usm_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.memory._pointer, False),
            "shape": self.shape,
            "strides": None,
            "typestr": "<" + self._typestr,
            "version": 1,
            "syclobj": self.sycl_queue,
            "offset": self._byte_offset // self.itemsize,
        }

    def __repr__(self) -> str:
        return f"UsmArray(shape={self.shape}, dtype={self.dtype!r}, device={self.sycl_queue.sycl_device.name!r})"


class Kind:
    """A kind of array; the base is any object with `__sycl_usm_array_interface__`."""

    name = "an object with __sycl_usm_array_interface__"
    ordered = False
    """Whether its library orders its own work after the events of dpctl's SequentialOrderManager."""
    on_host = False
    """Whether its arrays lie where no kernel can read them."""
    copies = False
    """Whether its library can make a contiguous copy."""

    def view(self, array: Any, argument: str) -> View:
        """Describe an array, before anything is copied.

        Raises
        ------
        BufferError
            If it is not memory that a device can reach.
        """
        try:
            interface = array.__sycl_usm_array_interface__
            shape = tuple(interface["shape"])
            dtype = interface["typestr"][1:]
            strides = tuple(interface.get("strides") or contiguous_strides(shape))
            if 0 in shape:  # nothing of it is read, and dpctl has no memory object of zero bytes
                return View(0, shape, strides, dtype, None, array)
            memory = as_usm_memory(array)
            pointer = interface["data"][0] + interface.get("offset", 0) * int(dtype[1:])
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise BufferError(
                f"`{argument}` must be USM memory as its `__sycl_usm_array_interface__` describes it: {error}"
            ) from error
        return View(pointer, shape, strides, dtype, memory.sycl_queue, memory)

    def copy(self, view: View) -> View:
        """The view of a C-contiguous copy on the device; only where `on_host` or `copies` says so."""
        raise NotImplementedError

    def wrap(self, memory: Any, first: int, shape: tuple[int, ...], dtype: str, queue: dpctl.SyclQueue) -> Any:
        """An array of this kind over results that begin `first` elements into `memory`; `dtype` as in a View."""
        return UsmArray(shape, DTYPE_NAMES[dtype], sycl_queue=queue, memory=memory, byte_offset=first * int(dtype[1:]))


class _OwnKind(Kind):
    name = "specverify_dpex.UsmArray"

    def view(self, array, argument):
        return View(
            array.memory._pointer + array._byte_offset,
            array.shape,
            contiguous_strides(array.shape),
            array._typestr,
            array.sycl_queue,
            array.memory,
        )


class _TensorKind(Kind):
    """usm_ndarray, of dpctl.tensor or dpnp.tensor; its attributes are read, which is faster than its interface."""

    ordered = True
    copies = True

    def __init__(self, module: Any):
        self._module = module
        self.name = f"{module.__name__}.usm_ndarray"

    def view(self, array, argument):
        dtype = array.dtype
        code = _CHARACTERS.get(dtype.char) or dtype.str[1:]
        return View(array._pointer, array.shape, array.strides, code, array.sycl_queue, array)

    def copy(self, view):
        return _TensorKind.view(self, self._module.copy(view.owner, order="C"), "copy")

    def wrap(self, memory, first, shape, dtype, queue):
        return self._module.usm_ndarray(shape, dtype=dtype, buffer=memory, offset=first)


class _DpnpKind(_TensorKind):
    """dpnp.ndarray, which wraps a usm_ndarray."""

    def __init__(self, module: Any, tensor: Any):
        super().__init__(tensor)
        self.name = "dpnp.ndarray"
        self._wrap = module.ndarray._create_from_usm_ndarray

    def view(self, array, argument):
        return super().view(array.get_array(), argument)

    def wrap(self, memory, first, shape, dtype, queue):
        return self._wrap(super().wrap(memory, first, shape, dtype, queue))


class _NumpyKind(Kind):
    """numpy arrays: copied to the default device, and results back, so every call waits."""

    name = "numpy.ndarray"
    on_host = True

    def __init__(self, module: Any):
        self._numpy = module

    def view(self, array, argument):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return View(0, array.shape, strides, array.dtype.str[1:], default_queue(), array)

    def copy(self, view):
        array = view.owner
        # A device computes in the host's byte order.
        packed = self._numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        memory = MemoryUSMDevice(max(packed.nbytes, 1), queue=view.queue)
        if packed.nbytes:
            memory.copy_from_host(packed.reshape(-1).view("u1"))
        return View(memory._pointer, view.shape, contiguous_strides(view.shape), view.dtype, view.queue, memory)

    def wrap(self, memory, first, shape, dtype, queue):
        if 0 in shape:
            return self._numpy.empty(shape, dtype)
        part = as_usm_memory(super().wrap(memory, first, shape, dtype, queue))
        return self._numpy.frombuffer(part.copy_to_host(), dtype=dtype).reshape(shape)


_OBJECT_KIND = Kind()
_kinds: dict[type, Kind] = {UsmArray: _OwnKind()}


def kind_of(array: Any, argument: str) -> Kind:
    """The kind of an array, by its class.

    Raises
    ------
    TypeError
        If it is none that is known here.
    """
    cls = type(array)
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _find_kind(array, argument)
    return kind


def _find_kind(array: Any, argument: str) -> Kind:
    loaded = sys.modules.get
    for name in ("dpctl.tensor", "dpnp.tensor"):
        tensor = loaded(name)
        if tensor is None:
            continue
        if isinstance(array, tensor.usm_ndarray):
            return _TensorKind(tensor)
        dpnp = loaded("dpnp")
        if dpnp is not None and isinstance(array, dpnp.ndarray) and isinstance(array.get_array(), tensor.usm_ndarray):
            return _DpnpKind(dpnp, tensor)
    numpy = loaded("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _NumpyKind(numpy)
    if hasattr(array, "__sycl_usm_array_interface__"):
        return _OBJECT_KIND
    raise TypeError(
        f"`{argument}` must be an array: expected a dpnp, dpctl.tensor or dpnp.tensor array, an object with "
        f"`__sycl_usm_array_interface__`, or a numpy array, got {type(array).__name__}. "
        "Use `specverify_dpex.UsmArray.from_list` to copy lists to the device."
    )


def default_queue() -> dpctl.SyclQueue:
    """dpctl's cached queue of the default device, the one that dpctl.tensor and dpnp allocate on.

    Raises
    ------
    RuntimeError
        If there is no SYCL device.
    """
    global _default_queue
    if _default_queue is None:
        try:
            _default_queue = get_device_cached_queue(dpctl.select_default_device())
        except dpctl.SyclDeviceCreationError as error:
            raise RuntimeError(
                "no SYCL device was found. Run `specverify-dpex doctor` to see what is missing, or install the CPU "
                "device: pip install 'specverify-dpex[cpu]'"
            ) from error
    return _default_queue
