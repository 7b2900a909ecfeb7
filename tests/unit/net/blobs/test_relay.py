"""Peers that reach each other through a third: which way is taken, what the one in the middle sees and gives."""

import asyncio
import itertools

import pytest

from weft.errors import DialError, Unreachable
from weft.events import ConnectionDropped, LinkDown, LinkUp
from weft.net.blobs.bulk import Bulk
from weft.net.blobs.relay import RelayConfig
from weft.net.messages import Reaches, RelayAnswer, Relayed, WhoReaches
from weft.net.transport.frame import write_frame
from weft.net.transport.rate_limit import BURST_S, SLICE_S
from weft.wire import Record, digest, encode

HOUR_S = 3600.0


class Question(Record, frozen=True, kw_only=True):
    text: str


class Answer(Record, frozen=True, kw_only=True):
    text: str


async def answer(peer, question):
    return Answer(text=question.text.upper())


async def ask(node, other, text="hello"):
    return (await node.call(other.peer, Question(text=text), Answer, deadline_s=60)).text


async def beat(node, other):
    """Say something now and then, as members do."""
    while True:
        node.post(other.peer, Question(text="still there"))
        await asyncio.sleep(20)


def test_who_cannot_be_reached_is_called_through_one_that_reaches_both(world):
    async def scenario():
        a, b, c = await world.relaying(3)
        b.serve(Question, answer)
        assert await ask(a, b) == "HELLO"
        assert (a.link_name(b.peer), b.link_name(a.peer)) == ("via", "via")
        assert (a.is_relayed(b.peer), a.is_relayed(c.peer)) == (True, False)
        up = world.seen(0, LinkUp)[-1]
        assert (up.remote, up.transport, up.address) == (b.peer, "via", f"via://{c.peer}")
        assert "did not answer within 5 s" in up.tried[0]
        assert a.known_addresses()[b.peer] == (f"memory://{b.peer}",)  # nobody is told a way that is this peer's own

    world.run(scenario)


def test_blobs_pass_through_it_both_ways(world):
    async def scenario():
        a, b, c = await world.relaying(3)
        blob = bytes(range(256)) * 4000
        for holder, other in ((a, b), (b, a)):
            holder.serve_blobs(lambda _peer, name: blob if name == digest(blob) else None)
            assert await other.fetch_any([holder.peer], digest(blob), len(blob)) == blob
        await b.aclose()
        await asyncio.sleep(5)
        assert c._relay._passing == {}  # what it passed on has ended with its peer
        assert not c._relay._num_asked

    world.run(scenario)


def test_the_relay_sees_no_word_of_it(world):
    async def scenario():
        a, b, c = await world.relaying(3)
        b.serve(Question, answer)
        passed = bytearray()
        copy = c._relay._copy

        async def overheard(source, target, moved):
            class Ear(Bulk):
                async def recv_into(self, buffer):
                    num_bytes = await source.recv_into(buffer)
                    passed.extend(buffer[:num_bytes])
                    return num_bytes

            ear = Ear(source.stream, source.traffic, source.burden, source._open_streams)
            await copy(ear, target, moved)

        c._relay._copy = overheard
        secret = "not for the one in the middle " * 10
        assert await ask(a, b, secret) == secret.upper()
        assert len(passed) > 2 * len(secret)
        assert b"not for the one" not in passed
        assert b"NOT FOR THE ONE" not in passed
        assert b"peer-0" not in passed  # nor the greeting

    world.run(scenario)


def test_a_relay_that_answers_in_the_others_place_is_found_out(world):
    async def scenario():
        a, b, c = await world.relaying(3)

        async def stand_in(bulk, request):
            await write_frame(bulk, encode(RelayAnswer()))
            c._via.take(bulk, Relayed(peer=a.peer, lane=request.lane))

        c._relay.pass_on = stand_in
        with pytest.raises(Unreachable, match=rf"{c.peer[:8]} answers there, not {b.peer[:8]}; nothing was sent"):
            await a.connect(b.peer)
        assert not a.is_linked(b.peer)

    world.run(scenario)


