"""The benchmark measures what it says: right answers only, every row explained, a floor that reads it all."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import specverify_dpex

sys.path.append(str(Path(__file__).parent.parent / "bench"))

import dpctl
import engines
import workloads

import bench

SHORT = ["--iterations", "3", "--warmup", "1"]
RUN = ["--workload", "b2-k3-v257", "b1-k1-v2", *SHORT]


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
    status, rows, printed = run(*RUN, "--markdown", str(tmp_path / "table.md"))
    assert status == 0
    assert [(row["workload"], row["engine"]) for row in rows] == [
        (workload, engine) for workload in ("b2-k3-v257", "b1-k1-v2") for engine in engines.ENGINES
    ]
    for row in rows:
        assert row["shape"] == workloads.Workload.parse(row["workload"])._asdict()
        assert row["device"]
        assert row["versions"]["specverify_dpex"] == specverify_dpex.__version__
        assert row["command"].startswith("python bench/bench.py --workload b2-k3-v257 b1-k1-v2")
        assert row["commit"]
        assert (row["iterations"], row["warmup"], row["cache"]) == (3, 1, "warm")
        if row["status"] == "unavailable":
            assert row["reason"]
            assert "median_us" not in row
        else:
            assert row["status"] == "timed"
            assert len(row["times_us"]) == 3
            assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
            assert row["gb_per_s"] > 0
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table in printed
    assert table.count("\n| b") == len(rows)


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
    assert len(runs) == 1
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
    assert "20 times faster than torch's eager route: not measured in this run." in printed


@pytest.mark.parametrize("ratio, verdict", [(20, "it is 20 times faster, met."), (19.9, "19.9 times faster, NOT MET.")])
def test_requirement_compares_with_torch_eager_at_the_first_workload(ratio, verdict):
    row = {"workload": "b8-k5-v32000", "engine": "torch-eager", "ratio_to_specverify": ratio}
    others = [{**row, "engine": "torch-lean"}, {**row, "workload": "b8-k5-v128256"}]
    for other in others:
        other["ratio_to_specverify"] = 1000
    assert bench.requirement([*others, row]).endswith(verdict)


def test_measure_takes_the_engines_in_turn_and_leaves_warmup_out(monkeypatch):
    monkeypatch.setattr(bench, "SETTLE_NS", 0)
    order = []

    class Recorder(engines.Engine):
        def __init__(self, label):
            self.label = label

        def run(self):
            order.append(self.label)

    times = bench.measure([Recorder("a"), Recorder("b")], 2, 1, lambda: order.append("sweep"))
    turn = ["a", "sweep", "a", "b", "sweep", "b"]
    assert order == ["a", "b", *turn, *turn]
    assert [len(taken) for taken in times] == [2, 2]


@pytest.mark.parametrize("workload", ["b1-k1-v2", "b3-k5-v257", "b2-k2-v8193", "b8-k5-v4096"])
@pytest.mark.parametrize("work_group, slices", [(8, 1), (16, 3), (64, 2)], ids=str)
def test_floor_adds_up_every_token_of_the_rows_once(queue, workload, work_group, slices):
    inputs = workloads.Inputs(workloads.Workload.parse(workload), queue)
    engine = engines.Floor()
    engine.prepare(inputs)
    # Small integers, which float32 adds exactly.
    rng = np.random.default_rng(0)
    draft, target = (rng.integers(1, 9, rows.shape) for rows in (inputs.draft_probs, inputs.target_probs))
    engine._rows = tuple(
        specverify_dpex.UsmArray.from_list(rows.tolist(), "float32", sycl_queue=queue) for rows in (draft, target)
    )
    engine._cut(work_group, slices)
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
    inputs.target_probs = inputs.target_probs * np.array([[[1]], [[1.001]]], np.float32)
    assert engine.mismatch().startswith("sums[1] is ")


def test_floor_module_is_what_its_source_compiles_to():
    pytest.importorskip("numba_dpex", reason="only the compiler stack has numba-dpex")
    import floor

    assert floor.compile_floor() == floor.MODULE.read_bytes()
    arguments = tuple((argument["name"], argument["type"]) for argument in floor.entry_point().arguments)
    assert (floor.NAME, arguments) == (engines.Floor.entry_point, engines.Floor.arguments)


@pytest.mark.parametrize("name", ["b1-k1-v2", "b8-k5-v257", "b3-k8-v1000"])
def test_inputs_accept_every_length_alike(queue, name):
    workload = workloads.Workload.parse(name)
    inputs = workloads.Inputs(workload, queue)
    assert workload.name == name
    assert abs(inputs.expected.accepted.mean() - workload.num_draft / 2) <= 0.5
    for probs in (inputs.draft_probs, inputs.target_probs):
        assert probs.dtype == np.float32
        assert np.allclose(probs.sum(axis=2), 1, atol=1e-5)
    for uniform in (inputs.uniform_accept, inputs.uniform_sample):
        assert ((uniform >= 0) & (uniform < 1)).all()
    assert ((inputs.draft_tokens >= 0) & (inputs.draft_tokens < workload.vocab)).all()
    again = workloads.Inputs(workload, queue)
    assert all(map(np.array_equal, inputs.on_host, again.on_host))


@pytest.mark.parametrize("name", ["", "b8", "8-5-32000", "b0-k5-v10", "b1-k0-v10", "b1-k5-v0", "b1-k5-v10x"])
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
        (["--device", "level_zero:gpu:99"], "`specverify-dpex doctor` shows the devices"),
    ],
)
def test_bench_refuses_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
