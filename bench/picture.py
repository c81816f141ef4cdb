"""The benchmark's picture: time against batch, drafts and vocabulary, with the floor drawn in."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import AXES, AXIS_NAMES, TIMED, Row
from workloads import Workload

# Okabe and Ito's colours, which colour-blind readers tell apart: one for each library. The route that reads every
# position is drawn dashed; the kernel alone would hide the lines beside it.
STYLES: dict[str, dict[str, Any]] = {
    "specverify": {"color": "#0072B2", "linewidth": 2.6, "marker": "o", "zorder": 5},
    "specverify-prepared": {"color": "#56B4E9", "linewidth": 2.6, "marker": "o", "zorder": 4},
    "torch-eager": {"color": "#D55E00", "linestyle": "--"},
    "torch-lean": {"color": "#D55E00"},
    "dpnp-eager": {"color": "#009E73", "linestyle": "--"},
    "dpnp-lean": {"color": "#009E73"},
    "numpy-eager": {"color": "#CC79A7", "linestyle": "--"},
    "numpy-lean": {"color": "#CC79A7"},
    "transformers": {"color": "#B8860B", "marker": "D"},
    "torch-xpu-eager": {"color": "#7B3F00", "linestyle": "--"},
    "torch-xpu-lean": {"color": "#7B3F00"},
}
TITLES = {
    "batch": "sequences in the batch",
    "num_draft": "drafts of each sequence",
    "vocab": "tokens in the vocabulary",
}
FEWEST_POINTS = 2


def draw(rows: Sequence[Row], path: Path) -> str | None:
    """Write the picture; returns why there is none, if so."""
    panels = [panel for panel in map(longest_series, [rows] * len(AXES), AXES) if panel is not None]
    if not panels:
        return "no axis has two points"
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"matplotlib cannot be imported: {error}"

    figure = Figure(figsize=(5.2 * len(panels), 5.6), dpi=110, layout="constrained")
    plots = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    labels: dict[str, Any] = {}
    for plot, (axis, fixed, series) in zip(plots, panels):
        _draw_panel(plot, axis, fixed, series, labels)
    times = [time for _, _, series in panels for points in series.values() for time in points.values()]
    plots[0].set_ylim(min(times) / 1.6, max(times) * 1.6)
    plots[0].set_ylabel("median time of a call, both results complete")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    first = rows[0]
    figure.suptitle(f"Verifying a batch of drafts on {first['sycl_device'].split(', driver')[0]}", fontsize=12)
    figure.savefig(path)
    return None


def longest_series(rows: Sequence[Row], axis: str) -> tuple[str, Workload, dict[str, dict[int, float]]] | None:
    """The workloads that vary along the axis alone, with the most points and the most engines: what they share, and
    each engine's times by the axis. Where drafts vary, those that are all accepted come first."""
    found: dict[Workload, dict[str, dict[int, float]]] = {}
    for row in rows:
        workload = Workload(**row["shape"])
        series = found.setdefault(workload._replace(**{axis: 0}), {})
        if row["status"] == TIMED:
            series.setdefault(row["engine"], {})[getattr(workload, axis)] = row["median_us"]
        if "bandwidth_floor_us" in row:
            series.setdefault("bandwidth", {})[getattr(workload, axis)] = row["bandwidth_floor_us"]

    def rank(item: tuple[Workload, dict[str, dict[int, float]]]) -> tuple[int, bool, int]:
        shared, series = item
        most = max(map(len, series.values()), default=0)
        return most, (shared.acceptance == "all") == (axis == "num_draft"), sum(map(len, series.values()))

    if not found:
        return None
    shared, series = max(found.items(), key=rank)
    return (axis, shared, series) if rank((shared, series))[0] >= FEWEST_POINTS else None


def _draw_panel(
    plot: Any, axis: str, fixed: Workload, series: dict[str, dict[int, float]], labels: dict[str, Any]
) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    floor = series.get("floor", {})
    if floor:
        points, times = zip(*sorted(floor.items()))
        labels["floor: read the rows once"] = plot.fill_between(points, times, 1e-3, color="#d9d9d9", linewidth=0)
        plot.plot(points, times, color="#444444", linewidth=1.6, zorder=3)
    bandwidth = series.get("bandwidth", {})
    if bandwidth:
        (line,) = plot.plot(*zip(*sorted(bandwidth.items())), color="#444444", linestyle=":", linewidth=1.6)
        labels["floor by the reported bandwidth"] = line
    for name, style in STYLES.items():
        if series.get(name):
            (line,) = plot.plot(
                *zip(*sorted(series[name].items())), **{"marker": "o", "markersize": 4, "linewidth": 1.3, **style}
            )
            labels[name] = line
    points = sorted({point for times in series.values() for point in times})
    plot.set_xscale("log")
    plot.set_yscale("log")
    plot.set_xticks(points, [f"{point:,}" for point in points], fontsize=9)
    plot.xaxis.set_minor_locator(NullLocator())
    if axis == "vocab":
        plot.tick_params(axis="x", labelrotation=35)
    plot.yaxis.set_major_formatter(FuncFormatter(lambda time, _: _duration(time)))
    plot.grid(which="major", color="#e6e6e6", linewidth=0.8)
    plot.set_axisbelow(True)
    plot.spines[["top", "right"]].set_visible(False)
    plot.set_xlabel(TITLES[axis])
    stays = [f"{AXIS_NAMES[other]} {getattr(fixed, other):,}" for other in AXES if other != axis]
    stays += ["all accepted"] if fixed.acceptance == "all" else [f"{fixed.acceptance} acceptance"]
    plot.set_title(", ".join(stays), fontsize=10, color="#444444")


def _duration(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:g} {unit}"
    return f"{microseconds:g} µs"


if __name__ == "__main__":  # python bench/picture.py results.json: the picture of an earlier run
    source = Path(sys.argv[1])
    sys.exit(draw(json.loads(source.read_text(encoding="utf-8"))["rows"], source.with_suffix(".png")))
