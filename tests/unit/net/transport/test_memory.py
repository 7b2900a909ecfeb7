"""Links of the memory network: delay, bandwidth and faults, on virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lines import set_link
from weft.clock import VirtualClock
from weft.errors import DialError, PeerError
from weft.ids import PeerId
from weft.net.transport.base import Lane, Stream
from weft.net.transport.memory import (
    CHUNK_NBYTES,
    DIAL_TIMEOUT_S,
    SCHEME,
    WINDOW_NBYTES,
    MemoryNetwork,
    MemoryStream,
    MemoryTransport,
)

A, B, C = (PeerId(letter * 64) for letter in "abc")


class Town:
    """Three peers on one network; `streams[peer]` holds what came in there."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.streams: dict[PeerId, list[Stream]] = {A: [], B: [], C: []}

    async def start(self, peer: PeerId) -> None:
        async def accept(stream: Stream, lane: Lane) -> None:
            self.streams[peer].append(stream)

        self.transports[peer] = self.network.transport(peer)
        await self.transports[peer].start(accept)

    async def connect(self, source: PeerId, target: PeerId) -> tuple[MemoryStream, Stream]:
        stream = await self.transports[source].dial(target, f"memory://{target}", "bulk")
        await asyncio.sleep(0)  # the other side's task begins
        return stream, self.streams[target][-1]


def on_virtual_time(scenario: Callable[[Town], Coroutine[Any, Any, Any]], network: MemoryNetwork) -> tuple[Any, float]:
    """Run `scenario` with three started peers; return its result and the virtual seconds it took."""
    clock = VirtualClock()

    async def main() -> Any:
        town = Town(network)
        for peer in (A, B, C):
            await town.start(peer)
        result = await scenario(town)
        for transport in town.transports.values():
            await transport.aclose()
        return result

    return clock.run(main()), clock.now()


async def receive(stream: Stream, num_bytes: int) -> bytes:
    buffer, filled = bytearray(num_bytes), 0
    while filled < num_bytes and (got := await stream.recv_into(memoryview(buffer)[filled:])):
        filled += got
    return bytes(buffer[:filled])


def test_a_message_takes_the_links_delay() -> None:
    async def scenario(town: Town) -> None:
        near, far = await town.connect(A, B)
        await near.send(b"ping")
        assert await receive(far, 4) == b"ping"
        await far.send(b"pong")
        assert await receive(near, 4) == b"pong"

    _, took_s = on_virtual_time(scenario, MemoryNetwork(delay_s=0.25))
    assert took_s == pytest.approx(4 * 0.25)  # there and back to connect, there and back to talk


def test_bytes_take_the_links_bandwidth() -> None:
    async def scenario(town: Town) -> None:
        near, far = await town.connect(A, B)
        sending = asyncio.ensure_future(near.send(bytes(5_000_000)))
        assert len(await receive(far, 5_000_000)) == 5_000_000
        await sending

    _, took_s = on_virtual_time(scenario, MemoryNetwork(delay_s=0.1, bandwidth_bps=8e6))
    assert took_s == pytest.approx(0.2 + 5.0 + 0.1, rel=1e-3)


def test_streams_share_a_link_fairly() -> None:
    async def scenario(town: Town) -> list[float]:
        loop, ends = asyncio.get_running_loop(), []

        async def transfer() -> None:
            near, far = await town.connect(A, B)
            sending = asyncio.ensure_future(near.send(bytes(1_000_000)))
            await receive(far, 1_000_000)
            ends.append(loop.time())
            await sending

        await asyncio.gather(transfer(), transfer())
        return ends

    ends, took_s = on_virtual_time(scenario, MemoryNetwork(bandwidth_bps=8e6))
    assert took_s == pytest.approx(2.0, rel=1e-3)
    assert ends[1] - ends[0] <= 2 * 8 * CHUNK_NBYTES / 8e6


def test_a_small_frame_need_not_wait_for_a_large_transfer() -> None:
    async def scenario(town: Town) -> float:
        bulk, bulk_far = await town.connect(A, B)
        control, far = await town.connect(A, B)
        await bulk.send(bytes(250_000))  # a quarter of a second on this link
        await control.send(b"alive")
        await receive(far, 5)
        arrived_s = asyncio.get_running_loop().time()
        assert len(await receive(bulk_far, 250_000)) == 250_000
        return arrived_s

    arrived_s, took_s = on_virtual_time(scenario, MemoryNetwork(bandwidth_bps=8e6))
    assert arrived_s <= 3 * 8 * CHUNK_NBYTES / 8e6
    assert took_s == pytest.approx(0.25, rel=1e-3)


