"""bench/overhead.py times every kind of array that is there, after checking the answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "bench" / "overhead.py"


def test_overhead_prints_a_row_for_every_kind_with_its_parts(device, tmp_path):
    out = tmp_path / "overhead.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--repeats", "20", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr  # 1: slower than the limits, which so few runs do not decide
    assert "Traceback" not in done.stderr
    written = json.loads(out.read_text())
    rows, launches = written["rows"], written["launches"]
    assert {"UsmArray", "USM array interface", "DLPack of UsmArray", "numpy"} <= set(rows)
    for name, row in rows.items():
        assert f"| {name} | {row['overhead']:.1f} |" in done.stdout
        assert 0 < row["overhead p20"] <= row["overhead"] <= row["overhead p80"]
        assert 0 < row["arguments"] < row["overhead"] + row["launch"]
        assert ("limit" in row) == (name in ("UsmArray", "USM array interface", "DLPack of UsmArray"))
        assert ("exports" in row) == name.startswith("DLPack")
    assert launches["empty"] < launches["prepared"] < launches["plain"]
    assert f"dpctl: {launches['empty']:.1f} µs" in done.stdout
