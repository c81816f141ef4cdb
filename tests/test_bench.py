"""The benchmark measures what it says: right answers only, every row explained, a floor that reads it all."""

from __future__ import annotations

import json
import re
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

import specverify_dpex

sys.path.append(str(Path(__file__).parent.parent / "bench"))

import dpctl
import engines
import picture
import report
import workloads

import bench

SHORT = ["--iterations", "3", "--warmup", "1"]
RUN = ["--workload", "b2-k3-v257", "b1-k1-v2", "b2-k3-v514-low", *SHORT]


@pytest.fixture(scope="module")
def queue():
    return dpctl.SyclQueue()


@pytest.fixture
def run(tmp_path, capsys):
    """Run the benchmark; returns its exit status, the rows of its JSON, and what it printed."""

    def run(*arguments):
        path = tmp_path / "results.json"
        status = bench.main([*arguments, "--json", str(path)])
        return status, json.loads(path.read_text(encoding="utf-8"))["rows"], capsys.readouterr().out

    return run


def fake(monkeypatch, base=engines.Specverify, **members):
    """An engine named "fake", in place of all others."""
    engine = type("Fake", (base,), {"name": "fake", **members})
    monkeypatch.setitem(engines.ENGINES, "fake", engine)
    return engine


def test_bench_writes_a_row_for_each_engine_and_workload(run, tmp_path):
    status, rows, printed = run(*RUN)
    assert status == 0
    assert [(row["workload"], row["engine"]) for row in rows] == [
        (workload, engine) for workload in ("b2-k3-v257", "b1-k1-v2", "b2-k3-v514-low") for engine in engines.ENGINES
    ]
    for row in rows:
        assert row["shape"] == workloads.Workload.parse(row["workload"])._asdict()
        assert row["device"]
        assert row["versions"]["specverify_dpex"] == specverify_dpex.__version__
        assert row["command"].startswith("python bench/bench.py --workload b2-k3-v257 b1-k1-v2")
        assert row["commit"]
        assert row["cache"] == "warm"
        assert row["load_before"] >= 0
        if row["status"] == "timed":
            assert (row["iterations"], len(row["times_us"])) == (3, 3)
            assert row["warmup"] <= 1
            assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
            assert row["gb_per_s"] > 0
        else:
            assert row["status"] == "unavailable"
            assert row["reason"]
            assert "median_us" not in row
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert table in printed
    assert len(re.findall(r"^\| b\d.*\|$", table, flags=re.MULTILINE)) == len(rows) + 3


def test_bench_draws_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    axes = ["b1-k1-v64", "b2-k1-v64", "b1-k2-v64", "b1-k1-v128"]
    status, rows, _ = run("--workload", *axes, "--engine", "specverify", "floor", *SHORT)
    assert status == 0
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    for axis, points in (("batch", {1, 2}), ("num_draft", {1, 2}), ("vocab", {64, 128})):
        _, _, series = picture.longest_series(rows, axis)
        assert {engine: set(times) for engine, times in series.items()} == {"specverify": points, "floor": points}


def test_bench_says_why_there_is_no_picture(tmp_path, monkeypatch):
    path = tmp_path / "results.png"
    rows = [timed("b1-k1-v2", "floor", 1.0)]
    assert picture.draw(rows, path) == "no axis has two points"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    reason = picture.draw([*rows, timed("b2-k1-v2", "floor", 1.0)], path)
    assert reason.startswith("matplotlib cannot be imported: ")
    assert not path.exists()


def timed(workload, engine, median_us, **members):
    """A row as the benchmark's."""
    shape = workloads.Workload.parse(workload)._asdict()
    return {
        "workload": workload,
        "engine": engine,
        "status": "timed",
        "shape": shape,
        "median_us": median_us,
        "sycl_device": "a device",
        **members,
    }


