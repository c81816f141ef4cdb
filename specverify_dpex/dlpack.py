"""Arrays of any library <-> views of USM memory, on one queue per call.

A kind of array knows two things: how one of its arrays is seen as memory that a kernel can read, and how results in USM
memory become an array of its own. Other libraries' classes are found among the modules that the caller has loaded;
none is imported here. What offers `__sycl_usm_array_interface__` is read by that, which costs a tenth of DLPack; for
everything else there is DLPack, whose capsules `specverify_dpex.capsule` reads and writes.
"""

from __future__ import annotations

import array as host_array
import ctypes
import functools
import math
import operator
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import dpctl
import dpctl._sycl_queue
from dpctl._sycl_queue_manager import get_device_cached_queue
from dpctl.memory import MemoryUSMDevice, as_usm_memory

from specverify_dpex import capsule, launch, runtime
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

# Of numpy's type characters, which are read faster than type strings.
_CHARACTERS = {
    "?": "b1",
    "i": "i4",
    "l": "i8",
    "q": "i8",
    "H": "u2",
    "I": "u4",
    "L": "u8",
    "Q": "u8",
    "e": "f2",
    "f": "f4",
    "d": "f8",
}

_NATIVE_ORDERS = "|=" + ("<" if sys.byteorder == "little" else ">")

_default_queue: dpctl.SyclQueue | None = None
_device_ids: dict[tuple[dpctl.SyclContext, dpctl.SyclDevice], int] = {}

# As in launch.py: dpctl's own library, found through an extension module that links to it.
_dpctl = ctypes.CDLL(dpctl._sycl_queue.__file__)
_usm_type = _dpctl.DPCTLUSM_GetPointerType
_usm_type.restype = ctypes.c_int
_usm_type.argtypes = [ctypes.c_void_p, ctypes.c_void_p]  # memory and context; 0 for memory that is not the context's
_same_queue = _dpctl.DPCTLQueue_AreEq
_same_queue.restype = ctypes.c_bool
_same_queue.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)

# How the struct module writes them; the array module, which is faster, has all but "?" and "e".
_FORMATS = {"b1": "?", "i4": "i", "i8": "q", "u2": "H", "u4": "I", "u8": "Q", "f2": "e", "f4": "f", "f8": "d"}
_CODES = {DTYPE_NAMES[code]: code for code in _FORMATS}


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

_new = tuple.__new__  # makes a View in half the time of its own constructor, which is a function in Python


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
    def _over(
        cls, memory: Any, byte_offset: int, shape: tuple[int, ...], typestr: str, queue: dpctl.SyclQueue
    ) -> UsmArray:
        """An array over part of `memory` that is known to hold it: `__init__` without its checks."""
        array = cls.__new__(cls)
        array.memory = memory
        array.shape = shape
        array.sycl_queue = queue
        array._typestr = typestr
        array._byte_offset = byte_offset
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
            host = _result_on_host(self.memory, first, self.shape, self._typestr, self.sycl_queue)
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