def test_a_direct_way_is_taken_once_there_is_one_and_nothing_flaps(world):
    async def scenario():
        a, b, _ = await world.relaying(3)
        for node, other in ((a, b), (b, a)):
            node.keep(other.peer)
        await asyncio.sleep(30)
        assert a.link_name(b.peer) == "via"
        beating = asyncio.ensure_future(beat(a, b))
        await asyncio.sleep(HOUR_S)
        assert a.link_name(b.peer) == "via"
        ups = len(world.seen(0, LinkUp))
        world.network.heal(a.peer, b.peer)
        await asyncio.sleep(601)
        assert (a.link_name(b.peer), b.link_name(a.peer)) == ("memory", "memory")
        await asyncio.sleep(HOUR_S)
        assert len(world.seen(0, LinkUp)) == ups + 1
        assert [event.reason for event in world.seen(0, LinkDown)] == ["replaced by a newer connection"]
        b.serve(Question, answer)
        assert await ask(a, b) == "HELLO"
        beating.cancel()

    world.run(scenario)


def test_both_may_dial_at_once(world):
    async def scenario():
        nodes = await world.relaying(5)
        for node, other in itertools.permutations(nodes[:-1], 2):
            node.keep(other.peer)
        await asyncio.sleep(60)
        for index, node in enumerate(nodes[:-1]):
            assert len(node.peers) == 4
            assert len(world.seen(index, LinkUp)) == 4
            assert world.seen(index, LinkDown) == []

    world.run(scenario)


def test_another_relay_takes_the_place_of_one_that_dies(world):
    async def scenario():
        a, b, c, d = await world.relaying(4)
        world.network.heal(c.peer, a.peer)
        world.network.heal(c.peer, b.peer)
        await c.connect(a.peer)
        await c.connect(b.peer)
        a.keep(b.peer)
        await asyncio.sleep(10)
        (first,) = [event for event in world.seen(0, LinkUp) if event.transport == "via"]
        relay, other = (c, d) if first.address.endswith(c.peer) else (d, c)
        world.network.kill(relay.peer)
        await asyncio.sleep(30)
        second = world.seen(0, LinkUp)[-1]
        assert (second.transport, second.address) == ("via", f"via://{other.peer}")

    world.run(scenario)


def test_pairs_are_spread_over_those_that_could_relay(world):
    async def scenario():
        nodes = await world.relaying(8)
        relays = nodes[4:7]  # besides the last, which reaches all
        for relay, other in itertools.product(relays, nodes[:4]):
            world.network.heal(relay.peer, other.peer)
            await relay.connect(other.peer)
        for node, other in itertools.combinations(nodes[:4], 2):
            await node.connect(other.peer)
        used = {event.address for index in range(4) for event in world.seen(index, LinkUp) if event.transport == "via"}
        assert len(used) > 1

    world.run(scenario)


def test_who_does_not_relay_is_not_asked_to(world):
    async def scenario():
        a, b, c = await world.relaying(3, RelayConfig(is_on=False))
        with pytest.raises(Unreachable, match=r"was not reached: memory to"):
            await a.connect(b.peer)
        assert await a.call(c.peer, WhoReaches(peer=b.peer), Reaches, deadline_s=5) == Reaches(is_reached=False)
        with pytest.raises(DialError, match="it passes nothing on"):
            await a._via.dial(b.peer, f"via://{c.peer}", "control")

    world.run(scenario)


def test_a_relayed_link_is_no_way_for_a_third(world):
    async def scenario():
        a, b, c, d = await world.relaying(4)
        world.network.partition(c.peer, d.peer)
        d.drop(c.peer, "out of reach")
        world.network.heal(c.peer, b.peer)
        await c.connect(b.peer)
        await a.connect(b.peer)  # through d
        assert a.is_relayed(b.peer)
        with pytest.raises(Unreachable, match="was not reached: memory to"):
            await a.connect(c.peer)  # d does not reach it, and b reaches a through d only

    world.run(scenario)


