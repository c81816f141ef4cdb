"""The machine code that Intel's graphics compilers make of the SPIR-V modules, for each GPU family.

    python tools/isa.py                      compile with both compilers, print, and write docs/isa.md
    python tools/isa.py --compiler debian12  compile with Debian 12's alone and print
    python tools/isa.py --check              fail where docs/isa.md says something else, instead of writing it

Fails where a kernel spills registers, has private memory, or spends more instructions than it may. No GPU is needed:
the compilers work for any family. They come from Debian's packages, unpacked into .nox.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import debian
import level_zero

MODULE_FOLDER = debian.ROOT / "specverify_dpex" / "spirv"
PAGE = debian.ROOT / "docs" / "isa.md"
LOOP_MODULE = "verify_f32_f32"  # where the time goes
LOOP_LANES = 16  # what instructions are counted for: a SIMD16 vector of tokens
MOST_INSTRUCTIONS = 24  # for the two rows of a residual, on any family


class Compiler(NamedTuple):
    """An ocloc, with the families that it is asked for."""

    title: str
    release: str
    packages: tuple[str, ...]
    with_runtime: bool
    compiler_packages: tuple[str, str]  # ocloc, and what it loads
    options: tuple[str, ...]
    families: dict[str, str]


COMPILERS = {
    "debian12": Compiler(
        "Debian 12",
        "bookworm",
        level_zero.PACKAGES,  # the driver's own, so that the two share one folder
        False,
        ("intel-opencl-icd", "libigc1"),
        ("--format", "zebin"),  # its usual format says nothing about the code
        {
            "tgllp": "Iris Xe (Tiger Lake)",
            "adls": "UHD Graphics (Alder Lake)",
            "dg2-g10": "Arc A (Alchemist)",
            "pvc": "Data Center GPU Max",
        },
    ),
    "unstable": Compiler(
        "Debian unstable",
        "sid",
        ("intel-ocloc", "libigc2"),
        True,
        ("intel-ocloc", "libigc2"),
        (),
        {
            "tgllp": "Iris Xe (Tiger Lake)",
            "dg2-g10": "Arc A (Alchemist)",
            "pvc": "Data Center GPU Max",
            "lnl-m": "Arc (Lunar Lake)",
            "bmg-g21": "Arc B (Battlemage)",
        },
    ),
}


class Code(NamedTuple):
    """What a compiler made of a module."""

    simd: int
    registers: int
    spilled: int
    private: int
    local: int
    barriers: int
    size: int
    loops: dict[int, float]
    """Instructions for `LOOP_LANES` tokens in the inner loop, by the number of rows that it reads."""


# --------------------------------------------------------------------------------------------------
# Compiling


class Ocloc:
    """Intel's offline compiler, of a Debian release."""

    def __init__(self, compiler: Compiler):
        self._compiler = compiler
        root = debian.unpack(compiler.release, compiler.packages, compiler.with_runtime)
        self.versions = ", ".join(
            f"{package} {debian.version(root, package)}" for package in compiler.compiler_packages
        )
        library = next(root.glob("usr/lib/*/libiga64.so.?"))  # the disassembler
        if not library.with_suffix("").exists():  # the name under which Debian 12's ocloc looks for it
            library.with_suffix("").symlink_to(library.name)
        program = next(path for path in sorted(root.glob("usr/bin/ocloc*")) if path.is_file())
        self._command = debian.command(root, program)

    def code(self, module: Path, family: str) -> Code:
        """Compile a module for a family."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = ("-spirv_input", "-file", str(module))
            names = ("-output", "module", "-output_no_suffix", "-out_dir", str(folder))
            self._run("compile", *source, "-device", family, *self._compiler.options, *names)
            binary = next(path for path in (folder / "module", folder / "module.bin") if path.exists())
            (folder / "parts").mkdir()
            self._run("disasm", "-file", str(binary), "-device", family, "-dump", str(folder / "parts"))
            assembly = (folder / "parts" / f".text.{module.stem}.asm").read_text()
            return describe(sections(binary.read_bytes()), module.stem, assembly)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"isa.py: `ocloc {' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}")


# --------------------------------------------------------------------------------------------------
# Reading the result


def sections(elf: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit ELF file by name."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    count, names_index = struct.unpack_from("<2H", elf, 60)
    headers = [struct.unpack_from("<2I4Q", elf, table + 64 * index) for index in range(count)]
    start, size = headers[names_index][4:6]
    names = elf[start : start + size]
    return {names[name:].split(b"\0")[0].decode(): elf[at : at + size] for name, _, _, _, at, size in headers}


def describe(parts: dict[str, bytes], kernel: str, assembly: str) -> Code:
    """What the sections of a binary and its disassembly say of its one kernel."""
    info = parts[".ze_info"].decode()

    def value(name: str) -> int:
        """A number of the kernel's description, which leaves out those that are zero."""
        found = re.findall(rf"^\s+{name}:\s+(\d+)$", info, flags=re.MULTILINE)
        return max(map(int, found), default=0)

    # Compilers before 2024 have no spill_size and private_size: they list the memory by its use. "single_space" is
    # both together.
    memory: dict[str, int] = {}
    for usage, size in re.findall(r"^\s+usage:\s+(\w+)\n\s+size:\s+(\d+)$", info, flags=re.MULTILINE):
        memory[usage] = memory.get(usage, 0) + int(size)
    spilled, private = value("spill_size"), value("private_size")
    if not (spilled or private):
        spilled = memory.get("spill_fill_space", 0) + memory.get("single_space", 0)
        private = memory.get("private_space", 0)
    return Code(
        simd=value("simd_size"),
        registers=value("grf_count"),
        spilled=spilled,
        private=private,
        local=value("slm_size"),
        barriers=value("barrier_count"),
        size=len(parts[f".text.{kernel}"]),
        loops=dict(token_loops(assembly)) if kernel == LOOP_MODULE else {},
    )


