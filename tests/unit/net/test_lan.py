"""Beacons of a local network: who reads them, what they tell who has no ticket, and that two nodes meet by them."""

import pytest

from weft.clock import SystemClock
from weft.errors import NetError
from weft.events import Event, Notice
from weft.ids import RunId
from weft.keys import Identity
from weft.net import lan
from weft.net.admission import Anyone, ByTicket
from weft.net.lan import Lan, beacon_key, open_beacon, seal_beacon
from weft.net.link.handshake import Passport
from weft.net.messages import Contact
from weft.net.node import Node
from weft.net.transport.tls import TlsConfig, TlsTransport

RUN = RunId("5e" * 32)
SECRET = bytes(range(16))
MEMBER = Contact(peer=Identity.from_seed(b"m" * 32).peer, name="", addresses=("tls://192.168.1.5:4433",))
KEY, NONCE = beacon_key(RUN, SECRET), bytes(12)
PACKET = seal_beacon(KEY, NONCE, MEMBER, asks=True)


def test_who_holds_the_ticket_reads_who_listens_where():
    assert open_beacon(KEY, PACKET) == (MEMBER, True)
    assert open_beacon(KEY, seal_beacon(KEY, NONCE, MEMBER, asks=False)) == (MEMBER, False)


@pytest.mark.parametrize(
    "key", [beacon_key(RUN, None), beacon_key(RUN, bytes(16)), beacon_key(RunId("ab" * 32), SECRET)]
)
def test_who_holds_another_ticket_reads_nothing(key):
    assert open_beacon(key, PACKET) is None


def test_a_beacon_shows_neither_run_nor_secret_nor_key_nor_address():
    hidden = (bytes.fromhex(RUN), SECRET, bytes.fromhex(MEMBER.peer), bytes([192, 168, 1, 5]), KEY)
    assert all(each not in PACKET for each in hidden)
    assert len(PACKET) <= lan.MAX_NBYTES


@pytest.mark.parametrize("packet", [b"", b"weftlan1", PACKET[:-1], PACKET[:30], b"x" * 5000, PACKET[:-1] + b"x"])
def test_what_anybody_sends_is_passed_over(packet):
    assert open_beacon(KEY, packet) is None


class Machine:
    """A node over TLS on loopback, and its beacon."""

    def __init__(self, seed: bytes, secret: bytes | None = SECRET) -> None:
        identity = Identity.from_seed(seed * 32)
        admission = Anyone() if secret is None else ByTicket(secret=secret)
        passport = Passport(identity=identity, run=RUN, name="", admission=admission)
        self.told: list[Event] = []
        self.node = Node(
            passport, [TlsTransport(identity, TlsConfig(host="127.0.0.1"))], SystemClock(), self.told.append
        )
        self.lan = Lan(self.node, SystemClock(), self.told.append)

    async def __aenter__(self) -> "Machine":
        await self.node.start()
        await self.lan.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.lan.aclose()
        await self.node.aclose()


async def test_two_that_ask_find_each_other_and_one_with_another_ticket_finds_nobody():
    async with Machine(b"a") as a, Machine(b"b") as b, Machine(b"c", bytes(16)) as c:
        assert await b.lan.listen() == (a.node.peer,)
        assert await a.lan.listen() == (b.node.peer,)
        assert await b.node.connect_any(b.lan.found) == a.node.peer
        assert await c.lan.listen() == ()
        assert [each.text for each in b.told if isinstance(each, Notice)] == [
            f"{a.node.peer[:8]} is a member in this local network"
        ]


async def test_what_cannot_be_opened_is_refused_and_nothing_stays_open(monkeypatch):
    def taken(hosts: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(lan, "_listener", taken)
    machine = Machine(b"a")
    await machine.node.start()
    with pytest.raises(NetError, match=r"--lan: .*Address already in use.*UDP port 8770"):
        await machine.lan.start()
    assert machine.lan._senders == []
    await machine.node.aclose()