def test_it_passes_on_no_more_streams_than_its_owner_allows(world):
    async def scenario():
        a, b, _, _, e = await world.relaying(5, RelayConfig(max_streams=2, max_streams_per_peer=1))
        via = f"via://{e.peer}"
        await a.connect(b.peer)
        with pytest.raises(DialError, match="passes on 1 streams for you, as many as its owner allows for one peer"):
            await a._via.dial(world.ids[2], via, "control")
        await b._via.dial(world.ids[2], via, "control")
        with pytest.raises(DialError, match="passes on 2 streams, as many as its owner allows"):
            await world.nodes[3]._via.dial(world.ids[2], via, "control")
        with pytest.raises(DialError, match="it has no direct link to"):
            await a._via.dial(e.peer, via, "control")

    world.run(scenario)


def test_it_passes_on_no_more_bytes_than_its_owner_allows(world):
    async def scenario():
        a, b, _ = await world.relaying(3, RelayConfig(max_bps=1e6))
        blob = bytes(500_000)
        b.serve_blobs(lambda _peer, _digest: blob)
        await a.connect(b.peer)
        began = world.clock.now()
        await a.fetch_any([b.peer], digest(blob), len(blob))
        took_s = world.clock.now() - began
        assert 8 * len(blob) / 1e6 - BURST_S - SLICE_S <= took_s <= 8 * len(blob) / 1e6 + 1

    world.run(scenario)


def test_silence_and_a_lost_link_end_what_is_passed_on(world):
    async def scenario():
        a, b, c = await world.relaying(3, RelayConfig(idle_s=5))
        await a.connect(b.peer)  # no heartbeats pass
        await asyncio.sleep(4)
        assert a.is_linked(b.peer)
        await asyncio.sleep(2)
        assert not a.is_linked(b.peer)
        await a.connect(b.peer)
        c.drop(b.peer, "dropped by the test")
        await asyncio.sleep(1)
        assert not a.is_linked(b.peer)
        assert c._relay._passing == {}

    world.run(scenario)


def test_a_relayed_stream_proves_its_key_or_is_dropped(world):
    async def scenario():
        a, b, c = await world.relaying(3)
        bulk = await c._blobs.streams.open(b.peer)
        await write_frame(bulk, encode(Relayed(peer=a.peer, lane="control")))  # and no TLS follows
        await asyncio.sleep(11)
        (dropped,) = world.seen(1, ConnectionDropped)
        assert dropped.address == f"via://{c.peer}"
        assert "did not prove its key within 10 s" in dropped.reason
        assert a.peer not in b.peers

    world.run(scenario)


def test_who_is_cut_off_for_hours_is_met_again_within_minutes_of_its_networks_return(world):
    async def scenario():
        a, b = await world.started(2)
        a.keep(b.peer)
        await asyncio.sleep(1)
        world.network.partition(a.peer, b.peer)
        a.drop(b.peer, "silent")
        await asyncio.sleep(12 * HOUR_S)
        assert not a.is_linked(b.peer)
        world.network.heal(a.peer, b.peer)
        await asyncio.sleep(301)
        assert a.is_linked(b.peer)

    world.run(scenario)


def test_who_has_not_been_met_for_a_week_is_dialled_no_more(world):
    async def scenario():
        a, b = await world.started(2)
        a.keep(b.peer)
        await asyncio.sleep(1)
        world.network.kill(b.peer)
        await asyncio.sleep(7 * 24 * HOUR_S - 60)
        assert b.peer in a._dialer._kept
        await asyncio.sleep(700)
        assert b.peer not in a._dialer._kept
        assert a._dialer._keepers == {}

    world.run(scenario)
