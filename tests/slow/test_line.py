"""A line of the simulator takes as long for the same bytes as one of the kernel: `tc tbf` on a virtual cable."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.rig.namespaces import Lines

from weft.clock import VirtualClock
from weft.ids import PeerId
from weft.net.transport.base import Lane, Stream
from weft.net.transport.memory import SCHEME, MemoryNetwork

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))),
        reason="network namespaces need root, iproute2 and tc",
    ),
]

MBIT = 20.0
PORT = 7000
WAIT_S = 60.0
ONE, OTHER = PeerId("a" * 64), PeerId("b" * 64)

# Both print the machine's monotonic clock: when the first byte is sent, and when the last one is there.
RECEIVE = """
import socket, sys, time
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
stream, left, buffer = listening.accept()[0], int(sys.argv[3]), bytearray(1 << 16)
while left:
    left -= stream.recv_into(buffer) or sys.exit("the sender is gone")
print(time.monotonic(), flush=True)
"""
SEND = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])))
began = time.monotonic()
stream.sendall(bytes(int(sys.argv[3])))
print(began, flush=True)
stream.shutdown(socket.SHUT_WR)
stream.recv(1)
"""


def by_the_kernel(num_bytes: int) -> float:
    """Return how many seconds a stream over two machines' lines takes."""
    with Lines("weft-line", 2, mbit=MBIT) as lines:
        where = [lines.address(1), str(PORT), str(num_bytes)]
        pipe = {"stdout": subprocess.PIPE, "text": True}
        with lines.start(1, [sys.executable, "-c", RECEIVE, *where], Path.cwd(), **pipe) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline()
            with lines.start(0, [sys.executable, "-c", SEND, *where], Path.cwd(), **pipe) as sender:
                began, _ = sender.communicate(timeout=WAIT_S)
            ended, _ = receiver.communicate(timeout=WAIT_S)
    return float(ended) - float(began)


def by_the_simulator(num_bytes: int) -> float:
    """Return how many virtual seconds a stream over two machines' lines takes."""
    clock, network = VirtualClock(), MemoryNetwork()
    for peer in (ONE, OTHER):
        network.set_line(peer, up_bps=MBIT * 1e6, down_bps=MBIT * 1e6)

    async def play() -> float:
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

        async def accept(stream: Stream, _lane: Lane) -> None:
            accepted.set_result(stream)

        receiver, sender = network.transport(OTHER), network.transport(ONE)
        await receiver.start(accept)
        await sender.start(accept)
        stream = await sender.dial(OTHER, SCHEME + OTHER, "bulk")
        there, began = await accepted, clock.now()
        sending = asyncio.ensure_future(stream.send(bytes(num_bytes)))
        buffer, left = memoryview(bytearray(1 << 16)), num_bytes
        while left:
            left -= await there.recv_into(buffer)
        ended = clock.now()
        await sending
        for transport in (receiver, sender):
            await transport.aclose()
        return ended - began

    return clock.run(play())


@pytest.mark.parametrize("num_bytes", [1_000_000, 4_000_000, 16_000_000])
def test_a_simulated_line_takes_as_long_as_the_kernels_within_a_twentieth(num_bytes: int) -> None:
    simulated, real = by_the_simulator(num_bytes), by_the_kernel(num_bytes)
    print(f"{num_bytes} bytes: {simulated:.3f} s simulated, {real:.3f} s by tc, {simulated / real - 1:+.1%}")  # noqa: T201
    assert simulated == pytest.approx(real, rel=0.05)
