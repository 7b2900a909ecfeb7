"""The members of the present round: this peer as one of them (`Member`), and how all stand (`Quorum`).

    who learns something ──► feed ──► machine ──► what it wants done, to who carries that out (`on_step`)
                             say  ──► signed, to other members

How they stand: who is here, who has a vote, and which attempt each follows. Where a round takes long, members tell each
other (`StandingNote`). From what they tell follows whether this round can be decided at all, and whether the attempt
that this peer follows is one that nobody leads any more.
"""

import math
from collections.abc import Callable, Collection, Iterable

from weft.events import AttemptStarted
from weft.ids import Attempt, BranchId, PeerId, several
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.messages import Decision, Gathered, Letter, StandingNote
from weft.store.journal import Votes
from weft.sync.records.messages import AnyRoundMessage, Base, Collect, RoundNote
from weft.sync.round import round as machine
from weft.sync.round.machine import Input, Noticed, Output, Received, Rerouted, State, Status, TimedOut
from weft.sync.round.rules import Durable, is_quorum, leader, spent_farewells
from weft.tasks import Tasks
from weft.wire import seal

OnStep = Callable[[State, tuple[Output, ...]], None]  # the state before, what is to be done


class Member:
    """Of the round after the chain's head, as long as this peer takes part in it.

    Args:
        tasks: what goes on beside the machine, for as long as this peer is in rounds.
    """

    def __init__(self, context: Context, chain: Chain, tasks: Tasks) -> None:
        self.peer = context.node.peer
        self.chain = chain
        self.tasks = tasks
        self.state: State | None = None  # None: takes no part in the round
        self.is_closed = False  # it takes part in none any more
        self._node = context.node
        self._identity = context.identity
        self._emit = context.emit
        self._on_step: list[OnStep] = []

    def on_step(self, callback: OnStep) -> None:
        """Call `callback(before, outputs)` whenever the machine has heard something."""
        self._on_step.append(callback)

    @property
    def base(self) -> Base:
        return self.chain.base

    @property
    def plan(self) -> Collect | None:
        return None if self.state is None else self.state.plan

    @property
    def leads(self) -> bool:
        return self.state is not None and leader(self.state.base, self.state.attempt) == self.peer

    def begin(self) -> None:
        self.state = machine.begin(self.peer, self.chain.base)

    def resume(self, durable: Durable) -> tuple[Output, ...]:
        """Enter it once more, bound by what was promised in it; return what is to be done."""
        self.state, outputs = machine.resume(self.peer, durable)
        return outputs

    def leave(self) -> None:
        self.state = None

    def end(self) -> None:
        self.leave()
        self._node.exchange(False)

    def close(self) -> None:
        self.is_closed, self.state = True, None

    def feed(self, event: Input) -> None:
        """Let the machine hear something, where this peer takes part in the round."""
        if (before := self.state) is None:
            return
        self.state, outputs = machine.step(before, event)
        self._node.exchange(self.state.plan is not None and len(before.base.electorate) > 1)
        if self.state.attempt != before.attempt:
            self._emit(attempt_started(self.state, event))
        for callback in self._on_step:
            callback(before, outputs)

    def say(self, to: Iterable[PeerId], message: AnyRoundMessage) -> None:
        note = RoundNote(branch=self.base.branch, round=self.base.round, message=message)
        self.post(to, Letter(signed=seal(self._identity, note)))

    def post(self, to: Iterable[PeerId], note: Letter | Decision | Gathered) -> None:
        for peer in to:
            if peer != self.peer:
                self._node.post(peer, note)


_BECAUSE: dict[type[Input], str] = {
    Noticed: "the leader went away, or came back",
    TimedOut: "the try before took too long",
    Received: "others follow it",
}


def attempt_started(state: State, after: Input) -> AttemptStarted:
    """Tell that a member follows another attempt now, since something happened."""
    base = state.base
    return AttemptStarted(
        branch=base.branch,
        round=base.round,
        attempt=state.attempt,
        leader=leader(base, state.attempt),
        reason=_BECAUSE.get(type(after), "the try before cannot be finished"),
    )


