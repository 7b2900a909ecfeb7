"""What the members of a round say to this peer, and when its machine hears of it.

    of this round                  one of a round gone by is answered with what was decided, one of the next waits
    signed by its sender           checked once, of what binds it and is not decided yet; else an event says so
    a member's
    its claims within leases       a plan that claims more is not followed, an announcement is cut (`Claims`)
    its payload here               of an announcement (`Gather`)
    its results here               of what might be voted for (`Validity`)
    its plan known                 of a result (`Early`)
    may lead                       where it takes this peer to a later attempt (`Leaps`)
    ──► machine

What the machine hears it hears in any order, and some of it late.

A vote says that its voter can make the outer step. What cannot be fetched or is no vector is never voted for, so nobody
can make a majority decide it. To the machine the letter is late, or lost.

By `Claims` a member may claim to have trained no more than was leased to it since it was last counted.

    allowance = tokens of all leases since the last manifest that counted the member, as far as this peer knows them
    bound     = all tokens that were ever leased on the branch and not counted, whoever held them
    missing   = bound - allowance - what the last manifest leased to the others that are not late
    of group  = allowance + missing, but no more of it than a round leases, nor than twice the allowance

A member that missed rounds carries several leases, so the allowance follows the manifests. What a leader hears is cut
to the allowance. A leaf that was late, or whose aggregator is gone or paused, brings what was leased to it with another
round or through another aggregator: so who announces for a group may claim some of what has not come. How much is
missing the last manifest tells, so who was just started believes a group what all others do. What all claim together is
cut to the bound, and of another's plan the bound alone is asked, which is the same for all members, so no two of them
disagree whether a plan stands. (docs/threat_model.md: a claim within the lease says nothing of honest work.)

Who rests may have trained in the place of one who was drawn and is away (`weft.peer.loop.contribution`): it is allowed
one lease more in that round, within the bound.

In a stage of a pipeline it is allowed what is routed to it: the bound is a multiple of what a round leases.

A legacy weighs no more than the median of the others, whatever it claims (`weft.sync.governance`). Its tokens are the
difference between two manifests: the head of the branch that was given up, and the last common one. A head that no
member of the last common one has signed counts as one lease.

`Early` keeps letters that came before what they belong to: of the next round, and of a plan that has not come yet. A
plan names everybody's payload, part by part: with 32 members it has 70 kB. On its leader's slow line some members have
it a second before others, and an owner that is quick tells its result to members that do not know the plan. The round
machine ignores such a letter, as it may; here it waits until the plan is there.

`Leaps` says how often another member may take this peer to a later attempt that it leads.

    the first time in a round   at once: who was cut off alone has gone on by itself, and must be followed
    again                       after as many timers of the present attempt as the other members have turns, nearly
    who is in quarantine        never: only this peer's own timers come to what it leads, after all settled members

Else a member that skips to attempt after attempt that it leads, and falls silent, would stop the round for ever; with
this the others' turns come, whoever of a minority does so. What is not heard now is said again, and this peer's own
timers bring it on meanwhile.

`Proofs` keeps the signed letters that prove a decision: who accepted the manifest, and who had left for good. Only what
the machine counts is kept: a certificate says what the machine decided by, and nobody can take a vote out of it by
sending another.

Failure:
- a leader's own proposal names results that cannot be had or applied: the leader is suspected, the next one leads.
- a manifest accepted before names such results: they are looked for until they are here; until then the round has no
  outcome.

A signature is checked once, though a letter may come again, and within what proves a decision (`Signatures`): to check
one takes longer than all else that is done with a letter. Kept are those that held, for one round.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from weft import keys
from weft.clock import Clock
from weft.errors import PeerError, WireError
from weft.events import Emit, Notice, PayloadRejected
from weft.ids import Attempt, Digest, PeerId, Round, Tokens, short
from weft.keys import Identity
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.messages import GENESIS, Decision, Letter
from weft.peer.round.evidence import EvidenceKeeper
from weft.peer.round.gather import Gather
from weft.peer.round.members import Member, Quorum
from weft.peer.round.merge import RoundMerger
from weft.peer.round.timers import Timers
from weft.peer.round.works import Works
from weft.sync.equivocation import binds
from weft.sync.governance import legacy_tokens
from weft.sync.records import messages, quarantine, rewinds
from weft.sync.records.acts import Warrant
from weft.sync.records.charter import Charter
from weft.sync.round.groups import is_true
from weft.sync.round.machine import Noticed, Received, State
from weft.sync.round.round import accept_of
from weft.sync.round.rules import is_quorum, is_successor, spent_farewells
from weft.wire import Signed, claimed, digest, digest_of, require_signature, seal

TELL_AGAIN_S = 1.0  # a decision to the same peer
MAX_TOLD = 4096  # peers: keys are free to make
RECOVER_S = 5.0  # between two looks for results that nobody had


class Validity:
    def __init__(self, member: Member, merger: RoundMerger, works: Works, quorum: Quorum, emit: Emit) -> None:
        self._member = member
        self._merger = merger
        self._works = works
        self._parts = merger.parts
        self._quorum = quorum
        self._emit = emit
        self._find_earlier: Callable[[messages.Manifest], Awaitable[object]] | None = None

    def find_earlier_by(self, find: Callable[[messages.Manifest], Awaitable[object]]) -> None:
        """Let `find(manifest)` find what the run goes back to, or raise PeerError."""
        self._find_earlier = find

    def must_weigh(self, base: messages.Base, named: messages.Manifest) -> bool:
        """Return whether the machine might vote for `named`, and its results, works that it counts, or what it goes
        back to, are not here."""
        has_all = self._parts.has_results(named) and self._works.has(named) and rewinds.decided(named) is None
        return is_successor(base, named) and not has_all

    async def weigh(self, sender: PeerId, message: messages.AnyRoundMessage, named: messages.Manifest) -> bool:
        """Return, once that is known, whether what `message` names can be applied here.

        A leader whose own proposal cannot be is suspected: nobody need wait for the next.
        """
        try:
            await self._merger.check(named)
            await self._parts.results(named)
            await self._works.find(named, sender)
            if self._find_earlier is not None:
                await self._find_earlier(named)
        except PeerError as error:
            reason = f"it names results that cannot be applied: {error}"
            self._emit(PayloadRejected(round=named.round, member=sender, reason=reason))
            is_its_own = isinstance(message, messages.Propose) and named.attempt == message.attempt
            if is_its_own:
                self._member.feed(Noticed(peer=sender, status="suspected"))
            else:
                self.recover(named)
            return False
        return True

    def recover(self, manifest: messages.Manifest) -> None:
        """Look for the results of what was accepted or decided, until they are here or the round is over."""
        self._member.tasks.spawn(self._recover(manifest))

    async def _recover(self, manifest: messages.Manifest) -> None:
        base = self._member.base
        while self._member.base == base:
            with suppress(PeerError):
                await self._parts.results(manifest)
                self._quorum.find_results()
                return
            self._quorum.lose_results(base)
            await asyncio.sleep(RECOVER_S)


MAX_MISSING = 2  # times its allowance: what a group may bring of what was leased and has not come


class Claims:
    """The claims of one branch, from `head` on, after which `charter` holds."""

    def __init__(self, head: messages.Manifest, charter: Charter, emit: Emit) -> None:
        self._emit = emit
        self._allowed: dict[PeerId, int] = {}  # tokens; who is not in here may carry work that this peer has not seen
        self._leased: dict[PeerId, int] = {}  # tokens, by the last manifest
        self._late: frozenset[PeerId] = frozenset()  # members that it did not count
        self.restart(head, charter)

    def restart(self, head: messages.Manifest, charter: Charter) -> None:
        """Go on from another head, before which nothing is known, unless it is the run's first."""
        self._allowed = dict.fromkeys(head.members, 0) if head.previous == GENESIS else {}
        self.follow(head, charter)

    def follow(self, manifest: messages.Manifest, charter: Charter) -> None:
        """Take up what a manifest counted, and what it leases, in samples as long as `charter` says."""
        counted = {each.peer for each in manifest.contributions if each.legacy is None}
        self._allowed |= dict.fromkeys(counted, 0)
        for peer in (*manifest.left, *manifest.joined):
            self._allowed.pop(peer, None)
        self._leased = {}
        for lease in manifest.leases:
            tokens = lease.num_windows * charter.settings.seq_len
            self._leased[lease.peer] = self._leased.get(lease.peer, 0) + tokens
            if lease.peer in self._allowed:
                self._allowed[lease.peer] += tokens
        is_opening = not manifest.contributions
        self._late = frozenset() if is_opening else frozenset(manifest.members) - counted - set(manifest.joined)

    def believed(self, base: messages.Base, peer: PeerId, ready: messages.Ready) -> messages.Ready:
        """Return what `peer` announces, cut to what it is believed."""
        if ready.legacy is not None:
            return self._of_branch(base, peer, ready)
        bound = base.unclaimed
        instead = base.charter.settings.quota_tokens if peer in base.resting else 0
        allowed = bound if base.charter.is_routed else min(self._allowed.get(peer, bound) + instead, bound)
        most = allowed if ready.group is None else self._of_group(base, peer, allowed)
        tokens = Tokens(min(ready.tokens, most))
        if tokens != ready.tokens:
            text = f"{short(peer)} claims {ready.tokens} tokens; they count as the {tokens} that it was given"
            self._emit(Notice(text=text))
        return msgspec.structs.replace(ready, tokens=tokens)

    def allowance(self, base: messages.Base, peer: PeerId) -> int:
        """Return how many tokens everybody will believe `peer` for a group, even who has seen more of the past."""
        return self._of_group(base, peer, self._allowed.get(peer, self._leased.get(peer, 0)))

    def _of_group(self, base: messages.Base, peer: PeerId, allowed: int) -> int:
        bound = base.unclaimed
        due = sum(tokens for other, tokens in self._leased.items() if other != peer and other not in self._late)
        missing = max(0, bound - allowed - due)
        return min(bound, allowed + min(missing, sum(self._leased.values()), MAX_MISSING * allowed))

    def _of_branch(self, base: messages.Base, peer: PeerId, ready: messages.Ready) -> messages.Ready:
        legacy = ready.legacy
        assert legacy is not None
        tokens = legacy_tokens(base, ready)
        if tokens < legacy.tokens:
            text = f"{short(peer)} says that it brings {legacy.tokens} tokens that a branch had counted; the"
            self._emit(Notice(text=f"{text} proof shows {tokens}, and only those count"))
        legacy = msgspec.structs.replace(legacy, tokens=tokens)
        return msgspec.structs.replace(ready, tokens=tokens, legacy=legacy, proof=None)

    def is_possible(self, base: messages.Base, peer: PeerId, message: messages.Collect | messages.Propose) -> bool:
        """Return whether the plan or manifest that `peer` sends claims no more than was ever leased."""
        bound = base.unclaimed
        counted = message.contributions if isinstance(message, messages.Collect) else message.manifest.contributions
        is_each = all(0 <= contribution.tokens <= bound for contribution in counted)
        if is_each and sum(each.tokens for each in counted if each.legacy is None) <= bound:
            return True
        text = f"{short(peer)} plans to count more tokens than were ever given out: this peer does not follow it"
        self._emit(Notice(text=text))
        return False