class Kind:
    """A kind of array; the base is any object with `__sycl_usm_array_interface__`."""

    name = "an object with __sycl_usm_array_interface__"
    conversion = "{name}.astype({dtype!r})"
    """How to convert an array, as an error message shows it."""
    transfer = "Allocate it there"
    """How to bring an array to the queue of the array `first`, as an error message shows it."""

    ordered = False
    """Whether its library orders its own work after the events of dpctl's SequentialOrderManager."""
    on_host = False
    """Whether its arrays lie where no kernel can read them."""
    copies = False
    """Whether its library can make a contiguous copy."""
    plain = False
    """Whether it is what results are of where the library of an array cannot make any."""

    def of(self, array: Any, argument: str) -> Kind:
        """The kind of one array, where arrays of a class are of several kinds.

        Raises
        ------
        BufferError
            If it is on a device that SYCL does not reach.
        """
        return self

    def view(self, array: Any, argument: str) -> View:
        """Describe an array, before anything is copied.

        Raises
        ------
        BufferError
            If it is not memory that a device can reach.
        """
        try:
            interface = array.__sycl_usm_array_interface__
            strides = interface.get("strides")
            shape, strides, dtype, size = _layout(
                interface["version"], tuple(interface["shape"]), strides and tuple(strides), interface["typestr"]
            )
            if 0 in shape:  # nothing of it is read, and dpctl has no memory object of zero bytes
                return View(0, shape, strides, dtype, None, array)
            pointer = interface["data"][0] + interface.get("offset", 0) * size
            queue = interface["syclobj"]
            if type(queue) is dpctl.SyclQueue:  # a tenth of what as_usm_memory costs
                if _usm_type(pointer, queue.sycl_context.addressof_ref()):
                    return _new(View, (pointer, shape, strides, dtype, queue, array))
                raise ValueError(f"{pointer:#x} is not USM memory of its queue's context")
            memory = as_usm_memory(array)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ctypes.ArgumentError) as error:
            raise BufferError(
                f"`{argument}` must be USM memory as its `__sycl_usm_array_interface__` describes it: {error}"
            ) from error
        return View(pointer, shape, strides, dtype, memory.sycl_queue, memory)

    def copy(self, view: View) -> View:
        """The view of a C-contiguous copy on the device; only where `on_host` or `copies` says so."""
        raise NotImplementedError

    def address(self, view: View) -> int:
        """Where element (0, 0, …) lies, on the host or a device."""
        return view.pointer

    def read_only(self, array: Any, argument: str) -> bool:
        """Whether an array must not be written to."""
        return bool(array.__sycl_usm_array_interface__["data"][1])

    def write(self, view: View, memory: Any, first: int) -> None:
        """Wait, and copy results that begin `first` elements into `memory` to a contiguous array; only `on_host`."""
        raise NotImplementedError

    def results(self, queue: dpctl.SyclQueue) -> Any:
        """Where results go: what has an `allocate` like `launch.Arena`, with memory that `wrap` takes."""
        return launch.Arena(queue)

    def wrap(self, memory: Any, first: int, shape: tuple[int, ...], dtype: str, queue: dpctl.SyclQueue) -> Any:
        """An array of this kind over results that begin `first` elements into `memory`; `dtype` as in a View."""
        return UsmArray._over(memory, first * int(dtype[1:]), shape, dtype, queue)


@functools.lru_cache(maxsize=1024)
def _layout(
    version: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, typestr: str
) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """Shape, strides, dtype and bytes of an element, as these fields of a USM array interface say them.

    Raises
    ------
    ValueError
        If they do not fit each other or are of another version.
    """
    if version != 1:
        raise ValueError(f"version must be 1, got {version}")
    if typestr[0] not in _NATIVE_ORDERS:
        raise ValueError(f"typestr must be of the device's byte order, got {typestr!r}")
    shape = tuple(map(operator.index, shape))
    strides = tuple(map(operator.index, strides)) if strides else contiguous_strides(shape)
    if len(strides) != len(shape) or min(shape, default=0) < 0:
        raise ValueError(f"strides must fit the shape, got {strides} for {shape}")
    return shape, strides, typestr[1:], int(typestr[2:])


class _OwnKind(Kind):
    name = "specverify_dpex.UsmArray"
    transfer = (
        "Copy it there, for example with UsmArray.from_list({name}.tolist(), {name}.dtype, "
        "sycl_queue={first}.sycl_queue)"
    )
    plain = True

    def view(self, array, argument):
        memory, shape = array.memory, array.shape
        pointer = memory._pointer + array._byte_offset
        return _new(View, (pointer, shape, contiguous_strides(shape), array._typestr, array.sycl_queue, memory))

    def read_only(self, array, argument):
        return False


def _tensor_view(array: Any) -> View:
    dtype = array.dtype
    code = _CHARACTERS.get(dtype.char) or dtype.str[1:]
    return _new(View, (array._pointer, array.shape, array.strides, code, array.sycl_queue, array))


class _TensorKind(Kind):
    """usm_ndarray, of dpctl.tensor or dpnp.tensor; its attributes are read, which is faster than its interface."""

    transfer = "Copy it there, for example with {name}.to_device({first}.sycl_queue)"
    ordered = True
    copies = True

    def __init__(self, module: Any):
        self._module = module
        self.name = f"{module.__name__}.usm_ndarray"

    def view(self, array, argument):
        return _tensor_view(array)

    def copy(self, view):
        return _tensor_view(self._module.copy(view.owner, order="C"))

    def read_only(self, array, argument):
        return not array.flags.writable

    def wrap(self, memory, first, shape, dtype, queue):
        return self._module.usm_ndarray(shape, dtype=dtype, buffer=memory, offset=first)


