"""The steps of the kernels as plain Python, and how kernels.py becomes modules. Only where numba-dpex is installed."""

from __future__ import annotations

import numpy as np
import pytest

import specverify_dpex  # noqa: F401  first: it makes the SYCL runtime findable for numba-dpex

# isort: split
from specverify_dpex import compile as compiler
from specverify_dpex import kernels, launch, philox, reference, tuning
from specverify_dpex.spirv import MODULE_FOLDER

EDGES = np.array(
    [0, 1, -1, 0.1, 2.0**-22, 2.0**-44, 2.0**-45, 2.0**-126, 2.0**-149, 1 - 2.0**-24, 1 + 2.0**-23, 3e38]
    + [np.inf, -np.inf, np.nan],
    dtype="f4",
)


@pytest.fixture
def on_host(monkeypatch):
    """The intrinsics of weights in numpy: float64 holds the product of an fma and all of its sum that matters here."""
    monkeypatch.setattr(kernels, "bits_of", lambda value: np.float32(value).view("u4"))
    monkeypatch.setattr(kernels, "fma", lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)))
    for name in ("_clamp", "_add_upper", "_upper_units"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name).py_func)


def test_limbs_are_the_weight(on_host):
    rng = np.random.default_rng(0)
    for r in np.concatenate([EDGES, rng.random(1000, dtype="f4"), (2 ** -rng.uniform(0, 60, 5000)).astype("f4")]):
        high, low = kernels._limbs.py_func(r)
        assert (high.dtype, low.dtype) == (np.uint32, np.int32)
        assert (int(high) << 25) + int(low) == reference._scalar_weight(float(r))
        assert high <= 2**19 and abs(low) <= 2**24
        with np.errstate(over="ignore"):
            assert int(kernels._combine.py_func(high, low)) == reference._scalar_weight(float(r))


@pytest.mark.parametrize("largest", [1.0, 2.0**-20, 2.0**-40])
def test_sums_of_upper_limbs_are_exact(on_host, largest):
    """As many weights as one of the sums of a tile has, all of the largest among them."""
    rng = np.random.default_rng(1)
    steps = tuning.MAX_TILE_STEPS // 4
    for tile in [np.full(steps, largest, "f4"), *(largest * rng.random((200, steps), dtype="f4"))]:
        upper, low_sum = kernels.UPPER_ZERO, 0
        for r in tile:
            upper, low = kernels._add_upper(upper, kernels._clamp(r))
            assert abs(low) <= 2**24
            low_sum += int(low)
        total = (int(kernels._upper_units(upper)) << 25) + low_sum
        assert total == sum(reference._scalar_weight(float(r)) for r in tile)
        assert 4 * abs(low_sum) < 2**31


@pytest.mark.parametrize("uniform", EDGES, ids=str)
def test_threshold_has_96_bits(uniform):
    fixed = int(kernels._fixed_point.py_func(uniform))
    assert fixed == (0 if not uniform > 0 else min(int(min(float(uniform), 1.0) * 2**32), 2**32 - 1))
    for total in (1, 2**32 - 1, 2**44, 2**63 + 12345, 2**64 - 1):
        assert int(kernels._threshold.py_func(np.uint64(fixed), np.uint64(total))) == fixed * total >> 32


def test_uniform_is_philox():
    for seed in (0, 7, 2**64 - 1):
        for position, row, offset, stream in ((0, 0, 0, 0), (5, 3, 2**32 - 1, 1), (8, 255, 12, 0)):
            with np.errstate(over="ignore"):
                drawn = kernels._uniform.py_func(np.uint64(seed), position, row, offset, stream)
            assert drawn == philox.uniform_scalar(seed, position, row, offset, stream)


def test_modules_are_what_the_sources_compile_to(monkeypatch):
    fresh = compiler.compile_modules()
    for name, content in fresh.items():
        assert (MODULE_FOLDER / name).read_bytes() == content, f"{name} is stale: run `make compile`"
    monkeypatch.setattr(compiler, "compile_modules", lambda: fresh)
    assert compiler.main(["--check"]) == 0


def test_compiling_again_gives_the_same_bytes():
    entry = compiler._entry_points()[0]
    assert entry.compile() == entry.compile()


def test_from_source_compiles_what_is_asked_for_once(monkeypatch):
    compiled = []
    compile_ = compiler.EntryPoint.compile
    monkeypatch.setattr(compiler.EntryPoint, "compile", lambda entry: compiled.append(entry.name) or compile_(entry))
    from_files, from_source = launch._Modules(), launch._Modules()
    monkeypatch.delenv("SPECVERIFY_DPEX_KERNELS", raising=False)
    expected = {name: from_files.load(name) for name in ("emitted", "check_rows_f16")}
    assert compiled == []
    monkeypatch.setenv("SPECVERIFY_DPEX_KERNELS", "source")
    for name in ("emitted", "check_rows_f16", "emitted"):
        assert from_source.load(name) == expected[name]
    assert compiled == ["emitted", "check_rows_f16"]


def test_check_names_what_is_stale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "MODULE_FOLDER", tmp_path)
    monkeypatch.setattr(compiler, "compile_modules", lambda: {"one.spv": b"1", "two.spv": b"2"})
    assert compiler.main([]) == 0
    assert compiler.main(["--check"]) == 0
    (tmp_path / "two.spv").write_bytes(b"?")
    (tmp_path / "three.spv").write_bytes(b"3")
    capsys.readouterr()
    assert compiler.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert [line.rpartition("/")[2] for line in printed.splitlines()[:2]] == ["three.spv", "two.spv"]
    assert printed.endswith("2 files compiled, 2 differ: run `make compile`\n")
