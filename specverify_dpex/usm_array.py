"""An array in USM memory for programs that use no array library, and the queue that arrays are on by default."""

from __future__ import annotations

import array as host_array
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import dpctl
from dpctl._sycl_queue_manager import get_device_cached_queue
from dpctl.memory import MemoryUSMDevice, as_usm_memory

from specverify_dpex import capsule
from specverify_dpex.capsule import KDL_CPU, KDL_ONEAPI, contiguous_strides

DTYPE_NAMES = {
    "b1": "bool",
    "i4": "int32",
    "i8": "int64",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
}
"""Names of the element types, by the type string of the array interface without its byte order."""

# How the struct module writes them; the array module, which is faster, has all but "?" and "e".
_FORMATS = {"b1": "?", "i4": "i", "i8": "q", "u2": "H", "u4": "I", "u8": "Q", "f2": "e", "f4": "f", "f8": "d"}
_CODES = {DTYPE_NAMES[code]: code for code in _FORMATS}

_default_queue: dpctl.SyclQueue | None = None
_device_ids: dict[tuple[dpctl.SyclContext, dpctl.SyclDevice], int] = {}


class UsmArray:
    """A C-contiguous array in USM memory, for programs that use no array library.

    It implements `__sycl_usm_array_interface__` and DLPack, so dpctl.tensor, dpnp, torch and others read it without a
    copy, and it is what `verify` returns for objects that offer these interfaces alone.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
        "bool", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32" or "float64".
    sycl_queue : dpctl.SyclQueue, optional
        The queue whose device holds the memory; the default device's cached queue if not given.
    memory : dpctl.memory.MemoryUSMDevice, optional
        Memory to look at instead of new memory, which is not initialised.
    byte_offset : int
        Where in `memory` the array begins.

    Raises
    ------
    ValueError
        If `dtype` is none of these, or `memory` is too small or of another context than `sycl_queue`.

    Examples
    --------
    >>> from specverify_dpex import UsmArray
    >>> UsmArray.from_list([[1, 2], [3, 4]], "int64").tolist()
    [[1, 2], [3, 4]]
    """

    __slots__ = ("_byte_offset", "_device", "_exporter", "_typestr", "memory", "shape", "sycl_queue")

    def __init__(
        self,
        shape: Iterable[int],
        dtype: str,
        *,
        sycl_queue: dpctl.SyclQueue | None = None,
        memory: Any | None = None,
        byte_offset: int = 0,
    ):
        typestr = _CODES.get(dtype)
        if typestr is None:
            raise ValueError(f"`dtype` must name an element type: expected one of {list(_CODES)}, got {dtype!r}")
        self.shape = tuple(shape)
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"`shape` must not have negative extents: got {self.shape}")
        self._typestr = typestr
        if byte_offset < 0 or byte_offset % self.itemsize:
            raise ValueError(
                f"`byte_offset` must be a multiple of the element's size: expected one of {self.itemsize} bytes, "
                f"not negative, got {byte_offset}"
            )
        self._byte_offset = byte_offset
        nbytes = math.prod(self.shape) * self.itemsize
        if memory is None:
            memory = MemoryUSMDevice(max(nbytes, 1), queue=sycl_queue or default_queue())
        elif byte_offset + nbytes > memory.nbytes:
            raise ValueError(
                f"`memory` must hold the array: expected {byte_offset + nbytes} bytes, got {memory.nbytes}"
            )
        elif sycl_queue is not None and memory.sycl_queue.sycl_context != sycl_queue.sycl_context:
            raise ValueError(
                "`memory` must be of the context of `sycl_queue`: expected memory that a queue of it allocated, got "
                "another context's"
            )
        self.memory = memory
        self.sycl_queue = sycl_queue or memory.sycl_queue
        self._device: tuple[int, int] | None = None
        self._exporter: Any = None

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
            if any(not isinstance(row, (list, tuple)) or len(row) != extent for row in flat):
                raise ValueError(f"`values` must have rows of equal length: expected {extent} along axis {axis}")
            flat = [item for row in flat for item in row]
        if any(isinstance(item, (list, tuple)) for item in flat):
            raise ValueError(f"`values` must have rows of equal length: expected no axis {len(shape)}")
        result = cls(shape, dtype, sycl_queue=sycl_queue)
        result._fill(_pack(_FORMATS[result._typestr], flat))
        return result

    @classmethod
    def _over(cls, memory: Any, first: int, shape: tuple[int, ...], typestr: str, queue: dpctl.SyclQueue) -> UsmArray:
        """An array that begins `first` elements into `memory`, which is known to hold it: `__init__` without checks."""
        array = cls.__new__(cls)
        array.memory = memory
        array.shape = shape
        array.sycl_queue = queue
        array._typestr = typestr
        array._byte_offset = first * int(typestr[1:])
        array._device = array._exporter = None
        return array

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
        content = b"" if 0 in self.shape else as_usm_memory(self).copy_to_host()
        nested = _unpack(_FORMATS[self._typestr], content)
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

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._device is None:
            self._device = (KDL_ONEAPI, _device_id(self.sycl_queue))
        return self._device

    def __dlpack__(
        self,
        *,
        stream: Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule of this memory, or of a copy on the host where `dl_device` is (1, 0).

        Parameters
        ----------
        stream : dpctl.SyclQueue, or int, optional
            The queue on which the consumer will use it, which is made to wait for this array's queue; -1 for none to
            wait. Without it the host waits.
        max_version : tuple of int, optional
            The newest version that the consumer takes; a legacy capsule if none.
        dl_device : tuple of int, optional
            This array's device, or the host.
        copy : bool, optional
            Whether to copy; None does so only where the device differs.

        Raises
        ------
        BufferError
            If the memory cannot be seen from `dl_device`, or only by a copy that `copy` forbids.
        """
        device = self.__dlpack_device__()
        versioned = max_version is not None and max_version[0] >= capsule.VERSION[0]
        if dl_device is not None and (dl_device[0], dl_device[1]) != device:
            if (dl_device[0], dl_device[1]) != (KDL_CPU, 0):
                raise BufferError(
                    f"`dl_device` must be {device}, or ({KDL_CPU}, 0) for the host: got "
                    f"{(int(dl_device[0]), int(dl_device[1]))}"
                )
            if copy is False:
                raise BufferError(
                    "`copy` must not be False where `dl_device` is the host: the memory is on a SYCL device"
                )
            self.sycl_queue.wait()
            first = self._byte_offset // self.itemsize
            host = result_on_host(self.memory, first, self.shape, self._typestr, self.sycl_queue)
            return capsule.export(host, versioned)
        if isinstance(stream, dpctl.SyclQueue):
            if stream != self.sycl_queue:
                stream.submit_barrier([self.sycl_queue.submit_barrier()])
        elif stream != -1:
            self.sycl_queue.wait()
        if copy and 0 not in self.shape:
            memory = MemoryUSMDevice(math.prod(self.shape) * self.itemsize, queue=self.sycl_queue)
            memory.copy_from_device(self)
            exporter = UsmArray(self.shape, self.dtype, memory=memory)._as_numpy()
        else:
            exporter = self._exporter
            if exporter is None:
                exporter = self._exporter = self._as_numpy()
        exported = capsule.export(exporter, versioned)
        capsule.rename_device(exported, device)
        return exported

    def _as_numpy(self) -> Any:
        """numpy's view of this memory, which keeps it alive and must not be looked into."""
        pointer = self.memory._pointer + self._byte_offset
        return capsule.as_numpy(pointer, self.shape, contiguous_strides(self.shape), self._typestr, self.memory)

    def __repr__(self) -> str:
        return f"UsmArray(shape={self.shape}, dtype={self.dtype!r}, device={self.sycl_queue.sycl_device.name!r})"


def _pack(format_: str, values: Sequence[Any]) -> bytes:
    if format_ in "?e":
        return struct.pack(f"{len(values)}{format_}", *values)
    return host_array.array(format_, values).tobytes()


def _unpack(format_: str, content: Any) -> list[Any]:
    if format_ in "?e":
        return list(struct.unpack(f"{len(content) // struct.calcsize(format_)}{format_}", content))
    values = host_array.array(format_)
    values.frombytes(content)
    return values.tolist()


def result_on_host(memory: Any, first: int, shape: tuple[int, ...], dtype: str, queue: dpctl.SyclQueue) -> Any:
    """A numpy array of results that begin `first` elements into `memory`, copied to the host."""
    import numpy

    if 0 in shape:
        return numpy.empty(shape, dtype)
    part = as_usm_memory(UsmArray._over(memory, first, shape, dtype, queue))
    return part.copy_to_host().view(dtype).reshape(shape)


def _device_id(queue: dpctl.SyclQueue) -> int:
    """DLPack's number of the queue's device.

    Raises
    ------
    BufferError
        If memory of the queue's context is not that of the device's default context, which DLPack implies.
    """
    context, device = queue.sycl_context, queue.sycl_device
    number = _device_ids.get((context, device))
    if number is None:
        root = device
        while root.parent_device is not None:
            root = root.parent_device
        if context != root.sycl_platform.default_context:
            raise BufferError(
                "`UsmArray` must be in its device's default context to be exported by DLPack: expected that context, "
                "got another. Create it on a queue of the default context, such as dpctl.SyclQueue(device)"
            )
        number = int(root.get_filter_string(include_backend=False, include_device_type=False))
        _device_ids[(context, device)] = number
    return number


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
        except (dpctl.SyclDeviceCreationError, dpctl.SyclQueueCreationError) as error:
            raise RuntimeError(
                "no SYCL device was found. Run `specverify-dpex doctor` to see what is missing, or install the CPU "
                "device: pip install 'specverify-dpex[cpu]'"
            ) from error
    return _default_queue
