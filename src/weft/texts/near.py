"""How far the members of the next stage are: asked one by one, so that who chooses paths knows.

    heard      a member of the next stage tells of itself: it is asked soon, and again after the others
    told       the nearest of them, for this member's own news

The shortest of the last answers counts: others waited for something.

Failure:
- no answer: it is forgotten until it tells of itself again.
- a peer that does not know the question says so: that takes as long.
"""

import asyncio
from collections import deque
from contextlib import suppress

from weft.clock import Clock
from weft.errors import CallFailed, NetError, PeerError, Refused
from weft.ids import PeerId
from weft.pipeline.link import StageLink
from weft.texts.asking.path import FIRST_BPS
from weft.texts.messages import MAX_LINKS, HowNear, IsNear, Near, SectionServed

NEW_S = 0.1  # between two questions, while there is somebody who was never asked
AGAIN_S = 2.0
ANSWER_S = 5.0
NUM_ANSWERS = 4


class Nearness:
    """Of the members of a stage, as a member of the one before sees them."""

    def __init__(self, link: StageLink, clock: Clock) -> None:
        self._link, self._clock = link, clock
        self._answers: dict[PeerId, deque[float]] = {}  # who was asked longest ago is first
        self._changed = asyncio.Event()
        link.on_parted(self._forget)

    def close(self) -> None:
        self._link.off_parted(self._forget)

    def _forget(self, peer: PeerId) -> None:
        self._answers.pop(peer, None)

    async def heard(self, peer: PeerId, note: SectionServed) -> None:
        if not note.rounds:
            self._forget(peer)
        elif peer not in self._answers and peer != self._link.me:
            self._answers = {peer: deque(maxlen=NUM_ANSWERS), **self._answers}
            self._changed.set()

    def told(self) -> tuple[Near, ...]:
        """Return the nearest. Nobody has measured how many bytes a second pass."""
        found = sorted((min(answers), peer) for peer, answers in self._answers.items() if answers)
        return tuple(Near(peer=peer, rtt_s=rtt_s, bps=FIRST_BPS) for rtt_s, peer in found[:MAX_LINKS])

    async def ask_on(self) -> None:
        """Ask, for ever."""
        while True:
            if not self._answers:
                self._changed.clear()
                await self._changed.wait()
            peer = next(iter(self._answers))
            self._answers[peer] = self._answers.pop(peer)
            await self._ask(peer)
            has_new = any(not answers for answers in self._answers.values())
            await asyncio.sleep(NEW_S if has_new else AGAIN_S)

    async def _ask(self, peer: PeerId) -> None:
        began = self._clock.now()
        try:
            with suppress(CallFailed):
                await self._link.call(peer, HowNear(), IsNear, deadline_s=ANSWER_S)
        except (PeerError, NetError, Refused):
            self._forget(peer)
        if (answers := self._answers.get(peer)) is not None:
            answers.append(self._clock.now() - began)


async def answer_how_near(_peer: PeerId, _call: HowNear) -> IsNear:
    return IsNear()
