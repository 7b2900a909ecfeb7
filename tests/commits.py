"""A commit as events have it, for tests that say only what matters to them."""

from typing import Any

import msgspec

from weft.events import RoundCommitted
from weft.ids import Attempt, BranchId, Digest, Round, Tokens

_PLAIN = RoundCommitted(
    branch=BranchId("f" * 64),
    round=Round(1),
    attempt=Attempt(0),
    manifest=Digest("d" * 64),
    contributors=(),
    left_out={},
    tokens=Tokens(100),
    committed_tokens=Tokens(100),
    sent_nbytes=0,
    received_nbytes=0,
    duration_s=1.0,
    work_s=1.0,
)


def committed(**fields: Any) -> RoundCommitted:
    """Return a commit with these fields."""
    return msgspec.structs.replace(_PLAIN, **fields)
