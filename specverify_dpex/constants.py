"""Numbers that the host code, the reference and the kernels must agree on."""

MAX_VOCAB = 2**20
"""Largest vocabulary. One more token, and the sum of weights of up to 2**44 could not be told from a smaller one."""

MAX_DRAFT = 2**30 - 1
"""Most drafts of a sequence: a kernel counts twice as many in 31 bits."""

STREAM_ACCEPT = 0
"""Philox stream of the acceptance tests."""
STREAM_SAMPLE = 1
"""Philox stream of the draws."""

PHILOX_ACCEPT = 1
"""Bit of the kernels' argument `philox`: they draw uniform_accept themselves."""
PHILOX_SAMPLE = 2
"""Bit of `philox`: they draw uniform_sample themselves."""
PHILOX_ROW_KEYS = 4
"""Bit of `philox`: each sequence has its own key, and row number 0."""