def test_bench_compares_with_specverify_and_the_floor(run):
    _, rows, _ = run("--workload", "b2-k3-v257", "--engine", "specverify", "floor", *SHORT)
    library, floor = rows
    assert library["ratio_to_specverify"] == floor["ratio_to_floor"] == 1
    assert library["ratio_to_floor"] == pytest.approx(library["median_us"] / floor["median_us"])
    assert floor["ratio_to_specverify"] == pytest.approx(floor["median_us"] / library["median_us"])


def test_bench_sweeps_the_caches_if_asked(run):
    status, rows, _ = run("--workload", "b2-k3-v257", "--engine", "floor", *SHORT, "--cold")
    assert (status, rows[0]["status"], rows[0]["cache"]) == (0, "timed", "cold")


@pytest.mark.parametrize("field", specverify_dpex.VerifyResult._fields)
def test_bench_does_not_time_a_wrong_result(run, monkeypatch, field):
    runs = []

    def count(self):
        runs.append(self)
        engines.Specverify.run(self)

    def results(self):
        right = engines.Specverify.results(self)
        wrong = getattr(right, field).copy()
        wrong[1] += 1
        return right._replace(**{field: wrong})

    fake(monkeypatch, run=count, results=results)
    status, rows, printed = run("--workload", "b2-k3-v257", "--engine", "fake", "specverify", *SHORT)
    assert status == 1
    assert len(runs) == 3  # two to see how long it takes, and one with its setting
    assert rows[0]["status"] == "failed"
    assert rows[0]["reason"].startswith(f"{field}[1] is ")
    assert "median_us" not in rows[0]
    assert f"| b2-k3-v257 | fake | failed: {field}[1] is " in printed
    assert rows[1]["status"] == "timed"


def test_bench_fails_an_engine_that_goes_wrong_while_it_is_timed(run, monkeypatch):
    def results(self):
        self.looks = getattr(self, "looks", 0) + 1
        right = engines.Specverify.results(self)
        return right._replace(next_token=right.next_token + (self.looks > 1))

    fake(monkeypatch, results=results)
    status, rows, _ = run("--workload", "b2-k3-v257", "--engine", "fake", *SHORT)
    assert status == 1
    assert rows[0]["reason"].startswith("after the last iteration, next_token[0] is ")
    assert "median_us" not in rows[0]


def test_bench_fails_an_engine_that_raises(run, monkeypatch):
    def verify(self):
        raise RuntimeError("out of |memory|\nof the device")

    fake(monkeypatch, run=verify)
    status, rows, printed = run("--workload", "b2-k3-v257", "--engine", "fake", "specverify", *SHORT)
    assert status == 1
    assert [row["status"] for row in rows] == ["failed", "timed"]
    assert r"| failed: RuntimeError: out of \|memory\| of the device |" in printed


def _rejected_tokens(inputs):
    """The tokens at the stops, which the draft likes better than the target: they have no residual."""
    positions = np.minimum(inputs.expected.accepted, inputs.workload.num_draft - 1)
    return inputs.draft_tokens[np.arange(inputs.workload.batch), positions]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda inputs: {"accepted": inputs.expected.accepted - 1}, r"accepted\[0\] is "),
        (
            lambda inputs: {"next_token": np.array([-1, -1])},
            r"next_token\[0\] is -1, which has no weight there",
        ),
        (lambda inputs: {"next_token": np.array([257, 257])}, r"next_token\[0\] is 257, which has no weight"),
        (
            lambda inputs: {"next_token": _rejected_tokens(inputs)},
            r"next_token\[\d\] is \d+, which has no weight",
        ),
    ],
    ids=["accepted", "none", "beyond-vocab", "rejected"],
)
def test_eager_is_held_to_the_accepted_lengths_and_the_support(queue, monkeypatch, change, reason):
    engine = engines.Eager()
    engine.inputs = workloads.Inputs(workloads.Workload(2, 3, 257), queue)
    monkeypatch.setattr(engine, "results", lambda: engine.inputs.expected)
    assert engine.mismatch() is None
    wrong = engine.inputs.expected._replace(**change(engine.inputs))
    monkeypatch.setattr(engine, "results", lambda: wrong)
    assert re.match(reason, engine.mismatch())


