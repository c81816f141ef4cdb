"""What a call of verify() costs beyond its launch, for every kind of array, and where the time goes.

    python bench/overhead.py [--repeats 2000] [--json results.json]

The problem is as small as can be (batch 1, 1 draft, vocabulary 32) and the arrays are on the device, so that nothing
but overhead is left. In each call the clock is read around its launch: "launch" is the submission and, for arrays
whose queue keeps no order, the wait for it; "overhead" is the rest of that call. Its parts are timed on their own:
"arguments" looks at the arrays and finds the plan for them, "memory" is what results go into, "results" makes arrays
of it; what they leave is the order with other work on the queue. "exports" is the part of the arguments that the
arrays' own library takes for its capsules. Times are medians in microseconds, with the 20th and
80th percentile of the overhead. Every result is compared with the reference before it is timed.

What the project asks of itself is compared with them, and the exit status says whether it holds:

- An overhead of at most 60 us for arrays with the USM array interface, and of 120 us for ones with DLPack alone, on a
  machine that reads a dpnp array's interface in 2.4 us and takes 40 us to export it by DLPack and import it again. Both
  are timed here as well, in loops of nothing else, and the limits are those of this machine: in proportion.
- A plain call with its results complete takes at most 10 times what dpctl takes to launch an empty kernel and wait for
  it, and a prepared call at most 4 times, each of the three in turn with the others.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

import specverify_dpex  # first: it makes the SYCL runtime findable for dpctl

# isort: split
import dpctl
import dpctl.program
import numpy as np
from dpctl._sycl_queue_manager import get_device_cached_queue

from specverify_dpex import UsmArray, launch, prepare, reference, verify

core = sys.modules["specverify_dpex.verify"]
INTERFACE, ROUND_TRIP = "a dpnp array's interface", "a DLPack round trip of it"
UNITS = {INTERFACE: 2.4, ROUND_TRIP: 40.0}
"""Microseconds that these take on the machine that the limits are for."""
LIMITS = {
    "UsmArray": (60, INTERFACE),
    "USM array interface": (60, INTERFACE),
    "DLPack of UsmArray": (120, ROUND_TRIP),
}
"""Microseconds that the overhead may take there, and in proportion to what."""
LAUNCHES = {"plain": 10, "prepared": 4}
"""How many empty kernels, launched and awaited, a call may take."""


class Interface:
    """An object with the USM array interface alone."""

    def __init__(self, owner: UsmArray):
        self.__sycl_usm_array_interface__ = owner.__sycl_usm_array_interface__
        self._owner = owner


class Dlpack:
    """An object with DLPack alone. Its methods are those of its owner: functions in between would be timed as well."""

    def __init__(self, owner: Any):
        self._owner = owner
        self.__dlpack__ = owner.__dlpack__
        self.__dlpack_device__ = owner.__dlpack_device__


def optional(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def makers(queue: dpctl.SyclQueue) -> dict[str, Callable[[np.ndarray], Any] | str]:
    """How each kind of array is made, or why it is not."""

    def usm(array: np.ndarray) -> UsmArray:
        return UsmArray.from_buffer(array.tobytes(), array.shape, array.dtype.name, sycl_queue=queue)

    found: dict[str, Callable[[np.ndarray], Any] | str] = {
        "UsmArray": usm,
        "USM array interface": lambda array: Interface(usm(array)),
        "DLPack of UsmArray": lambda array: Dlpack(usm(array)),
    }
    for name in ("dpctl.tensor", "dpnp.tensor", "dpnp"):
        module = optional(name)
        if module is None:
            found[name] = "not installed"
        else:
            make = found[name] = lambda array, module=module: module.asarray(array, sycl_queue=queue)
            if name.endswith("tensor"):
                found[f"DLPack of {name}"] = lambda array, make=make: Dlpack(make(array))
    found["numpy"] = lambda array: array
    torch = optional("torch")
    found["torch, CPU"] = "not installed" if torch is None else torch.from_numpy
    return found


class Clock:
    """Time that calls spend in their launch: submitting it, and waiting for it."""

    def __init__(self) -> None:
        self.spent = 0
        submit, event = launch.Launch.submit, dpctl.SyclEvent

        def timed_submit(*arguments: Any) -> dpctl.SyclEvent:
            start = time.perf_counter_ns()
            submitted = submit(*arguments)
            self.spent += time.perf_counter_ns() - start
            return submitted

        def wait(submitted: dpctl.SyclEvent) -> None:
            start = time.perf_counter_ns()
            event.wait(submitted)
            self.spent += time.perf_counter_ns() - start

        launch.Launch.submit = timed_submit  # type: ignore[method-assign]
        dpctl.SyclEvent = type("SyclEvent", (event,), {"wait": wait})  # which submit makes its events of


def hot(work: Callable[[], Any], repeats: int) -> float:
    """Microseconds of a piece of work with warm caches: the median of many runs in a loop."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        work()
        taken.append(time.perf_counter_ns() - start)
    return statistics.median(taken) / 1000


