"""Programs, launches, scratch and their order.

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
from collections.abc import Sequence
from typing import Any, Callable, TypeVar

import dpctl
import dpctl._sycl_queue
import dpctl.program
from dpctl.memory import MemoryUSMDevice

from specverify_dpex.spirv import KERNELS_CHOICES, KERNELS_VARIABLE, MANIFEST, MODULE_FOLDER

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

_Made = TypeVar("_Made")

_COMPLETE = dpctl.event_status_type.complete

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
    choice = os.environ.get(KERNELS_VARIABLE) or "modules"
    if choice not in KERNELS_CHOICES:
        raise ValueError(f"`{KERNELS_VARIABLE}` must be 'modules' or 'source': got {choice!r}")
    return choice == "source"


class _Modules:
    """The SPIR-V modules and what their manifest says, each read or compiled when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[bytes, list[dict[str, str]]]] = {}
        self._manifest: dict[str, Any] = {}

    def load(self, entry_point: str) -> tuple[bytes, list[dict[str, str]]]:
        """The module of an entry point, and the names and types of its arguments.

        Raises
        ------
        ImportError
            If it is to be compiled and the compiler is missing.
        """
        loaded = self._loaded.get(entry_point)
        if loaded is None:
            loaded = self._compile(entry_point) if from_source() else self._read(entry_point)
            self._loaded[entry_point] = loaded
        return loaded

    def _read(self, entry_point: str) -> tuple[bytes, list[dict[str, str]]]:
        if not self._manifest:
            self._manifest = json.loads((MODULE_FOLDER / MANIFEST).read_bytes())
        arguments = self._manifest["modules"][entry_point]["arguments"]
        return (MODULE_FOLDER / f"{entry_point}.spv").read_bytes(), arguments

    def _compile(self, entry_point: str) -> tuple[bytes, list[dict[str, str]]]:
        try:
            from specverify_dpex.compile import compile_entry_point

            return compile_entry_point(entry_point)
        except ImportError as error:
            raise ImportError(
                f"{KERNELS_VARIABLE}=source compiles the kernels in the process, but their compiler is missing: "
                f"{error}. Install it with pip install 'specverify-dpex[compile]' in an environment of its own, on "
                f"Python 3.9 to 3.11, or unset {KERNELS_VARIABLE}"
            ) from error


_modules = _Modules()


class Kernel:
    """One entry point, built for one context and device.

    Parameters
    ----------
    queue : dpctl.SyclQueue
        A queue of the context and device.
    entry_point : str
    module : bytes
        The SPIR-V module that has it.
    arguments : list of dict
        "name" and "type" of each argument: "int64", "uint64", or a pointer's type, which ends in "*".

    Attributes
    ----------
    lock : threading.Lock
        Held while a launch is submitted. It is not reentrant, so a signal handler must not launch: it may have
        interrupted its own thread in there.
    """

    def __init__(self, queue: dpctl.SyclQueue, entry_point: str, module: bytes, arguments: list[dict[str, str]]):
        program = dpctl.program.create_program_from_spirv(queue, module, "")
        self.sycl_kernel = program.get_sycl_kernel(entry_point)
        self.max_work_group = self.sycl_kernel.work_group_size
        self.arguments = arguments
        self.lock = threading.Lock()  # OpenCL's kernel objects hold the arguments of one launch at a time


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
                _initialise_order_manager(queue)
                found = _kernels[key] = Kernel(queue, entry_point, *_modules.load(entry_point))
    return found


def _initialise_order_manager(queue: dpctl.SyclQueue) -> None:
    """Use dpctl's manager once, before several threads can: its first use in a process is not safe from two at once.

    It initialises a C++ static and lets go of the GIL meanwhile; another thread then waits for it with the GIL held.
    """
    if SequentialOrderManager is not None:
        done = dpctl.SyclEvent()
        SequentialOrderManager[queue].add_event_pair(done, done)


