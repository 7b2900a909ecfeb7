"""Lets this peer's rounds wait for a newcomer whose line is slower than the run, where `HoldRule` says so.

    newcomer --BlockPlease--> members, every 2 s     I am not in: announce nothing
    member   trains its lease, and then waits before it announces

Nothing of consensus waits: a round of which no quorum has announced is one in which everybody still trains. So a block
is in force as long as a majority keeps it. Who waits and hears that a quorum has announced all the same goes on, too,
and who never heard of the newcomer, or does not want to wait, is slowed down by the others only.

Failure:
- the newcomer is gone, or falls silent: rounds go on, at the latest after `SILENT_S`.
- it is never in: rounds go on after the longest time that this machine waits.

For whom this peer's rounds wait: a newcomer may ask them to, and they do for one at a time and not for long.

    nobody ──asks──► waiting for one ──in, gone, silent, too slow, or too long──► nobody, for a while

Whoever is admitted may ask, also under a key made for it, so all bounds but one are on what this peer gives and not on
who asks: `longest_s` of one block, and after it nine times as long without any. So at most a tenth of its time is spent
waiting, whoever comes. The one is for fairness: a key is waited for once a day.

Pure: it is told the time.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from weft.events import RunBlocked, RunUnblocked
from weft.ids import PeerId
from weft.net.blobs.bulk import SHARE
from weft.peer.context import Context
from weft.peer.messages import BlockAnswer, BlockPlease
from weft.peer.round.driver import Participation

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


@dataclass(frozen=True)
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
            self._now = replace(self._now, asked_at=now)
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


LOOK_S = 0.5  # between two looks whether there is still something to wait for


class Hold:
    """Of one member."""

    def __init__(self, context: Context, participation: Participation) -> None:
        self._clock = context.clock
        self._emit = context.emit
        self._participation = participation
        self._longest_s = context.settings.max_blocked_s
        self._blocks = HoldRule(self._longest_s)
        self._news = asyncio.Event()
        context.node.serve(BlockPlease, self._consider)

    async def passed(self, is_moot: Callable[[], bool]) -> None:
        """Return once no newcomer is waited for, or as soon as `is_moot` says that waiting is of no use."""
        while self._blocks.by(self._clock.now()) is not None and not is_moot():
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
        self._tell()

    def forget(self, peer: PeerId) -> None:
        """Wait no more for a peer that is gone."""
        self._end(peer, "it is gone")

    async def _consider(self, peer: PeerId, please: BlockPlease) -> BlockAnswer:
        if not please.needs_s:
            self._end(peer, "it is in")
            return BlockAnswer(is_given=False)
        if not self._participation.is_member:  # its waiting means nothing
            return BlockAnswer(is_given=False, reason="it takes no part in rounds itself")
        now = self._clock.now()
        before, reason = self._blocks.by(now), self._blocks.ask(peer, please.needs_s, now)
        self._tell()
        if not reason and before != peer:
            self._emit(RunBlocked(by=peer, needs_s=please.needs_s, longest_s=self._longest_s))
        return BlockAnswer(is_given=not reason, reason=reason)

    def _end(self, peer: PeerId, reason: str) -> None:
        self._blocks.end(peer, reason, self._clock.now())
        self._tell()

    def _tell(self) -> None:
        for ended in self._blocks.take_ended(self._clock.now()):
            self._emit(RunUnblocked(by=ended.peer, blocked_s=ended.lasted_s, reason=ended.reason))
            self._news.set()
