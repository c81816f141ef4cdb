"""Every example runs, and the standalone one without an import of numpy by specverify_dpex."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[1].joinpath("examples").glob("*.py"))

# Runs a script where neither it nor a module of specverify_dpex may import numpy. dpctl may: it needs it.
GUARD = """
import builtins, runpy, sys

def guarded_import(name, globals=None, locals=None, fromlist=(), level=0, original=builtins.__import__):
    importer = (globals or {}).get("__name__", "")
    if name.split(".")[0] == "numpy" and importer.split(".")[0] in ("specverify_dpex", "__main__"):
        raise ImportError(f"{importer} imports {name}")
    return original(name, globals, locals, fromlist, level)

builtins.__import__ = guarded_import
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_examples_exist():
    assert "standalone_gpu.py" in [example.name for example in EXAMPLES]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example, tmp_path):
    finished = run(example, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout and not finished.stderr


@pytest.mark.usefixtures("device")
def test_standalone_example_imports_no_numpy(tmp_path):
    example = EXAMPLES[0].with_name("standalone_gpu.py")
    finished = run("-c", GUARD, example, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "the first token of 10,240 sequences" in finished.stdout


@pytest.mark.parametrize("statement", ["import numpy", "import numpy.linalg", "from numpy import array"])
@pytest.mark.parametrize(
    ("importer", "allowed"),
    [("specverify_dpex.fake", False), ("specverify_dpex", False), ("__main__", False), ("dpctl", True)],
)
def test_guard_sees_who_imports(statement, importer, allowed, tmp_path):
    """The guard of the test above does find what it looks for, even where numpy has been loaded before."""
    script = tmp_path / "script.py"
    script.write_text(
        f"exec('import numpy', dict(__name__='dpctl'))\nexec({statement!r}, dict(__name__={importer!r}))\n"
    )
    finished = run("-c", GUARD, script, cwd=tmp_path)
    assert (finished.returncode == 0) is allowed, finished.stderr
    assert allowed or f"ImportError: {importer} imports numpy" in finished.stderr