def test_bench_says_why_torch_was_not_timed(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, rows, printed = run("--workload", "b8-k5-v32000", "--engine", "torch-eager", "torch-lean", *SHORT)
    assert status == 0
    for row in rows:
        assert row["status"] == "unavailable"
        assert row["reason"].startswith("torch cannot be imported: ")
    assert "| b8-k5-v32000 | torch-eager | unavailable: torch cannot be imported: " in printed
    assert "| torch-eager / specverify at 8 × 5 × 32000 | at least 50 |  | not measured |" in printed


def test_bench_says_why_the_library_was_not_prepared(run, monkeypatch):
    monkeypatch.delattr(specverify_dpex, "prepare", raising=False)
    status, rows, _ = run("--workload", "b1-k1-v2", "--engine", "specverify-prepared", *SHORT)
    assert status == 0
    assert (rows[0]["status"], rows[0]["reason"]) == (
        "unavailable",
        f"specverify_dpex {specverify_dpex.__version__} has no `prepare`",
    )


def test_prepared_engine_calls_what_prepare_returned(queue, monkeypatch):
    calls = []

    def prepare(*arrays):
        calls.append("prepare")
        return lambda: calls.append("call") or specverify_dpex.verify(*arrays)

    monkeypatch.setattr(specverify_dpex, "prepare", prepare, raising=False)
    workload = workloads.Workload(2, 3, 257)
    engine = engines.SpecverifyPrepared()
    assert engine.unavailable(workload) is None
    engine.prepare(workloads.Inputs(workload, queue))
    for _ in range(2):
        engine.run()
        assert engine.mismatch() is None
    assert calls == ["prepare", "call", "call"]


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--memory", "0.000001"], r"takes about 0\.0 GB with its inputs, and --memory allows 1e-06"),
        (["--longest-run", "1e-9"], r"one run takes \S+ s, and --longest-run allows 1e-09"),
    ],
    ids=["memory", "time"],
)
def test_bench_skips_what_takes_too_much(run, options, reason):
    status, rows, _ = run("--workload", "b2-k3-v257", "--engine", "specverify", "numpy-eager", *SHORT, *options)
    assert status == 0
    for row in rows:
        assert row["status"] == "skipped"
        assert re.fullmatch(reason, row["reason"])
        assert "median_us" not in row


def test_bench_does_not_try_what_took_too_long_at_a_smaller_workload(run, monkeypatch):
    runs = []
    fake(monkeypatch, run=lambda self: runs.append(self) or engines.Specverify.run(self))
    monkeypatch.setattr(bench, "_seconds", lambda engine: engine.run() or 0.3)
    arguments = ["--engine", "fake", "--longest-run", "0.5", *SHORT]
    _, rows, _ = run("--workload", "b1-k1-v100000", "b2-k1-v100000", *arguments)
    assert [row["status"] for row in rows] == ["timed", "skipped"]
    assert rows[1]["reason"] == "one run would take about 0.6 s, and --longest-run allows 0.5"
    assert len(set(runs)) == 1


def test_memory_of_the_largest_workload_fits_for_the_library_and_what_copies_little():
    largest = workloads.full_set()[-1]
    assert largest[:3] == (256, 8, 262144)
    limit = bench.Limits().memory * 1e9
    fits = {name for name, engine in engines.ENGINES.items() if engine().memory(largest) <= limit}
    assert fits == {*engines.LIBRARY, "floor", "dpnp-lean"}


def test_bench_tells_nothing_of_larger_workloads_from_the_cost_of_a_call(run, monkeypatch):
    fake(monkeypatch, run=engines.Specverify.run)
    monkeypatch.setattr(bench, "_seconds", lambda engine: engine.run() or 0.03)
    _, rows, _ = run("--workload", "b1-k1-v2", "b8-k5-v2000", "--engine", "fake", "--longest-run", "0.5", *SHORT)
    assert [row["status"] for row in rows] == ["timed", "timed"]


