"""Peers over iroh: QUIC with hole punching, for machines behind routers that forward nothing.

    iroh://<peer>?addr=203.0.113.7:4433&addr=[2001:db8::1]:4433&relay=https://relay.example

The endpoint's key is the peer's key, so iroh's own handshake proves both ends. A stream is a connection of its own:
QUIC's congestion control works per connection, and several bring several times the bytes over a lossy path. The
protocol name of a connection (ALPN) says its lane. The side that dials sends one byte, because the other side learns
of a stream only from what is sent on it.

iroh is imported and its sockets are opened in `start`, never before. It finds peers by the addresses in the ticket
alone: no lookup service, and a relay only if the user named it.

Failure:
- a host that vanishes, or a killed process: silence for 30 s (not configurable from Python), then `PeerError`;
  deadlines of the caller are shorter.
- iroh sends one UPnP multicast when it starts; it has no switch for that (docs/network.md).
"""

import asyncio
import ctypes
import importlib
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec

from weft.config import Config
from weft.errors import ConfigError, DialError, NetError, PeerError, PortInUse
from weft.ids import PeerId, short
from weft.keys import Identity
from weft.net.messages import MAX_ADDRESSES
from weft.net.transport.address import host_of, ip_version, reachable_hosts
from weft.net.transport.base import Accept, Lane, OnDrop, ignore_drop
from weft.net.transport.limits import Gate, HandshakeS, Handshakes, MaxHalfOpen, MaxHalfOpenPerIp
from weft.tasks import Tasks
from weft.wire import Buffer

SCHEME = "iroh"
_ALPNS: dict[Lane, bytes] = {"control": b"weft/1/control", "bulk": b"weft/1/bulk"}
_LANES = {alpn: lane for lane, alpn in _ALPNS.items()}
_HELLO = b"\x01"
_RELAY_TIMEOUT_S = 5.0  # how long `start` waits for the user's relay before it goes on without
_CLOSE_TIMEOUT_S = 0.5  # how long `aclose` lets streams say farewell
# iroh copies what it sends and receives in the event loop; larger pieces would delay control frames.
_CHUNK_NBYTES = 256 << 10
# After a farewell the connection stays until its bytes have arrived: closing it drops those under way.
_FAREWELL_TIMEOUT_S = 2.0
_TEST_NBYTES = 1 << 20


class IrohConfig(Config, frozen=True, kw_only=True):
    """How this peer takes part over iroh."""

    hosts: Annotated[
        tuple[str, ...], msgspec.Meta(min_length=1, max_length=2, description="addresses to bind, one per family")
    ] = ("0.0.0.0", "::")
    port: Annotated[
        int,
        msgspec.Meta(ge=0, le=65535, description="UDP port; 0: that of the last start if it is free, else any that is"),
    ] = 0
    relays: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=r"^https?://[!-~]+\Z")], ...],
        msgspec.Meta(max_length=8, description="URLs of relays this peer may use; without any, connections are direct"),
    ] = ()
    dial_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60, description="seconds a dial may take")] = 5.0
    handshake_timeout_s: HandshakeS = 10.0
    max_half_open: MaxHalfOpen = 64
    max_half_open_per_ip: MaxHalfOpenPerIp = 16

    def __post_init__(self) -> None:
        for number, host in enumerate(self.hosts):
            version = ip_version(host)
            if version is None:
                raise ConfigError(
                    f"iroh.hosts: {host[:200]!r} is not an IP address. Allowed: IP addresses, without a port."
                )
            if version in map(ip_version, self.hosts[:number]):
                raise ConfigError(
                    f"iroh.hosts: {host}: there is another of IPv{version}. Allowed: one of each at most."
                )


