"""Keeps what members sign, and notices when one of them signs two notes that contradict each other.

    letters, certificates, notes shown ──► kept for two rounds ──► two that contradict ──► Acts: strike the key out

A lie is seldom told to one face: one half of the members hears one proposal, the other half another. So who promises an
attempt to its leader shows it the proposal it had, and the votes it had been given; and what proves a decision is read
as well. An honest run that never changes a leader sends nothing more.

Failure:
- a note that somebody forged, in its own name or another's: it is not kept, and pushes out none that is.
- a member that signs many notes: its oldest are forgotten.
- the only one that heard one side of a lie is gone: the lie is not proven.

It does not know what makes a contradiction, nor what comes of it.
"""

from collections.abc import Callable, Iterable

from weft.errors import WireError
from weft.ids import BranchId, PeerId, Round
from weft.keys import verify
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.messages import Shown
from weft.sync.acts import MAX_CONTRADICTION_NBYTES, Warrant
from weft.sync.contradiction import binds, contradiction
from weft.sync.messages import Accept, Certificate, Goodbye, Propose, RoundNote
from weft.wire import Signed, unseal

MAX_KEPT = 16  # notes of one member in one round: those of five attempts that it leads or votes in
MAX_KEPT_NBYTES = MAX_CONTRADICTION_NBYTES  # ... and their bytes

Kept = tuple[Signed, RoundNote]


class Witness:
    """Of the chain's present round, the one before it and the one after.

    Args:
        accuse: given what proves a lie.
    """

    def __init__(self, node: Node, chain: Chain, accuse: Callable[[Warrant], None]) -> None:
        self._node = node
        self._chain = chain
        self._accuse = accuse
        self._kept: dict[tuple[BranchId, Round], dict[PeerId, list[Kept]]] = {}
        node.on_note(Shown, self._on_shown)

    def begin(self) -> None:
        """A round begins."""
        for place in [place for place in self._kept if not self._is_near(*place)]:
            del self._kept[place]

    def hear(self, signed: Signed, note: RoundNote) -> None:
        """Keep a note whose signature holds, if it binds its signer, and look whether it contradicts another."""
        is_of_member = signed.signer in self._chain.base.electorate
        if not is_of_member or not binds(note.message) or not self._is_near(note.branch, note.round):
            return
        if self._is_known(signed, (note.branch, note.round)):
            return
        kept = self._kept.setdefault((note.branch, note.round), {}).setdefault(signed.signer, [])
        for known, other in kept:
            if contradiction(other, note) is not None:
                self._accuse(Warrant(letters=(known, signed)))
                return
        kept.append((signed, note))
        while len(kept) > MAX_KEPT or sum(len(known.body) for known, _ in kept) > MAX_KEPT_NBYTES:
            kept.pop(0)

    def read(self, certificate: Certificate) -> None:
        """Hear what is said to prove a decision; whether it does need not have been checked."""
        place = certificate.manifest.branch, certificate.manifest.round
        if not self._is_near(*place):
            return
        for letter in (*certificate.votes, *certificate.farewells):
            if letter.signer not in self._chain.base.electorate or self._is_known(letter, place):
                continue
            if (note := _opened(letter)) is not None and (note.branch, note.round) == place:
                self.hear(letter, note)

    def show(self, peer: PeerId) -> None:
        """Show the leader of a later attempt what others said in the attempts before: it may know the other side."""
        for letter in self._to_show(peer):
            self._node.post(peer, Shown(signed=letter))

    def _to_show(self, to: PeerId) -> Iterable[Signed]:
        base = self._chain.base
        proposals: list[tuple[int, Signed]] = []
        for signer, kept in sorted(self._kept.get((base.branch, base.round), {}).items()):
            for letter, note in kept if signer != to else ():
                if isinstance(note.message, Propose):
                    proposals.append((note.message.attempt, letter))
                elif isinstance(note.message, Accept | Goodbye):
                    yield letter
        if proposals:  # one, for it may be large: the newest, which this peer has accepted if any
            yield max(proposals, key=lambda each: each[0])[1]

    def _is_known(self, signed: Signed, place: tuple[BranchId, Round]) -> bool:
        return any(known.body == signed.body for known, _ in self._kept.get(place, {}).get(signed.signer, ()))

    def _is_near(self, branch: BranchId, round: Round) -> bool:
        base = self._chain.base
        return branch == base.branch and abs(round - base.round) <= 1

    async def _on_shown(self, _peer: PeerId, shown: Shown) -> None:
        note = unseal(shown.signed, RoundNote, verify)
        self.hear(shown.signed, note)


def _opened(letter: Signed) -> RoundNote | None:
    try:
        return unseal(letter, RoundNote, verify)
    except WireError:
        return None
