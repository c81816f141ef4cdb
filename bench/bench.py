"""Time verify() beside the routes that others offer and beside the least that any route could take.

    python bench/bench.py [--set full] [--workload b8-k5-v32000 ...] [--engine specverify ...] [--device opencl:cpu]

What is timed, on which inputs:

- Workloads are batch × drafts × vocabulary and how much of the drafts is accepted. Rows are peaked as a language
  model's are, the draft's follow the target's, and accepted lengths are spread over the batch, evenly from 0 to the
  number of drafts if nothing else is said; all from a fixed seed, in float32. Of a batch beyond 16, every 16th sequence
  has the same distributions, in memory of its own, and draws of its own.
- The short set varies one axis at a time; the full set is all of them with all others.
- Engines (engines.py) run in one process, on arrays that are where the engine wants them before the clock starts; an
  engine with a choice (the floor's work-group size and slices, torch's threads) is timed with each that may be the
  fastest, and the fastest counts.
- The engines take turns, so what disturbs the machine disturbs all alike; a slow engine has fewer iterations (each row
  says how many), spread over the same time. The timed runs of a turn follow untimed ones of the same engine: the caches
  hold its inputs and its code, and the threads of the engine before have gone to sleep. `--cold` sweeps the caches
  before each timed run.
- Warm-up runs, besides those that checked and chose, are outside, and the garbage collector is off. The time ends when
  both outputs are complete.
- No engine is timed on a wrong answer: specverify must equal the numpy reference bit for bit on both outputs, the floor
  numpy's sums to within float32 rounding, and the other routes, which cannot draw the reference's tokens, the
  reference's accepted lengths, with tokens that have weight where they must. This is checked before the first timed run
  and once more after the last. A wrong engine is a row that says how, and the exit status is 1.
- An engine that cannot run a workload, or not within the memory and the time for one run, is a row that says why.

GB/s counts the rows that every route must read (the target's where each walk stopped, and the draft's where it
rejected) over the engine's time, whatever it read besides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import specverify_dpex  # before dpctl: it makes the SYCL runtime and its devices findable

# isort: split
import dpctl
import dpctl.utils
import picture
import report
from dpctl.memory import MemoryUSMDevice
from engines import ENGINES, LIBRARY, Engine, describe
from report import FAILED, SKIPPED, TIMED, UNAVAILABLE, Row
from workloads import Inputs, Workload, full_set, short_set

SETTLE_NS = 15_000_000
"""How long the untimed runs at the beginning of a turn last. The threads of the engine before spin for a millisecond or
two, and then a call of a Python library still takes up to a third longer for another ten."""
RUNS_A_TURN = 5
"""Timed runs that follow."""
SLOW_NS = 20_000_000
"""What an engine that takes this long finds in the caches matters little: it needs only the time to settle."""
TELLING_BYTES = 2**20
"""Inputs of a run that tells how long a larger one would take: with smaller ones it is mostly the cost of calls."""
SWEPT_BYTES = 2**27
"""What `--cold` copies between runs, several times any cache of a CPU or an integrated GPU."""
FEWEST_ITERATIONS = 3
COMPARED = (*LIBRARY, "floor")
COMPARED_SHARE = 10
"""How much more time than others the engines have whose small differences matter."""


class Limits(NamedTuple):
    """How much of everything an engine gets on a workload."""

    iterations: int = 50
    warmup: int = 5
    seconds: float = 0.2  # of timed runs, unless they are the fewest
    longest_run: float = 0.4  # seconds
    memory: float = 6.0  # GB


SETS = {"short": (short_set, Limits()), "full": (full_set, Limits(seconds=0.5, longest_run=2.0))}


class Rates:
    """How fast the engines took their inputs at best, to tell beforehand what would take too long."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[str, float] = {}

    def note(self, name: str, workload: Workload, seconds: float) -> None:
        if workload.input_bytes >= TELLING_BYTES:
            rate = seconds / workload.input_bytes
            self._seconds_per_byte[name] = min(rate, self._seconds_per_byte.get(name, rate))

    def expected(self, name: str, workload: Workload) -> float:
        """The least seconds of a run by the workloads before; 0 if there are none."""
        return self._seconds_per_byte.get(name, 0.0) * workload.input_bytes