NUM_KEPT = 4  # letters of the next round, of one sender
NUM_OTHERS = 8  # senders that are no members: the next round may count them in

EarlyLetter = tuple[PeerId, Signed, messages.RoundNote]
Told = tuple[PeerId, Signed, messages.AnyRoundMessage]


class Early:
    def __init__(self) -> None:
        self._next: list[EarlyLetter] = []
        self._merged: dict[tuple[PeerId, int], tuple[Signed, messages.Merged]] = {}  # by owner and part

    def keep_for_next(
        self, sender: PeerId, signed: Signed, note: messages.RoundNote, members: Collection[PeerId]
    ) -> None:
        """Keep a letter of the round after this one; its sender's oldest makes room, never another member's.

        Args:
            members: of this round.
        """
        mine = [each for each in self._next if each[0] == sender]
        if len(mine) >= NUM_KEPT:
            self._next.remove(mine[0])
        others = list(dict.fromkeys(each[0] for each in self._next if each[0] not in members))
        if sender not in members and sender not in others and len(others) >= NUM_OTHERS:
            self._next = [each for each in self._next if each[0] != others[0]]
        self._next.append((sender, signed, note))

    def begin(self) -> list[EarlyLetter]:
        kept, self._next = self._next, []
        self._merged.clear()
        return kept

    def is_kept(
        self, base: messages.Base, plan: messages.Collect | None, sender: PeerId, signed: Signed, message: object
    ) -> bool:
        """Keep the result of a plan that is still to come, an owner's latest of a part; return whether it is one."""
        if not isinstance(message, messages.Merged) or message.part >= base.num_parts or not _is_newer(message, plan):
            return False
        known = self._merged.get((sender, message.part))
        if _is_newer(message, None if known is None else known[1]):
            self._merged[sender, message.part] = signed, message
        return True

    def of_plan(self, plan: messages.Collect) -> list[Told]:
        """Return the results kept for a plan that has come, and forget those of plans before it."""
        found: list[Told] = []
        for (sender, part), (signed, merged) in sorted(self._merged.items(), key=lambda item: item[0]):
            if not _is_newer(merged, plan):
                del self._merged[sender, part]
                found.append((sender, signed, merged))
        return found


