"""Peers over TCP and TLS 1.3: one listening port, both lanes.

A connection is one stream. It says in the clear which lane it is, then both sides prove their keys
(`tls_handshake`) inside TLS; until then it is half open, has a deadline, and counts against bounds (`gate`).
Frames of the control lane are handled in the event loop, bulk bytes in a few threads (`tls_stream`).

Failure:
- a host that vanishes: unanswered bytes or keep-alive probes break the connection after about 25 s; deadlines of
  the caller are shorter.
- who does not finish the handshake in time, or breaks it, is dropped, and `on_drop` says why.
"""

import asyncio
import socket
import ssl
import sys
from contextlib import suppress
from functools import partial
from typing import Annotated

import msgspec

from weft.config import Config
from weft.errors import ConfigError, DialError, NetError, PeerError
from weft.events import HUNG_UP
from weft.ids import Digest, PeerId
from weft.keys import Identity
from weft.net.transport import tcp, tls_handshake
from weft.net.transport.address import fault_of, join_address, reachable_hosts, split_address
from weft.net.transport.base import Accept, Lane, OnDrop, ignore_drop
from weft.net.transport.limits import Budget, Gate, HandshakeS, Handshakes, MaxHalfOpen, MaxHalfOpenPerIp
from weft.net.transport.tcp import Proxy
from weft.net.transport.tls_certificate import client_context, make_certificate, server_context
from weft.net.transport.tls_stream import InLoop, InThreads, TlsStream
from weft.tasks import Tasks
from weft.wire import digest

SCHEME = "tls"
_RETRY_ACCEPT_S = 0.5  # when the process has no file descriptor left
# After one was turned away: to hang up on who comes back at once, 1,100 times a second, took a tenth of a core.
LOOK_AWAY_S = 5e-3
_FULL = "this process has no more open files left for connections; allow more: ulimit -n 4096"
_CLOSE_TIMEOUT_S = 0.5  # how long `aclose` lets streams say farewell


class TlsConfig(Config, frozen=True, kw_only=True):
    """How this peer listens for TLS, and dials."""

    host: Annotated[
        str,
        msgspec.Meta(description='address to listen on; "" is every address of this machine, "0.0.0.0" those of IPv4'),
    ] = ""
    port: Annotated[
        int,
        msgspec.Meta(
            ge=0, le=65535, description="port to listen on; 0: that of the last start if it is free, else any that is"
        ),
    ] = 0
    advertise: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="further host:port at which others reach this peer, such as a router's forwarded port"
        ),
    ] = ()
    proxy: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^(http://(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5})?\Z",
            description='HTTP proxy for all outgoing connections, "http://host:port"; "": none',
        ),
    ] = ""
    proxy_user: Annotated[str, msgspec.Meta(pattern=r"^[^:\x00-\x1f]*\Z", description="user name for the proxy")] = ""
    proxy_password: Annotated[
        str, msgspec.Meta(pattern=r"^[^\x00-\x1f]*\Z", description="password for the proxy, sent to it unencrypted")
    ] = ""
    handshake_timeout_s: HandshakeS = 10.0
    max_half_open: MaxHalfOpen = 64
    max_half_open_per_ip: MaxHalfOpenPerIp = 16
    bulk_threads: Annotated[
        int, msgspec.Meta(ge=1, le=64, description="threads that encrypt and copy bulk bytes, for all streams together")
    ] = 4

    def __post_init__(self) -> None:
        for number, place in enumerate(self.advertise):
            fault = fault_of(place) or ("it is there twice" if place in self.advertise[:number] else None)
            if fault is not None:
                raise ConfigError(f'tls.advertise: {place[:200]!r}: {fault}. Allowed: "host:port", as others reach it.')


