"""What the README shows runs, and prints what it shows; so do the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import arrays
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
# A block of Python, and the block of text after it where there is one.
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", README, flags=re.DOTALL)
MODULES = [f"specverify_dpex.{name}" for name in ("emitted", "philox", "reference", "stats", "usm_array", "verify")]


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_readme_example_prints_what_it_shows(device, code, output):
    if "import torch\n" in code and arrays.optional("torch") is None:
        pytest.skip("torch is not installed: the session `current` of noxfile.py has it, and fails without it")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_readme_has_examples():
    assert EXAMPLES and all(output for _, output in EXAMPLES)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(device, name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
