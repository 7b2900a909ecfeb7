"""Lets this peer's rounds wait for a newcomer whose line is slower than the run, where `blocks` says so.

    newcomer --BlockPlease--> members, every 2 s     I am not in: announce nothing
    member   trains its lease, and then waits before it announces

Nothing of consensus waits: a round of which no quorum has announced is one in which everybody still trains. So a block
is in force as long as a majority keeps it. Who waits and hears that a quorum has announced all the same goes on, too,
and who never heard of the newcomer, or does not want to wait, is slowed down by the others only.

Failure:
- the newcomer is gone, or falls silent: rounds go on, at the latest after `blocks.SILENT_S`.
- it is never in: rounds go on after the longest time that this machine waits.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from weft.events import RunBlocked, RunUnblocked
from weft.ids import PeerId
from weft.peer.context import Place
from weft.peer.join.hold_rule import HoldRule
from weft.peer.messages import BlockAnswer, BlockPlease

LOOK_S = 0.5  # between two looks whether there is still something to wait for


class Hold:
    """Of one member.

    Args:
        is_member: returns whether this peer takes part in rounds, so that its waiting means something.
    """

    def __init__(self, place: Place, is_member: Callable[[], bool]) -> None:
        self._clock = place.clock
        self._emit = place.emit
        self._is_member = is_member
        self._longest_s = place.settings.max_blocked_s
        self._blocks = HoldRule(self._longest_s)
        self._news = asyncio.Event()
        place.node.serve(BlockPlease, self._consider)

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
        if not self._is_member():
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
