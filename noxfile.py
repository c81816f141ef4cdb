"""The environments that the project is tested in, one session each.

Sessions install the wheel, not the checkout in place: a module that is missing from the wheel fails here and
not at the user's. Tests therefore start through `pytest`, which leaves the checkout off sys.path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "current", "oneapi2025", "compiler", "levelzero"]
nox.options.reuse_existing_virtualenvs = True  # they hold gigabytes; `make clean` starts afresh
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
# Every session that runs kernels installs a device, so none may skip for want of one.
DEVICE = {"SPECVERIFY_DPEX_REQUIRE_DEVICE": "1"}
# Array libraries that one session has, so that its tests may not skip for want of them. torch runs on its CPU here;
# 2.13 is the release that goes with dpctl 0.22.
LIBRARIES = {"torch": "torch==2.13.*", "jax": "jax>=0.6,<0.11", "kernels": "kernels==0.17.*"}
EXTRAS = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
DEV = {requirement.split(">")[0]: requirement for requirement in EXTRAS["dev"]}
PYTEST = (DEV["pytest"], DEV["pytest-timeout"])
FEWER_SEEDS = ("-m", "not level_zero and not bulk")
# Of the compiler's stack, what runs kernels: the newer stacks want a newer driver than the emulated device has.
LEVEL_ZERO = ("dpctl", "dpcpp-cpp-rt", "intel-cmplr-lib-rt", "numpy")
COMPILER_PYTHONS = ("3.11", "3.10", "3.9")  # those that numba-dpex has wheels for


def compiler_python() -> str | None:
    """The running Python if numba-dpex has wheels for it, else one that is installed."""
    if "{}.{}".format(*sys.version_info[:2]) in COMPILER_PYTHONS:
        return sys.executable
    for version in COMPILER_PYTHONS:
        path = shutil.which(f"python{version}")
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and mypy."""
    session.install(DEV["ruff"], DEV["mypy"], DEV["nox"], "numpy")  # mypy reads the types of the last two
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def current(session: nox.Session) -> None:
    """The stack that `pip install` gives today: dpctl 0.22 on oneAPI 2026."""
    run_tests(session, "dpctl==0.22.*", "dpnp==0.20.*", "intel-opencl-rt==2026.*", libraries=LIBRARIES)


@nox.session
def oneapi2025(session: nox.Session) -> None:
    """dpctl 0.21 on oneAPI 2025."""
    # The reference runs on the host alone, and `current` has the same numpy.
    options = ("--ignore=tests/test_reference.py", *FEWER_SEEDS)
    run_tests(session, "dpctl==0.21.*", "dpnp==0.19.*", "intel-opencl-rt==2025.3.*", options=options)


def run_tests(
    session: nox.Session, *stack: str, options: Sequence[str] = (), libraries: dict[str, str] | None = None
) -> None:
    libraries = libraries or {}
    session.install(".[demo,dpnp]", *PYTEST, *stack, *libraries.values())
    session.run("specverify-dpex", "doctor")
    env = {**DEVICE, "SPECVERIFY_DPEX_REQUIRE": " ".join(libraries)}
    session.run("pytest", *options, *session.posargs, env=env)


@nox.session(python=compiler_python())
def compiler(session: nox.Session) -> None:
    """numba-dpex on oneAPI 2024.2: the committed modules are fresh, and they and kernels.py itself pass."""
    require_compiler(session)
    session.install(".[compile,demo]", *PYTEST)
    session.run("specverify-dpex", "doctor")
    session.run("pytest", *FEWER_SEEDS, *session.posargs, env=DEVICE)
    # What depends on the kernels, with the kernels compiled in the process.
    of_kernels = ["tests/test_kernels.py", "tests/test_prepare.py", "tests/test_verify.py"]
    source = {**DEVICE, "SPECVERIFY_DPEX_KERNELS": "source"}
    session.run("pytest", *FEWER_SEEDS, *(session.posargs or of_kernels), env=source)


@nox.session(python=compiler_python())
def levelzero(session: nox.Session) -> None:
    """The Level Zero driver of Debian 12 takes the modules, on an emulated Iris Xe and dpctl 0.17."""
    require_compiler(session)
    session.install(".", *PYTEST, *(pin for pin in EXTRAS["compile"] if pin.startswith(LEVEL_ZERO)))
    with session.chdir(session.create_tmp()):  # the driver records what it does into the working directory
        session.run(
            "python",
            str(ROOT / "tools" / "level_zero.py"),
            *("pytest", str(ROOT / "tests"), "-m", "level_zero", *session.posargs),
            success_codes=[0, 5] if session.posargs else [0],  # 5: the options choose none of these tests
        )


@nox.session(python=compiler_python(), default=False)
def compile(session: nox.Session) -> None:
    """Compile the kernels of the checkout into specverify_dpex/spirv."""
    require_compiler(session)
    session.install("--editable", ".[compile]")
    session.run("python", "-m", "specverify_dpex.compile", *session.posargs)


def require_compiler(session: nox.Session) -> None:
    if compiler_python() is None:
        session.error("numba-dpex needs Python 3.9 to 3.11, and none is installed. Install python3.11.")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Time verify() beside the routes of dpnp, torch, numpy and transformers; `-- --set full` for every workload."""
    # The benchmark calls a function of transformers that is not public, hence the exact version.
    libraries = ("numpy", "matplotlib", LIBRARIES["torch"], "transformers==5.18.0")
    session.install(".[cpu,dpnp]", *libraries, "dpctl==0.22.*", "dpnp==0.20.*")
    session.run("python", "bench/bench.py", *session.posargs, env=DEVICE)


@nox.session(venv_backend="none", default=False)
def isa(session: nox.Session) -> None:
    """Compile the modules to the machine code of every GPU family, and write docs/isa.md."""
    session.run(sys.executable, str(ROOT / "tools" / "isa.py"), *session.posargs)
