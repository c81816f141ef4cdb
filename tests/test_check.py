"""check_values(): the first bad value of each argument is named, and good values pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import arrays
import dpctl
import numpy as np
import pytest

from specverify_dpex import check, dlpack, tuning, usm_array
from specverify_dpex.check import check_values

NUMPY = arrays.kinds()[0]


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True, dtype=np.float32)


def good(
    seed: int = 0, batch: int = 3, num_draft: int = 4, vocab: int = 257, draft_vocab: int | None = None
) -> dict[str, Any]:
    """Arguments that pass, without masks and lengths."""
    rng = np.random.default_rng(seed)
    draft_vocab = vocab if draft_vocab is None else draft_vocab
    return {
        "draft_tokens": rng.integers(0, vocab, (batch, num_draft)),
        "draft_probs": softmax(rng.normal(size=(batch, num_draft, draft_vocab)).astype("f4") * 3),
        "target_probs": softmax(rng.normal(size=(batch, num_draft + 1, vocab)).astype("f4") * 3),
        "uniform_accept": rng.random((batch, num_draft), dtype="f4"),
        "uniform_sample": rng.random((batch, num_draft + 1), dtype="f4"),
    }


def run(arguments: dict[str, Any], kind: arrays.Kind = NUMPY, queue: Any = None) -> None:
    """check_values() on numpy arrays made arrays of a kind."""
    made = {
        name: array if array is None or kind is NUMPY else kind.make(array, queue) for name, array in arguments.items()
    }
    run_made(made)


def run_made(made: dict[str, Any]) -> None:
    own = dlpack.kind_of(made["target_probs"], "target_probs")
    given = {name: own.view(array, name) for name, array in made.items() if array is not None}
    views = {name: own.copy(view) if own.on_host else view for name, view in given.items()}
    check_values(own, views["target_probs"].queue or usm_array.default_queue(), given, views)


def message(arguments: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as raised:
        run(arguments)
    return str(raised.value)


def proposals_of(arguments: dict[str, Any]) -> list[int]:
    counts = []
    num_draft = arguments["draft_tokens"].shape[1]
    for row, tokens in enumerate(arguments["draft_tokens"]):
        lengths = arguments.get("num_draft")
        end = num_draft if lengths is None else min(max(int(lengths[row]), 0), num_draft)
        counts.append(next((k for k in range(end) if tokens[k] < 0), end))
    return counts


def problems(arguments: dict[str, Any]) -> Iterator[str]:
    """How the messages of all that is bad begin and go on, in order."""
    counts = proposals_of(arguments)
    batch, num_draft = arguments["draft_tokens"].shape
    vocab = arguments["target_probs"].shape[2]
    greedy, deterministic = (
        np.zeros(batch, bool) if arguments.get(name) is None else arguments[name]
        for name in ("greedy", "deterministic_draft")
    )
    for row, count in enumerate(counts):
        for position in range(count):
            token = arguments["draft_tokens"][row, position]
            if token >= vocab:
                yield (
                    f"`draft_tokens` must hold tokens of the vocabulary: expected less than {vocab}, got {token} at "
                    f"sequence {row}, position {position}. End the drafts before it with -1"
                )
    if arguments.get("num_draft") is not None:
        for row, length in enumerate(arguments["num_draft"]):
            if not 0 <= length <= num_draft:
                yield (
                    f"`num_draft` must count positions of `draft_tokens`: expected 0 to {num_draft}, got {length} at "
                    f"sequence {row}. Count the proposals of the sequence again"
                )
    for name, bonus in (("draft_probs", 0), ("target_probs", 1)):
        if arguments[name] is None:
            continue
        for row, count in enumerate(counts):
            if bonus == 0 and (greedy[row] or deterministic[row]):
                continue
            for position in range(count + bonus):
                values = arguments[name][row, position]
                at = f"at sequence {row}, position {position}"
                bad = np.isnan(values) if greedy[row] else ~((values >= 0) & (values <= np.float32(1.001)))
                if bad.any():
                    token = int(bad.argmax())
                    if np.isnan(values[token]):
                        yield f"`{name}` must not hold NaN: expected numbers, got nan {at}, token {token}. Look for"
                    else:
                        yield (
                            f"`{name}` must hold probabilities: expected values in [0, 1], got {values[token]!s} {at}, "
                            f"token {token}. Take the softmax of finite logits"
                        )
                elif not greedy[row]:
                    total = values.clip(0, 1).sum(dtype="f8")
                    if abs(total - 1) > 1e-3:
                        yield (
                            f"`{name}` must have rows that sum to 1: expected 1 within 0.001, got {total:.6g} {at}. "
                            "Normalise the row"
                        )
    for name, bonus in (("uniform_accept", 0), ("uniform_sample", 1)):
        if arguments[name] is None:
            continue
        for row, count in enumerate(counts):
            for position in range(0 if greedy[row] else count + bonus):
                value = arguments[name][row, position]
                if not 0 <= value < 1:
                    yield (
                        f"`{name}` must hold uniforms: expected values in [0, 1), got {value!s} at sequence {row}, "
                        f"position {position}. Draw it anew, or leave it out"
                    )


def random_faults(seed: int) -> dict[str, Any]:
    """Arguments with a few bad values anywhere, padding included."""
    rng = np.random.default_rng(seed)
    batch, num_draft, vocab = int(rng.integers(1, 6)), int(rng.integers(0, 7)), int(rng.choice([1, 2, 31, 257, 1000]))
    arguments = good(seed, batch, num_draft, vocab, max(1, vocab - int(rng.integers(0, 5))))
    arguments["draft_tokens"][rng.random((batch, num_draft)) < 0.1] = -1
    arguments["draft_tokens"] = arguments["draft_tokens"].astype(rng.choice(["i4", "i8"]))
    for name in ("greedy", "deterministic_draft"):
        if rng.random() < 0.5:
            arguments[name] = rng.random(batch) < 0.4
    if rng.random() < 0.5:
        arguments["num_draft"] = rng.integers(0, num_draft + 1, batch).astype(rng.choice(["i4", "i8"]))
    for name in ("draft_probs", "uniform_accept", "uniform_sample"):
        if rng.random() < 0.2:
            arguments[name] = None
    faults = {
        "draft_tokens": [vocab, vocab + 1, 2**31 - 1],
        "num_draft": [-1, num_draft + 1, 2**31 - 1, -(2**31)],
        "draft_probs": [np.nan, -1e-30, 1.002, np.inf, -np.inf, 0.9],
        "target_probs": [np.nan, -1e-30, 1.002, np.inf, -np.inf, 0.9],
        "uniform_accept": [1, np.nan, -1e-9, np.inf],
        "uniform_sample": [1, np.nan, -1e-9, np.inf],
    }
    for _ in range(int(rng.integers(0, 4))):
        name = str(rng.choice(list(faults)))
        array = arguments.get(name)
        if array is not None and array.size:
            array.reshape(-1)[int(rng.integers(array.size))] = rng.choice(faults[name])
    return arguments


@pytest.mark.parametrize("first_seed", range(0, 600, 150))
def test_check_finds_the_first_of_random_faults(device, monkeypatch, first_seed):
    rng = np.random.default_rng(first_seed)
    found = 0
    for seed in range(first_seed, first_seed + 150):
        cut = tuning.LaunchShape(int(rng.choice([1, 3, 8, 64, 256])), 1, 1)
        monkeypatch.setattr(tuning, "launch_shape", lambda *_, cut=cut: cut)
        monkeypatch.setattr(check, "_plans", {})
        arguments = random_faults(seed)
        expected = next(problems(arguments), None)
        if expected is None:
            run(arguments)
        else:
            found += 1
            assert message(arguments).startswith(expected), seed
    assert 50 < found < 140


@pytest.mark.parametrize(
    "shape", [(1, 0, 1), (0, 3, 5), (3, 5, 257), (2, 3, 128256)], ids="b{0[0]}-k{0[1]}-v{0[2]}".format
)
def test_check_passes_softmax_of_float32(kind, queue, shape):
    run(good(1, *shape), kind, queue)
    arguments = good(2, *shape)
    arguments.update(draft_probs=None, uniform_accept=None, uniform_sample=None)
    run(arguments, kind, queue)


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 30.0])
def test_check_passes_softmax_of_any_sharpness(device, sharpness):
    rng = np.random.default_rng(0)
    arguments = good(0, 1, 2, 128256)
    for name in ("draft_probs", "target_probs"):
        arguments[name] = softmax((rng.normal(size=arguments[name].shape) * sharpness).astype("f4"))
    run(arguments)


def test_check_passes_padding_and_logits_of_greedy_sequences(kind, queue):
    arguments = good(0, 4, 6, 257)
    garbage = [np.nan, np.inf, -np.inf, -5, 1e30]
    rng = np.random.default_rng(0)

    def spoil(name: str, where: Any) -> None:
        part = arguments[name][where]
        arguments[name][where] = rng.choice(garbage, part.shape)

    arguments["draft_tokens"][0, 2] = -7
    arguments["draft_tokens"][0, 3:] = 10**6
    arguments["num_draft"] = np.array([6, 0, 6, 6])
    arguments["greedy"] = np.array([False, False, True, False])
    arguments["deterministic_draft"] = np.array([False, False, False, True])
    for row, first in ((0, 2), (1, 0)):
        spoil("draft_probs", np.s_[row, first:])
        spoil("uniform_accept", np.s_[row, first:])
        spoil("target_probs", np.s_[row, first + 1 :])
        spoil("uniform_sample", np.s_[row, first + 1 :])
    for name in ("draft_probs", "uniform_accept", "uniform_sample"):
        spoil(name, np.s_[2])
    arguments["target_probs"][2] = rng.normal(size=(7, 257)) * 100
    arguments["target_probs"][2, :, 5] = -np.inf
    spoil("draft_probs", np.s_[3])
    run(arguments, kind, queue)
    if kind.name != "torch-xpu":
        run({**arguments, "draft_tokens": arguments["draft_tokens"].astype("i4")}, kind, queue)


def test_check_names_what_is_bad(device):
    arguments = good()
    arguments["target_probs"][1, 2, 9] = np.nan
    assert message(arguments) == (
        "`target_probs` must not hold NaN: expected numbers, got nan at sequence 1, position 2, token 9. "
        "Look for infinities in the logits"
    )
    arguments["draft_probs"][2, 1] *= 0.5
    assert message(arguments) == (
        "`draft_probs` must have rows that sum to 1: expected 1 within 0.001, got 0.5 at sequence 2, position 1. "
        "Normalise the row, for example by a softmax in float32"
    )
    arguments["draft_probs"][1, 3, [8, 4]] = -1.5
    assert message(arguments) == (
        "`draft_probs` must hold probabilities: expected values in [0, 1], got -1.5 at sequence 1, position 3, "
        "token 4. Take the softmax of finite logits"
    )


def test_check_wants_a_greedy_target_without_nan(device):
    arguments = good()
    arguments["greedy"] = np.array([False, True, True])
    arguments["target_probs"][2, 4, 256] = np.nan
    assert message(arguments).startswith(
        "`target_probs` must not hold NaN: expected numbers, got nan at sequence 2, po"
    )


def test_check_of_sums_near_the_tolerance(device):
    for factor, passes in ((0.9991, True), (1.0009, True), (0.9989, False), (1.0011, False)):
        arguments = good(0, 1, 1, 1000)
        arguments["target_probs"][0, 1] = np.float32(factor / 1000)
        if passes:
            run(arguments)
        else:
            assert f"expected 1 within 0.001, got {factor} at sequence 0, position 1" in message(arguments)


def test_check_of_one_value_near_the_tolerance(device):
    arguments = good(0, 1, 1, 3)
    arguments["target_probs"][0, 0] = [0, 1.0009, 0]
    run(arguments)
    arguments["target_probs"][0, 0] = [0, 1.0011, 0]
    assert message(arguments).startswith(
        "`target_probs` must hold probabilities: expected values in [0, 1], got 1.0011"
    )


def test_check_of_a_sum_of_2_to_the_20(device):
    arguments = good(0, 1, 0, 2**20)
    arguments["target_probs"][:] = 1
    assert "expected 1 within 0.001, got 1.04858e+06 at" in message(arguments)
    arguments["target_probs"][:] = 0
    assert "expected 1 within 0.001, got 0 at" in message(arguments)


def test_check_refuses_one_buffer_for_both_uniforms(kind, queue):
    arguments = {name: kind.make(array, queue) for name, array in good(0, 2, 3, 5).items()}
    if kind.strided:
        arguments["uniform_accept"] = arguments["uniform_sample"][:, :3]
    else:
        arguments["uniform_accept"] = arguments["uniform_sample"]
    with pytest.raises(ValueError) as raised:
        run_made(arguments)
    assert str(raised.value) == (
        "`uniform_accept` and `uniform_sample` must be independent: expected two buffers, got the same memory. "
        "Draw each by itself, or leave both out"
    )


def test_check_takes_parts_of_one_buffer(device):
    arguments = good(0, 2, 3, 5)
    both = np.random.default_rng(0).random((2, 7), dtype="f4")
    run({**arguments, "uniform_accept": both[:, :3], "uniform_sample": both[:, 3:]})


def test_check_reads_strides(strided_kind, queue):
    kind = strided_kind
    arguments = good(3, 4, 5, 257)
    arguments["greedy"] = np.array([True, False, False, True])
    arguments["num_draft"] = np.array([5, 4, 2, 0], "i4")
    arguments["uniform_sample"][2, 2] = 1
    made = {name: kind.make(np.repeat(array, 2, axis=0), queue)[::2] for name, array in arguments.items()}
    with pytest.raises(ValueError, match=r"^`uniform_sample` .* got 1.0 at sequence 2, position 2\."):
        run_made(made)


def test_check_waits_for_events_and_shares_nothing(queue):
    own = dlpack.kind_of(arrays.usm_array(np.zeros(1, "f4"), queue), "array")
    bad = good(0)
    bad["uniform_sample"][0, 0] = 2
    calls = []
    for arguments in (good(0), bad, good(0), bad):
        views = {name: own.view(arrays.usm_array(array, queue), name) for name, array in arguments.items()}
        calls.append(views)
    events: tuple[dpctl.SyclEvent, ...] = (queue.submit_barrier(),)
    for views, passes in zip(calls, (True, False, True, False)):
        if passes:
            check_values(own, queue, views, views, events)
        else:
            with pytest.raises(ValueError, match="^`uniform_sample` must hold uniforms"):
                check_values(own, queue, views, views, events)


def test_check_keeps_few_plans(device, monkeypatch):
    monkeypatch.setattr(check, "_plans", {})
    monkeypatch.setattr(check, "_MOST_PLANS", 2)
    for num_draft in (1, 2, 2, 3):
        run(good(0, 1, num_draft, 5))
    assert len(check._plans) == 1