def bench(
    workload: Workload,
    names: Sequence[str],
    queue: dpctl.SyclQueue,
    limits: Limits,
    cold: bool = False,
    rates: Rates | None = None,
) -> list[Row]:
    """Check and time engines on one workload; returns a row for each of `names`."""
    rates = rates or Rates()
    engines = {name: ENGINES[name]() for name in names}
    verdicts = {name: _foresee(engine, name, workload, limits, rates) for name, engine in engines.items()}
    inputs = Inputs(workload, queue) if any(verdict is None for verdict in verdicts.values()) else None
    contests: dict[str, Contest] = {}
    for name, engine in engines.items():
        if verdicts[name] is None and inputs is not None:
            verdicts[name], contests[name] = _judge(engine, inputs, limits)
            rates.note(name, workload, contests[name].seconds)
    ready = [name for name, verdict in verdicts.items() if verdict == (TIMED, None)]
    runners = [runner for name in ready for runner in contests[name].runners(limits, name in COMPARED)]
    taken = measure(runners, _sweep(queue) if cold else None)
    fastest: dict[str, tuple[Runner, list[int]]] = {}
    for name in ready:
        # A last look: the times are worth nothing if an iteration went wrong.
        if reason := engines[name].mismatch():
            verdicts[name] = FAILED, f"after the last iteration, {reason}"
            continue
        own = [(runner, times) for runner, times in zip(runners, taken) if runner.engine is engines[name]]
        fastest[name] = min(own, key=lambda timed: np.median(timed[1]))
        engines[name].use(fastest[name][0].setting)

    medians = {name: float(np.median(times)) for name, (_, times) in fastest.items()}
    bandwidth = device_bandwidth(queue.sycl_device)
    rows = []
    for name, engine in engines.items():
        status, reason = verdicts[name] or (FAILED, "not judged")
        row: Row = {
            "workload": workload.name,
            "engine": name,
            "status": status,
            "reason": reason,
            "shape": workload._asdict(),
            "device": engine.device(queue),
            "setting": engine.setting,
            "cache": "cold" if cold else "warm",
        }
        if inputs is not None:
            row["mean_accepted"] = float(inputs.expected.accepted.mean())
            row["bytes_read"] = inputs.bytes_read
            if bandwidth is not None:
                row["bandwidth_floor_us"] = inputs.bytes_read / bandwidth * 1e6
        if name in fastest:
            runner, times = fastest[name]
            p20, p80 = np.percentile(times, (20, 80))
            row |= {
                "iterations": runner.iterations,
                "warmup": runner.warmup,
                "median_us": medians[name] / 1e3,
                "p20_us": p20 / 1e3,
                "p80_us": p80 / 1e3,
                **{f"ratio_to_{base}": medians[name] / medians[base] for base in report.BASES if base in medians},
                "gb_per_s": row["bytes_read"] / medians[name],
                "times_us": [nanoseconds / 1e3 for nanoseconds in times],
            }
        rows.append(row)
    return rows


Verdict = tuple[str, "str | None"]


class Runner(NamedTuple):
    """An engine with a setting, and how often it runs."""

    engine: Engine
    setting: Any
    iterations: int
    warmup: int


class Contest(NamedTuple):
    """The settings that an engine is timed with, and the seconds of a run."""

    engine: Engine
    settings: Sequence[Any]
    seconds: float

    def runners(self, limits: Limits, compared: bool) -> list[Runner]:
        affordable = int(limits.seconds * (COMPARED_SHARE if compared else 1) / self.seconds / len(self.settings))
        iterations = max(min(affordable, limits.iterations), FEWEST_ITERATIONS)
        return [Runner(self.engine, setting, iterations, min(affordable, limits.warmup)) for setting in self.settings]


def _foresee(engine: Engine, name: str, workload: Workload, limits: Limits, rates: Rates) -> Verdict | None:
    """Why an engine need not be tried, if so."""
    if reason := engine.unavailable(workload):
        return UNAVAILABLE, reason
    memory = engine.memory(workload) / 1e9
    if memory > limits.memory:
        return SKIPPED, f"takes about {memory:.1f} GB with its inputs, and --memory allows {limits.memory:g}"
    expected = rates.expected(name, workload)
    if expected > limits.longest_run:
        return SKIPPED, f"one run would take about {expected:.2g} s, and --longest-run allows {limits.longest_run:g}"
    return None


def _judge(engine: Engine, inputs: Inputs, limits: Limits) -> tuple[Verdict, Contest]:
    """Run an engine: whether it may be timed, and if not, why; and what to time."""
    seconds = 0.0
    settings: list[Any] = []
    try:
        engine.prepare(inputs)
        engine.run()
        seconds = _seconds(engine)
        if seconds > limits.longest_run:  # once more: the machine may have been busy
            seconds = min(seconds, _seconds(engine))
        if seconds > limits.longest_run:
            reason = f"one run takes {seconds:.2g} s, and --longest-run allows {limits.longest_run:g}"
            return (SKIPPED, reason), Contest(engine, settings, seconds)
        settings = engine.settings()
        mismatch = None
        for setting in settings:
            engine.use(setting)
            seconds = min(seconds, _seconds(engine))
            mismatch = mismatch or engine.mismatch()
    except Exception as error:  # whatever a library throws, the other engines are still worth timing
        return (FAILED, f"{type(error).__name__}: {error}"), Contest(engine, settings, seconds)
    return ((FAILED, mismatch) if mismatch else (TIMED, None)), Contest(engine, settings, seconds)


