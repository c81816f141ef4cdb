"""DLPack capsules: any library's memory read in place, and USM memory handed to any library.

Other libraries' importers and exporters serve where they can: numpy writes the capsules below, dpctl.tensor and dpnp
write those of their own results, and a result reaches any other library through its own `from_dlpack`. Written here
with ctypes is what they lack:

- Reading a kDLOneAPI capsule. The importers of dpctl.tensor and dpnp.tensor put an array on its device's cached queue,
  where torch's arrays belong on torch's stream; they take neither bfloat16 nor, before dpctl 0.18, all of the
  versioned protocol; they take 70 to 220 µs; and dpctl 0.22 has none unless dpnp is there.
- The device in a capsule of USM memory. numpy knows kDLCPU alone, so the capsule that it writes is given another
  device. Its deleters are compiled: one written in Python could be called while an exception is under way, or after
  the interpreter is gone, and would break both.

Layouts are those of `dlpack.h` 1.x on a 64-bit machine.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from typing import Any, NamedTuple

KDL_CPU = 1
KDL_ONEAPI = 14

VERSION = (1, 0)
"""The newest version that is asked for; any 1.x is read."""

_LEGACY = b"dltensor"
_VERSIONED = b"dltensor_versioned"
_USED_LEGACY = b"used_dltensor"
_USED_VERSIONED = b"used_dltensor_versioned"

# A tensor: data; device type and number; axes; element type; shape; strides; byte offset. In a legacy capsule the
# producer's context and deleter follow; in a versioned one version, context, deleter and flags go before.
_TENSOR = "QIIiIQQQ"
_Legacy = struct.Struct(f"={_TENSOR}QQ")
_Versioned = struct.Struct(f"=IIQQQ{_TENSOR}")
_LegacyBytes = ctypes.c_char * _Legacy.size
_VersionedBytes = ctypes.c_char * _Versioned.size
_read_legacy = _Legacy.unpack_from
_read_versioned = _Versioned.unpack_from
_DEVICE_AT = {_LEGACY: 8, _VERSIONED: 40}

_MOST_AXES = 64  # no library has arrays of more
_Extents = tuple(ctypes.c_int64 * count for count in range(2 * _MOST_AXES + 1))
_read_extents = tuple(struct.Struct(f"={count}q").unpack_from for count in range(2 * _MOST_AXES + 1))

_READ_ONLY = 1  # of the flags
_DTYPES = {
    code | bits << 8 | 1 << 16: name  # one lane
    for (code, bits), name in {
        (0, 32): "i4",
        (0, 64): "i8",
        (1, 16): "u2",
        (1, 32): "u4",
        (1, 64): "u8",
        (2, 16): "f2",
        (2, 32): "f4",
        (2, 64): "f8",
        (4, 16): "bfloat16",
        (6, 8): "b1",
    }.items()
}
"""Element types as `dlpack.View` names them; others go by their numbers."""

# Without argument types, for calls with a py_object and bytes that live on: these two ctypes takes as they are.
_get_name = ctypes.pythonapi["PyCapsule_GetName"]
_get_name.restype = ctypes.c_char_p
_set_name = ctypes.pythonapi["PyCapsule_SetName"]
_get_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
_get_pointer.restype = ctypes.c_void_p
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # keeps the GIL, which some producers' deleters count on


class _Deleters(dict[int, Any]):
    """Producers' deleters by address: a library has one or two."""

    def __missing__(self, address: int) -> Any:
        deleter = self[address] = _Deleter(address)
        return deleter


_deleters = _Deleters({0: None})


class Tensor(NamedTuple):
    """What a capsule held."""

    pointer: int  # address of element (0, 0, …)
    device: tuple[int, int]  # type and number
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str  # as in dlpack.View
    owner: Any  # keeps the memory alive
    read_only: bool  # False in a legacy capsule, which cannot say


_new = tuple.__new__  # makes a Tensor in half the time of its own constructor, which is a function in Python


