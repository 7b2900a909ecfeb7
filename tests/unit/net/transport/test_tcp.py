"""What sockets are told, where the system can do it."""

import asyncio
import socket

import pytest

from weft.net.transport import tcp


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system has no such option")
async def test_a_socket_takes_little_more_than_it_can_send() -> None:
    """Where nobody reads, a connection takes what both ends' buffers hold; and of that little is not sent."""
    with tcp.listen("127.0.0.1", 0) as listener:
        near = await tcp.connect("127.0.0.1", listener.getsockname()[1])
        far, _, _ = await tcp.accept(listener)
        with near, far:
            for end in (near, far):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == tcp._NOTSENT_NBYTES
            assert _fill(near) < _fill_without(listener)


async def test_all_who_came_meanwhile_are_taken_without_another_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    real, waits = asyncio.sleep, list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(tcp.asyncio, "sleep", sleep)
    with tcp.listen("127.0.0.1", 0) as listener:
        crowd = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        for _ in crowd:
            (await tcp.accept(listener, 0.5))[0].close()
        assert not waits
        late = asyncio.ensure_future(tcp.accept(listener, 0.5))
        await real(0)
        crowd.append(await asyncio.to_thread(socket.create_connection, listener.getsockname()))
        (await late)[0].close()
        assert waits == [0.5]
        for each in crowd:
            each.close()


def _fill(connection: socket.socket) -> int:
    """Return how many bytes a connection takes from whoever does not wait."""
    taken = 0
    try:
        while True:
            taken += connection.send(bytes(1 << 16))
    except BlockingIOError:
        return taken


def _fill_without(listener: socket.socket) -> int:
    with socket.create_connection(listener.getsockname()) as near:
        near.setblocking(False)
        with listener.accept()[0]:
            return _fill(near)
