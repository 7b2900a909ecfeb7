"""Equivocation: two notes of one member that contradict each other, noticed in what members sign.

    letters, certificates, notes shown ──► kept for two rounds ──► two that contradict ──► an act strikes the key out

A lie is seldom told to one face: one half of the members hears one proposal, the other half another. So who promises an
attempt to its leader shows it the proposal it had, and the votes it had been given; and what proves a decision is read
as well. An honest run that never changes a leader sends nothing more.

Failure:
- a note that somebody forged, in its own name or another's: it is not kept, and pushes out none that is.
- a member that signs many notes: each has a place by its kind and attempt, those of one place that say less give way,
  and of more than fit it loses those of the latest attempts. So what it signs of attempts that nobody has come to, or
  of other kinds, pushes out nothing that it may contradict.
- the only one that heard one side of a lie is gone: the lie is not proven.
"""

from collections.abc import Callable, Iterable

from weft.errors import WireError
from weft.ids import Attempt, BranchId, PeerId, Round
from weft.keys import verify
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.messages import Shown
from weft.sync.equivocation import binds, equivocation
from weft.sync.records import acts, messages
from weft.sync.round.rules import leader
from weft.wire import Signed, Verify, claimed, unseal

MAX_KEPT = 64  # notes of one kind, member and round: one that comes to more attempts has stood still for hours
MAX_KEPT_NBYTES = acts.MAX_CONTRADICTION_NBYTES // 2  # of one kind, member and round: two of the largest proposals
MAX_SHOWN = 16  # votes of one member, to one leader

Kept = tuple[Signed, messages.RoundNote]
Slot = tuple[str, int, int]  # of a note among those of its signer: kind, attempt, revision


