"""One request to another server over HTTP/1.1: a status, and a body, whole or event by event as it comes.

    async with ask(site, "POST", "/chat/completions", body) as reply:
        async for data in reply.events(): ...

Framing is h11's, so an answer that was cut short is told from one that ended. Each request has a connection of its own:
a client that goes away ends the work behind, too.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11

from weft.errors import ConfigError
from weft.reading import server_address
from weft.wire import printable

CONNECT_S = 10.0
MAX_BODY_NBYTES = 64 << 20  # of an answer: embeddings of many texts are the largest
MAX_EVENT_NBYTES = 4 << 20
_PIECE_NBYTES = 64 << 10


class Unreached(Exception):
    """Nobody answers there, or no HTTP."""


class BrokeOff(Exception):
    """An answer ended before its end, or is none."""


@dataclass(frozen=True)
class Site:
    """Where another server is.

    Args:
        base: the path before those of the API, as /v1.
        key: the API key that it wants.
    """

    host: str
    port: int
    is_safe: bool
    base: str
    key: str | None = None

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_safe else 'http'}://{host}:{self.port}{self.base}"

    def path(self, path: str) -> str:
        """Return where a path of this server, as /v1/models or /tokenize, is there."""
        return self.base + path.removeprefix("/v1") if path.startswith("/v1/") else self.base.removesuffix("/v1") + path


def site_of(address: str, key: str | None = None) -> Site:
    """Return the server at an address, as http://127.0.0.1:8080/v1; without a path, /v1 is meant.

    Raises:
        ConfigError: it is none.
    """
    parts = server_address(address)
    if parts is None or not parts.hostname:
        raise ConfigError(
            f"--backend {printable(address[:200])}: no address of a server. Give one as http://127.0.0.1:8080/v1; its "
            "key goes into a file, for --backend-key."
        )
    is_safe = parts.scheme == "https"
    return Site(parts.hostname, parts.port or (443 if is_safe else 80), is_safe, parts.path.rstrip("/") or "/v1", key)


class Reply:
    """An answer that has begun."""

    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._connection, self._reader = connection, reader
        self.status = 0
        self.headers: dict[str, str] = {}

    async def begin(self) -> None:
        """Read status and headers.

        Raises:
            BrokeOff: there are none.
        """
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise BrokeOff
        self.status = event.status_code
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            BrokeOff: it was cut short, or is too long.
        """
        parts, num = [], 0
        async for part in self._parts():
            parts.append(part)
            num += len(part)
            if num > MAX_BODY_NBYTES:
                raise BrokeOff
        return b"".join(parts)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each event (server-sent).

        Raises:
            BrokeOff: the body was cut short, or an event is too long.
        """
        rest, data = b"", list[bytes]()
        async for part in self._parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    yield b"\n".join(data)
                    data = []
            if len(rest) + sum(map(len, data)) > MAX_EVENT_NBYTES:
                raise BrokeOff
        if data:
            yield b"\n".join(data)

    async def _parts(self) -> AsyncIterator[bytes]:
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.ConnectionClosed):
                raise BrokeOff

    async def _next(self) -> h11.Event:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(await self._reader.read(_PIECE_NBYTES))
        except (OSError, h11.RemoteProtocolError) as error:
            raise BrokeOff from error
        if event is h11.PAUSED:
            raise BrokeOff
        assert isinstance(event, h11.Event)
        return event


@asynccontextmanager
async def ask(site: Site, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Reply]:
    """Send a request, and yield the answer once its headers are there; whoever leaves early hangs up.

    Failure:
        nobody is there, or it speaks no HTTP: `Unreached`.
        what comes later is cut short: `BrokeOff`, from whoever reads the reply.
    """
    writer = None
    try:
        reply, writer = await _begun(site, method, path, body)
        yield reply
    finally:
        if writer is not None:
            writer.transport.abort()


async def _begun(site: Site, method: str, path: str, body: bytes | None) -> tuple[Reply, asyncio.StreamWriter]:
    context = ssl.create_default_context() if site.is_safe else None
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(site.host, site.port, ssl=context)
    except (OSError, TimeoutError) as error:  # a certificate that does not hold is one, too
        raise Unreached(str(error)) from error
    try:
        connection = h11.Connection(h11.CLIENT)
        headers = [("host", f"{site.host}:{site.port}"), ("accept", "application/json, text/event-stream")]
        headers += [("connection", "close"), ("user-agent", "weft")]
        headers += [] if site.key is None else [("authorization", f"Bearer {site.key}")]
        if body is not None:
            headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        request = h11.Request(method=method, target=site.path(path), headers=headers)
        events: list[h11.Event] = [request, *([] if body is None else [h11.Data(data=body)]), h11.EndOfMessage()]
        for event in events:
            writer.write(connection.send(event) or b"")
        await writer.drain()
        reply = Reply(connection, reader)
        await reply.begin()
    except (OSError, BrokeOff) as error:
        writer.transport.abort()
        raise Unreached("it hangs up, or speaks no HTTP") from error
    except BaseException:
        writer.transport.abort()
        raise
    return reply, writer