class _DpnpKind(_TensorKind):
    """dpnp.ndarray, which wraps a usm_ndarray."""

    def __init__(self, module: Any, tensor: Any):
        super().__init__(tensor)
        self.name = "dpnp.ndarray"
        self._wrap = module.ndarray._create_from_usm_ndarray

    def view(self, array, argument):
        return _tensor_view(array.get_array())

    def read_only(self, array, argument):
        return super().read_only(array.get_array(), argument)

    def wrap(self, memory, first, shape, dtype, queue):
        return self._wrap(self._module.usm_ndarray(shape, dtype=dtype, buffer=memory, offset=first))


class _Staged:
    """Device memory for the copy of one host array, which the next copy of that size takes over.

    Allocating and freeing costs more than copying a small array, and oneAPI 2024.2 may abort where one thread frees
    while another launches. Large arrays have memory of their own.
    """

    _LARGEST = 1 << 20  # bytes of a block that is kept
    _MOST = 16  # blocks of one size that are kept
    _kept: dict[tuple[dpctl.SyclQueue, int], list[MemoryUSMDevice]] = {}

    __slots__ = ("_blocks", "memory")

    def __init__(self, nbytes: int, queue: dpctl.SyclQueue):
        self._blocks: list[MemoryUSMDevice] | None = None
        if nbytes <= self._LARGEST:
            nbytes = max(1 << (nbytes - 1).bit_length(), 256)
            self._blocks = self._kept.setdefault((queue, nbytes), [])
        try:
            self.memory = self._blocks.pop() if self._blocks else MemoryUSMDevice(nbytes, queue=queue)
        except IndexError:  # another thread was faster
            self.memory = MemoryUSMDevice(nbytes, queue=queue)

    def __del__(self) -> None:
        if self._blocks is not None and len(self._blocks) < self._MOST:
            self._blocks.append(self.memory)


class _HostKind(Kind):
    """Arrays on the host: copied to the default device, and results back, so every call waits."""

    on_host = True

    def copy(self, view):
        staged = _Staged(math.prod(view.shape) * itemsize(view.dtype), view.queue)
        if 0 not in view.shape:
            staged.memory.copy_from_host(self._bytes(view))
        pointer = staged.memory._pointer
        return View(pointer, view.shape, contiguous_strides(view.shape), view.dtype, view.queue, staged)

    def write(self, view, memory, first):
        self._as_numpy(view)[...] = _result_on_host(memory, first, view.shape, view.dtype, view.queue)

    def _as_numpy(self, view: View) -> Any:
        """The array that the view is of, as a numpy array over the same memory."""
        raise NotImplementedError

    def _bytes(self, view: View) -> Any:
        """The elements in C order and the host's byte order, as a buffer of bytes."""
        raise NotImplementedError


