"""The benchmark's tables: times, what the project asks of itself, and how cost grows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from engines import LIBRARY
from workloads import Workload

Row = dict[str, Any]

TIMED, UNAVAILABLE, SKIPPED, FAILED = "timed", "unavailable", "skipped", "failed"
BASES = ("specverify", "floor")
"""The engines that all others are compared with."""
AXES = ("batch", "num_draft", "vocab")
AXIS_NAMES = {"batch": "batch", "num_draft": "drafts", "vocab": "vocabulary"}
FEWEST_POINTS = 3
"""Of a fitted exponent."""


def markdown(rows: Sequence[Row]) -> str:
    """The report: every row, then the summary, which a terminal shows last."""
    sections = [
        ("Every row", every_row(rows)),
        ("Conditions", conditions(rows)),
        ("Median µs", medians(rows)),
        ("How cost grows", growth_table(rows)),
        ("Requirements", requirement_table(rows)),
    ]
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in sections) + "\n"


def every_row(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row["workload"], row["engine"]]
        if row["status"] == TIMED:
            cells += [number(row[key]) for key in ("median_us", "p20_us", "p80_us")]
            cells += [number(row.get(f"ratio_to_{base}")) for base in BASES]
            cells += [number(row["gb_per_s"]), str(row["iterations"]), row["setting"]]
        else:
            cells += [f"{row['status']}: {row['reason']}", *[""] * 7]
        lines.append(cells)
    heading = ("workload", "engine", "median µs", "p20", "p80", "× specverify", "× floor", "GB/s", "runs", "with")
    return table(heading, lines, left=2)


def medians(rows: Sequence[Row]) -> str:
    """One line for each workload, one column for each engine that was timed."""
    names = _unique(row["engine"] for row in _timed(rows))
    heading = ["workload", "mean accepted", "specverify / floor"]
    reported = any("bandwidth_floor_us" in row for row in rows)
    if reported:
        heading.append("floor by the reported bandwidth")
    lines = []
    for workload in _unique(row["workload"] for row in rows):
        taken = {row["engine"]: row for row in rows if row["workload"] == workload}
        first = next(iter(taken.values()))
        cells = [workload, number(first.get("mean_accepted"))]
        cells.append(number(taken.get("specverify", {}).get("ratio_to_floor")))
        if reported:
            cells.append(number(first.get("bandwidth_floor_us")))
        cells += [number(taken[name].get("median_us")) if name in taken else "" for name in names]
        lines.append([cell or "–" for cell in cells])
    return table([*heading, *names], lines)


def conditions(rows: Sequence[Row]) -> str:
    """What the numbers were taken with."""
    first = rows[0]
    engines_on: dict[str, dict[str, None]] = {}
    for row in _timed(rows):
        engines_on.setdefault(row["device"], {})[row["engine"]] = None
    bandwidth = first["bandwidth_gb_per_s"]
    versions = (f"{name} {number}" for name, number in first["versions"].items() if number)
    lines = [
        *(f"- On {device}: {', '.join(engines)}" for device, engines in engines_on.items()),
        f"- The device reports {'no' if bandwidth is None else f'{number(bandwidth)} GB/s of'} memory bandwidth",
        f"- {first['cache'].capitalize()} caches; load average before the run {first['load_before']:.1f} on "
        f"{first['cpus']} CPUs",
        f"- {', '.join(versions)}, {first['system']}",
        f"- Commit {first['commit']}, `{first['command']}`",
    ]
    return "\n".join(lines)


class Growth(NamedTuple):
    """How an engine's time grows along one axis: as the axis to the power of `exponent`."""

    axis: str
    fixed: Workload
    """The workload at the axis's first point."""
    engine: str
    last: int
    exponent: float

    @property
    def span(self) -> str:
        """The axis with its first and last points, and what stays."""
        stays = [f"{AXIS_NAMES[axis]} {getattr(self.fixed, axis)}" for axis in AXES if axis != self.axis] + [
            f"{self.fixed.acceptance} acceptance"
        ]
        return f"{AXIS_NAMES[self.axis]} {getattr(self.fixed, self.axis)} to {self.last} ({', '.join(stays)})"


def growth(rows: Sequence[Row]) -> list[Growth]:
    """Least squares through the logarithms of the medians, wherever an axis has enough points."""
    grown = []
    for axis in AXES:
        series: dict[tuple[Any, ...], dict[int, float]] = {}
        for row in _timed(rows):
            workload = Workload(**row["shape"])
            rest = workload._replace(**{axis: 0})
            series.setdefault((rest, row["engine"]), {})[getattr(workload, axis)] = row["median_us"]
        for (rest, engine), points in series.items():
            if len(points) >= FEWEST_POINTS:
                exponent = float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])
                fixed = rest._replace(**{axis: min(points)})
                grown.append(Growth(axis, fixed, engine, max(points), exponent))
    return grown


