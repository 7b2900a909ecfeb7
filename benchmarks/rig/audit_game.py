"""The game of audits without messages: who is drawn, what comes of it, and what rounds count, over many rounds.

    brought     each member's work goes into a manifest: counted, or held where its member is in quarantine
    drawn       each member signs its ticket, and looks at what that draws           `looking.chosen`, `verify.draw`
    looked      the drawn step was made, or it was not                               `looking.step`
    told        verdicts go to all, who look for themselves                          `looking.is_heard`, `verdicts.kept`
    enacted     the next manifest has what a majority has found                      `verdicts.warrants`, `governance`
    taken out   ... and minus the work that somebody was struck out for              `sync.records.counters`

Whatever is decided, production code decides, on signed records: members, charters, manifests, verdicts and warrants are
those of a run. Not played are messages, which are all there before the next round, and training: of each step it is
known whether it was made. So no machine strays, and no evidence is found: a majority has to vote on all of it, as where
machines round differently.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Literal, NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from weft import rng
from weft.codec.config import Int8Config
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.keys import Identity
from weft.peer.audit.looking import (
    Came,
    Looking,
    Made,
    Measured,
    Missing,
    Opened,
    chosen,
    is_equal,
    is_heard,
    is_told,
    step,
)
from weft.peer.audit.outcome import ANSWER_ROUNDS, Found
from weft.peer.round import verdicts
from weft.run.trust import AuditedTrust
from weft.sync import governance
from weft.sync.method.presets import DiLoCoConfig, spell_out
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records import counters, quarantine
from weft.sync.records.acts import MAX_ACTS, Finding, Outcome, Warrant
from weft.sync.records.charter import AuditTerms, Charter, Settings
from weft.sync.records.messages import Base, Brought, Counted, HeldWork, Manifest, PartResult, next_base, works_in
from weft.sync.round.shares import weighed
from weft.verify.draw import Draw, drawn
from weft.verify.suspicion import Suspicion
from weft.wire import Signed, digest, digest_of, seal

TRUST = AuditedTrust()  # the defaults
LEASE = Tokens(1)  # what one work counts
RUN = RunId(digest(b"the game of audits"))
KNOWN = 2 * ANSWER_ROUNDS  # rounds for which a work may still be asked for


@dataclass(frozen=True, kw_only=True)
class Way:
    """What some peers do; all others are honest.

    Args:
        num: how many they are.
        idles: share of their steps that they do not make.
        after: works that they bring honestly first, each key.
        comes: the round in which they come; 0: they were there when the run began.
        looks: at what they are drawn for; at all but their friends' works; or never.
        accuses: say that steps of all others differ, or of all but friends.
        is_silent: they show auditors nothing of what they did not make.
        again: who is struck out comes again with a new key, and who is removed with the same.
    """

    num: int
    idles: float = 1.0
    after: int = 0
    comes: int = 0
    looks: Literal["at all", "at no friend", "never"] = "at all"
    accuses: bool = False
    is_silent: bool = False
    again: bool = False


class Name(NamedTuple):
    """What a work is, as those know who made it."""

    seat: int
    is_false: bool


@dataclass
class Seat:
    """A machine, whatever key it has at the moment.

    Attributes:
        way: None: it is honest.
        num_false: works with steps that were not made, and were counted.
        num_taken: of those, how many were taken out again.
        false_rounds: rounds in which it was a member and brought false work, up to the first time that it was out.
        out: rounds after which its key was struck out or removed.
    """

    number: int
    way: Way | None
    keys: list["Key"] = field(default_factory=list)
    num_counted: int = 0
    num_false: int = 0
    num_taken: int = 0
    false_before_out: int = 0
    began: Round | None = None
    out: list[Round] = field(default_factory=list)

    @property
    def key(self) -> "Key":
        return self.keys[-1]


class Key:
    """One identity, and what it has seen."""

    def __init__(self, seat: Seat, seed: int) -> None:
        self.seat = seat
        self.identity = Identity.from_seed(sha256(f"{seed} {seat.number} {len(seat.keys)}".encode()).digest())
        self.peer = self.identity.peer
        self.begin()

    def begin(self) -> None:
        """Come as a newcomer, or with the run's first members."""
        self.suspicion = Suspicion()
        self.false_alarms = Counter[PeerId]()  # of others, as `looking` counts them
        self.begun: set[tuple[Digest, int]] = set()
        self.num_brought = 0
        self.offered: Digest | None = None  # what is not counted yet


