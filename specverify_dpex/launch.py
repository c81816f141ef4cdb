"""Programs, launches and their order.

Kernels are launched through dpctl's C interface, which takes plain addresses: `SyclQueue.submit_async` wants a memory
object for each pointer, and building one for memory that it did not allocate costs more than the launch.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections import deque
from typing import Any

import dpctl
import dpctl._sycl_queue
import dpctl.program
from dpctl import event_status_type

from specverify_dpex.spirv import MANIFEST, MODULE_FOLDER

try:
    from dpctl.utils import SequentialOrderManager
except ImportError:  # dpctl 0.17: its tensor functions wait for their own work, so launches here do too
    SequentialOrderManager: Any = None  # type: ignore[no-redef]

# A symbol looked up through an extension module that links to libDPCTLSyclInterface is the one that dpctl itself uses;
# opening the library by a name of its own could load a second copy.
_dpctl = ctypes.CDLL(dpctl._sycl_queue.__file__)

_submit = _dpctl.DPCTLQueue_SubmitNDRange
_submit.restype = ctypes.c_void_p
_submit.argtypes = [
    ctypes.c_void_p,  # kernel
    ctypes.c_void_p,  # queue
    ctypes.c_void_p,  # arguments: the address itself for a pointer, the address of the value for a scalar
    ctypes.c_void_p,  # their types
    ctypes.c_size_t,
    ctypes.c_void_p,  # global range
    ctypes.c_void_p,  # local range
    ctypes.c_size_t,  # dimensions
    ctypes.c_void_p,  # events to wait for
    ctypes.c_size_t,
]
_delete_event = _dpctl.DPCTLEvent_Delete
_delete_event.restype = None
_delete_event.argtypes = [ctypes.c_void_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_kernel_arg_type = dpctl._sycl_queue.kernel_arg_type
_ARGUMENT_CODES = {
    "pointer": _kernel_arg_type.dpctl_void_ptr.value,
    "int64": _kernel_arg_type.dpctl_int64.value,
    "uint64": _kernel_arg_type.dpctl_uint64.value,
}


def from_source() -> bool:
    """Whether SPECVERIFY_DPEX_KERNELS=source asks for kernels.py to be compiled in this process.

    Raises
    ------
    ValueError
        If the variable has another value than "source" or "modules".
    """
    choice = os.environ.get("SPECVERIFY_DPEX_KERNELS") or "modules"
    if choice not in ("modules", "source"):
        raise ValueError(f"`SPECVERIFY_DPEX_KERNELS` must be 'modules' or 'source': got {choice!r}")
    return choice == "source"


class _Modules:
    """The SPIR-V modules and their manifest, read or compiled at the first launch."""

    def __init__(self) -> None:
        self._compiled: dict[str, bytes] = {}
        self._manifest: dict[str, Any] = {}

    def load(self, entry_point: str) -> tuple[bytes, list[str]]:
        """The module of an entry point and the types of its arguments."""
        if not self._manifest:
            if from_source():
                from specverify_dpex.compile import compile_modules

                self._compiled = compile_modules()
            self._manifest = json.loads(self._read(MANIFEST))
        types = [argument["type"] for argument in self._manifest["modules"][entry_point]["arguments"]]
        return self._read(f"{entry_point}.spv"), types

    def _read(self, name: str) -> bytes:
        return self._compiled.get(name) or (MODULE_FOLDER / name).read_bytes()


_modules = _Modules()


class Kernel:
    """One entry point, built for one context and device; launching it is safe from several threads.

    Parameters
    ----------
    queue : dpctl.SyclQueue
        A queue of the context and device.
    entry_point : str
    module : bytes
        The SPIR-V module that has it.
    types : list of str
        The type of each argument: "int64", "uint64", or a pointer's, which ends in "*".
    """

    def __init__(self, queue: dpctl.SyclQueue, entry_point: str, module: bytes, types: list[str]):
        program = dpctl.program.create_program_from_spirv(queue, module, "")
        self.sycl_kernel = program.get_sycl_kernel(entry_point)
        self._reference = self.sycl_kernel.addressof_ref()
        self._pointers = [index for index, type_ in enumerate(types) if type_.endswith("*")]
        self._count = len(types)
        self._values = ctypes.c_int64 * self._count
        self._addresses = ctypes.c_void_p * self._count
        codes = ["pointer" if type_.endswith("*") else type_ for type_ in types]
        self._types = (ctypes.c_int * self._count)(*(_ARGUMENT_CODES[code] for code in codes))
        self._offsets = range(0, 8 * self._count, 8)
        self.max_work_group = self.sycl_kernel.work_group_size

    def launch(
        self,
        queue: dpctl.SyclQueue,
        arguments: tuple[int, ...],
        groups: tuple[int, ...],
        work_group: int,
        events: list[dpctl.SyclEvent],
    ) -> dpctl.SyclEvent:
        """Submit the kernel over a grid of work-groups; the last axis of `groups` varies fastest.

        Parameters
        ----------
        arguments : tuple of int
            Addresses for pointers and values for scalars, in the kernel's order.
        groups : tuple of int
            Work-groups along each axis.
        work_group : int
            Work-items of a work-group, all along the last axis.
        events : list of dpctl.SyclEvent
            What must be complete before it starts.

        Raises
        ------
        RuntimeError
            If the device refuses the launch.
        """
        values = self._values(*arguments)
        start = ctypes.addressof(values)
        addresses = self._addresses(*(start + offset for offset in self._offsets))
        for index in self._pointers:
            addresses[index] = arguments[index] or None
        dimensions = len(groups)
        local = (ctypes.c_size_t * 3)(*(1,) * (dimensions - 1), work_group)
        extent = (ctypes.c_size_t * 3)(*groups[:-1], groups[-1] * work_group)
        waits = (ctypes.c_void_p * len(events))(*(event.addressof_ref() for event in events)) if events else None
        reference = _submit(
            self._reference,
            queue.addressof_ref(),
            addresses,
            self._types,
            self._count,
            extent,
            local,
            dimensions,
            waits,
            len(events),
        )
        if not reference:
            raise RuntimeError(
                f"the device refused a launch of {groups} work-groups of {work_group}: the SYCL runtime's reason is "
                "on the standard error stream. `specverify-dpex doctor` shows the device"
            )
        event = dpctl.SyclEvent(_new_capsule(reference, b"SyclEventRef", None))  # copies the reference
        _delete_event(reference)
        return event


_kernels: dict[tuple[dpctl.SyclContext, dpctl.SyclDevice, str], Kernel] = {}
_build_lock = threading.Lock()


def kernel(queue: dpctl.SyclQueue, entry_point: str) -> Kernel:
    """The kernel for the queue's context and device, built at its first use (about 0.2 s)."""
    key = (queue.sycl_context, queue.sycl_device, entry_point)
    found = _kernels.get(key)
    if found is None:
        with _build_lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = Kernel(queue, entry_point, *_modules.load(entry_point))
    return found


