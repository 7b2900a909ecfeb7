"""Seals of what auditors came to, told to all before a worker shows its own, and opened when the audit is over.

    auditor                   worker                           all members
      SealNote ──────────────────────────────────────────────►  keep the seal
      AuditSealed ──────────►  passes it on: SealNote ────────►  and have it before the worker shows anything
      ◄────────── AuditOpened
      SealOpened ────────────────────────────────────────────►  is it what was sealed (`weft.verify.seals`)?
                                                                in exact numbers: is it what the worker has named?

An auditor that seals one thing and opens another is believed less, as after a false alarm; one that does not open is
looked at more often, as after no answer.

Failure:
- a note is lost: who has not heard a seal checks nothing by it; who has not heard what was opened takes the auditor for
  silent.
- an auditor is killed: started again, it comes to the same, and so to the same seal.
"""

from collections.abc import Callable
from typing import Literal

from weft.errors import WireError
from weft.ids import Digest, PeerId, Round
from weft.keys import verify
from weft.peer.audit.looking import is_named
from weft.peer.context import Context
from weft.peer.messages import NamedState, SealNote, SealOpened
from weft.peer.round.works import Works
from weft.peer.state.replica import Replica
from weft.run.trust import AuditedTrust
from weft.sync.records.messages import Manifest
from weft.verify.seals import Place, Salt, Sealed, Seals, seal_of
from weft.wire import Signed, claimed, digest, seal, unseal

MAX_PASSED_ON = 1024  # seals that are remembered
Broken = Literal["false", "silent"]
TWO = "it has sealed two things of the same training steps"
ANOTHER = "it has opened something else than it had sealed"
UNNAMED = "it says that it was shown a state that nobody has named"
UNEQUAL = "it says that it has found the same, and had sealed something else"
SILENT = "it has not opened what it had sealed"


class Sealing:
    """Of one peer.

    Args:
        on_broken: told which auditor has done what of which work, and why that is so.
    """

    def __init__(
        self, context: Context, replica: Replica, on_broken: Callable[[PeerId, Digest, Broken, str], None]
    ) -> None:
        self._context = context
        self._replica = replica
        self._on_broken = on_broken
        self._works: Works | None = None  # that this peer knows, once it takes part in rounds
        self._seals = Seals()
        self._passed_on = dict[Place, None]()  # oldest first
        self._mine = dict[Place, tuple[Digest, Signed]]()  # that are not opened: what this peer came to first
        context.node.on_note(SealNote, self._on_seal)
        context.node.on_note(SealOpened, self._on_opened)

    def begin(self, works: Works) -> None:
        """Know the works of these rounds."""
        self._works = works

    # --- this peer's own ---

    def tell(self, work: Digest, before: int, state: Digest) -> Signed:
        """Seal a state that this peer came to by training steps from `before` on, tell all, and return the seal."""
        place = self._place(work, before)
        if place not in self._mine:
            run = self._replica.run.run
            sealed = Sealed(run=run, work=work, before=before, seal=seal_of(self._salt(place), state, place.auditor))
            self._mine[place] = state, seal(self._context.identity, sealed)
            self._post(SealNote(letter=self._mine[place][1]))
        return self._mine[place][1]

    def open(self, work: Digest, before: int, after: NamedState | None) -> None:
        """Tell all what this peer has sealed, if it has.

        Args:
            after: what the worker came to, where this peer has found nothing wrong with it.
        """
        place = self._place(work, before)
        if (mine := self._mine.pop(place, None)) is not None:
            self._post(SealOpened(work=work, before=before, state=mine[0], salt=self._salt(place), after=after))

    def _place(self, work: Digest, before: int) -> Place:
        return Place(self._context.node.peer, work, before)

    def _salt(self, place: Place) -> Digest:
        salt = Salt(run=self._replica.run.run, work=place.work, before=place.before)
        return digest(seal(self._context.identity, salt).signature)

    def _post(self, note: SealNote | SealOpened) -> None:
        for peer in sorted(self._context.node.peers):
            self._context.node.post(peer, note)

    # --- others' ---

    def pass_on(self, letter: Signed) -> None:
        """Tell all what an auditor has sealed first: it is about to be shown what this peer came to."""
        self._hear(letter)
        sealed = claimed(letter, Sealed)
        place = Place(letter.signer, Digest(sealed.work), sealed.before)
        if place not in self._passed_on:  # it may ask again and again
            self._passed_on[place] = None
            for forgotten in list(self._passed_on)[:-MAX_PASSED_ON]:
                del self._passed_on[forgotten]
            self._post(SealNote(letter=letter))

    async def _on_seal(self, _peer: PeerId, note: SealNote) -> None:
        self._hear(note.letter)

    def _hear(self, letter: Signed) -> None:
        if letter.signer == self._context.node.peer or letter.signer not in self._members:
            return
        try:
            sealed = claimed(letter, Sealed)
            place = Place(letter.signer, Digest(sealed.work), sealed.before)
            if sealed.run != self._replica.run.run or self._seals.known(place) == sealed.seal:
                return
            unseal(letter, Sealed, verify)
        except WireError:
            return
        if not self._seals.sealed(place, Digest(sealed.seal), *self._now):
            self._on_broken(place.auditor, place.work, "false", ANOTHER if self._seals.is_opened(place) else TWO)

    async def _on_opened(self, peer: PeerId, note: SealOpened) -> None:
        place = Place(peer, Digest(note.work), note.before)
        if peer not in self._members or self._seals.is_over(place):
            return
        if not self._seals.opened(place, Digest(note.state), Digest(note.salt), *self._now):
            self._on_broken(peer, place.work, "false", ANOTHER)
        elif (why := self._fault(note)) is not None:
            self._on_broken(peer, place.work, "false", why)

    def _fault(self, note: SealOpened) -> str | None:
        """Return what is wrong with what an auditor says it has found; None: nothing, or it cannot be told here."""
        trust, audits = self._replica.run.trust, self._replica.charter.audits
        work = None if self._works is None else self._works.known(Digest(note.work))
        if note.after is None or work is None or not audits:
            return None
        if not is_named(Digest(work.trace), work.segments, audits.trace_every, note.before + 1, note.after):
            return UNNAMED
        is_exact = isinstance(trust, AuditedTrust) and trust.is_exact
        return UNEQUAL if is_exact and note.after.state != note.state else None

    def follow(self, manifest: Manifest) -> None:
        """Find out who has not opened what it had sealed, once a round is decided."""
        for place in self._seals.silent(manifest.members, manifest.round, self._context.clock.now()):
            self._on_broken(place.auditor, place.work, "silent", SILENT)

    @property
    def _now(self) -> tuple[Round, float]:
        head = self._replica.head
        assert head is not None, "it has members"
        return head.round, self._context.clock.now()

    @property
    def _members(self) -> tuple[PeerId, ...]:
        head = self._replica.head
        return () if head is None else head.members
