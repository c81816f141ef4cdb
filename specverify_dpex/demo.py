"""Speculative decoding of English, every step checked against the reference.

The target model is the trigram model that pocketsphinx ships, the draft model its bigrams or unigrams: real
distributions over 72,547 words, cheap enough that one sees what verification costs.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, BinaryIO, Callable, NamedTuple

import dpctl
import numpy as np
import numpy.typing as npt

import specverify_dpex
from specverify_dpex import UsmArray, reference

DRAFT_CONTEXT = {"bigram": 1, "unigram": 0}
"""How many of the last words each draft model looks at; the target looks at two."""

_Row = npt.NDArray[np.float32]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `specverify-dpex demo`."""
    add = parser.add_argument
    add("--batch", type=_integer(1), default=8, help="sequences decoded at once (%(default)s)")
    add("--drafts", type=_integer(0), default=5, help="words drafted in a step (%(default)s)")
    add("--steps", type=_integer(1, 2**32), default=36, help="calls of verify() (%(default)s)")
    add("--draft", choices=DRAFT_CONTEXT, default="bigram", help="the draft model (%(default)s)")
    add("--prompt", default="", help="words that every sequence begins with")
    add("--seed", type=_integer(0, 2**64 - 1), default=30, help="equal seeds, equal text (%(default)s)")
    add("--device", help="SYCL filter string, such as level_zero:gpu:0 (the default device)")