def units(queue: dpctl.SyclQueue, repeats: int) -> dict[str, float]:
    """What `UNITS` take here; nothing where there is no dpnp."""
    dpnp = optional("dpnp")
    if dpnp is None:
        return {}
    array = dpnp.zeros((1, 2, 32), dtype="f4", sycl_queue=queue)
    return {
        INTERFACE: hot(lambda: array.__sycl_usm_array_interface__, repeats),
        ROUND_TRIP: hot(lambda: dpnp.from_dlpack(array), repeats),
    }


def microseconds(
    works: dict[str, Callable[[], Any]], repeats: int, queue: dpctl.SyclQueue, clock: Clock
) -> dict[str, list[tuple[float, float]]]:
    """Time of each of many runs, without and with its launch, after a warm-up; the device is idle before each.

    The works are run in turn, so that what disturbs the machine disturbs all alike.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(repeats + repeats // 10):
        for name, work in works.items():
            queue.wait()
            clock.spent = 0
            start = time.perf_counter_ns()
            work()
            whole = time.perf_counter_ns() - start
            taken[name].append(((whole - clock.spent) / 1000, whole / 1000))
    return {name: runs[repeats // 10 :] for name, runs in taken.items()}


def problem() -> tuple[np.ndarray, ...]:
    """The arguments of verify, on the host."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(32), (1, 3)).astype("f4")
    arrays = (np.array([[3]]), probs[:, :1], probs[:, 1:], *(rng.random((1, n), dtype="f4") for n in (1, 2)))
    return tuple(map(np.ascontiguousarray, arrays))


def check(result: Any, queue: dpctl.SyclQueue) -> None:
    queue.wait()
    for array, right in zip(result, reference.verify(*problem())):
        if int(array.tolist()[0] if hasattr(array, "tolist") else array[0]) != right[0]:
            raise RuntimeError(f"wrong answer: {array} instead of {right}")


def launches(queue: dpctl.SyclQueue, repeats: int, clock: Clock) -> dict[str, float]:
    """Microseconds of an empty kernel through dpctl, and of a plain and a prepared call, each with the wait for it."""
    program = dpctl.program.create_program_from_spirv(queue, Path(__file__).with_name("empty.spv").read_bytes(), "")
    empty, unused = program.get_sycl_kernel("empty"), [ctypes.c_int64(0)]
    inputs = [UsmArray.from_buffer(array.tobytes(), array.shape, array.dtype.name) for array in problem()]
    prepared = prepare(*inputs)
    check(prepared(), queue)
    works = {
        "empty": lambda: queue.submit(empty, unused, [1], [1]).wait(),
        "plain": lambda: verify(*inputs).event.wait(),
        "prepared": lambda: prepared().event.wait(),
    }
    return {
        name: statistics.median(whole for _, whole in taken)
        for name, taken in microseconds(works, repeats, queue, clock).items()
    }