class Launch:
    """A launch with all its arguments bound; what changes from call to call is bound anew when it is submitted.

    Submitting is safe from several threads.

    Parameters
    ----------
    kernel : Kernel
    queue : dpctl.SyclQueue
    arguments : dict of str to int
        The value of each of the kernel's scalars and the address of each of its pointers, by name.
    groups : tuple of int
        Work-groups along each axis; the last varies fastest.
    work_group : int
        Work-items of a work-group, all along the last axis.
    varying : tuple of str
        Names of the arguments that `submit` is given.
    """

    def __init__(
        self,
        kernel: Kernel,
        queue: dpctl.SyclQueue,
        arguments: dict[str, int],
        groups: tuple[int, ...],
        work_group: int,
        varying: tuple[str, ...] = (),
    ):
        self._kernel = kernel
        self._queue = queue
        self._groups = groups
        self._work_group = work_group
        count = len(kernel.arguments)
        names = [argument["name"] for argument in kernel.arguments]
        types = ["pointer" if argument["type"].endswith("*") else argument["type"] for argument in kernel.arguments]
        self._values = (ctypes.c_int64 * count)()
        self._addresses = (ctypes.c_void_p * count)()
        codes = (ctypes.c_int * count)(*(_ARGUMENT_CODES[type_] for type_ in types))
        for index, (name, type_) in enumerate(zip(names, types)):
            if type_ == "pointer":
                self._addresses[index] = arguments.get(name) or None
            else:
                self._values[index] = arguments.get(name, 0)
                self._addresses[index] = ctypes.addressof(self._values) + 8 * index
        # Where `submit` puts each varying argument: a pointer among the addresses, a scalar among the values.
        indices = [names.index(name) for name in varying]
        self._slots = [(self._addresses if types[index] == "pointer" else self._values, index) for index in indices]
        dimensions = len(groups)
        self._static = (
            self._addresses,
            codes,
            count,
            (ctypes.c_size_t * 3)(*groups[:-1], groups[-1] * work_group),
            (ctypes.c_size_t * 3)(*(1,) * (dimensions - 1), work_group),
            dimensions,
        )
        self._references = (kernel.sycl_kernel.addressof_ref(), queue.addressof_ref())

    def submit(self, events: Sequence[dpctl.SyclEvent], *varying: int) -> dpctl.SyclEvent:
        """Submit the kernel, to start when `events` are complete.

        Raises
        ------
        RuntimeError
            If the device refuses the launch.
        """
        waits = (ctypes.c_void_p * len(events))(*(event.addressof_ref() for event in events)) if events else None
        reference = None
        try:
            with self._kernel.lock:
                for (slots, index), value in zip(self._slots, varying):
                    slots[index] = value
                reference = _submit(*self._references, *self._static, waits, len(events))
            if not reference:
                raise RuntimeError(
                    f"the device refused a launch of {self._groups} work-groups of {self._work_group}: the SYCL "
                    "runtime's reason is on the standard error stream. `specverify-dpex doctor` shows the device"
                )
            return dpctl.SyclEvent(_new_capsule(reference, b"SyclEventRef", None))  # copies the reference
        finally:
            if reference:  # interrupted or not
                _delete_event(reference)


def remembered(known: dict[Any, _Made], most: int, signature: Any, make: Callable[[], _Made]) -> _Made:
    """What `make` gave for a signature; all are forgotten when there are too many."""
    found = known.get(signature)
    if found is None:
        if len(known) >= most:
            known.clear()
        found = known[signature] = make()
    return found


class Scratch:
    """Blocks of memory that launches need while they run: zero at first, and left zero where the kernel says so.

    A block is given to one launch at a time and comes back when that is complete.

    Parameters
    ----------
    queue : dpctl.SyclQueue
    nbytes : int
        Bytes of a block.
    """

    def __init__(self, queue: dpctl.SyclQueue, nbytes: int):
        self._queue = queue
        self._nbytes = nbytes
        self._free: list[MemoryUSMDevice] = []

    def take(self) -> MemoryUSMDevice:
        try:
            return self._free.pop()
        except IndexError:
            # On a queue of its own: on the caller's, clearing it would wait for the work that is there already.
            queue = dpctl.SyclQueue(self._queue.sycl_context, self._queue.sycl_device)
            memory = MemoryUSMDevice(self._nbytes, queue=queue)
            memory.copy_from_host(bytearray(self._nbytes))
            return memory

    @property
    def kept(self) -> int:
        """Bytes of the blocks that no launch uses."""
        return len(self._free) * self._nbytes

    def give_back(self, block: MemoryUSMDevice) -> None:
        self._free.append(block)


