"""The parameters after an earlier round, for a run that goes back to them: from this disk, or from who has them.

    named     the state after a round, as votes of the next round name it; a peer that was there knows it itself
    kept      what a lease began at, of the last rounds (`weft.peer.audit.trace`): the parameters of the run then
    shown     the list of that state, by its name, and the chunks of the parameters

A member votes for going back once it has them, and only to what it knows as the state after that round. So most have
them before it is decided. Who comes later fetches the state after it.

Failure:
- nobody shows them: this peer does not vote for it, and where others have decided it, fetches their state.
- it knows another state of that round: it does not vote for it, and keeps no such act.
"""

from contextlib import suppress

from torch import Tensor, empty, float32, frombuffer

from weft.errors import CheckpointError, PeerError
from weft.ids import Digest, PeerId, short
from weft.peer.audit.heads import Head, Heads
from weft.peer.audit.trace import Piece, Trace
from weft.peer.context import Context
from weft.peer.state.checkpoint import Place, places
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import StateClient
from weft.sync.merge.method import OUTER
from weft.sync.records import rewinds
from weft.sync.records.acts import Rewind
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, digest_of, encode

MAX_NAMED = rewinds.WITHIN + 2  # states of the last rounds whose lists are shown


class Earlier:
    """Of one peer."""

    def __init__(self, context: Context, replica: Replica, heads: Heads, trace: Trace) -> None:
        self._context = context
        self._replica = replica
        self._heads = heads
        self._trace = trace
        self._client = StateClient(context.node, context.compute, context.clock)
        self._named = dict[Digest, Digest]()  # states of the last rounds, and the manifests that they are after
        self._chunks = dict[Digest, Place]()  # of the parameters whose list was asked for last
        self._found: tuple[Digest, Tensor] | None = None  # what was looked for last, by the name of its state
        for head in heads.newest(MAX_NAMED):
            self.note(head)
        context.node.serve_blobs(self._lookup, is_patient=True)

    def note(self, head: Head) -> None:
        """Note the state after one more round."""
        if (index := head.index) is not None:
            self._named[digest_of(index)] = digest_of(head.manifest)
            for forgotten in list(self._named)[:-MAX_NAMED]:
                del self._named[forgotten]

    def why_not(self, rewind: Rewind) -> str:
        """Return why this peer does not go back so; empty: it does, or it cannot tell."""
        known, head = self._heads.known(Digest(rewind.manifest)), self._replica.head
        mine = None if head is None else self._heads.at(head, rewind.round)
        if mine is not None and (known is None or mine.manifest != known.manifest):
            return f"the run's round {rewind.round} has another manifest"
        if known is not None and known.manifest.round != rewind.round:
            return f"that is no manifest of round {rewind.round}"
        if known is not None and known.index is not None and digest_of(known.index) != rewind.state:
            return f"the state after round {rewind.round} was another"
        return ""

    def is_here(self, rewind: Rewind) -> bool:
        """Return whether this peer has the parameters, and they are those of that round."""
        has_found = self._found is not None and self._found[0] == rewind.state
        return not self.why_not(rewind) and (has_found or self._kept(rewind) is not None)

    def here(self, manifest: Manifest) -> Tensor | None:
        """Return the parameters that a manifest goes back to, from this disk; None: they are not here."""
        rewind = rewinds.decided(manifest)
        piece = None if rewind is None else self._kept(rewind)
        with suppress(CheckpointError):  # it is there no more
            return None if piece is None else piece.outer(self._trace.folder)
        return None

    def _kept(self, rewind: Rewind) -> Piece | None:
        """Return the lease that began at these parameters."""
        head = self._heads.known(Digest(rewind.manifest))
        if head is None or head.index is None or digest_of(head.index) != rewind.state:
            return None
        return self._trace.began_at(head)

    async def find(self, manifest: Manifest) -> Tensor | None:
        """Return the parameters that a manifest goes back to; None: it goes on.

        Raises:
            PeerError: it goes back to what was not so, or nobody shows it.
        """
        rewind = rewinds.decided(manifest)
        if rewind is None:
            return None
        if why := self.why_not(rewind):
            raise PeerError(f"it goes back to what was not so: {why}")
        if self._found is None or self._found[0] != rewind.state:
            vector = await self._context.compute.serve(lambda: self.here(manifest))
            self._found = Digest(rewind.state), await self._fetched(rewind) if vector is None else vector
        return self._found[1]

    def forget(self) -> None:
        """Let go of what was looked for: a round is decided."""
        self._found = None

    async def _fetched(self, rewind: Rewind) -> Tensor:
        donors = sorted(self._context.node.peers)
        index = await self._client.index(Digest(rewind.state), donors)
        if index.shape != {name: vector.numel() for name, vector in self._replica.vectors().items()}:
            raise PeerError(f"what {short(rewind.state)} names is no state of this run")
        found = empty(index.shape[OUTER], dtype=float32)

        def put(_name: str, start: int, data: Buffer) -> None:
            piece = frombuffer(bytearray(data), dtype=float32)
            found[start : start + len(piece)] = piece

        await self._client.pull(index, donors, put, {OUTER})
        return found

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        if (manifest := self._named.get(wanted)) is not None:
            head = self._heads.known(manifest)
            if head is not None and (piece := self._trace.began_at(head)) is not None:
                self._chunks = places(self._trace.folder / piece.start.file, piece.start.index)[piece.outer_index.name]
            return None if head is None or head.index is None else encode(head.index)
        place = self._chunks.get(wanted)
        return None if place is None else place.read()
