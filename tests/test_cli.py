"""The command line, called in this process and as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_doctor import CPU, GPU, HEALTHY, PROBLEMS

import specverify_dpex
from specverify_dpex import cli, doctor

REQUIRE_DEVICE = bool(os.environ.get("CI") or os.environ.get("SPECVERIFY_DPEX_REQUIRE_DEVICE"))
BROKEN = replace(HEALTHY, devices=(replace(CPU, failure="draw_f32.spv does not build: no"),))
NO_DEVICE = replace(HEALTHY, devices=())


@pytest.fixture
def run_doctor(monkeypatch, capsys):
    """Run `doctor` on a given report; returns the exit code and what was printed."""

    def run(report, *options):
        monkeypatch.setattr(doctor, "report", lambda: report)
        code = cli.main(["doctor", *options])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("report", "expected"),
    [(HEALTHY, 0), (BROKEN, 1), (NO_DEVICE, 1), (replace(BROKEN, devices=(*BROKEN.devices, GPU)), 0)],
    ids=["healthy", "kernels-do-not-build", "no-device", "another-device"],
)
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_doctor_exit_code_says_whether_verify_can_run(run_doctor, report, expected, options):
    assert run_doctor(report, *options)[0] == expected


def test_doctor_prints_what_it_found(run_doctor):
    _, text = run_doctor(
        replace(
            HEALTHY,
            devices=(CPU, replace(GPU, failure="no")),
            environment={"OCL_ICD_FILENAMES": "/venv/lib/libintelocl.so", "LD_LIBRARY_PATH": "/x"},
            preparation=HEALTHY.preparation._replace(preloaded=("/venv/lib/libintlc.so.5",)),
        )
    )
    for line in (
        "  opencl:cpu:0  A CPU, the default",
        "      driver 2026.1, 8 compute units, float64",
        "      the kernels build",
        "      driver 1.6, 512 compute units, no float64",
        "  dpctl            0.22.1",
        "  dpctl needs  libsycl.so.9",
        "  loaded       /venv/lib/libsycl.so.9",
        "  OCL_ICD_FILENAMES=/venv/lib/libintelocl.so  (set on import)",
        "  LD_LIBRARY_PATH=/x",
        "  loaded on import: libintlc.so.5",
        "verify() can run here, on opencl:cpu:0.",
    ):
        assert line in text.splitlines()


def test_doctor_prefers_the_default_device(run_doctor):
    devices = (replace(GPU, failure=None), CPU)
    assert run_doctor(replace(HEALTHY, devices=devices))[1].endswith("on opencl:cpu:0.\n")
    devices = (GPU, replace(CPU, failure="no"))
    assert run_doctor(replace(HEALTHY, devices=devices))[1].endswith("on level_zero:gpu:0.\n")


@pytest.mark.parametrize("name", PROBLEMS)
def test_doctor_prints_each_problem_with_its_remedy(run_doctor, name):
    report, text, _ = PROBLEMS[name]
    printed = " ".join(run_doctor(report)[1].split())
    assert text in printed
    assert f"-> {report.problems[0].remedy}" in printed


def test_doctor_says_when_nothing_is_there(run_doctor):
    lines = run_doctor(NO_DEVICE)[1].splitlines()
    assert lines[:2] == ["Devices", "  none"]
    assert lines[-1] == "verify() cannot run here."


def test_doctor_json_holds_the_report_and_its_problems(run_doctor):
    report, text, _ = PROBLEMS["two-runtimes"]
    found = json.loads(run_doctor(report, "--json")[1])
    assert found["usable"] is True
    assert text in found["problems"][0]["text"]
    assert found["devices"][0]["filter_string"] == "opencl:cpu:0"
    assert found["preparation"]["library_dir"] == "/venv/lib"
    assert found["sycl_loaded"] == list(report.sycl_loaded)


def test_demo_is_given_its_options_and_its_exit_code_returned(monkeypatch):
    seen = []
    demo = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--steps", type=int),
        run=lambda args: seen.append(args.steps) or 3,
    )
    monkeypatch.setitem(sys.modules, "specverify_dpex.demo", demo)
    monkeypatch.setattr(specverify_dpex, "demo", demo, raising=False)
    assert cli.main(["demo", "--steps", "7"]) == 3
    assert seen == [7]


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("specverify-dpex ")


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["doctor", "--unknown"]], ids=" ".join)
def test_wrong_arguments_exit_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: specverify-dpex" in capsys.readouterr().err


def run_module(tmp_path, *arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "specverify_dpex", *arguments],
        env={**os.environ, **settings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_module_runs_the_doctor_on_this_machine(tmp_path):
    done = run_module(tmp_path, "doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["usable"] else 1)
    if REQUIRE_DEVICE:
        assert found["usable"]


def test_module_runs_the_doctor_without_a_device(tmp_path):
    done = run_module(tmp_path, "doctor", ONEAPI_DEVICE_SELECTOR="opencl:fpga")
    assert done.returncode == 1
    assert "no SYCL device passes ONEAPI_DEVICE_SELECTOR=opencl:fpga" in done.stdout


def test_module_runs_the_doctor_without_dpctl(tmp_path):
    (tmp_path / "dpctl.py").write_text("raise ImportError('libsycl.so.7: cannot open shared object file')")
    done = run_module(tmp_path, "doctor")
    assert done.returncode == 1, done.stderr
    assert "dpctl cannot be used: ImportError: libsycl.so.7" in " ".join(done.stdout.split())