def _is_newer(merged: messages.Merged, than: messages.Collect | messages.Merged | None) -> bool:
    return than is None or (merged.attempt, merged.revision) > (than.attempt, than.revision)


SLACK = 0.75  # others' timers may be that much shorter


class Leaps:
    """Of one peer, round after round.

    Args:
        progress_s: returns how long this peer follows its present attempt.
    """

    def __init__(self, clock: Clock, progress_s: Callable[[], float]) -> None:
        self._clock = clock
        self._progress_s = progress_s
        self._led_at: dict[PeerId, float] = {}  # when each took this peer to a later attempt of the present round

    def begin(self) -> None:
        self._led_at.clear()

    def may_lead(self, state: State, sender: PeerId, message: messages.AnyRoundMessage) -> bool:
        """Return whether to listen, where that may take this peer to a later attempt."""
        if (
            not isinstance(message, messages.Prepare | messages.Propose | messages.Collect)
            or message.attempt <= state.attempt
        ):
            return True
        if sender in quarantine.members(state.base.charter):
            return False
        if (led_at := self._led_at.get(sender)) is None:
            return True
        turns_s = SLACK * (len(state.base.electorate) - 1) * self._progress_s()
        return self._clock.now() - led_at >= turns_s

    def note(self, sender: PeerId, before: Attempt, after: Attempt) -> None:
        """What the sender said was heard in one attempt, and this peer is in another now."""
        if after != before:
            self._led_at[sender] = self._clock.now()