def token_loops(assembly: str) -> Iterator[tuple[int, float]]:
    """(rows, instructions for `LOOP_LANES` tokens) of each inner loop that turns rows into weights.

    Those that take the most tokens at a time come last, after the loops for remainders.

    Every instruction counts, with those of the loop itself and the waits for loads. A token takes one conversion from
    float to integer, for the lower limb of its weight: that tells those loops from others, and how many tokens a turn
    has.
    """
    bodies = [(sum(map(_conversion_lanes, body)), body) for body in inner_loops(assembly)]
    for tokens, body in sorted(bodies):
        if tokens:
            loaded = sum(_width(line) for line in body if re.search(r"\bsend\S* +\(", line))
            yield round(loaded / tokens), len(body) * LOOP_LANES / tokens


def inner_loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop that has no other within."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in filter(str.strip, assembly.splitlines()):
        label = re.match(r"\s*(\w+):\s*$", line)
        if label:
            labels[label[1]] = len(lines)
        else:
            lines.append(line)
    ends: dict[int, int] = {}  # of each loop, by its start: the last jump back to it
    for at, line in enumerate(lines):
        jump = re.search(r"\b(?:while|jmpi|goto)\b(.*)", line)
        for target in re.findall(r"\bL\d+\b", jump[1]) if jump else ():
            if labels[target] <= at:
                ends[labels[target]] = at
    spans = list(ends.items())
    inner = [
        (start, end)
        for start, end in spans
        if not any(start <= other and last <= end for other, last in spans if (other, last) != (start, end))
    ]
    return [lines[start : end + 1] for start, end in inner]


def _conversion_lanes(line: str) -> int:
    """The lanes of a conversion from float to integer, 0 for other instructions."""
    return _width(line) if re.search(r"\bmov \(.*?\) +r\S+:u?d +\S+:f\b", line) else 0


