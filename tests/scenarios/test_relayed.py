"""Members that reach each other through a third: rounds commit, and they own no part of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scenarios.swarm import Member, Swarm, WatchedNode
from weft.clock import Clock
from weft.events import LinkUp, RoundCommitted
from weft.net.blobs.blobs import inline
from weft.net.blobs.relay import RelayConfig
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.sim.world import Life

MakeRelaying = Callable[..., "Relaying"]


class Relaying(Swarm):
    """A swarm whose members pass on for each other."""

    def make_node(self, life: Life, passport: Passport, clock: Clock) -> Node:
        node = WatchedNode(
            passport,
            [self.network.transport(life.member.id)],
            clock,
            life.emit,
            offload=inline,
            relay=RelayConfig(),
            via=life.member.identity,
        )
        node.life, node.swarm = life, self
        return node


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Relaying:
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 4)
    return Relaying(tmp_path / "swarm", num_rounds=8, num_peers=4)


def owners(member: Member) -> set[str]:
    assert member.peer.rounds is not None
    return {part.owner for part in member.peer.rounds.chain.head.parts}


@pytest.mark.full
def test_who_is_reached_through_others_merges_nothing_and_is_counted(swarm: Relaying) -> None:
    async def scenario() -> None:
        a, b, c, d = (swarm.member(name) for name in "abcd")
        swarm.network.partition(a.id, b.id)  # from the first moment on
        await swarm.start("abcd")
        event = await swarm.when(c, RoundCommitted, lambda event: event.round == 5)
        assert set(event.contributors) == {a.id, b.id, c.id, d.id}
        assert owners(c) == {c.id, d.id}
        (up,) = [event for event in a.life.seen(LinkUp) if event.remote == b.id]
        assert up.transport == "via"
        await swarm.done(a, b, c, d)
        for member in (a, b, c, d):
            assert [event.left_out for event in member.life.committed] == [{}] * 8

    swarm.run(scenario)
