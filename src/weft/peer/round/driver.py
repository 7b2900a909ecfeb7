"""Runs the round machine of `sync.round` on a node: signs, sends, writes, fetches, merges, times.

    rounds = RoundDriver(...)
    rounds.begin()                          # the round after the chain's head
    rounds.announce(tokens, parts)          # this peer's encoded payload
    decided = await rounds.decided.get()    # each commit, in order, whoever contributed

Decisions are the machine's; this file carries them out in the order given. What must survive a crash is on disk before
anything that depends on it is sent. What is fetched and merged is the part of `payloads` and `merge`.

Failure:
- a contributor that cannot deliver, or delivers what is no payload: the owner says so and the leader plans without it.
- an owner that vanishes before its result is out, or whose result is no payload: the leader gives the part to another.
- a leader that vanishes: the next attempt's leader takes over when the progress timer runs out, or at once when
  membership says so.
- this peer crashes: in the same round it is bound by what its disk says it promised.
- the disk fails: `on_failure` is told, and nothing that depends on the write is sent.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import assert_never

from msgspec import UNSET
from msgspec.structs import replace

from weft.errors import DataError, DiskFull, PeerError
from weft.ids import Attempt, Digest, PeerId, Tokens
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.messages import Decision, Letter
from weft.peer.round.acts import Earlier, PendingActs, letters_file, lies_file
from weft.peer.round.gather import Gather
from weft.peer.round.inbox import Inbox, Validity
from weft.peer.round.members import Member, Quorum
from weft.peer.round.merge import RoundMerger
from weft.peer.round.payloads import Payloads, Wanted
from weft.peer.round.timers import RoundTimes, Timers
from weft.peer.round.works import Works
from weft.peer.state.legacies import KeptLegacy
from weft.store.journal import Votes
from weft.sync.governance import accused, charter_after, clears, legacy_tokens
from weft.sync.merge.method import Scope
from weft.sync.merge.reduce import EncodedPart
from weft.sync.records import messages, quarantine
from weft.sync.records.charter import Charter
from weft.sync.round import machine
from weft.sync.round.machine import Fate, State, Status
from weft.sync.round.neighbours import takes_from
from weft.sync.round.rules import Durable
from weft.tasks import Tasks
from weft.wire import Buffer, Signed

MAX_EARLY = 256  # letters kept while this peer still fetches the state
MAX_GIVEN_UP = 16  # attempts at once: who was alone for a day is caught up with in a minute


PAUSED = "it is paused"
RESTING = "it was not drawn for this round"
AT_WORK = "it was still at its training steps"
LIED = "it was found to lie"
WAITS = "it is new: what it brings counts once others have done some of its training steps again"


@dataclass(frozen=True)
class Decided:
    """A commit as this peer saw it.

    Args:
        left_out: members of the electorate that it does not count, and why, as far as this peer knows.
        fate: of what this peer brought, where it is not counted.
        taken: what it counts of this peer's neighbours in a gossip round; None: it is not here.
        weights: of these neighbours.
    """

    manifest: messages.Manifest
    left_out: dict[PeerId, str]
    fate: Fate = "late"
    taken: Mapping[PeerId, Buffer | None] = field(default_factory=dict)
    weights: Mapping[PeerId, float] = field(default_factory=dict)


def left_out(
    base: messages.Base, manifest: messages.Manifest, state: State | None, statuses: Mapping[PeerId, Status]
) -> dict[PeerId, str]:
    """Return the members of the electorate that `manifest` does not count, and why.

    Args:
        state: of this peer's machine in the round that the manifest decides; None where it took no part.
    """
    counted = {each.peer for each in manifest.contributions}
    reasons = {peer: _why(base, peer, state, statuses) for peer in base.electorate if peer not in counted}
    lies = {peer: LIED for warrant in manifest.acts if (peer := accused(warrant)) in reasons}
    return {**reasons, **lies}


def _why(base: messages.Base, peer: PeerId, state: State | None, statuses: Mapping[PeerId, Status]) -> str:
    status = statuses.get(peer)
    if state is not None and peer in state.farewells:
        return "it said goodbye"
    if status in ("gone", "suspected"):
        return "it was gone" if status == "gone" else "it was silent"
    if state is not None and peer in state.unusable:
        return "its update could not be fetched or was not valid"
    if quarantine.of(base.charter, peer) is not None and state is not None and peer in state.ready:
        return WAITS
    if peer in base.newcomers:
        return "it has just joined or come back, and nobody waits for it in its first round"
    if peer in base.resting:
        return RESTING
    if state is not None and peer in state.ready:
        return "it was ready too late for the round, or its update could not be fetched"
    if state is not None and peer in state.passing:
        return PAUSED
    return "it was not ready in time" if base.charter.settings.method.wait == "all" else AT_WORK


class RoundDriver:
    """The present round of one branch, as one of its members.

    Args:
        chain: its head is what the first round follows on.
        scope: tells which numbers a round synchronises.
        on_failure: told of an error that this peer cannot go on with.
    """

    def __init__(self, context: Context, chain: Chain, scope: Scope, on_failure: Callable[[Exception], None]) -> None:
        self.chain = chain
        self.decided: asyncio.Queue[Decided | None] = asyncio.Queue()  # None: look again whether this peer is a member
        self.parts = Payloads(context, chain, scope)
        self._on_failure = on_failure
        self._votes = Votes(context.folder.durable)
        self._on_decided: list[Callable[[messages.Certificate], None]] = []
        self._tasks = Tasks(on_failure)
        self._member = Member(context, chain, self._tasks)
        self._member.on_step(self._stepped)
        self.quorum = Quorum(self._member, self._votes)
        self.timers = Timers(context.clock, self._expire)
        self._memory = RoundTimes(
            context.folder.measured, context.clock.now, is_on=context.settings.checkpoint_every_s > 0
        )
        self._prefetching = asyncio.Lock()
        letters, lies = letters_file(context.folder.awaiting), lies_file(context.folder.lies)
        self.acts = PendingActs(context.node, chain, context.emit, letters, lies, self._move)
        self._gather = Gather(context, self._member, self.parts, self.timers)
        self.merger = RoundMerger(context, chain, self.parts, self._gather, scope)
        self.works = Works(context.node, chain)
        self._validity = Validity(self._member, self.merger, self.works, self.quorum, context.emit)
        self.inbox = Inbox(
            context, self._member, self._validity, self.works, self._gather, self.timers, self.acts.accuse
        )
        self._state_named: machine.StateNamed | None = None
        self._recalled = frozenset[PeerId]()
        self.speeds: dict[PeerId, float] = {}  # samples or tokens per second, of whom they are known

    def on_decided(self, callback: Callable[[messages.Certificate], None]) -> None:
        """Call `callback(certificate)` at once for each round that is decided."""
        self._on_decided.append(callback)

    def go_back_by(self, earlier: Earlier) -> None:
        """Go back to earlier rounds where `earlier` has what the parameters were then."""
        self._validity.find_earlier_by(earlier.find)
        self.acts.go_back_by(earlier)

    # --- what the peer does ---

    @property
    def is_member(self) -> bool:
        return self._state is not None

    @property
    def ranges(self) -> tuple[range, ...]:
        """Return how a payload is cut for the present round."""
        return self.parts.cut(self.chain.base)

    def recall(self) -> Durable | None:
        """Read what this peer promised before it was started, which binds it, what waited then, and how long rounds
        took; return the first.

        Raises:
            CheckpointError: the file is damaged.
        """
        self.acts.recall()
        self.timers.recall(self._memory.read())
        return self._votes.read()

    def begin(self) -> None:
        """Enter the round after the chain's head, where this peer is in its electorate and may vote."""
        self.timers.begin()
        base = self.chain.base
        self._member.end()
        early = self.inbox.begin()
        if self._member.peer not in base.electorate or self._member.is_closed or not self.quorum.has_vote:
            return
        outputs: tuple[machine.Output, ...] = ()
        last = self._votes.last
        if last is not None and last.base == base:
            outputs = self._member.resume(last)
            if last.accepted is not None:
                self._validity.recover(last.accepted.manifest)
        else:
            self._member.begin()
        self._move()
        self.measure(self.speeds)
        if self._state_named is not None:
            self._member.feed(self._state_named)
        self._member.feed(machine.Recalled(peers=self._recalled))
        self._carry_out(outputs)
        # What it led is forgotten, and nobody else leads it.
        if self._state is not None and outputs and self._member.leads and len(base.electorate) > 1:
            self._expire("progress", self._state.attempt)
        for known in self.quorum.known():
            self._member.feed(known)
        self.inbox.read(early)

    def announce(
        self,
        tokens: Tokens,
        parts: Sequence[EncodedPart],
        kept: KeptLegacy | None = None,
        group: messages.GroupRecord | None = None,
        work: Signed | None = None,
    ) -> tuple[Digest, ...]:
        """Offer a payload to the present round; return its parts' digests.

        Args:
            kept: the legacy that it is, where it is not this peer's own work.
            group: whose mean it is, where it is not this peer's alone.
            work: how this peer came to it, where that is audited.
        """
        if work is not None:
            self.works.keep(work)
        digests = self.parts.offer(parts)
        self.parts.hand_out()
        self.timers.note_announced()
        legacy, proof = (None, None) if kept is None else (kept.legacy, kept.proof)
        ready = messages.Ready(
            tokens=tokens, parts=digests, group=group, legacy=legacy, proof=proof, work=UNSET if work is None else work
        )
        believed = ready
        if legacy is not None:  # where this peer leads, it takes itself at its word no more than others do
            tokens = legacy_tokens(self.chain.base, ready)
            believed = replace(ready, tokens=tokens, legacy=replace(legacy, tokens=tokens))
        self._gather.announce(ready, machine.Trained(ready=believed))
        return digests

    def pass_on(self) -> None:
        """Bring nothing to the present round: this peer is paused."""
        self._member.feed(machine.Paused())

    def notice(self, peer: PeerId, status: Status) -> None:
        """Take up what membership says of a peer, for this round and the next."""
        electorate = self.chain.base.electorate
        if status == "joining" and (peer in electorate or peer in self.chain.charter.banned):
            return
        self.quorum.statuses[peer] = status
        self.parts.notice(peer, status)
        self._member.feed(machine.Noticed(peer=peer, status=status))

    def reroute(self, relayed: frozenset[PeerId]) -> None:
        """Take up who is reached through others: what they would merge for all passes a relay twice."""
        self.quorum.reroute(relayed)
        self._member.feed(machine.Rerouted(relayed=relayed))

    def measure(self, speeds: dict[PeerId, float]) -> None:
        """Take up how fast members train (positive, finite, in one unit): what they are leased next depends on it."""
        self.speeds = speeds
        self._member.feed(machine.Measured(speeds=speeds, uplinks=self.parts.rates.known(), seen=self.timers.seen))

    def name_state(self, previous: Digest, name: Digest) -> None:
        """Take up what the replicated vectors are called that this peer has after a manifest."""
        found = machine.StateNamed(previous=previous, name=name)
        if found != self._state_named:
            self._state_named = found
            self._member.feed(found)

    def recall_false(self, recalled: frozenset[PeerId]) -> None:
        """Take up whose false work this peer knows well enough to take it out: where it leads, it plans what is due."""
        if recalled != self._recalled:
            self._recalled = recalled
            self._member.feed(machine.Recalled(peers=recalled))

    @property
    def is_hurried(self) -> bool:
        """Whether this peer should make no further inner step before it announces what it has.

        The round is decided without it, or a quorum is ready and half of the time is over that is left for the others.
        Where all are leased the same, they wait for each other's whole leases.
        """
        charter = self.chain.charter
        if charter.settings.method.wait == "ready":  # what was decided is taken up between two calls
            return not self.decided.empty()
        if charter.has_even_leases:
            return False
        return not self.decided.empty() or self.timers.is_grace_half_over

    @property
    def is_outrun(self) -> bool:
        """Whether what this peer makes for its round comes too late: it takes no part, or several decisions wait."""
        return not self.is_member or self.decided.qsize() > 1

    def keep_up(self) -> None:
        """Wait for nobody that has no vote, and give up attempts that nobody leads any more: the others' timers ran out
        before this peer's.

        Some, each time that it is called: how far others are is their word, and each one led is written to disk.
        """
        if self._state is not None:
            for peer in sorted(self.quorum.voteless - self._state.suspected):
                self._member.feed(machine.Noticed(peer=peer, status="suspected"))
        for _ in range(MAX_GIVEN_UP):
            if (state := self._state) is None or not self.quorum.is_attempt_over(state):
                return
            self._expire("progress", state.attempt)
            if self._state is not None and self._state.attempt == state.attempt:
                return  # it is decided, or this peer has left

    def leave(self) -> None:
        """Say the final word of this round's member."""
        self._member.feed(machine.Leave())

    def take_leave_again(self) -> None:
        """Say the final word once more, where it was this round's: who missed or forgot it waits without end."""
        last = self._votes.last
        if self.quorum.has_left and last is not None:
            goodbye = messages.Goodbye(promised=last.promised, accepted=last.accepted)
            self._member.say(self.chain.base.electorate, goodbye)

    def follow(self, certificate: messages.Certificate) -> bool:
        """Take over a decision that was made elsewhere; return whether it follows on the head and can be made here."""
        self.inbox.evidence.read(certificate)
        if certificate.manifest.round != self.chain.base.round or not self.chain.proven(
            certificate, self.inbox.signatures.verify
        ):
            return False
        if self.quorum.are_results_lost and not self.parts.has_results(certificate.manifest):
            return False
        self._decide(certificate)
        return True

    def restart(self, head: messages.Manifest, charter: Charter, without: messages.Manifest | None = None) -> None:
        """Go on from a head whose state this peer has taken over; what is decided and not yet applied is in it.

        Args:
            charter: what holds after `head`.
            without: a decision whose results nobody delivers: until they are found, its round has no outcome.
        """
        while not self.decided.empty():
            self.decided.get_nowait()
        self._restart(head, charter)
        if without is not None and without.previous == self.chain.base.previous:
            self.quorum.lose_results(self.chain.base)
            self._validity.recover(without)
        self.begin()

    def branch_off(self, opening: messages.Manifest) -> None:
        """Go on in a branch that begins after the head."""
        self._restart(opening, charter_after(self.chain.base, opening))
        self.decided.put_nowait(Decided(opening, {}))
        self.begin()

    def _restart(self, head: messages.Manifest, charter: Charter) -> None:
        self._state_named = None
        self.quorum.go_to(head.branch)
        self.chain.restart(head, charter)
        self.inbox.claims.restart(head, charter)
        self.works.restart()
        self.acts.follow(head)

    def give_up(self) -> None:
        """Take no part in a round that the others have long left behind."""
        self.timers.stop()
        self._member.leave()
        self.decided.put_nowait(None)

    def close(self) -> None:
        """Decide nothing more; what is known can still be asked for."""
        self.timers.stop()
        self._member.close()

    async def aclose(self) -> None:
        self.close()
        await self._tasks.aclose()
        self._votes.close()

    # --- what others say ---

    def hear(self, peer: PeerId, said: Letter | Decision) -> None:
        """Take up a letter, or take over a decision, if it follows on the head and its proof holds.

        Raises:
            WireError: the letter is not what its sender signed.
        """
        if isinstance(said, Letter):
            self.inbox.on_letter(peer, said)
        elif said.certificate.manifest.branch == self.chain.base.branch:
            self.follow(said.certificate)

    # --- what the machine wants done ---

    @property
    def _state(self) -> State | None:
        return self._member.state

    @property
    def told(self) -> tuple[messages.Collect | None, Mapping[int, Digest]]:
        """Return the plan of the present round that this peer follows, and what each owner has said of its part."""
        return (None, {}) if self._state is None else (self._state.plan, self._state.results)

    def _stepped(self, before: State, outputs: Iterable[machine.Output]) -> None:
        plan = self._member.plan
        self._carry_out(outputs)
        if plan != before.plan and self._state is not None and self._state.plan == plan:
            self.timers.note_planned(leads=self._member.leads)
            self.inbox.plan_came(self._state)
        self._gather.check()

    def _carry_out(self, outputs: Iterable[machine.Output]) -> None:
        for output in outputs:
            match output:
                case machine.Persist(durable=durable):
                    if not self._keep(durable):
                        return  # nothing that depends on it may leave
                case machine.Send(to=to, message=message):
                    self._send((to,), message)
                case machine.Broadcast(message=message):
                    if not (isinstance(message, messages.Ready) and self._gather.has_said):
                        self._send(self.chain.base.electorate, message)
                case machine.Merge(plan=plan, part=part):
                    self._tasks.spawn(self._merge(self.chain.base, plan, part))
                case machine.Fetch(plan=plan, part=part, result=result):
                    self._tasks.spawn(self._fetch(self.chain.base, plan, part, result))
                case machine.SetTimer(timer=timer, attempt=attempt):
                    self.timers.set(timer, attempt)
                case machine.Commit(attempt=attempt, manifest=manifest):
                    self._decide(self._certify(messages.Committed(attempt=attempt, manifest=manifest)))
                    return  # the round is over; nothing stands behind a commit
                case _:
                    assert_never(output)

    def _send(self, to: Iterable[PeerId], message: messages.AnyRoundMessage) -> None:
        if isinstance(message, messages.Committed):
            decision = Decision(certificate=self._certify(message))
            self._member.post((*to, *message.manifest.joined), decision)  # who was counted in follows from outside
            return
        self._member.say(to, message)
        if isinstance(message, messages.Promise):
            for peer in to:
                self.inbox.evidence.show(peer, message.attempt)

    def _certify(self, committed: messages.Committed) -> messages.Certificate:
        assert self._state is not None, "who takes no part in a round decides nothing"
        return self.inbox.proofs.certify(self._state, committed)

    def _keep(self, durable: Durable) -> bool:
        try:
            self._votes.write(durable)
        except (DiskFull, DataError) as error:
            self.close()
            self._on_failure(error)
            return False
        return True

    def _decide(self, certificate: messages.Certificate) -> None:
        """A round is over: the next begins at once, whatever this peer is computing."""
        manifest = certificate.manifest
        fate: Fate = "late"
        # Also a legacy was what this peer offered: its own work was not, and is late.
        if messages.counted_of(manifest, self._member.peer) is None and self.timers.was_in_time:
            fate = "travelling" if self.parts.is_asked_for else "lost"
        base = self.chain.base
        absent = left_out(base, manifest, self._state, self.quorum.statuses)
        counted = (each.peer for each in manifest.contributions)
        self.timers.note_decided(counted, is_whole=set(absent) <= set(base.resting))
        self._memory.keep(self.timers.measured)
        taken = self.merger.taken(base, manifest) if manifest.is_gossip else {}
        if manifest.tuned is not None or not all(map(clears, manifest.acts)):
            self.timers.forget()
        self.merger.settle(manifest)
        self._tasks.spawn(self.parts.note(certificate))
        self.chain.append(certificate)
        if quarantine.has_held(self.chain.charter, self._member.peer):
            fate = "travelling"  # others count those very bytes
        self.inbox.claims.follow(manifest, self.chain.charter)
        self.works.follow(manifest)
        self.acts.follow(manifest)
        for peer in (*manifest.joined, *manifest.left):
            self.quorum.statuses.pop(peer, None)
        weights = takes_from(base, self._member.peer) if taken else {}
        self.decided.put_nowait(Decided(manifest, absent, fate, taken, weights))
        for callback in self._on_decided:
            callback(certificate)
        self._tasks.spawn(self._prefetch(manifest))
        self.begin()

    def _move(self) -> None:
        """Let the machine know which acts wait."""
        acts = self.acts.warrants()
        if self._state is not None and self._state.acts != acts:
            self._member.feed(machine.Moved(acts=acts))
        for liar in self.acts.liars:  # nobody waits for what it would lead
            self._member.feed(machine.Noticed(peer=liar, status="suspected"))

    async def _merge(self, base: messages.Base, plan: messages.Collect, part: int) -> None:
        if self.chain.base == base:  # else it was decided before this began
            self._member.feed(await self.merger.merge(plan, part, self.parts.results_in(base)[part], base.round))

    async def _fetch(self, base: messages.Base, plan: messages.Collect, part: int, result: Digest) -> None:
        here = self.parts.results_in(base)[part]
        wanted = Wanted(part, result, len(here), base.round)
        if (learnt := await self.merger.find(base, plan, wanted, here)) is None:
            learnt = await self.parts.fetch(plan, wanted, lambda: self._member.plan == plan)
        if learnt is not None and self.chain.base == base:  # who lies in one round is judged in that
            self._member.feed(learnt)

    async def _prefetch(self, manifest: messages.Manifest) -> None:
        # One round after the other: on a slow line all at once would each take longer than anybody waits for a blob.
        async with self._prefetching:
            with suppress(PeerError):  # who makes the outer step asks again, and has other ways
                await self.parts.results(manifest)

    def _expire(self, timer: machine.Timer, attempt: Attempt) -> None:
        self._member.feed(machine.TimedOut(timer=timer, attempt=attempt))


