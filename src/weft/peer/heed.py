"""Whose word is heeded that others are further: which branch is preferred, and how far on it anybody can be.

Everybody tells in heartbeats where it stands. What that is worth:

    which branch   the one that counts most tokens, of those that not far fewer members hold than another; told by the
                   median of who stands there, so that one peer's claim is one of several
    how far on it  what certificates prove, which need nobody's word; where they are forgotten, no further than most of
                   those tell that hold it, nor than a quorum of the electorate gainsays: it decides, or nobody

A peer holds a branch once it has seen two rounds decided there since its majority was out of sight last, or it slept.
Where nobody does, as when all come back, tokens alone decide. All compute this from what all are told, so that of
two branches that meet one yields, and not both.

It does not know how a state comes, nor who is linked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from weft.ids import BranchId, PeerId, Round
from weft.net.messages import Heartbeat
from weft.sync.messages import Base, Manifest
from weft.sync.rules import is_quorum

NEAR = 2  # rounds
FEWER = 2  # a branch held by so many times fewer than another is not preferred, whatever it counts


@dataclass(frozen=True)
class Told:
    """Where a peer says that it stands."""

    branch: BranchId
    round: Round
    committed_tokens: int
    is_holding: bool


def told(by: Manifest | Heartbeat, is_holding: bool) -> Told:
    """Return what a head or a heartbeat says."""
    return Told(by.branch, by.round, by.committed_tokens, is_holding)


def preferred(told: Iterable[Told]) -> BranchId:
    """Return the branch that all should be on. There must be one.

    Of equal tokens the one of the later round (just opened, and not the one it leaves), then the one of the lower name.
    """
    standing: dict[BranchId, list[Told]] = {}
    for each in told:
        standing.setdefault(each.branch, []).append(each)
    holding = {branch: sum(each.is_holding for each in those) for branch, those in standing.items()}
    most = max(holding.values())
    eligible = [branch for branch, num in holding.items() if not most or FEWER * num > most]

    def order(branch: BranchId) -> tuple[int, int, BranchId]:
        tokens, round = median_low((each.committed_tokens, each.round) for each in standing[branch])
        return -tokens, -round, branch

    return min(eligible, key=order)


def furthest(told: Iterable[Told], branch: BranchId) -> int:
    """Return the furthest round of `branch` that who takes over a state believes in; -1: nobody stands there.

    That is what most of those tell that hold it, and what may be decided while they are heard.

    Args:
        told: by others: where this peer stands says nothing of how far they can be.
    """
    standing = [each for each in told if each.branch == branch]
    holding = [each for each in standing if each.is_holding] or standing
    return median_low(each.round for each in holding) + NEAR if holding else -1


def is_credible(base: Base, round: Round, told: Mapping[PeerId, Told], voteless: Iterable[PeerId] = ()) -> bool:
    """Return whether others can have decided `round` on the branch of `base`, as far as its electorate tells.

    Args:
        told: where each stands, this peer included.
        voteless: members that are back from states older than their votes: they may have decided more than they know.
    """
    known = {peer: told[peer] for peer in base.electorate if peer in told}
    lower = {peer for peer, each in known.items() if each.branch == base.branch and each.round < round}
    return not is_quorum(base, lower - set(voteless))