class Arena:
    """Memory for results, cut from larger blocks.

    Allocating and freeing USM memory costs more than a launch, and some runtimes wait for the device when they free. A
    block lives as long as any array over a part of it.
    """

    _BLOCK = 4096  # bytes: libraries copy the whole block to the host to read one array in it
    _ALIGNMENT = 64  # bytes: a cache line, so that launches at the same time share none

    def __init__(self, queue: dpctl.SyclQueue):
        self._queue = queue
        self._lock = threading.Lock()
        self._memory: MemoryUSMDevice | None = None
        self._next = 0

    def allocate(self, nbytes: int) -> tuple[MemoryUSMDevice, int]:
        """A block, and where in it `nbytes` bytes are free."""
        with self._lock:
            memory, start = self._memory, self._next
            if memory is None or start + nbytes > memory.nbytes:
                memory, start = MemoryUSMDevice(max(nbytes, self._BLOCK), queue=self._queue), 0
                self._memory = memory
            self._next = -(-(start + nbytes) // self._ALIGNMENT) * self._ALIGNMENT
        return memory, start


class _InFlight:
    """What launches still use, each with the event that ends its use.

    dpctl frees USM memory as soon as its last reference goes, launch or no launch. Its own way to keep memory, a host
    task for each call, costs as much as the call's kernel. Here references are dropped by the next call, or by a
    thread that looks now and then.
    """

    _PERIOD = 0.05  # seconds: how long memory may outlive its use when no call follows

    def __init__(self) -> None:
        self._held: deque[tuple[dpctl.SyclEvent, object, Scratch | None, MemoryUSMDevice | None]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._releasing = threading.RLock()  # memory that is dropped may run code that calls verify

    def hold(
        self, event: dpctl.SyclEvent, memory: object, scratch: Scratch | None, block: MemoryUSMDevice | None
    ) -> None:
        """Keep `memory` alive until `event` is complete, and give the block of scratch back then."""
        self.release()
        self._held.append((event, memory, scratch, block))
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="specverify-dpex-memory", daemon=True)
                self._thread.start()

    def release(self) -> None:
        """Drop what is done, oldest first, up to the first that is not: a done one behind it waits for a later look."""
        with self._releasing:
            # An entry goes only when it is done, so that an interrupt in between loses nothing that is in use.
            while self._held and self._held[0][0].execution_status is _COMPLETE:
                _, _, scratch, block = self._held.popleft()
                if scratch is not None and block is not None:
                    scratch.give_back(block)

    def _watch(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(self._PERIOD)
            self.release()
            if not self._held:
                self._wake.clear()
                if self._held:  # held between the look and the clear
                    self._wake.set()


in_flight = _InFlight()


def awaited(queue: dpctl.SyclQueue, events: tuple[dpctl.SyclEvent, ...]) -> tuple[dpctl.SyclEvent, ...]:
    """A caller's events as launches on the queue are to be given them.

    The SYCL runtime of dpctl 0.17 starts a kernel on an in-order queue before events of other queues
    (https://github.com/intel/llvm/pull/15412): there the host waits for them.
    """
    if SequentialOrderManager is None and queue.is_in_order and events:
        dpctl.SyclEvent.wait_for(list(events))
        return ()
    return events


def run(
    launch: Launch,
    queue: dpctl.SyclQueue,
    ordered: bool,
    memory: object,
    scratch: Scratch | None = None,
    *varying: int,
    events: Sequence[dpctl.SyclEvent] = (),
    by_events: bool = False,
) -> dpctl.SyclEvent:
    """Launch with a block of `scratch`, where there is one, and `varying`, in order with the queue's other work.

    Where dpctl has an order manager, the launch waits for the events in it and is added to it, so that dpctl.tensor
    and dpnp functions that follow wait in turn. The host waits only where nothing else keeps the order.

    Parameters
    ----------
    ordered : bool
        Whether all that touches the arrays is ordered by dpctl's manager.
    memory : object
        What must stay alive until the work is done.
    events : sequence of dpctl.SyclEvent
        What the launch waits for besides.
    by_events : bool
        Whether the caller keeps the order by events, so that the host need not wait in any case.

    Returns
    -------
    dpctl.SyclEvent
        Complete when the work is.
    """
    manager = SequentialOrderManager[queue] if SequentialOrderManager is not None else None
    block = scratch.take() if scratch is not None else None
    try:
        if manager is not None:
            events = [*manager.submitted_events, *events] if events else manager.submitted_events
        event = launch.submit(events, *varying) if block is None else launch.submit(events, block._pointer, *varying)
        if by_events or (manager is not None and (ordered or queue.is_in_order)):
            in_flight.hold(event, memory, scratch, block)
            if manager is not None:
                manager.add_event_pair(event, event)
        else:
            event.wait()
            if scratch is not None and block is not None:
                scratch.give_back(block)
        return event
    except BaseException:
        queue.wait()  # interrupted anywhere in between: what was launched may still use the memory
        raise
