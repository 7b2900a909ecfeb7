"""What a branch that this peer gave up had counted: kept, and brought to the branch that goes on, once.

    BranchOpened ── outer parameters of the last common manifest, to disk (a fork)
    going over   ── fork - outer parameters at the head of the branch, to disk (a legacy)
    each round   ── the lowest key among those that came over brings it in the place of its own work
    counted      ── the charter says so from then on; everybody drops it

Where this peer is of the side that opened no branch, it has no fork: it fetches that vector from those that did.

Failure:
- who brings it dies, or cannot: after `TURN_ROUNDS` the next key brings it as well; a round counts one.
- this process ends: fork and legacy are on disk. Before a checkpoint of the branch that goes on, the next process is in
  the one that was left: it has the fork still, and brings no legacy of what it stands on.
- nobody has the fork any more, or gradients are sent, which are no sums over rounds, or fragments, of which a round has
  one, or members audit each other: `BranchLeft` says what is lost.
- the branch has taken out false work that was counted before it began: it has that in it, and `BranchLeft` says what is
  lost.
- somebody brought a shorter piece of it: `LegacyDropped` says how much was not counted, and `BranchLeft` where this
  peer comes over later.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from jaxtyping import Float32
from msgspec import UNSET, Meta
from torch import Tensor

from weft.errors import CheckpointError, DataError, DiskFull, NetError, NotFinite, PeerError, Refused
from weft.events import BranchLeft, LegacyDropped, Notice
from weft.ids import Digest, PeerId, Round, Tokens
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexDigest, HexPeer
from weft.peer.context import Context
from weft.peer.messages import ForkOffer, ForkRequest
from weft.peer.state.checkpoint import read_vectors, write_vectors
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import OFFER_S, StateClient
from weft.store.chunks import raw
from weft.store.home import RecordFile
from weft.sync.governance import history, legacy_tokens
from weft.sync.merge.method import OUTER
from weft.sync.merge.reduce import EncodedPart, encode_parts, legacy_codec_in, named
from weft.sync.method.choices import LowRankConfig
from weft.sync.records.ancestry import ForkPoint, History, Legacy, fork_point, is_ahead, lacking
from weft.sync.records.charter import Charter
from weft.sync.records.counters import is_mixed
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import Base, Certificate, LegacyProof, Manifest, Ready, next_base
from weft.wire import Buffer, Record, digest_of

TURN_ROUNDS = 4  # for so long each one that came over has its turn before the next
FORK = "fork"  # the vector that is offered
MAX_FORKS = 2  # kept on disk, each as large as the model: the newest
MAX_LEGACIES = 4
MIXED = "part of it is counted there, and the rest cannot be told apart from that"  # why it is lost
COUNTERED = "it has taken out what was counted before the run split, and that is counted once"
MAX_KEPT_NBYTES = 64 << 20  # of what is written about them


class KeptFork(Record, frozen=True, kw_only=True):
    manifest: HexDigest  # the last common one
    members: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)]  # whom it names
    vectors: StateIndex


class KeptLegacy(Record, frozen=True, kw_only=True):
    legacy: Legacy
    proof: LegacyProof
    members: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)]  # of the branch in the end: who brings it
    vectors: StateIndex


class KeptBranches(Record, frozen=True, kw_only=True):
    forks: tuple[KeptFork, ...] = ()
    legacies: tuple[KeptLegacy, ...] = ()


@dataclass(frozen=True)
class Brought:
    kept: KeptLegacy
    payload: tuple[EncodedPart, ...]

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.kept.legacy.tokens)


class Legacies:
    def __init__(self, place: Context, replica: Replica) -> None:
        self._place = place
        self._replica = replica
        self._folder = place.folder.forks
        self.kept = KeptBranches()
        self._file = RecordFile(self._folder / "kept.bin", KeptBranches, MAX_KEPT_NBYTES, self.kept)
        self._since: dict[Legacy, Round] = {}  # a round in which this peer could bring it first
        self._client = StateClient(place.node, place.compute, place.clock)

    def read(self) -> None:
        """Take up what an earlier process has kept; what is damaged is said and forgotten."""
        self.kept = self._file.read()
        if why := self._file.damage:
            text = f"{self._file.path} cannot be read: what this peer's branches had counted is lost: {why}"
            self._place.emit(Notice(text=text))

    # --- on a branch ---

    async def keep_fork(self) -> None:
        """Keep the outer parameters: the head is the last manifest before a branch of this peer's own."""
        head, charter = self._replica.head, self._replica.charter
        if head is None or self._why_none():
            return
        base = next_base(head, charter)

        def write() -> None:
            vectors = self._write(self._replica.outer)
            fork = KeptFork(manifest=base.previous, members=base.electorate, vectors=vectors)
            others = [each for each in self.kept.forks if each.manifest != fork.manifest]
            self._set(forks=(*others, fork)[-MAX_FORKS:])

        try:
            await self._place.compute.serve(write)
        except (DiskFull, DataError) as error:
            text = f"cannot save the parameters of round {head.round}: if this branch is given up, what it counts "
            self._place.emit(Notice(text=f"{text}is lost, unless another of its members saved them: {error}"))

    # --- over to another ---

    async def depart(self, head: Manifest, charter: Charter, proof: Certificate | None) -> None:
        """This peer goes over to the state after `head`: keep what its own branch has and that one lacks.

        Args:
            proof: of the head that it leaves, where that is known.
        """
        mine = self._replica.head
        if mine is None or mine.branch == head.branch:
            return
        here, there = history(mine, self._replica.charter), history(head, charter)
        lacked, found = lacking(here, there), fork_point(here, there)
        tokens, kept = _counted_since(lacked, mine), _counted_since(found, mine)
        if lacked is None or not tokens:
            return
        reason = MIXED if kept < tokens else ""
        if found is not None and kept:
            failure = await self._keep_legacy(found, kept, proof)
            kept, reason = (Tokens(0), failure) if failure else (kept, reason)
        self._place.emit(
            BranchLeft(
                branch=mine.branch,
                round=mine.round,
                into=head.branch,
                since=lacked.fork.round,
                tokens=tokens,
                kept=kept,
                reason=reason,
            )
        )

    async def _keep_legacy(self, found: ForkPoint, tokens: Tokens, proof: Certificate | None) -> str:
        """Write the legacy to disk; return why there is none."""
        mine, charter = self._replica.head, self._replica.charter
        assert mine is not None
        if reason := self._why_none():
            return reason
        if is_mixed(charter, found.fork):
            return COUNTERED
        try:
            fork = await self._fork(found)
            proof = proof or Certificate(attempt=mine.attempt, manifest=mine, votes=(), farewells=())
            shown = LegacyProof(certificate=proof, charter=charter)

            def write() -> None:
                vectors = self._write(self._replica.method.contribution(fork, self._replica.outer))
                legacy = Legacy(stretches=found.stretches, tokens=tokens)
                kept = KeptLegacy(legacy=legacy, proof=shown, members=mine.members, vectors=vectors)
                self._set(legacies=(*self.kept.legacies, kept)[-MAX_LEGACIES:])

            await self._place.compute.serve(write)
        except (DiskFull, DataError, CheckpointError, PeerError, NetError, Refused) as error:
            return str(error)
        return ""

    def _why_none(self) -> str:
        """Return why no legacy can be brought by this method; empty: it can."""
        method = self._replica.config.method
        if self._replica.charter.audits is not UNSET:
            return "nobody can audit what a branch had counted"
        if method.sends_gradient:
            return "gradients do not add up over rounds"
        if method.fragments > 1:
            return "a round takes one fragment, and a branch has counted all of them"
        return "a few directions cannot hold it" if isinstance(method.basis, LowRankConfig) else ""

    async def _fork(self, found: ForkPoint) -> Float32[Tensor, " num"]:
        vector = await self._place.compute.serve(lambda: self.fork(found.fork.manifest))
        return await self._fetch_fork(found.fork.manifest) if vector is None else vector

    async def _fetch_fork(self, manifest: Digest) -> Float32[Tensor, " num"]:
        """
        Raises:
            PeerError: nobody that is linked has kept it, or delivers it.
        """
        node, num = self._place.node, self._replica.outer.numel()
        for peer in sorted(node.peers):
            with suppress(PeerError, NetError, Refused):
                offer = await node.call(peer, ForkRequest(manifest=manifest), ForkOffer, deadline_s=OFFER_S)
                if offer.index is None:
                    continue
                index = await self._client.index(offer.index, [peer])
                if index.shape == {FORK: num}:
                    return await self._pull_fork(index, peer)
        raise PeerError("no linked peer has kept the parameters of the last common round")

    async def _pull_fork(self, index: StateIndex, peer: PeerId) -> Float32[Tensor, " num"]:
        vector = torch.empty(index.shape[FORK])
        room = raw(vector)

        def put(_name: str, start: int, data: Buffer) -> None:
            room[4 * start : 4 * start + len(data)] = data

        await self._client.pull(index, [peer], put)
        return vector

    # --- in the branch that goes on ---

    def due(self, base: Base) -> KeptLegacy | None:
        """Return the legacy that counts, whose turn it is, and this peer's to bring it."""
        me = self._place.node.peer
        for kept in self.kept.legacies:
            if not legacy_tokens(base, _announced(kept)):  # a process before this one went over, and was killed
                continue
            since = self._since.setdefault(kept.legacy, base.round)
            heirs = [peer for peer in kept.members if peer in base.electorate]
            if me in heirs and heirs.index(me) <= (base.round - since) // TURN_ROUNDS:
                return kept
        return None

    async def to_bring(self, base: Base, parts: tuple[range, ...]) -> Brought | None:
        """Return what this peer is to bring to the round in the place of its own work, encoded."""
        kept = self.due(base)
        if kept is None:
            return None

        def encoded() -> tuple[EncodedPart, ...]:
            codec = legacy_codec_in(self._replica.method.choices, base.round)
            return tuple(map(named, encode_parts(codec, self._read(kept.vectors), parts)))

        try:
            return Brought(kept, await self._place.compute.serve(encoded))
        except (CheckpointError, NotFinite) as error:
            self.forget(kept, str(error))
            return None

    def forget(self, kept: KeptLegacy, reason: str) -> None:
        """Say that a legacy cannot be brought, and drop it."""
        branch = kept.proof.certificate.manifest.branch
        self._place.emit(LegacyDropped(branch=branch, tokens=kept.legacy.tokens, reason=reason))
        self._set(legacies=tuple(each for each in self.kept.legacies if each is not kept))

    def follow(self, head: Manifest) -> None:
        """Drop what nobody asks for any more once there is a checkpoint of `head`, or of one after it: legacies that it
        has, and forks that it does not know, or where all are back that stood there."""
        if not (self.kept.legacies or self.kept.forks):
            return
        charter = self._replica.charter
        base, known = next_base(head, charter), history(head, charter)
        for kept in self.kept.legacies:
            if all(known.holds(each) for each in kept.legacy.stretches):
                self._set(legacies=tuple(each for each in self.kept.legacies if each is not kept))
            elif not legacy_tokens(base, _announced(kept)) and not _is_to_come(kept, known):
                self.forget(kept, "others brought another piece of it, or it cannot be told apart from what is counted")
        here, stood = set(base.electorate), {fork.manifest for fork in charter.forks}
        self._set(forks=tuple(e for e in self.kept.forks if e.manifest in stood and not set(e.members) <= here))

    # --- the disk ---

    def fork(self, manifest: Digest) -> Float32[Tensor, " num"] | None:
        """Read the outer parameters after a manifest, if they are kept.

        Raises:
            CheckpointError: they are damaged.
        """
        kept = next((each for each in self.kept.forks if each.manifest == manifest), None)
        return None if kept is None else self._read(kept.vectors)

    def _read(self, vectors: StateIndex) -> Float32[Tensor, " num"]:
        return dict(read_vectors(self._path(vectors), vectors))[OUTER]

    def _write(self, vector: Float32[Tensor, " num"]) -> StateIndex:
        temporary = self._folder / "vector.new"
        vectors = write_vectors(temporary, {OUTER: vector})
        temporary.replace(self._path(vectors))
        return vectors

    def _path(self, vectors: StateIndex) -> Path:
        return self._folder / f"vector-{digest_of(vectors)[:16]}.safetensors"

    def _set(self, **changed: object) -> None:
        """Write down what is kept, then remove the rest."""
        kept = msgspec.structs.replace(self.kept, **changed)
        if kept == self.kept:
            return
        self.kept = kept
        self._file.keep(kept)
        wanted = {*(each.vectors for each in kept.forks), *(each.vectors for each in kept.legacies)}
        files = {self._path(vectors) for vectors in wanted}
        for path in self._folder.glob("vector*"):
            if path not in files:
                path.unlink(missing_ok=True)


def _counted_since(found: ForkPoint | None, head: Manifest) -> Tokens:
    return Tokens(0 if found is None else head.committed_tokens - found.fork.committed_tokens)


def _is_to_come(kept: KeptLegacy, known: History) -> bool:
    """Return whether a legacy is of a branch that left this one later than it has come: a state of before was taken
    over, and what followed is caught up with."""
    proof = kept.proof
    found = fork_point(history(proof.certificate.manifest, proof.charter), known)
    return found is not None and is_ahead(found.fork, known)


def _announced(kept: KeptLegacy) -> Ready:
    return Ready(tokens=kept.legacy.tokens, parts=(), legacy=kept.legacy, proof=kept.proof)
