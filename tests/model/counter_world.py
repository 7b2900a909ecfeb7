"""Explicit-state search of false works that are taken out of the model again, on two branches that part and meet.

What is searched is what charters say, and what rounds may do by them: production code. Beside it stands what the
parameters hold: which works of a liar are in them. A round counts its work; a later one takes it out; one that goes
back has the parameters of an earlier one; a branch that is brought adds what it has come to since the two parted.

A majority may find any work false that one of both branches has counted, at any time, on either branch. Any leader may
say that a round takes the liar's work out, and does so where it may. All may go back, once on each branch.

Which world is wrong:

    Twice   a work is taken out that is not in the parameters, or comes into them a second time
    Kept    a charter says that a work was taken out which is in the parameters, or what is due never goes
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from model.search import num_reached
from model.world import first_base
from weft.ids import BranchId, Digest, Round
from weft.sync import governance
from weft.sync.governance import Void
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.records import counters, rewinds
from weft.sync.records.acts import Rewind, Weighed
from weft.sync.records.charter import AuditTerms, Charter, Struck
from weft.sync.records.messages import Base
from weft.wire import digest, digest_of

METHOD = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0))
START = first_base(3)
LIAR, MEMBERS = START.electorate[0], START.electorate
BRANCHES = (START.branch, BranchId(digest(b"the branch that leaves")))

Work = tuple[int, int]  # the branch, by its number, and the round that has counted it


class Bounds(NamedTuple):
    """
    Args:
        num_rounds: of each branch; the liar's work is counted in the first `num_counted` of all, and in one after the
            branches have parted.
        can_part: whether they do.
        num_back: how often each may go back.
    """

    num_rounds: int = 5
    num_counted: int = 1
    can_part: bool = True
    num_back: int = 0


class Chain(NamedTuple):
    """
    Args:
        charter: after the last round.
        states: works that are in the parameters, after each round, the opening first.
    """

    branch: int
    charter: Charter
    states: tuple[frozenset[Work], ...]
    num_back: int = 0

    @property
    def base(self) -> Base:
        return replace(START, branch=BRANCHES[self.branch], round=Round(len(self.states)), charter=self.charter)


class World(NamedTuple):
    own: Chain
    other: Chain | None = None
    parted_at: int = 0  # the first round that both do not share
    is_whole: bool = False  # what the other had was brought


class Wrong(AssertionError):
    pass


class Twice(Wrong):
    pass


class Kept(Wrong):
    pass


class CounterSearch:
    """Explores all worlds breadth first."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.num_out = self.num_brought = 0
        settings = replace(START.charter.settings, method=METHOD)
        terms = AuditTerms(rate=1.0, trace_every=1)
        self._charter = replace(START.charter, settings=settings, audits=terms)

    def run(self) -> int:
        """Look at every world within bounds; return how many there are.

        Raises:
            Wrong: in one of them.
        """
        return num_reached(World(Chain(0, self._charter, (frozenset(),))), self._check, self._following)

    def _following(self, world: World) -> Iterator[World]:
        counted = {each for chain in (world.own, world.other) if chain for each in set().union(*chain.states)}
        for own in self._next(world.own, counted):
            yield world._replace(own=own)
        if world.other is None:
            if self.bounds.can_part and len(world.own.states) > 1:
                yield world._replace(other=_left(world.own), parted_at=len(world.own.states))
            return
        for other in self._next(world.other, counted):
            yield world._replace(other=other)
        if not world.is_whole and len(world.own.states) < self.bounds.num_rounds:
            yield from self._met(world, world.other)

    # --- one branch ---

    def _next(self, chain: Chain, counted: set[Work]) -> Iterator[Chain]:
        for work in sorted(counted):
            yield chain._replace(charter=_found_false(chain.base, work))
        if len(chain.states) >= self.bounds.num_rounds:
            return
        for out in ((), (LIAR,)):
            try:
                charter = governance.enacted(chain.base, (), (), countered=out).charter if out else chain.charter
            except Void:
                continue
            yield self._decided(chain, charter, self._after(chain, out))
        if chain.num_back < self.bounds.num_back:
            yield from self._back(chain)

    def _after(self, chain: Chain, out: Sequence[str]) -> frozenset[Work]:
        """Return what is in the parameters after the next round."""
        held, round = chain.states[-1], len(chain.states)
        if out:
            false = counters.of(chain.charter, LIAR) or (chain.charter.false_works or ())[-1]
            work = BRANCHES.index(BranchId(false.weighed.branch)), int(false.round)
            if work not in held:
                raise Twice(work)
            held, self.num_out = held - {work}, self.num_out + 1
        is_counted = round <= self.bounds.num_counted or (chain.branch == 1 and round == len(_shared(chain)) + 1)
        return held | {(chain.branch, round)} if is_counted and not chain.charter.struck else held

    def _decided(self, chain: Chain, charter: Charter, held: frozenset[Work]) -> Chain:
        return chain._replace(charter=charter, states=(*chain.states, held))

    def _back(self, chain: Chain) -> Iterator[Chain]:
        for to in range(len(chain.states)):
            rewind = Rewind(round=Round(to), manifest=Digest("00" * 32), state=Digest("00" * 32), reason="")
            if not rewinds.why_not(chain.charter, chain.base.round, rewind):
                charter = rewinds.after(chain.charter, chain.base.round, rewind)
                yield self._decided(chain, charter, chain.states[to])._replace(num_back=chain.num_back + 1)

    # --- two branches ---

    def _met(self, world: World, other: Chain) -> Iterator[World]:
        """The other brings what it has come to since they parted."""
        fork = other.charter.forks[-1]
        if counters.is_mixed(other.charter, fork):
            return
        before, now, held = other.states[world.parted_at - 1], other.states[-1], world.own.states[-1]
        if before - now:  # its parameters less what both had: those works would be taken out here, too
            raise Twice(before - now)
        self.num_brought += 1
        own = self._decided(world.own, world.own.charter, held | now - before)
        yield World(own, other, world.parted_at, is_whole=True)

    # --- which world is wrong ---

    def _check(self, world: World) -> None:
        self._check_chain(world.own)
        if world.other is not None:
            self._check_chain(world.other)

    def _check_chain(self, chain: Chain) -> None:
        for each in chain.charter.false_works or ():
            work = BRANCHES.index(BranchId(each.weighed.branch)), int(each.round)
            if each.taken_out and work in chain.states[-1]:
                raise Kept(work)
        if due := counters.due(chain.base):
            out = counters.planned(chain.base, [LIAR], set())
            after = governance.enacted(chain.base, (), (), countered=out).charter
            if counters.due(replace(chain.base, charter=after)) == due:
                raise Kept(due)


def _found_false(base: Base, work: Work) -> Charter:
    """Return what holds once a majority says that a work was false, where that has an effect: its author is banned, or
    was already."""
    charter, round = base.charter, Round(work[1])
    if not governance.may_note_false(charter, LIAR, round):
        if charter.is_dealt_with(LIAR, round):
            return charter
        charter = replace(charter, struck=(Struck(peer=LIAR, round=max(round, base.round)),))
    weighed = Weighed(
        branch=BRANCHES[work[0]], manifest=digest(b"of it"), weights=(1,), late=0, method=digest_of(METHOD)
    )
    return counters.with_false(charter, LIAR, round, weighed)


def _left(own: Chain) -> Chain:
    """Return the branch that begins where the next round would."""
    return Chain(1, governance.forked(own.base, MEMBERS), (*own.states, own.states[-1]), own.num_back)


def _shared(chain: Chain) -> tuple[frozenset[Work], ...]:
    fork = chain.charter.forks[-1]
    return chain.states[: fork.round + 1]
