"""Arrays of any library <-> views of USM memory, on one queue per call.

A kind of array knows two things: how one of its arrays is seen as memory that a kernel can read, and how results in USM
memory become an array of its own. Other libraries' classes are found among the modules that the caller has loaded;
none is imported here. What offers `__sycl_usm_array_interface__` is read by that, which costs a tenth of DLPack; for
everything else there is DLPack, whose capsules `specverify_dpex.capsule` reads and writes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import dpctl
import dpctl._sycl_queue
from dpctl._sycl_queue_manager import get_device_cached_queue
from dpctl.memory import MemoryUSMDevice, as_usm_memory

from specverify_dpex import capsule, launch, runtime
from specverify_dpex.capsule import KDL_CPU, KDL_ONEAPI, contiguous_strides
from specverify_dpex.usm_array import DTYPE_NAMES, UsmArray, default_queue, result_on_host

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
        return UsmArray._over(memory, first, shape, dtype, queue)


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
        self._as_numpy(view)[...] = result_on_host(memory, first, view.shape, view.dtype, view.queue)

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
        return result_on_host(memory, first, shape, dtype, queue)


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
        array = result_on_host(memory, first, shape, dtype, queue)
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
        return self._torch.from_numpy(result_on_host(memory, first, shape, dtype, queue))


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


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else int(dtype[1:])


def _contiguous_bytes(array: Any) -> Any:
    """The elements of a numpy array in C order, as bytes."""
    import numpy

    return numpy.ascontiguousarray(array).reshape(-1).view("u1")


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
