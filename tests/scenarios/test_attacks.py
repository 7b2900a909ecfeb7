"""One of four members attacks where the others ask who is further: nobody leaves its round, nor takes its state."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from scenarios.swarm import Member
from scenarios.test_faults import MakeSwarm
from weft.events import StateJoined
from weft.ids import BranchId, PeerId, Round
from weft.net.messages import Heartbeat
from weft.peer.messages import ChainAnswer, ChainRequest, Decision, StateOffer, StateRequest
from weft.sync.records.messages import Manifest
from weft.wire import digest

TOKENS = 10**18
Answer = Callable[[PeerId, ChainRequest], Awaitable[ChainAnswer]]


class Attacker:
    """A member whose state is made up, and which answers as `answer` says."""

    def __init__(self, member: Member, answer: Answer, ahead: int = 1) -> None:
        self.peer = member.peer
        self.node = member.peer.context.node
        self.ahead = ahead
        self.tell(lambda beat: msgspec.structs.replace(beat, round=beat.round + ahead, committed_tokens=TOKENS))
        server: Any = member.peer.pin.__self__  # type: ignore[attr-defined]
        self._copy, self._offer = server._copy, server._offer
        server._copy = self._forged
        for kind in ("StateRequest", "ChainRequest"):
            del self.node._handlers._calls[kind]
        self.node.serve(StateRequest, self._give)
        self.node.serve(ChainRequest, answer)

    def tell(self, change: Callable[[Heartbeat], Heartbeat]) -> None:
        """Send other heartbeats than it would."""
        honest = self.peer._report.heartbeat
        self.peer._membership._status = lambda: change(honest())

    def _further(self, head: Manifest) -> Manifest:
        return msgspec.structs.replace(head, round=Round(head.round + min(self.ahead, 1)), committed_tokens=TOKENS)

    def _forged(self) -> object:
        head, charter, vectors = self._copy()
        return self._further(head), charter, {name: vector.fill_(7.0) for name, vector in vectors.items()}

    async def _give(self, peer: PeerId, request: StateRequest) -> StateOffer:
        answer = await self._offer(peer, request)
        is_asked = request.wanted is None and answer.head is not None
        return msgspec.structs.replace(answer, head=self._further(answer.head)) if is_asked else answer


def changing(attacker: list[Attacker]) -> Answer:
    """While it is asked for the chain, it tells of another branch; then of this one again."""

    async def answer(peer: PeerId, _request: ChainRequest) -> ChainAnswer:
        node, honest = attacker[0].node, attacker[0].peer._report.heartbeat()
        elsewhere = BranchId(digest(honest.branch.encode()))
        node.post(peer, msgspec.structs.replace(honest, branch=elsewhere, committed_tokens=TOKENS))
        await asyncio.sleep(0.3)
        return ChainAnswer(certificates=None)

    return answer


def withholding(attacker: list[Attacker]) -> Answer:
    """It keeps decisions that it led to, says that they are forgotten, and shows their certificate when asked again."""
    asked: dict[PeerId, int] = {}

    async def answer(peer: PeerId, request: ChainRequest) -> ChainAnswer:
        asked[peer] = asked.get(peer, 0) + 1
        chain = attacker[0].peer.rounds.chain  # type: ignore[union-attr]
        return ChainAnswer(certificates=None if asked[peer] % 2 else chain.after_in(request.branch, request.after, 1))

    return answer


def delaying(attacker: list[Attacker]) -> Answer:
    """Asked for the head that it tells of, it waits for the next decision, and shows that."""

    async def answer(_peer: PeerId, request: ChainRequest) -> ChainAnswer:
        chain = attacker[0].peer.rounds.chain  # type: ignore[union-attr]
        before = chain.head.round
        if request.after < before + 500:
            return ChainAnswer(certificates=None)
        for _ in range(45):
            if chain.head.round == before:
                await asyncio.sleep(0.1)
        shown = chain.certificate(chain.head)
        return ChainAnswer(certificates=None if shown is None else (shown,))

    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "ahead", "train_s"), [(changing, 1, 4.0), (withholding, 0, 20.0), (delaying, 1000, 4.0)]
)
def test_one_attacker_takes_no_member_out_of_its_round(
    make_swarm: MakeSwarm, make: Callable[[list[Attacker]], Answer], ahead: int, train_s: float
) -> None:
    swarm = make_swarm(num_rounds=300, num_peers=4)
    num_looks = 240

    async def scenario() -> None:
        *honest, other = await swarm.start("abcd", train_s=train_s)
        await swarm.round(honest[0], 3)
        await asyncio.sleep(20.0)
        attacker: list[Attacker] = []
        attacker.append(Attacker(other, make(attacker), ahead))
        if not ahead:
            post = attacker[0].node.post
            attacker[0].node.post = lambda to, record: isinstance(record, Decision) or post(to, record)  # type: ignore[method-assign]
        before = [member.peer.head.round for member in honest]  # type: ignore[union-attr]
        for _ in range(num_looks):
            await asyncio.sleep(0.5)
            assert not any(member.peer._in_rounds.groups.is_outside for member in honest)
        for member, round in zip(honest, before, strict=True):
            assert member.peer.head.round >= round + 0.6 * num_looks * 0.5 / train_s  # type: ignore[union-attr]
            assert member.life.seen(StateJoined) == []
            assert not (member.peer.replica.outer == 7.0).any()
        for member in (*honest, other):
            swarm.kill(member)

    swarm.run(scenario)
