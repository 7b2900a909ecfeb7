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
import importlib
import re
import socket
from contextlib import suppress
from functools import partial
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec

from weft.config import Config
from weft.errors import DialError, NetError, PeerError, PortInUse
from weft.ids import PeerId, short
from weft.keys import Identity
from weft.net.messages import MAX_ADDRESSES
from weft.net.transport.address import host_of, reachable_hosts
from weft.net.transport.base import Accept, Lane, OnDrop, ignore_drop
from weft.net.transport.gate import Gate, Handshakes
from weft.net.transport.iroh_patch import IrohStream, mend
from weft.tasks import Tasks

SCHEME = "iroh"
_ALPNS: dict[Lane, bytes] = {"control": b"weft/1/control", "bulk": b"weft/1/bulk"}
_LANES = {alpn: lane for lane, alpn in _ALPNS.items()}
_HELLO = b"\x01"
_RELAY_TIMEOUT_S = 5.0  # how long `start` waits for the user's relay before it goes on without
_CLOSE_TIMEOUT_S = 0.5  # how long `aclose` lets streams say farewell


class IrohConfig(Config, frozen=True, kw_only=True):
    """How this peer takes part over iroh."""

    hosts: Annotated[
        tuple[str, ...], msgspec.Meta(min_length=1, max_length=2, description="addresses to bind, one per family")
    ] = ("0.0.0.0", "::")
    port: Annotated[int, msgspec.Meta(ge=0, le=65535, description="UDP port; 0 lets the system choose")] = 0
    relays: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=r"^https?://[!-~]+\Z")], ...],
        msgspec.Meta(max_length=8, description="URLs of relays this peer may use; without any, connections are direct"),
    ] = ()
    dial_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60, description="seconds a dial may take")] = 5.0
    handshake_timeout_s: Annotated[
        float, msgspec.Meta(gt=0, le=60, description="seconds a connection has to prove its key")
    ] = 10.0
    max_half_open: Annotated[
        int, msgspec.Meta(ge=1, le=4096, description="connections that have proven no key yet, over all")
    ] = 64
    max_half_open_per_ip: Annotated[
        int, msgspec.Meta(ge=1, le=4096, description="the same from one address; loopback is exempt")
    ] = 16


class IrohTransport:
    """The `iroh` transport of one peer.

    Args:
        identity: the key that others know this peer by.
        on_drop: told (address, reason) of every incoming connection that proved no key.
    """

    name = SCHEME

    def __init__(self, identity: Identity, config: IrohConfig, *, on_drop: OnDrop = ignore_drop) -> None:
        self._identity = identity
        self._config = config
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
                f"iroh does not run on this machine ({error}). weft works here on tls alone: set transports = ['tls']."
            ) from None
        mend(self._iroh.iroh_ffi)
        self._endpoint = await self._bind()
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
        """Return an endpoint on the configured addresses; on those of IPv4 alone where there is no IPv6."""
        hosts = self._config.hosts
        try:
            return await self._bind_to(hosts)
        except self._iroh.IrohError as error:
            v4 = tuple(host for host in hosts if ":" not in host)
            if v4 and v4 != hosts and not _has_ipv6():
                return await self._bind_to(v4)
            if self._config.port:
                raise PortInUse(
                    f"iroh cannot listen on UDP port {self._config.port}: {explain(error)}. Stop the program that "
                    f"holds it, choose another port, or let the system choose with port 0."
                ) from None
            raise NetError(f"iroh cannot listen on {', '.join(hosts)}: {explain(error)}.") from None

    async def _bind_to(self, hosts: tuple[str, ...]) -> Any:
        sockets = [f"[{host}]:{self._config.port}" if ":" in host else f"{host}:{self._config.port}" for host in hosts]

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
            raise ValueError(f"it is no iroh address of {short(peer)}")
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
    return f"{' '.join(text.split())} ({error.kind().name.lower()})"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
