"""For whom this peer's rounds wait: a newcomer may ask them to, and they do for one at a time and not for long.

    nobody ──asks──► waiting for one ──in, gone, silent, too slow, or too long──► nobody, for a while

Whoever is admitted may ask, also under a key made for it, so all bounds but one are on what this peer gives and not on
who asks: `longest_s` of one block, and after it nine times as long without any. So at most a tenth of its time is spent
waiting, whoever comes. The one is for fairness: a key is waited for once a day.

Pure: it is told the time.
"""

from dataclasses import dataclass

from weft.ids import PeerId
from weft.net.blobs.priority import SHARE

SILENT_S = 8.0  # without a request: as long as a killed peer is taken for a member
REST = 9.0  # times as long as a block lasted there is none after it
LEAST_REST_S = 60.0
DAY_S = 86_400.0  # between two blocks of one key
TRIAL_S = 60.0  # rounds that exchanged when it began have ended, and what a newcomer measures is what its line can do


@dataclass(frozen=True)
class Ended:
    """A block that is over."""

    peer: PeerId
    lasted_s: float
    reason: str


@dataclass
class _Hold:
    peer: PeerId
    began: float
    asked_at: float


class HoldRule:
    """Of one peer.

    Args:
        longest_s: seconds of one block, at most; 0: it waits for nobody.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._now: _Hold | None = None
        self._ended: list[Ended] = []
        self._rests_until = float("-inf")
        self._blocked_at: dict[PeerId, float] = {}  # within a day: some thousand at most, as each is followed by a rest

    def by(self, now: float) -> PeerId | None:
        """Return for whom rounds wait."""
        self._look(now)
        return None if self._now is None else self._now.peer

    def ask(self, peer: PeerId, needs_s: float, now: float) -> str:
        """Take up a newcomer's request; return why rounds do not wait for it, or nothing where they do.

        Args:
            needs_s: as long it would take by its own account.
        """
        self._look(now)
        if self._now is not None and self._now.peer == peer:
            self._now.asked_at = now
            left_s = self._now.began + self._longest_s - now
            if now - self._now.began >= TRIAL_S and needs_s > left_s:
                reason = f"it would take {needs_s:.0f} s more, and this machine waits {left_s:.0f} s more at most"
                self._end(now, reason)
                return reason
            return ""
        reason = self._why_not(peer, needs_s, now)
        if not reason:
            self._now = _Hold(peer, began=now, asked_at=now)
        return reason

    def end(self, peer: PeerId, reason: str, now: float) -> None:
        """Note that nobody need wait for `peer` any more."""
        self._look(now)
        if self._now is not None and self._now.peer == peer:
            self._end(now, reason)

    def take_ended(self, now: float) -> list[Ended]:
        """Return the blocks that ended since this was last called."""
        self._look(now)
        ended, self._ended = self._ended, []
        return ended

    def _why_not(self, peer: PeerId, needs_s: float, now: float) -> str:
        if self._longest_s <= 0:
            return "this machine waits for nobody"
        if self._now is not None:
            return "it waits for another newcomer"
        if now < self._rests_until:
            return f"it has waited for one, and does so again in {self._rests_until - now:.0f} s at the earliest"
        if peer in self._blocked_at:
            return "it has waited for this key within a day"
        if needs_s > SHARE * self._longest_s:  # beside rounds it may have had one part in so many of the members' lines
            return f"it would take {needs_s:.0f} s, and this machine waits {self._longest_s:.0f} s at most"
        return ""

    def _look(self, now: float) -> None:
        self._blocked_at = {peer: at for peer, at in self._blocked_at.items() if now - at < DAY_S}
        if self._now is None:
            return
        silent_at, late_at = self._now.asked_at + SILENT_S, self._now.began + self._longest_s
        if now >= min(silent_at, late_at):
            is_silent = silent_at < late_at
            reason = "it fell silent" if is_silent else f"{self._longest_s:.0f} s are over, and it is not in"
            self._end(min(silent_at, late_at), reason)

    def _end(self, at: float, reason: str) -> None:
        assert self._now is not None
        lasted_s = at - self._now.began
        self._ended.append(Ended(self._now.peer, lasted_s, reason))
        self._blocked_at[self._now.peer] = self._now.began
        self._rests_until = at + max(REST * lasted_s, LEAST_REST_S)
        self._now = None
