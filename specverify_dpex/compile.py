"""Compile kernels.py to the SPIR-V modules in spirv/, with their manifest.

    python -m specverify_dpex.compile           write the modules
    python -m specverify_dpex.compile --check   fail where they differ from a fresh compilation

This runs in the compiler stack alone (`pip install specverify-dpex[compile]`); at run time only dpctl is needed. The
same source and compiler versions give the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import json
import logging
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from specverify_dpex.spirv import MANIFEST, MODULE_FOLDER, capabilities, private_variables, work_group_limit

_SOURCES = ("kernels.py", "intrinsics.py", "constants.py", "compile.py")
_COMPILERS = ("numba-dpex", "numba", "llvmlite", "dpcpp-llvm-spirv")
_SPIRV_VERSION = "1.1"  # what OpenCL 2.1 devices and all Level Zero drivers take


class EntryPoint(NamedTuple):
    """A kernel and the numba types of its arguments, under the name that its module exports."""

    name: str
    kernel: Any
    argument_types: tuple[Any, ...]

    def compile(self) -> bytes:
        """The SPIR-V module of the kernel alone."""
        return _translate(_llvm_module(self))

    @property
    def arguments(self) -> list[dict[str, str]]:
        """Name and type of each argument; a pointer's type ends in "*"."""
        names = inspect.signature(self.kernel.py_func).parameters
        return [
            {"name": name, "type": f"{type_.dtype}*" if hasattr(type_, "dtype") else str(type_)}
            for name, type_ in zip(names, self.argument_types)
        ]


@functools.cache
def _entry_points() -> tuple[EntryPoint, ...]:
    # dpnp probes a device for each of its functions when numba-dpex loads, and logs an error where there is none;
    # compiling needs none.
    logging.getLogger().addFilter(lambda record: "dpnp ops could not be determined" not in record.getMessage())
    from numba.core import types

    from specverify_dpex import kernels

    def pointer(element):
        return types.CPointer(element, addrspace=1)  # 1: global memory

    named = {
        "draft_tokens": pointer(types.int64),
        "uniform_accept": pointer(types.float32),
        "uniform_sample": pointer(types.float32),
        "num_draft": pointer(types.int64),
        "deterministic": pointer(types.uint8),
        "greedy": pointer(types.uint8),
        "keys": pointer(types.uint64),
        "seed": types.uint64,
        "scratch": pointer(types.uint64),
        "accepted": pointer(types.int64),
        "next_token": pointer(types.int64),
        "emitted": pointer(types.int64),
        "before": pointer(types.int64),
        "counters": pointer(types.int64),
        "report": pointer(types.int64),
        "values": pointer(types.float32),
    }
    # What `intrinsics.load` takes for each element type of probabilities.
    rows = {"f32": pointer(types.float32), "f16": pointer(types.int16), "bf16": pointer(types.uint16)}

    def entry(name, kernel, **more):
        parameters = inspect.signature(kernel.py_func).parameters
        arguments = {**named, **more}
        return EntryPoint(name, kernel, tuple(arguments.get(parameter, types.int64) for parameter in parameters))

    return (
        *(
            entry(f"verify_{draft}_{target}", kernels.verify_kernel, draft_probs=rows[draft], target_probs=rows[target])
            for draft in rows
            for target in rows
        ),
        entry("uniforms", kernels.uniforms_kernel),
        entry("emitted", kernels.emitted_kernel),
        entry("stats", kernels.stats_kernel),
        entry("check_proposals", kernels.check_proposals_kernel),
        *(entry(f"check_rows_{name}", kernels.check_rows_kernel, rows=row) for name, row in rows.items()),
    )


def _llvm_module(entry: EntryPoint) -> str:
    """The optimised LLVM assembly of a kernel, its entry point under the stable name."""
    from numba.core import types
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.target_extension import target_override
    from numba_dpex.core.descriptor import dpex_kernel_target
    from numba_dpex.kernel_api_impl.spirv.target import SPIRV_TARGET_NAME

    # numba-dpex refreshes these when it launches a kernel; compiled by itself, a kernel finds its built-ins missing.
    dpex_kernel_target.typing_context.refresh()
    dpex_kernel_target.target_context.refresh()
    # The dispatcher wants to infer a queue from array arguments. There are none, so its two steps are called directly.
    compiler = entry.kernel._compiler
    with global_compiler_lock, target_override(SPIRV_TARGET_NAME):
        result = compiler._compile_core(entry.argument_types, types.void)
        function = result.library.get_function(result.fndesc.llvm_func_name)
        mangled = result.target_context.prepare_spir_kernel(function, result.fndesc.argtypes).name
        result.library._optimize_final_module = lambda: _optimise(result.library.final_module)
        result.library.finalize()
    assembly = str(result.library.final_module)
    # numba leaves an unused global for each function, of a kind that SPIR-V does not have.
    assembly = re.sub(r"^@_ZN08NumbaEnv.*\n", "", assembly, flags=re.MULTILINE)
    return assembly.replace(mangled, entry.name)


