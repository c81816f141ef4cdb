"""The values of a call's arrays, checked on the device before the launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import dpctl

from specverify_dpex import launch, tuning
from specverify_dpex.constants import MAX_VOCAB
from specverify_dpex.dlpack import ABSENT, Kind, View
from specverify_dpex.plan import options_of

ARGUMENTS = (
    "draft_tokens",
    "num_draft",
    "draft_probs",
    "target_probs",
    "uniform_accept",
    "uniform_sample",
    "greedy",
    "deterministic_draft",
)
"""The arrays whose values are looked at; the first six are checked, in this order."""

# The module and the tolerance for each element type of a row.
_ROWS = {"f4": ("check_rows_f32", 1e-3), "f2": ("check_rows_f16", 1e-2), "bfloat16": ("check_rows_bf16", 1e-2)}

_UNITS = 2**44  # of a sum
_MOST_PLANS = 512
_plans: dict[tuple[Any, ...], _Plan] = {}


def check_values(
    kind: Kind,
    queue: dpctl.SyclQueue,
    given: Mapping[str, View],
    views: Mapping[str, View],
    events: Sequence[dpctl.SyclEvent] = (),
) -> None:
    """Check what a call's arrays hold, and wait for the answer.

    Parameters
    ----------
    given : dict of str to View
        The arrays as the caller passed them, by the names of `ARGUMENTS`; those left out are ABSENT.
    views : dict of str to View
        The same as the device sees them, their dtypes, shapes and queue checked.
    events : sequence of dpctl.SyclEvent
        What the check waits for.

    Raises
    ------
    ValueError
        If a value is bad: it names the argument, the first row and the value.
    """
    found = [views.get(name, ABSENT) for name in ARGUMENTS]
    if found[0].shape[0]:
        signature = (queue, *(view[1:4] for view in found))
        plan = launch.remembered(_plans, _MOST_PLANS, signature, lambda: _Plan(queue, found))
        plan.check(kind, found, events)
    accept, sample = (given.get(name, ABSENT) for name in ("uniform_accept", "uniform_sample"))
    given_both = accept is not ABSENT and sample is not ABSENT and 0 not in accept.shape
    if given_both and kind.address(accept) == kind.address(sample):
        raise ValueError(
            "`uniform_accept` and `uniform_sample` must be independent: expected two buffers, got the same memory. "
            "Draw each by itself, or leave both out"
        )


class _Plan:
    """The launches that check arrays like these, and memory for what they find."""

    def __init__(self, queue: dpctl.SyclQueue, views: Sequence[View]):
        tokens, lengths, draft, target, accept, sample, greedy, deterministic = views
        self._queue = queue
        self._batch, self._num_draft = batch, num_draft = tokens.shape
        self._vocab = target.shape[2]
        self._row_counts = draft_rows, target_rows = [
            0 if rows is ABSENT or 0 in rows.shape else batch * rows.shape[1] for rows in (draft, target)
        ]
        # The parts of 8-byte elements first: the others may end anywhere.
        parts = (48 * batch, 16 * draft_rows, 16 * target_rows, 8 * batch, 4 * draft_rows, 4 * target_rows)
        *self._starts, nbytes = accumulate(parts, initial=0)
        self._scratch = launch.Scratch(queue, nbytes)
        arguments = {
            "draft_tokens_batch": tokens.strides[0],
            "draft_tokens_position": tokens.strides[1],
            "num_draft_batch": lengths.strides[0],
            "greedy_batch": greedy.strides[0],
            "options": options_of(dict(zip(ARGUMENTS, views))),
            "max_draft": num_draft,
        }
        kernel = launch.kernel(queue, "check_proposals")
        self._proposals = launch.Launch(
            kernel,
            queue,
            {
                **arguments,
                "uniform_accept_batch": accept.strides[0],
                "uniform_accept_position": accept.strides[1],
                "uniform_sample_batch": sample.strides[0],
                "uniform_sample_position": sample.strides[1],
                "batch": batch,
                "vocab": self._vocab,
            },
            (batch,),
            min(num_draft + 1, 64, kernel.max_work_group),
            ("draft_tokens", "num_draft", "greedy", "uniform_accept", "uniform_sample", "report", "values"),
        )
        self._rows: list[launch.Launch | None] = []
        for rows, bonus in ((draft, 0), (target, 1)):
            if rows is ABSENT or 0 in rows.shape:
                self._rows.append(None)
                continue
            module, tolerance = _ROWS[rows.dtype]
            kernel = launch.kernel(queue, module)
            cut = tuning.launch_shape(batch, rows.shape[2], queue.sycl_device)
            self._rows.append(
                launch.Launch(
                    kernel,
                    queue,
                    {
                        **arguments,
                        "rows_batch": rows.strides[0],
                        "rows_position": rows.strides[1],
                        "columns": rows.shape[2],
                        "bonus": bonus,
                        "tolerance": int(tolerance * _UNITS),
                        "deterministic_batch": deterministic.strides[0],
                    },
                    (batch, num_draft + bonus),
                    min(cut.work_group, tuning.MAX_WORK_GROUP, kernel.max_work_group),
                    ("rows", "draft_tokens", "num_draft", "greedy", "deterministic", "report", "values"),
                )
            )

    def check(self, kind: Kind, views: Sequence[View], events: Sequence[dpctl.SyclEvent]) -> None:
        tokens, lengths, draft, target, accept, sample, greedy, deterministic = (view.pointer for view in views)
        memory = self._scratch.take()
        proposals, draft_rows, target_rows, uniforms, draft_values, target_values = (
            memory._pointer + start for start in self._starts
        )
        calls = [
            (self._proposals, (tokens, lengths, greedy, accept, sample, proposals, uniforms)),
            (self._rows[0], (draft, tokens, lengths, greedy, deterministic, draft_rows, draft_values)),
            (self._rows[1], (target, tokens, lengths, greedy, deterministic, target_rows, target_values)),
        ]
        launched = [
            launch.run(call, self._queue, kind.ordered, (memory, views), None, *pointers, events=events)
            for call, pointers in calls
            if call is not None
        ]
        for event in launched:
            event.wait()
        content = bytes(memory.copy_to_host())
        self._scratch.give_back(memory)
        self._raise_what_is_bad(views, content)

    def _raise_what_is_bad(self, views: Sequence[View], content: bytes) -> None:
        """Raise for the first bad value in the order of `ARGUMENTS`; `content` is what the launches wrote."""
        import numpy  # dpctl has loaded it already

        batch, num_draft = self._batch, self._num_draft
        integers = 6 * batch + 2 * sum(self._row_counts)
        words = numpy.frombuffer(content, "i8", integers)
        floats = numpy.frombuffer(content, "f4", 2 * batch + sum(self._row_counts), 8 * integers)
        bad_token, token, bad_length, length, *bad_uniforms = words[: 6 * batch].reshape(6, batch)

        sequence = _first(bad_token >= 0)
        if sequence is not None:
            raise ValueError(
                f"`draft_tokens` must hold tokens of the vocabulary: expected less than {self._vocab}, got "
                f"{token[sequence]} at sequence {sequence}, position {bad_token[sequence]}. "
                "End the drafts before it with -1"
            )
        sequence = _first(bad_length >= 0)
        if sequence is not None:
            raise ValueError(
                f"`num_draft` must count positions of `draft_tokens`: expected 0 to {num_draft}, got "
                f"{length[sequence]} at sequence {sequence}. Count the proposals of the sequence again"
            )
        word, number = 6 * batch, 2 * batch
        for name, rows, count in zip(ARGUMENTS[2:4], views[2:4], self._row_counts):
            _raise_bad_row(name, rows, words[word : word + 2 * count].reshape(-1, 2), floats[number : number + count])
            word, number = word + 2 * count, number + count
        for name, positions, values in zip(ARGUMENTS[4:6], bad_uniforms, floats[: 2 * batch].reshape(2, batch)):
            sequence = _first(positions >= 0)
            if sequence is not None:
                raise ValueError(
                    f"`{name}` must hold uniforms: expected values in [0, 1), got {values[sequence]!s} at sequence "
                    f"{sequence}, position {positions[sequence]}. Draw it anew, or leave it out"
                )


def _raise_bad_row(name: str, rows: View, report: Any, values: Any) -> None:
    """Raise for the first bad row of an array of probabilities, as `check_rows_kernel` reports its rows."""
    row = _first(report[:, 0] > -2)
    if row is None:
        return
    sequence, position = divmod(row, rows.shape[1])
    place = f"sequence {sequence}, position {position}"
    token, total = report[row].tolist()
    value = values[row]
    tolerance = _ROWS[rows.dtype][1]
    if value != value and token >= 0:
        raise ValueError(
            f"`{name}` must not hold NaN: expected numbers, got nan at {place}, token {token}. "
            "Look for infinities in the logits"
        )
    if token >= 0:
        raise ValueError(
            f"`{name}` must hold probabilities: expected values in [0, 1], got {value!s} at {place}, token {token}. "
            "Take the softmax of finite logits"
        )
    total %= 2**64
    if total == 0 and rows.shape[2] == MAX_VOCAB and value >= 1:
        total = 2**64  # which is the one sum that does not fit
    raise ValueError(
        f"`{name}` must have rows that sum to 1: expected 1 within {tolerance}, got {total / _UNITS:.6g} at {place}. "
        "Normalise the row, for example by a softmax in float32"
    )


def _first(flags: Any) -> int | None:
    """The index of the first that is set."""
    return int(flags.argmax()) if flags.any() else None