def _seconds(engine: Engine) -> float:
    start = time.perf_counter()
    engine.run()
    return time.perf_counter() - start


def measure(runners: Sequence[Runner], sweep: Callable[[], None] | None = None) -> list[list[int]]:
    """Nanoseconds of each iteration of each runner, taken in turn: every runner's are spread over all rounds."""
    clock = time.perf_counter_ns
    times: list[list[int]] = [[] for _ in runners]
    for engine, setting, _, warmup in runners:
        engine.use(setting)
        for _ in range(warmup):
            engine.run()
    rounds = -(-max((runner.iterations for runner in runners), default=0) // RUNS_A_TURN)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for (engine, setting, iterations, _), taken in zip(runners, times):
                share = (turn + 1) * iterations // rounds - turn * iterations // rounds
                if share == 0:
                    continue
                engine.use(setting)
                if taken and taken[-1] > SLOW_NS:
                    time.sleep(SETTLE_NS / 1e9)
                else:
                    settled = clock() + SETTLE_NS
                    engine.run()
                    while clock() < settled:
                        engine.run()
                for _ in range(share):
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


def device_bandwidth(device: dpctl.SyclDevice) -> float | None:
    """The memory bandwidth that a device reports, in bytes per second; None where it reports none, as CPUs do."""
    try:
        reported = dpctl.utils.intel_device_info(device).get("max_mem_bandwidth")
    except (AttributeError, TypeError, ValueError, RuntimeError):  # an older dpctl, or another maker's device
        return None
    return float(reported) if reported else None


def conditions(queue: dpctl.SyclQueue, command: str) -> Row:
    """What every row carries besides its own numbers."""
    bandwidth = device_bandwidth(queue.sycl_device)
    libraries = ("dpctl", "dpnp", "numpy", "torch", "transformers", "intel-opencl-rt")
    return {
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "specverify_dpex": specverify_dpex.__version__,
            **{name: _version(name) for name in libraries},
        },
        "sycl_device": describe(queue.sycl_device),
        "bandwidth_gb_per_s": bandwidth and bandwidth / 1e9,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
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


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python bench/bench.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--set", choices=list(SETS), default="short", help="the workloads and the time for each")
    add("--workload", nargs="+", type=_workload, metavar="bB-kK-vV[-ACCEPTANCE]", help="in place of the set's")
    add("--engine", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="NAME")
    add("--iterations", type=_count, help="timed runs of an engine on a workload, at most")
    add("--warmup", type=_count)
    add("--seconds", type=_positive, help=f"of timed runs, though there are at least {FEWEST_ITERATIONS}")
    add("--longest-run", type=_positive, metavar="SECONDS", help="skip an engine where one run takes longer")
    add("--memory", type=_positive, metavar="GB", help="skip an engine where it takes more with its inputs")
    add("--cold", action="store_true", help="sweep the caches before each timed run")
    add("--device", help="a SYCL filter such as level_zero:gpu:0; the default device if not given")
    add(
        "--json",
        type=Path,
        default=Path(__file__).with_name("results.json"),
        metavar="FILE",
        help="the tables and the picture go beside it, as .md and .png",
    )
    options = parser.parse_args(arguments)

    try:
        queue = dpctl.SyclQueue(*([options.device] if options.device else []))
    except dpctl.SyclQueueCreationError as error:
        parser.error(f"{error}. `specverify-dpex doctor` shows the devices")
    make_set, limits = SETS[options.set]
    chosen = {field: getattr(options, field) for field in Limits._fields}
    limits = limits._replace(**{field: value for field, value in chosen.items() if value is not None})
    shared = conditions(queue, f"{parser.prog} {shlex.join(arguments)}".strip())
    rates = Rates()
    rows: list[Row] = []
    workloads = options.workload or make_set()
    for index, workload in enumerate(workloads):
        print(f"{index + 1}/{len(workloads)} {workload.name} ...", end=" ", file=sys.stderr, flush=True)
        start = time.monotonic()
        done = bench(workload, options.engine, queue, limits, options.cold, rates)
        rows += ({**row, **shared} for row in done)
        print(f"{time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        # After every workload, so that an interrupted run leaves what it has.
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    text = report.markdown(rows)
    print(text)
    options.json.with_suffix(".md").write_text(text, encoding="utf-8")
    if reason := picture.draw(rows, options.json.with_suffix(".png")):
        print(f"No picture: {reason}", file=sys.stderr)
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


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
