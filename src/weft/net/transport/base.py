"""What a way of reaching peers must offer: ordered, encrypted bytes to one verified peer.

A `Transport` listens on this machine's addresses and dials those of others. Both ends of a `Stream` have
proven the Ed25519 key behind their `PeerId` before either sees the stream. A stream has a lane: `control`
streams carry small frames both ways at once; `bulk` streams carry one direction at a time, and an
implementation may use blocking sockets in threads for them.

Failure (all implementations):
- the other side vanishes: `send` or `recv_into` raises `PeerError`, at latest when the caller's deadline
  cancels it; a cancelled call leaves the stream unusable, so close it.
- the other side closes in order: `recv_into` returns 0.
- the address leads to another key: `dial` raises `DialError`; no byte of the application was sent.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

from weft.ids import PeerId
from weft.wire import Buffer

Lane = Literal["control", "bulk"]


class Stream(Protocol):
    @property
    def peer(self) -> PeerId:
        """Return the verified key at the other end."""
        ...

    @property
    def source(self) -> str:
        """Return the IP address that an incoming stream comes from, or another name of where; '' if dialled."""
        ...

    @property
    def is_here(self) -> bool:
        """Return whether the other end is on this machine and no bound of a user's is in between: it takes no line."""
        ...

    async def send(self, data: Buffer) -> None:
        """Send all of `data`; returns once the transport has taken it (not once it arrived).

        Tasks that send at the same time take turns: what one call sends stays in one piece.
        """
        ...

    async def recv_into(self, buffer: memoryview) -> int:
        """Receive 1 to len(buffer) bytes; return how many, or 0 at the orderly end."""
        ...

    async def close(self) -> None:
        """End the stream at once. Safe to call twice and while another call waits."""
        ...


Accept = Callable[[Stream, Lane], Coroutine[Any, Any, None]]  # closes the stream should it fail


OnDrop = Callable[[str, str], None]  # told (address, reason) of every incoming connection that proved no key


def ignore_drop(address: str, reason: str) -> None:
    """Tell nobody: the `OnDrop` of a transport that was given none."""


class Transport(Protocol):
    name: str  # "tls", "iroh", "memory": the scheme of its addresses

    async def start(self, accept: Accept) -> tuple[str, ...]:
        """Listen; run `accept` in a task of its own for every verified incoming stream.

        Returns:
            the addresses others may dial, as "scheme://...", best first.

        Raises:
            PortInUse: the configured port is taken.
            NetError: this machine offers no such transport.
        """
        ...

    async def dial(self, peer: PeerId, address: str, lane: Lane) -> Stream:
        """Open a stream to `peer` at `address`.

        Args:
            peer: a key, or the first digits of one (`ids.is_named`), where the transport learns the whole key from who
                answers; the stream says it.

        Raises:
            DialError: nothing answers there, or another key does.
        """
        ...

    async def aclose(self) -> None:
        """Stop listening and close every stream."""
        ...
