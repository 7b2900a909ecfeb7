"""Branches where members audit each other: what one had counted is brought nowhere, and few lead nobody to one."""

import asyncio
from typing import Any

import msgspec
import pytest

from scenarios.swarm import Member
from scenarios.test_attacks import TOKENS, Attacker
from scenarios.test_faults import MakeSwarm
from weft.events import ActEnacted, BranchLeft, BranchOpened, LegacyCounted, StateJoined
from weft.ids import Attempt, BranchId, PeerId, Round
from weft.net.messages import Heartbeat
from weft.peer.messages import ChainAnswer, ChainRequest
from weft.run.trust import AuditedTrust
from weft.sync.records.messages import Accept, Certificate, Manifest, RoundNote
from weft.wire import Signed, digest, digest_of, seal

SOMETIMES = AuditedTrust(audit_rate=0.1)
AHEAD = 1000


@pytest.mark.full
def test_what_a_branch_had_counted_is_lost_and_said_and_nobody_is_struck_out(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=16, num_peers=5, trust=SOMETIMES, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abcde", train_s=8.0)
        stay, go = members[:3], members[3:]
        await swarm.round(members[0], 2)
        swarm.cut(stay, go)
        opened = await swarm.when(go[0], BranchOpened)
        for member in go:
            await swarm.round(member, opened.round + 1)
        swarm.heal(stay, go)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        for member in go:
            (left,) = member.life.seen(BranchLeft)
            assert (left.kept, left.reason) == (0, "nobody can audit what a branch had counted")
            assert left.tokens > 0

    swarm.run(scenario)
    assert not [event for life in swarm.lives for kind in (LegacyCounted, ActEnacted) for event in life.seen(kind)]
    assert all(each.legacy is None for manifest in swarm.chains.values() for each in manifest.contributions)


class Pair:
    """Two members that have signed a branch of their own, which counts more than all others."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.attackers = [Attacker(member, self.answer, AHEAD) for member in members]
        for each in self.attackers:
            each.tell(self.beat)
            each._further = self.head  # type: ignore[method-assign]

    def head(self, head: Manifest) -> Manifest:
        """Return the branch's head, made of an honest one."""
        return msgspec.structs.replace(
            head,
            branch=BranchId(digest(head.run.encode())),
            round=Round(AHEAD),
            committed_tokens=TOKENS,
            members=tuple(sorted(each.id for each in self.members)),
            uplinks=head.uplinks[:2],
        )

    def beat(self, honest: Heartbeat) -> Heartbeat:
        branch = BranchId(digest(self.attackers[0].peer.head.run.encode()))  # type: ignore[union-attr]
        return msgspec.structs.replace(honest, branch=branch, round=Round(AHEAD), committed_tokens=TOKENS)

    async def answer(self, _peer: PeerId, _request: ChainRequest) -> ChainAnswer:
        manifest = self.head(self.attackers[0].peer.head)  # type: ignore[arg-type]
        accept = Accept(attempt=Attempt(0), manifest=digest_of(manifest))
        note = RoundNote(branch=manifest.branch, round=manifest.round, message=accept)
        votes: tuple[Signed, ...] = tuple(seal(each.peer.context.identity, note) for each in self.members)
        return ChainAnswer(
            certificates=(Certificate(attempt=Attempt(0), manifest=manifest, votes=votes, farewells=()),)
        )


@pytest.mark.full
def test_two_of_five_show_a_branch_that_counts_most_and_nobody_goes_over(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=300, num_peers=5, trust=SOMETIMES, learns=True)

    async def scenario() -> None:
        *honest, one, other = await swarm.start("abcde", train_s=1.0)
        await swarm.round(honest[0], 3)
        await asyncio.sleep(20.0)
        Pair([one, other])
        before: Any = [member.peer.head.round for member in honest]
        await asyncio.sleep(30.0)
        for member, round in zip(honest, before, strict=True):
            assert member.peer.head.round > round + 2  # type: ignore[union-attr]
            assert member.life.seen(StateJoined) == []
            assert not (member.peer.replica.outer == 7.0).any()
        for member in (*honest, one, other):
            swarm.kill(member)

    swarm.run(scenario)