class Proofs:
    """Those of the round after the chain's head."""

    def __init__(self, identity: Identity, chain: Chain) -> None:
        self._identity = identity
        self._chain = chain
        self._votes: dict[PeerId, Signed] = {}
        self._farewells: dict[PeerId, Signed] = {}

    def begin(self) -> None:
        self._votes, self._farewells = {}, {}

    def keep(self, state: State, sender: PeerId, signed: Signed, message: messages.AnyRoundMessage) -> None:
        """Keep a letter if the machine, in this state, may count it."""
        if isinstance(message, messages.Accept):
            is_wanted = state.proposal is not None and (
                (message.attempt, message.manifest) == (state.attempt, digest_of(state.proposal))
            )
            if is_wanted:
                self._votes[sender] = signed
        elif isinstance(message, messages.Goodbye) and sender not in state.farewells:
            self._farewells[sender] = signed

    def certify(self, state: State, committed: messages.Committed) -> messages.Certificate:
        """Return the proof of what this peer's machine decided in `state`, its own vote included."""
        base, accept = self._chain.base, accept_of(state, committed.attempt, committed.manifest)
        mine = seal(self._identity, messages.RoundNote(branch=base.branch, round=base.round, message=accept))
        votes = {peer: self._votes[peer] for peer in state.votes & self._votes.keys()} | {self._identity.peer: mine}
        farewells: list[PeerId] = []  # as few as prove it: each may hold a manifest
        for peer in sorted(spent_farewells(state.farewells, committed.attempt)):
            if is_quorum(state.base, votes, farewells):
                break
            farewells.append(peer)
        return messages.Certificate(
            attempt=committed.attempt,
            manifest=committed.manifest,
            votes=tuple(votes[peer] for peer in sorted(votes)),
            farewells=tuple(self._farewells[peer] for peer in farewells),
        )


@dataclass(frozen=True)
class Heard:
    """A letter of the round in which it is judged."""

    sender: PeerId
    signed: Signed
    message: messages.AnyRoundMessage
    base: messages.Base  # of that round


Step = Callable[[Heard], bool]