def _width(line: str) -> int:
    match = re.search(r"\((\d+)\|M\d+\)", line)
    return int(match[1]) if match else 0


# --------------------------------------------------------------------------------------------------
# The page

HEADINGS = ("GPU", "compiler", "SIMD", "registers", "spilled", "private", "local memory", "barriers", "code")


def row_of(code: Code, family: str, compiler: Compiler) -> list[str]:
    sizes = [f"{size:,}" for size in (code.spilled, code.private, code.local)]
    gpu = f"{compiler.families[family]}, `{family}`"
    cells = [gpu, compiler.title, str(code.simd), str(code.registers), *sizes, str(code.barriers), f"{code.size:,}"]
    if code.loops:
        cells += [f"{code.loops.get(rows, 0):.1f}" for rows in (2, 1)]
    return cells


def page(tables: dict[str, list[list[str]]], versions: dict[str, str], digest: str) -> str:
    """docs/isa.md."""
    text = [
        "# Machine code by GPU family",
        "",
        "Written by `make isa`: what Intel's graphics compilers make of the SPIR-V modules. No GPU is needed for it.",
        "",
        f"- Modules: combined SHA-256 {digest}",
        *(f"- Compiler of {title}: {packages}" for title, packages in versions.items()),
        "",
        "Sizes are in bytes. Where anything is spilled or private, `make isa` fails.",
        "",
        f"The last two columns of `{LOOP_MODULE}` are the instructions of its inner loop for {LOOP_LANES} tokens,",
        "loads and the loop's own included: of a residual, which reads a row of the draft and one of the target, and",
        "of the target's row alone.",
    ]
    for name, rows in tables.items():
        headings = [*HEADINGS, *(("residual", "one row") if name == LOOP_MODULE else ())]
        text += ["", f"## {name}", "", _row(headings), _row(["---", "---", *["---:"] * (len(headings) - 2)])]
        text += map(_row, rows)
    return "\n".join(text) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def complaints(name: str, code: Code, where: str) -> Iterator[str]:
    """What is wrong with a kernel's code."""
    if code.spilled or code.private:
        yield f"{name} on {where}: {code.spilled} bytes spilled, {code.private} bytes of private memory"
    if name == LOOP_MODULE:
        if sorted(code.loops) != [1, 2]:
            yield f"{name} on {where}: its inner loops were not recognised: {code.loops}"
        elif max(code.loops.values()) > MOST_INSTRUCTIONS:
            yield f"{name} on {where}: {max(code.loops.values()):.1f} instructions in the inner loop"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="isa.py", description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", choices=COMPILERS, help="use this one alone, and do not write the page")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    options = parser.parse_args(arguments)

    modules = sorted(MODULE_FOLDER.glob("*.spv"))
    digest = hashlib.sha256(b"".join(module.read_bytes() for module in modules)).hexdigest()[:16]
    tables: dict[str, list[list[str]]] = {module.stem: [] for module in modules}
    versions: dict[str, str] = {}
    wrong: list[str] = []
    for name in [options.compiler] if options.compiler else COMPILERS:
        compiler = COMPILERS[name]
        ocloc = Ocloc(compiler)
        versions[compiler.title] = ocloc.versions
        for family in compiler.families:
            for module in modules:
                code = ocloc.code(module, family)
                wrong += complaints(module.stem, code, f"{family} by {compiler.title}")
                tables[module.stem].append(row_of(code, family, compiler))
    text = page(tables, versions, digest)
    print(text)
    if options.check:
        written = PAGE.read_text().splitlines() if PAGE.exists() else []
        # A new build of a compiler that makes the same code does not matter.
        stale = [line for line in text.splitlines() if line not in written and not line.startswith("- Compiler")]
        wrong += [f"docs/isa.md is stale, run `make isa`; it lacks: {line}" for line in stale]
    elif not options.compiler and not wrong:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    for complaint in wrong:
        print(complaint)
    print(f"{sum(map(len, tables.values()))} kernels compiled, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
