"""Keys are free to make: what is remembered of each has a bound or an end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.errors import Refused, Unreachable
from weft.ids import BranchId, PeerId, Round
from weft.net.link import address_book as book
from weft.net.link import handshake, links
from weft.net.link import rpc as meter
from weft.net.link.links import BARRED_S, MAX_VIOLATIONS, Links
from weft.net.link.rpc import Handlers, Traffic
from weft.net.membership.membership import MAX_IDLE, Membership
from weft.net.membership.swim import NUM_FAR, NUM_RING
from weft.net.messages import Contact, Heartbeat
from weft.net.transport.limits import MAX_LINKS
from weft.sync.records.messages import MAX_GROUP, MAX_MEMBERS
from weft.wire import digest

KEYS = [PeerId(f"{number:064x}") for number in range(8)]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_lost_links_are_remembered_of_those_that_lost_them_last(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_FORMER", 3)
    table = Links(Handlers(), Traffic(clock), lambda event: None)
    for number, peer in enumerate([*KEYS[:3], KEYS[0], KEYS[3]]):
        table.give_up(peer, bytes([number]))
    assert [table.ended(peer) for peer in KEYS[:4]] == [(b"\0", b"\3"), (), (b"\2",), (b"\4",)]


def test_who_broke_the_protocol_long_ago_is_forgotten(clock: VirtualClock) -> None:
    table = Links(Handlers(), Traffic(clock), lambda event: None)

    def violate(peer: PeerId) -> None:
        table._note_violation(SimpleNamespace(peer=peer, shown_address=""), "nonsense")  # type: ignore[arg-type]

    for peer in KEYS[:3]:
        for _ in range(MAX_VIOLATIONS):
            violate(peer)
    assert table.is_barred(KEYS[0])
    clock.advance(BARRED_S)
    violate(KEYS[3])
    assert list(table._violated_at) == [KEYS[3]]


def test_the_longest_silent_gives_way_and_its_bytes_are_counted_on(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "MAX_COUNTED", 3)
    meters = Traffic(clock)
    for number in (1, 0, 2):
        clock.advance(1.0)
        meters[KEYS[number]].sent(10)
        meters[KEYS[number]].received(number)
    meters[KEYS[1]].received(100)
    clock.advance(1.0)
    met = meters[KEYS[3]]
    assert meters[KEYS[3]] is met
    assert set(meters.all()) == {KEYS[1], KEYS[2], KEYS[3]}
    assert meters.moved == (30, 103)
    assert meters[KEYS[4]] is not None
    assert met is meters[KEYS[3]], "it is just being met"


def test_nothing_is_kept_of_who_was_fetched_from_but_its_streams(world: Any) -> None:
    blob = bytes(1000)

    async def scenario() -> None:
        a, b = await world.started(2)
        b.serve_blobs(lambda _peer, name: blob if name == digest(blob) else None)
        await a.connect(b.peer)
        into = bytearray(1000)
        await asyncio.gather(*(a.fetch(b.peer, digest(blob), into) for _ in range(6)))
        streams = a._blobs.streams
        assert len(streams._slots) == len(streams._opening) == 0

    world.run(scenario)


def test_an_elector_of_the_largest_run_has_room_for_everybody_it_needs() -> None:
    num_needed = MAX_GROUP - 1 + MAX_MEMBERS - 1 + 2 * (2 * NUM_RING + NUM_FAR) + MAX_IDLE
    assert num_needed + 32 <= MAX_LINKS  # and for newcomers, and more that keep far links to it than in the mean


def test_who_finds_no_room_for_a_link_is_told_to_ask_another(world: Any) -> None:
    async def scenario() -> None:
        a, *others = await world.started(4)
        a._links.most = 2
        for other in others[:2]:
            await other.connect(a.peer)
        with pytest.raises(Unreachable, match="ask another member"):
            await others[2].connect(a.peer)

    world.run(scenario)


def test_a_book_whose_peers_are_all_linked_takes_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MAX_CONTACTS", 2)
    addresses = book.AddressBook(KEYS[0], ["memory"], lambda peer: True)
    for peer in KEYS[1:4]:
        addresses.announce(Contact(peer=peer, name="", addresses=(f"memory://{peer}",)))
    assert addresses.peers() == (KEYS[2], KEYS[3])


def test_no_more_say_that_a_key_is_banned_than_settle_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_BANNED_BY", 2)

    async def scenario() -> None:
        a, *others = await world.started(4)
        for other in others:
            other.ban([a.peer])
            with pytest.raises(Refused):
                await a.connect(other.peer)
        assert len(a.banned_by) == 2

    world.run(scenario)


def test_where_few_are_linked_nothing_is_kept_of_who_is_on_no_roll(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = Heartbeat(
        name="x",
        branch=BranchId("ab" * 32),
        round=Round(0),
        manifest=None,
        state="training",
        loss=None,
        tokens_per_s=0.0,
    )

    async def scenario() -> None:
        a, b = await world.started(2)
        member = Membership(a, world.clock, world.events[a.peer].append, lambda: beat)
        monkeypatch.setattr(Membership, "watches_all", property(lambda _self: False))
        await a.connect(b.peer)
        await b.connect(a.peer)
        b.post(a.peer, beat)
        await asyncio.sleep(1.0)
        assert member.heartbeat_of(b.peer) == beat
        a.drop(b.peer, "it goes")
        assert member.heartbeat_of(b.peer) is None
        assert member._beating == {}

    world.run(scenario)