class Inbox:
    """Of one peer, round after round.

    Args:
        accuse: given what proves that a member lies.
    """

    def __init__(
        self,
        context: Context,
        member: Member,
        validity: Validity,
        works: Works,
        gather: Gather,
        timers: Timers,
        accuse: Callable[[Warrant], None],
    ) -> None:
        chain = member.chain
        self.proofs = Proofs(context.identity, chain)
        self._node = context.node
        self._member = member
        self._chain = chain
        self._validity = validity
        self._works = works
        self._gather = gather
        self._on_record: list[Callable[[messages.GroupRecord], object]] = []
        self.claims = Claims(chain.head, chain.charter, context.emit)
        self._early = Early()
        self._leaps = Leaps(context.clock, timers.progress_s)
        self._weighing: dict[PeerId, asyncio.Task[None]] = {}  # by sender: what it names is being fetched
        self.signatures = Signatures()
        self._told: dict[PeerId, tuple[Round, float]] = {}  # who was told which decision last, and when
        self._clock = context.clock
        self.evidence = EvidenceKeeper(context.node, chain, accuse, self.signatures.verify)
        self._merged: dict[tuple[PeerId, int], tuple[Digest, Signed]] = {}  # by owner and part: the plan, and its word

    def on_record(self, callback: Callable[[messages.GroupRecord], object]) -> None:
        """Call `callback(record)` for each that is announced, and says of its group what that can bring."""
        self._on_record.append(callback)

    @property
    def has_quorum(self) -> bool:
        """Whether enough members have announced for the present round to be decided."""
        return self._gather.has_quorum

    def begin(self) -> list[EarlyLetter]:
        early = self._early.begin()
        self._leaps.begin()
        self.proofs.begin()
        self.evidence.begin()
        self._merged = {}
        self._weighing.clear()
        self.signatures.begin()
        self._gather.begin()
        return early

    def read(self, early: Iterable[EarlyLetter]) -> None:
        """Take up the letters that came before their round."""
        for sender, signed, note in early:
            base = self._chain.base
            if (note.branch, note.round) == (base.branch, base.round):
                self._judge(Heard(sender, signed, note.message, base))

    def allowance(self) -> int:
        """Return how many tokens the others will believe that this peer brings for a group."""
        return self.claims.allowance(self._chain.base, self._node.peer)

    def plan_came(self, state: State) -> None:
        """Let the machine hear what was said of its plan before it knew that."""
        for sender, signed, message in self._early.of_plan(state.plan) if state.plan is not None else ():
            self._judge(Heard(sender, signed, message, state.base), after=self._is_votable)

    # --- a letter, step by step ---

    def on_letter(self, peer: PeerId, letter: Letter) -> None:
        """Take up what a member says of this round, or keep what it says of the next.

        Raises:
            WireError: the letter is not what its sender signed.
        """
        signed, base = letter.signed, self._chain.base
        if signed.signer != peer:
            raise WireError(f"{short(peer)} passed on a letter of {short(signed.signer)}")
        note = claimed(signed, messages.RoundNote)
        is_present = note.branch == base.branch and note.round in (base.round, base.round + 1)
        # What is decided already needs no signature: nothing but the decision comes of it. Nor does what binds nobody:
        # it is never shown to others, and the key at the link's other end is proven.
        if (is_present and binds(note.message)) or self.evidence.wants(signed, note):
            require_signature(signed, self.signatures.verify)
            self.evidence.hear(signed, note)
        if note.branch != base.branch:
            return
        if note.round < base.round:
            self._tell_decision(peer, note.round)
        elif note.round == base.round + 1:
            self._early.keep_for_next(peer, letter.signed, note, base.electorate)
        elif note.round == base.round:
            self._judge(Heard(peer, letter.signed, note.message, base))

    def _judge(self, heard: Heard, after: Step | None = None) -> None:
        """Let the machine hear a letter of this round that passes all steps, in this order.

        A step that does not let it pass drops it, or keeps it and has it judged on once what it waits for is here.

        Args:
            after: the step that it has passed last.
        """
        steps = (
            self._is_a_members,
            self._is_within_leases,
            self._is_no_announcement,  # one waits for its payload
            self._is_votable,
            self._is_of_known_plan,
            self._may_lead,
        )
        for step in steps if after is None else steps[steps.index(after) + 1 :]:
            if not step(heard):
                return
        self._hear(heard)

    def _is_a_members(self, heard: Heard) -> bool:
        # A bare Committed is not believed. A certificate comes as a Decision and goes to `RoundDriver.follow`, which
        # ends the round as the machine does when it hears Committed: the manifest is the head, nothing of this round is
        # listened to any more, and whoever still asks is told (`_tell_decision`).
        state = self._member.state
        return (
            state is not None
            and heard.sender in state.base.electorate
            and not isinstance(heard.message, messages.Committed)
        )

    def _is_within_leases(self, heard: Heard) -> bool:
        message = heard.message
        if not isinstance(message, messages.Collect | messages.Propose) or self.claims.is_possible(
            heard.base, heard.sender, message
        ):
            return True
        # Were it the leader: nobody need wait for the next.
        self._member.feed(Noticed(peer=heard.sender, status="suspected"))
        return False

    def _is_no_announcement(self, heard: Heard) -> bool:
        """Cut an announcement to what its sender was leased; the machine hears of it once its payload is here."""
        message, sender = heard.message, heard.sender
        if not isinstance(message, messages.Ready):
            return True
        if not self._works.hear(heard.base, sender, message):
            return False
        if message.group is not None and is_true(heard.base, sender, message.group):
            for callback in self._on_record:
                callback(message.group)
        ready = self.claims.believed(heard.base, sender, message)
        self._gather.hear(sender, ready, Received(sender=sender, message=ready))
        return False

    def _is_votable(self, heard: Heard) -> bool:
        """Keep what might be voted for until its results are here; its sender's later letter replaces it."""
        named = messages.manifest_in(heard.message)
        if named is None or not self._validity.must_weigh(heard.base, named):
            return True
        if (before := self._weighing.get(heard.sender)) is not None:
            before.cancel()
        self._weighing[heard.sender] = self._member.tasks.spawn(self._weigh(heard, named))
        return False

    async def _weigh(self, heard: Heard, named: messages.Manifest) -> None:
        if await self._validity.weigh(heard.sender, heard.message, named):
            self._judge(heard, after=self._is_votable)

    def _is_of_known_plan(self, heard: Heard) -> bool:
        """Drop what is of a round gone by, and keep a result until its plan is known."""
        state = self._member.state
        if state is None or state.base != heard.base:
            return False
        return not self._early.is_kept(state.base, state.plan, heard.sender, heard.signed, heard.message)

    def _may_lead(self, heard: Heard) -> bool:
        state = self._member.state
        return state is not None and self._leaps.may_lead(state, heard.sender, heard.message)

    def _hear(self, heard: Heard) -> None:
        if (before := self._member.state) is None:
            return
        if isinstance(heard.message, messages.Merged) and not self._is_kept(heard, heard.message):
            return
        self.proofs.keep(before, heard.sender, heard.signed, heard.message)
        self._member.feed(Received(sender=heard.sender, message=heard.message))
        if (after := self._member.state) is not None and after.base == before.base:
            self._leaps.note(heard.sender, before.attempt, after.attempt)

    def _is_kept(self, heard: Heard, merged: messages.Merged) -> bool:
        """Keep what an owner says of its part where that may be shown to others; return whether it has signed it."""
        if merged.plan is UNSET:
            return True
        try:
            require_signature(heard.signed, self.signatures.verify)
        except WireError:
            return False
        known = self._merged.get((heard.sender, merged.part))
        if known is None or known[0] != merged.plan:  # of one plan its first word counts
            self._merged[heard.sender, merged.part] = merged.plan, heard.signed
        return True

    def merged(self, owner: PeerId, part: int, plan: Digest) -> Signed | None:
        """Return what an owner has said in this round of the part that it has merged by a plan; None: nothing."""
        known = self._merged.get((owner, part))
        return None if known is None or known[0] != plan else known[1]

    def _tell_decision(self, peer: PeerId, round: Round) -> None:
        now = self._clock.now()
        known, told_at = self._told.get(peer, (None, 0.0))
        if known == round and now - told_at < TELL_AGAIN_S:  # a certificate is large, and none of them gets lost
            return
        if len(self._told) >= MAX_TOLD:
            del self._told[next(iter(self._told))]
        self._told[peer] = round, now
        for certificate in self._chain.after(Round(round - 1), 1) or ():
            self._node.post(peer, Decision(certificate=certificate))


# --- signatures ---


MAX_HELD = 64  # of one signer: twice what an attempt of the largest run takes


class Signatures:
    """Of one peer."""

    def __init__(self) -> None:
        self._held: dict[PeerId, dict[bytes, Digest]] = {}  # what each signature signs

    def begin(self) -> None:
        """A round begins."""
        self._held.clear()

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Return what `keys.verify` does."""
        known, name = self._held.get(peer, {}), digest(message)
        if known.get(signature) == name:
            return True
        if not keys.verify(peer, message, signature):
            return False
        self._held[peer] = known
        if len(known) >= MAX_HELD:
            del known[next(iter(known))]
        known[signature] = name
        return True