def test_a_link_can_be_set_by_itself() -> None:
    network = MemoryNetwork(delay_s=0.1)
    set_link(network, A, B, delay_s=1.0)

    async def scenario(town: Town) -> None:
        await town.connect(A, B)

    assert on_virtual_time(scenario, network)[1] == pytest.approx(2.0)


async def bring(town: Town, source: PeerId, target: PeerId, num_bytes: int) -> float:
    """Send so many bytes over a stream of its own; return when all have arrived."""
    near, far = await town.connect(source, target)
    sending = asyncio.ensure_future(near.send(bytes(num_bytes)))
    assert len(await receive(far, num_bytes)) == num_bytes
    await sending
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("up_bps", "down_bps"), [(8e6, None), (None, 8e6), (8e6, 16e6)])
def test_what_a_peer_sends_to_two_shares_its_line_up(up_bps: float | None, down_bps: float | None) -> None:
    network = MemoryNetwork(delay_s=0.1)
    for peer in (A, B, C):
        network.set_line(peer, up_bps=up_bps, down_bps=down_bps)

    async def scenario(town: Town) -> list[float]:
        return await asyncio.gather(bring(town, A, B, 1_000_000), bring(town, A, C, 1_000_000))

    arrived_s, _ = on_virtual_time(scenario, network)
    is_shared = up_bps is not None
    last = 8 * CHUNK_NBYTES / 16e6 if down_bps == 16e6 else 0.0  # the last chunk passes the line down as well
    assert max(arrived_s) == pytest.approx(0.3 + (2.0 if is_shared else 1.0) + last, rel=0.02)


def test_what_two_send_to_a_peer_shares_its_line_down() -> None:
    network = MemoryNetwork(delay_s=0.1)
    network.set_line(C, up_bps=1e6, down_bps=8e6)

    async def scenario(town: Town) -> list[float]:
        return await asyncio.gather(bring(town, A, C, 1_000_000), bring(town, B, C, 1_000_000))

    assert max(on_virtual_time(scenario, network)[0]) == pytest.approx(2.3, rel=0.01)


def test_jitter_delays_and_keeps_order() -> None:
    network = MemoryNetwork()
    set_link(network, A, B, delay_s=0.1, jitter_s=0.3)

    async def scenario(town: Town) -> list[float]:
        near, far = await town.connect(A, B)
        loop, waits_s = asyncio.get_running_loop(), []
        for number in range(200):
            sent_s = loop.time()
            await near.send(bytes([number]))
            assert await receive(far, 1) == bytes([number])
            waits_s.append(loop.time() - sent_s)
        for number in range(200):
            await near.send(bytes([number]))
        assert await receive(far, 200) == bytes(range(200))
        return waits_s

    waits_s, _ = on_virtual_time(scenario, network)
    assert 0.1 <= min(waits_s) < 0.12
    assert 0.38 < max(waits_s) <= 0.4


def test_a_lost_packet_is_late_by_a_timeout() -> None:
    network = MemoryNetwork()
    set_link(network, A, B, delay_s=0.01, loss=0.05)

    async def scenario(town: Town) -> list[float]:
        near, far = await town.connect(A, B)
        loop, waits_s = asyncio.get_running_loop(), []
        for _ in range(1000):
            sent_s = loop.time()
            await near.send(b"?")
            await receive(far, 1)
            waits_s.append(round(loop.time() - sent_s, 3))
        return waits_s

    waits_s, _ = on_virtual_time(scenario, network)
    assert set(waits_s) == {0.01, 0.21}
    assert 30 < waits_s.count(0.21) < 70