DOUBTED = -1  # in place of a step: the one that somebody doubts


@dataclass
class Audit:
    """One that is under way.

    Args:
        after: the round in which it ends without an answer.
    """

    auditor: Key
    peer: PeerId
    round: Round
    work: Digest
    number: int
    after: int
    accuser: PeerId | None = None
    looking: Looking = field(default_factory=Looking)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one seat that cheats comes to, in one game.

    Args:
        out_after: rounds from its first false work to the one that has it out; None: it stays.
        before: false works of it that were counted until then, or to the end.
        share: of what an honest seat counts, what it does, less what was taken out; of false works alone.
        num_keys: that it had.
    """

    out_after: int | None
    before: int
    share: float
    false_share: float
    num_keys: int


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What a game comes to.

    Args:
        num_honest_out: honest seats that were struck out or removed.
        num_audits: that have ended.
    """

    cheats: tuple[Seen, ...]
    num_honest_out: int
    num_audits: int
    num_rounds: int


class Game:
    """One run.

    Args:
        links: steps of a work that others may draw.
    """

    def __init__(self, way: Way, seed: int, *, rate: float = TRUST.audit_rate, num: int = 24, links: int = 100) -> None:
        self.way = way
        self.links = links
        self._seed = seed
        self._luck = rng.stream(seed, "game")
        self.seats = [Seat(number, way if number < way.num else None) for number in range(num)]
        self.num_audits = 0
        self._keys: dict[PeerId, Key] = {}
        for seat in self.seats:
            self._give_key(seat)
        present = tuple(sorted(seat.key.peer for seat in self.seats if seat.way is None or not way.comes))
        self._works: dict[Digest, Name] = {}
        self._steps: dict[tuple[Digest, int], bool] = {}  # whether one was made
        self._held: dict[Digest, Round] = {}
        self._past: dict[Round, tuple[Base, Manifest]] = {}
        self._cast: verdicts.Cast = {}
        self._audits: list[Audit] = []
        self._honest_out: set[int] = set()
        self.base = Base(
            run=RUN,
            branch=BranchId(RUN),
            round=Round(1),
            previous=digest(b"%d" % seed),
            electorate=present,
            keeper=present[0],
            uplinks=(1,),
            cursor=0,
            quota=1,
            committed_tokens=Tokens(0),
            charter=_charter(rate),
        )

    def play(self, num_rounds: int) -> Outcomes:
        """Play so many rounds, or until all that follows is known."""
        while self.base.round <= num_rounds and not self._is_over():
            self._round()
        return Outcomes(
            cheats=tuple(_seen(seat, num_rounds) for seat in self.seats if seat.way is not None),
            num_honest_out=len(self._honest_out),
            num_audits=self.num_audits,
            num_rounds=self.base.round - 1,
        )

    def _is_over(self) -> bool:
        cheats = [seat for seat in self.seats if seat.way is not None]
        are_out = not self.way.again and all(seat.out for seat in cheats)
        return are_out and not counters.due(self.base) and not self._honest_out

    # --- a round ---

    def _round(self) -> None:
        base = self.base
        waiting = verdicts.warrants(self._cast, base)
        acts = governance.in_effect(base.charter, base.body, waiting, MAX_ACTS)
        accused = {governance.accused(warrant) for warrant in acts}  # who waits for its turn is counted
        contributions = tuple(self._counted(set(base.electorate) - accused))
        out = counters.planned(base, base.charter.banned, set())
        done = governance.enacted(base, acts, contributions, countered=out)
        joined = tuple(sorted(self._coming(done.charter)))
        left = done.removed
        members = tuple(sorted({*base.electorate, *joined} - {*left}))
        held = tuple(self._to_hold(members, {each.peer for each in contributions}))
        manifest = self._manifest(acts, contributions, held, joined, left, members, out)
        assert quarantine.is_kept(base, manifest)
        charter = governance.charter_after(base, manifest)
        manifest = replace(manifest, charter=digest_of(charter))
        self._past[base.round] = base, manifest
        self._settle(manifest, out or ())
        self.base = next_base(manifest, charter)
        self._cast = verdicts.still(self._cast, self.base)
        self._follow(manifest)

    def _counted(self, able: set[PeerId]) -> Iterable[Counted]:
        for peer in sorted(able):
            work = self._offer(self._keys[peer])
            if quarantine.may_count(self.base.charter, Brought(peer=peer, tokens=LEASE, work=work)):
                yield Counted(peer=peer, tokens=LEASE, payload=work, work=work)

    def _to_hold(self, members: Iterable[PeerId], counted: set[str]) -> Iterable[HeldWork]:
        for peer in quarantine.members(self.base.charter):
            work = self._keys[peer].offered
            if work is None or peer in counted or peer not in members:
                continue
            if quarantine.may_be_held(self.base.charter, Brought(peer=peer, tokens=LEASE, work=work)):
                yield HeldWork(peer=peer, work=work)

    def _offer(self, key: Key) -> Digest:
        """Return what a member brings: what was not counted yet, or a new work."""
        if key.offered is None:
            seat, way = key.seat, key.seat.way
            is_false = way is not None and way.idles > 0 and key.num_brought >= way.after
            key.offered = digest(f"{self._seed} {key.peer} {self.base.round}".encode())
            key.num_brought += 1
            self._works[key.offered] = Name(seat.number, is_false)
            if is_false and seat.began is None:
                seat.began = self.base.round
        return key.offered

    def _coming(self, charter: Charter) -> Iterable[PeerId]:
        """Yield who asks to be counted in."""
        for seat in self.seats:
            way, key = seat.way, seat.key
            if key.peer in self.base.electorate or way is None or self.base.round < way.comes:
                continue
            if seat.out and not way.again:
                continue
            if key.peer in charter.banned:
                key = self._give_key(seat)
            key.begin()
            yield key.peer

    def _give_key(self, seat: Seat) -> Key:
        seat.keys.append(Key(seat, self._seed))
        self._keys[seat.key.peer] = seat.key
        return seat.key

    def _manifest(
        self,
        acts: tuple[Warrant, ...],
        contributions: tuple[Counted, ...],
        held: tuple[HeldWork, ...],
        joined: tuple[PeerId, ...],
        left: tuple[PeerId, ...],
        members: tuple[PeerId, ...],
        out: tuple[PeerId, ...] | UnsetType,
    ) -> Manifest:
        base = self.base
        leader = min(quarantine.settled(base.charter, base.electorate))
        return Manifest(
            run=base.run,
            branch=base.branch,
            round=base.round,
            attempt=Attempt(0),
            leader=leader,
            previous=base.previous,
            contributions=contributions,
            parts=(PartResult(owner=leader, result=base.previous, uplink=1),),
            members=members,
            uplinks=base.uplinks,
            joined=joined,
            left=left,
            leases=(),
            cursor=base.cursor,
            committed_tokens=Tokens(base.committed_tokens + sum(each.tokens for each in contributions)),
            acts=acts,
            charter=base.previous,
            counters=out,
            held=held or UNSET,
        )

    def _settle(self, manifest: Manifest, taken: Iterable[str]) -> None:
        """Note what a round comes to for each seat."""
        for each in manifest.contributions:
            key = self._keys[PeerId(each.peer)]
            assert each.work == key.offered
            key.offered = None
            key.seat.num_counted += 1
            is_false = self._works[Digest(each.work)].is_false
            key.seat.num_false += is_false
            key.seat.false_before_out += is_false and not key.seat.out
        for peer in taken:
            self._keys[PeerId(peer)].seat.num_taken += 1
        for peer in manifest.left:
            seat = self._keys[PeerId(peer)].seat
            seat.out.append(manifest.round)
            if seat.way is None:
                self._honest_out.add(seat.number)
        for one in manifest.held or ():
            self._held[Digest(one.work)] = manifest.round

    # --- audits ---

    def _follow(self, manifest: Manifest) -> None:
        base, charter = self._past[manifest.round][0], self.base.charter
        counted = [PeerId(each.peer) for each in manifest.contributions]
        for peer in manifest.members:
            self._keys[peer].suspicion.decided(manifest.round, manifest.members, counted)
        name = digest_of(manifest)
        draw = Draw(run=manifest.run, branch=manifest.branch, round=manifest.round, manifest=name)
        still = [peer for peer in base.electorate if peer in manifest.members]
        for peer in still:
            key = self._keys[peer]
            ticket = seal(key.identity, draw)
            times, has_waited = key.suspicion.times, self._waited_before(manifest.round)
            judges = partial(quarantine.judges, base.charter, base.electorate)
            for whose, work, rate, num in chosen(manifest, charter, ticket, judges, times, has_waited):
                number = drawn(ticket.signature, work, rate, num, self.links)
                if number is not None:
                    self._begin(key, whose, manifest.round, work, number, None)
        for peer in still:
            self._lie(self._keys[peer], manifest)
        self._go_on()

    def _waited_before(self, round: Round) -> Callable[[Digest], bool]:
        return lambda work: self._held.get(work, round) < round

    def _looks(self, key: Key, peer: PeerId) -> bool:
        way = key.seat.way
        if way is None or way.looks == "at all":
            return True
        return way.looks == "at no friend" and self._keys[peer].seat.way is None

    def _begin(self, key: Key, peer: PeerId, round: Round, work: Digest, number: int, accuser: PeerId | None) -> None:
        if (work, number) in key.begun or not self._looks(key, peer):
            return
        key.begun.add((work, number))
        after = self.base.round - 1 + ANSWER_ROUNDS
        self._audits.append(Audit(key, peer, round, work, number, after, accuser))

    def _lie(self, key: Key, manifest: Manifest) -> None:
        """Say what is not so, if that is its way."""
        way = key.seat.way
        if way is None:
            return
        for peer, work in works_in(manifest) if way.accuses else ():
            about = self._keys[peer]
            is_spared = about is key or (way.looks == "at no friend" and about.seat.way is not None)
            if not is_spared:
                self._tell(key, peer, manifest.round, work, 0, "differs")
        for one in manifest.held or () if way.looks == "at no friend" else ():
            if self._keys[PeerId(one.peer)].seat.way is not None and one.peer != key.peer:
                self._tell(key, PeerId(one.peer), manifest.round, Digest(one.work), 0, "equal")

    def _go_on(self) -> None:
        """Look at all that is asked for, until nobody has anything to say any more; who does not answer is asked again
        after the next round."""
        waiting = list[Audit]()
        while self._audits:
            audit = self._audits.pop(0)
            if audit.auditor.peer not in self.base.electorate:
                continue
            audit.looking = self._looked(audit)
            if audit.looking.phase != "ended":
                waiting.append(audit)
            elif audit.looking.found is not None:
                self.num_audits += 1
                self._found(audit, audit.looking.found)
        self._audits = waiting

    def _looked(self, audit: Audit) -> Looking:
        """Return what an audit has come to."""
        has_vote, name = audit.peer in self.base.electorate, self._works[audit.work]
        way = self.seats[name.seat].way
        if not has_vote or (way is not None and way.is_silent and name.is_false):
            is_over = self.base.round - 1 >= audit.after and not self._awaits(audit)
            return step(audit.looking, Missing("it shows nothing", has_vote, is_over, is_over))
        looking = step(step(audit.looking, Came()), Made(Digest("made")))
        looking = step(looking, Opened(Digest("made" if self._is_made(audit, name) else "named")))
        return step(looking, Measured(Found("differs"))) if looking.phase == "comparing" else looking

    def _is_made(self, audit: Audit, name: Name) -> bool:
        """Return whether a step of a work was made."""
        way, at = self.seats[name.seat].way, (audit.work, audit.number)
        if not name.is_false or way is None:
            return True
        if at not in self._steps:
            self._steps[at] = way.idles < 1 and float(self._luck.random()) >= way.idles
        return self._steps[at]

    def _awaits(self, audit: Audit) -> bool:
        return quarantine.awaits(self.base.charter, audit.peer, audit.round, audit.work)

    def _found(self, audit: Audit, found: Found) -> None:
        """As `weft.peer.audit.audits` does."""
        key = audit.auditor
        if self._awaits(audit) and is_equal(found):
            self._tell(key, audit.peer, audit.round, audit.work, audit.number, found.outcome)
        if not is_told(found):
            if audit.accuser is not None:
                key.false_alarms[audit.accuser] += 1
            return
        if found.outcome == "unanswered":
            key.suspicion.unanswered(audit.peer, audit.round)
        self._tell(key, audit.peer, audit.round, audit.work, audit.number, found.outcome)

    # --- verdicts ---

    def _tell(self, key: Key, peer: PeerId, round: Round, work: Digest, number: int, outcome: Outcome) -> None:
        """Tell all of a verdict, each of whom looks for itself."""
        if sum(key.peer in each for each in self._cast.values()) >= verdicts.MAX_VERDICTS:
            return
        before, manifest = self._past[round]
        weight = weighed(before, manifest, (), peer) if outcome == "differs" else None
        letter = seal(
            key.identity,
            Finding(
                run=RUN,
                peer=peer,
                round=round,
                work=work,
                before=number,
                outcome=outcome,
                weighed=UNSET if weight is None else weight,
            ),
        )
        try:
            after = verdicts.kept(self._cast, self.base, letter)
        except governance.Void:
            return
        if after is not self._cast:
            self._cast = after
            self._hear(letter, peer, round, work, number, outcome)

    def _hear(self, letter: Signed, peer: PeerId, round: Round, work: Digest, number: int, outcome: Outcome) -> None:
        if outcome == "equal" or self.base.round - 1 - round > KNOWN:
            return
        accuser = letter.signer if outcome == "differs" else None
        for me in self.base.electorate:
            key = self._keys[me]
            if is_heard(me, letter.signer, peer, key.false_alarms) and (work, DOUBTED) not in key.begun:
                key.begun.add((work, DOUBTED))
                self._begin(key, peer, round, work, number, accuser)


def _seen(seat: Seat, most: int) -> Seen:
    first = next((round for round in seat.out if seat.began is not None and round >= seat.began), None)
    return Seen(
        out_after=None if first is None or seat.began is None else first - seat.began,
        before=seat.false_before_out,
        share=(seat.num_counted - seat.num_taken) / most,
        false_share=(seat.num_false - seat.num_taken) / most,
        num_keys=len(seat.keys),
    )


def _charter(rate: float) -> Charter:
    method = spell_out(DiLoCoConfig(every=100, codec=Int8Config()), 24)
    settings = Settings(tokens=Tokens(1 << 40), seq_len=1, batch_size=1, schedule=ConstantConfig(), method=method)
    terms = AuditTerms(rate=rate, trace_every=1, quarantine=TRUST.quarantine)
    return Charter(stewards=(), serials=(), settings=settings, max_seq_len=1, audits=terms)
