"""The committed SPIR-V modules: complete, current, valid, and asking nothing that a device may lack."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from specverify_dpex import launch
from specverify_dpex.spirv import MANIFEST, MODULE_FOLDER, capabilities, private_variables, work_group_limit

MODULES = sorted(MODULE_FOLDER.glob("*.spv"))
BENCH_MODULES = sorted((Path(__file__).parent.parent / "bench").glob("*.spv"))
ENTRY_POINTS = json.loads((MODULE_FOLDER / MANIFEST).read_text())["modules"]
FLOAT64 = 10
OP_CAPABILITY = 17 | 2 << 16
OP_EXECUTION_MODE = 16 | 6 << 16
OP_VARIABLE = 59 | 4 << 16
LOCAL_SIZE = 17
FUNCTION, CROSS_WORKGROUP = 7, 5


def test_the_manifest_lists_the_modules():
    assert [module.stem for module in MODULES] == sorted(ENTRY_POINTS)
    assert {"verify_f32_f32", "verify_bf16_f16", "uniforms"} <= set(ENTRY_POINTS)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_module_is_what_the_manifest_says(module):
    content = module.read_bytes()
    assert hashlib.sha256(content).hexdigest() == ENTRY_POINTS[module.stem]["sha256"]
    assert capabilities(content) == ENTRY_POINTS[module.stem]["capabilities"]
    assert private_variables(content) == ENTRY_POINTS[module.stem]["private_variables"] == 0
    assert work_group_limit(content) == ENTRY_POINTS[module.stem]["work_group_limit"]


@pytest.mark.parametrize("module", [*MODULES, *BENCH_MODULES], ids=lambda path: path.stem)
def test_module_needs_no_float64(module):
    words = struct.unpack(f"<{module.stat().st_size // 4}I", module.read_bytes())
    declared = {after for word, after in zip(words, words[1:]) if word == OP_CAPABILITY}
    assert declared and FLOAT64 not in declared


def test_capabilities_refuses_float64():
    header = struct.pack("<5I", 0x07230203, 0x10100, 0, 1, 0)
    assert capabilities(header + struct.pack("<2I", OP_CAPABILITY, 6)) == ["Kernel"]
    with pytest.raises(ValueError, match=r"^`module` must need only what every device has: .*\[10\]$"):
        capabilities(header + struct.pack("<2I", OP_CAPABILITY, FLOAT64))


def test_private_variables_and_work_group_limit():
    header = struct.pack("<5I", 0x07230203, 0x10100, 0, 1, 0)
    local_size = struct.pack("<6I", OP_EXECUTION_MODE, 1, LOCAL_SIZE, 16, 2, 1)
    private, module_wide = (struct.pack("<4I", OP_VARIABLE, 1, 2, storage) for storage in (FUNCTION, CROSS_WORKGROUP))
    module = header + local_size + module_wide + private + private
    assert (private_variables(module), work_group_limit(module)) == (2, 32)
    assert (private_variables(header + module_wide), work_group_limit(header)) == (0, None)


def test_capabilities_refuses_what_is_not_spirv():
    with pytest.raises(ValueError, match="^`module` must be SPIR-V in little-endian order"):
        capabilities(struct.pack(">5I", 0x07230203, 0x10100, 0, 1, 0))


@pytest.mark.parametrize("module", [*MODULES, *BENCH_MODULES], ids=lambda path: path.stem)
def test_module_is_valid(module):
    validator = shutil.which("spirv-val")
    if validator is None:
        missing = "spirv-val is not installed: apt-get install spirv-tools"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    done = subprocess.run([validator, "--target-env", "spv1.1", str(module)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("entry_point", sorted(ENTRY_POINTS))
def test_module_builds_with_the_arguments_of_the_manifest(queue, entry_point):
    kernel = launch.kernel(queue, entry_point).sycl_kernel
    assert kernel.num_args == len(ENTRY_POINTS[entry_point]["arguments"])
    assert kernel.get_function_name() == entry_point
