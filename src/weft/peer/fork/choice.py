"""The fork choice: whose word is followed that others are further, and what it takes to move a peer that is in a round.

Everybody tells where it stands: branch, round, tokens. That is anybody's word. A certificate is more: who signed it
stands there. So a peer that *holds* its branch, with a majority in sight, goes over to another, or to a state that it
cannot follow round by round, only where a head is signed by as many members that it knows as stand beside it, itself
included, two at most:

    fewer signed     not followed, whatever it counts
    as many          the branch that counts more tokens goes on
    two, here one    that one goes on, whatever this one counts

Of two branches that meet one yields, then, whoever is linked to whom, for a certificate convinces whoever gets it. Who
holds nothing, because it comes or comes back, goes by what it is told: of branches with something new, of those that
two or more tell the one that counts most, and there no further than most tell.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from weft.ids import BranchId, Round
from weft.net.messages import Heartbeat
from weft.sync.governance.enact import history
from weft.sync.records.ancestry import Stretch
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest

MOST_NEEDED = 2  # signers: one liar is one
NEAR = 2  # rounds that may be decided while others tell

Told = Manifest | Heartbeat


@dataclass(frozen=True)
class Proof:
    """A head that members have signed.

    Args:
        num_signers: of those that this peer knows as members, at some time, of what it stands on.
    """

    manifest: Manifest
    num_signers: int


def is_further(one: Told, other: Manifest) -> bool:
    """Return whether `one` is later than `other` on its branch, or on one to prefer by what it counts.

    That is one of more tokens, of a later round (just opened, and not the one it leaves), or of a lower name.
    """
    if one.branch == other.branch:
        return one.round > other.round
    return _order(one) < _order(other)


def is_followed(mine: Manifest, charter: Charter, num_beside: int, proof: Proof) -> bool:
    """Return whether who holds `mine` goes over to what is proven.

    Args:
        charter: after `mine`.
        num_beside: members of its electorate that stand there too, itself included.
    """
    needed, found = min(num_beside, MOST_NEEDED), min(proof.num_signers, MOST_NEEDED)
    there = proof.manifest
    if found < needed or there.branch == mine.branch:
        return found >= needed and there.round > mine.round + 1  # one round on can be followed, or does not follow
    at = Stretch(branch=there.branch, start=there.round, stop=Round(there.round + 1))
    return not history(mine, charter).has(at) and (found > needed or is_further(there, mine))


def believed(told: Sequence[Told]) -> tuple[BranchId, int]:
    """Return the branch that who comes goes to, and the furthest round of it that it believes in."""
    best = chosen(told)
    return best, furthest([each.round for each in told if each.branch == best])


def chosen(told: Iterable[Told]) -> BranchId:
    """Return the branch that who comes goes to: it is told by as many as any, of two at most, and counts most."""
    told_of: dict[BranchId, list[Told]] = {}
    for each in told:
        told_of.setdefault(each.branch, []).append(each)

    def order(branch: BranchId) -> tuple[int, int, int, BranchId]:
        there = told_of[branch]
        tokens, round, _ = median_low(_order(each) for each in there)
        return -min(len(there), MOST_NEEDED), tokens, round, branch

    return min(told_of, key=order)


def furthest(rounds: Sequence[Round]) -> int:
    """Return the furthest round to believe in where others tell of `rounds`, one or more."""
    return median_low(rounds) + NEAR


def _order(told: Told) -> tuple[int, int, BranchId]:
    return -told.committed_tokens, -told.round, told.branch
