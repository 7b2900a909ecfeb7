"""What members have found of each other's work, until a manifest deals with it: pure.

    kept       one letter of a member on one work, while it can come to something
    warrants   what more than half of the judges have found, for the next manifest: of the settled members, as long as
               there are some (`quarantine.judges`); what a member in quarantine has brought they alone find right
    still      what can come to something after a round

Of one member no more than `MAX_VERDICTS` are kept: those that it got no answer give way first, then the oldest. So
nobody can be kept from saying what it finds by others who give it no answers.

Who has left or was struck out is counted no more: verdicts are of who is a judge when they are counted. Of who was
struck out by evidence they can still say what a round has counted of the false work.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from msgspec import UNSET

from weft.ids import Digest, PeerId, Round, short
from weft.sync import governance
from weft.sync.governance import Void
from weft.sync.records import acts, quarantine
from weft.sync.records.charter import UNANSWERED_FOR
from weft.sync.records.counters import WITHIN
from weft.sync.records.messages import Base
from weft.wire import Signed, claimed

MAX_VERDICTS = 16  # of one member that may wait
JUDGED_FOR = 256  # rounds after the one that counts it, in which a work can be found false


class Judged(NamedTuple):
    """What verdicts that count together say."""

    peer: PeerId
    round: Round
    work: Digest
    outcome: str


Cast = Mapping[Judged, Mapping[PeerId, Signed]]  # by what they say, and by who


def judged_of(verdict: acts.Finding) -> Judged:
    return Judged(PeerId(verdict.peer), verdict.round, Digest(verdict.work), verdict.outcome)


def kept(cast: Cast, base: Base, letter: Signed) -> Cast:
    """Return the verdicts with one more; the very same where that one is there.

    Raises:
        Void: it comes to nothing.
    """
    verdict, voter = governance.read_finding(letter), letter.signer
    judged = judged_of(verdict)
    if voter in cast.get(judged, {}):
        return cast
    if verdict.run != base.run or voter not in base.electorate or voter == verdict.peer:
        raise Void("only other members of this run judge a member's work")
    is_right = judged.outcome == "equal"
    if is_right and voter not in quarantine.settled(base.charter, base.electorate):
        raise Void("who is in quarantine itself clears nobody")
    if not may_judge(base, judged, is_weighed=verdict.weighed is not UNSET):
        raise Void("it finds no fault, or the fault is dealt with")
    mine = sorted((each for each in cast if voter in cast[each]), key=_weight)
    if len(mine) < MAX_VERDICTS:
        return {**cast, judged: {**cast.get(judged, {}), voter: letter}}
    if _weight(judged) < _weight(mine[0]):
        raise Void(f"{MAX_VERDICTS} verdicts of {short(voter)} wait already")
    rest = {by: each for by, each in cast[mine[0]].items() if by != voter}
    left = {**cast, mine[0]: rest} if rest else {each: cast[each] for each in cast if each != mine[0]}
    return {**left, judged: {**left.get(judged, {}), voter: letter}}


def _weight(judged: Judged) -> tuple[bool, Round, Judged]:
    """Return what tells which of two verdicts of one member gives way: the same on all machines, in whatever order they
    come."""
    return judged.outcome != "unanswered", judged.round, judged


def still(cast: Cast, base: Base) -> Cast:
    """Return the verdicts that can come to something in the round of `base`."""
    left = {
        judged: {by: each for by, each in mine.items() if _may_count(base, judged, each)}
        for judged, mine in cast.items()
    }
    return {judged: mine for judged, mine in left.items() if mine}


def _may_count(base: Base, judged: Judged, letter: Signed) -> bool:
    return may_judge(base, judged) or may_judge(
        base, judged, is_weighed=claimed(letter, acts.Finding).weighed is not UNSET
    )


def may_judge(base: Base, judged: Judged, *, is_weighed: bool = False) -> bool:
    """Return whether a verdict can still come to something.

    Args:
        is_weighed: it tells what the round has counted of the work.
    """
    if not base.charter.audits:
        return False
    if is_weighed and governance.may_note_false(base.charter, judged.peer, judged.round):
        return 0 < base.round - judged.round <= WITHIN
    if judged.peer not in base.electorate:
        return False
    if judged.outcome == "equal":
        return quarantine.awaits(base.charter, judged.peer, judged.round, judged.work)
    judged_for = JUDGED_FOR if judged.outcome == "differs" else UNANSWERED_FOR
    if not base.round - judged_for <= judged.round < base.round:
        return False
    if judged.outcome == "differs":
        return not base.charter.is_dealt_with(judged.peer, judged.round)
    return not governance.is_counted(base.charter, judged.peer, judged.round)


def warrants(cast: Cast, base: Base) -> list[acts.Warrant]:
    """Return what more than half of the judges have found: who finds that steps differ was shown them, and who was
    not adds to those that got no answer."""
    found = list[acts.Warrant]()
    for judged in sorted(cast):
        mine = dict(cast[judged])
        if judged.outcome == "unanswered":
            mine = {**cast.get(judged._replace(outcome="differs"), {}), **mine}
        if judged.outcome == "equal":
            judges = tuple(quarantine.settled(base.charter, base.electorate))
        else:
            judges = quarantine.judges(base.charter, base.electorate, judged.peer)
        voters = who_counts(mine, judges)
        if governance.is_majority(len(voters), len(judges)):
            found.append(acts.Warrant(letters=tuple(mine[voter] for voter in voters)))
    return found


def who_counts(cast: Mapping[PeerId, Signed], judges: Collection[PeerId]) -> list[PeerId]:
    """Return whose verdicts count now."""
    return sorted(voter for voter in cast if voter in judges)


def letters(cast: Cast) -> Iterator[Signed]:
    for each in cast.values():
        yield from each.values()


def findings(cast: Cast) -> list[tuple[Signed, acts.Finding]]:
    return [(letter, claimed(letter, acts.Finding)) for letter in letters(cast)]
