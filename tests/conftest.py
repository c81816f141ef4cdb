"""Fixtures: the devices and the kinds of arrays that exist here."""

from __future__ import annotations

import importlib.util
import os

import specverify_dpex  # noqa: F401  first: it makes the SYCL runtime findable for dpctl

# isort: split
import arrays
import dpctl
import pytest

# Libraries that are not installed, and may be missing: tests that use them, or the fixture of their name, are left out,
# so that a skip means something.
_MISSING = {name for name in ("jax", "kernels", "torch") if importlib.util.find_spec(name) is None} - {*arrays.REQUIRED}
# The kernels' sources need the compiler stack; every other session tests the modules alone.
_NEEDS = {"test_kernels.py": importlib.util.find_spec("numba_dpex") is None, "test_torch_ops.py": "torch" in _MISSING}
collect_ignore = [name for name, missing in _NEEDS.items() if missing]

REQUIRE_DEVICE = bool(os.environ.get("CI") or os.environ.get("SPECVERIFY_DPEX_REQUIRE_DEVICE"))
_DEVICES = dpctl.get_devices()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize(
            "device", _DEVICES or [None], ids=lambda device: device and device.filter_string, indirect=True
        )
    kinds = {
        "kind": arrays.kinds(),
        "strided_kind": [kind for kind in arrays.kinds() if kind.strided],
        "usm_kind": [kind for kind in arrays.kinds() if kind.name not in ("numpy", "dlpack-host", "torch")],
    }
    for name in kinds.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, kinds[name], ids=[kind.name for kind in kinds[name]])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not _MISSING.isdisjoint(getattr(item, "fixturenames", ()))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> dpctl.SyclDevice:
    """Each SYCL device there is; in CI, a machine without one fails."""
    if request.param is None:
        missing = "no SYCL device: `specverify-dpex doctor` says what to install"
        if REQUIRE_DEVICE:
            pytest.fail(missing)
        pytest.skip(missing)
    return request.param


@pytest.fixture
def queue(device: dpctl.SyclDevice) -> dpctl.SyclQueue:
    """The queue that array libraries use for the device."""
    return arrays.cached_queue(device)
