"""A part of a peer's network: those that take part in one thing, as if nobody else were linked.

    channel = Channel(node, "stage-2", run)
    channel.met(peer, since)          # a linked peer takes part, since it began to
    channel.parted(peer, "...")       # it does no more, or its link went down
    channel.close()                   # takes and serves nothing more

What is said on a channel is heard by the same channel of others: its calls and notes have its name before theirs.
Links, addresses, blobs and admission are the node's. A process of a peer that leaves a channel and comes back counts as
another one, as a restart does.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from weft.errors import Unreachable
from weft.ids import Digest, PeerId, RunId, short
from weft.net.blobs.blobs import Lookup
from weft.net.link.address_book import Directory
from weft.net.link.links import OnLink
from weft.net.messages import Contact
from weft.net.node import Node
from weft.wire import Buffer


class Channel(Node):
    """
    Args:
        name: of a few characters; the same at all that take part.
        run: whose name is signed where a node's run is.
        since: a number that this process uses once with this name.
    """

    def __init__(self, node: Node, name: str, run: RunId, since: int) -> None:
        # What it shares with the node. It opens nothing, so nothing else of a node is made.
        self._node = node
        self._links, self._dialer, self._book, self._blobs = node._links, node._dialer, node._book, node._blobs
        self._traffic, self._handlers, self._emit = node._traffic, node._handlers, node._emit
        self._posted = None
        self._name = name
        instance = _instance(node.passport.instance, since)
        self.passport = replace(node.passport, run=run, instance=instance, banned=frozenset(), banned_by=set())
        self._here: dict[PeerId, int] = {}  # who takes part and is linked, and since when
        self._dropped: dict[PeerId, int] = {}  # who does so no more, as far as this side is concerned
        self._callbacks: list[OnLink] = []
        self._lookups: list[Lookup] = []
        self._is_open = True
        node.serve_blobs(self._look)

    def _method(self, kind: type[msgspec.Struct]) -> str:
        return f"{self._name}_{kind.__name__}"

    def close(self) -> None:
        """Take and serve nothing more."""
        self._is_open = False
        self._handlers.forget(f"{self._name}_")
        self._lookups.clear()
        self._callbacks.clear()

    # --- who takes part ---

    def met(self, peer: PeerId, since: int) -> None:
        """Note that a peer takes part, to which a link stands."""
        if peer == self.peer or since in (self._here.get(peer), self._dropped.get(peer)) or not self._is_open:
            return
        self.parted(peer, "it has started again")
        self._dropped.pop(peer, None)
        self._here[peer] = since
        self._tell(peer, True, "")

    def parted(self, peer: PeerId, reason: str) -> None:
        """Note that a peer takes part no more, or is linked no more."""
        self._dropped.pop(peer, None)
        if self._here.pop(peer, None) is not None:
            self._tell(peer, False, reason)

    def _tell(self, peer: PeerId, is_up: bool, reason: str) -> None:
        for callback in list(self._callbacks):
            callback(peer, is_up, reason)

    # --- what of a node is of those alone ---

    async def start(self) -> tuple[str, ...]:
        """Do nothing: the node has started."""
        return self.addresses

    async def aclose(self) -> None:
        self.close()

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Return who takes part and is linked."""
        return tuple(self._here)

    def is_linked(self, peer: PeerId) -> bool:
        return peer in self._here

    def instance_of(self, peer: PeerId) -> bytes:
        since = self._here.get(peer)
        return b"" if since is None else _instance(self._node.instance_of(peer), since)

    def on_link(self, callback: OnLink) -> None:
        self._callbacks.append(callback)

    def drop(self, peer: PeerId, reason: str) -> None:
        """Take a peer for gone until it has started again, or its link does; the link stays."""
        since = self._here.get(peer)
        if since is not None:
            self.parted(peer, reason)
            self._dropped[peer] = since

    def known_addresses(self) -> dict[PeerId, tuple[str, ...]]:
        return {peer: addresses for peer, addresses in self._node.known_addresses().items() if peer in self._here}

    async def connect(self, peer: PeerId) -> None:
        """
        Raises:
            Unreachable: it takes no part, or no address leads to it.
        """
        if peer not in self._here:
            raise Unreachable(f"{short(peer)} is not in {self._name} now")
        await self._node.connect(peer)

    def release(self, peer: PeerId) -> None:
        """Do nothing: whom to dial, the node's owner says."""

    def ban(self, peers: Iterable[PeerId]) -> None:
        self.passport.banned = frozenset(peers)
        self._node.ban(self._node.passport.banned | self.passport.banned)

    def introduce(self, is_to_all: bool) -> None:
        """Do nothing: the node tells of contacts."""

    def consult(self, directory: Directory) -> None:
        """Do nothing: the node's address book is enough."""

    def contacts(self) -> tuple[Contact, ...]:
        return self._node.contacts()

    # --- blobs ---

    def serve_blobs(self, lookup: Lookup, *, is_patient: bool = False) -> None:  # noqa: ARG002  # all are urgent
        self._lookups.append(lookup)

    def _look(self, peer: PeerId, digest: Digest) -> Buffer | None:
        for lookup in self._lookups:
            if (found := lookup(peer, digest)) is not None:
                return found
        return None


def _instance(process: bytes, since: int) -> bytes:
    """Return what names a process as long as it takes part."""
    return hashlib.sha256(process + since.to_bytes(8, "big")).digest()[:8]
