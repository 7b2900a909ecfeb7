"""`--until`: when a peer leaves by itself. A time of day, a while from now, a date, or what it is to contribute.

    07:00   2h30m   90min   2026-12-01   2026-12-01T07:00   20rounds   5Mtokens

It does not know how a peer leaves.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo

from weft.errors import ConfigError
from weft.events import CountedThrough, Emit, Entry, Notice, PeerStarted, RoundCommitted, StepDone
from weft.ids import PeerId

_WHILE = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)(?:m|min))?(?:(\d+)s)?", re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)\s*(rounds?|tokens?)", re.IGNORECASE)
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_MOMENTS = "Allowed: a time (07:00), a while (2h, 90min), a date (2026-12-01, or with T07:00 behind it)"
_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True)
class Until:
    """One of these; the others are None."""

    wall: float | None = None  # seconds since 1970
    rounds: int | None = None  # that count this peer
    tokens: int | None = None  # that it trains on


def until(text: str | None, now: float, timezone: tzinfo | None = None, *, contributes: bool = True) -> Until:
    """Return what `--until` means at the wall time `now`.

    Args:
        contributes: whether this peer does, so that it may leave after a share.

    Raises:
        ConfigError: nothing, a share of who contributes none, or a time that has passed.
    """
    if text is None:
        return Until()
    given = text.strip()
    here = datetime.fromtimestamp(now, timezone)
    if count := _COUNT.fullmatch(given):
        if not contributes:
            raise ConfigError(f"--until {text[:40]}: an anchor contributes no rounds or tokens. {_MOMENTS}.")
        number = int(float(count[1]) * _SIZES[count[2].lower()])
        if number < 1:
            raise ConfigError(f"--until {text[:40]}: that is nothing to contribute.")
        return Until(rounds=number) if count[3].lower().startswith("round") else Until(tokens=number)
    at = _moment(given, here)
    if at is None:
        share = ", or what to contribute (20rounds, 5Mtokens)" if contributes else ""
        raise ConfigError(f"--until {text[:40]}: {_MOMENTS}{share}.")
    if at <= here:
        raise ConfigError(f"--until {text[:40]}: that time has passed; it is {here:%Y-%m-%d %H:%M}.")
    return Until(wall=at.timestamp())


def _moment(given: str, here: datetime) -> datetime | None:
    if face := _CLOCK.fullmatch(given):
        at = here.replace(hour=int(face[1]), minute=int(face[2]), second=0, microsecond=0)
        return at if at > here else at + timedelta(days=1)
    if (span := _WHILE.fullmatch(given)) and any(span.groups()):
        days, hours, minutes, seconds = (int(part or 0) for part in span.groups())
        return here + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        return None
    return at.replace(tzinfo=here.tzinfo) if at.tzinfo is None else at.astimezone(here.tzinfo)


@dataclass
class Contributed:
    """A sink that counts what this peer contributes, and says when it is enough."""

    until: Until
    stop: Callable[[str], None] | None = None  # of the peer, once there is one
    emit: Emit | None = None
    _rounds: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _peer: PeerId | None = field(default=None, init=False)

    def write(self, entry: Entry) -> None:
        match entry.event:
            case PeerStarted():
                self._peer = entry.peer
                if self.emit is not None and (aim := self._aim()):
                    self.emit(Notice(text=f"this peer leaves after {aim}"))
            case RoundCommitted(contributors=contributors):
                self._rounds += self._peer in contributors
            case CountedThrough():  # this peer has no vote, and is counted with its sponsor
                self._rounds += 1
            case StepDone(num_tokens=num_tokens):
                self._tokens += num_tokens
            case _:
                return
        is_enough = (self.until.rounds is not None and self._rounds >= self.until.rounds) or (
            self.until.tokens is not None and self._tokens >= self.until.tokens
        )
        if is_enough and self.stop is not None:
            self.stop(f"it has contributed {self._aim()}")

    def close(self) -> None:
        pass

    def _aim(self) -> str:
        if self.until.rounds is not None:
            return f"{self.until.rounds:,} rounds"
        return "" if self.until.tokens is None else f"{self.until.tokens:,} tokens"
