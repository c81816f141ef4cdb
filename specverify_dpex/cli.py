"""The command specverify-dpex: `doctor` says what verify() can run on, `demo` shows it at work."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from specverify_dpex import doctor
from specverify_dpex.doctor import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(with_demo="demo" in arguments).parse_args(arguments)
    return int(args.run(args))


def _parser(with_demo: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specverify-dpex", description="Exact verification of speculative decoding on Intel GPUs."
    )
    parser.add_argument("--version", action="version", version=f"specverify-dpex {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    examine = commands.add_parser(
        "doctor",
        help="show devices, libraries and versions, and what to do about problems",
        description="Show devices, libraries and versions, and what to do about problems. "
        "The exit code is 0 if verify() can run on some device, else 1.",
    )
    examine.add_argument("--json", action="store_true", help="print the report as JSON")
    examine.set_defaults(run=_doctor)

    text = "decode English speculatively with a trigram model, and check every step"
    demo = commands.add_parser("demo", help=text, description=f"{text[0].upper()}{text[1:]}.")
    if with_demo:  # it has more to import than the other commands need
        from specverify_dpex import demo as speculative

        speculative.add_arguments(demo)
        demo.set_defaults(run=speculative.run)
    return parser


def _version() -> str:
    try:
        return metadata.version("specverify-dpex")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _doctor(args: argparse.Namespace) -> int:
    report = doctor.report()
    print(json.dumps(as_json(report), indent=2) if args.json else as_text(report))
    return 0 if report.usable else 1


def as_json(report: Report) -> dict[str, Any]:
    """The report and what follows from it, in JSON's types."""
    return {
        **dataclasses.asdict(report),
        "preparation": report.preparation._asdict(),
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
        "usable": report.usable,
    }


def as_text(report: Report) -> str:
    """The report for people."""
    sections = (
        ("Devices", _device_lines(report)),
        ("Versions", _version_lines(report)),
        ("SYCL runtime", _sycl_lines(report)),
        ("Environment", _environment_lines(report)),
        ("Problems", _problem_lines(report)),
    )
    blocks = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections]
    return "\n\n".join([*blocks, _verdict(report)])


def _device_lines(report: Report) -> Iterator[str]:
    for device in report.devices:
        fp64 = "float64" if device.fp64 else "no float64"
        default = ", the default" if device.is_default else ""
        yield f"{device.filter_string}  {device.name}{default}"
        yield f"    driver {device.driver}, {device.compute_units} compute units, {fp64}"
        yield f"    {'the kernels build' if device.usable else device.failure}"
    if not report.devices:
        yield "none"


def _version_lines(report: Report) -> Iterator[str]:
    versions = {"Python": report.python, **report.versions}
    width = max(map(len, versions))
    yield from (f"{name:{width}}  {version}" for name, version in versions.items())
    yield f"{'platform':{width}}  {report.platform}"


def _sycl_lines(report: Report) -> Iterator[str]:
    yield f"dpctl needs  {_soname(report.dpctl_sycl)}"
    if report.torch_sycl:
        yield f"torch needs  {_soname(report.torch_sycl)}"
    yield f"installed    {', '.join(report.sycl_installed) or 'none beside dpctl'}"
    yield f"loaded       {', '.join(report.sycl_loaded) or 'none'}"


def _soname(number: int) -> str:
    return f"libsycl.so.{number}" if number else "unknown"


def _environment_lines(report: Report) -> Iterator[str]:
    preparation = report.preparation
    for name, value in report.environment.items():
        ours = name == "OCL_ICD_FILENAMES" and value == preparation.icd_filenames
        yield f"{name}={value}{'  (set on import)' if ours else ''}"
    if preparation.preloaded:
        names = ", ".join(os.path.basename(path) for path in preparation.preloaded)
        yield f"loaded on import: {names}"
    if not report.environment and not preparation.preloaded:
        yield "nothing set"


def _problem_lines(report: Report) -> Iterator[str]:
    for problem in report.problems:
        yield from _wrap(f"{problem.text}.", "- ")
        yield from _wrap(problem.remedy, "  -> ")
    if not report.problems:
        yield "none"


def _wrap(text: str, bullet: str) -> list[str]:
    indent = " " * len(bullet)
    return textwrap.wrap(
        text,
        100,
        initial_indent=bullet,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,  # paths and commands stay in one piece
    )


def _verdict(report: Report) -> str:
    if not report.usable:
        return "verify() cannot run here."
    usable = [device for device in report.devices if device.usable]
    device = next((device for device in usable if device.is_default), usable[0])
    return f"verify() can run here, on {device.filter_string}."