class EvidenceKeeper:
    """Of the chain's present round, the one before it and the one after.

    Args:
        accuse: given what proves a lie.
        verify: `keys.verify`, or what remembers its answers.
    """

    def __init__(
        self, node: Node, chain: Chain, accuse: Callable[[acts.Warrant], None], verify: Verify = verify
    ) -> None:
        self._node = node
        self._chain = chain
        self._accuse = accuse
        self._verify = verify
        self._kept: dict[tuple[BranchId, Round], dict[PeerId, dict[Slot, Kept]]] = {}
        node.on_note(Shown, self._on_shown)

    def begin(self) -> None:
        """A round begins."""
        for place in [place for place in self._kept if not self._is_near(*place)]:
            del self._kept[place]
        base = self._chain.base
        for signer, kept in self._kept.get((base.branch, base.round), {}).items():
            for slot in [slot for slot, (_, note) in kept.items() if not _may_say(base, signer, note.message)]:
                del kept[slot]  # said before it was known who leads

    def wants(self, signed: Signed, note: messages.RoundNote) -> bool:
        """Return whether a note would bind its signer and is not known, should its signature hold."""
        place = note.branch, note.round
        is_of_member = signed.signer in self._chain.base.electorate
        return is_of_member and binds(note.message) and self._is_near(*place) and not self._is_known(signed, place)

    def hear(self, signed: Signed, note: messages.RoundNote) -> None:
        """Keep a note whose signature holds, if it binds its signer, and look whether it contradicts another."""
        if not self.wants(signed, note):
            return
        kept = self._kept.setdefault((note.branch, note.round), {}).setdefault(signed.signer, {})
        for known, other in kept.values():
            if equivocation(other, note) is not None:
                self._accuse(acts.Warrant(letters=(known, signed)))
                return
        base = self._chain.base
        if (note.branch, note.round) == (base.branch, base.round) and not _may_say(base, signed.signer, note.message):
            return
        slot = _slot(note.message)
        if slot not in kept or _promised(kept[slot][1].message) < _promised(note.message):
            kept[slot] = signed, note
            _cut(kept, slot[0])

    def read(self, certificate: messages.Certificate) -> None:
        """Hear what is said to prove a decision; whether it does need not have been checked."""
        place = certificate.manifest.branch, certificate.manifest.round
        if not self._is_near(*place):
            return
        for letter in (*certificate.votes, *certificate.farewells):
            if letter.signer not in self._chain.base.electorate or self._is_known(letter, place):
                continue
            try:
                note = unseal(letter, messages.RoundNote, self._verify)
            except WireError:
                continue
            if (note.branch, note.round) == place:
                self.hear(letter, note)

    def show(self, peer: PeerId, attempt: Attempt) -> None:
        """Show the leader of `attempt` what others said in the attempts before: it may know the other side."""
        for letter in self._to_show(peer, attempt):
            self._node.post(peer, Shown(signed=letter))

    def _to_show(self, to: PeerId, attempt: Attempt) -> Iterable[Signed]:
        base = self._chain.base
        proposals: list[tuple[int, Signed]] = []
        for signer, kept in sorted(self._kept.get((base.branch, base.round), {}).items()):
            votes: list[tuple[int, Signed]] = []
            for letter, note in kept.values() if signer != to else ():
                match note.message:
                    case messages.Propose(attempt=made) if made < attempt:
                        proposals.append((made, letter))
                    case messages.Accept(attempt=made) if made < attempt:
                        votes.append((made, letter))
                    case messages.Goodbye():
                        yield letter
            yield from (letter for _, letter in sorted(votes, key=lambda each: each[0])[-MAX_SHOWN:])
        if proposals:  # one, for it may be large: the newest, which this peer has accepted if any
            yield max(proposals, key=lambda each: each[0])[1]

    def _is_known(self, signed: Signed, place: tuple[BranchId, Round]) -> bool:
        return any(known.body == signed.body for known, _ in self._kept.get(place, {}).get(signed.signer, {}).values())

    def _is_near(self, branch: BranchId, round: Round) -> bool:
        base = self._chain.base
        return branch == base.branch and abs(round - base.round) <= 1

    async def _on_shown(self, _peer: PeerId, shown: Shown) -> None:
        if not self.wants(shown.signed, claimed(shown.signed, messages.RoundNote)):
            return
        note = unseal(shown.signed, messages.RoundNote, self._verify)
        self.hear(shown.signed, note)


def _slot(message: messages.AnyRoundMessage) -> Slot:
    """Return where a note that binds has its place: two in one place contradict each other, or one says all."""
    match message:
        case messages.Accept(attempt=attempt) | messages.Propose(attempt=attempt):
            return type(message).__name__, attempt, 0
        case messages.Collect(attempt=attempt, revision=revision):
            return "Collect", attempt, revision
        case messages.Promise(accepted=vote) if vote is not None:
            return "Promise", vote.attempt, 0
        case _:  # Prepare, Goodbye, and a Promise of who has accepted nothing
            return f"bare {type(message).__name__}", 0, 0


def _promised(message: messages.AnyRoundMessage) -> int:
    """Return by which of two notes in one place more is said: the later promise denies all that the other does."""
    return message.attempt if isinstance(message, messages.Prepare | messages.Promise) else 0


def _may_say(base: messages.Base, signer: PeerId, message: messages.AnyRoundMessage) -> bool:
    """Return whether anybody follows it: plans and proposals are the leader's."""
    return not isinstance(message, messages.Collect | messages.Propose) or leader(base, message.attempt) == signer


def _cut(kept: dict[Slot, Kept], kind: str) -> None:
    """Forget notes of one kind until the rest fits, those of the latest attempts first; one may be of any size."""
    slots = sorted(slot for slot in kept if slot[0] == kind)
    nbytes = sum(len(kept[slot][0].body) for slot in slots)
    while len(slots) > MAX_KEPT or (nbytes > MAX_KEPT_NBYTES and len(slots) > 1):
        nbytes -= len(kept.pop(slots.pop())[0].body)
