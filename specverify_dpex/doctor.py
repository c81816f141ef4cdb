"""What verify() finds in this environment, and what to do about problems.

`report` collects the facts; the problems follow from the facts alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specverify_dpex import runtime
from specverify_dpex.runtime import STACKS, Preparation
from specverify_dpex.spirv import KERNELS_CHOICES, KERNELS_VARIABLE, MODULE_FOLDER

_PACKAGES = (
    "specverify-dpex",
    "dpctl",
    "dpnp",
    "numpy",
    "torch",
    "numba-dpex",
    "numba",
    "dpcpp-llvm-spirv",
    "intel-sycl-rt",
    "intel-cmplr-lib-rt",
    "intel-cmplr-lib-ur",
    "intel-opencl-rt",
)

_SELECTORS = ("ONEAPI_DEVICE_SELECTOR", "SYCL_DEVICE_FILTER")
_ICD_SETTINGS = ("OCL_ICD_FILENAMES", "OCL_ICD_VENDORS")
_ENVIRONMENT = (*_SELECTORS, *_ICD_SETTINGS, "LD_LIBRARY_PATH", "LD_PRELOAD", "ZE_AFFINITY_MASK", KERNELS_VARIABLE)

# numba-dpex 0.23.0 is its last release and bounds none of its dependencies; only these work with it.
_NUMBA_DPEX_NEEDS = {
    "numba": "0.59.",
    "dpctl": "0.17.",
    "dpnp": "0.15.",
    "numpy": "1.",
    "dpcpp-llvm-spirv": "2024.2.",
    "intel-sycl-rt": "2024.2.",
    "intel-cmplr-lib-rt": "2024.2.",
    "intel-opencl-rt": "2024.2.",
}

_INSTALL_COMPILER = "pip install 'specverify-dpex[compile]' in an environment of its own, on Python 3.9 to 3.11"
_INSTALL = "pip install 'specverify-dpex[cpu]'"
_GPU_DRIVER = (
    "the packages libze1 and libze-intel-gpu1 (older Intel repositories call it intel-level-zero-gpu, "
    "in Debian 12 it is part of intel-opencl-icd)"
)


@dataclass(frozen=True)
class Device:
    """A SYCL device, as dpctl lists it."""

    filter_string: str
    name: str
    backend: str
    type: str
    driver: str
    fp64: bool
    compute_units: int
    is_default: bool = False
    failure: str | None = None
    """Why the kernels do not build there; None where they do."""

    @property
    def usable(self) -> bool:
        """Whether verify() can run on it."""
        return self.failure is None


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and what to do about it."""

    text: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """Everything the doctor knows."""

    python: str
    platform: str
    versions: Mapping[str, str]
    """Installed version of each package of interest; one that is missing is not in it."""

    environment: Mapping[str, str] = field(default_factory=dict)
    preparation: Preparation = field(default_factory=Preparation)
    dpctl_error: str | None = None
    """Why dpctl cannot be imported or asked for its devices."""

    dpctl_sycl: int = 0
    """N of the libsycl.so.N that dpctl needs; 0 where dpctl is missing."""

    torch_sycl: int = 0
    """N of the libsycl.so.N that torch needs; 0 where torch is missing or has no XPU part."""

    sycl_installed: tuple[str, ...] = ()
    """Paths of the SYCL runtimes of dpctl's environment."""

    sycl_loaded: tuple[str, ...] = ()
    """Paths of the SYCL runtimes in this process."""

    render_nodes: Mapping[str, bool] = field(default_factory=dict)
    """Intel GPUs that the kernel shows, and whether this user may open them."""

    has_level_zero_loader: bool = False
    devices: tuple[Device, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether verify() can run on some device."""
        return any(device.usable for device in self.devices) and not any(_kernels_problems(self))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong, what stops verify() first."""
        parts = (
            _dpctl_problems,
            _device_problems,
            _kernels_problems,
            _gpu_problems,
            _runtime_problems,
            _numba_dpex_problems,
        )
        return tuple(problem for part in parts for problem in part(self))


# --------------------------------------------------------------------------------------------------
# Facts


def report() -> Report:
    """Look at this process, its environment and its devices.

    Imports dpctl, and neither torch nor dpnp: an XPU build of torch would bring its own SYCL runtime along.
    """
    import platform

    preparation = runtime.prepare()
    dpctl_dir = runtime.package_dir("dpctl")
    torch_dir = runtime.package_dir("torch")
    devices, dpctl_error = _devices()
    return Report(
        python=platform.python_version(),
        platform=platform.platform(),
        versions=_versions(),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        preparation=preparation,
        dpctl_error=dpctl_error,
        dpctl_sycl=runtime.needed_sycl(runtime.dpctl_interface(dpctl_dir)) if dpctl_dir else 0,
        torch_sycl=runtime.torch_sycl(torch_dir) if torch_dir else 0,
        sycl_installed=_installed_sycl(preparation.library_dir),
        sycl_loaded=loaded_sycl(_read("/proc/self/maps")),
        render_nodes=_render_nodes(),
        has_level_zero_loader=_has_library("libze_loader.so.1"),
        devices=devices,
    )


def loaded_sycl(maps: str) -> tuple[str, ...]:
    """The SYCL runtimes of a process, from the text of its /proc/<pid>/maps."""
    return tuple(sorted(set(re.findall(r"/.*/libsycl\.so[.\d]*", maps))))


def _versions() -> dict[str, str]:
    from importlib import metadata

    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _installed_sycl(library_dir: str | None) -> tuple[str, ...]:
    paths = (os.path.join(library_dir or "", f"libsycl.so.{number}") for number in STACKS)
    return tuple(path for path in paths if library_dir and os.path.exists(path))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _render_nodes(dri: str = "/dev/dri") -> dict[str, bool]:
    try:
        names = sorted(name for name in os.listdir(dri) if name.startswith("renderD"))
    except OSError:
        return {}
    intel = [name for name in names if _read(f"/sys/class/drm/{name}/device/vendor").strip() == "0x8086"]
    paths = [os.path.join(dri, name) for name in intel]
    return {path: os.access(path, os.R_OK | os.W_OK) for path in paths}


def _has_library(name: str) -> bool:
    import ctypes

    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _devices() -> tuple[tuple[Device, ...], str | None]:
    """The devices, and what went wrong with asking for them."""
    try:
        import dpctl

        found = dpctl.get_devices()
    except Exception as error:
        return (), f"{type(error).__name__}: {error}"
    try:
        default = dpctl.select_default_device()
    except Exception:  # SYCL's selector scores every device and may refuse them all
        default = None
    return tuple(replace(_describe(device), is_default=device == default) for device in found), None


def _describe(device: Any) -> Device:
    return Device(
        filter_string=device.filter_string,
        name=device.name.strip(),
        backend=device.backend.name,
        type=device.device_type.name,
        driver=device.driver_version,
        fp64=bool(device.has_aspect_fp64),
        compute_units=device.max_compute_units,
        failure=_build_failure(device),
    )


def _build_failure(device: Any) -> str | None:
    """Build every SPIR-V module on the device, as verify() does before its first launch."""
    import dpctl
    import dpctl.program

    modules = sorted(MODULE_FOLDER.glob("*.spv"))
    if not modules:
        return "the package has no SPIR-V modules"
    for module in modules:
        try:
            dpctl.program.create_program_from_spirv(dpctl.SyclQueue(device), module.read_bytes())
        except Exception as error:
            return f"{module.name} does not build: {str(error).strip() or type(error).__name__}"
    return None


# --------------------------------------------------------------------------------------------------
# Problems


def _dpctl_problems(report: Report) -> Iterator[Problem]:
    for error in report.preparation.errors:
        yield Problem(
            f"preparing the libraries failed: {error}",
            "set LD_LIBRARY_PATH to their folder before Python starts.",
        )
    if "dpctl" not in report.versions and report.dpctl_error is not None:
        yield Problem("dpctl is not installed", f"{_INSTALL}.")
        return
    installed = _numbers(report.sycl_installed)
    needed = report.dpctl_sycl
    if needed in STACKS and installed and needed not in installed:
        oneapi = STACKS[needed].oneapi
        yield Problem(
            f"dpctl {report.versions.get('dpctl', '')} needs libsycl.so.{needed} of oneAPI {oneapi}, but "
            + " and ".join(f"libsycl.so.{number}" for number in installed)
            + " is installed",
            f"pip install 'dpcpp-cpp-rt=={oneapi}.*', or take another dpctl: "
            + ", ".join(f"{STACKS[number].dpctl} goes with libsycl.so.{number}" for number in installed)
            + ".",
        )
    elif report.dpctl_error is not None:
        yield Problem(f"dpctl cannot be used: {report.dpctl_error}", f"{_INSTALL} in a new environment.")


def _device_problems(report: Report) -> Iterator[Problem]:
    for device in report.devices:
        if device.failure is not None:
            yield Problem(
                f"{device.filter_string} ({device.name}) cannot run the kernels: {device.failure}",
                "update its driver, or choose another device with ONEAPI_DEVICE_SELECTOR.",
            )
    if report.devices or report.dpctl_error is not None:
        return
    selector = next((name for name in _SELECTORS if name in report.environment), None)
    if selector is not None:
        yield Problem(
            f"no SYCL device passes {selector}={report.environment[selector]}",
            f"unset {selector}, or name a device that exists.",
        )
    elif "intel-opencl-rt" in report.versions:
        yield _missing_cpu_device(report)
    else:
        yield Problem(
            "there is no SYCL device",
            f"{_INSTALL} for the OpenCL CPU device. An Intel GPU needs its Level Zero driver: {_GPU_DRIVER}.",
        )


def _missing_cpu_device(report: Report) -> Problem:
    """Why intel-opencl-rt, though installed, gives no device."""
    preparation = report.preparation
    chosen = [name for name in _ICD_SETTINGS if name in report.environment]
    if preparation.icd_filenames is None and chosen:
        values = " and ".join(f"{name}={report.environment[name]}" for name in chosen)
        return Problem(
            f"{values} leads to no device, and hides the CPU device of intel-opencl-rt",
            f"unset {' and '.join(chosen)}.",
        )
    if preparation.icd_filenames is None:
        return Problem(
            "the CPU device of intel-opencl-rt is not registered: its library was not found beside dpctl",
            "set OCL_ICD_FILENAMES to the full path of its libintelocl.so.",
        )
    if preparation.dpctl_came_first:
        return Problem(
            "dpctl had listed its devices before specverify_dpex registered the OpenCL CPU device",
            "import specverify_dpex before dpctl.",
        )
    return Problem(
        "the CPU device of intel-opencl-rt is registered, but does not start",
        "look for packages of different releases with `pip check`; the CPU must be x86-64 with SSE4.2.",
    )


def _kernels_problems(report: Report) -> Iterator[Problem]:
    choice = report.environment.get(KERNELS_VARIABLE) or KERNELS_CHOICES[0]
    if choice not in KERNELS_CHOICES:
        yield Problem(
            f"{KERNELS_VARIABLE}={choice} is neither {' nor '.join(KERNELS_CHOICES)}: verify() refuses it",
            f"unset {KERNELS_VARIABLE}.",
        )
    elif choice == "source" and "numba-dpex" not in report.versions:
        yield Problem(
            f"{KERNELS_VARIABLE}=source has verify() compile its kernels, but numba-dpex is not installed",
            f"unset {KERNELS_VARIABLE}, or {_INSTALL_COMPILER}.",
        )


def _gpu_problems(report: Report) -> Iterator[Problem]:
    for node, accessible in report.render_nodes.items():
        if not accessible:
            yield Problem(
                f"there is an Intel GPU, but this user may not open {node}",
                "sudo usermod -aG render $USER, then log in again.",
            )
    selected = any(name in report.environment for name in _SELECTORS)
    listed = any(device.type == "gpu" for device in report.devices)
    if any(report.render_nodes.values()) and not listed and not selected and report.dpctl_error is None:
        loader = "its driver is missing or too old"
        if not report.has_level_zero_loader:
            loader = "libze_loader.so.1 is not installed"
        yield Problem(f"there is an Intel GPU, but SYCL does not list it: {loader}", f"install {_GPU_DRIVER}.")


def _runtime_problems(report: Report) -> Iterator[Problem]:
    if len(report.sycl_loaded) > 1:
        yield Problem(
            f"two SYCL runtimes are in this process: {' and '.join(report.sycl_loaded)}",
            f"memory of one is invalid in the other; {runtime.matching(_numbers(report.sycl_loaded))}.",
        )
    ours, theirs = report.dpctl_sycl, report.torch_sycl
    if ours and theirs and ours != theirs:
        yield Problem(
            f"torch {report.versions.get('torch', '')} brings libsycl.so.{theirs}, while dpctl "
            f"{report.versions.get('dpctl', '')} needs libsycl.so.{ours}: they cannot share a process",
            f"do not import both in one process, or install a matching pair; {runtime.matching((theirs, ours))}.",
        )


def _numbers(paths: Iterable[str]) -> list[int]:
    """N of each libsycl.so.N among the paths."""
    found = (re.search(r"libsycl\.so\.(\d+)", path) for path in paths)
    return sorted({int(match.group(1)) for match in found if match})


def _numba_dpex_problems(report: Report) -> Iterator[Problem]:
    if "numba-dpex" not in report.versions:
        return
    wrong = [
        f"{name} {report.versions[name]}" if name in report.versions else f"no {name}"
        for name, release in _NUMBA_DPEX_NEEDS.items()
        if not report.versions.get(name, "").startswith(release)
    ]
    if wrong:
        yield Problem(
            f"numba-dpex {report.versions['numba-dpex']} does not work with {', '.join(wrong)} "
            "(verify() does not need it, compiling the kernels does)",
            f"{_INSTALL_COMPILER}.",
        )
