"""Builds the kernel repository that the kernels library loads, from the package's own files.

    python tools/hub_kernel.py [folder]

writes `<folder>/build/torch-xpu` and `<folder>/build/torch-cpu`: what `specverify_dpex.torch_ops` needs of the package,
with imports relative to wherever it is loaded, and the metadata. `kernels.get_local_kernel(folder)` loads it, and a
repository that holds it is loaded by `kernels.get_kernel`. The folder is the current one if none is named.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

NAME = "spec-verify-xpu"
VERSION = 1
"""The version that `get_kernel(..., version=1)` asks for: another one means another interface."""

BACKENDS = ("cpu", "xpu")
"""Builds without machine code are named after a backend; SPIR-V is compiled by the driver, so all hold the same."""

PACKAGE = Path(__file__).resolve().parent.parent / "specverify_dpex"
ROOTS = ("runtime", "torch_ops")
LEFT_OUT = ("compile",)  # imported by SPECVERIFY_DPEX_KERNELS=source alone, which is for who changes a kernel

INIT = '''"""Exact verification of speculative decoding: a build of specverify_dpex {release} for the kernels library.

    accepted, next_token = verify(draft_tokens, draft_probs, target_probs)
    tokens = emitted_tokens(draft_tokens, accepted, next_token)
"""

import os

import torch

from . import runtime

runtime.prepare()  # before dpctl loads: it makes the SYCL runtime and its devices findable

try:
    import dpctl  # noqa: F401
except ImportError as error:
    needed = runtime.STACKS.get(runtime.torch_sycl(os.path.dirname(torch.__file__)))
    release = f" {{needed.dpctl}}, which shares the SYCL runtime of torch {{torch.__version__}}" if needed else ""
    raise ImportError(f"spec-verify-xpu needs dpctl{{release}}: {{error}}. pip install dpctl") from error

from .result import VerifyResult
from .torch_ops import emitted_tokens, verify

__all__ = ["VerifyResult", "emitted_tokens", "verify"]
__version__ = "{release}"
'''

_ABSOLUTE = re.compile(r"^( *)from specverify_dpex(?:\.([\w.]+))? import ", re.MULTILINE)


def imported(source: str) -> set[str]:
    """The modules of the package that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = node.module.split(".")
            if parts[0] == PACKAGE.name:
                found.update(parts[1:2] or [alias.name for alias in node.names])
        elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE.name for alias in node.names):
            raise ValueError(f"`import {PACKAGE.name}` cannot be made relative: use `from {PACKAGE.name} import ...`")
    return found - set(LEFT_OUT)


def files() -> dict[str, bytes]:
    """The contents of the build, by path; all but its metadata."""
    contents: dict[str, bytes] = {}
    todo = set(ROOTS)
    while todo:
        module = todo.pop()
        folder = PACKAGE / module
        if folder.is_dir():
            paths = [path for path in folder.iterdir() if path.suffix in (".py", ".spv", ".json")]
        else:
            paths = [PACKAGE / f"{module}.py"]
        for path in paths:
            name = path.relative_to(PACKAGE).as_posix()
            contents[name] = path.read_bytes()
            if path.suffix == ".py":
                source = contents[name].decode()
                if folder.is_dir() and imported(source):
                    raise ValueError(f"{name}: imports below the package's top level are not made relative")
                contents[name] = _ABSOLUTE.sub(r"\1from .\2 import ", source).encode()
                todo |= {other for other in imported(source) if f"{other}.py" not in contents and other != module}
    release = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert release is not None
    contents["__init__.py"] = INIT.format(release=release.group(1)).encode()
    return dict(sorted(contents.items()))


def build(folder: Path) -> list[Path]:
    """Write the builds, in place of any that are there, and say where."""
    contents = files()
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + data for name, data in contents.items())).hexdigest()[:10]
    written = []
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        metadata = {
            "id": f"_{NAME.replace('-', '_')}_{backend}_{digest}",  # the module's name, and its operators' namespace
            "name": NAME,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],  # the format knows no dpctl: the module itself says so where it is missing
            "backend": {"type": backend},
        }
        for name, data in {**contents, "metadata.json": json.dumps(metadata, indent=2).encode() + b"\n"}.items():
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        written.append(variant)
    return written


if __name__ == "__main__":
    for variant in build(Path(*sys.argv[1:])):
        print(variant)
