"""Caps on what a machine sends and receives: rates on virtual time, control before bulk, and a day's bytes."""

import asyncio

import pytest

from weft.clock import VirtualClock
from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.transport.base import Lane, Stream, Transport
from weft.net.transport.memory import MemoryNetwork
from weft.net.transport.rate_limit import Bucket, Ration, Throttled, Valve

A, B = PeerId("a" * 64), PeerId("b" * 64)
MIB = 1 << 20


class Ends:
    """Two transports, of which `valve` holds the first."""

    def __init__(self, valve: Valve) -> None:
        network = MemoryNetwork(delay_s=0.01)
        self.near: Transport = Throttled(network.transport(A), valve)
        self.far: Transport = network.transport(B)
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()

    async def start(self) -> None:
        async def accept(stream: Stream, lane: Lane) -> None:
            await self.accepted.put(stream)
            await asyncio.Event().wait()

        await self.near.start(accept)
        await self.far.start(accept)

    async def connect(self, lane: Lane) -> tuple[Stream, Stream]:
        near = await self.near.dial(B, "memory://" + B, lane)
        return near, await self.accepted.get()


async def drink(stream: Stream, num_bytes: int) -> None:
    buffer = memoryview(bytearray(64 << 10))
    while num_bytes > 0:
        num_bytes -= await stream.recv_into(buffer[: min(num_bytes, len(buffer))])


@pytest.mark.parametrize("bps", [1e6, 20e6, 200e6])
@pytest.mark.parametrize("num_streams", [1, 7])
def test_what_several_streams_send_together_keeps_the_rate(bps: float, num_streams: int) -> None:
    clock = VirtualClock()

    async def main() -> None:
        ends = Ends(Valve(clock, upload_bps=bps))
        await ends.start()
        pairs = [await ends.connect("bulk") for _ in range(num_streams)]
        began, nbytes = clock.now(), int(bps / 8 * 5 / num_streams)
        await asyncio.gather(
            *(near.send(bytes(nbytes)) for near, _ in pairs), *(drink(far, nbytes) for _, far in pairs)
        )
        assert clock.now() - began == pytest.approx(5.0, rel=0.05)

    clock.run(main())


@pytest.mark.parametrize("num_streams", [1, 7])
def test_what_is_received_keeps_the_rate(num_streams: int) -> None:
    clock = VirtualClock()

    async def main() -> None:
        ends = Ends(Valve(clock, download_bps=8e6))
        await ends.start()
        pairs = [await ends.connect("bulk") for _ in range(num_streams)]
        began, nbytes = clock.now(), 10 * 10**6 // num_streams
        await asyncio.gather(
            *(far.send(bytes(nbytes)) for _, far in pairs), *(drink(near, nbytes) for near, _ in pairs)
        )
        assert clock.now() - began == pytest.approx(10.0, rel=0.05)

    clock.run(main())


def test_control_passes_beside_any_number_of_blobs() -> None:
    clock = VirtualClock()

    async def main() -> None:
        ends = Ends(Valve(clock, upload_bps=1e6))
        await ends.start()
        control, heard = await ends.connect("control")
        pairs = [await ends.connect("bulk") for _ in range(10)]
        tasks = [asyncio.ensure_future(near.send(bytes(10 * MIB))) for near, _ in pairs]
        tasks += [asyncio.ensure_future(drink(far, 10 * MIB)) for _, far in pairs]
        for _ in range(20):
            await asyncio.sleep(0.37)
            began = clock.now()
            await control.send(bytes(300))
            assert clock.now() - began < 0.06  # a slice
            await drink(heard, 300)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    clock.run(main())


def test_control_above_the_rate_waits_too() -> None:
    clock = VirtualClock()

    async def main() -> None:
        bucket = Bucket(1e6, clock)
        for _ in range(80):
            await bucket.take(12_500, "control")
        assert clock.now() == pytest.approx(8.0, rel=0.05)

    clock.run(main())


def test_silence_saves_up_no_more_than_a_moment() -> None:
    clock = VirtualClock()

    async def main() -> None:
        bucket = Bucket(1e6, clock)
        await asyncio.sleep(3600)
        began = clock.now()
        for _ in range(200):
            await bucket.take(6_250, "bulk")
        assert clock.now() - began == pytest.approx(10.0, rel=0.03)

    clock.run(main())


def test_who_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    clock = VirtualClock()

    async def main() -> None:
        bucket = Bucket(1e6, clock)
        await bucket.take(125_000, "bulk")  # a second's worth
        waiting = [asyncio.ensure_future(bucket.take(125_000, "bulk")) for _ in range(50)]
        last = asyncio.ensure_future(bucket.take(1, "bulk"))
        await asyncio.sleep(0.5)
        for task in waiting:
            task.cancel()
        await last
        assert clock.now() == pytest.approx(1.0, abs=0.01)

    clock.run(main())


def test_a_spent_ration_lets_control_pass_and_no_blob() -> None:
    clock = VirtualClock()
    told: list[float] = []

    async def main() -> None:
        ration = Ration(MIB, lambda: told.append(clock.now()))
        ends = Ends(Valve(clock, ration=ration))
        await ends.start()
        control, heard = await ends.connect("control")
        near, far = await ends.connect("bulk")
        sending = asyncio.ensure_future(near.send(bytes(8 * MIB)))
        drinking = asyncio.ensure_future(drink(far, 8 * MIB))
        with pytest.raises(PeerError, match="in a day"):
            await sending
        assert MIB <= ration.moved_nbytes <= MIB + (64 << 10)
        with pytest.raises(PeerError, match="in a day"):
            await near.recv_into(memoryview(bytearray(10)))
        await control.send(b"goodbye")
        await drink(heard, 7)
        assert len(told) == 1
        ration.grant(MIB)
        await near.send(bytes(1000))
        drinking.cancel()

    clock.run(main())


def test_what_one_call_sends_stays_in_one_piece() -> None:
    clock = VirtualClock()

    async def main() -> None:
        ends = Ends(Valve(clock, upload_bps=1e6))
        await ends.start()
        near, far = await ends.connect("bulk")
        sending = [asyncio.ensure_future(near.send(bytes([number]) * 50_000)) for number in range(3)]
        got, buffer = b"", bytearray(1 << 16)
        while len(got) < 150_000:
            got += bytes(buffer[: await far.recv_into(memoryview(buffer))])
        assert got == b"".join(bytes([number]) * 50_000 for number in range(3))
        await asyncio.gather(*sending)

    clock.run(main())
