"""What verification returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class VerifyResult(NamedTuple):
    """The outcome of verifying a batch of drafts.

    Both arrays are of the kind that the caller passed in, on the same device and queue.
    """

    accepted: Any
    """(batch,) int64: length of the accepted prefix of each sequence, in [0, num_draft]."""

    next_token: Any
    """(batch,) int64: the token that follows the prefix, in [0, vocab); -1 where the target row has no mass."""
