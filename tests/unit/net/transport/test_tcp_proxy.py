"""TLS through an HTTP proxy on loopback that is scripted to answer."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from weft.config import from_tree
from weft.errors import ConfigError, DialError
from weft.keys import Identity
from weft.net.transport.base import Lane, Stream
from weft.net.transport.tcp import MAX_ANSWER_NBYTES, Proxy
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.run.machine import PeerConfig

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeProxy:
    """Answers every request with `answer`; with None it connects as it is asked to."""

    def __init__(self) -> None:
        self.answer: bytes | None = None
        self.heads: list[str] = []
        self.address = ""
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if self.answer is not None:
                writer.write(self.answer)
                await writer.drain()
                await reader.read()
                return
            host, _, port = self.heads[-1].split()[1].rpartition(":")
            onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 test\r\n\r\n")
            await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer))
        finally:
            writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[FakeProxy]:
    proxy = FakeProxy()
    await proxy.start()
    yield proxy
    await proxy.aclose()


async def nobody(stream: Stream, lane: Lane) -> None:
    raise AssertionError("no stream was expected")


async def test_a_peer_dials_through_its_proxy(proxy: FakeProxy) -> None:
    far, near = Identity.generate(), Identity.generate()
    accepted: asyncio.Queue[Stream] = asyncio.Queue()

    async def accept(stream: Stream, lane: Lane) -> None:
        await accepted.put(stream)
        await asyncio.Event().wait()

    listening = TlsTransport(far, TlsConfig(host="127.0.0.1"))
    dialling = TlsTransport(near, TlsConfig(proxy=proxy.address, proxy_user="me", proxy_password="a:b é"))
    (address,) = await listening.start(accept)
    stream = await dialling.dial(far.peer, address, "bulk")
    await stream.send(b"hello")
    other = await accepted.get()
    buffer = bytearray(5)
    assert await other.recv_into(memoryview(buffer)) == 5
    assert buffer == b"hello"
    (head,) = proxy.heads
    target = address.removeprefix("tls://")
    assert head.startswith(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n")
    secret = head.partition("Proxy-Authorization: Basic ")[2].strip()
    assert base64.b64decode(secret).decode() == "me:a:b é"
    await dialling.aclose()
    await listening.aclose()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
            "answered 407 Proxy Auth.*proxy_user and proxy_password",
        ),
        (b"HTTP/1.0 403 Forbidden\r\nX: y\r\n\r\n", "answered 403 Forbidden.*listen on port 443"),
        (b"HTTP/1.1 502\r\n\r\n", "answered 502: it did not reach the address"),
        (b"HTTP/1.1 418 \x1b[31mteapot\r\n\r\n", r"answered 418 .*teapot"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "is not an HTTP proxy: it answers 'SSH-2.0-OpenSSH'"),
        (b"HTTP/1.1 200 OK\r\n\r\nand more", "sent more than its answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * MAX_ANSWER_NBYTES, "its answer does not end"),
    ],
)
async def test_what_a_proxy_answers_is_said(proxy: FakeProxy, answer: bytes, said: str) -> None:
    proxy.answer = answer
    dialling = TlsTransport(Identity.generate(), TlsConfig(proxy=proxy.address))
    with pytest.raises(DialError, match=f"{proxy.address}.*{said}") as caught:
        await dialling.dial(Identity.generate().peer, "tls://203.0.113.7:4433", "control")
    assert "\x1b" not in str(caught.value)
    assert "Proxy-Authorization" not in proxy.heads[0]
    await dialling.aclose()


async def test_a_proxy_that_is_not_there_is_named() -> None:
    dialling = TlsTransport(Identity.generate(), TlsConfig(proxy="http://127.0.0.1:1"))
    with pytest.raises(DialError, match=r"cannot reach the proxy http://127\.0\.0\.1:1"):
        await dialling.dial(Identity.generate().peer, "tls://203.0.113.7:4433", "control")
    await dialling.aclose()


def test_a_proxy_shows_no_password() -> None:
    assert "secret" not in repr(Proxy("http://x:1", "me", "secret"))


@pytest.mark.parametrize("given", ["socks5://x:1", "http://x", "http://user:pw@x:1", "x:1", "http://x:1/path"])
def test_what_is_no_address_of_a_proxy_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="proxy"):
        from_tree({"tls": {"proxy": given}}, PeerConfig, where="machine.toml")


async def test_ipv6_targets_get_their_brackets(proxy: FakeProxy) -> None:
    proxy.answer = b"HTTP/1.1 502 no\r\n\r\n"
    with pytest.raises(OSError, match="502"):
        await Proxy(proxy.address).connect("2001:db8::1", 443)
    assert proxy.heads[0].startswith("CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n")
