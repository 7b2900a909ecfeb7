"""How long rounds took, kept for the next process of this peer: it need not wait as if nothing were known.

The file is replaced now and then, and not synced: what is lost or damaged is measured again.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.sync.round.deadline import NUM_REMEMBERED

EVERY_S = 5.0

_Times = Annotated[tuple[Annotated[float, Meta(ge=0, le=1e6)], ...], Meta(max_length=NUM_REMEMBERED)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, oldest first: from a quorum's announcement to the last, and to the commit."""

    graces_s: _Times = ()
    latencies_s: _Times = ()


class Memory:
    """
    Args:
        now: seconds.
    """

    def __init__(self, path: Path, now: Callable[[], float], *, is_on: bool) -> None:
        self._path = path
        self._now = now
        self._is_on = is_on
        self._written_at = float("-inf")

    def read(self) -> Measured:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=Measured)
        return Measured()

    def keep(self, measured: Measured) -> None:
        """Write it down, unless that was done a moment ago."""
        if not self._is_on or self._now() - self._written_at < EVERY_S:
            return
        self._written_at = self._now()
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(measured))
            temporary.replace(self._path)
