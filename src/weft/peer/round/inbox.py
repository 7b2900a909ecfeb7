"""What the members of a round say to this peer, and when its machine hears of it.

    letter ── signature, place ──► claims cut ── payload gathered, results weighed, plan known ──► machine

A letter that its sender did not sign ends the link it came on. One of a round gone by is answered with what was
decided; one of the next round waits for it. What the machine hears it hears in any order, and some of it late.

It does not know what letters decide.
"""

from collections.abc import Callable

from weft.errors import WireError
from weft.ids import PeerId, Round, short
from weft.keys import verify
from weft.peer.chain import Chain
from weft.peer.claims import Claims
from weft.peer.context import Place
from weft.peer.messages import Decision, Letter
from weft.peer.round.early import Early
from weft.peer.round.equivocation import Witness
from weft.peer.round.gather import Gathering
from weft.peer.round.leaps import Leaps
from weft.peer.round.proofs import Proofs
from weft.peer.round.reach import Reach
from weft.peer.round.timers import Timers
from weft.peer.round.validity import Weighing
from weft.sync.records.acts import Warrant
from weft.sync.records.charter import Charter
from weft.sync.records.messages import (
    AnyRoundMessage,
    Base,
    Collect,
    Committed,
    GroupRecord,
    Manifest,
    Propose,
    Ready,
    RoundNote,
    manifest_in,
)
from weft.sync.round.groups import is_true
from weft.sync.round.machine import Noticed, Received, State
from weft.wire import Signed, unseal


class Hearing:
    """Of one peer, round after round.

    Args:
        reach: this peer's machine.
        accuse: given what proves that a member lies.
    """

    def __init__(
        self,
        place: Place,
        chain: Chain,
        weighing: Weighing,
        gathering: Gathering,
        reach: Reach,
        timers: Timers,
        accuse: Callable[[Warrant], None],
    ) -> None:
        self.proofs = Proofs(place.identity, chain)
        self._node = place.node
        self._chain = chain
        self._weighing = weighing
        self._gathering = gathering
        self._feed = reach.feed
        self._state = reach.state
        self.on_record: Callable[[GroupRecord], object] = lambda _record: None
        self._claims = Claims(chain.head, chain.charter, place.emit)
        self._early = Early()
        self._leaps = Leaps(place.clock, timers.progress_s)
        self.witness = Witness(place.node, chain, accuse)

    @property
    def has_quorum(self) -> bool:
        """Whether enough members have announced for the present round to be decided."""
        return self._gathering.has_quorum

    def begin(self) -> Callable[[], None]:
        """A round begins. Return what reads the letters that came before it, to be called once its machine is there."""
        early = self._early.begin()
        self._leaps.begin()
        self.proofs.begin()
        self.witness.begin()
        self._weighing.begin()
        self._gathering.begin()

        def read() -> None:
            for sender, signed, note in early:
                base = self._chain.base
                if (note.branch, note.round) == (base.branch, base.round):
                    self.read(sender, signed, note)

        return read

    def follow(self, manifest: Manifest, charter: Charter) -> None:
        """Take up what a manifest counted and leases."""
        self._claims.follow(manifest, charter)

    def restart(self, head: Manifest, charter: Charter) -> None:
        """Go on from another head."""
        self._claims.restart(head, charter)

    def allowance(self) -> int:
        """Return how many tokens the others will believe that this peer brings for a group."""
        return self._claims.allowance(self._chain.base, self._node.peer)

    def on_letter(self, peer: PeerId, letter: Letter) -> None:
        """Take up what a member says of this round, or keep what it says of the next.

        Raises:
            WireError: the letter is not what its sender signed.
        """
        note = unseal(letter.signed, RoundNote, verify)
        if letter.signed.signer != peer:
            raise WireError(f"{short(peer)} passed on a letter of {short(letter.signed.signer)}")
        base = self._chain.base
        self.witness.hear(letter.signed, note)
        if note.branch != base.branch:
            return
        if note.round < base.round:
            self._tell_decision(peer, note.round)
        elif note.round == base.round + 1:
            self._early.keep_for_next(peer, letter.signed, note, base.electorate)
        elif note.round == base.round:
            self.read(peer, letter.signed, note)

    def read(self, sender: PeerId, signed: Signed, note: RoundNote) -> None:
        """Let the machine hear a letter of this round as soon as it may."""
        message, base, state = note.message, self._chain.base, self._state()
        if state is None or sender not in state.base.electorate:
            return
        # A bare Committed is not believed. A certificate comes as a Decision and goes to `Rounds.follow`, which ends
        # the round as the machine does when it hears Committed: the manifest is the head, nothing of this round is
        # listened to any more, and whoever still asks is told (`_tell_decision`).
        if isinstance(message, Committed):
            return
        if isinstance(message, Collect | Propose) and not self._claims.is_possible(base, sender, message):
            self._feed(Noticed(peer=sender, status="suspected"))  # were it the leader: nobody need wait for the next
            return
        if isinstance(message, Ready):
            if message.group is not None and is_true(base, sender, message.group):
                self.on_record(message.group)
            ready = self._claims.believed(base, sender, message)
            self._gathering.hear(sender, ready, lambda: self._take(sender, signed, ready, base))
            return
        named = manifest_in(message)
        if named is None or not self._weighing.must_weigh(state.base, named):
            self._take(sender, signed, message, base)
            return
        self._weighing.weigh(sender, message, named, lambda: self._take(sender, signed, message, base))

    def plan_came(self, state: State) -> None:
        """Let the machine hear what was said of its plan before it knew that."""
        for told in self._early.of_plan(state.plan) if state.plan is not None else ():
            self._take(*told, state.base)

    def _take(self, sender: PeerId, signed: Signed, message: AnyRoundMessage, base: Base) -> None:
        state = self._state()
        if state is None or state.base != base or self._early.is_kept(state.base, state.plan, sender, signed, message):
            return
        if not self._leaps.may_lead(state, sender, message):
            return
        self.proofs.keep(state, sender, signed, message)
        self._feed(Received(sender=sender, message=message))
        if (after := self._state()) is not None and after.base == state.base:
            self._leaps.note(sender, state.attempt, after.attempt)

    def _tell_decision(self, peer: PeerId, round: Round) -> None:
        for certificate in self._chain.after(Round(round - 1), 1) or ():
            self._node.post(peer, Decision(certificate=certificate))
