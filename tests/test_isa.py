"""`make isa` counts what is there: loops, spills and private memory, in each form that the compilers write."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "tools"))

import isa

# A loop in a loop, as the disassembler writes them. The inner one takes 16 tokens of two rows in 8 instructions.
ASSEMBLY = """
L0:
(W)     mov (1|M0)               r8.4<1>:f     0.0:f
L16:
        mov (16|M0)              r62.0<1>:d    r63.0<8;8,1>:f                   {Compacted}
L32:
        send.dc1 (16|M0)         r16      r14     null    0x0            0x04205E02           {@2,$9} // wr:2+0, rd:2
        send.dc1 (16|M0)         r18      r4      null    0x0            0x04205E01           {@1,$5} // wr:2+0, rd:2
        sync.nop                             null                             {Compacted,$5.dst}
        mov (16|M0)              r20.0<1>:d    r18.0<8;8,1>:f                   {Compacted,@1}
        mov (16|M0)              r22.0<1>:f    r20.0<8;8,1>:d                   {Compacted,@1}
        add (16|M0)              r24.0<1>:f    r22.0<8;8,1>:f  r18.0<8;8,1>:f   {Compacted,@1}
(~f0.1) break (16|M0)                        L64                  L64
        while (16|M0)                        L32
L64:
(W&f1.0) jmpi                                L16
        goto (16|M0)                         L80                  L80
L80:
        join (16|M0)                         L96
"""

INFO = """---
version:         '1.20'
kernels:
  - name:            verify_f32_f32
    execution_env:
      barrier_count:   1
      grf_count:       128
      simd_size:       16
      slm_size:        3584
{environment}    payload_arguments:
      - arg_type:        local_size
        offset:          12
        size:            12
{memory}...
"""
SCRATCH = """    per_thread_memory_buffers:
      - type:            scratch
        usage:           {usage}
        size:            4096
"""


def describe(environment: str = "", memory: str = "", kernel: str = "verify_f32_f32") -> isa.Code:
    info = INFO.format(environment=environment, memory=memory)
    return isa.describe({".ze_info": info.encode(), f".text.{kernel}": bytes(640)}, kernel, ASSEMBLY)


def test_describe_reads_the_kernel():
    code = isa.Code(16, 128, spilled=0, private=0, local=3584, barriers=1, size=640, loops={2: 8.0})
    assert describe() == code
    assert describe(kernel="uniforms") == code._replace(loops={})


@pytest.mark.parametrize(
    ("environment", "memory", "spilled", "private"),
    [
        ("      spill_size:      6720\n", SCRATCH.format(usage="single_space"), 6720, 0),
        ("      private_size:    64\n", "", 0, 64),
        ("", SCRATCH.format(usage="single_space"), 4096, 0),
        ("", SCRATCH.format(usage="spill_fill_space"), 4096, 0),
        ("", SCRATCH.format(usage="private_space"), 0, 4096),
    ],
    ids=["spill_size", "private_size", "single_space", "spill_fill_space", "private_space"],
)
def test_describe_sees_spills_and_private_memory(environment, memory, spilled, private):
    code = describe(environment, memory)
    assert (code.spilled, code.private) == (spilled, private)
    assert any("bytes" in complaint for complaint in isa.complaints("uniforms", code, "here"))


def test_complaints_name_what_is_wrong():
    code = describe()
    few, many = (code._replace(loops={1: count, 2: count}) for count in (1.0, isa.MOST_INSTRUCTIONS + 0.5))
    assert not list(isa.complaints("verify_f32_f32", few, "here"))
    assert list(isa.complaints("verify_f32_f32", many, "here")) == [
        f"verify_f32_f32 on here: {isa.MOST_INSTRUCTIONS}.5 instructions in the inner loop"
    ]
    assert "not recognised" in next(isa.complaints("verify_f32_f32", code, "here"))  # the loop of one row is not there
    assert not list(isa.complaints("uniforms", many, "here"))


def test_token_loops_takes_the_innermost():
    assert [len(body) for body in isa.inner_loops(ASSEMBLY)] == [8]
    assert list(isa.token_loops(ASSEMBLY)) == [(2, 8.0)]
    assert list(isa.token_loops(ASSEMBLY.replace("(16|M0)", "(32|M0)"))) == [(2, 4.0)]


def test_sections_reads_an_elf_file():
    names = b"\0.text.k\0.names\0"
    headers = [(0, 0, 0), (1, 64, 3), (9, 67, len(names))]  # name, offset, size
    table = b"".join(struct.pack("<2I4Q2I2Q", name, 0, 0, 0, at, size, 0, 0, 0, 0) for name, at, size in headers)
    start = 67 + len(names)
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<QI6H", start, 0, 64, 0, 0, 64, len(headers), 2)
    assert isa.sections(header + b"abc" + names + table) == {"": b"", ".text.k": b"abc", ".names": names}
