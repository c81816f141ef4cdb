"""What verification returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class _Pair(NamedTuple):
    accepted: Any
    """(batch,) int64: length of the accepted prefix of each sequence, in [0, num_draft]."""

    next_token: Any
    """(batch,) int64: the token that follows the prefix, in [0, vocab); -1 where the target row has no mass."""


class VerifyResult(_Pair):
    """The outcome of verifying a batch of drafts: unpacks to `accepted, next_token`.

    Both arrays are of the kind that the caller passed in, on the same device and queue.
    """

    event: Any = None
    """The dpctl.SyclEvent after which both arrays are complete; None where the batch is empty."""

    def __reduce__(self) -> Any:
        """Copy and pickle the pair alone: an event belongs to its process."""
        return type(self), tuple(self)