def test_a_stream_over_a_lossy_link_is_slow_and_two_are_twice_as_fast() -> None:
    def took_s(num_streams: int) -> float:
        network = MemoryNetwork()
        set_link(network, A, B, delay_s=0.05, bandwidth_bps=1e8, loss=0.01)

        async def scenario(town: Town) -> list[float]:
            return await asyncio.gather(*(bring(town, A, B, 4_000_000 // num_streams) for _ in range(num_streams)))

        return max(on_virtual_time(scenario, network)[0])

    # MSS / RTT sqrt(3 / (2 p)) = 1448 / 0.1 * 12.25 = 177 kB/s
    assert took_s(1) == pytest.approx(4_000_000 / 177_000, rel=0.05)
    assert took_s(1) / took_s(2) == pytest.approx(2, rel=0.05)


def test_order_holds_when_a_link_becomes_faster() -> None:
    network = MemoryNetwork(delay_s=1.0)

    async def scenario(town: Town) -> bytes:
        near, far = await town.connect(A, B)
        await near.send(b"first")
        set_link(network, A, B, delay_s=0.0)
        await near.send(b"second")
        first = await receive(far, 5)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0 + 1.0)  # to connect, and its own delay
        return first + await receive(far, 6)

    assert on_virtual_time(scenario, network)[0] == b"firstsecond"


def test_a_sender_waits_for_its_reader() -> None:
    async def scenario(town: Town) -> None:
        near, far = await town.connect(A, B)
        await near.send(bytes(WINDOW_NBYTES))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(near.send(b"x"), 1000)
        await receive(far, WINDOW_NBYTES)
        await near.send(b"x")

    on_virtual_time(scenario, MemoryNetwork())


def test_a_partition_is_silence_and_healing_delivers() -> None:
    async def scenario(town: Town) -> None:
        near, far = await town.connect(A, B)
        town.network.partition(A, B)
        await near.send(b"through ")
        await near.send(b"the wall")
        buffer = memoryview(bytearray(100))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(far.recv_into(buffer), 1000)
        town.network.heal(A, B)
        assert await receive(far, 16) == b"through the wall"
        await near.send(b"!")
        assert await receive(far, 1) == b"!"

    on_virtual_time(scenario, MemoryNetwork(delay_s=0.1))


def test_a_partition_holds_what_is_under_way() -> None:
    async def scenario(town: Town) -> None:
        near, far = await town.connect(A, B)
        await near.send(b"late")
        town.network.partition(A, B)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(far.recv_into(memoryview(bytearray(9))), 10)
        town.network.heal(A, B)
        assert await receive(far, 4) == b"late"

    on_virtual_time(scenario, MemoryNetwork(delay_s=1.0))


def test_a_partition_lets_other_links_be() -> None:
    async def scenario(town: Town) -> None:
        town.network.partition(A, B)
        near, far = await town.connect(A, C)
        await near.send(b"x")
        assert await receive(far, 1) == b"x"

    on_virtual_time(scenario, MemoryNetwork())


def test_a_dial_into_a_partition_times_out() -> None:
    async def scenario(town: Town) -> None:
        town.network.partition(A, B)
        with pytest.raises(DialError, match="did not answer"):
            await town.connect(B, A)

    assert on_virtual_time(scenario, MemoryNetwork())[1] == DIAL_TIMEOUT_S


def test_a_killed_peer_resets_its_streams() -> None:
    async def scenario(town: Town) -> None:
        near, far = await town.connect(A, B)
        waiting = asyncio.ensure_future(far.recv_into(memoryview(bytearray(1))))
        await asyncio.sleep(0)
        town.network.kill(A)
        with pytest.raises(PeerError, match="reset"):
            await waiting
        with pytest.raises(PeerError, match="reset"):
            await far.send(b"x")
        with pytest.raises(PeerError, match="killed"):
            await near.send(b"x")
        with pytest.raises(DialError):
            await town.connect(B, A)
        with pytest.raises(DialError, match="killed"):
            await town.connect(A, C)

    on_virtual_time(scenario, MemoryNetwork())


def test_what_a_dead_peer_had_queued_does_not_hold_up_the_link() -> None:
    async def scenario(town: Town) -> float:
        near, _ = await town.connect(A, B)
        other, other_far = await town.connect(A, B)
        await near.send(bytes(250_000))  # a quarter of a second on this link
        near.abort()
        await other.send(b"next")
        assert await receive(other_far, 4) == b"next"
        return asyncio.get_running_loop().time()

    assert on_virtual_time(scenario, MemoryNetwork(bandwidth_bps=8e6))[0] <= 3 * 8 * CHUNK_NBYTES / 8e6


def test_a_death_behind_a_partition_is_silent_until_it_heals() -> None:
    async def scenario(town: Town) -> None:
        _, far = await town.connect(A, B)
        town.network.partition(A, B)
        town.network.kill(A)
        await far.send(b"are you there?")
        buffer = memoryview(bytearray(1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(far.recv_into(buffer), 100)
        town.network.heal(A, B)
        with pytest.raises(PeerError, match="reset"):
            await far.recv_into(buffer)

    on_virtual_time(scenario, MemoryNetwork())


def test_a_killed_peer_comes_back_with_a_new_transport() -> None:
    async def scenario(town: Town) -> None:
        town.network.kill(A)
        await town.start(A)
        near, far = await town.connect(B, A)
        await near.send(b"again")
        assert await receive(far, 5) == b"again"

    on_virtual_time(scenario, MemoryNetwork())


def test_killing_cancels_what_the_peer_was_doing() -> None:
    ended = []

    async def scenario(town: Town) -> None:
        async def accept(stream: Stream, lane: Lane) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(asyncio.get_running_loop().time())

        await town.transports[C].start(accept)
        await town.transports[A].dial(C, f"memory://{C}", "control")
        await asyncio.sleep(5)
        town.network.kill(C)
        await asyncio.sleep(5)

    on_virtual_time(scenario, MemoryNetwork())
    assert ended == [5.0]


def test_two_runs_are_the_same() -> None:
    async def scenario(town: Town) -> list[tuple[float, str, int]]:
        log: list[tuple[float, str, int]] = []
        loop = asyncio.get_running_loop()

        async def talk(source: PeerId, target: PeerId, size: int) -> None:
            near, far = await town.connect(source, target)
            sending = asyncio.ensure_future(near.send(bytes(size)))
            buffer = memoryview(bytearray(50_000))
            received = 0
            while received < size:
                received += await far.recv_into(buffer)
                log.append((loop.time(), source, received))
            await sending

        pairs = [(A, B), (B, A), (A, C), (C, A), (B, C), (C, B)]
        await asyncio.gather(*(talk(*pair, 200_000 + 7 * number) for number, pair in enumerate(pairs)))
        return log

    def log(seed: int) -> list[tuple[float, str, int]]:
        network = MemoryNetwork(delay_s=0.01, bandwidth_bps=1e7, seed=seed)
        set_link(network, A, C, delay_s=0.02, bandwidth_bps=1e7, jitter_s=0.01, loss=0.001)
        log: list[tuple[float, str, int]] = on_virtual_time(scenario, network)[0]
        return log

    assert log(1) == log(1)
    assert log(1) != log(2)
    assert len(log(1)) > 20


def test_the_delays_of_both_ends_lines_add_up_to_that_of_the_link() -> None:
    network = MemoryNetwork(delay_s=0.1)
    network.set_line(A, up_bps=None, down_bps=None, delay_s=0.2, loss=0.1)
    network.set_line(B, up_bps=8e6, down_bps=None, delay_s=0.3, loss=0.2)
    there, back = network.link(A, B), network.link(B, A)
    assert (there.delay_s, back.delay_s) == pytest.approx((0.6, 0.6))
    assert there.loss == pytest.approx(1 - 0.9 * 0.8)
    network.set_line(B, up_bps=None, down_bps=None)
    assert there.delay_s == pytest.approx(0.3)


def test_bytes_under_way_arrive_although_their_sender_is_frozen() -> None:
    clock, network = VirtualClock(), MemoryNetwork(delay_s=1.0)
    heard: list[tuple[float, bytes]] = []

    async def accept(stream: Stream, _lane: Lane) -> None:
        heard.append((clock.now(), await receive(stream, 5)))
        heard.append((clock.now(), b""))

    async def send(stream: Stream) -> None:
        await stream.send(b"hello")
        await asyncio.sleep(1000.0)

    async def main() -> None:
        a, b = network.transport(A), network.transport(B)
        await b.start(accept)
        stream = await a.dial(B, SCHEME + B, "control")
        sender = object()
        task = asyncio.get_running_loop().create_task(send(stream), context=clock.context_of(sender))
        await asyncio.sleep(0.5)
        clock.freeze(sender)
        await asyncio.sleep(5.0)
        clock.thaw(sender)
        task.cancel()

    clock.run(main())
    assert heard == [(2.0, b"hello"), (3.0, b"")]