def growth_table(rows: Sequence[Row]) -> str:
    """Exponents of every engine; an engine that stops short of an axis's end has a line of its own."""
    spans: dict[str, dict[str, float]] = {}
    for one in growth(rows):
        spans.setdefault(one.span, {})[one.engine] = one.exponent
    if not spans:
        return f"No axis has {FEWEST_POINTS} points."
    names = [name for name in _unique(row["engine"] for row in rows) if any(name in taken for taken in spans.values())]
    lines = [
        [span, *(f"{taken[name]:.2f}" if name in taken else "–" for name in names)] for span, taken in spans.items()
    ]
    return "Time grows as the axis to the power of:\n\n" + table(("axis", *names), lines)


class Requirement(NamedTuple):
    """What the project asks of itself, and what a run says to it."""

    text: str
    limit: str
    measured: str
    met: bool | None
    """None where the run did not measure it."""


def requirements(rows: Sequence[Row]) -> list[Requirement]:
    """What the project asks of itself on the CPU device, as ratios within the run."""
    return [
        *_floor_requirements(rows),
        *(
            _at_least(rows, Workload(8, 5, 32000), engine, limit)
            for engine, limit in (("torch-eager", 50), ("dpnp-eager", 15))
        ),
        _fastest(rows),
        _drafts(rows),
    ]


def _floor_requirements(rows: Sequence[Row]) -> Iterator[Requirement]:
    base = Workload(8, 5, 128256)
    limits = {
        Workload(8, 5, 32000): 1.7,
        Workload(1, 5, 128256): 1.7,
        Workload(1, 5, 262144): 1.7,
        **{base._replace(batch=batch): 1.4 for batch in (8, 16)},
        **{base._replace(batch=batch): 1.15 for batch in (64, 256)},
    }
    for workload, limit in limits.items():
        ratio, *parts = (_value(rows, workload, engine, "ratio_to_floor") for engine in LIBRARY)
        shown = [f"{name.split('-')[1]} {part:.2f}" for name, part in zip(LIBRARY[1:], parts) if part]
        yield Requirement(
            f"specverify / floor at {workload}",
            f"at most {limit}",
            (f"{ratio:.2f}" if ratio else "") + (f" ({', '.join(shown)})" if shown else ""),
            ratio <= limit if ratio else None,
        )


def _at_least(rows: Sequence[Row], workload: Workload, engine: str, limit: float) -> Requirement:
    ratio = _value(rows, workload, engine, "ratio_to_specverify")
    return Requirement(
        f"{engine} / specverify at {workload}",
        f"at least {limit}",
        number(ratio),
        ratio >= limit if ratio else None,
    )


def _fastest(rows: Sequence[Row]) -> Requirement:
    """The closest that any other engine comes, over all workloads."""
    rivals = [row for row in _timed(rows) if row["engine"] not in (*LIBRARY, *BASES) and "ratio_to_specverify" in row]
    text, limit = "any other engine / specverify, the least at any workload", "more than 1"
    if not rivals:
        return Requirement(text, limit, "", None)
    closest = min(rivals, key=lambda row: row["ratio_to_specverify"])
    ratio = closest["ratio_to_specverify"]
    return Requirement(text, limit, f"{number(ratio)} ({closest['engine']}, {closest['workload']})", ratio > 1)


def _drafts(rows: Sequence[Row]) -> Requirement:
    """Where all drafts are accepted the same rows are read for any number of them."""
    text, limit = "exponent of specverify's time in the number of drafts, all accepted", 0.1
    exponents = [
        one.exponent
        for one in growth(rows)
        if (one.axis, one.engine, one.fixed.acceptance) == ("num_draft", "specverify", "all")
    ]
    worst = max(exponents, default=None)
    return Requirement(
        text,
        f"at most {limit}",
        "" if worst is None else f"{worst:.3f}",
        None if worst is None else worst <= limit,
    )


def requirement_table(rows: Sequence[Row]) -> str:
    words = {True: "yes", False: "NO", None: "not measured"}
    lines = [[one.text, one.limit, one.measured, words[one.met]] for one in requirements(rows)]
    return table(("requirement", "limit", "measured", "met"), lines, left=2)


def table(heading: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first columns are aligned to the left, the others to the right."""
    rule = [*["---"] * left, *["---:"] * (len(heading) - left)]
    cells = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in (heading, rule, *lines))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def number(value: float | None) -> str:
    """Three digits are as many as such times have."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _timed(rows: Sequence[Row], engine: str | None = None) -> list[Row]:
    return [row for row in rows if row["status"] == TIMED and engine in (None, row["engine"])]


def _value(rows: Sequence[Row], workload: Workload, engine: str, key: str) -> float | None:
    for row in _timed(rows, engine):
        if row["workload"] == workload.name:
            return row.get(key)
    return None


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


if __name__ == "__main__":  # python bench/report.py results.json: the report of an earlier run
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"]))
