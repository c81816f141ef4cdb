"""Time verify() beside the routes that array libraries offer and beside the least that any route could take.

    python bench/bench.py [--workload b8-k5-v32000 ...] [--engine specverify ...] [--device opencl:cpu]

What is timed, on which inputs:

- Workloads are batch × drafts × vocabulary. Rows are peaked as a language model's are, the draft's follow the
  target's, and the accepted lengths are spread evenly over 0 to the number of drafts; all from a fixed seed,
  in float32.
- Engines (engines.py) run in one process, on arrays that are where the engine wants them before the clock
  starts; an engine with a choice (the floor's work-group size and slices, torch's threads) is timed with its
  fastest.
- Iteration i of every engine comes before iteration i + 1 of any, so what disturbs the machine disturbs all
  alike. Each timed run follows untimed ones of the same engine: the caches hold its inputs and the threads of
  the engine before have gone to sleep. `--cold` sweeps the caches in between.
- Warm-up runs are outside, and the garbage collector is off. The time ends when both outputs are complete.
- No engine is timed on a wrong answer: specverify must equal the numpy reference bit for bit on both outputs,
  the floor numpy's sums to within float32 rounding, and the eager routes, which cannot draw the reference's
  tokens, the reference's accepted lengths, with tokens that have weight where they must. This is checked
  before the first timed run and once more after the last. A wrong engine is a row that says how, and the exit
  status is 1.
- An engine whose library is not installed is a row that says so.

GB/s counts the rows that every route must read (the target's where each walk stopped, and the draft's where
it rejected) over the engine's time, whatever it read besides.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import specverify_dpex  # before dpctl: it makes the SYCL runtime and its devices findable

# isort: split
import dpctl
from dpctl.memory import MemoryUSMDevice
from engines import ENGINES, Engine, describe
from workloads import Inputs, Workload

WORKLOADS = ("b8-k5-v32000", "b8-k5-v128256", "b1-k5-v32000", "b1-k5-v128256")
REQUIRED_SPEEDUP = 20
"""How much faster than torch's eager route verify() has to be at the first workload, on a CPU device."""
SETTLE_NS = 2_000_000
"""How long the untimed runs before a timed one last: other engines' threads spin for up to a millisecond."""
SWEPT_BYTES = 2**27
"""What `--cold` copies between runs, several times any cache of a CPU or an integrated GPU."""

TIMED, UNAVAILABLE, FAILED = "timed", "unavailable", "failed"
BASES = ("specverify", "floor")
"""The engines that all others are compared with."""

Row = dict[str, Any]


def bench(
    workload: Workload,
    names: Sequence[str],
    queue: dpctl.SyclQueue,
    iterations: int,
    warmup: int,
    cold: bool = False,
) -> list[Row]:
    """Check and time engines on one workload; returns a row for each of `names`."""
    inputs = Inputs(workload, queue)
    engines = {name: ENGINES[name]() for name in names}
    verdicts = {name: _judge(engine, inputs) for name, engine in engines.items()}
    ready = [name for name in names if verdicts[name][0] == TIMED]
    sweep = _sweep(queue) if cold else None
    times = dict(zip(ready, measure([engines[name] for name in ready], iterations, warmup, sweep)))
    for name in ready:
        # A last look: the times are worth nothing if an iteration went wrong.
        if reason := engines[name].mismatch():
            verdicts[name] = FAILED, f"after the last iteration, {reason}"
            del times[name]

    medians = {name: float(np.median(taken)) for name, taken in times.items()}
    rows = []
    for name, engine in engines.items():
        status, reason = verdicts[name]
        row: Row = {
            "workload": workload.name,
            "engine": name,
            "status": status,
            "reason": reason,
            "shape": workload._asdict(),
            "mean_accepted": float(inputs.expected.accepted.mean()),
            "device": engine.device,
            "setting": engine.setting,
            "iterations": iterations,
            "warmup": warmup,
            "cache": "cold" if cold else "warm",
        }
        if name in times:
            p20, p80 = np.percentile(times[name], (20, 80))
            row |= {
                "median_us": medians[name] / 1e3,
                "p20_us": p20 / 1e3,
                "p80_us": p80 / 1e3,
                **{f"ratio_to_{base}": medians[name] / medians[base] for base in BASES if base in medians},
                "gb_per_s": inputs.bytes_read / medians[name],
                "times_us": [nanoseconds / 1e3 for nanoseconds in times[name]],
            }
        rows.append(row)
    return rows


def _judge(engine: Engine, inputs: Inputs) -> tuple[str, str | None]:
    """Run an engine once: whether it may be timed, and if not, why."""
    try:
        engine.prepare(inputs)
        engine.run()
        reason = engine.mismatch()
    except ImportError as error:
        return UNAVAILABLE, f"{engine.needs} cannot be imported: {error}"
    except Exception as error:  # whatever a library throws, the other engines are still worth timing
        return FAILED, f"{type(error).__name__}: {error}"
    return (FAILED, reason) if reason else (TIMED, None)


