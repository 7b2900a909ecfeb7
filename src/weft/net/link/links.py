"""The control connections that stand: at most one to each peer.

`Dialer` and `Listener` hand over connections whose handshake is done; this table runs their sessions, says who came
and went, and counts their bytes.

Failure:
- a peer breaks the protocol: its link is closed, `ConnectionDropped` says why; it may come back. Who does so again and
  again is barred for a while: a link that never lasts costs others more than none.
- the path dies silently: nothing here notices; membership does, and calls `drop`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import PeerError, WireError
from weft.events import ConnectionDropped, Emit, LinkDown, LinkUp
from weft.ids import PeerId, short
from weft.net.link.rpc import Handlers, Session, Traffic
from weft.net.messages import MAX_ENDED_LINKS
from weft.net.transport.base import Stream, Transport
from weft.net.transport.frame import FRAME_S, MAX_FRAME_NBYTES, FrameReader
from weft.tasks import Tasks

VIA = "via"  # the transport through another peer
# Of an elector of the largest run: 63 wards, 31 electors, 8 of the overlay, as many that others keep or twice that, 16
# idle ones (net/membership/membership.py). What is left is for newcomers, who ask one elector after another for a
# place.
MAX_LINKS = 192

MAX_FORMER = 1024  # peers whose lost links are remembered: keys are free to make

MAX_VIOLATIONS = 3  # of one peer within `BARRED_S`: one may be a mishap
BARRED_S = 60.0

OnLink = Callable[[PeerId, bool, str], None]


@dataclass(eq=False, kw_only=True)
class Link:
    """A control connection on which both sides have admitted each other."""

    session: Session
    transport: Transport
    address: str  # the dialled one; empty when the other side dialled
    link_id: bytes
    instance: bytes  # of the remote process
    tried: tuple[str, ...] = ()  # addresses that failed before, and why
    task: "asyncio.Task[None] | None" = None

    @property
    def peer(self) -> PeerId:
        return self.session.peer

    @property
    def is_dialler(self) -> bool:
        return bool(self.address)

    @property
    def is_relayed(self) -> bool:
        """Return whether a third peer passes on what is said here."""
        return self.transport.name == VIA

    @property
    def shown_address(self) -> str:
        return self.address or f"{self.transport.name} (incoming)"


class Links:
    def __init__(self, handlers: Handlers, traffic: Traffic, emit: Emit) -> None:
        self._handlers = handlers
        self._traffic = traffic
        self._emit = emit
        self._standing: dict[PeerId, Link] = {}
        self._ended: dict[PeerId, deque[bytes]] = {}  # who lost one last stands last
        self._violated_at: dict[PeerId, deque[float]] = {}
        self._arrived = asyncio.Event()  # another each time
        self._callbacks: list[OnLink] = []
        self._tasks = Tasks()

    def on_link(self, callback: OnLink) -> None:
        """Call `callback(peer, is_up, reason)` at once whenever a link comes up or goes down."""
        self._callbacks.append(callback)

    def get(self, peer: PeerId) -> Link | None:
        return self._standing.get(peer)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._standing)

    def direct(self) -> tuple[Link, ...]:
        """Return the links that no third peer carries."""
        return tuple(link for link in self._standing.values() if not link.is_relayed)

    @property
    def has_relayed(self) -> bool:
        return any(link.is_relayed for link in self._standing.values())

    def is_full_for(self, peer: PeerId) -> bool:
        return peer not in self._standing and len(self._standing) >= MAX_LINKS

    def may_fetch(self, peer: PeerId) -> bool:
        """Return whether `peer` may open bulk streams: a link to it stands, and it is not barred."""
        return peer in self._standing and not self.is_barred(peer)

    def is_barred(self, peer: PeerId) -> bool:
        """Return whether `peer` has broken the protocol so often just now that no link to it may stand."""
        violated_at = self._violated_at.get(peer)
        if violated_at is None or len(violated_at) < MAX_VIOLATIONS:
            return False
        return self._traffic.now() - violated_at[0] < BARRED_S

    def ended(self, peer: PeerId) -> tuple[bytes, ...]:
        """Return the ids of the last links to `peer` that this side has lost or given up."""
        return tuple(self._ended.get(peer, ()))

    def give_up(self, peer: PeerId, link_id: bytes) -> None:
        """Note that a connection never stood here, though the other side may believe that it does."""
        ended = self._ended.pop(peer, deque(maxlen=MAX_ENDED_LINKS))
        ended.append(link_id)
        if len(self._ended) >= MAX_FORMER:
            del self._ended[next(iter(self._ended))]
        self._ended[peer] = ended

    async def arrival(self, peer: PeerId) -> Link:
        """Wait for a link to `peer`."""
        while (link := self._standing.get(peer)) is None:
            await self._arrived.wait()
        return link

    def session(self, stream: Stream, reader: FrameReader) -> Session:
        traffic = self._traffic[stream.peer]
        reader.admit(MAX_FRAME_NBYTES, FRAME_S, traffic.received)
        return Session(stream, reader, self._handlers, traffic, self._emit)

    def install(self, link: Link) -> None:
        """Let `link` stand, in the place of any before it, and run its session."""
        self.drop(link.peer, "replaced by a newer connection")
        self._standing[link.peer] = link
        self._traffic[link.peer].received(0)
        link.task = self._tasks.spawn(self._carry(link))
        self._emit(
            LinkUp(remote=link.peer, transport=link.transport.name, address=link.shown_address, tried=link.tried)
        )
        self._tell(link.peer, True, "")
        self._arrived.set()
        self._arrived = asyncio.Event()

    def drop(self, peer: PeerId, reason: str) -> None:
        """Close the link to `peer`, if there is one; calls under way on it fail."""
        link = self._standing.get(peer)
        if link is not None:
            self._finish(link, reason)
            link.session.stop()

    def violation(self, link: Link, reason: str) -> None:
        """Close `link` because its peer broke the protocol, and say so."""
        self._note_violation(link, reason)
        if self._standing.get(link.peer) is link:
            self.drop(link.peer, reason)

    async def aclose(self) -> None:
        running = [link.task for link in self._standing.values() if link.task is not None]
        for peer in self.peers():
            self.drop(peer, "this peer stops")
        await asyncio.gather(*running, return_exceptions=True)
        await self._tasks.aclose()

    async def _carry(self, link: Link) -> None:
        reason = f"{short(link.peer)} is gone"
        try:
            await link.session.run()
        except WireError as error:
            reason = str(error)
            self._note_violation(link, reason)
        except PeerError as error:
            reason = str(error)
        finally:
            self._finish(link, reason)

    def _note_violation(self, link: Link, reason: str) -> None:
        now = self._traffic.now()
        self._violated_at = {peer: at for peer, at in self._violated_at.items() if now - at[-1] < BARRED_S}
        self._violated_at.setdefault(link.peer, deque(maxlen=MAX_VIOLATIONS)).append(now)
        self._emit(ConnectionDropped(address=link.shown_address, remote=link.peer, reason=reason))

    def _finish(self, link: Link, reason: str) -> None:
        if self._standing.get(link.peer) is not link:
            return
        del self._standing[link.peer]
        self.give_up(link.peer, link.link_id)
        self._emit(LinkDown(remote=link.peer, reason=reason))
        self._tell(link.peer, False, reason)

    def _tell(self, peer: PeerId, is_up: bool, reason: str) -> None:
        for callback in list(self._callbacks):
            callback(peer, is_up, reason)