class _Managed:
    """A consumed tensor, which its producer gets back when nothing here uses it any more."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: int):
        self._address = address
        self._deleter = _deleters[deleter]

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


def read(capsule: Any, argument: str) -> Tensor:
    """Consume a capsule, legacy or versioned; the tensor's memory stays valid as long as its `owner`.

    Raises
    ------
    BufferError
        If it is no such capsule, was consumed before, or is of a version with another layout.
    """
    held = ctypes.py_object(capsule)
    try:
        address = _get_pointer(held, _VERSIONED)
    except ValueError:
        address = _legacy_pointer(capsule, argument)
        tensor = _read_legacy(_LegacyBytes.from_address(address))
        data, device, number, axes, dtype, shape_at, strides_at, offset, _, deleter = tensor
        _set_name(held, _USED_LEGACY)
        owner, flags = _Managed(address, deleter), 0
    else:
        tensor = _read_versioned(_VersionedBytes.from_address(address))
        major, minor, _, deleter, flags, data, device, number, axes, dtype, shape_at, strides_at, offset = tensor
        _set_name(held, _USED_VERSIONED)  # from here on the tensor is ours to delete
        owner = _Managed(address, deleter)
        if major != VERSION[0]:
            raise BufferError(
                f"`{argument}` must give a DLPack capsule of version {VERSION[0]}.x: got {major}.{minor}. "
                "Its library was asked for an older one"
            )
    if strides_at and strides_at == shape_at + 8 * axes:  # as most libraries lay them out: one read for both
        extents = _read_extents[2 * axes](_Extents[2 * axes].from_address(shape_at))
        shape, strides = extents[:axes], extents[axes:]
    else:
        shape = _extents(shape_at, axes) if shape_at else ()
        strides = _extents(strides_at, axes) if strides_at else contiguous_strides(shape)
    name = _DTYPES.get(dtype) or f"DLPack's {dtype:#x}"
    return _new(Tensor, (data + offset, (device, number), shape, strides, name, owner, flags & _READ_ONLY != 0))


def _extents(address: int, count: int) -> tuple[int, ...]:
    return _read_extents[count](_Extents[count].from_address(address))


def _legacy_pointer(capsule: Any, argument: str) -> int:
    """The address in a capsule that is not a versioned one."""
    held = ctypes.py_object(capsule)
    try:
        name = _get_name(held)
    except ValueError:
        raise BufferError(f"`{argument}` must give a DLPack capsule: got {type(capsule).__name__}") from None
    if name != _LEGACY:
        problem = "one that was consumed before" if name in (_USED_LEGACY, _USED_VERSIONED) else repr(name)
        raise BufferError(
            f"`{argument}` must give a new DLPack capsule for each use: got {problem}. Export the array again"
        ) from None
    address: int = _get_pointer(held, _LEGACY)
    return address


def export(array: Any, versioned: bool) -> Any:
    """Have the library of `array` export it, by the newest version of the protocol that is wanted and that it has."""
    if versioned:
        try:
            return array.__dlpack__(max_version=VERSION)
        except TypeError:  # numpy before 2.1, and others that know the legacy protocol only
            pass
    return array.__dlpack__()


def rename_device(capsule: Any, device: tuple[int, int]) -> None:
    """Say that the memory of an unconsumed capsule is on another device than its exporter wrote."""
    held = ctypes.py_object(capsule)
    try:
        address = _get_pointer(held, _VERSIONED) + _DEVICE_AT[_VERSIONED]
    except ValueError:
        address = _get_pointer(held, _LEGACY) + _DEVICE_AT[_LEGACY]
    ctypes.c_uint64.from_address(address).value = device[0] | device[1] << 32


class _Memory:
    """Memory that numpy takes without looking at it."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, interface: dict[str, Any], owner: Any):
        self.__array_interface__ = interface
        self._owner = owner


def as_numpy(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str, owner: Any, *, read_only: bool = False
) -> Any:
    """A numpy array over memory of the host or of a device, whose elements are not touched; it keeps `owner` alive.

    Raises
    ------
    BufferError
        If there are elements but no memory.
    """
    import numpy  # dpctl has loaded it already

    itemsize = int(typestr[1:])
    if 0 in shape:
        return numpy.empty(shape, typestr)
    if not pointer:
        raise BufferError(f"an array of shape {shape} must have memory: got a null pointer")
    interface = {
        "version": 3,
        "data": (pointer, read_only),
        "shape": shape,
        "strides": tuple(stride * itemsize for stride in strides),
        "typestr": "<" + typestr,
    }
    return numpy.asarray(_Memory(interface, owner))


@functools.lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    # int: numpy's integers look up the same entry.
    return tuple(int(math.prod(shape[axis + 1 :])) for axis in range(len(shape)))
