"""Short tickets over real sockets: whoever of those named is left lets a newcomer in, and nobody else does."""

import pytest

from weft.clock import SystemClock
from weft.errors import Unreachable
from weft.ids import PeerId, RunId, is_start, short
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.ticket import Ticket, best_first, issue, read
from weft.net.transport.tls import TlsConfig, TlsTransport

RUN = RunId("5e" * 32)
SECRET = bytes(range(16))


def member(identity: Identity, port: int = 0) -> Node:
    passport = Passport(identity=identity, run=RUN, name="", admission=ByTicket(secret=SECRET))
    tls = TlsTransport(identity, TlsConfig(host="127.0.0.1", port=port))
    return Node(passport, [tls], SystemClock(), lambda _event: None)


async def enter(newcomer: Node, ticket: Ticket) -> PeerId:
    for contact in ticket.contacts:
        newcomer.remember(contact.peer, contact.addresses)
    return await newcomer.connect_any([contact.peer for contact in ticket.contacts])


async def test_a_ticket_of_three_lets_in_when_its_maker_is_gone():
    founder, second, third, newcomer = (member(Identity.generate()) for _ in range(4))
    async with founder, second, third, newcomer:
        for each in (second, third):
            each.remember(founder.peer, founder.addresses)
            await each.connect(founder.peer)
        text = issue(RUN, best_first(founder.contacts(), founder.peer, lambda _peer: 1), SECRET)
        assert len(text) <= 200
        named = read(text).contacts
        assert len(named) == 3
        assert all(is_start(each.peer) for each in named)
        await founder.aclose()
        assert await enter(newcomer, read(text)) in (second.peer, third.peer)


async def test_who_has_taken_an_address_over_is_no_member_whatever_it_knows():
    founder, thief = Identity.generate(), Identity.generate()
    async with member(founder) as node:
        others = [contact for contact in node.contacts() for _ in range(2)]  # so that keys are cut
        text, port = issue(RUN, others, SECRET), int(node.addresses[0].rpartition(":")[2])
    async with member(thief, port) as there, member(Identity.generate()) as newcomer:
        with pytest.raises(Unreachable) as caught:
            await enter(newcomer, read(text))
        assert f"{short(thief.peer)} answers there, not {short(founder.peer)}; nothing was sent" in str(caught.value)
        assert "something answers there that is not the member" in str(caught.value).lower()
        assert there.peers == ()
