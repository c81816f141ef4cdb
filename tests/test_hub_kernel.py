"""`make hub-kernel`: the kernels library loads what it builds, and the answers are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import arrays
import generate
import numpy as np
import pytest

from specverify_dpex import emitted_tokens, reference

TOOL = Path(__file__).parent.parent / "tools" / "hub_kernel.py"
LOAD = """
import json, sys
from pathlib import Path
import numpy as np, torch
from kernels import get_local_kernel

sv = get_local_kernel(Path(sys.argv[1]))
assert not any(name.split(".")[0] == "specverify_dpex" for name in sys.modules), "the installed package was loaded"
saved = {name: torch.from_numpy(array) for name, array in np.load(sys.argv[2]).items()}
inputs = [saved.pop(f"arr_{position}") for position in range(5)]
accepted, next_token = sv.verify(*inputs)
drawn = sv.verify(*inputs[:3])
compiled = torch.compile(sv.verify, fullgraph=True, backend="aot_eager")(*inputs)
with_options = sv.verify(*inputs, **saved)
tokens = sv.emitted_tokens(inputs[0], *with_options)
print(json.dumps([sv.__name__, sv.__file__, accepted.tolist(), next_token.tolist(), len(drawn.next_token),
                  [tensor.tolist() for tensor in compiled], [tensor.tolist() for tensor in with_options],
                  tokens.tolist()]))
"""
TOGETHER = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
from specverify_dpex import torch_ops

sv = get_local_kernel(Path(sys.argv[1]))
tokens, target = torch.tensor([[1]]), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
print(sv.verify is not torch_ops.verify, *sv.verify(tokens, None, target), *torch_ops.verify(tokens, None, target))
"""


@pytest.fixture
def built(tmp_path: Path) -> Path:
    done = subprocess.run([sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    variants = [tmp_path / "build" / name for name in ("torch-cpu", "torch-xpu")]
    assert done.stdout.split() == list(map(str, variants))
    return tmp_path


@pytest.fixture
def kernels() -> Any:
    found = arrays.optional("kernels") and arrays.optional("torch")
    if not found:
        pytest.skip("kernels and torch are not installed: the session `current` of noxfile.py has them")
    return found


def run(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_builds_differ_in_their_backend_alone(built):
    cpu, xpu = (built / "build" / name for name in ("torch-cpu", "torch-xpu"))
    names = sorted(path.relative_to(cpu).as_posix() for path in cpu.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(xpu).as_posix() for path in xpu.rglob("*") if path.is_file())
    for name in names:
        if name != "metadata.json":
            assert (cpu / name).read_bytes() == (xpu / name).read_bytes()
    assert {"__init__.py", "metadata.json", "torch_ops.py", "spirv/manifest.json"} <= set(names)
    for variant, backend in ((cpu, "cpu"), (xpu, "xpu")):
        metadata = json.loads((variant / "metadata.json").read_text())
        assert (metadata["name"], metadata["version"], metadata["backend"]) == ("spec-verify-xpu", 1, {"type": backend})
        assert metadata["id"].startswith(f"_spec_verify_xpu_{backend}_")
    package = TOOL.parent.parent / "specverify_dpex"
    for path in (package / "spirv").glob("*.spv"):
        assert (cpu / "spirv" / path.name).read_bytes() == path.read_bytes()


def test_builds_are_reproducible(built, tmp_path):
    before = {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}
    subprocess.run([sys.executable, str(TOOL), str(built)], check=True, capture_output=True, timeout=120)
    assert {path: path.read_bytes() for path in built.rglob("*") if path.is_file()} == before


def test_the_kernels_library_loads_it_and_answers_are_right(device, built, kernels):
    case = generate.random_case(7, shape=(4, 3, 257), dtype="float32", token_dtype="int64", with_draft_probs=True)
    options = {
        "num_draft": np.array([3, 1, 0, 2], "i4"),
        "deterministic_draft": np.array([True, False, False, False]),
        "greedy": np.array([False, False, False, True]),
    }
    np.savez(built / "case.npz", *case.arrays, **options)
    name, file, accepted, next_token, drawn, compiled, with_options, tokens = json.loads(
        run(LOAD, built, built / "case.npz")
    )
    expected = reference.verify(*case.arrays)
    right = [expected.accepted.tolist(), expected.next_token.tolist()]
    assert name.startswith("_spec_verify_xpu_cpu_")
    assert Path(file).is_relative_to(built)
    assert [accepted, next_token] == compiled == right
    assert drawn == 4
    expected = reference.verify(*case.arrays, **options)
    assert with_options == [expected.accepted.tolist(), expected.next_token.tolist()] != right
    assert tokens == emitted_tokens(case.arrays[0], *expected).tolist()


def test_it_shares_a_process_with_the_installed_package(device, built, kernels):
    printed = run(TOGETHER, built)
    assert printed == "True tensor([1]) tensor([0]) tensor([1]) tensor([0])\n"


def test_without_dpctl_it_says_what_to_install(built, kernels):
    code = f"import sys; sys.modules['dpctl'] = None\n{TOGETHER.replace('from specverify_dpex import torch_ops', '')}"
    done = subprocess.run([sys.executable, "-c", code, str(built)], capture_output=True, text=True, timeout=120)
    assert "ImportError: spec-verify-xpu needs dpctl: " in done.stderr
    assert "pip install dpctl" in done.stderr
