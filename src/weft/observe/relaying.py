"""Answers who watches: with this peer's own bulletins, and with those of others that it is linked to.

    observer ──BulletinRequest(of = C)──► this peer ──BulletinRequest──► C
             ◄────── signed by C ────────            ◄──── signed by C ──

So a few links show a whole run. What is handed on is signed by its author, so nobody believes this peer for it. C is
asked only because somebody asks, a few at a time, and one answer serves all who ask the same within two seconds:
watchers that have heard as much of C as each other.

It does not know what bulletins say.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from weft.clock import Clock
from weft.errors import NetError, PeerError, Refused, WireError
from weft.ids import PeerId
from weft.keys import verify
from weft.net.node import Node
from weft.observe.telemetry import WINDOW_S, Bulletin, BulletinAnswer, BulletinRequest, Bulletins
from weft.wire import unseal

MAX_ASKED = 8  # others at a time
MAX_ANSWERS = 64  # kept; of 256 KiB at most each
ASK_S = 5.0

NOTHING = BulletinAnswer(bulletins=(), has_more=False)


@dataclass
class _Asked:
    began: float
    answer: "asyncio.Task[BulletinAnswer]"


class Relaying:
    def __init__(self, own: Bulletins, node: Node, clock: Clock) -> None:
        self._own = own
        self._node = node
        self._clock = clock
        self._asked: dict[BulletinRequest, _Asked] = {}  # in the order in which it was

    async def answer(self, _peer: PeerId, request: BulletinRequest) -> BulletinAnswer:
        if request.of in (None, self._node.peer):
            return self._own.told(request)
        now = self._clock.now()
        for key, asked in list(self._asked.items()):
            if asked.answer.done() and (now - asked.began >= WINDOW_S or len(self._asked) >= MAX_ANSWERS):
                del self._asked[key]
        if request not in self._asked:
            num_under_way = sum(not asked.answer.done() for asked in self._asked.values())
            if not self._node.is_linked(request.of) or num_under_way >= MAX_ASKED:
                return NOTHING  # it is asked again
            self._asked[request] = _Asked(now, asyncio.ensure_future(self._ask(request.of, request)))
        return await asyncio.shield(self._asked[request].answer)

    async def _ask(self, peer: PeerId, request: BulletinRequest) -> BulletinAnswer:
        theirs = msgspec.structs.replace(request, of=None)
        try:
            answer = await self._node.call(peer, theirs, BulletinAnswer, deadline_s=ASK_S)
            for signed in answer.bulletins:  # whoever hands on what nobody signed is heard no more
                if signed.signer != peer or unseal(signed, Bulletin, verify).run != request.run:
                    return NOTHING
            return answer
        except (PeerError, NetError, Refused, WireError):
            return NOTHING


def serve(own: Bulletins, node: Node, clock: Clock) -> None:
    """Answer whoever asks `node` what happened, here or at others."""
    node.serve(BulletinRequest, Relaying(own, node, clock).answer)