def _optimise(module: Any) -> None:
    """Optimise an LLVM module for translation, instead of numba-dpex's own pipeline.

    That one merges branches before it has inlined the device functions, which leaves choices between addresses of
    stack slots behind: private memory on a GPU, and invalid SPIR-V where a branch's two ends have become one.
    """
    from llvmlite import binding

    passes = binding.create_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_global_dce_pass()
    passes.add_sroa_pass()
    builder = binding.create_pass_manager_builder()
    builder.opt_level = 3
    builder.loop_vectorize = builder.slp_vectorize = False  # the device's compiler knows its width, this one does not
    builder.disable_unroll_loops = True
    builder.populate(passes)
    passes.add_strip_symbols_pass()  # names hold a counter of numba's, so they differ from run to run
    passes.run(module)


def _translate(assembly: str) -> bytes:
    """LLVM assembly to SPIR-V."""
    import dpcpp_llvm_spirv
    from llvmlite import binding

    with tempfile.TemporaryDirectory() as folder:
        bitcode, spirv = Path(folder, "module.bc"), Path(folder, "module.spv")
        bitcode.write_bytes(binding.parse_assembly(assembly).as_bitcode())
        subprocess.run(
            [
                dpcpp_llvm_spirv.get_llvm_spirv_path(),
                f"--spirv-max-version={_SPIRV_VERSION}",
                "-o",
                str(spirv),
                str(bitcode),
            ],
            check=True,
        )
        return spirv.read_bytes()


def compile_entry_point(name: str) -> tuple[bytes, list[dict[str, str]]]:
    """Compile one kernel of kernels.py.

    Returns
    -------
    bytes, list of dict
        Its SPIR-V module, and the name and type of each argument.

    Raises
    ------
    ImportError
        Outside the compiler stack.
    """
    (entry,) = (entry for entry in _entry_points() if entry.name == name)
    return entry.compile(), entry.arguments


def compile_modules() -> dict[str, bytes]:
    """Compile every kernel of kernels.py.

    Returns
    -------
    dict of str to bytes
        The SPIR-V module of each entry point, and the manifest under `MANIFEST`: the hash of the sources, the
        compilers' versions, and each module's hash, capabilities, private variables, limit and arguments.

    Raises
    ------
    ImportError
        Outside the compiler stack.
    """
    entries = _entry_points()
    modules = {entry.name: entry.compile() for entry in entries}
    manifest = {
        "source_sha256": source_hash(),
        "compilers": {name: version(name) for name in _COMPILERS},
        "spirv_version": _SPIRV_VERSION,
        "modules": {
            entry.name: {
                "sha256": hashlib.sha256(modules[entry.name]).hexdigest(),
                "capabilities": capabilities(modules[entry.name]),
                "private_variables": private_variables(modules[entry.name]),
                "work_group_limit": work_group_limit(modules[entry.name]),
                "arguments": entry.arguments,
            }
            for entry in entries
        },
    }
    return {
        **{f"{name}.spv": module for name, module in modules.items()},
        MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode(),
    }


def source_hash() -> str:
    """SHA-256 over the sources that decide what the modules are."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specverify_dpex.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files there instead of writing them")
    options = parser.parse_args(arguments)

    fresh = compile_modules()
    if options.check:
        there = {path.name: path.read_bytes() for path in MODULE_FOLDER.iterdir() if path.suffix in (".spv", ".json")}
        stale = sorted(name for name in fresh.keys() | there.keys() if fresh.get(name) != there.get(name))
        for name in stale:
            print(f"stale: {MODULE_FOLDER / name}")
        print(f"{len(fresh)} files compiled, {len(stale)} differ" + (": run `make compile`" if stale else ""))
        return 1 if stale else 0
    for name, content in fresh.items():
        (MODULE_FOLDER / name).write_bytes(content)
        print(f"{MODULE_FOLDER / name}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
