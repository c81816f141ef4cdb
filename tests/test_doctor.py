"""What the doctor finds, on reports made by hand and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from specverify_dpex import doctor
from specverify_dpex.cli import as_text
from specverify_dpex.doctor import Device, Report
from specverify_dpex.runtime import Preparation

REQUIRE_DEVICE = bool(os.environ.get("CI") or os.environ.get("SPECVERIFY_DPEX_REQUIRE_DEVICE"))

CPU = Device("opencl:cpu:0", "A CPU", "opencl", "cpu", "2026.1", fp64=True, compute_units=8, is_default=True)
GPU = Device("level_zero:gpu:0", "An Arc", "level_zero", "gpu", "1.6", fp64=False, compute_units=512)

HEALTHY = Report(
    python="3.11.7",
    platform="Linux-6.1-x86_64",
    versions={"dpctl": "0.22.1", "intel-sycl-rt": "2026.2.0", "intel-opencl-rt": "2026.2.0"},
    preparation=Preparation(library_dir="/venv/lib", icd_filenames="/venv/lib/libintelocl.so"),
    dpctl_sycl=9,
    sycl_installed=("/venv/lib/libsycl.so.9",),
    sycl_loaded=("/venv/lib/libsycl.so.9",),
    devices=(CPU,),
)
NO_DEVICE = replace(HEALTHY, devices=())
USERS_CHOICE = Preparation(library_dir="/venv/lib")
OLD_STACK = {
    "dpctl": "0.17.0",
    "dpnp": "0.15.0",
    "numpy": "1.26.4",
    "numba": "0.59.1",
    "numba-dpex": "0.23.0",
    "dpcpp-llvm-spirv": "2024.2.0",
    "intel-sycl-rt": "2024.2.2",
    "intel-cmplr-lib-rt": "2024.2.2",
    "intel-opencl-rt": "2024.2.2",
}


def test_healthy_report_has_no_problem():
    assert HEALTHY.problems == ()
    assert HEALTHY.usable


PROBLEMS = {
    "no-dpctl": (
        replace(NO_DEVICE, versions={}, dpctl_error="ModuleNotFoundError: No module named 'dpctl'"),
        "dpctl is not installed",
        "pip install 'specverify-dpex[cpu]'.",
    ),
    "dpctl-broken": (
        replace(NO_DEVICE, dpctl_error="ImportError: libintlc.so.5: cannot open"),
        "dpctl cannot be used: ImportError: libintlc.so.5: cannot open",
        "pip install 'specverify-dpex[cpu]' in a new environment.",
    ),
    "dpctl-with-another-runtime": (
        replace(
            NO_DEVICE,
            versions={"dpctl": "0.17.0"},
            dpctl_sycl=7,
            dpctl_error="ImportError: libsycl.so.7: cannot open",
        ),
        "dpctl 0.17.0 needs libsycl.so.7 of oneAPI 2024.2, but libsycl.so.9 is installed",
        "pip install 'dpcpp-cpp-rt==2024.2.*', or take another dpctl: 0.22 goes with libsycl.so.9.",
    ),
    "preparation-failed": (
        replace(HEALTHY, preparation=Preparation(errors=("libsycl.so.7: bad header",))),
        "preparing the libraries failed: libsycl.so.7: bad header",
        "set LD_LIBRARY_PATH",
    ),
    "no-device": (
        replace(NO_DEVICE, versions={"dpctl": "0.22.1"}),
        "there is no SYCL device",
        "libze1 and libze-intel-gpu1 (older Intel repositories call it intel-level-zero-gpu",
    ),
    "selector": (
        replace(NO_DEVICE, environment={"ONEAPI_DEVICE_SELECTOR": "cuda:*"}),
        "no SYCL device passes ONEAPI_DEVICE_SELECTOR=cuda:*",
        "unset ONEAPI_DEVICE_SELECTOR",
    ),
    "users-driver": (
        replace(NO_DEVICE, preparation=USERS_CHOICE, environment={"OCL_ICD_FILENAMES": "/x.so"}),
        "OCL_ICD_FILENAMES=/x.so leads to no device",
        "unset OCL_ICD_FILENAMES.",
    ),
    "driver-elsewhere": (
        replace(NO_DEVICE, preparation=USERS_CHOICE),
        "is not registered: its library was not found beside dpctl",
        "set OCL_ICD_FILENAMES",
    ),
    "dpctl-came-first": (
        replace(NO_DEVICE, preparation=HEALTHY.preparation._replace(dpctl_came_first=True)),
        "dpctl had listed its devices before",
        "import specverify_dpex before dpctl.",
    ),
    "driver-does-not-start": (NO_DEVICE, "is registered, but does not start", "pip check"),
    "kernels-do-not-build": (
        replace(HEALTHY, devices=(CPU, replace(GPU, failure="mass_f32.spv does not build: no"))),
        "level_zero:gpu:0 (An Arc) cannot run the kernels: mass_f32.spv does not build: no",
        "update its driver",
    ),
    "kernels-variable": (
        replace(HEALTHY, environment={"SPECVERIFY_DPEX_KERNELS": "sauce"}),
        "SPECVERIFY_DPEX_KERNELS=sauce is neither modules nor source: verify() refuses it",
        "unset SPECVERIFY_DPEX_KERNELS.",
    ),
    "kernels-from-source-without-the-compiler": (
        replace(HEALTHY, environment={"SPECVERIFY_DPEX_KERNELS": "source"}),
        "SPECVERIFY_DPEX_KERNELS=source has verify() compile its kernels, but numba-dpex is not installed",
        "unset SPECVERIFY_DPEX_KERNELS, or pip install 'specverify-dpex[compile]' in an environment of its own, on "
        "Python 3.9 to 3.11.",
    ),
    "render-group": (
        replace(HEALTHY, render_nodes={"/dev/dri/renderD128": False}),
        "this user may not open /dev/dri/renderD128",
        "sudo usermod -aG render $USER",
    ),
    "no-level-zero-loader": (
        replace(HEALTHY, render_nodes={"/dev/dri/renderD128": True}),
        "SYCL does not list it: libze_loader.so.1 is not installed",
        "install the packages libze1",
    ),
    "no-gpu-driver": (
        replace(HEALTHY, render_nodes={"/dev/dri/renderD128": True}, has_level_zero_loader=True),
        "SYCL does not list it: its driver is missing or too old",
        "install the packages libze1",
    ),
    "two-runtimes": (
        replace(HEALTHY, sycl_loaded=("/torch/lib/libsycl.so.8", "/venv/lib/libsycl.so.9.0.0")),
        "two SYCL runtimes are in this process: /torch/lib/libsycl.so.8 and /venv/lib/libsycl.so.9.0.0",
        "torch 2.6 to 2.12 (XPU) goes with dpctl 0.18 to 0.21 and dpnp 0.16 to 0.19, "
        "torch 2.13 (XPU) goes with dpctl 0.22 and dpnp 0.20.",
    ),
    "torch-of-another-runtime": (
        replace(HEALTHY, torch_sycl=8, versions={**HEALTHY.versions, "torch": "2.8.0+xpu"}),
        "torch 2.8.0+xpu brings libsycl.so.8, while dpctl 0.22.1 needs libsycl.so.9",
        "torch 2.6 to 2.12 (XPU) goes with dpctl 0.18 to 0.21",
    ),
    "numba-dpex-unpinned": (
        replace(HEALTHY, versions={**OLD_STACK, "numba": "0.61.0", "dpnp": "0.20.0"}),
        "numba-dpex 0.23.0 does not work with numba 0.61.0, dpnp 0.20.0",
        "pip install 'specverify-dpex[compile]'",
    ),
}


@pytest.mark.parametrize(("report", "text", "remedy"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_problem_says_what_is_wrong_and_what_to_do(report, text, remedy):
    (problem,) = report.problems
    assert text in problem.text
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    "report",
    [
        replace(HEALTHY, versions=OLD_STACK),
        replace(HEALTHY, versions=OLD_STACK, environment={"SPECVERIFY_DPEX_KERNELS": "source"}),
        replace(HEALTHY, environment={"SPECVERIFY_DPEX_KERNELS": ""}),
        replace(HEALTHY, torch_sycl=9),
        replace(HEALTHY, render_nodes={"/dev/dri/renderD128": True}, devices=(GPU, CPU)),
        replace(
            HEALTHY,
            render_nodes={"/dev/dri/renderD128": True},
            environment={"ONEAPI_DEVICE_SELECTOR": "*:cpu"},
        ),
    ],
    ids=[
        "pinned-numba-dpex",
        "kernels-from-source",
        "kernels-variable-empty",
        "torch-of-the-same-runtime",
        "gpu-listed",
        "gpu-not-selected",
    ],
)
def test_what_is_in_order_is_no_problem(report):
    assert report.problems == ()


def test_usable_needs_a_device_that_builds_the_kernels():
    broken = replace(CPU, failure="no")
    assert not replace(HEALTHY, devices=()).usable
    assert not replace(HEALTHY, devices=(broken,)).usable
    assert replace(HEALTHY, devices=(broken, GPU)).usable


@pytest.mark.parametrize(("kernels", "usable"), [("modules", True), ("sauce", False), ("source", False)])
def test_usable_needs_kernels_that_can_be_had(kernels, usable):
    report = replace(HEALTHY, environment={"SPECVERIFY_DPEX_KERNELS": kernels})
    assert report.usable is usable
    assert as_text(report).endswith("verify() can run here, on opencl:cpu:0." if usable else "cannot run here.")


def test_report_reads_the_variable(monkeypatch):
    monkeypatch.setenv("SPECVERIFY_DPEX_KERNELS", "sauce")
    found = doctor.report()
    assert found.environment["SPECVERIFY_DPEX_KERNELS"] == "sauce"
    assert not found.usable


MAPS = """\
55d0-55d1 r--p 00000000 fe:00 11 /usr/bin/python3.11
7f00-7f01 r--p 00000000 fe:00 12 /venv/lib/libsycl.so.9.0.0
7f01-7f02 r-xp 00100000 fe:00 12 /venv/lib/libsycl.so.9.0.0
7f02-7f03 r-xp 00100000 fe:00 13 /venv/lib/libsycl-jit.so.23.1
7f03-7f04 r-xp 00100000 fe:00 14 /venv/lib/libmkl_sycl_blas.so.6
7f04-7f05 rw-p 00000000 00:00 0
"""


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        ("", ()),
        (MAPS, ("/venv/lib/libsycl.so.9.0.0",)),
        (
            MAPS + "7f06-7f07 r-xp 0 fe:00 15 /my torch/lib/libsycl.so.8 (deleted)\n",
            ("/my torch/lib/libsycl.so.8", "/venv/lib/libsycl.so.9.0.0"),
        ),
    ],
    ids=["none", "one", "two"],
)
def test_loaded_sycl_reads_the_maps_of_a_process(maps, expected):
    assert doctor.loaded_sycl(maps) == expected


def test_report_describes_this_process_and_loads_no_array_library(tmp_path):
    code = (
        "import sys\n"
        "from specverify_dpex.doctor import report\n"
        "found = report()\n"
        "assert not {'torch', 'dpnp', 'numba_dpex'} & set(sys.modules)\n"
        "assert 'dpctl' in found.versions and found.dpctl_error is None\n"
        "if sys.platform.startswith('linux'):\n"
        "    assert len(found.sycl_loaded) == 1\n"
        "    assert f'libsycl.so.{found.dpctl_sycl}' in found.sycl_loaded[0]\n"
        "assert sum(device.is_default for device in found.devices) == (len(found.devices) > 0)\n"
        "print(found.usable, found.devices)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if REQUIRE_DEVICE:
        assert done.stdout.startswith("True")
