"""Gossip rounds, in which members exchange whole payloads with their neighbours, instead of merging parts of all.

    reduce      part p of a payload: its slice p, for the owner of part p, who merges it and gives the result to all
    gossip      part p of a payload: all of it, if the member whose part that is takes from its sender; else nothing

So who needs which bytes is in the announcement of either, and rounds of both kinds are decided alike: each owner of a
part says that it has what it needs before a manifest is proposed. In a gossip round it says so for itself alone, and
there is no result. A member that is counted therefore holds what is counted of its neighbours, and they what is counted
of it: what is exchanged applies at both ends or at neither.

Of which kind a round is follows from its base. In some, all members make the mean of what they have instead (`Method`
computes it): each `mean_every` rounds, and where the run may end with the round. Where what a member knows of its
neighbours is added up from round to round, others cannot take their place without one.
"""

from collections.abc import Sequence

from weft.ids import Digest, PeerId, RunId
from weft.sync.method.choices import Choices
from weft.sync.method.graph import Mixing, mixing
from weft.sync.records.messages import Base, Brought, Collect, Contribution, PartResult
from weft.wire import digest

NOTHING = digest(b"")  # a part that nobody needs, and the result of a gossip round


def takes_from(base: Base, peer: PeerId) -> dict[PeerId, float]:
    """Return the neighbours whose payloads `peer` takes in a gossip round, ascending, and their weights."""
    members = base.electorate
    if peer not in members:
        return {}
    row = _mixing(base)[members.index(peer)]
    return {members[other]: row[other] for other in sorted(row)}


def receives(base: Base, peer: PeerId) -> tuple[bool, ...]:
    """Return of each part whether the member whose it is takes what `peer` sends."""
    index = base.electorate.index(peer) if peer in base.electorate else None
    return tuple(index in row for row in _mixing(base))


def dealt(base: Base, peer: PeerId, payload: Digest) -> tuple[Digest, ...]:
    return tuple(payload if is_taken else NOTHING for is_taken in receives(base, peer))


def is_well_dealt(base: Base, peer: PeerId, parts: Sequence[Digest]) -> bool:
    """Return whether `peer` may bring these parts to a gossip round: all its neighbours take the same."""
    if peer not in base.electorate:
        return True
    taken = {part for part in parts if part != NOTHING}
    if not taken:
        return not any(receives(base, peer))
    return len(taken) == 1 and tuple(parts) == dealt(base, peer, *taken)


def is_sound_gossip(base: Base, owners: Sequence[PeerId], counted: Sequence[Brought]) -> bool:
    """Return whether all who are counted in a gossip round have said themselves that they hold what they take.

    They bring their own parameters: neither the mean of a group nor what a branch had counted.
    """
    peers = {each.peer for each in counted}
    parts = zip(base.electorate, owners, strict=True)
    return all(owner == peer for peer, owner in parts if peer in peers) and all(map(is_own, counted))


def is_own(brought: Brought) -> bool:
    return brought.group is None and brought.legacy is None


def taken(base: Base, plan: Collect, peer: PeerId) -> tuple[Contribution, ...]:
    """Return the contributions that `peer` takes in a gossip round as planned."""
    neighbours = takes_from(base, peer)
    return tuple(each for each in plan.contributions if each.peer in neighbours)


def _mixing(base: Base) -> Mixing:
    return mixing_of(base.charter.settings.method, len(base.electorate), base.run, base.round)


def mixing_of(choices: Choices, num: int, run: RunId, round: int) -> Mixing:
    """Return the mixing matrix of a gossip round of `num` members."""
    assert choices.graph is not None, "only who gossips has neighbours"
    return mixing(choices.graph.graph, num, choices.graph.degree, run, round)


def no_results(parts: Sequence[PartResult]) -> bool:
    """Return whether the parts of a manifest are those of a gossip round."""
    return all(part.result == NOTHING for part in parts)
