"""Two peers that dial each other in the same moment, over real sockets: one link survives, and it stays."""

import asyncio

import pytest

from weft.clock import SystemClock
from weft.events import Event, LinkDown, LinkUp
from weft.ids import RunId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.wire import Record


class Question(Record, frozen=True, kw_only=True):
    number: int


class Done(Record, frozen=True, kw_only=True):
    pass


async def answer(_peer: object, _question: Question) -> Done:
    return Done()


def node(events: list[Event]) -> Node:
    identity = Identity.generate()
    passport = Passport(identity=identity, run=RunId("ab" * 32), name="", admission=Anyone())
    made = Node(passport, [TlsTransport(identity, TlsConfig(host="127.0.0.1"))], SystemClock(), events.append)
    made.serve(Question, answer)
    return made


@pytest.mark.parametrize("_attempt", range(5))
async def test_one_link_survives_and_no_call_is_lost(_attempt: int) -> None:
    seen: tuple[list[Event], list[Event]] = ([], [])
    a, b = (node(events) for events in seen)
    async with asyncio.timeout(30), a, b:
        a.remember(b.peer, b.addresses)
        b.remember(a.peer, a.addresses)
        a.keep(b.peer)
        b.keep(a.peer)
        calls = [
            one.call(other.peer, Question(number=number), Done, deadline_s=20)
            for number in range(20)
            for one, other in ((a, b), (b, a))
        ]
        assert await asyncio.gather(*calls) == [Done()] * 40
        await asyncio.gather(
            *(one.call(other.peer, Question(number=99), Done, deadline_s=20) for one, other in ((a, b), (b, a)))
        )
        for events in seen:
            assert [type(event) for event in events if isinstance(event, LinkUp | LinkDown)] == [LinkUp]