def measure(
    engines: Sequence[Engine], iterations: int, warmup: int, sweep: Callable[[], None] | None = None
) -> list[list[int]]:
    """Nanoseconds of each iteration of each engine, taken in turn."""
    clock = time.perf_counter_ns
    times: list[list[int]] = [[] for _ in engines]
    for engine in engines:
        for _ in range(warmup):
            engine.run()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(iterations):
            for engine, taken in zip(engines, times):
                settled = clock() + SETTLE_NS
                engine.run()
                while clock() < settled:
                    engine.run()
                if sweep is not None:
                    sweep()
                start = clock()
                engine.run()
                taken.append(clock() - start)
    finally:
        if collecting:
            gc.enable()
    return times


def _sweep(queue: dpctl.SyclQueue) -> Callable[[], None]:
    """A function that leaves nothing of an engine's in the device's caches."""
    source, target = (MemoryUSMDevice(SWEPT_BYTES // 2, queue=queue) for _ in range(2))
    return lambda: queue.memcpy(target, source, SWEPT_BYTES // 2)


def conditions(queue: dpctl.SyclQueue, command: str) -> Row:
    """What every row carries besides its own numbers."""
    return {
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "specverify_dpex": specverify_dpex.__version__,
            **{name: _version(name) for name in ("dpctl", "dpnp", "numpy", "torch")},
        },
        "sycl_device": describe(queue.sycl_device),
        "system": platform.platform(),
        "command": command,
    }


def _commit() -> str:
    """The commit of the checkout, with -dirty where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def markdown(rows: Sequence[Row]) -> str:
    """The table, with its conditions below."""
    lines = [
        "| workload | engine | median µs | p20 | p80 | × specverify | × floor | GB/s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [row["workload"], row["engine"]]
        if row["status"] == TIMED:
            cells += [_number(row[key]) for key in ("median_us", "p20_us", "p80_us")]
            cells += [_number(row.get(f"ratio_to_{base}")) for base in BASES]
            cells += [_number(row["gb_per_s"])]
        else:
            reason = " ".join(row["reason"].replace("|", "\\|").split())
            cells += [f"{row['status']}: {reason}", *[""] * 5]
        lines.append(f"| {' | '.join(cells)} |")

    first = rows[0]
    accepted = {row["workload"]: f"{row['mean_accepted']:.2g} ({row['workload']})" for row in rows}
    engines_on: dict[str, dict[str, None]] = {}
    settings: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        engines_on.setdefault(row["device"], {})[row["engine"]] = None
        if row["status"] == TIMED and row["setting"]:
            settings.setdefault(row["engine"], {}).setdefault(row["setting"], []).append(row["workload"])
    lines += [
        "",
        f"- {first['iterations']} iterations after {first['warmup']} of warm-up, {first['cache']} caches",
        f"- Mean accepted length: {', '.join(accepted.values())}",
        *(f"- On {device}: {', '.join(engines)}" for device, engines in engines_on.items()),
    ]
    for engine, workloads in settings.items():
        choices = (f"{choice} ({', '.join(names)})" for choice, names in workloads.items())
        lines.append(f"- {engine}: {'; '.join(choices) if len(workloads) > 1 else next(iter(workloads))}")
    versions = (f"{name} {number}" for name, number in first["versions"].items() if number)
    lines += [
        f"- {', '.join(versions)}, {first['system']}",
        f"- Commit {first['commit']}, `{first['command']}`",
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    """Three digits are as many as such times have."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def requirement(rows: Sequence[Row]) -> str:
    """Whether verify() is as much faster than torch's eager route as it has to be."""
    workload = Workload.parse(WORKLOADS[0])
    text = f"At {workload} verify() has to be {REQUIRED_SPEEDUP} times faster than torch's eager route: "
    for row in rows:
        ratio = row.get("ratio_to_specverify")
        if ratio and (row["workload"], row["engine"]) == (workload.name, "torch-eager"):
            verdict = "met" if ratio >= REQUIRED_SPEEDUP else "NOT MET"
            return text + f"it is {_number(ratio)} times faster, {verdict}."
    return text + "not measured in this run."


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python bench/bench.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload",
        nargs="+",
        type=_workload,
        default=[Workload.parse(name) for name in WORKLOADS],
        metavar="bB-kK-vV",
    )
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="NAME")
    parser.add_argument("--iterations", type=_count, default=30)
    parser.add_argument("--warmup", type=_count, default=5)
    parser.add_argument("--cold", action="store_true", help="sweep the caches before each timed run")
    parser.add_argument("--device", help="a SYCL filter such as level_zero:gpu:0; the default device if not given")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the printed table there too")
    options = parser.parse_args(arguments)

    try:
        queue = dpctl.SyclQueue(*([options.device] if options.device else []))
    except dpctl.SyclQueueCreationError as error:
        parser.error(f"{error}. `specverify-dpex doctor` shows the devices")
    shared = conditions(queue, f"{parser.prog} {shlex.join(arguments)}".strip())
    rows: list[Row] = []
    for workload in options.workload:
        print(f"{workload.name} ...", file=sys.stderr, flush=True)
        done = bench(workload, options.engine, queue, options.iterations, options.warmup, options.cold)
        rows += ({**row, **shared} for row in done)
    table = markdown(rows)
    print(table)
    print(requirement(rows))
    options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(table, encoding="utf-8")
    return int(any(row["status"] == FAILED for row in rows))


def _workload(name: str) -> Workload:
    try:
        return Workload.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


if __name__ == "__main__":
    sys.exit(main())
