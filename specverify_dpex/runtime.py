"""Makes the SYCL runtime and the OpenCL CPU device findable, straight after pip install.

The wheels leave two gaps. Those of dpctl 0.17 do not say where their libraries are ("libintlc.so.5: cannot
open shared object file"), and intel-opencl-rt registers its CPU device under a path of the machine that built
it. `prepare` closes both inside this process; it touches nothing on disk and nothing that the user has set.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NamedTuple


class Stack(NamedTuple):
    """Releases built against the same SYCL runtime: they can share a process and its memory."""

    oneapi: str
    dpctl: str
    dpnp: str
    torch: str


STACKS: Mapping[int, Stack] = {  # by the N of libsycl.so.N
    7: Stack(oneapi="2024.2", dpctl="0.17", dpnp="0.15", torch="2.5"),
    8: Stack(oneapi="2025", dpctl="0.18 to 0.21", dpnp="0.16 to 0.19", torch="2.6 to 2.12"),
    9: Stack(oneapi="2026", dpctl="0.22", dpnp="0.20", torch="2.13"),
}


class Preparation(NamedTuple):
    """What `prepare` did to this process."""

    library_dir: str | None = None
    """The folder with the SYCL runtime of dpctl's environment; None where there is none."""

    preloaded: tuple[str, ...] = ()
    """Libraries loaded because dpctl's own search path does not lead to them."""

    icd_filenames: str | None = None
    """The value given to OCL_ICD_FILENAMES; None where it was not needed or the user decides."""

    dpctl_came_first: bool = False
    """dpctl was imported before this package; what it had looked up by then stays as it is."""

    errors: tuple[str, ...] = ()


_prepared: Preparation | None = None
_lock = threading.Lock()


def prepare() -> Preparation:
    """Make dpctl importable and the OpenCL CPU device visible, where that takes anything.

    Runs once in a process, before dpctl is imported; later calls return what the first one did. Never raises,
    and does nothing except on Linux, where the wheels need it.
    """
    global _prepared
    with _lock:
        if _prepared is None:
            try:
                _prepared = _prepare()
            except Exception as error:  # importing must not fail over this; the doctor shows it
                _prepared = Preparation(errors=(f"{type(error).__name__}: {error}",))
        return _prepared


def _prepare() -> Preparation:
    done = Preparation(dpctl_came_first="dpctl" in sys.modules)
    dpctl_dir = package_dir("dpctl")
    if not sys.platform.startswith("linux") or dpctl_dir is None:
        return done
    library_dir = _library_dir(dpctl_dir)
    if library_dir is None:
        return done
    done = done._replace(library_dir=library_dir, icd_filenames=_cpu_driver_to_register(library_dir))

    if done.icd_filenames is not None:
        # The loader in the same folder adds it to the drivers in /etc/OpenCL/vendors, so no GPU is hidden.
        os.environ["OCL_ICD_FILENAMES"] = done.icd_filenames

    if done.dpctl_came_first or _finds_by_itself(dpctl_dir, library_dir):
        return done
    paths = _to_load(_dpctl_libraries(dpctl_dir), library_dir)
    errors = {path: _load(path) for path in paths}
    sys.meta_path.insert(0, _MklForDpnp(library_dir))
    return done._replace(
        preloaded=tuple(path for path, error in errors.items() if error is None),
        errors=tuple(error for error in errors.values() if error is not None),
    )


# --------------------------------------------------------------------------------------------------
# Where things are


def package_dir(name: str) -> str | None:
    """The folder of an installed package, without importing it."""
    module = sys.modules.get(name)
    spec = PathFinder.find_spec(name) if module is None else module.__spec__
    locations = spec.submodule_search_locations if spec is not None else None
    return os.path.abspath(next(iter(locations))) if locations else None


def needed_sycl(library: str) -> int:
    """N of the libsycl.so.N that a library asks for, which the file holds as a plain string; 0 if none."""
    try:
        with open(library, "rb") as file:
            match = re.search(rb"\0libsycl\.so\.(\d+)\0", file.read())
    except OSError:
        return 0
    return int(match.group(1)) if match else 0


def torch_sycl(torch_dir: str) -> int:
    """N of the libsycl.so.N that a build of torch needs; 0 where it has no XPU part."""
    return needed_sycl(os.path.join(torch_dir, "lib", "libc10_xpu.so"))


def matching(numbers: Iterable[int]) -> str:
    """The releases that go together, for each of these SYCL runtimes."""
    stacks = [STACKS[number] for number in numbers if number in STACKS]
    return ", ".join(f"torch {s.torch} (XPU) goes with dpctl {s.dpctl} and dpnp {s.dpnp}" for s in stacks)


def torch_mismatch(torch: Any) -> str | None:
    """What is wrong where this torch and dpctl need different SYCL runtimes, and what to do; None where nothing is."""
    dpctl = sys.modules["dpctl"]
    theirs = torch_sycl(os.path.dirname(torch.__file__))
    ours = needed_sycl(dpctl_interface(os.path.dirname(str(dpctl.__file__))))
    if not theirs or not ours or theirs == ours:
        return None
    return (
        f"torch {torch.__version__} brings libsycl.so.{theirs}, while dpctl {getattr(dpctl, '__version__', '')} needs "
        f"libsycl.so.{ours}, and memory of one is invalid in the other. Install a matching pair: "
        f"{matching((theirs, ours))}"
    )


