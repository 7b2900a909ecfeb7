"""A node whose peer is honest and whose machine is not: some of what it sends is lost, damaged or untrue.

    letters   --drop, lie-->  Node.post          blobs it serves  --drop, corrupt, lie-->  whoever fetches

What is said otherwise is signed with the peer's own key. Where nothing is in force it is a node like any other. Luck is
drawn in the order in which things are sent, so equal plays have equal luck.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from weft.clock import Clock
from weft.data.assign import leases
from weft.events import Emit
from weft.ids import BranchId, Digest, PeerId, Tokens
from weft.net.blobs.blobs import Lookup, inline
from weft.net.link.handshake import Passport
from weft.net.link.rpc import CallHandler, Q
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.net.transport.memory import MemoryTransport
from weft.peer.messages import AuditAnswer, AuditRequest, ChainAnswer, Decision, Handed, Letter, StateOffer
from weft.sim.scenario import Corrupt, Drop, Fault, Lie, audits_how
from weft.sync.records.messages import Manifest, Merged, Promise, Propose, Ready, RoundNote, Stuck, Vote
from weft.wire import Buffer, Signed, decode, digest, seal

CLAIM_TOKENS = Tokens(10**18)
CLAIM_ROUNDS = 10**6
_AHEAD = {"progress", "branch"}
D = TypeVar("D", Drop, Corrupt)
F = TypeVar("F", Heartbeat, Manifest)
# What was lost can be asked for again after so long: where all is lost, nothing can be decided without it.
LOST_S = 30.0


class CrookedNode(Node):
    """A node on a memory transport.

    Args:
        in_force: tells the faults of this machine at the moment.
        luck: decides what of it is struck.
    """

    def __init__(
        self,
        passport: Passport,
        transport: MemoryTransport,
        clock: Clock,
        emit: Emit,
        in_force: Callable[[], Sequence[Fault]],
        luck: np.random.Generator,
    ) -> None:
        super().__init__(passport, [transport], clock, emit, offload=inline)
        self._in_force = in_force
        self._luck = luck
        self._said: tuple[Signed, Letter] | None = None  # the last letter, and what is said in its place
        self._rival: tuple[Signed, Letter] | None = None  # the last proposal, and another one for its place
        self._round: tuple[object, bool] = (None, False)  # whether what this peer brings to it is lost
        self._lost: set[Digest] = set()  # until then
        self._lost_until = 0.0
        self._clock = clock
        self._forged: dict[Digest, bytes] = {}
        self._lookups: list[Lookup] = []
        transport.on_send = self._write

    def post(self, peer: PeerId, record: msgspec.Struct) -> bool:
        if self._in_force() and isinstance(record, Handed):
            return False  # what is lost, damaged or untrue of it is asked for, as `_served` has it
        if self._in_force() and isinstance(record, Letter | Decision):
            note = decode(record.signed.body, RoundNote) if isinstance(record, Letter) else None
            kind = "Decision" if note is None else type(note.message).__name__
            if note is not None and isinstance(note.message, Ready):
                self._bring(note, note.message)
            if self._is_struck(each for each in self._all(Drop, "letters") if not each.kinds or kind in each.kinds):
                return True
            if note is not None and isinstance(record, Letter):
                record = self._in_its_place(record, note, peer)
        if isinstance(record, Heartbeat) and record.manifest is not None:
            record = _further(record, self._lies())
        return super().post(peer, record)

    def serve(self, kind: type[Q], handler: CallHandler[Q]) -> None:
        async def untrue(peer: PeerId, request: Q) -> msgspec.Struct:
            if isinstance(request, AuditRequest) and "deaf" in audits_how(self._in_force()):
                return AuditAnswer(is_ready=False, reason="not yet")
            answer, lies = await handler(peer, request), self._lies()
            if isinstance(answer, ChainAnswer) and lies & _AHEAD:
                return ChainAnswer(certificates=None)  # forgotten, as it says
            if isinstance(answer, StateOffer) and answer.head is not None:
                return msgspec.structs.replace(answer, head=_further(answer.head, lies))
            return answer

        super().serve(kind, untrue)

    def serve_blobs(self, lookup: Lookup, *, is_patient: bool = False) -> None:
        self._lookups.append(lookup)
        super().serve_blobs(lambda peer, wanted: self._served(lookup, peer, wanted), is_patient=is_patient)

    # --- lost and damaged ---

    def _all(self, kind: type[D], what: str) -> Iterator[D]:
        return (fault for fault in self._in_force() if isinstance(fault, kind) and fault.what == what)

    def _is_struck(self, faults: Iterable[Drop | Corrupt]) -> bool:
        return any(self._luck.random() < fault.share for fault in faults)

    def _bring(self, note: RoundNote, ready: Ready) -> None:
        """Decide once for a round whether what this peer brings to it is lost."""
        where = note.branch, note.round
        if self._round[0] != where:
            self._round = where, self._is_struck(self._all(Drop, "payloads"))
            self._lost_until = self._clock.now() + LOST_S
        self._lost = set(ready.parts) if self._round[1] else set()

    def _served(self, lookup: Lookup, peer: PeerId, wanted: Digest) -> Buffer | None:
        if wanted in self._forged:
            return self._forged[wanted]
        if wanted in self._lost and self._clock.now() < self._lost_until:
            return None  # the request is lost as well: this peer does not hear of it
        data = lookup(peer, wanted)
        if data is None:
            return None
        return self._damaged(data) if self._is_struck(self._all(Corrupt, "blobs")) else data

    def _write(self, chunk: bytes) -> bytes:
        return self._damaged(chunk) if self._is_struck(self._all(Corrupt, "bytes")) else chunk

    def _damaged(self, data: Buffer) -> bytes:
        """Return `data` with one bit of it flipped."""
        changed = bytearray(data)
        if changed:
            changed[int(self._luck.integers(len(changed)))] ^= 1 << int(self._luck.integers(8))
        return bytes(changed)

    # --- untrue ---

    def _lies(self) -> set[str]:
        return {fault.about for fault in self._in_force() if isinstance(fault, Lie)}

    def _in_its_place(self, letter: Letter, note: RoundNote, to: PeerId) -> Letter:
        lies = self._lies()
        if not lies:
            return letter
        if "rivals" in lies and isinstance(note.message, Propose) and _hears_another(to, note.message.manifest):
            if self._rival is None or self._rival[0] is not letter.signed:
                other = msgspec.structs.replace(note.message, manifest=_rival(note.message.manifest, self.peer))
                said = msgspec.structs.replace(note, message=other)
                self._rival = letter.signed, Letter(signed=seal(self.passport.identity, said))
            return self._rival[1]
        if self._said is None or self._said[0] is not letter.signed:  # one letter goes to many
            message = self._untrue(note.message, lies)
            said = msgspec.structs.replace(note, message=message)
            identity = self.passport.identity
            self._said = letter.signed, letter if message is note.message else Letter(signed=seal(identity, said))
        return self._said[1]

    def _untrue(self, message: Any, lies: set[str]) -> Any:
        match message:
            case Ready() if "tokens" in lies:
                return msgspec.structs.replace(message, tokens=CLAIM_TOKENS)
            case Merged(result=result) if "results" in lies:
                return msgspec.structs.replace(message, result=self._forge(result))
            case Merged(attempt=attempt, revision=revision, part=part) if "stuck" in lies:
                return Stuck(attempt=attempt, revision=revision, part=part, missing=self.peers[:MAX_MEMBERS])
            case Propose(manifest=manifest) if "proposals" in lies:
                return msgspec.structs.replace(message, manifest=self._nonsense(manifest))
            case Promise(accepted=Vote()) if "votes" in lies:
                return msgspec.structs.replace(message, accepted=None)
            case _:
                return message

    def _forge(self, result: Digest) -> Digest:
        """Serve bytes that decode to no number in the place of a result, and return their digest."""
        found = (look(self.peer, result) for look in self._lookups)
        data = next((data for data in found if data is not None), b"")
        forged = b"\xff" * memoryview(data).nbytes
        self._forged[digest(forged)] = forged
        return digest(forged)

    def _nonsense(self, manifest: Manifest) -> Manifest:
        """Return one of the manifests that would serve a leader, or nobody."""
        mine = self.peer
        first = manifest.contributions[0]
        greedy = msgspec.structs.replace(first, tokens=CLAIM_TOKENS)
        absent = tuple(msgspec.structs.replace(part, result=digest(part.result.encode())) for part in manifest.parts)
        changes: tuple[dict[str, Any], ...] = (
            {"contributions": (greedy, *manifest.contributions[1:])},
            {"committed_tokens": CLAIM_TOKENS},
            {"members": (mine,), "left": tuple(peer for peer in manifest.members if peer != mine)},
            {"leases": tuple(lease for lease in manifest.leases if lease.peer == mine)},
            {"parts": absent},
            {"round": manifest.round + 1},
        )
        return msgspec.structs.replace(manifest, **changes[int(self._luck.integers(len(changes)))])


def _further(told: F, lies: set[str]) -> F:
    """Return a heartbeat or a head that says to be further than it is."""
    if "branch" in lies:
        branch = BranchId(digest(told.branch.encode()))
        return msgspec.structs.replace(told, branch=branch, committed_tokens=CLAIM_TOKENS)
    return msgspec.structs.replace(told, round=told.round + CLAIM_ROUNDS) if "progress" in lies else told


def _hears_another(peer: PeerId, manifest: Manifest) -> bool:
    return peer in manifest.members and manifest.members.index(peer) % 2 == 1


def _rival(manifest: Manifest, leader: PeerId) -> Manifest:
    """Return another manifest that may stand in the place of one: a member is gone, as anybody may be."""
    gone = max(peer for peer in manifest.members if peer != leader)
    stays = [peer != gone for peer in manifest.members]
    leased, cursor = leases(
        manifest.leases[0].start, {each.peer: each.num_windows for each in manifest.leases if each.peer != gone}
    )
    return msgspec.structs.replace(
        manifest,
        members=tuple(peer for peer, does_stay in zip(manifest.members, stays, strict=True) if does_stay),
        uplinks=tuple(size for size, does_stay in zip(manifest.uplinks, stays, strict=True) if does_stay),
        joined=tuple(peer for peer in manifest.joined if peer != gone),
        left=tuple(sorted((*manifest.left, gone))) if gone not in manifest.joined else manifest.left,
        leases=leased,
        cursor=cursor,
    )
