import asyncio

import pytest

from lines import set_link
from weft.errors import CallFailed, DeadlineExceeded, NetError, PayloadError, PeerError, WireError
from weft.events import ConnectionDropped
from weft.ids import Digest
from weft.net.blobs import striped
from weft.net.blobs.blobs import COMING_S, SLICE_NBYTES, StillComing
from weft.net.blobs.bulk import MAX_DIALLED_BACK, QUIET_S, SLOWEST_STREAM_BPS
from weft.net.link.links import MAX_VIOLATIONS
from weft.net.messages import BlobHeader, BlobRequest, BulkDialled, BulkOffer, BulkPlease, RangeRequest
from weft.net.transport.frame import FRAME_S, FrameReader, encode_frame, write_frame
from weft.net.transport.limits import Streams
from weft.net.transport.memory import MemoryStream
from weft.rng import integers64, stream
from weft.wire import decode, digest, encode

MIB = 1 << 20


def some_bytes(num, seed=0):
    return integers64(stream(seed, "blob"), -(-num // 8)).tobytes()[:num]


def shelf(*blobs):
    held = {digest(blob): blob for blob in blobs}
    return lambda peer, name: held.get(name)


@pytest.mark.parametrize("num", [0, 1, 65_536, 65_537, MIB - 1, MIB, MIB + 1, 5 * MIB + 12_345])
def test_blob_arrives_in_the_callers_buffer(world, num):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(num)
        b.serve_blobs(shelf(b"other"))
        b.serve_blobs(shelf(blob))
        into = bytearray(num + 10)
        await a.fetch(b.peer, digest(blob), memoryview(into)[5 : 5 + num])
        assert into == bytes(5) + blob + bytes(5)
        assert await a.fetch_small(b.peer, digest(blob), num) == blob
        assert await a.fetch_any([b.peer], digest(blob), num) == blob
        assert a.traffic[b.peer].received_nbytes >= 3 * num
        assert b.traffic[a.peer].sent_nbytes >= 3 * num
        assert world.seen(0, ConnectionDropped) == world.seen(1, ConnectionDropped) == []

    world.run(scenario)


def test_blob_of_unknown_length_comes_into_the_memory_that_is_given_for_it(world):
    async def scenario():
        a, b = await world.started(2)
        blob, asked = some_bytes(5 * MIB + 3), list[int]()
        b.serve_blobs(shelf(blob))

        def room(nbytes):
            asked.append(nbytes)
            return memoryview(bytearray(nbytes))

        for most in (len(blob), len(blob) + 1, 10 * MIB):
            assert await a.fetch_within(b.peer, digest(blob), most, room) == blob
        assert asked == [len(blob)] * 3
        with pytest.raises(PayloadError, match=f"above {len(blob) - 1}"):
            await a.fetch_within(b.peer, digest(blob), len(blob) - 1, room)
        assert asked == [len(blob)] * 3  # nothing was allocated for it
        with pytest.raises(CallFailed, match="holds no blob"):
            await a.fetch_within(b.peer, digest(b"nothing"), 10, room)

    world.run(scenario)


def test_any_buffer_of_the_right_size_will_do(world):
    async def scenario():
        a, b = await world.started(2)
        numbers = integers64(stream(1, "numbers"), 1000)
        b.serve_blobs(lambda peer, name: memoryview(numbers))
        into = numbers * 0
        await a.fetch(b.peer, digest(numbers.tobytes()), memoryview(into))
        assert (into == numbers).all()

    world.run(scenario)


def test_absent_blob_is_a_failed_call_and_the_stream_stays(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(100)
        b.serve_blobs(shelf(blob))
        for _ in range(3):
            with pytest.raises(CallFailed, match="holds no blob"):
                await a.fetch(b.peer, digest(b"nothing"), bytearray(10))
        assert await a.fetch_small(b.peer, digest(blob), 100) == blob
        assert len(b._blobs._num_accepted) == 1
        assert b._blobs._num_accepted[a.peer] == 1  # one stream carried all four

    world.run(scenario)


@pytest.mark.parametrize("num", [1000, 5 * MIB])
def test_who_asks_for_what_its_holder_is_fetching_waits_for_it(world, num):
    async def scenario():
        a, b = await world.started(2)
        blob, held = some_bytes(num), {}
        b.serve_blobs(lambda peer, name: held.get(name))

        async def come_after(wait_s):
            with b.expect(digest(blob)), b.expect(digest(blob)):
                await asyncio.sleep(wait_s)
                held[digest(blob)] = blob

        coming = asyncio.ensure_future(come_after(2.0))
        await asyncio.sleep(0)
        into = bytearray(num)
        await a.fetch(b.peer, digest(blob), into)
        assert into == blob
        held.clear()
        await coming
        coming = asyncio.ensure_future(come_after(3 * COMING_S))
        await asyncio.sleep(0)
        with pytest.raises(StillComing):
            await a.fetch(b.peer, digest(blob), into)
        coming.cancel()
        await asyncio.sleep(0)
        with pytest.raises(CallFailed, match="holds no blob"):
            await a.fetch(b.peer, digest(blob), into)
        assert world.seen(0, ConnectionDropped) == []

    world.run(scenario)


def test_only_who_may_have_it_gets_it(world):
    async def scenario():
        a, b, c = await world.started(3)
        blob = some_bytes(100)
        c.serve_blobs(lambda peer, name: blob if peer == a.peer else None)
        assert await a.fetch_small(c.peer, digest(blob), 100) == blob
        with pytest.raises(CallFailed):
            await b.fetch_small(c.peer, digest(blob), 100)

    world.run(scenario)


def test_many_fetches_share_few_streams(world):
    async def scenario():
        a, b = await world.started(2)
        blobs = [some_bytes(200_000, seed) for seed in range(50)]
        b.serve_blobs(shelf(*blobs))
        got = await asyncio.gather(*(a.fetch_any([b.peer], digest(blob), len(blob)) for blob in blobs))
        assert got == blobs
        assert b._blobs._num_accepted[a.peer] == 4
        await asyncio.sleep(1)
        assert len(a._blobs.streams._idle[b.peer]) == 4

    world.run(scenario)


def test_who_cannot_be_dialled_is_asked_to_dial(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(3 * MIB)
        b.serve_blobs(shelf(blob))
        a._book._entries.clear()  # b is behind a router
        await b.connect(a.peer)
        a._book._entries[b.peer].announced = a._book._entries[b.peer].kept = ()
        assert await a.fetch_any([b.peer], digest(blob), len(blob)) == blob
        assert await a.fetch_any([b.peer], digest(blob), len(blob)) == blob
        assert world.seen(0, ConnectionDropped) == []

    world.run(scenario)


def test_kept_stream_that_died_is_replaced(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(100)
        b.serve_blobs(shelf(blob))
        await a.fetch_small(b.peer, digest(blob), 100)
        await asyncio.sleep(121)  # b no longer keeps the silent stream
        assert b._blobs._num_accepted[a.peer] == 0
        assert await a.fetch_small(b.peer, digest(blob), 100) == blob
        assert world.seen(0, ConnectionDropped) == []

    world.run(scenario)


def test_fetch_any_goes_on_to_the_next_holder(world):
    async def scenario():
        a, b, c, d = await world.started(4)
        blob = some_bytes(2 * MIB)
        b.serve_blobs(lambda peer, name: bytes(2 * MIB))  # lies
        d.serve_blobs(shelf(blob))
        world.network.kill(c.peer)
        assert await a.fetch_any([b.peer, c.peer, d.peer], digest(blob), len(blob)) == blob
        with pytest.raises(PeerError, match=r"nobody delivered blob .*for.*; .*nothing listens"):
            await a.fetch_any([b.peer, c.peer], digest(blob), len(blob))
        with pytest.raises(PeerError, match="nobody is linked"):
            await a.fetch_any([], digest(blob), len(blob))

    world.run(scenario)


@pytest.mark.parametrize(
    ("served", "size", "error", "reason"),
    [
        (some_bytes(99), 100, PayloadError, "has 99 bytes at .* and not 100"),
        (some_bytes(101), 100, PayloadError, "has 101 bytes"),
        (some_bytes(100, seed=9), 100, PayloadError, "sent bytes of blob"),
        (some_bytes(3 * MIB, seed=9), 3 * MIB, PayloadError, "sent bytes of blob"),
    ],
)
def test_lying_holder_is_dropped_with_an_event(world, served, size, error, reason):
    async def scenario():
        a, b = await world.started(2)
        b.serve_blobs(lambda peer, name: served)
        with pytest.raises(error, match=reason):
            await a.fetch(b.peer, digest(some_bytes(size)), bytearray(size))
        (dropped,) = world.seen(0, ConnectionDropped)
        assert dropped.remote == b.peer
        assert not a._blobs.streams._idle.get(b.peer)
        assert a.is_linked(b.peer)  # the control link carries on

    world.run(scenario)


def test_small_blob_above_its_bound_is_not_received(world):
    async def scenario():
        a, b = await world.started(2)
        b.serve_blobs(lambda peer, name: bytes(10 * MIB))
        with pytest.raises(PayloadError, match="above 1000"):
            await a.fetch_small(b.peer, digest(bytes(10 * MIB)), 1000)
        assert a.traffic[b.peer].received_nbytes < 200_000  # what was read ahead

    world.run(scenario)


def test_holder_that_falls_silent_is_given_up(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(5 * MIB)
        b.serve_blobs(shelf(blob))
        set_link(world.network, a.peer, b.peer, delay_s=0.01, bandwidth_bps=8e6)
        fetching = asyncio.create_task(a.fetch(b.peer, digest(blob), bytearray(len(blob)), stall_s=3.0))
        await asyncio.sleep(2)
        world.network.partition(a.peer, b.peer)
        with pytest.raises(DeadlineExceeded, match="sent nothing of a blob for 3 s"):
            await fetching
        assert world.clock.now() == pytest.approx(5.0, abs=0.2)

    world.run(scenario)


def test_slow_holder_is_waited_for(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(5 * MIB)
        b.serve_blobs(shelf(blob))
        set_link(world.network, a.peer, b.peer, delay_s=0.1, bandwidth_bps=1e6)
        await a.fetch(b.peer, digest(blob), bytearray(len(blob)), stall_s=3.0)
        assert world.clock.now() > 40

    world.run(scenario)


def test_one_of_many_streams_over_a_slow_uplink_is_not_cut(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(5 * MIB // 2)
        b.serve_blobs(shelf(blob))
        set_link(world.network, b.peer, a.peer, delay_s=0.02, bandwidth_bps=SLOWEST_STREAM_BPS)
        await a.fetch(b.peer, digest(blob), bytearray(len(blob)), stall_s=60.0)  # for the memory network's chunks
        assert world.clock.now() > 8 * len(blob) / SLOWEST_STREAM_BPS

    world.run(scenario)


def test_holder_that_dies_in_the_middle_is_a_peer_error(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(5 * MIB)
        b.serve_blobs(shelf(blob))
        set_link(world.network, a.peer, b.peer, delay_s=0.01, bandwidth_bps=8e6)
        fetching = asyncio.create_task(a.fetch(b.peer, digest(blob), bytearray(len(blob))))
        await asyncio.sleep(2)
        world.network.kill(b.peer)
        with pytest.raises(PeerError):
            await fetching
        assert world.clock.now() < 2.1

    world.run(scenario)


def test_fetch_given_up_leaves_no_half_used_stream(world):
    async def scenario():
        a, b = await world.started(2)
        blob, small = some_bytes(5 * MIB), some_bytes(10)
        b.serve_blobs(shelf(blob, small))
        set_link(world.network, a.peer, b.peer, delay_s=0.01, bandwidth_bps=8e7)
        fetching = asyncio.create_task(a.fetch(b.peer, digest(blob), bytearray(len(blob))))
        await asyncio.sleep(0.3)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert await a.fetch_small(b.peer, digest(small), 10) == small
        await asyncio.sleep(1)
        assert b._blobs._num_accepted[a.peer] == 1

    world.run(scenario)


def test_nobody_there_is_a_net_error(world):
    async def scenario():
        a, b = await world.started(2)
        world.network.kill(b.peer)
        with pytest.raises(NetError):
            await a.fetch(b.peer, Digest("0" * 64), bytearray(1))

    world.run(scenario)


# --- peers that break the protocol on a bulk stream ---


async def bulk_to(node, world, index=1):
    """Return a raw bulk stream to `node` from an admitted peer, and its reader."""
    await world.nodes[index].connect(node.peer)
    transport = world.nodes[index]._transports[0]
    opened = await transport.dial(node.peer, f"memory://{node.peer}", "bulk")
    return opened, FrameReader(opened)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (encode_frame(b"\xff"), "bytes are no"),
        (encode_frame(encode(BlobHeader(nbytes=1))), "bytes are no"),
        (encode_frame(bytes(300)), "exceeds the bound of 256"),
        (encode_frame(encode(BlobRequest(digest=Digest("0" * 64))))[:-1], "not finished within"),
        (encode_frame(encode(BulkOffer(offer=bytes(8)))), "nobody asked for"),
        (b"GET / HTTP/1.1\r\n\r\n", "frame of version"),
    ],
)
def test_offender_on_a_bulk_stream_is_dropped_with_its_reason(world, sent, reason):
    async def scenario():
        a, b, c = await world.started(3)
        blob = some_bytes(100)
        a.serve_blobs(shelf(blob))
        raw, reader = await bulk_to(a, world)
        await raw.send(sent)
        assert await reader.read() is None
        (dropped,) = world.seen(0, ConnectionDropped)
        assert dropped.remote == b.peer
        assert reason in dropped.reason
        assert await c.fetch_small(a.peer, digest(blob), 100) == blob

    world.run(scenario)


def test_requests_sent_ahead_are_answered_one_in_a_turn(world):
    async def scenario():
        a, _ = await world.started(2)
        turn, answered_in, begun = 0, [], asyncio.Event()

        def lookup(peer, name):
            answered_in.append(turn)
            begun.set()
            return b"small"

        a.serve_blobs(lookup)
        raw, reader = await bulk_to(a, world)
        await raw.send(100 * encode_frame(encode(BlobRequest(digest=digest(b"small")))))
        await begun.wait()
        for turn in range(1, 200):  # noqa: B007  the lookup reads it
            await asyncio.sleep(0)
        assert len(set(answered_in)) > 90
        assert decode(await reader.read(), BlobHeader).nbytes == 5

    world.run(scenario)


def test_bulk_streams_beyond_the_bound_are_dropped(world):
    async def scenario():
        a, _ = await world.started(2)
        for _ in range(16):
            await bulk_to(a, world)
        _, reader = await bulk_to(a, world)
        assert await reader.read() is None
        assert "more than 16 bulk streams" in world.seen(0, ConnectionDropped)[0].reason

    world.run(scenario)


def test_streams_dialled_back_are_bounded(world):
    async def scenario():
        a, b = await world.started(2)
        b.serve_blobs(shelf(some_bytes(100)))
        await b.connect(a.peer)
        for number in range(MAX_DIALLED_BACK):
            a._blobs.streams._offers[bytes([number] * 8)] = (b.peer, asyncio.get_running_loop().create_future())
            await a.call(b.peer, BulkPlease(offer=bytes([number] * 8)), BulkDialled, deadline_s=5)
        with pytest.raises(CallFailed, match="8 bulk streams were opened to you already"):
            await a.call(b.peer, BulkPlease(offer=bytes(8)), BulkDialled, deadline_s=5)
        b.drop(a.peer, "test")
        await asyncio.sleep(1)
        assert not b._blobs.streams._num_dialled_back  # idle ones end with the link
        a._book._entries[b.peer].announced = a._book._entries[b.peer].kept = ()
        await b.connect(a.peer)
        assert await a.fetch_small(b.peer, digest(some_bytes(100)), 100) == some_bytes(100)

    world.run(scenario)


def test_bulk_streams_need_a_link_and_end_with_it(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(100)
        a.serve_blobs(shelf(blob))
        raw, reader = await bulk_to(a, world)
        await write_frame(raw, encode(BlobRequest(digest=digest(blob))))
        await reader.read()
        assert await reader.recv_into(memoryview(bytearray(100))) == 100
        a.drop(b.peer, "test")
        assert await reader.read() is None
        assert not a._blobs._num_accepted
        opened = await b._transports[0].dial(a.peer, f"memory://{a.peer}", "bulk")
        assert await FrameReader(opened).read() is None
        assert "before admission, or after its link" in world.seen(0, ConnectionDropped)[0].reason

    world.run(scenario)


def test_streams_of_a_peer_that_is_gone_end_whatever_they_wait_for(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(4 * MIB)
        a.serve_blobs(shelf(blob), is_patient=True)
        for _ in range(12):
            raw, _ = await bulk_to(a, world)
            await write_frame(raw, encode(BlobRequest(digest=digest(blob))))  # and never reads
        a.exchange(True)
        await asyncio.sleep(5)
        assert a._blobs._num_accepted[b.peer] == 12
        a.drop(b.peer, "silent")
        await asyncio.sleep(0.5)
        assert a._blobs._num_accepted[b.peer] == 12  # a link that is replaced takes a moment
        await asyncio.sleep(1.5)
        assert not a._blobs._num_accepted
        assert not a._blobs._open_streams._held

    world.run(scenario)


@pytest.mark.parametrize("is_here", [False, True])
def test_what_stays_on_this_machine_gives_way_to_no_round(world, monkeypatch, is_here):
    monkeypatch.setattr(MemoryStream, "is_here", is_here)

    async def scenario():
        a, b = await world.started(2)
        blob, loop = some_bytes(MIB), asyncio.get_running_loop()
        b.serve_blobs(shelf(blob), is_patient=True)
        began = loop.time()
        b.exchange(True)
        assert await a.fetch_small(b.peer, digest(blob), MIB) == blob
        assert (loop.time() - began < QUIET_S / 2) == is_here

    world.run(scenario)


def test_streams_outlive_a_link_that_is_replaced_and_no_process(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(4 * MIB)
        a.serve_blobs(shelf(blob))
        raw, _ = await bulk_to(a, world)
        await write_frame(raw, encode(BlobRequest(digest=digest(blob))))
        await asyncio.sleep(1)
        a.drop(b.peer, "replaced")
        await asyncio.sleep(0.5)
        await b.connect(a.peer)
        await asyncio.sleep(3)
        assert a._blobs._num_accepted[b.peer] == 1
        a.drop(b.peer, "killed")
        b.passport.instance = bytes(8)
        await asyncio.sleep(0.5)
        await b.connect(a.peer)
        await asyncio.sleep(0.1)
        assert not a._blobs._num_accepted

    world.run(scenario)


def test_streams_over_all_keys_are_bounded_and_silent_ones_make_room(world):
    async def scenario():
        a, b, c = await world.started(3)
        blob = some_bytes(100)
        a.serve_blobs(shelf(blob))
        a._blobs._open_streams._held = table = Streams(6)
        for _ in range(9):
            await bulk_to(a, world)  # of b, and never used
        assert len(table) == 6
        c.remember(a.peer, [f"memory://{a.peer}"])
        await c.connect(a.peer)
        assert await c.fetch_small(a.peer, digest(blob), 100) == blob
        assert await b.fetch_small(a.peer, digest(blob), 100) == blob
        assert len(table) == 6
        assert table.of(c.peer)

    world.run(scenario)


def test_who_is_barred_opens_no_bulk_stream_though_a_link_stands(world):
    async def scenario():
        a, b = await world.started(2)
        await b.connect(a.peer)
        old = a._links.get(b.peer)
        a.drop(b.peer, "test")
        await asyncio.sleep(1)
        await b.connect(a.peer)
        for _ in range(MAX_VIOLATIONS):
            a._links.violation(old, "what the link before brought")
        assert a.is_linked(b.peer)
        opened = await b._transports[0].dial(a.peer, f"memory://{a.peer}", "bulk")
        assert await FrameReader(opened).read() is None
        assert world.clock.now() < 5

    world.run(scenario)


def test_requests_are_proof_of_life_and_so_is_half_a_frame(world):
    async def scenario():
        a, b = await world.started(2)
        raw, reader = await bulk_to(a, world)
        await asyncio.sleep(5)
        heard = a.traffic[b.peer].received_nbytes
        await write_frame(raw, encode(BlobRequest(digest=Digest("0" * 64))))
        await reader.read()
        assert a.last_heard(b.peer) > 5
        assert a.traffic[b.peer].received_nbytes > heard + 64
        await asyncio.sleep(5)
        await raw.send(b"\x00")
        await asyncio.sleep(1)
        assert a.last_heard(b.peer) > 10

    world.run(scenario)


def test_reader_that_takes_nothing_is_given_up(world):
    async def scenario():
        a, _ = await world.started(2)
        blob = some_bytes(8 * MIB)
        a.serve_blobs(shelf(blob))
        raw, _ = await bulk_to(a, world)
        await write_frame(raw, encode(BlobRequest(digest=digest(blob))))
        await asyncio.sleep(FRAME_S + 8 * SLICE_NBYTES / SLOWEST_STREAM_BPS - 1)
        assert a._blobs._num_accepted[world.ids[1]] == 1
        await asyncio.sleep(2)
        assert a._blobs._num_accepted[world.ids[1]] == 0

    world.run(scenario)


def test_holder_that_sends_garbage_for_a_header_is_dropped(world):
    async def scenario():
        a, b = await world.started(2)

        async def garbage(bulk):
            await bulk.stream.send(encode_frame(b"\xff"))
            await asyncio.sleep(1)

        async def accept(opened):
            await garbage(type("Raw", (), {"stream": opened}))

        b._listener._accept_bulk = accept
        with pytest.raises(WireError):
            await a.fetch(b.peer, Digest("0" * 64), bytearray(1))
        assert len(world.seen(0, ConnectionDropped)) == 1

    world.run(scenario)


# --- large blobs ---


async def fetch_timed(world, node, peer, blob):
    began, into = world.clock.now(), bytearray(len(blob))
    await node.fetch(peer, digest(blob), into)
    assert into == blob
    return world.clock.now() - began


def test_a_path_that_loses_packets_is_crossed_on_several_streams(world, monkeypatch):
    async def scenario():
        a, b = await world.started(2)
        for one, other in ((a, b), (b, a)):
            set_link(world.network, one.peer, other.peer, delay_s=0.04, bandwidth_bps=50e6, loss=0.01)
        blob = some_bytes(16 * MIB + 12_345)
        b.serve_blobs(shelf(blob))
        monkeypatch.setattr(striped, "MAX_STREAMS", 1)
        alone_s = await fetch_timed(world, a, b.peer, blob)
        monkeypatch.setattr(striped, "MAX_STREAMS", 4)
        together_s = await fetch_timed(world, a, b.peer, blob)
        assert b._blobs._num_accepted[a.peer] == 4
        assert alone_s > 2.5 * together_s
        assert a.traffic[b.peer].received_nbytes < 2.01 * len(blob)  # nothing came twice
        assert world.seen(0, ConnectionDropped) == world.seen(1, ConnectionDropped) == []

    world.run(scenario)


def test_where_more_streams_gain_nothing_they_are_not_opened(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(40 * MIB)
        for one, other in ((a, b), (b, a)):
            set_link(world.network, one.peer, other.peer, delay_s=0.02, bandwidth_bps=20e6)
        b.serve_blobs(shelf(blob))
        took_s = await fetch_timed(world, a, b.peer, blob)
        assert took_s < 1.05 * 8 * len(blob) / 20e6  # no pause between ranges
        assert b._blobs._num_accepted[a.peer] == 2  # the second one was tried, in vain

    world.run(scenario)


def test_a_large_blob_that_comes_soon_needs_one_stream(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(9 * MIB + 1)
        set_link(world.network, b.peer, a.peer, delay_s=0.1, bandwidth_bps=100e6)
        b.serve_blobs(shelf(blob))
        await fetch_timed(world, a, b.peer, blob)
        assert b._blobs._num_accepted[a.peer] == 1

    world.run(scenario)


@pytest.mark.parametrize("num_broken", [1, 3])
def test_streams_that_break_cost_only_what_was_asked_on_them(world, num_broken):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(24 * MIB)
        set_link(world.network, b.peer, a.peer, delay_s=0.04, bandwidth_bps=50e6, loss=0.01)
        b.serve_blobs(shelf(blob))
        opened = []
        plain = a._blobs.streams._open

        async def open_(peer):
            opened.append(await plain(peer))
            return opened[-1]

        a._blobs.streams._open = open_
        fetching = asyncio.ensure_future(fetch_timed(world, a, b.peer, blob))
        while len(opened) < 4:  # noqa: ASYNC110  # it has no event to wait for
            await asyncio.sleep(0.5)
        for bulk in opened[:num_broken]:
            await bulk.stream.close()
        await fetching
        assert a.traffic[b.peer].received_nbytes < len(blob) + num_broken * 3 * (2 * MIB)
        assert world.seen(0, ConnectionDropped) == []

    world.run(scenario)


def test_a_large_blob_fails_as_a_small_one_does(world):
    async def scenario():
        a, b, c, d = await world.started(4)
        blob = some_bytes(9 * MIB)
        b.serve_blobs(lambda peer, name: bytes(9 * MIB))  # lies
        c.serve_blobs(lambda peer, name: blob[:-1])
        with pytest.raises(PayloadError, match="sent bytes of blob"):
            await a.fetch(b.peer, digest(blob), bytearray(len(blob)))
        assert not a._blobs.streams._idle.get(b.peer)
        with pytest.raises(PayloadError, match=f"has {len(blob) - 1} bytes at .* and not {len(blob)}"):
            await a.fetch(c.peer, digest(blob), bytearray(len(blob)))
        with pytest.raises(CallFailed, match="holds no blob"):
            await a.fetch(d.peer, digest(blob), bytearray(len(blob)))
        world.network.kill(d.peer)
        with pytest.raises((PeerError, NetError)):
            await a.fetch(d.peer, digest(blob), bytearray(len(blob)))

    world.run(scenario)


def test_a_kept_stream_that_died_is_replaced_for_a_large_blob(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(9 * MIB)
        b.serve_blobs(shelf(blob))
        await fetch_timed(world, a, b.peer, blob)
        await asyncio.sleep(121)
        await fetch_timed(world, a, b.peer, blob)
        assert world.seen(0, ConnectionDropped) == []

    world.run(scenario)


def test_a_range_beyond_a_blob_breaks_the_protocol(world):
    async def scenario():
        a, b = await world.started(2)
        blob = some_bytes(MIB)
        b.serve_blobs(shelf(blob))
        bulk = await a._blobs.streams.open(b.peer)
        await write_frame(bulk, encode(RangeRequest(digest=digest(blob), begin=MIB - 1, end=MIB + 1)))
        assert await FrameReader(bulk, max_nbytes=256).read() is None
        (dropped,) = world.seen(1, ConnectionDropped)
        assert "were asked of a blob" in dropped.reason

    world.run(scenario)