def dpctl_interface(dpctl_dir: str) -> str:
    """dpctl's own library, through which all its modules reach SYCL."""
    return os.path.join(dpctl_dir, "libDPCTLSyclInterface.so")


def _library_dir(dpctl_dir: str) -> str | None:
    """The folder into which pip put the SYCL runtime of dpctl's environment."""
    for folder in _usual_library_dirs(dpctl_dir):
        if any(os.path.exists(os.path.join(folder, f"libsycl.so.{number}")) for number in STACKS):
            return folder
    return _library_dir_from_metadata()


def _usual_library_dirs(dpctl_dir: str) -> Iterator[str]:
    # <root>/lib/python3.X/site-packages/dpctl: in virtual environments, user installs, conda and /usr/local.
    yield os.path.join(_ancestor(dpctl_dir, 4), "lib")
    yield os.path.join(sys.prefix, "lib")
    site = sys.modules.get("site")
    if site is not None and getattr(site, "ENABLE_USER_SITE", False):
        yield os.path.join(site.getuserbase(), "lib")


def _ancestor(path: str, levels: int) -> str:
    return os.path.realpath(os.path.join(path, *[os.pardir] * levels))


def _library_dir_from_metadata() -> str | None:
    """As `_library_dir`, from what pip recorded: right for any layout, but takes tens of milliseconds."""
    from importlib import metadata

    for name in ("intel-sycl-rt", "dpcpp-cpp-rt"):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            path = os.path.realpath(str(file.locate()))
            if re.fullmatch(r"libsycl\.so\.\d+", file.name) and os.path.exists(path):
                return os.path.dirname(path)
    return None


# --------------------------------------------------------------------------------------------------
# The OpenCL CPU device


def _cpu_driver_to_register(library_dir: str) -> str | None:
    """The OpenCL CPU driver of this environment, unless the user or the system has chosen."""
    if "OCL_ICD_FILENAMES" in os.environ or "OCL_ICD_VENDORS" in os.environ:
        return None
    driver = os.path.join(library_dir, "libintelocl.so")
    return driver if os.path.exists(driver) and not _system_registers("libintelocl.so") else None


def _system_registers(driver: str, vendors: str = "/etc/OpenCL/vendors") -> bool:
    """Whether an .icd file of the system names this driver, under a path that exists."""
    try:
        names = [name for name in os.listdir(vendors) if name.endswith(".icd")]
    except OSError:
        return False
    for name in names:
        try:
            with open(os.path.join(vendors, name), encoding="utf-8", errors="replace") as file:
                path = file.read().strip()
        except OSError:
            continue
        if os.path.basename(path).startswith(driver) and os.path.exists(path):
            return True
    return False


# --------------------------------------------------------------------------------------------------
# Libraries that their users cannot find


def _finds_by_itself(dpctl_dir: str, library_dir: str) -> bool:
    """Whether the search path inside dpctl's libraries leads to the folder, as it does since dpctl 0.18."""
    if _ancestor(dpctl_dir, 3) != os.path.realpath(library_dir):
        return False
    try:
        with open(dpctl_interface(dpctl_dir), "rb") as file:
            return b"$ORIGIN/../../.." in file.read()
    except OSError:
        return False


def _dpctl_libraries(dpctl_dir: str) -> tuple[str, ...]:
    """What dpctl and the adapters that SYCL opens ask for, each after what it needs itself."""
    libsycl = f"libsycl.so.{needed_sycl(dpctl_interface(dpctl_dir))}"
    return ("libintlc.so.5", "libimf.so", "libsvml.so", "libirng.so", "libOpenCL.so.1", libsycl)


def _to_load(names: Iterable[str], library_dir: str) -> list[str]:
    """Paths of those libraries that are in the folder, and not also in one of the user's LD_LIBRARY_PATH."""
    chosen = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    return [
        os.path.join(library_dir, name)
        for name in names
        if os.path.exists(os.path.join(library_dir, name))
        and not any(os.path.exists(os.path.join(folder, name)) for folder in chosen)
    ]


def _load(path: str) -> str | None:
    """Load a library for good, so that the dynamic linker takes it wherever its name is asked for."""
    import ctypes

    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    return None


class _MklForDpnp:
    """Loads oneMKL when dpnp 0.15 is imported, whose wheels cannot find it. It takes 0.2 s, so not before."""

    # The members of the first group need one another: they are bound lazily, which ctypes.CDLL cannot do.
    _CORE = ("libtbb.so.12", "libmkl_core.so.2", "libmkl_tbb_thread.so.2", "libmkl_intel_ilp64.so.2")
    _SYCL = tuple(f"libmkl_sycl_{part}.so.4" for part in ("blas", "lapack", "dft", "rng", "stats", "vm"))

    def __init__(self, library_dir: str) -> None:
        self.library_dir = library_dir
        self.loaded = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not self.loaded and name.startswith("dpnp."):
            self.loaded = True
            self.load()
        return None  # the usual finders go on

    def load(self) -> None:
        import ctypes

        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
        dlopen.restype = ctypes.c_void_p
        for names, scope in ((self._CORE, os.RTLD_GLOBAL), (self._SYCL, os.RTLD_LOCAL)):
            for path in _to_load(names, self.library_dir):
                dlopen(os.fsencode(path), os.RTLD_LAZY | scope)  # where it fails, dpnp's ImportError says so
