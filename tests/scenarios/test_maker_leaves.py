"""The maker of a run leaves for good: its later ticket joins newcomers, and the others agree after any crash."""

import asyncio

import pytest

from scenarios.swarm import Swarm
from scenarios.test_anchor import settings
from scenarios.test_faults import MakeSwarm, one_replica
from tickets import signed_ticket
from weft.events import RoundCommitted, StateJoined
from weft.net.ticket import read
from weft.peer.state.checkpoint import load
from weft.sim.world import SECRET, Member


def named_on(ticket: str, swarm: Swarm) -> list[Member]:
    """Return the machines that a ticket names: all that whoever starts with it knows."""
    peers = {contact.peer for contact in read(ticket).contacts}
    return [member for member in swarm.members.values() if member.id in peers]


@pytest.mark.full
def test_a_run_outlives_its_maker_and_the_end_of_all_its_members(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=14)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc", settings=settings(1.0))
        await swarm.round(a, 2)
        node = a.peer.context.node
        ticket = signed_ticket(a.identity, node.run, node.contacts(), SECRET)
        swarm.known_to = lambda member: [each for each in named_on(ticket, swarm) if each is not member]  # type: ignore[method-assign]
        a.peer.stop("leaves for good")
        await a.life.task

        d = swarm.member("d")
        assert d not in named_on(ticket, swarm)
        swarm.launch(d, settings=settings(1.0))
        await swarm.when(d, StateJoined)
        await swarm.when(b, RoundCommitted, lambda event: d.id in event.contributors)
        await swarm.round(d, b.life.committed[-1].round + 2)

        for member in (b, c, d):
            swarm.kill(member)
        heads = [load(member.folder.checkpoint).head for member in (b, c, d)]
        newest = max(heads, key=lambda head: head.committed_tokens)
        await asyncio.sleep(60)
        for member in (b, c, d):
            swarm.launch(member, settings=settings(1.0))
        one_replica(await swarm.done(b, c, d))
        # Started in the same moment each may go on alone for a while; what they end with follows on the newest round.
        final = b.life.peer.replica.head
        assert final is not None
        first = min(number for branch, number in swarm.chains if branch == final.branch and number > newest.round)
        assert swarm.chains[final.branch, first].committed_tokens > newest.committed_tokens
        assert a.id not in b.life.committed[-1].contributors

    swarm.run(scenario)