class _InFlight:
    """Memory that launches still use, each with the event that ends its use.

    dpctl frees USM memory as soon as its last reference goes, launch or no launch. Its own way to keep memory, a host
    task for each call, costs as much as the call's kernels. Here references are dropped by the next call, or by a
    thread that looks now and then.
    """

    _PERIOD = 0.05  # seconds: how long memory may outlive its use when no call follows

    def __init__(self) -> None:
        self._held: deque[tuple[dpctl.SyclEvent, list[Any]]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def hold(self, event: dpctl.SyclEvent, memory: list[Any]) -> None:
        self._release()
        self._held.append((event, memory))
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="specverify-dpex-memory", daemon=True)
                self._thread.start()

    def _release(self) -> None:
        """Drop what is done, oldest first; another thread may do so at the same time."""
        held = self._held
        try:
            while held[0][0].execution_status is event_status_type.complete:
                held.popleft()
        except IndexError:
            pass

    def _watch(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(self._PERIOD)
            self._release()
            if not self._held:
                self._wake.clear()
                if self._held:  # held between the look and the clear
                    self._wake.set()


_in_flight = _InFlight()


class Sequence:
    """Launches of one call, each after the one before and after what the queue's libraries have submitted.

    Where dpctl has an order manager, the first launch waits for the events in it and the last is added to it, so that
    dpctl.tensor and dpnp functions that follow wait in turn. The host waits at the end of the `with` block only where
    nothing else keeps the order.

    Parameters
    ----------
    queue : dpctl.SyclQueue
        Where the work runs.
    ordered : bool
        Whether all that touches the arrays is ordered by dpctl's manager.
    memory : list
        What must stay alive until the work is done.
    """

    def __init__(self, queue: dpctl.SyclQueue, ordered: bool, memory: list[Any]):
        self._queue = queue
        self._memory = memory
        self._manager: Any = SequentialOrderManager[queue] if SequentialOrderManager is not None else None
        self._wait = self._manager is None or not (ordered or queue.is_in_order)
        self._events = self._manager.submitted_events if self._manager is not None else []
        self._launched: dpctl.SyclEvent | None = None

    def __enter__(self) -> Sequence:
        return self

    def launch(self, kernel: Kernel, arguments: tuple[int, ...], groups: tuple[int, ...], work_group: int) -> None:
        """Launch with work-groups of this size, or the largest that the device can run of this kernel."""
        work_group = min(work_group, kernel.max_work_group)
        self._launched = kernel.launch(self._queue, arguments, groups, work_group, self._events)
        self._events = [self._launched]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._launched is None:
            return
        if self._wait or error is not None:
            self._launched.wait()
        else:
            _in_flight.hold(self._launched, self._memory)
            self._manager.add_event_pair(self._launched, self._launched)
