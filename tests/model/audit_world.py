"""Explicit-state search of audits: one round counts the work of one member, and the others judge it.

A world holds the members, the rounds that were decided since, and the verdicts that somebody was ever told. What was
told may come at any time, again, or never. A call of the worker may come to something, to nothing, or to nothing for so
long that who asks gives up: whatever was lost, late or doubled, a call comes to one of these. So does one to a worker
that is killed and back: what it shows is on its disk.

The first member is the worker. It is honest, or its step came to something else, and then it may open what an honest
one would have come to, which it has not named. Some others may be liars: what they say is out from the beginning, and
a steward may ban them meanwhile. Others may be newcomers that look at nothing. A round is decided by any member that
has followed all rounds before it, from what waits there, or from nothing.

Which world is wrong:

    Innocent    an honest worker is struck out, or a member says of it what is not so
    Unheard     a warrant holds whose signers are no majority of the settled members then, or none of whom is honest
    Twice       of one round it is counted twice that nobody answered
    Peeked      the worker shows what it came to before the auditor has come to something
    Free        nothing is lost any more, and who has cheated is neither struck out nor counted as silent
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from model.search import num_reached
from model.world import first_base, ones
from weft.ids import Digest, PeerId, Round
from weft.keys import Identity
from weft.ledger.tree import Tree
from weft.peer.audit import looking as audit
from weft.peer.audit.looking import Looking
from weft.peer.audit.outcome import Found
from weft.peer.messages import NamedState
from weft.peer.round import verdicts
from weft.sync import governance
from weft.sync.governance import Void
from weft.sync.records.acts import MAX_ACTS, Act, Ban, Finding, Outcome, Warrant
from weft.sync.records.charter import AuditTerms, Quarantined
from weft.sync.records.messages import Base
from weft.sync.records.work import Segment
from weft.wire import Signed, claimed, digest, seal

AUDITED = Round(1)
WORK = digest(b"work")
BEFORE, RIGHT, FALSE = digest(b"before"), digest(b"right"), digest(b"false")
SEGMENTS = (Segment(head=digest(b"head"), round=0, holder="00" * 32, num_steps=1),)
WORKER = 0
KEYS = sorted((Identity.from_seed(bytes([number] * 32)) for number in range(7)), key=lambda each: each.peer)
STEWARDS = tuple(sorted((Identity.from_seed(bytes([9, number] * 16)) for number in range(5)), key=lambda one: one.peer))


class Said(NamedTuple):
    """A verdict, by the number of who signs it; nobody looks into those on anything but the work."""

    by: int
    outcome: Outcome
    work: Digest = WORK


class Bounds(NamedTuple):
    """
    Args:
        drawn: who is to look; the others do once they hear of a fault.
        shows: what the worker may open: what it has named, or what is right.
        said: verdicts that are out from the beginning.
        liars: who has signed some of them and does nothing else.
        newcomers: who is in quarantine, and does nothing, or no more than lie.
        can_ban: whether a steward may ban the liars meanwhile.
        can_fail: whether a machine may not be able to do the steps.
        can_wait: whether who asks may have to give up.
    """

    num_members: int = 3
    is_honest: bool = True
    drawn: tuple[int, ...] = (1,)
    shows: tuple[Digest, ...] = ()
    said: tuple[Said, ...] = ()
    liars: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    can_ban: bool = False
    can_fail: bool = False
    can_wait: bool = True
    num_kills: int = 0
    num_rounds: int = 2

    @property
    def honest(self) -> tuple[int, ...]:
        """Return who audits."""
        return tuple(number for number in range(1, self.num_members) if number not in (*self.liars, *self.newcomers))


class Member(NamedTuple):
    """
    Args:
        at: how many rounds it has followed.
        cast: what it has heard and can come to something.
        num_false: how often each member was wrong about another.
    """

    at: int = 0
    looking: Looking | None = None
    accuser: int | None = None
    cast: frozenset[Said] = frozenset()
    num_false: tuple[int, ...] = ()


class World(NamedTuple):
    members: tuple[Member, ...]  # of who audits, in the order of their numbers
    told: int  # bit set of verdicts
    rounds: tuple[int, ...]  # numbers of bases, the first of all first
    num_kills: int = 0


class Wrong(AssertionError):
    pass


class Innocent(Wrong):
    pass


class Unheard(Wrong):
    pass


class Twice(Wrong):
    pass


class Peeked(Wrong):
    pass


class Free(Wrong):
    pass


class AuditSearch:
    """Explores all worlds breadth first, and brings each to its end."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.num_struck = self.num_unanswered = 0
        members = [each.peer for each in KEYS[: bounds.num_members]]
        run = first_base(bounds.num_members, stewards=tuple(each.peer for each in STEWARDS))
        new = tuple(Quarantined(peer=KEYS[number].peer, left=1) for number in bounds.newcomers)
        terms = replace(run.charter, audits=AuditTerms(rate=1.0, trace_every=1), quarantined=new or UNSET)
        self._bases = [replace(run, electorate=tuple(members), round=Round(AUDITED + 1), charter=terms)]
        self._base_ids = {self._bases[0]: 0}
        self._said = list[Said](bounds.said)
        self._letters = dict[Said, Signed]()
        self._taken = dict[tuple[int, frozenset[Said], Said], frozenset[Said] | None]()
        self._decided = dict[tuple[int, frozenset[Said]], tuple[int, ...]]()
        self._ends = dict[tuple[tuple[Member, ...], tuple[int, ...]], None]()
        named = (BEFORE, RIGHT if bounds.is_honest else FALSE)
        tree = Tree(bytes.fromhex(state) for state in named)
        self._trace = tree.root()
        self._shown = {state: NamedState(state=state, path=tree.path(1)) for state in bounds.shows or named[1:]}

    def run(self) -> int:
        """Look at every world within bounds; return how many there are.

        Raises:
            Wrong: in one of them.
        """
        return num_reached(self._first(), self._check_end, self._following)

    def _first(self) -> World:
        members = tuple(self._begun(Member(), number) for number in self.bounds.honest)
        return World(members, (1 << len(self._said)) - 1, (0,))

    def _begun(self, member: Member, number: int) -> Member:
        """Return a member whose process has begun: what it was drawn for it looks at, and what it has heard."""
        if number in self.bounds.drawn:
            member = member._replace(looking=Looking())
        return self._heard_all(member, number)

    # --- what may happen ---

    def _following(self, world: World) -> Iterator[World]:
        for place, member in enumerate(world.members):
            number = self.bounds.honest[place]
            for bit in ones(world.told):
                yield self._with(world, place, self._heard(world, member, number, self._said[bit]))
            for event in self._events(world, member):
                yield self._looked(world, place, event)
            if member.at + 1 < len(world.rounds):
                yield self._with(world, place, self._followed(world, member, number))
            if len(world.rounds) <= self.bounds.num_rounds:
                yield from (self._after(world, place, base) for base in self._decisions(world, member, number))
            if world.num_kills < self.bounds.num_kills:
                after = self._with(world, place, self._restarted(world, member, number))
                yield after._replace(num_kills=world.num_kills + 1)

    def _with(self, world: World, place: int, member: Member) -> World:
        return world._replace(members=(*world.members[:place], member, *world.members[place + 1 :]))

    def _base(self, world: World, member: Member) -> Base:
        return self._bases[world.rounds[member.at]]

    # --- audits ---

    def _events(self, world: World, member: Member) -> Iterator[audit.Event]:
        """Yield what may come of the next thing that an auditor does."""
        now = member.looking
        if now is None or now.phase == "ended":
            return
        has_vote = KEYS[WORKER].peer in self._base(world, member).electorate
        for is_over, is_old in ((False, False), (False, True), (True, True)):
            if self.bounds.can_wait or not is_over:
                yield audit.Missing("", has_vote, is_over, is_old)
        if self.bounds.can_fail:
            yield audit.Unable()
        yield from self._answers(now, has_vote)

    def _answers(self, now: Looking, has_vote: bool) -> Iterator[audit.Event]:
        """Yield what comes of it where nothing is lost."""
        match now.phase:
            case "asking":
                yield audit.Came()
            case "making":
                yield audit.Made(RIGHT)
            case "opening":
                if now.made is None:
                    raise Peeked
                for state, shown in self._shown.items():
                    is_named = audit.is_named(self._trace, SEGMENTS, 1, 1, shown)
                    yield audit.Opened(state) if is_named else audit.Missing("", has_vote, True, True)
            case "comparing":
                yield audit.Measured(Found("differs"))

    def _looked(self, world: World, place: int, event: audit.Event) -> World:
        member, number = world.members[place], self.bounds.honest[place]
        assert member.looking is not None
        member = member._replace(looking=audit.step(member.looking, event))
        assert member.looking is not None
        found = member.looking.found
        if found is None:
            return self._with(world, place, member)
        if not audit.is_told(found):
            if member.accuser is not None:
                member = member._replace(num_false=(*member.num_false, member.accuser))
            return self._with(world, place, member)
        if self.bounds.is_honest and found.outcome == "differs":
            raise Innocent(member)
        said = Said(number, found.outcome)
        member = self._heard(world, member, number, said)
        if said not in self._said:
            self._said.append(said)
        bit = 1 << self._said.index(said) if said in member.cast else 0
        return self._with(world, place, member)._replace(told=world.told | bit)

    # --- verdicts ---

    def _letter(self, said: Said) -> Signed:
        if said not in self._letters:
            finding = Finding(
                run=self._bases[0].run,
                peer=KEYS[WORKER].peer,
                round=AUDITED,
                work=said.work,
                before=0,
                outcome=said.outcome,
            )
            self._letters[said] = seal(KEYS[said.by], finding)
        return self._letters[said]

    def _cast(self, all_said: Iterable[Said]) -> verdicts.Cast:
        cast: dict[verdicts.Judged, dict[PeerId, Signed]] = {}
        for said in sorted(all_said):
            letter = self._letter(said)
            cast.setdefault(verdicts.judged_of(claimed(letter, Finding)), {})[letter.signer] = letter
        return cast

    def _kept(self, base: int, cast: frozenset[Said], said: Said) -> frozenset[Said] | None:
        """Return what waits at a member once it is told a verdict; None: nothing is new."""
        key = base, cast, said
        if key not in self._taken:
            before = self._cast(cast)
            try:
                is_new = verdicts.kept(before, self._bases[base], self._letter(said)) is not before
            except Void:
                is_new = False
            self._taken[key] = cast | {said} if is_new else None
        return self._taken[key]

    def _heard(self, world: World, member: Member, number: int, said: Said) -> Member:
        cast = self._kept(world.rounds[member.at], member.cast, said)
        return member if cast is None else self._doubting(member._replace(cast=cast), number, said)

    def _heard_all(self, member: Member, number: int) -> Member:
        for said in sorted(member.cast):
            member = self._doubting(member, number, said)
        return member

    def _doubting(self, member: Member, number: int, said: Said) -> Member:
        """Let a member look into what it has heard, once."""
        num_false: Mapping[PeerId, int] = {KEYS[each].peer: member.num_false.count(each) for each in member.num_false}
        is_heard = audit.is_heard(KEYS[number].peer, KEYS[said.by].peer, KEYS[WORKER].peer, num_false)
        if not is_heard or member.looking is not None or said.work != WORK:
            return member
        return member._replace(looking=Looking(), accuser=said.by if said.outcome == "differs" else None)

    def _restarted(self, world: World, member: Member, number: int) -> Member:
        cast, base = frozenset[Said](), world.rounds[member.at]
        for said in sorted(self._on_disk(member)):
            cast = self._kept(base, cast, said) or cast
        return self._begun(Member(at=member.at, cast=cast), number)

    def _on_disk(self, member: Member) -> frozenset[Said]:
        return member.cast

    # --- rounds ---

    def _followed(self, world: World, member: Member, number: int) -> Member:
        member = member._replace(at=member.at + 1)
        still = verdicts.still(self._cast(member.cast), self._base(world, member))
        cast = frozenset(said for said in member.cast if self._letter(said) in verdicts.letters(still))
        return self._heard_all(member._replace(cast=cast), number)

    def _decisions(self, world: World, member: Member, number: int) -> tuple[int, ...]:
        """Return what a member may decide, as the bases that follow."""
        if member.at + 1 < len(world.rounds) or KEYS[number].peer not in self._base(world, member).electorate:
            return ()
        key = world.rounds[-1], member.cast
        if key not in self._decided:
            self._decided[key] = tuple(self._decide(world.rounds, member.cast, bans) for bans in self._bans(key[0]))
        return self._decided[key]

    def _bans(self, base: int) -> Iterator[tuple[Warrant, ...]]:
        """Yield what stewards may have handed in."""
        banned = self._bases[base].charter.banned
        able = [number for number in self.bounds.liars if self.bounds.can_ban and KEYS[number].peer not in banned]
        for num in range(len(able) + 1):
            for some in combinations(able, num):
                yield tuple(_ban(self._bases[base], number) for number in some)

    def _decide(self, rounds: tuple[int, ...], cast: frozenset[Said], bans: tuple[Warrant, ...]) -> int:
        base = self._bases[rounds[-1]]
        waiting = [*bans, *verdicts.warrants(self._cast(cast), base)]
        warrants = governance.in_effect(base.charter, base.body, waiting, MAX_ACTS)
        enacted = governance.enact(base.charter, base.body, warrants)
        for warrant in warrants:
            self._check(base, warrant)
        electorate = tuple(peer for peer in base.electorate if peer not in enacted.removed)
        after = replace(base, round=Round(base.round + 1), electorate=electorate, charter=enacted.charter)
        number = self._base_ids.setdefault(after, len(self._bases))
        if number == len(self._bases):
            self._bases.append(after)
        return number

    def _check(self, base: Base, warrant: Warrant) -> None:
        """Check who has signed what holds from now on."""
        judged = governance.findings_in(warrant)
        signers = [letter.signer for letter in warrant.letters]
        if not judged:
            return
        honest = {KEYS[number].peer for number in self.bounds.honest}
        settled = set(base.electorate) - {KEYS[number].peer for number in self.bounds.newcomers}
        of_these = set(signers) & settled
        if 2 * len(of_these) <= len(settled) or not of_these & honest:
            raise Unheard(signers)
        if governance.accused(warrant) is None:
            self.num_unanswered += 1
            if AUDITED in _unanswered(base):
                raise Twice(signers)
            return
        self.num_struck += 1
        if self.bounds.is_honest:
            raise Innocent(signers)

    def _after(self, world: World, place: int, base: int) -> World:
        world = world._replace(rounds=(*world.rounds, base))
        return self._with(world, place, self._followed(world, world.members[place], self.bounds.honest[place]))

    # --- how it ends ---

    def _check_end(self, world: World) -> None:
        """Let all come that was told, and all members follow and decide, until nothing changes."""
        key = world.members, world.rounds
        if key in self._ends or self.bounds.is_honest:
            return
        self._ends[key] = None
        before = None
        while before != world:
            before = world
            for place, number in enumerate(self.bounds.honest):
                while world.members[place].at + 1 < len(world.rounds):
                    world = self._with(world, place, self._followed(world, world.members[place], number))
                for said in sorted(
                    set().union(*(each.cast for each in world.members))
                ):  # those that have it tell again
                    world = self._with(world, place, self._heard(world, world.members[place], number, said))
                world = self._looked_to_the_end(world, place)
            for place, number in enumerate(self.bounds.honest):
                after = self._decisions(world, world.members[place], number)[:1]
                if after and self._bases[after[0]].charter != self._bases[world.rounds[-1]].charter:
                    world = self._after(world, place, after[0])
                    break
        base = self._bases[world.rounds[-1]]
        has_failed = any(each.looking == Looking("ended") for each in world.members)
        if KEYS[WORKER].peer not in base.charter.banned and AUDITED not in _unanswered(base) and not has_failed:
            raise Free(world)

    def _looked_to_the_end(self, world: World, place: int) -> World:
        while (now := world.members[place].looking) is not None and now.phase != "ended":
            has_vote = KEYS[WORKER].peer in self._base(world, world.members[place]).electorate
            events = list(self._answers(now, has_vote))
            world = self._looked(world, place, events[-1])
        return world


def _ban(base: Base, number: int) -> Warrant:
    """Return a steward's act, one of each steward."""
    steward = STEWARDS[number]
    serial = base.charter.serial_of(steward.peer) + 1
    return Warrant(
        letters=(seal(steward, Act(run=base.run, serial=serial, deed=Ban(peer=KEYS[number].peer, reason=""))),)
    )


def _unanswered(base: Base) -> tuple[Round, ...]:
    known = base.charter.unanswered or ()
    return next((each.rounds for each in known if each.peer == KEYS[WORKER].peer), ())
