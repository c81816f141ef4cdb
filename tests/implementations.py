"""The implementations that the tests of the distribution and the specification run, by the id a test shows.

Each takes the five arrays of a case as numpy arrays, and `seed` and `offset` by keyword, and returns a
VerifyResult of numpy arrays.
"""

from __future__ import annotations

from typing import Any, Callable

from specverify_dpex import reference, verify

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "reference": reference.verify,
    "device": verify,
}
