"""What importing the package does to a process, mostly in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib import metadata

import pytest

from specverify_dpex import runtime

REQUIRE_DEVICE = bool(os.environ.get("CI") or os.environ.get("SPECVERIFY_DPEX_REQUIRE_DEVICE"))
SETTINGS = ("OCL_ICD_FILENAMES", "OCL_ICD_VENDORS", "ONEAPI_DEVICE_SELECTOR", "LD_LIBRARY_PATH", "LD_PRELOAD")


def run_python(code, tmp_path, **settings):
    """Run code in a new interpreter that has only the given settings, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment.update(settings)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


needs_cpu_driver = pytest.mark.skipif(
    installed("intel-opencl-rt") is None and not REQUIRE_DEVICE,
    reason="intel-opencl-rt is not installed",
)

# --------------------------------------------------------------------------------------------------
# Importing, for real


def test_import_loads_no_array_library_and_no_compiler(tmp_path):
    code = "import sys, specverify_dpex; print({'torch', 'dpnp', 'numba', 'numba_dpex'} & set(sys.modules))"
    assert run_python(code, tmp_path) == "set()"


@pytest.mark.parametrize(
    "settings",
    [
        {"ONEAPI_DEVICE_SELECTOR": "opencl:fpga"},
        {"OCL_ICD_FILENAMES": "", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"},
        {"OCL_ICD_FILENAMES": "/nowhere/libintelocl.so", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"},
    ],
    ids=["selector", "no-driver", "missing-driver"],
)
def test_import_needs_no_device(tmp_path, settings):
    code = "import specverify_dpex, dpctl; print(dpctl.get_devices(), callable(specverify_dpex.verify))"
    assert run_python(code, tmp_path, **settings) == "[] True"


@needs_cpu_driver
def test_import_makes_the_cpu_device_visible(tmp_path):
    code = "import specverify_dpex, dpctl; print([d.filter_string for d in dpctl.get_devices()])"
    assert "opencl:cpu:0" in run_python(code, tmp_path)


@needs_cpu_driver
def test_import_makes_the_cpu_device_visible_after_dpctl_too(tmp_path):
    if installed("dpctl").startswith("0.17."):
        pytest.skip("dpctl 0.17 cannot be imported first")
    code = "import dpctl, specverify_dpex; print([d.filter_string for d in dpctl.get_devices()])"
    assert "opencl:cpu:0" in run_python(code, tmp_path)


@needs_cpu_driver
def test_import_registers_the_driver_of_this_environment(tmp_path):
    code = "import os, specverify_dpex; print(os.environ['OCL_ICD_FILENAMES'])"
    path = run_python(code, tmp_path)
    assert os.path.basename(path) == "libintelocl.so"
    assert os.path.exists(path)


@pytest.mark.parametrize("setting", ["OCL_ICD_FILENAMES", "OCL_ICD_VENDORS"])
@pytest.mark.parametrize("value", ["/chosen/by/the/user", ""], ids=["path", "empty"])
def test_import_leaves_the_users_settings_alone(tmp_path, setting, value):
    names = ("OCL_ICD_FILENAMES", "OCL_ICD_VENDORS", "ONEAPI_DEVICE_SELECTOR")
    code = f"import os, specverify_dpex; print({{n: os.environ[n] for n in {names} if n in os.environ}})"
    settings = {setting: value, "ONEAPI_DEVICE_SELECTOR": "*:cpu"}
    assert run_python(code, tmp_path, **settings) == str({n: settings[n] for n in names if n in settings})


@pytest.mark.skipif(installed("dpnp") is None, reason="dpnp is not installed")
def test_import_lets_dpnp_find_its_libraries(tmp_path):
    code = (
        "import specverify_dpex, dpnp\n"
        "x = dpnp.arange(4, dtype='f4').reshape(2, 2) + dpnp.eye(2, dtype='f4')\n"
        "print(float((x @ x).sum()), round(float(dpnp.linalg.det(x))))"
    )
    assert run_python(code, tmp_path) == "36.0 2"


@pytest.mark.skipif(installed("numba-dpex") is None, reason="numba-dpex is not installed")
def test_import_lets_numba_dpex_find_its_libraries(tmp_path):
    assert run_python("import specverify_dpex, numba_dpex; print(numba_dpex.__version__[:6])", tmp_path) == "0.23.0"


def test_prepare_imports_nothing_heavy(tmp_path):
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('runtime', {runtime.__file__!r})\n"
        "runtime = sys.modules['runtime'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(runtime)\n"
        "runtime.prepare()\n"
        "print({'dpctl', 'numpy', 'dataclasses', 'importlib.metadata'} & set(sys.modules))"
    )
    assert run_python(code, tmp_path) == "set()"


# --------------------------------------------------------------------------------------------------
# prepare()


@pytest.fixture
def unprepared(monkeypatch):
    monkeypatch.setattr(runtime, "_prepared", None)


def test_prepare_runs_once_in_all_threads(unprepared, monkeypatch):
    calls = []
    monkeypatch.setattr(runtime, "_prepare", lambda: calls.append(1) or runtime.Preparation())
    results = []
    threads = [threading.Thread(target=lambda: results.append(runtime.prepare())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(results) == 8
    assert all(result is results[0] for result in results)


def test_prepare_never_raises(unprepared, monkeypatch):
    def fail(name):
        raise OSError("no such disk")

    monkeypatch.setattr(runtime, "package_dir", fail)
    assert runtime.prepare().errors == ("OSError: no such disk",)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_prepare_does_nothing_outside_linux(unprepared, monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    assert runtime.prepare()._replace(dpctl_came_first=False) == runtime.Preparation()


def test_prepare_does_nothing_without_dpctl(unprepared, monkeypatch):
    monkeypatch.setattr(runtime, "package_dir", lambda name: None)
    assert runtime.prepare()._replace(dpctl_came_first=False) == runtime.Preparation()


# --------------------------------------------------------------------------------------------------
# Its parts, on folders laid out as installers do


def lay_out(root, packages, libraries, interface):
    """Make the files of an installed dpctl and of a SYCL runtime, and return the folder of dpctl."""
    dpctl_dir = root / packages / "dpctl"
    dpctl_dir.mkdir(parents=True)
    (dpctl_dir / "libDPCTLSyclInterface.so").write_bytes(interface)
    (root / libraries).mkdir(parents=True, exist_ok=True)
    for name in ("libsycl.so.8", "libintlc.so.5"):
        (root / libraries / name).touch()
    return str(dpctl_dir)


OLD = b"\0/../..:/build/lib\0libsycl.so.7\0"  # as in the wheels of dpctl 0.17
NEW = b"\0/build/lib:$ORIGIN/../../../\0libsycl.so.8\0"


@pytest.mark.parametrize("packages", ["lib/python3.11/site-packages", "lib64/python3.11/site-packages"])
def test_library_dir_is_found_from_dpctl(tmp_path, packages):
    dpctl_dir = lay_out(tmp_path, packages, "lib", NEW)
    assert runtime._library_dir(dpctl_dir) == str(tmp_path / "lib")


def test_library_dir_is_found_in_the_prefix(tmp_path, monkeypatch):
    dpctl_dir = lay_out(tmp_path, "elsewhere", "lib", NEW)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert runtime._library_dir(dpctl_dir) == str(tmp_path / "lib")


def test_library_dir_is_found_in_what_pip_recorded(tmp_path, monkeypatch):
    dpctl_dir = lay_out(tmp_path, "packages", "odd/place", NEW)
    record = tmp_path / "packages" / "intel_sycl_rt-2025.3.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: intel-sycl-rt\nVersion: 2025.3\n")
    (record / "RECORD").write_text("../odd/place/libsycl.so,,\n../odd/place/libsycl.so.8,,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setattr(runtime, "_usual_library_dirs", lambda folder: iter(()))
    assert runtime._library_dir(dpctl_dir) == str(tmp_path / "odd/place")


@pytest.mark.parametrize(
    ("packages", "interface", "expected"),
    [
        ("lib/python3.11/site-packages", NEW, True),
        ("lib/python3.11/site-packages", OLD, False),
        ("lib64/python3.11/site-packages", NEW, False),
    ],
    ids=["new", "old", "lib64"],
)
def test_finds_by_itself_reads_the_search_path(tmp_path, packages, interface, expected):
    dpctl_dir = lay_out(tmp_path, packages, "lib", interface)
    assert runtime._finds_by_itself(dpctl_dir, str(tmp_path / "lib")) is expected


def test_needed_sycl_reads_the_number(tmp_path):
    library = tmp_path / "library.so"
    for content, expected in ((OLD, 7), (NEW, 8), (b"\0libsycl.so.10\0", 10), (b"\0libsycl.so\0", 0)):
        library.write_bytes(content)
        assert runtime.needed_sycl(str(library)) == expected
    assert runtime.needed_sycl(str(tmp_path / "missing.so")) == 0


def test_dpctl_libraries_end_with_the_runtime_that_dpctl_needs(tmp_path):
    dpctl_dir = lay_out(tmp_path, "packages", "lib", OLD)
    names = runtime._dpctl_libraries(dpctl_dir)
    assert names[0] == "libintlc.so.5"
    assert names[-1] == "libsycl.so.7"


def test_to_load_gives_way_to_the_users_library_path(tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, names in ((ours, ("a.so", "b.so")), (theirs, ("b.so", "c.so"))):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'missing'}:{theirs}:")
    assert runtime._to_load(["a.so", "b.so", "c.so"], str(ours)) == [str(ours / "a.so")]
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert runtime._to_load(["a.so", "b.so", "c.so"], str(ours)) == [str(ours / "a.so"), str(ours / "b.so")]


def test_load_returns_the_linkers_reason(tmp_path):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert "broken.so" in runtime._load(str(tmp_path / "broken.so"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, False),
        ("{here}/libigdrcl.so", False),
        ("/nowhere/libintelocl.so", False),
        ("{here}/libintelocl.so\n", True),
    ],
    ids=["none", "another", "stale", "registered"],
)
def test_system_registers_believes_paths_that_exist(tmp_path, content, expected):
    for name in ("libigdrcl.so", "libintelocl.so"):
        (tmp_path / name).touch()
    vendors = tmp_path / "vendors"
    if content is not None:
        vendors.mkdir()
        (vendors / "intel.icd").write_text(content.format(here=tmp_path))
    assert runtime._system_registers("libintelocl.so", str(vendors)) is expected


def test_mkl_is_loaded_once_and_only_for_dpnp(tmp_path, monkeypatch):
    calls = []
    finder = runtime._MklForDpnp(str(tmp_path))
    monkeypatch.setattr(finder, "load", lambda: calls.append(1))
    for name in ("numpy", "numpy.linalg", "dpnp"):
        assert finder.find_spec(name, None) is None
    assert calls == []
    for name in ("dpnp.dpnp_algo", "dpnp.linalg"):
        assert finder.find_spec(name, None) is None
    assert calls == [1]
