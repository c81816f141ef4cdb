"""Run a command with Intel's Level Zero driver on an Iris Xe that is not there.

    python tools/level_zero.py pytest tests -m level_zero
    python tools/level_zero.py specverify-dpex doctor

The driver of Debian 12 records the work of an emulated device instead of executing it: it finds the device, compiles
modules to the device's machine code, allocates, copies, submits and signals as on a real one, but no result is
computed. The command must run on the compiler stack (dpctl 0.17), whose SYCL runtime takes a driver of that age.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import debian

PACKAGES = ("intel-opencl-icd", "libze1")  # the former has the Level Zero driver and the graphics compiler too
SHIM = Path(__file__).with_name("level_zero_shim.c")


def environment() -> dict[str, str]:
    """The variables under which `level_zero:gpu:0` is the emulated device."""
    return {
        "LD_LIBRARY_PATH": debian.library_path(debian.unpack("bookworm", PACKAGES, with_runtime=False)),
        "LD_PRELOAD": str(_shim()),
        "ONEAPI_DEVICE_SELECTOR": "level_zero:*",
        # The driver's own switches.
        "NEOReadDebugKeys": "1",
        "SetCommandStreamReceiver": "1",  # record instead of execute
        "ProductFamilyOverride": "tgllp",
        "AUBDumpCaptureFileName": os.devnull,  # the record holds all memory: gigabytes
    }


def _shim() -> Path:
    library = debian.FOLDER / "level_zero_shim.so"
    if not library.exists() or library.stat().st_mtime < SHIM.stat().st_mtime:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            sys.exit("level_zero.py: a C compiler is needed for the loader's missing entry points: apt-get install gcc")
        subprocess.run([compiler, "-shared", "-fPIC", "-nostdlib", "-O", "-o", library, SHIM], check=True)
    return library


def main(arguments: list[str]) -> None:
    if not arguments:
        sys.exit(__doc__)
    program = shutil.which(arguments[0])
    if program is None:
        sys.exit(f"level_zero.py: {arguments[0]} is not installed here")
    os.execve(program, arguments, {**os.environ, **environment()})


if __name__ == "__main__":
    main(sys.argv[1:])