def test_transformers_verifies_one_sequence_with_the_given_uniforms(queue):
    pytest.importorskip("transformers.generation.utils")
    torch = pytest.importorskip("torch")
    rand_like = torch.rand_like
    engine = engines.Transformers()
    assert engine.unavailable(workloads.Workload(2, 3, 257)) == "it verifies one sequence at a time"
    for num_draft in (1, 5):
        for acceptance in workloads.ACCEPTANCE:
            workload = workloads.Workload(1, num_draft, 1000, acceptance)
            assert engine.unavailable(workload) is None
            engine.prepare(workloads.Inputs(workload, queue))
            for _ in range(10):
                engine.run()
                assert engine.mismatch() is None
    assert torch.rand_like is rand_like


def test_bench_says_why_transformers_was_not_timed(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.generation.utils", None)
    status, rows, _ = run("--workload", "b1-k1-v2", "--engine", "transformers", *SHORT)
    assert (status, rows[0]["status"]) == (0, "unavailable")
    assert rows[0]["reason"].startswith("transformers.generation.utils cannot be imported: ")


def test_bench_says_why_torch_xpu_was_not_timed(run):
    torch = pytest.importorskip("torch")
    if torch.xpu.is_available():
        pytest.skip("torch finds an Intel GPU")
    status, rows, _ = run("--workload", "b1-k1-v2", "--engine", "torch-xpu-eager", "torch-xpu-lean", *SHORT)
    assert status == 0
    for row in rows:
        assert row["status"] == "unavailable"
        assert row["reason"].endswith("finds no Intel GPU: torch.xpu.is_available() is False")


@pytest.mark.parametrize("engine", [engines.TorchXpuEager, engines.TorchXpuLean], ids=lambda engine: engine.name)
def test_torch_xpu_routes_verify(queue, monkeypatch, engine):
    """On the CPU, which is told to answer for the GPU."""
    torch = pytest.importorskip("torch")
    waits = []
    xpu = types.SimpleNamespace(
        is_available=lambda: True, get_device_name=lambda: "a GPU", synchronize=lambda: waits.append(None)
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    workload = workloads.Workload(3, 4, 257)
    route = engine()
    assert route.unavailable(workload) is None
    route.prepare(workloads.Inputs(workload, queue))
    route.run()
    assert route.mismatch() is None
    assert len(waits) == 1
    assert route.device(queue) == "a GPU"


@pytest.mark.parametrize("reported", [{}, {"device_id": 1}, {"max_mem_bandwidth": 0}, None])
def test_device_bandwidth_is_none_where_none_is_reported(queue, monkeypatch, reported):
    def intel_device_info(device):
        if reported is None:
            raise RuntimeError("not Intel's")
        return reported

    monkeypatch.setattr(dpctl.utils, "intel_device_info", intel_device_info, raising=False)
    assert bench.device_bandwidth(queue.sycl_device) is None


def test_bench_computes_the_floor_from_the_reported_bandwidth(run, monkeypatch):
    monkeypatch.setattr(
        dpctl.utils, "intel_device_info", lambda device: {"max_mem_bandwidth": 50_000_000_000}, raising=False
    )
    _, rows, printed = run("--workload", "b1-k1-v1000-all", "--engine", "floor", *SHORT)
    assert rows[0]["bandwidth_floor_us"] == pytest.approx(4000 / 50e9 * 1e6)  # one row of float32
    assert "The device reports 50 GB/s of memory bandwidth" in printed
    assert "| floor by the reported bandwidth |" in printed


def requirement(rows, text):
    (found,) = [one for one in report.requirements(rows) if one.text == text]
    return found


@pytest.mark.parametrize("ratio, met", [(1.4, True), (1.41, False)])
def test_requirement_compares_with_the_floor(ratio, met):
    text = "specverify / floor at 8 × 5 × 128256"
    rows = [
        timed("b8-k5-v128256", "specverify", 1.0, ratio_to_floor=ratio),
        timed("b8-k5-v128256-low", "specverify", 1.0, ratio_to_floor=9.0),
        timed("b8-k5-v128256", "specverify-prepared", 1.0, ratio_to_floor=9.0),
    ]
    measured = f"{ratio:.2f} (prepared 9.00)"
    assert requirement(rows, text) == (text, "at most 1.4", measured, met)
    assert requirement(rows[:2], text) == (text, "at most 1.4", f"{ratio:.2f}", met)
    assert requirement(rows[1:], text).met is None
    assert f"| {text} | at most 1.4 | {measured} | {'yes' if met else 'NO'} |" in report.requirement_table(rows)


@pytest.mark.parametrize("ratio, met", [(50, True), (49.9, False)])
def test_requirement_compares_with_torch_eager(ratio, met):
    rows = [
        timed("b8-k5-v32000", "torch-eager", 1.0, ratio_to_specverify=ratio),
        timed("b8-k5-v32000", "torch-lean", 1.0, ratio_to_specverify=1000),
        timed("b8-k5-v128256", "torch-eager", 1.0, ratio_to_specverify=1000),
    ]
    assert requirement(rows, "torch-eager / specverify at 8 × 5 × 32000").met is met


def test_requirement_names_the_closest_rival():
    text = "any other engine / specverify, the least at any workload"
    rows = [
        timed("b1-k1-v2", "floor", 1.0, ratio_to_specverify=0.5),
        timed("b1-k1-v2", "specverify-prepared", 1.0, ratio_to_specverify=0.7),
        timed("b1-k1-v2", "torch-lean", 1.0, ratio_to_specverify=3.0),
        timed("b2-k1-v2", "numpy-lean", 1.0, ratio_to_specverify=1.25),
    ]
    assert requirement(rows, text)[2:] == ("1.25 (numpy-lean, b2-k1-v2)", True)
    rows[-1]["ratio_to_specverify"] = 0.9
    assert requirement(rows, text).met is False
    assert requirement(rows[:2], text).met is None


def test_growth_fits_the_exponent_of_each_axis():
    rows = [timed(f"b{batch}-k5-v100", "floor", 3.0 * batch**0.5) for batch in (1, 4, 64)]
    rows += [timed(f"b8-k{drafts}-v100-all", "specverify", 7.0) for drafts in (1, 3, 8)]
    rows += [timed("b8-k5-v200", "floor", 1.0), {**timed("b8-k5-v300", "floor", 1.0), "status": "skipped"}]
    batch, drafts = report.growth(rows)
    assert (batch.axis, batch.engine, batch.last) == ("batch", "floor", 64)
    assert batch.exponent == pytest.approx(0.5)
    assert batch.span == "batch 1 to 64 (drafts 5, vocabulary 100, middle acceptance)"
    assert (drafts.axis, drafts.engine) == ("num_draft", "specverify")
    assert drafts.exponent == pytest.approx(0, abs=1e-9)
    text = "exponent of specverify's time in the number of drafts, all accepted"
    assert requirement(rows, text).met is True


def test_fastest_has_one_round_where_it_takes_too_long():
    runs = []
    assert sorted(engines.fastest("ab", runs.append, seconds=0)) == ["a", "b"]
    assert runs == ["a", "b", "a", "b"]


def test_bench_counts_the_fastest_setting(run, monkeypatch):
    used = []

    def use(self, setting):
        used.append(setting)
        self.setting = f"waits for {setting} s"

    def work(self):
        engines.Specverify.run(self)
        time.sleep(used[-1] if used else 0)

    settings = [0.02, 0.0, 0.01]
    fake(monkeypatch, settings=lambda self: settings, use=use, run=work)
    _, rows, _ = run("--workload", "b2-k3-v257", "--engine", "fake", *SHORT)
    assert rows[0]["setting"] == "waits for 0.0 s"
    assert rows[0]["iterations"] == len(rows[0]["times_us"]) == 3
    assert used[:3] == settings  # each of them was checked


def test_bench_does_not_time_an_engine_that_is_wrong_with_one_of_its_settings(run, monkeypatch):
    def use(self, setting):
        self.shift = setting

    def results(self):
        right = engines.Specverify.results(self)
        return right._replace(next_token=right.next_token + self.shift)

    fake(monkeypatch, settings=lambda self: [0, 1, 0], use=use, results=results)
    status, rows, _ = run("--workload", "b2-k3-v257", "--engine", "fake", *SHORT)
    assert status == 1
    assert rows[0]["reason"].startswith("next_token[0] is ")
    assert "median_us" not in rows[0]


def test_measure_takes_the_engines_in_turn_and_leaves_warmup_out(monkeypatch):
    monkeypatch.setattr(bench, "SETTLE_NS", 0)
    monkeypatch.setattr(bench, "RUNS_A_TURN", 2)
    order = []

    class Recorder(engines.Engine):
        def __init__(self, label):
            self.label = label

        def run(self):
            order.append(self.label)

    runners = [bench.Runner(Recorder("a"), None, 4, 1), bench.Runner(Recorder("b"), None, 2, 0)]
    times = bench.measure(runners, lambda: order.append("sweep"))
    a, b = (["a", "sweep", "a", "sweep", "a"], ["b", "sweep", "b"])
    assert order == ["a", *a, *b, *a, *b]
    assert [len(taken) for taken in times] == [4, 2]


def test_measure_only_waits_before_slow_engines(monkeypatch):
    monkeypatch.setattr(bench, "SLOW_NS", 0)
    monkeypatch.setattr(bench, "RUNS_A_TURN", 1)
    runs = []
    engine = types.SimpleNamespace(run=lambda: runs.append(None), use=lambda setting: None)
    monkeypatch.setattr(bench, "SETTLE_NS", 0)
    (taken,) = bench.measure([bench.Runner(engine, None, 3, 0)])
    assert (len(taken), len(runs)) == (3, 4)  # settled by a run before the first alone


@pytest.mark.parametrize("workload", ["b1-k1-v2", "b3-k5-v257", "b2-k2-v8193", "b8-k5-v4096"])
@pytest.mark.parametrize("work_group, slices", [(8, 1), (16, 3), (64, 2)], ids=str)
def test_floor_adds_up_every_token_of_the_rows_once(queue, workload, work_group, slices):
    inputs = workloads.Inputs(workloads.Workload.parse(workload), queue)
    engine = engines.Floor()
    engine.prepare(inputs)
    # Small integers, which float32 adds exactly.
    rng = np.random.default_rng(0)
    draft, target = (rng.integers(1, 9, rows.shape) for rows in inputs.on_host[1:3])
    engine._rows = tuple(
        specverify_dpex.UsmArray.from_list(rows.tolist(), "float32", sycl_queue=queue) for rows in (draft, target)
    )
    engine._launches.clear()
    engine.use((work_group, slices))
    engine.run()
    accepted = inputs.expected.accepted
    expected = [
        target[sequence, stop].sum() + (draft[sequence, stop].sum() if stop < draft.shape[1] else 0)
        for sequence, stop in enumerate(accepted)
    ]
    assert np.asarray(engine._sums.tolist()).sum(axis=(1, 2)).tolist() == expected


def test_floor_is_not_timed_on_a_wrong_sum(queue):
    inputs = workloads.Inputs(workloads.Workload(2, 3, 257), queue)
    engine = engines.Floor()
    engine.prepare(inputs)
    engine.run()
    assert engine.mismatch() is None
    inputs.distinct_target = inputs.distinct_target * np.array([[[1]], [[1.001]]], np.float32)
    assert engine.mismatch().startswith("sums[1] is ")


def test_floor_modules_are_what_their_source_compiles_to():
    pytest.importorskip("numba_dpex", reason="only the compiler stack has numba-dpex")
    import floor

    first, empty = floor.entry_points()
    for entry in (first, empty):
        assert entry.compile() == floor.module_path(entry.name).read_bytes()
    arguments = tuple((argument["name"], argument["type"]) for argument in first.arguments)
    assert (first.name, arguments) == (engines.Floor.entry_point, engines.Floor.arguments)
    assert (empty.name, len(empty.arguments)) == ("empty", 1)


@pytest.mark.parametrize("name", ["b1-k1-v2", "b8-k5-v257", "b3-k8-v1000", "b40-k2-v257"])
def test_inputs_accept_every_length_alike(queue, name):
    workload = workloads.Workload.parse(name)
    inputs = workloads.Inputs(workload, queue)
    assert workload.name == name
    assert abs(inputs.expected.accepted.mean() - workload.num_draft / 2) <= 0.5
    tokens, *probs, accept, sample = inputs.on_host
    for rows in probs:
        assert rows.dtype == np.float32
        assert np.allclose(rows.sum(axis=2), 1, atol=1e-5)
    for uniform in (accept, sample):
        assert ((uniform >= 0) & (uniform < 1)).all()
    assert ((tokens >= 0) & (tokens < workload.vocab)).all()
    again = workloads.Inputs(workload, queue)
    assert all(map(np.array_equal, inputs.on_host, again.on_host))
    expected = specverify_dpex.reference.verify(*inputs.on_host)
    assert all(map(np.array_equal, inputs.expected, expected))
    assert all(
        np.array_equal(engines._to_numpy(array), other) for array, other in zip(inputs.on_device, inputs.on_host)
    )
    assert workload.input_bytes == sum(rows.nbytes for rows in probs)
    assert workload.target_bytes == probs[1].nbytes


@pytest.mark.parametrize("num_draft", workloads.DRAFTS)
def test_inputs_accept_as_many_as_they_are_named_for(queue, num_draft):
    means = [
        workloads.Inputs(workloads.Workload(16, num_draft, 257, acceptance), queue).expected.accepted.mean()
        for acceptance in workloads.ACCEPTANCE
    ]
    assert means == sorted(set(means))
    assert means[0] >= 0.1 * num_draft
    assert means[-1] == num_draft


def test_sets_hold_the_axes_of_the_grid():
    short, full = workloads.short_set(), workloads.full_set()
    assert set(short) < set(full)
    assert len(full) == len(set(full)) == 6 * 4 * 5 * 4
    assert len(short) == len(set(short)) <= 20
    for field, values in (("batch", (1, 4, 8, 16, 64, 256)), ("num_draft", (1, 3, 5, 8)), ("acceptance", None)):
        assert {getattr(workload, field) for workload in short} == set(values or workloads.ACCEPTANCE)
    assert {workload.vocab for workload in short} == {32000, 50257, 128256, 151936, 262144}
    for chosen in (short, full):
        sizes = [workload.input_bytes for workload in chosen]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("name, acceptance", [("b1-k2-v3", "middle"), ("b1-k2-v3-all", "all"), ("b1-k2-v3-low", "low")])
def test_workload_parse_reads_an_acceptance(name, acceptance):
    workload = workloads.Workload.parse(name)
    assert workload == (1, 2, 3, acceptance)
    assert workload.name == name


@pytest.mark.parametrize("name", ["", "b8", "8-5-32000", "b0-k5-v10", "b1-k0-v10", "b1-k5-v0", "b1-k5-v10-none"])
def test_workload_parse_refuses_another_form(name, capsys):
    with pytest.raises(ValueError, match=r"^`workload` must name a batch, a number of drafts and a vocabulary"):
        workloads.Workload.parse(name)
    with pytest.raises(SystemExit):
        bench.main(["--workload", name])
    assert "must name a batch, a number of drafts and a vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine", "slow"], "invalid choice: 'slow'"),
        (["--iterations", "0"], "must be at least 1, got 0"),
        (["--seconds", "0"], "must be greater than 0, got 0"),
        (["--device", "level_zero:gpu:99"], "`specverify-dpex doctor` shows the devices"),
    ],
)
def test_bench_refuses_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