def measure(make: Callable[[np.ndarray], Any], queue: dpctl.SyclQueue, repeats: int, clock: Clock) -> dict[str, float]:
    inputs = [make(array) for array in problem()]
    check(verify(*inputs), queue)
    draft_tokens, draft_probs, target_probs, *uniforms = inputs
    arguments = (draft_tokens, target_probs, draft_probs, *uniforms, None)
    (kind,), plan, _, _ = core._look_at(*arguments)
    memory, start = plan.results.allocate(16)
    parts: dict[str, Callable[[], Any]] = {
        "arguments": lambda: core._look_at(*arguments),
        "memory": lambda: plan.results.allocate(16),
        "results": lambda: core._results(kind, plan, memory, start),
    }
    if hasattr(inputs[0], "_owner") and hasattr(inputs[0], "__dlpack__"):
        options = {"max_version": (1, 0), "stream": plan.queue}
        parts["exports"] = lambda: [(array.__dlpack_device__(), array.__dlpack__(**options)) for array in inputs]
    taken = microseconds({"call": lambda: verify(*inputs), **parts}, repeats, queue, clock)
    overhead = [without for without, _ in taken["call"]]
    fifths = statistics.quantiles(overhead, n=5)
    return {
        "overhead": statistics.median(overhead),
        "overhead p20": fifths[0],
        "overhead p80": fifths[-1],
        "launch": statistics.median(whole - without for without, whole in taken["call"]),
        **{name: statistics.median(whole for _, whole in taken[name]) for name in parts},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the overhead of a call of verify(), and its parts")
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    queue = get_device_cached_queue(dpctl.select_default_device())
    versions = {"specverify_dpex": specverify_dpex.__version__, "dpctl": dpctl.__version__, "numpy": np.__version__}
    print(
        f"{queue.sycl_device.name.strip()} ({queue.sycl_device.filter_string}), Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    parts = ("launch", "arguments", "exports", "memory", "results")
    columns = ("overhead", "limit", "overhead p20", "overhead p80", *parts)
    print("| arrays | " + " | ".join(columns) + " |\n| --- |" + " ---: |" * len(columns))
    rows, late, clock = {}, [], Clock()
    for name, make in makers(queue).items():
        if isinstance(make, str):
            print(f"| {name} | {make} |" + " |" * (len(columns) - 1))
            continue
        # Before and after, as some machines change their speed from one minute to the next.
        limited = name in LIMITS
        before = units(queue, options.repeats) if limited else {}
        row = rows[name] = measure(make, queue, options.repeats, clock)
        if limited:
            limit, unit = LIMITS[name]
            after = units(queue, options.repeats)
            slower = statistics.mean(taken.get(unit, UNITS[unit]) for taken in (before, after)) / UNITS[unit]
            row["limit"] = limit * slower
            if row["overhead"] > row["limit"]:
                late.append(f"{name} takes {row['overhead']:.1f} µs beyond its launch: more than {row['limit']:.1f}")
        print(
            f"| {name} | " + " | ".join(f"{row[column]:.1f}" if column in row else "" for column in columns) + " |",
            flush=True,
        )
    taken = launches(queue, options.repeats, clock)
    print(f"\nAn empty kernel, launched and awaited by dpctl: {taken['empty']:.1f} µs.", end="")
    for name, most in LAUNCHES.items():
        times = taken[name] / taken["empty"]
        print(f" A {name} call with UsmArray: {taken[name]:.1f} µs, {times:.1f} times that (at most {most}).", end="")
        if times > most:
            late.append(f"a {name} call takes {times:.1f} times an empty kernel: more than {most}")
    print()
    if options.json:
        device = queue.sycl_device.name.strip()
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"versions": versions, "device": device, "rows": rows, "launches": taken}, file, indent=2)
    print(*late, sep="\n", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