def run(args: argparse.Namespace) -> int:
    """Decode and print. The exit code is 1 if a step differs from the reference, 2 if it cannot start."""
    try:
        from pocketsphinx import get_model_path
        from tqdm import tqdm

        queue = _queue(args.device)
        model = Trigrams(get_model_path("en-us/en-us.lm.bin"))
        prompt = model.tokens(args.prompt)
    except ModuleNotFoundError as error:
        return _cannot_start(f"{error.name} is missing: pip install 'specverify-dpex[demo]'")
    except (RuntimeError, LookupError) as error:
        return _cannot_start(str(error))

    print(_header(args, queue, model))
    sequences = [[Token(token, "prompt") for token in prompt] for _ in range(args.batch)]
    # The noise of the drafts: another generator than verify()'s Philox, so independent of its uniforms.
    noise = np.random.default_rng(args.seed)
    accepted_lengths: Counter[int] = Counter()
    clock = Clock()
    for step in tqdm(range(args.steps), desc="decoding", unit="step", leave=False, disable=None):
        with clock("language model"):
            contexts = [model.context([token.word for token in sequence[-2:]]) for sequence in sequences]
            inputs = _propose(model, contexts, args.drafts, DRAFT_CONTEXT[args.draft], noise)
        with clock("copy to the device"):
            arrays = [_to_device(array, queue) for array in inputs]
        with clock("verify()"):
            result = specverify_dpex.verify(*arrays, seed=args.seed, offset=step)
            queue.wait()
        with clock("reference"):
            expected = reference.verify(*inputs, seed=args.seed, offset=step)

        draft_tokens = inputs[0].tolist()
        outcomes, wanted = (list(zip(*(array.tolist() for array in pair))) for pair in (result, expected))
        if outcomes != wanted:
            print(_difference(args, step, model, draft_tokens, outcomes, wanted))
            return 1
        for sequence, drafts, (accepted, next_token) in zip(sequences, draft_tokens, outcomes):
            sequence += [Token(draft, "draft") for draft in drafts[:accepted]]
            sequence.append(Token(next_token, "target"))
            accepted_lengths[accepted] += 1

    print(_text(model, sequences, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    print(_summary(args, accepted_lengths, clock))
    return 0


class Token(NamedTuple):
    word: int
    origin: str  # "prompt", "draft" (drafted and accepted) or "target" (drawn by verify)


class Trigrams:
    """The trigram model of pocketsphinx: the distribution of the word after any two.

    The rows are those that `pocketsphinx.NGramModel.prob` gives word by word, normalised. As a row would take
    72,547 calls of 1 to 3 µs, the model's file is read here instead, and it takes about 0.2 ms.

    Raises
    ------
    RuntimeError
        If the file is not of the format that pocketsphinx 5 writes.
    """

    MAGIC = b"Trie Language Model\x03"  # 3: it holds trigrams
    LOG_BASE = math.log(1.0001)  # of the file's logarithms
    START, END = "<s>", "</s>"

    def __init__(self, path: str):
        with open(path, "rb") as file:
            if file.read(len(self.MAGIC)) != self.MAGIC:
                raise RuntimeError(f"{path} is not a model of pocketsphinx 5: pip install 'pocketsphinx<6'")
            num_words, num_bigrams, num_trigrams, _ = np.fromfile(file, "<u4", 4).tolist()
            # What an n-gram has of these is a 16-bit index.
            tables = self._exp(np.fromfile(file, "<f4", 3 << 16)).reshape(3, -1)
            bigram_probs, bigram_backoffs, trigram_probs = tables
            unigram = [("prob", "<f4"), ("backoff", "<f4"), ("next", "<u4")]
            unigrams = np.fromfile(file, unigram, num_words + 1)
            word_bits, next_bits = num_words.bit_length(), num_trigrams.bit_length()
            second, backoff, prob, following = _bit_fields(file, num_bigrams, (word_bits, 16, 16, next_bits))
            third, trigram_prob = _bit_fields(file, num_trigrams, (word_bits, 16))
            file.read(4)
            self.words = file.read().decode().split("\0")[:-1]
        self._ids = {word: token for token, word in enumerate(self.words)}
        self._prob = self._exp(unigrams["prob"][:-1])
        self._backoff = self._exp(unigrams["backoff"][:-1])

        # The file is a trie from the last word of an n-gram to its first; a row needs all that begin alike.
        last = _parents(unigrams["next"])
        parent = _parents(following[: len(last) + 1])
        pair = second[: len(last)].astype(np.int64) * num_words + last
        order = np.argsort(pair)
        self._bigram, self._bigram_last = pair[order], last[order]
        self._bigram_prob, self._bigram_backoff = bigram_probs[prob[order]], bigram_backoffs[backoff[order]]

        pair = third[: len(parent)].astype(np.int64) * num_words + second[parent]
        order = np.argsort(pair)
        self._trigram, self._trigram_last = pair[order], last[parent[order]]
        self._trigram_prob = trigram_probs[trigram_prob[order]]

    def _exp(self, logarithms: npt.NDArray[Any]) -> _Row:
        return np.exp(logarithms.astype(np.float64) * self.LOG_BASE).astype(np.float32)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises
        ------
        LookupError
            If a word is not in the vocabulary.
        """
        words = text.lower().split()
        unknown = [word for word in words if word not in self._ids]
        if unknown:
            raise LookupError(f"the model does not know the word {unknown[0]!r} of the prompt")
        return [self._ids[word] for word in words]

    def context(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The last two tokens of the sentence that `tokens` ends in; its start counts as one."""
        start, end = self._ids[self.START], self._ids[self.END]
        if not tokens or tokens[-1] == end:
            return (start,)
        return (start if len(tokens) == 1 or tokens[-2] == end else tokens[-2], tokens[-1])

    def row(self, context: tuple[int, ...]) -> _Row:
        """The distribution of the word after a context of none, one or two: (vocab,) float32."""
        row = self._prob.copy()
        if context:
            # A stored n-gram has its own probability, all others the shorter context's times one weight.
            first = context[-1] * len(self.words)
            stored = slice(*np.searchsorted(self._bigram, (first, first + len(self.words))))
            row *= self._backoff[context[-1]]
            row[self._bigram_last[stored]] = self._bigram_prob[stored]
        if len(context) == 2:
            pair = context[0] * len(self.words) + context[1]
            bigram = np.searchsorted(self._bigram, pair)
            if bigram < len(self._bigram) and self._bigram[bigram] == pair:
                row *= self._bigram_backoff[bigram]
            stored = slice(*np.searchsorted(self._trigram, (pair, pair + 1)))
            row[self._trigram_last[stored]] = self._trigram_prob[stored]
        row /= row.sum()
        return row


def _bit_fields(file: BinaryIO, entries: int, widths: tuple[int, ...]) -> list[npt.NDArray[np.uint32]]:
    """Read packed entries, and the one that ends them: an array for each field, none wider than 25 bits."""
    total = sum(widths)
    packed = np.fromfile(file, np.uint8, ((1 + entries) * total + 7) // 8 + 8)
    bit = np.arange(1 + entries) * total
    fields = []
    for width in widths:
        value = np.zeros(1 + entries, np.uint32)
        for byte in range(4):
            value |= packed[(bit >> 3) + byte].astype(np.uint32) << np.uint32(8 * byte)
        fields.append(value >> (bit & 7).astype(np.uint32) & np.uint32((1 << width) - 1))
        bit += width
    return fields


def _parents(begins: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """The parent of each entry of a level, from where the children of each parent begin."""
    children = begins[1:] - begins[:-1]
    return np.repeat(np.arange(len(children)), children)


def _propose(
    model: Trigrams,
    contexts: list[tuple[int, ...]],
    num_draft: int,
    draft_context: int,
    noise: np.random.Generator,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Draw the drafts of each sequence: `draft_tokens`, `draft_probs` and `target_probs` of verify()."""
    batch, vocab = len(contexts), len(model.words)
    draft_tokens = np.empty((batch, num_draft), np.int64)
    draft_probs = np.empty((batch, num_draft, vocab), np.float32)
    target_probs = np.empty((batch, num_draft + 1, vocab), np.float32)
    for sequence, context in enumerate(contexts):
        for position in range(num_draft):
            target_probs[sequence, position] = model.row(context)
            row = draft_probs[sequence, position] = model.row(context[len(context) - draft_context :])
            cumulative = np.cumsum(row, dtype=np.float64)
            token = int(np.searchsorted(cumulative, noise.random() * cumulative[-1], side="right"))
            draft_tokens[sequence, position] = token
            context = model.context((*context, token))
        target_probs[sequence, num_draft] = model.row(context)
    return draft_tokens, draft_probs, target_probs


def _to_device(array: npt.NDArray[Any], queue: dpctl.SyclQueue) -> UsmArray:
    return UsmArray.from_buffer(array, array.shape, str(array.dtype), sycl_queue=queue)


class Clock:
    """The seconds that each part of each step took."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part].append(time.perf_counter() - start)


def _integer(smallest: int, largest: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not smallest <= value <= largest:
            raise argparse.ArgumentTypeError(f"expected an integer in [{smallest}, {largest}], got {text}")
        return value

    parse.__name__ = "integer"  # argparse puts it into its message about a text that is no integer
    return parse


def _queue(filter_string: str | None) -> dpctl.SyclQueue:
    """A queue of the device that a filter string selects, or of the default device."""
    try:
        device = dpctl.select_default_device() if filter_string is None else dpctl.SyclDevice(filter_string)
    except dpctl.SyclDeviceCreationError:
        found = ", ".join(device.filter_string for device in dpctl.get_devices()) or "none"
        wanted = "no SYCL device" if filter_string is None else f"no SYCL device {filter_string!r}"
        raise RuntimeError(f"{wanted} (found: {found}). Run `specverify-dpex doctor` to see why") from None
    return dpctl.SyclQueue(device, property="in_order")


def _cannot_start(reason: str) -> int:
    print(f"specverify-dpex demo: {reason}", file=sys.stderr)
    return 2


def _header(args: argparse.Namespace, queue: dpctl.SyclQueue, model: Trigrams) -> str:
    device = queue.sycl_device
    shipped = f"pocketsphinx {metadata.version('pocketsphinx')}"
    return "\n".join(
        (
            f"specverify-dpex {specverify_dpex.__version__}, dpctl {dpctl.__version__.split('+')[0]}",
            f"  device   {device.name.strip()} ({device.filter_string}, driver {device.driver_version})",
            f"  model    English of {shipped}, {len(model.words):,} words",
            "  target   trigram",
            f"  draft    {args.draft}, {args.drafts} words a step",
            f"  run      batch {args.batch}, steps {args.steps}, seed {args.seed}",
            "",
        )
    )


def _difference(
    args: argparse.Namespace,
    step: int,
    model: Trigrams,
    draft_tokens: list[list[int]],
    outcome: list[tuple[int, int]],
    expected: list[tuple[int, int]],
) -> str:
    def describe(accepted: int, next_token: int) -> str:
        word = repr(model.words[next_token]) if 0 <= next_token < len(model.words) else "no word"
        return f"accepted {accepted}, next_token {next_token} ({word})"

    lines = [f"Step {step} differs from the reference (seed {args.seed}, offset {step}):"]
    for sequence, (got, want) in enumerate(zip(outcome, expected)):
        if got != want:
            lines += [
                f"  sequence   {sequence}, drafts {[model.words[token] for token in draft_tokens[sequence]]}",
                f"  verify()   {describe(*got)}",
                f"  reference  {describe(*want)}",
            ]
    return "\n".join(lines)


def _text(model: Trigrams, sequences: list[list[Token]], colour: bool) -> str:
    """The text of each sequence, a line for each sentence."""
    marks = {
        "prompt": "\033[2m{}\033[0m" if colour else "{}",
        "draft": "\033[32m{}\033[0m" if colour else "{}",
        "target": "\033[1;33m{}\033[0m" if colour else "[{}]",
    }
    draft, target = marks["draft"].format("word"), marks["target"].format("word")
    lines = [f"{draft} was drafted and accepted, {target} was drawn by verify()."]
    for number, sequence in enumerate(sequences):
        lines += ["", f"{number:3}"]
        for token in sequence:
            word = model.words[token.word]
            if word != model.END:
                lines[-1] += " " + marks[token.origin].format(word)
            else:
                lines[-1] += marks[token.origin].format(".")
                lines.append("   ")
        if not lines[-1].strip():
            lines.pop()
    return "\n".join([*lines, ""])


def _summary(args: argparse.Namespace, accepted_lengths: Counter[int], clock: Clock) -> str:
    count = args.batch * args.steps
    bar_width = min(60, shutil.get_terminal_size().columns - 30)
    longest = max(accepted_lengths.values())
    lines = ["accepted   sequences and steps"]
    for length in range(args.drafts + 1):
        times = accepted_lengths[length]
        bar = "#" * round(bar_width * times / longest)
        lines.append(f"{length:8}   {times:6,}  {times / count:6.1%}  {bar}".rstrip())
    words = 1 + sum(length * times for length, times in accepted_lengths.items()) / count
    lines += ["", f"{words:.2f} words a step and sequence, of at most {args.drafts + 1}.", ""]

    total = sum(map(sum, clock.seconds.values()))
    lines.append(f"{'time':20}  {'first':>9}  {'median':>9}  {'total':>8}  share")
    for part, seconds in clock.seconds.items():
        first, median = (f"{1e3 * value:.2f} ms" for value in (seconds[0], np.median(seconds)))
        share = sum(seconds) / total
        lines.append(f"{part:20}  {first:>9}  {median:>9}  {sum(seconds):6.2f} s  {share:5.1%}")
    lines += ["The first verify() builds the kernels for the device.", ""]
    lines += [f"Each of the {args.steps} steps equalled the reference, bit for bit."]
    return "\n".join(lines)
