"""Verify drafts that lie in USM memory without an array library: specverify_dpex and dpctl are all it takes.

A vocabulary of eight, two drafts a sequence, 256 sequences a step. The draft model guesses the target poorly,
and still the first token that comes out is distributed as the target says: the table at the end shows it.
"""

from array import array
from random import Random

from specverify_dpex import UsmArray, verify

# isort: split
# After specverify_dpex, which makes the SYCL runtime of dpctl's wheels findable.
from dpctl.memory import MemoryUSMDevice

BATCH, NUM_DRAFT, STEPS, SEED = 256, 2, 40, 2024
TARGET = [0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02]
DRAFT = [0.05, 0.15, 0.30, 0.10, 0.20, 0.10, 0.05, 0.05]
VOCAB = len(TARGET)


class MyTensor:
    """A class of your own: verify() takes any object that describes its USM memory in this way."""

    def __init__(self, memory, shape, typestr):
        self.memory = memory
        self.__sycl_usm_array_interface__ = {
            "data": (memory._pointer, False),  # the address, and that it is not read-only
            "shape": shape,
            "strides": None,  # C-contiguous; otherwise a tuple, in elements
            "typestr": typestr,  # "<f4" is float32, "<i8" is int64
            "version": 1,
            "syclobj": memory.sycl_queue,  # where verify() runs
        }


def main():
    # 1. The simple way: nested lists, copied to the default device.
    target_probs = UsmArray.from_list([[TARGET] * (NUM_DRAFT + 1)] * BATCH, "float32")
    queue = target_probs.sycl_queue
    print("device:", queue.sycl_device.name.strip())

    # 2. Memory that is there already, as your own kernels leave it: UsmArray looks at it and copies nothing.
    host = bytearray(array("f", DRAFT * NUM_DRAFT * BATCH))
    memory = MemoryUSMDevice(len(host), queue=queue)
    memory.copy_from_host(host)
    draft_probs = UsmArray((BATCH, NUM_DRAFT, VOCAB), "float32", memory=memory)

    noise = Random(1)  # draws the drafts; must be independent of the uniforms that verify() draws
    counts = [0] * VOCAB
    for step in range(STEPS):
        drafts = [noise.choices(range(VOCAB), DRAFT, k=NUM_DRAFT) for _ in range(BATCH)]
        draft_tokens = UsmArray.from_list(drafts, "int64", sycl_queue=queue)
        # The uniforms are drawn on the device: one seed for the run, another offset for each step.
        result = verify(draft_tokens, draft_probs, target_probs, seed=SEED, offset=step)
        accepted, next_token = result.accepted.tolist(), result.next_token.tolist()  # waits for the device
        for sequence in range(BATCH):
            counts[drafts[sequence][0] if accepted[sequence] else next_token[sequence]] += 1
        if step < 3:
            print(f"step {step}: accepted {accepted[:8]}…, next_token {next_token[:8]}…")

    # 3. The last call once more, with objects of your own class. All arguments of a call must be of one kind.
    again = verify(
        MyTensor(draft_tokens.memory, (BATCH, NUM_DRAFT), "<i8"),
        MyTensor(memory, (BATCH, NUM_DRAFT, VOCAB), "<f4"),
        MyTensor(target_probs.memory, (BATCH, NUM_DRAFT + 1, VOCAB), "<f4"),
        seed=SEED,
        offset=STEPS - 1,
    )
    if (again.accepted.tolist(), again.next_token.tolist()) != (accepted, next_token):
        raise SystemExit("equal inputs gave different outputs")

    total = BATCH * STEPS
    print(f"the first token of {total:,} sequences:\ntoken  target  emitted  draft")
    for token in range(VOCAB):
        print(f"{token:5}  {TARGET[token]:6.3f}  {counts[token] / total:7.3f}  {DRAFT[token]:5.3f}")
    deviations = [(n / total - p) / (p * (1 - p) / total) ** 0.5 for n, p in zip(counts, TARGET)]
    if max(map(abs, deviations)) > 4:
        raise SystemExit("the emitted tokens are not distributed as the target says")
    print(f"no token is further from the target than {max(map(abs, deviations)):.1f} standard errors")


if __name__ == "__main__":
    main()