class _NumpyKind(_HostKind):
    name = "numpy.ndarray"
    plain = True

    def view(self, array, argument):
        itemsize = array.itemsize or 1  # a dtype of no bytes is refused with the other dtypes
        strides = tuple(stride // itemsize for stride in array.strides)
        dtype = array.dtype.str[1:]
        if dtype == "V2" and array.dtype.name == "bfloat16":  # of ml_dtypes; numpy has none
            dtype = "bfloat16"
        return View(0, array.shape, strides, dtype, default_queue(), array)

    def address(self, view):
        return view.owner.__array_interface__["data"][0]

    def read_only(self, array, argument):
        return not array.flags.writeable

    def _as_numpy(self, view):
        return view.owner

    def _bytes(self, view):
        return _contiguous_bytes(view.owner.astype(view.owner.dtype.newbyteorder("="), copy=False))

    def wrap(self, memory, first, shape, dtype, queue):
        return _result_on_host(memory, first, shape, dtype, queue)


class _DlpackKinds(Kind):
    """A class whose arrays offer DLPack and nothing better: one kind for each device."""

    def __init__(self, cls: type):
        self._class = f"{cls.__module__}.{cls.__qualname__}"
        self._kinds: dict[tuple[int, int], Kind] = {}

    def of(self, array, argument):
        device = array.__dlpack_device__()
        kind = self._kinds.get(device)  # an IntEnum is the integer here
        if kind is None:
            device = (int(device[0]), int(device[1]))
            namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else None
            library = namespace if hasattr(namespace, "from_dlpack") else None
            if device[0] == KDL_ONEAPI:
                kind = _DlpackSyclKind(self._class, library, device, argument)
            elif device[0] == KDL_CPU:
                kind = _DlpackHostKind(self._class, library, device)
            else:
                raise BufferError(
                    f"`{argument}` must be on a SYCL device or on the host: expected DLPack's device type {KDL_ONEAPI} "
                    f"or {KDL_CPU}, got {device[0]}. Copy it to the host"
                )
            self._kinds[device] = kind
        return kind


class _Exporter:
    """Reads the arrays that one class exports on one device."""

    def __init__(self, device: tuple[int, int], *options: dict[str, Any]):
        self._device = device
        self._options: list[dict[str, Any]] = [*options, {"max_version": capsule.VERSION}, {}]

    def read(self, array: Any, argument: str) -> capsule.Tensor:
        """The array's memory; a library that does not know an option of the protocol is asked without it."""
        options = self._options
        try:
            try:
                exported = array.__dlpack__(**options[0])
            except TypeError:
                exported = self._export_with_less(array, options)
        except (BufferError, ValueError, RuntimeError) as error:
            raise BufferError(f"`{argument}` must be exported by DLPack, but its library refuses: {error}") from error
        tensor = capsule.read(exported, argument)
        if tensor.device != self._device:
            raise BufferError(
                f"`{argument}` must be where its `__dlpack_device__` says: expected {self._device}, got {tensor.device}"
            )
        return tensor

    def read_only(self, array: Any, argument: str) -> bool:
        """Whether the array's library says that it must not be written to; jax's are immutable and do not say so."""
        jax = sys.modules.get("jax")
        return (jax is not None and isinstance(array, jax.Array)) or self.read(array, argument).read_only

    def _export_with_less(self, array: Any, refused: list[dict[str, Any]]) -> Any:
        """Leave options out one set after the other, for the arrays to come as well once that has helped."""
        *some, none = refused
        for left in range(1, len(some)):
            try:
                exported = array.__dlpack__(**some[left])
            except TypeError:
                continue
            self._options = [*some[left:], none]
            return exported
        exported = array.__dlpack__()
        self._options = [none]
        return exported


class _DlpackSyclKind(Kind):
    """Arrays of one class on one SYCL device, read in place; results come back through its library, where it can."""

    def __init__(self, cls: str, library: Any, device: tuple[int, int], argument: str):
        self.name = f"{cls} on DLPack's device {device}"
        self._library = library
        try:
            self._queue = get_device_cached_queue(dpctl.SyclDevice(str(device[1])))
        except (ValueError, dpctl.SyclDeviceCreationError) as error:
            raise BufferError(
                f"`{argument}` must be on a device of dpctl's: got DLPack's device {device}. "
                "`specverify-dpex doctor` lists them"
            ) from error
        self._context = self._queue.sycl_context  # lives as long as its reference is used
        self._context_reference = self._context.addressof_ref()
        # dpctl and dpnp make the queue wait for theirs; libraries that do not take it must be done by themselves.
        self._exporter = _Exporter(device, {"max_version": capsule.VERSION, "stream": self._queue})

    def view(self, array, argument):
        pointer, _, shape, strides, dtype, owner, _ = self._exporter.read(array, argument)
        if 0 in shape:
            return View(0, shape, strides, dtype, None, owner)
        if not _usm_type(pointer, self._context_reference):
            raise _out_of_reach(pointer, self._queue, argument)
        return _new(View, (pointer, shape, strides, dtype, self._queue, owner))

    def read_only(self, array, argument):
        return self._exporter.read_only(array, argument)

    def wrap(self, memory, first, shape, dtype, queue):
        array = super().wrap(memory, first, shape, dtype, queue)
        return array if self._library is None else self._library.from_dlpack(array)


class _DlpackHostKind(_HostKind):
    """Arrays of one class on the host; results come back through its library, or as numpy arrays."""

    def __init__(self, cls: str, library: Any, device: tuple[int, int]):
        self.name = f"{cls} on the host"
        self._library = library
        self._exporter = _Exporter(device)

    def view(self, array, argument):
        pointer, _, shape, strides, dtype, owner, _ = self._exporter.read(array, argument)
        return View(pointer, shape, strides, dtype, default_queue(), owner)

    def read_only(self, array, argument):
        return self._exporter.read_only(array, argument)

    def _as_numpy(self, view):
        return capsule.as_numpy(view.pointer, view.shape, view.strides, view.dtype, view.owner)

    def _bytes(self, view):
        typestr = f"u{itemsize(view.dtype)}"
        array = capsule.as_numpy(view.pointer, view.shape, view.strides, typestr, view.owner, read_only=True)
        return _contiguous_bytes(array)

    def wrap(self, memory, first, shape, dtype, queue):
        array = _result_on_host(memory, first, shape, dtype, queue)
        return array if self._library is None else self._library.from_dlpack(array)


class _TorchKinds(Kind):
    """torch.Tensor: one kind for each device."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._kinds: dict[Any, Kind] = {}

    def of(self, array, argument):
        device = array.device
        kind = self._kinds.get(device)
        if kind is None:
            if device.type == "cpu":
                kind = _TorchHostKind(self._torch)
            elif device.type == "xpu":
                kind = _TorchXpuKind(self._torch, device, argument)
            else:
                remedy = "Such a tensor has no data: create it on one of these"
                if device.type != "meta":
                    remedy = f"Copy it, for example with {argument}.cpu()"
                raise BufferError(
                    f"`{argument}` must be on a SYCL device or on the host: expected a torch device xpu or cpu, got "
                    f"{device}. {remedy}"
                )
            self._kinds[device] = kind
        return kind


class _TorchHostKind(_HostKind):
    name = "torch.Tensor on cpu"
    conversion = "{name}.to(torch.{dtype})"

    def __init__(self, torch: Any):
        self._torch = torch
        self._dtypes = _torch_dtypes(torch)

    def view(self, array, argument):
        _check_strided(array, argument, self._torch)
        if array.is_neg():
            array = array.resolve_neg()
        dtype = self._dtypes.get(array.dtype) or str(array.dtype)
        return View(0, tuple(array.shape), array.stride(), dtype, default_queue(), array)

    def address(self, view):
        return view.owner.data_ptr()

    def read_only(self, array, argument):
        return False

    def _as_numpy(self, view):
        return view.owner.detach().numpy()

    def _bytes(self, view):
        return view.owner.detach().contiguous().view(-1).view(self._torch.uint8).numpy()

    def wrap(self, memory, first, shape, dtype, queue):
        return self._torch.from_numpy(_result_on_host(memory, first, shape, dtype, queue))


class _TorchMemory:
    """Memory that torch allocated."""

    def __init__(self, tensor: Any):
        self.tensor = tensor
        self._pointer = tensor.data_ptr()


class _TorchXpuKind(Kind):
    """torch's tensors on one Intel GPU, read in place on torch's current stream.

    Streams are in-order queues, and torch's allocator gives memory to the work of one stream in its order, so results
    are memory of torch's and nothing waits.
    """

    conversion = "{name}.to(torch.{dtype})"
    copies = True

    def __init__(self, torch: Any, device: Any, argument: str):
        problem = runtime.torch_mismatch(torch)
        if problem is not None:
            raise BufferError(f"`{argument}` must be of a torch that shares dpctl's SYCL runtime: {problem}")
        self.name = f"torch.Tensor on {device}"
        self._torch = torch
        self._device = device
        self._to_dlpack = torch.utils.dlpack.to_dlpack
        self._queue: dpctl.SyclQueue | None = None

    def _current_queue(self) -> dpctl.SyclQueue:
        address = self._torch.xpu.current_stream(self._device).sycl_queue
        queue = self._queue
        if queue is None or not _same_queue(address, queue.addressof_ref()):
            # dpctl copies the queue that a capsule points to. The capsule has no destructor: the original is torch's.
            queue = self._queue = dpctl.SyclQueue(_new_capsule(address, b"SyclQueueRef", None))
        return queue

    def view(self, array, argument):
        _check_strided(array, argument, self._torch)
        tensor = capsule.read(self._to_dlpack(array), argument)
        if tensor.device[0] != KDL_ONEAPI:
            raise BufferError(
                f"`{argument}` must be on a SYCL device: expected DLPack's device type {KDL_ONEAPI}, got "
                f"{tensor.device[0]}"
            )
        if 0 in tensor.shape:
            return View(0, tensor.shape, tensor.strides, tensor.dtype, None, array)
        queue = self._current_queue()
        if not _usm_type(tensor.pointer, queue.sycl_context.addressof_ref()):
            raise _out_of_reach(tensor.pointer, queue, argument)
        return View(tensor.pointer, tensor.shape, tensor.strides, tensor.dtype, queue, array)

    def copy(self, view):
        return self.view(view.owner.contiguous(), "copy")

    def read_only(self, array, argument):
        return False

    def results(self, queue):
        return self

    def allocate(self, nbytes: int) -> tuple[_TorchMemory, int]:
        return _TorchMemory(self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)), 0

    def wrap(self, memory, first, shape, dtype, queue):
        itemsize = int(dtype[1:])
        part = memory.tensor[first * itemsize : (first + math.prod(shape)) * itemsize]
        return part.view(getattr(self._torch, DTYPE_NAMES[dtype])).view(shape)


def _torch_dtypes(torch: Any) -> dict[Any, str]:
    names = {**DTYPE_NAMES, "bfloat16": "bfloat16"}
    return {getattr(torch, name): code for code, name in names.items() if hasattr(torch, name)}


def _check_strided(tensor: Any, argument: str, torch: Any) -> None:
    if tensor.layout is not torch.strided:
        raise BufferError(
            f"`{argument}` must be a dense tensor: expected torch.strided, got {tensor.layout}. "
            f"Convert it, for example with {argument}.to_dense()"
        )


def _out_of_reach(pointer: int, queue: dpctl.SyclQueue, argument: str) -> BufferError:
    """Raised where a queue's context does not know the memory: kernels that touch it could take the process down."""
    return BufferError(
        f"`{argument}` must be USM memory of the default context of {queue.sycl_device.name.strip()}: "
        f"got {pointer:#x}, which is not. Allocate it on the library's default queue"
    )


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


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else int(dtype[1:])


def _contiguous_bytes(array: Any) -> Any:
    """The elements of a numpy array in C order, as bytes."""
    import numpy

    return numpy.ascontiguousarray(array).reshape(-1).view("u1")


def _result_on_host(memory: Any, first: int, shape: tuple[int, ...], dtype: str, queue: dpctl.SyclQueue) -> Any:
    """A numpy array of results that begin `first` elements into `memory`, copied to the host."""
    import numpy

    if 0 in shape:
        return numpy.empty(shape, dtype)
    part = as_usm_memory(_OBJECT_KIND.wrap(memory, first, shape, dtype, queue))
    return part.copy_to_host().view(dtype).reshape(shape)


_OBJECT_KIND = Kind()
_kinds: dict[type, Kind] = {UsmArray: _OwnKind()}


def kind_of(array: Any, argument: str) -> Kind:
    """The kind of an array, by its class and, where a class has arrays on several devices, by its device.

    Raises
    ------
    TypeError
        If it is none that is known here.
    BufferError
        If it is on a device that SYCL does not reach.
    """
    cls = type(array)
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _find_kind(array, argument)
    return kind.of(array, argument)


def is_array(value: Any) -> bool:
    """Whether a value is an array rather than a number; libraries' scalars, which have no axes, are numbers."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return hasattr(value, "__sycl_usm_array_interface__") or hasattr(value, "__dlpack__")
    return bool(shape)


@functools.cache
def _kind(kind: Callable[..., Kind], *modules: Any) -> Kind:
    """One kind for all the classes that a library derives from its array."""
    return kind(*modules)


def _find_kind(array: Any, argument: str) -> Kind:
    loaded = sys.modules.get
    if isinstance(array, UsmArray):
        return _kinds[UsmArray]
    for name in ("dpctl.tensor", "dpnp.tensor"):
        tensor = loaded(name)
        if tensor is None:
            continue
        if isinstance(array, tensor.usm_ndarray):
            return _kind(_TensorKind, tensor)
        dpnp = loaded("dpnp")
        if dpnp is not None and isinstance(array, dpnp.ndarray) and isinstance(array.get_array(), tensor.usm_ndarray):
            return _kind(_DpnpKind, dpnp, tensor)
    numpy = loaded("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        masked = loaded("numpy.ma")
        if masked is not None and isinstance(array, masked.MaskedArray):
            raise TypeError(f"`{argument}` must not be masked: a kernel reads all elements. Pass {argument}.filled(0)")
        return _kind(_NumpyKind)
    torch = loaded("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _kind(_TorchKinds, torch)
    if hasattr(array, "__sycl_usm_array_interface__"):
        return _OBJECT_KIND
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _DlpackKinds(type(array))
    raise TypeError(
        f"`{argument}` must be an array: expected one of dpnp, dpctl.tensor, dpnp.tensor, torch or numpy, or an object "
        f"with `__sycl_usm_array_interface__` or `__dlpack__`, got {type(array).__name__}. "
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
        except (dpctl.SyclDeviceCreationError, dpctl.SyclQueueCreationError) as error:
            raise RuntimeError(
                "no SYCL device was found. Run `specverify-dpex doctor` to see what is missing, or install the CPU "
                "device: pip install 'specverify-dpex[cpu]'"
            ) from error
    return _default_queue
