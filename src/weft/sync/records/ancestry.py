"""Ancestry of branches: which rounds two of them share, the fork point, and which rounds only one of them has.

    run ──●──●──●──●──●──►            a fork of L: it left `run`, whose round 3 was the first that it does not share
              └──L──●──●──►           what L alone has: the stretch (L, 3, 6)

A charter lists the forks that led to its branch, oldest first, and the stretches of other branches that were taken in
since. Both follow from manifests, so all members of a branch know them, newcomers included. Nothing is counted twice
where no two stretches of a history overlap.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from weft.ids import Round, Tokens
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexBranch, HexDigest, HexPeer
from weft.wire import Record

MAX_FORKS = 64  # branches that led to one another: each took a minute without a majority
MAX_TAKEN = 256  # stretches that a charter remembers: the oldest is forgotten first
MAX_STRETCHES = 64  # that are brought at once

_Round = Annotated[Round, Meta(ge=0, le=1 << 53)]
_Tokens = Annotated[Tokens, Meta(ge=0, le=1 << 62)]


class Fork(Record, frozen=True, kw_only=True):
    """Where a branch left another."""

    branch: HexBranch  # that was left
    round: _Round  # the first that is not shared; the opening has this number
    manifest: HexDigest  # of the round before, the last common one
    members: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)]  # whom that one names
    committed_tokens: _Tokens  # up to there


class Stretch(Record, frozen=True, kw_only=True):
    """Rounds of one branch, from `start` up to but not including `stop`."""

    branch: HexBranch
    start: _Round
    stop: _Round

    def overlaps(self, other: "Stretch") -> bool:
        return self.branch == other.branch and self.start < other.stop and other.start < self.stop


class Taken(Record, frozen=True, kw_only=True):
    """A stretch of another branch, and the round that counted it."""

    stretch: Stretch
    branch: HexBranch
    round: _Round

    def is_in(self, path: Iterable[Stretch]) -> bool:
        return any(each.branch == self.branch and each.start <= self.round < each.stop for each in path)


@dataclass(frozen=True)
class History:
    """All that a state is made of.

    Args:
        round: the next one of `branch`.
        taken: of other branches, out of the charter.
    """

    branch: HexBranch
    forks: tuple[Fork, ...]
    round: Round
    taken: tuple[Taken, ...]

    def has(self, stretch: Stretch) -> bool:
        """Return whether a round of `stretch` is in this history, or can come to be: its own branch goes on."""
        return any(stretch.overlaps(each) for each in self._all())

    def holds(self, stretch: Stretch) -> bool:
        """Return whether all rounds of `stretch` are in this history, or can come to be."""
        return any(
            each.branch == stretch.branch and each.start <= stretch.start and stretch.stop <= each.stop
            for each in self._all()
        )

    def _all(self) -> list[Stretch]:
        own = [Stretch(branch=fork.branch, start=Round(0), stop=fork.round) for fork in self.forks]
        own.append(Stretch(branch=self.branch, start=Round(0), stop=Round(1 << 53)))
        return [*own, *(each.stretch for each in self.taken)]


@dataclass(frozen=True)
class ForkPoint:
    """What one history has that another lacks.

    Args:
        fork: where it begins.
        stretches: what it consists of, what was taken in on the way included.
    """

    fork: Fork
    stretches: tuple[Stretch, ...]


def fork_point(mine: History, theirs: History) -> ForkPoint | None:
    """Return what `mine` has and `theirs` lacks, of which it can be told apart; None: nothing.

    Where the first of it was taken in over there already, what follows the last such branch is left.
    """
    found = _since_common(mine, theirs)
    if found is None:
        return None
    fork, path = found
    known = [
        number for number, stretch in enumerate(path) if any(stretch.overlaps(each.stretch) for each in theirs.taken)
    ]
    if known:
        after = next((each for each in mine.forks if each.branch == path[known[-1]].branch), None)
        if after is None:
            return None
        fork, path = after, path[known[-1] + 1 :]
    taken = [each.stretch for each in mine.taken if each.is_in(path)]
    if any(theirs.has(each) for each in taken):
        return None  # what was taken in here and there is counted once: it cannot be taken out of the rest
    stretches = tuple(each for each in (*path, *taken) if each.start < each.stop)
    return ForkPoint(fork, stretches) if 0 < len(stretches) <= MAX_STRETCHES else None


def is_ahead(fork: Fork, theirs: History) -> bool:
    """Return whether `theirs` has yet to come to where another history left its branch."""
    return fork.branch == theirs.branch and theirs.round < fork.round


def lacking(mine: History, theirs: History) -> ForkPoint | None:
    """Return what `mine` has and `theirs` lacks, be it that it cannot be told from what they have; None: nothing.

    A stretch that they have a part of is in it whole.
    """
    found = _since_common(mine, theirs)
    if found is None:
        return None
    first, path = found
    ends = {fork.branch: fork for fork in mine.forks}
    starts = [first, *(ends[each.branch] for each in path[:-1])]
    taken = [each.stretch for each in mine.taken if each.is_in(path)]
    missing = [each for each in (*path, *taken) if each.start < each.stop and not theirs.holds(each)]
    fork = next((start for start, each in zip(starts, path, strict=True) if each in missing), first)
    return ForkPoint(fork, tuple(missing)) if missing else None


def _since_common(mine: History, theirs: History) -> tuple[Fork, list[Stretch]] | None:
    """Return where they part, and the path of `mine` from there on."""
    left_by_me = {fork.branch: fork for fork in mine.forks}
    left_by_them = {fork.branch: fork for fork in theirs.forks}
    path = [*(fork.branch for fork in mine.forks), mine.branch]
    shared = [branch for branch in path if branch in left_by_them or branch == theirs.branch]
    if not shared:
        return None
    common = shared[-1]
    own, other = left_by_me.get(common), left_by_them.get(common)
    if own is not None and (other is None or own.round <= other.round):
        fork = own
    elif other is not None:
        fork = other
    else:
        return None  # one branch
    stops = [*(each.round for each in mine.forks), mine.round]
    since, start = list[Stretch](), fork.round
    for branch, stop in list(zip(path, stops, strict=True))[path.index(common) :]:
        since.append(Stretch(branch=branch, start=start, stop=max(start, stop)))
        start = stop
    return fork, since


def with_fork(forks: tuple[Fork, ...], fork: Fork) -> tuple[Fork, ...]:
    return (*forks, fork)[-MAX_FORKS:]


def with_taken(history: History, more: Iterable[Stretch]) -> tuple[Taken, ...]:
    """Return what is taken in once the next round has taken in `more`."""
    new = (Taken(stretch=each, branch=history.branch, round=history.round) for each in more)
    return (*history.taken, *new)[-MAX_TAKEN:]


class Legacy(Record, frozen=True, kw_only=True):
    """What a branch that was given up had counted since it parted, brought as one contribution."""

    stretches: Annotated[tuple[Stretch, ...], Meta(min_length=1, max_length=MAX_STRETCHES)]
    tokens: _Tokens  # that they count; its weight is less

    @property
    def num_rounds(self) -> int:
        return sum(each.stop - each.start for each in self.stretches)
