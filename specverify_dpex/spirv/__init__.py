"""The compiled modules, and what is read out of a SPIR-V binary."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

MODULE_FOLDER = Path(__file__).parent
KERNELS_VARIABLE = "SPECVERIFY_DPEX_KERNELS"
"""The environment variable that says whether the modules here are run or compiled anew."""
KERNELS_CHOICES = ("modules", "source")

MANIFEST = "manifest.json"

_MAGIC = 0x07230203
_HEADER_WORDS = 5
_OP_EXECUTION_MODE = 16
_OP_CAPABILITY = 17
_OP_VARIABLE = 59
_STORAGE_FUNCTION = 7
_MODE_LOCAL_SIZE = 17

# The capabilities that a module may declare, by the numbers of the SPIR-V specification: what every OpenCL 2.1 device
# without float64 offers. Another one in a module is an error when it is compiled.
_CAPABILITIES = {
    4: "Addresses",
    5: "Linkage",
    6: "Kernel",
    8: "Float16Buffer",
    11: "Int64",
    18: "Groups",
    22: "Int16",
    38: "GenericPointer",
    39: "Int8",
}


def _instructions(module: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(opcode, words) of each instruction of a little-endian module."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    if words[0] != _MAGIC:
        raise ValueError("`module` must be SPIR-V in little-endian order: its magic number is missing")
    at = _HEADER_WORDS
    while at < len(words):
        count = words[at] >> 16
        yield words[at] & 0xFFFF, words[at : at + count]
        at += count


def capabilities(module: bytes) -> list[str]:
    """Names of the capabilities that a module declares.

    Raises
    ------
    ValueError
        If it declares one that a device may lack, such as Float64 (10).
    """
    declared = [words[1] for opcode, words in _instructions(module) if opcode == _OP_CAPABILITY]
    beyond = [number for number in declared if number not in _CAPABILITIES]
    if beyond:
        raise ValueError(f"`module` must need only what every device has: it declares the capabilities {beyond}")
    return [_CAPABILITIES[number] for number in declared]


def private_variables(module: bytes) -> int:
    """How many variables a module keeps in private memory, which is slow on a GPU."""
    return sum(opcode == _OP_VARIABLE and words[3] == _STORAGE_FUNCTION for opcode, words in _instructions(module))


def work_group_limit(module: bytes) -> int | None:
    """The work-items of a work-group that a module insists on; None where it takes what the device can run."""
    for opcode, words in _instructions(module):
        if opcode == _OP_EXECUTION_MODE and words[2] == _MODE_LOCAL_SIZE:
            return words[3] * words[4] * words[5]
    return None
