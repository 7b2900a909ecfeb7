"""Who knocks, and whose taker fails."""

import asyncio
from unittest.mock import Mock

import pytest

from weft.clock import VirtualClock
from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.link.links import Listener
from weft.net.transport.base import Stream
from weft.net.transport.memory import MemoryNetwork

A, B = PeerId("a" * 64), PeerId("b" * 64)


@pytest.mark.parametrize("error", [PeerError("gone"), ValueError("our own")])
def test_a_stream_whose_taker_fails_is_closed(error: Exception) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        network, links = MemoryNetwork(), Mock(**{"may_fetch.return_value": True})

        async def fail(_stream: Stream) -> None:
            raise error

        transport = network.transport(B)
        listener = Listener(Mock(), links, Mock(), Mock(), fail)
        await transport.start(listener.accept(transport))
        stream = await network.transport(A).dial(B, f"memory://{B}", "bulk")
        assert await stream.recv_into(memoryview(bytearray(1))) == 0

    VirtualClock().run(main())
