"""A serving loop: requests of different kinds share each call of verify(), and none notices the others.

The language model is that of `specverify-dpex demo` (pip install 'specverify-dpex[demo]'). Some requests are sampled
and drafted by a smaller model, some are drafted by looking up what followed the last word before, some are decoded
greedily. They have as many drafts as they like, come and go, and each has its own seed, so that its words do not depend
on who else is served: the loop runs twice, with six slots and with two, and the texts are the same.
"""

import functools
import random
from dataclasses import dataclass, field

import numpy as np
from pocketsphinx import get_model_path

from specverify_dpex import AcceptanceStats, UsmArray, emitted_tokens, verify
from specverify_dpex.demo import Trigrams

MAX_DRAFT = 4
DRAFT_VOCAB = 60_000  # the draft model does not know the last words of the dictionary


@dataclass
class Request:
    kind: str  # "sampled", "lookup" or "greedy"
    seed: int
    prompt: str
    length: int  # words to write
    tokens: list = field(default_factory=list)
    steps: int = 0

    def key(self):
        """The Philox key of this request's next step: verify() numbers steps for the whole batch, this for one."""
        return self.seed << 32 | self.steps


def propose(model, request):
    """The draft tokens of a request's next step, and the rows they were drawn from; None where none were."""
    if request.kind == "lookup":
        *earlier, last = request.tokens
        if last not in earlier:
            return [], None
        after = len(earlier) - earlier[::-1].index(last)
        return request.tokens[after : after + MAX_DRAFT], None
    noise = random.Random(request.key())  # another generator than verify()'s, so independent of its uniforms
    tokens, rows = [], []
    for _ in range(MAX_DRAFT if request.kind == "greedy" else noise.randint(1, MAX_DRAFT)):
        row = model.row(model.context(request.tokens + tokens)[-1:])[:DRAFT_VOCAB]
        row /= row.sum()
        cumulative = np.cumsum(row, dtype=np.float64)
        token = np.searchsorted(cumulative, noise.random() * cumulative[-1], side="right")
        tokens.append(int(row.argmax() if request.kind == "greedy" else token))
        rows.append(row)
    return tokens, rows


def target_rows(model, request, drafts):
    """What the target model thinks at each draft, and after the last."""
    return [model.row(model.context(request.tokens + drafts[:count])) for count in range(len(drafts) + 1)]


@functools.cache
def result_buffers(batch):
    """Where verify() writes, made once for each size of a batch."""
    return UsmArray((batch,), "int64"), UsmArray((batch,), "int64")


def on_device(array):
    return UsmArray.from_buffer(np.ascontiguousarray(array), array.shape, array.dtype.name)


def step(model, batch, stats, check):
    """Draft for each request of a batch, verify all at once, and append what came out."""
    # What lies behind a request's drafts is never read, so the arrays need no padding.
    draft_tokens = np.empty((len(batch), MAX_DRAFT), np.int32)
    draft_probs = np.empty((len(batch), MAX_DRAFT, DRAFT_VOCAB), np.float32)
    target_probs = np.empty((len(batch), MAX_DRAFT + 1, len(model.words)), np.float16)
    num_draft = np.empty(len(batch), np.int32)
    for row, request in enumerate(batch):
        drafts, draft_rows = propose(model, request)
        num_draft[row] = count = len(drafts)
        draft_tokens[row, :count] = drafts
        target_probs[row, : count + 1] = target_rows(model, request, drafts)
        if draft_rows is not None:
            draft_probs[row, :count] = draft_rows

    draft_tokens = on_device(draft_tokens)
    result = verify(
        draft_tokens,
        on_device(draft_probs),
        on_device(target_probs),
        num_draft=on_device(num_draft),
        deterministic_draft=on_device(np.array([request.kind == "lookup" for request in batch])),
        greedy=on_device(np.array([request.kind == "greedy" for request in batch])),
        seed=on_device(np.array([request.key() for request in batch], np.uint64)),
        out=result_buffers(len(batch)),
        stats=stats,
        check=check,
    )
    for request, emitted in zip(batch, emitted_tokens(draft_tokens, *result).tolist()):
        request.tokens += [token for token in emitted if token >= 0]
        request.steps += 1


def serve(model, requests, slots):
    """Run all requests, `slots` of them at a time, and return what was accepted."""
    stats = AcceptanceStats()
    waiting, running = list(requests), []
    for request in waiting:
        request.tokens = model.tokens(request.prompt)
    first = True
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        step(model, running, stats, check=first)  # looks at all values of the first step
        running = [request for request in running if len(request.tokens) < request.length]
        first = False
    return stats.read()


def requests():
    kinds = ("sampled", "lookup", "greedy", "sampled", "lookup", "sampled", "greedy", "sampled")
    prompts = ("the", "to be or not to be or", "there is", "it was the", "what is the", "when", "he said", "a")
    return [Request(kind, seed, prompt, 20) for seed, (kind, prompt) in enumerate(zip(kinds, prompts), 100)]


def main():
    model = Trigrams(get_model_path("en-us/en-us.lm.bin"))
    served = requests()
    counts = serve(model, served, slots=6)
    for request in served:
        print(f"{request.kind:8} {' '.join(model.words[token] for token in request.tokens)}")
    rates = ", ".join(f"{rate:.0%}" for rate in counts.acceptance_rate)
    print(f"{counts.mean_tokens_per_step:.2f} tokens a step; accepted by position: {rates}")

    again = requests()
    serve(model, again, slots=2)
    if [request.tokens for request in again] != [request.tokens for request in served]:
        raise SystemExit("a request's words depend on who else is served")
    print("The same words with two slots as with six.")


if __name__ == "__main__":
    main()
