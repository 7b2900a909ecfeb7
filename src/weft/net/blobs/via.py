"""Reaching a peer through another that reaches both: the transport of the two ends.

    via://<relay>

The relay is a member to which a direct link stands. A bulk stream to it is asked to go on to the peer (`relay` is its
side). Inside that stream the two ends speak TLS 1.3 and prove their keys as over a socket (`tls_handshake`, with lane
and certificate): the relay carries ciphertext, and a relay that puts itself in the place of the other end fails at the
key.

It is no way to be found at: `start` returns no address, and nobody is told one. Who could be a relay is asked anew
whenever no direct way worked.

Failure:
- the relay goes away, or what it passes on falls silent: the stream breaks, and the dialler looks for a way anew.
- it refuses: `DialError` says why.
"""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

from weft.errors import CallFailed, DialError, NetError, PeerError, Refused
from weft.ids import PeerId, short
from weft.keys import Identity
from weft.net.blobs.bulk import Bulk
from weft.net.link.links import VIA
from weft.net.messages import RelayAnswer, Relayed, RelayPlease
from weft.net.transport.base import Accept, Lane, OnDrop, ignore_drop
from weft.net.transport.frame import write_frame
from weft.net.transport.gate import Gate, Handshakes
from weft.net.transport.tls_certificate import client_context, make_certificate, server_context
from weft.net.transport.tls_handshake import admit, introduce
from weft.net.transport.tls_over_stream import InnerStream
from weft.tasks import Tasks
from weft.wire import digest, encode

SCHEME = VIA
ANSWER_S = 7.0  # for the relay, which opens a stream to the peer meanwhile
HANDSHAKE_S = 10.0
MAX_HALF_OPEN = 64
MAX_HALF_OPEN_PER_RELAY = 16
_CLOSE_TIMEOUT_S = 0.5  # how long `aclose` lets streams say farewell

OpenStream = Callable[[PeerId], Awaitable[Bulk]]


def relay_address(relay: PeerId) -> str:
    """Return the address of every peer that `relay` reaches."""
    return f"{SCHEME}://{relay}"


def relay_of(address: str) -> PeerId:
    """Return the relay that an address names.

    Raises:
        ValueError: it names none.
    """
    match = re.fullmatch(rf"{SCHEME}://([0-9a-f]{{64}})", address)
    if match is None:
        raise ValueError(f"{address[:200]!r} does not read {SCHEME}://<key of a peer>")
    return PeerId(match[1])


class ViaTransport:
    """The `via` transport of one peer.

    Args:
        open_stream: opens a bulk stream to a peer to which a direct link stands.
        on_drop: told (address, reason) of every relayed connection that proved no key.
    """

    name = SCHEME

    def __init__(self, identity: Identity, open_stream: OpenStream, on_drop: OnDrop = ignore_drop) -> None:
        self._identity = identity
        self._open_stream = open_stream
        self._tasks = Tasks()
        self._farewells = Tasks()
        gate: Gate[asyncio.Task[None]] = Gate(MAX_HALF_OPEN, MAX_HALF_OPEN_PER_RELAY)
        self._handshakes = Handshakes(self._tasks, gate, HANDSHAKE_S, on_drop)
        self._streams: dict[InnerStream, None] = {}
        self._accept: Accept | None = None
        self._certificate = b""
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None  # server's and client's, once needed

    async def start(self, accept: Accept) -> tuple[str, ...]:
        self._accept = accept
        return ()

    async def dial(self, peer: PeerId, address: str, lane: Lane) -> InnerStream:
        if self._accept is None:
            raise DialError(f"cannot dial {address}: this transport is not running")
        try:
            relay = relay_of(address)
            bulk = await self._open_stream(relay)
        except (PeerError, NetError, Refused, ValueError) as error:
            raise DialError(f"{address[:200]}: {error}") from None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await self._introduce(bulk, peer, lane)
        except TimeoutError:
            raise DialError(f"{short(peer)} did not answer through {short(relay)} within {HANDSHAKE_S:g} s") from None
        except (PeerError, OSError) as error:
            raise DialError(f"through {short(relay)}: {error}") from None

    def take(self, bulk: Bulk, arrival: Relayed) -> None:
        """Take a stream that a relay has opened to this peer for another."""
        if self._accept is None:
            raise PeerError("this peer takes no relayed streams")
        where = f"{SCHEME} {short(bulk.peer)}"
        verify = partial(self._verified, bulk, arrival.lane, where)
        self._handshakes.begin(relay_address(bulk.peer), where, verify, self._accept)

    async def aclose(self) -> None:
        self._accept = None
        await self._tasks.aclose()
        for stream in list(self._streams):
            await stream.close()
        await self._farewells.aclose(grace_s=_CLOSE_TIMEOUT_S)

    async def _introduce(self, bulk: Bulk, peer: PeerId, lane: Lane) -> InnerStream:
        """Ask the relay for `peer`, then do the client's half of the handshake with that."""
        try:
            await write_frame(bulk, encode(RelayPlease(peer=peer, lane=lane)))
            answer: RelayAnswer | None = await bulk.read(RelayAnswer, ANSWER_S, "answer")
            if answer is None:
                raise PeerError("the relay hung up")
            if answer.reason:
                raise CallFailed(answer.reason)
            stream = self._wrap(bulk, is_server=False)
        except BaseException:
            await bulk.close()
            raise
        await introduce(stream, peer, self._identity, lane)
        return stream

    async def _verified(self, bulk: Bulk, lane: Lane, where: str) -> tuple[InnerStream, Lane]:
        """Do the server's half of the handshake on a stream that a relay has opened."""
        stream = self._wrap(bulk, is_server=True)
        stream.source = where
        try:
            await admit(stream, digest(self._certificate), lane)
        except OSError as error:  # of TLS, or of this software
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"its TLS handshake failed: {error}") from None
        return stream, lane

    def _wrap(self, bulk: Bulk, *, is_server: bool) -> InnerStream:
        if self._contexts is None:
            self._certificate = make_certificate(self._identity)
            self._contexts = server_context(self._identity, self._certificate), client_context()
        context = self._contexts[0 if is_server else 1]
        stream = InnerStream(bulk, context, self._farewells, self._forget, is_server=is_server)
        self._streams[stream] = None
        return stream

    def _forget(self, stream: InnerStream) -> None:
        self._streams.pop(stream, None)