# After sleep or a majority lost: others call again within seconds, and the round that they sleep in may end meanwhile.
AROUND_S = 15.0


class Quorum:
    def __init__(self, member: Member, votes: Votes) -> None:
        self.statuses: dict[PeerId, Status] = {}
        self._relayed: frozenset[PeerId] = frozenset()  # who is reached through others
        self.links_electorate = True  # whether this peer keeps links to all who vote
        self._me = member.peer
        self._chain = member.chain
        self._votes = votes
        self._member = member
        self._told: dict[PeerId, StandingNote] = {}
        self._lost_in: Base | None = None
        self._looked_at = 0.0
        self._unsure_at = -math.inf  # who begins to take part has just looked where the others are

    def known(self) -> list[Input]:
        """Return what the machine of a round that begins has to know of the members."""
        notices = [Noticed(peer=peer, status=status) for peer, status in self.statuses.items() if status != "alive"]
        return [Rerouted(relayed=self._relayed), *notices]

    def reroute(self, relayed: frozenset[PeerId]) -> None:
        self._relayed = relayed

    def link_all(self, is_linked: bool) -> None:
        """Take up whether this peer keeps links to all who vote: who has none then is not heard of otherwise."""
        self.links_electorate = is_linked

    def go_to(self, branch: BranchId) -> None:
        """Count nobody in who asked on another branch: it may hold that one's state, and ask there still."""
        if branch != self._chain.head.branch:
            self.statuses = {peer: status for peer, status in self.statuses.items() if status != "joining"}

    def lose_results(self, base: Base) -> None:
        """Nobody delivers the results of what was decided or accepted in this round, and it can have no others."""
        self._lost_in = base

    def find_results(self) -> None:
        """They are here after all."""
        self._lost_in = None

    @property
    def are_results_lost(self) -> bool:
        """Whether the present round cannot be decided because its results are lost."""
        return self._lost_in is not None and self._lost_in == self._chain.base

    def take(self, peer: PeerId, note: StandingNote) -> None:
        if peer in self._chain.base.electorate:
            self._told[peer] = note

    def note(self) -> StandingNote | None:
        """Return what the others should know: that this peer has no vote, or follows a later attempt; and where it
        stands in a round that cannot be decided."""
        base, state = self._chain.base, self._member.state
        attempt = Attempt(0) if state is None else state.attempt
        if self.has_vote and not attempt and self.has_majority():
            return None
        return StandingNote(branch=base.branch, round=base.round, attempt=attempt, has_vote=self.has_vote)

    @property
    def voteless(self) -> frozenset[PeerId]:
        """Who of the electorate has told that it has no vote in the present round: it merges nothing, either."""
        told = ((peer, self._now(peer)) for peer in self._told)
        return frozenset(peer for peer, note in told if note is not None and not note.has_vote)

    def present(self) -> tuple[PeerId, ...]:
        """Return the electorate less those that are gone or have left, ascending."""
        state = self._member.state
        left = () if state is None else state.farewells
        electorate = self._chain.base.electorate  # statuses has everybody: hundreds
        return tuple(peer for peer in electorate if self.statuses.get(peer) != "gone" and peer not in left)

    def heard(self, linked: Collection[PeerId] = ()) -> tuple[PeerId, ...]:
        """Return those present that this peer has heard of since it started, itself included, ascending.

        Args:
            linked: to whom it has a link.
        """
        known = {self._me, *linked, *self.statuses, *self._told}
        return tuple(peer for peer in self.present() if peer in known)

    def here(self) -> tuple[PeerId, ...]:
        """Return the electorate less those that are gone, ascending: who left the round to open a branch is here."""
        return tuple(peer for peer in self._chain.base.electorate if self.statuses.get(peer) != "gone")

    def are_together(self) -> bool:
        """Return whether the whole electorate is here, this peer with it, and all have told that they stand in the
        present round: nobody of them can have decided it."""
        electorate = self._chain.base.electorate
        if self._me not in electorate or self.are_results_lost or self.here() != electorate:
            return False
        return all(peer == self._me or self._now(peer) is not None for peer in electorate)

    @property
    def has_left(self) -> bool:
        """Whether this peer has said its last word in the round."""
        last = self._votes.last
        return last is not None and last.base == self._chain.base and last.has_left

    @property
    def abstains(self) -> bool:
        """Whether this peer is of the electorate and has no vote: it has left, or voted here and forgotten how.

        It forgets where it comes back from a checkpoint that is older than its votes. It follows what the others
        decide, until the chain has reached the last round that it voted in; where they cannot, they branch off.
        """
        base, last = self._chain.base, self._votes.last
        if self._me not in base.electorate:
            return False
        is_remembered = last is not None and last.base == base
        return self.has_left or not (is_remembered or self._votes.may_begin(base))

    @property
    def has_vote(self) -> bool:
        """Whether this peer, if it is of the electorate, can help to decide the round."""
        return not self.abstains and not self.are_results_lost

    def has_majority(self) -> bool:
        """Return whether those not gone can commit. To who is no member: whether any member is left."""
        base, state = self._chain.base, self._member.state
        if self._me not in base.electorate:
            return bool(self.present())
        if self.are_results_lost:
            return False
        left = set() if state is None else set(state.farewells)
        voters = set(self.present()) - self.voteless
        if self.abstains:
            voters -= {self._me}
        if self.has_left:
            left |= {self._me}
        return is_quorum(base, voters, left)

    def sees_majority(self) -> bool:
        """Return whether those not gone can commit, as far as this peer can tell, whether it is one of them or not."""
        base = self._chain.base
        return self.has_majority() if self._me in base.electorate else is_quorum(base, self.present())

    def look(self, now: float, *, has_slept: bool) -> None:
        """Note whether a majority is in sight, and was all the time: to be called again and again."""
        if has_slept or self.abstains or not self.sees_majority():
            self._unsure_at = now
        self._looked_at = now

    @property
    def is_holding(self) -> bool:
        """Whether a majority is in sight, and for long enough to have heard of all that went on where it was not.

        Who has voted on later rounds than it knows holds nothing: they were decided without its memory.
        """
        return self._looked_at - self._unsure_at >= AROUND_S

    def why_undecidable(self, linked: Collection[PeerId] = ()) -> str:
        """Return, for a person, why nothing can be decided; what follows where `has_majority` does not hold.

        Args:
            linked: as of `heard`.
        """
        if self.are_results_lost:
            return "nobody here has the results of the last round"
        if not is_quorum(self._chain.base, self.present()):
            return "the other one is away" if len(self._chain.base.electorate) == 2 else "the others are away"
        num_voteless = len(self.voteless) + self.abstains
        num_away = len(self._chain.base.electorate) - len(self.heard(linked))
        if num_away:
            is_away, them = ("is", "it") if num_away == 1 else ("are", "them")
            who = f"{several(num_away, 'member')} {is_away} away, and this round needs {them}"
            return f"{who}, because others were stopped in the middle of it"
        was = "was" if num_voteless == 1 else "were"
        return f"{several(num_voteless, 'member')} {was} stopped in the middle of this round, so it cannot end"

    def is_attempt_over(self, state: State) -> bool:
        """Return whether nothing is decided in the attempt of `state` any more: its leader is further or has no vote,
        or a quorum is further, or without those who are further there is none."""
        base = state.base
        told = {peer: note for peer in base.electorate if (note := self._now(peer)) is not None}
        ahead = {peer for peer, note in told.items() if note.attempt > state.attempt}
        if leader(base, state.attempt) in ahead | self.voteless or is_quorum(base, ahead, state.farewells):
            return True
        others = set(base.electorate) - ahead - self.voteless - state.gone
        return bool(ahead) and not is_quorum(base, others, spent_farewells(state.farewells, state.attempt))

    def _now(self, peer: PeerId) -> StandingNote | None:
        note, base = self._told.get(peer), self._chain.base
        return note if note is not None and (note.branch, note.round) == (base.branch, base.round) else None