class IrohStream:
    """The one stream of `connection`; `ends` are its sending and receiving halves.

    Args:
        tasks: where the end of the connection is awaited in the background.
        open_streams: the transport's, from which a closed stream removes itself.
    """

    def __init__(
        self, peer: PeerId, connection: Any, ends: tuple[Any, Any], tasks: Tasks, open_streams: "dict[IrohStream, None]"
    ) -> None:
        self.source = ""
        self.is_here = False  # where its bytes go is not told
        self.peer = peer
        self._connection = connection
        self._writer, self._reader = ends
        self._tasks = tasks
        self._open_streams = open_streams
        self._sending = asyncio.Lock()
        self._is_closed = False
        self._waiting: dict[asyncio.Timeout, None] = {}

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        async with self._sending:
            for start in range(0, len(view), _CHUNK_NBYTES):
                piece = view[start : start + _CHUNK_NBYTES]
                await self._unless_closed(partial(self._write, piece))

    async def recv_into(self, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        data = await self._unless_closed(lambda: self._reader.read(min(len(buffer), _CHUNK_NBYTES)))
        buffer[: len(data)] = data
        return len(data)

    async def _write(self, piece: memoryview) -> None:
        await self._writer.write_all(piece)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._open_streams.pop(self, None)
            for limit in self._waiting:
                limit.reschedule(0.0)  # now
            self._tasks.spawn(self._say_farewell())

    def abort(self) -> None:
        """End the connection without a farewell."""
        self._is_closed = True
        self._open_streams.pop(self, None)
        self._drop(1, b"aborted")

    async def _unless_closed(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await `call`, whose errors become `PeerError`; end it when the stream is closed here meanwhile."""
        if self._is_closed:
            raise PeerError("the stream was closed on this side")
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._waiting[limit] = None
                return await call()
        except TimeoutError:
            raise PeerError("the stream was closed on this side") from None
        except Exception as error:
            if not hasattr(error, "kind"):  # only an IrohError has one
                raise
            raise PeerError(f"the connection broke: {explain(error)}") from None
        finally:
            self._waiting.pop(limit, None)

    async def _say_farewell(self) -> None:
        """Send the orderly end and refuse to read on; wait, for a bounded time, until all has arrived."""
        try:
            async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                await self._writer.finish()
                await self._reader.stop(0)
                await self._writer.stopped()  # or the last byte is acknowledged
        except Exception as error:
            if not isinstance(error, TimeoutError) and not hasattr(error, "kind"):
                raise
        finally:
            self._drop(0, b"")

    def _drop(self, code: int, reason: bytes) -> None:
        self._connection.close(code, reason)
        # An endpoint keeps its port as long as any object of it lives.
        self._connection = self._writer = self._reader = None


class IrohTransport:
    """The `iroh` transport of one peer.

    Args:
        identity: the key that others know this peer by.
        on_drop: told (address, reason) of every incoming connection that proved no key.
        last_port: as of the tls transport, for both families of addresses.
    """

    name = SCHEME

    def __init__(
        self, identity: Identity, config: IrohConfig, *, on_drop: OnDrop = ignore_drop, last_port: int = 0
    ) -> None:
        self._identity = identity
        self._config = config
        self.last_port = last_port
        self.port = 0  # once it listens
        self._tasks = Tasks()
        self._farewells = Tasks()
        gate: Gate[asyncio.Task[None]] = Gate(config.max_half_open, config.max_half_open_per_ip)
        self._handshakes = Handshakes(self._tasks, gate, config.handshake_timeout_s, on_drop)
        self._streams: dict[IrohStream, None] = {}
        self._iroh: Any = None
        self._endpoint: Any = None

    async def start(self, accept: Accept) -> tuple[str, ...]:
        try:
            self._iroh = importlib.import_module("iroh")
        except ImportError as error:
            raise NetError(
                f"iroh does not run on this machine ({error}). weft works here with tls only: set transports = ['tls']."
            ) from None
        mend(self._iroh.iroh_ffi)
        self._endpoint = await self._bind()
        self.port = int(self._endpoint.bound_sockets()[0].rpartition(":")[2])
        self._tasks.spawn(self._listen(accept))
        return (await self._address(),)

    async def dial(self, peer: PeerId, address: str, lane: Lane) -> IrohStream:
        if self._endpoint is None:
            raise DialError(f"cannot dial {address}: the iroh transport is not running")
        try:
            target = self._target(peer, address)
            async with asyncio.timeout(self._config.dial_timeout_s):
                connection = await self._endpoint.connect(target, _ALPNS[lane])
                stream = await self._open(connection, peer)
        except TimeoutError:
            raise DialError(
                f"{short(peer)} did not answer over iroh within {self._config.dial_timeout_s:g} s"
            ) from None
        except self._iroh.IrohError as error:
            raise DialError(f"cannot reach {short(peer)} over iroh: {explain(error)}") from None
        except (ValueError, PeerError) as error:
            raise DialError(f"{address[:200]}: {error}") from None
        if self._endpoint is None:
            stream.abort()
            raise DialError(f"{address}: this transport was closed meanwhile")
        return stream

    async def aclose(self) -> None:
        await self._tasks.aclose()
        for stream in list(self._streams):
            await stream.close()
        await self._farewells.aclose(grace_s=_CLOSE_TIMEOUT_S)
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None  # the port is free once the object is gone
            with suppress(TimeoutError):  # it waits seconds for peers that answer no more
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await endpoint.close()

    async def _bind(self) -> Any:
        """Return an endpoint on the configured addresses; on those of IPv4 alone where there is no IPv6.

        Where no port is asked for, both families get one: that of the last start, or one that is free.
        """
        hosts, asked = self._config.hosts, self._config.port
        v4 = tuple(host for host in hosts if ":" not in host)
        if v4 and v4 != hosts and not _has_ipv6():
            hosts = v4
        for port in (asked,) if asked else _ports_to_try(hosts, self.last_port):
            try:
                return await self._bind_to(hosts, port)
            except self._iroh.IrohError as error:
                failure = explain(error)
        if asked:
            raise PortInUse(
                f"iroh cannot listen on UDP port {asked}: {failure}. Stop the program that holds it, choose another "
                "port, or let weft find one with port 0."
            )
        raise NetError(f"iroh cannot listen on {', '.join(hosts)}: {failure}.")

    async def _bind_to(self, hosts: tuple[str, ...], port: int) -> Any:
        sockets = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

        class Bound(self._iroh.Preset):  # type: ignore[misc,name-defined]  # iroh is not imported before this
            def apply(self, builder: Any) -> None:
                builder.apply_minimal()  # no lookup service
                for each in sockets:  # a family that is not named would be opened on all addresses
                    builder.bind_addr(each)

        modes = self._iroh.RelayMode
        relays = list(self._config.relays)
        options = self._iroh.EndpointOptions(
            preset=Bound(),
            relay_mode=modes.custom_from_urls(relays) if relays else modes.disabled(),
            alpns=list(_LANES),
            secret_key=self._identity.private_key.private_bytes_raw(),
        )
        return await self._iroh.Endpoint.bind(options)

    async def _address(self) -> str:
        found: list[str] = []
        for bound in self._endpoint.bound_sockets():
            host, _, port = bound.rpartition(":")
            hosts = reachable_hosts(host.strip("[]"))
            if host.startswith("["):
                found += [f"[{each}]:{port}" for each in hosts if ":" in each]
            else:
                found += [f"{each}:{port}" for each in hosts]
        query = "&".join(f"addr={each}" for each in found[:MAX_ADDRESSES])
        relay = await self._home_relay()
        return f"{SCHEME}://{self._identity.peer}?{query}" + (f"&relay={quote(relay, safe=':/')}" if relay else "")

    async def _home_relay(self) -> str | None:
        if not self._config.relays:
            return None
        try:
            async with asyncio.timeout(_RELAY_TIMEOUT_S):
                await self._endpoint.online()
        except TimeoutError:
            return None
        relay: str | None = self._endpoint.addr().relay_url()
        return relay

    def _target(self, peer: PeerId, address: str) -> Any:
        """Return what iroh dials. A relay in the address counts only if this peer's user named it too."""
        parts = urlsplit(address)
        if parts.scheme != SCHEME or parts.hostname != peer:
            raise ValueError(f"it is not an iroh address of {short(peer)}")
        options = parse_qsl(parts.query, max_num_fields=MAX_ADDRESSES + 1)
        direct = [value for name, value in options if name == "addr"]
        named = {relay.rstrip("/") for relay in self._config.relays}
        relays = [value for name, value in options if name == "relay" and value.rstrip("/") in named]
        endpoint_id = self._iroh.EndpointId.from_bytes(bytes.fromhex(peer))
        return self._iroh.EndpointAddr(endpoint_id, relays[0] if relays else None, direct)

    async def _open(self, connection: Any, peer: PeerId) -> IrohStream:
        if connection.remote_id().to_bytes().hex() != peer:
            connection.close(1, b"wrong peer")
            raise PeerError(f"another key answers there, not {short(peer)}; nothing was sent")
        connection.set_max_concurrent_bi_streams(0)
        pair = await connection.open_bi()
        writer = pair.send()
        await writer.write_all(_HELLO)
        return self._stream(peer, connection, writer, pair.recv())

    async def _listen(self, accept: Accept) -> None:
        while (incoming := await self._endpoint.accept_next()) is not None:
            source = await incoming.remote_addr()
            ip = host_of(source.addr) if source.is_ip() else "relay"
            address = f"{SCHEME}://{getattr(source, 'addr', 'relay')}"
            self._handshakes.begin(address, ip, partial(self._verified, incoming, ip), accept)

    async def _verified(self, incoming: Any, ip: str) -> tuple[IrohStream, Lane]:
        """Finish the handshake of an incoming connection; wait for its stream."""
        try:
            connection = await (await incoming.accept()).connect()
            try:
                stream, lane = await self._first_stream(connection)
            except BaseException:
                connection.close(1, b"handshake")
                raise
            stream.source = ip
            return stream, lane
        except self._iroh.IrohError as error:
            raise PeerError(f"its handshake failed: {explain(error)}") from None

    async def _first_stream(self, connection: Any) -> tuple[IrohStream, Lane]:
        connection.set_max_concurrent_bi_streams(1)
        connection.set_max_concurrent_uni_streams(0)
        pair = await connection.accept_bi()
        reader = pair.recv()
        hello = await reader.read_exact(len(_HELLO))
        if hello != _HELLO:
            raise PeerError(f"it speaks version {hello[0]} of the transport, this software {_HELLO[0]}")
        peer = PeerId(connection.remote_id().to_bytes().hex())
        return self._stream(peer, connection, pair.send(), reader), _LANES[connection.alpn()]

    def _stream(self, peer: PeerId, connection: Any, writer: Any, reader: Any) -> IrohStream:
        stream = IrohStream(peer, connection, (writer, reader), self._farewells, self._streams)
        self._streams[stream] = None
        return stream


def explain(error: Any) -> str:
    """Return what an `IrohError` says: `str` of it is empty."""
    text = re.sub(r" *\(/[^)]*\)", "", error.message())  # the places in its source
    causes = re.split(r"Caused by:|^\s*\d+:", re.sub(r"\w+(::\w+)+", "", text), flags=re.MULTILINE)
    told = ": ".join(" ".join(cause.split()) for cause in causes if cause.strip())
    if "aborted by peer" in told:
        return "the other side ended the connection"
    return f"{told} ({error.kind().name.lower()})"


def _ports_to_try(hosts: tuple[str, ...], last: int) -> Iterator[int]:
    if last:
        yield last
    yield _free_port(hosts)
    yield 0


def _free_port(hosts: tuple[str, ...]) -> int:
    """Return a UDP port that is free on all of these addresses; 0: none was found. Another program may take it yet."""
    with ExitStack() as stack, suppress(OSError):
        port = 0
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            found = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found.bind((host, port))
            port = found.getsockname()[1]
        return port
    return 0


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


# --- the copy that iroh 1.2.0 makes of every byte it sends, made fast ---


def mend(binding: Any) -> bool:
    """Replace the loop in `binding` (the module `iroh.iroh_ffi`); return whether sending is fast now.

    Its Python binding (uniffi 0.31) lowers `bytes` in a loop over single bytes that holds the interpreter's lock: 139
    CPU-seconds per GB, 4 MB/s. A memmove takes the place of that one function. Nothing is done where the loop is gone
    (uniffi 0.32 has mended it) or the binding looks different, and all is undone should the self-test fail: then iroh
    is slow, not wrong.
    """
    builder: Any = getattr(binding, "_UniffiRustBufferBuilder", None)
    original = getattr(builder, "write", None)
    if original is None or not hasattr(builder, "_reserve"):
        return False
    if not _is_loop(original):
        return True
    builder.write = _write
    if _is_right(builder):
        return True
    builder.write = original
    return False


def _is_loop(function: Any) -> bool:
    return "enumerate" in getattr(getattr(function, "__code__", None), "co_names", ())


def _write(self: Any, value: bytes | bytearray | memoryview) -> None:
    """Append `value` to the buffer that goes to Rust."""
    view = memoryview(value).cast("B")
    if not len(view):
        return
    with self._reserve(len(view)):
        target = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
        if isinstance(value, bytes):
            ctypes.memmove(target, value, len(view))
        elif view.readonly:  # ctypes cannot point into these
            ctypes.memmove(target, view.tobytes(), len(view))
        else:
            ctypes.memmove(target, (ctypes.c_char * len(view)).from_buffer(view), len(view))


def _is_right(builder_type: Any) -> bool:
    """Return whether what goes into the buffer comes out of it, for each kind of bytes."""
    sample = bytes(range(256)) * (_TEST_NBYTES // 256)
    kinds = (b"\x01", sample, bytearray(sample), memoryview(sample), memoryview(bytearray(sample))[3:-3], b"")
    builder = builder_type()
    for kind in kinds:
        builder.write(kind)
    buffer = builder.finalize()
    try:
        return bool(ctypes.string_at(buffer.data, buffer.len) == b"".join(kinds))
    finally:
        buffer.free()