class Participation:
    """A peer's part in rounds: none until it holds a state. What others say of them until then waits here."""

    def __init__(self, node: Node) -> None:
        self.rounds: RoundDriver | None = None
        self._early: list[tuple[PeerId, Letter | Decision]] = []
        node.on_note(Letter, self._on_note)
        node.on_note(Decision, self._on_note)

    @property
    def chain(self) -> Chain | None:
        return None if self.rounds is None else self.rounds.chain

    @property
    def is_member(self) -> bool:
        """Whether this peer is of the electorate, and votes."""
        return self.rounds is not None and self.rounds.is_member

    @property
    def is_holding(self) -> bool:
        """Whether a majority is in sight of this peer's branch."""
        return self.rounds is not None and self.rounds.quorum.is_holding

    def enter(self, rounds: RoundDriver) -> None:
        """Take part: what others say from now on goes to `rounds`."""
        self.rounds = rounds

    def read_early(self, rounds: RoundDriver) -> None:
        """Give the rounds that have begun what was said of them before."""
        early, self._early = self._early, []
        for peer, said in early:
            with suppress(PeerError):  # its sender's fault, long ago
                rounds.hear(peer, said)

    async def _on_note(self, peer: PeerId, said: Letter | Decision) -> None:
        if self.rounds is not None:
            self.rounds.hear(peer, said)
        else:
            self._early = [*self._early, (peer, said)][-MAX_EARLY:]