class TlsTransport:
    """The `tls` transport of one peer.

    Args:
        identity: the key that others know this peer by.
        on_drop: told (address, reason) of every incoming connection that proved no key.
        budget: how many of this process's files may be connections.
        last_port: where it listened last, which is tried first where the config names no port; 0: nowhere yet.
    """

    name = SCHEME

    def __init__(
        self,
        identity: Identity,
        config: TlsConfig,
        *,
        on_drop: OnDrop = ignore_drop,
        budget: Budget = Budget(),  # noqa: B008  # frozen
        last_port: int = 0,
    ) -> None:
        self._identity = identity
        self._config = config
        self.last_port = last_port
        self.port = 0  # once it listens
        self._budget = budget
        self._on_drop = on_drop
        proxy = Proxy(config.proxy, config.proxy_user, config.proxy_password)
        self._connect = proxy.connect if config.proxy else tcp.connect
        self._tasks = Tasks()  # listening, and serving what came in
        self._farewells = Tasks()
        gate: Gate[asyncio.Task[None]] = Gate(min(config.max_half_open, budget.newcomers), config.max_half_open_per_ip)
        self._handshakes = Handshakes(self._tasks, gate, config.handshake_timeout_s, on_drop)
        self._streams: dict[TlsStream, None] = {}
        self._client_context = client_context()
        self._in_loop = InLoop()
        self._threads = InThreads(config.bulk_threads)
        self._listener: socket.socket | None = None
        self._is_closed = False

    async def start(self, accept: Accept) -> tuple[str, ...]:
        _check_loop()
        certificate = make_certificate(self._identity)
        context = server_context(self._identity, certificate)
        self._listener = listener = tcp.listen(self._config.host, self._config.port, self.last_port)
        host, port = listener.getsockname()[:2]
        self.port = port
        door = _Door(context, digest(certificate), accept)
        self._tasks.spawn(self._listen(listener, door))
        hosts = [join_address(SCHEME, each, port) for each in reachable_hosts(host)]
        return (*(f"{SCHEME}://{each}" for each in self._config.advertise), *hosts)

    async def dial(self, peer: PeerId, address: str, lane: Lane) -> TlsStream:
        _check_loop()
        if self._is_closed:
            raise DialError(f"cannot dial {address}: this transport is closed")
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                connection = await self._connect(*split_address(SCHEME, address))
                if self._budget.is_taken(connection.fileno(), is_ours=True):
                    connection.close()
                    raise DialError(f"cannot dial {address}: {_FULL}")
                stream = await self._introduce(connection, peer, lane)
        except TimeoutError:
            raise DialError(f"{address} did not answer within {self._config.handshake_timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise DialError(
                f"{address} is not a weft peer, or does not speak version {tls_handshake.PROTOCOL_VERSION} of the "
                f"transport as this software does: {_why(error)}"
            ) from None
        except DialError:
            raise
        except (OSError, ValueError) as error:
            raise DialError(f"{address}: {error}") from None
        self._open(stream, lane)
        if self._is_closed:
            await stream.close()
            raise DialError(f"{address}: this transport was closed meanwhile")
        return stream

    async def aclose(self) -> None:
        self._is_closed = True
        await self._tasks.aclose()
        if self._listener is not None:
            self._listener.close()
        for stream in list(self._streams):
            await stream.close()
        await self._farewells.aclose(grace_s=_CLOSE_TIMEOUT_S)
        self._threads.close()

    async def _introduce(self, connection: socket.socket, peer: PeerId, lane: Lane) -> TlsStream:
        """Do the client's half of the handshake on a fresh TCP connection."""
        try:
            await asyncio.get_running_loop().sock_sendall(connection, tls_handshake.preamble(lane))
            stream = self._wrap(connection, self._client_context, is_server=False)
        except BaseException:
            connection.close()
            raise
        await tls_handshake.introduce(stream, peer, self._identity, lane)
        return stream

    async def _listen(self, listener: socket.socket, door: "_Door") -> None:
        is_turned_away = False
        while True:
            try:
                connection, ip, port = await tcp.accept(listener, LOOK_AWAY_S if is_turned_away else 0.0)
            except OSError as error:
                self._on_drop("", f"cannot take a connection: {error}")
                await asyncio.sleep(_RETRY_ACCEPT_S)
            else:
                await asyncio.sleep(0)  # a crowd that never ends leaves others their turns
                is_turned_away = self._budget.is_taken(connection.fileno(), is_ours=False)
                if is_turned_away:
                    connection.close()
                    self._on_drop(join_address(SCHEME, ip, port), _FULL)
                    continue
                is_turned_away = not self._handshakes.begin(
                    join_address(SCHEME, ip, port),
                    ip,
                    partial(self._verified, connection, ip, door),
                    door.accept,
                    connection.close,  # does nothing once TLS has taken the socket over
                )

    async def _verified(self, connection: socket.socket, ip: str, door: "_Door") -> tuple[TlsStream, Lane]:
        """Do the server's half of the handshake on a fresh TCP connection."""
        try:
            lane = await self._read_preamble(connection)
            stream = self._wrap(connection, door.context, is_server=True)
            stream.source = ip
            await tls_handshake.admit(stream, door.certificate, lane)
        except ssl.SSLEOFError:
            raise PeerError(HUNG_UP) from None
        except ssl.SSLError as error:
            raise PeerError(f"its TLS handshake failed: {_why(error)}") from None
        except (OSError, ValueError) as error:
            if isinstance(error, PeerError):
                raise
            if isinstance(error, ConnectionError):
                raise PeerError(f"{HUNG_UP}: {error.strerror or error}") from None
            raise PeerError(f"its connection broke in the handshake: {error}") from None
        self._open(stream, lane)
        return stream, lane

    async def _read_preamble(self, connection: socket.socket) -> Lane:
        loop = asyncio.get_running_loop()
        first = b""
        while len(first) < tls_handshake.PREAMBLE_NBYTES:
            more = await loop.sock_recv(connection, tls_handshake.PREAMBLE_NBYTES - len(first))
            if not more:
                raise PeerError(f"{HUNG_UP}, after {len(first)} bytes")
            first += more
        try:
            return tls_handshake.read_preamble(first)
        except tls_handshake.NotWeft:
            with suppress(OSError):  # no TLS, so it learns at once that this leads nowhere
                connection.send(tls_handshake.preamble("control"))
            raise

    def _wrap(self, connection: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> TlsStream:
        tls = context.wrap_socket(
            connection, server_side=is_server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        # Half-open streams stay in the loop, where their deadline can end them at any moment.
        return TlsStream(tls, self._in_loop, self._farewells, self._forget)

    def _open(self, stream: TlsStream, lane: Lane) -> None:
        self._streams[stream] = None
        if lane == "bulk":
            stream.set_runner(self._threads)

    def _forget(self, stream: TlsStream) -> None:
        self._streams.pop(stream, None)


class _Door(msgspec.Struct, frozen=True):
    """What the listening side shows and where it leads."""

    context: ssl.SSLContext
    certificate: Digest
    accept: Accept


def _check_loop() -> None:
    if sys.platform == "win32" and not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
        raise NetError("the tls transport needs an event loop that watches sockets: run on asyncio.SelectorEventLoop")


def _why(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in words, less the places in its source."""
    return (error.reason or "TLS failed").replace("_", " ").lower()
