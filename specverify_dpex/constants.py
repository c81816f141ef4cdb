"""Numbers that the host code, the reference and the kernels must agree on."""

MAX_VOCAB = 2**20
"""Largest vocabulary. One more token, and the sum of weights of up to 2**44 could not be told from a smaller one."""

MAX_DRAFT = 2**30 - 1
"""Most drafts of a sequence: a kernel counts twice as many in 31 bits."""

STREAM_ACCEPT = 0
"""Philox stream of the acceptance tests."""
STREAM_SAMPLE = 1
"""Philox stream of the draws."""

# Bits of the kernels' argument `options`.
PHILOX_ACCEPT = 1
"""The kernel draws uniform_accept itself."""
PHILOX_SAMPLE = 2
"""The kernel draws uniform_sample itself."""
PHILOX_ROW_KEYS = 4
"""Each sequence has its own key, and row number 0."""
DRAFT_PROBS = 8
"""The draft's probabilities are given; without them it put probability 1 on its tokens."""
DETERMINISTIC_MASK = 16
"""Some sequences' drafts put probability 1 on their tokens."""
GREEDY_MASK = 32
"""Some sequences are decoded greedily."""
NUM_DRAFT = 64
"""Sequences have their own numbers of drafts."""
INT32_NUM_DRAFT = 128
"""Those are int32, not int64."""
INT32_TOKENS = 256
"""draft_tokens is int32, not int64."""
