"""Nodes that call at members and take no part in the run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scenarios.swarm import Member, Swarm
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.sim.world import SCHEME, SECRET

VISITOR = Identity.from_seed(bytes([200] * 32))


@asynccontextmanager
async def visit(swarm: Swarm, member: Member, who: Identity = VISITOR) -> AsyncIterator[Node]:
    """Link a node that trains nothing to a member."""
    passport = Passport(
        identity=who, run=swarm.run_config.run, name="visitor", admission=ByTicket(secret=SECRET), instance=bytes(8)
    )
    node = Node(passport, [swarm.network.transport(who.peer)], swarm.clock, lambda event: None, offload=inline)
    node.remember(member.id, [SCHEME + member.id], member.name)
    await node.start()
    try:
        await node.connect(member.id)
        yield node
    finally:
        await node.aclose()
