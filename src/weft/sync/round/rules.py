"""The rules of consensus within a round, one function each: what a member remembers, promises, accepts and counts.

Single-decree consensus (Paxos: Lamport, "The part-time parliament", 1998): attempts are ballots, and members
take turns to lead them. Break one of these and the state-space search in the tests finds two manifests.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec import UNSET

from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId
from weft.rng import order_key
from weft.sync.governance import Enacted, Void, countable, enacted, with_members
from weft.sync.records import quarantine
from weft.sync.records.counters import are_due
from weft.sync.records.messages import Base, Brought, Collect, Goodbye, Manifest, Vote, work_of
from weft.sync.round.neighbours import is_sound_gossip, is_well_dealt, no_results
from weft.sync.round.shares import are_fair
from weft.wire import Record, digest_of


class Durable(Record, frozen=True, kw_only=True):
    """What a member must remember through a crash: written before the messages that depend on it."""

    base: Base
    promised: Attempt = Attempt(0)
    accepted: Vote | None = None
    has_left: bool = False


def leader(base: Base, attempt: Attempt) -> PeerId:
    """Return who leads `attempt`: members take turns in an order that nobody can choose.

    Newcomers come last: they may still be fetching what was decided before they were counted in. So do those that are
    in quarantine.
    """
    last = {*base.newcomers, *quarantine.members(base.charter)}
    order = _order(base.run, base.branch, base.round, base.electorate, tuple(sorted(last)))
    return order[attempt % len(order)]


@lru_cache(maxsize=64)  # asked with every message of a round
def _order(
    run: RunId, branch: BranchId, round: Round, electorate: tuple[PeerId, ...], last: tuple[PeerId, ...]
) -> tuple[PeerId, ...]:
    first = (peer for peer in electorate if peer not in last)
    return tuple(
        peer for group in (first, last) for peer in sorted(group, key=lambda peer: order_key(run, branch, round, peer))
    )


def is_quorum(base: Base, voters: Iterable[PeerId], left: Iterable[PeerId] = ()) -> bool:
    """Return whether `voters` are a majority of the electorate less those who `left`.

    Two quorums of one electorate share a member: exactly half counts only with the tie-breaker.
    """
    electorate = set(base.electorate) - set(left)
    num_votes = len(electorate & set(voters))
    if 2 * num_votes == len(electorate):
        return base.keeper in electorate and base.keeper in voters
    return 2 * num_votes > len(electorate)


def is_under_way(base: Base, heard: Iterable[PeerId], left: Iterable[PeerId] = ()) -> bool:
    """Return whether so many have said what they bring that others are waited for only so long: a quorum, of which who
    rests is a part, and half of those that do not. One, where nobody is waited for."""
    if base.charter.settings.method.wait == "ready":
        return bool(set(heard) & set(base.electorate))
    heard, to_train = set(heard), set(base.electorate) - set(base.resting) - set(left)
    return is_quorum(base, heard.union(base.resting), left) and 2 * len(heard & to_train) >= len(to_train)


def may_promise(durable: Durable, attempt: Attempt) -> bool:
    return not durable.has_left and attempt > durable.promised


def may_accept(durable: Durable, attempt: Attempt, manifest: Manifest) -> bool:
    if durable.has_left or attempt < durable.promised:
        return False
    return durable.accepted is None or durable.accepted.attempt < attempt or durable.accepted.manifest == manifest


def spent_farewells(farewells: Mapping[PeerId, Goodbye], attempt: Attempt) -> set[PeerId]:
    """Return who has left for good as far as `attempt` is concerned.

    Who promised a later attempt before leaving still counts in this one: that attempt's leader may hold the promise.
    """
    return {peer for peer, farewell in farewells.items() if farewell.promised <= attempt}


def newest(votes: Iterable[Vote | None]) -> Manifest | None:
    """Return the manifest accepted in the latest attempt: the only one that may have been chosen already."""
    cast = [vote for vote in votes if vote is not None]
    return max(cast, key=lambda vote: vote.attempt).manifest if cast else None


def is_successor(base: Base, manifest: Manifest) -> bool:
    """Return whether `manifest` may follow on `base`.

    All that follows from the base and from who contributed is checked here, so a leader can choose only who counts,
    who is gone, who joins, and which acts take effect first. The bytes that it counts are checked when they are
    fetched.
    """
    peers = [contribution.peer for contribution in manifest.contributions]
    try:
        done = enacted(base, manifest.acts, manifest.contributions, manifest.tuned, manifest.counters)
        after = with_members(done, manifest)
    except Void:
        return False
    is_in_place = (manifest.run, manifest.branch, manifest.round) == (base.run, base.branch, base.round)
    return (
        is_in_place
        and manifest.previous == base.previous
        and manifest.leader == leader(base, manifest.attempt)
        and bool(peers)
        and peers == sorted(set(peers))
        and set(peers) <= set(base.electorate) - {after.struck}
        and _may_await(base, manifest.awaited, peers)
        and tuple(part.uplink for part in manifest.parts) == base.uplinks
        and {part.owner for part in manifest.parts} <= set(base.electorate)
        and manifest.is_gossip == base.is_gossip
        and (not manifest.is_gossip or _is_sound_gossip(base, manifest))
        and len(manifest.uplinks) == len(manifest.members)
        and countable(base, manifest.contributions) == manifest.contributions
        and manifest.charter == digest_of(after.charter)
        and _has_right_members(base, manifest, after)
        and are_fair(base, after.charter, manifest)
        and manifest.committed_tokens == base.committed_tokens + sum(each.tokens for each in manifest.contributions)
        and _has_right_entry(base, manifest)
        and _have_right_works(base, manifest.contributions)
        and quarantine.is_kept(base, manifest)
    )


def _has_right_entry(base: Base, manifest: Manifest) -> bool:
    entry = manifest.entry
    if not base.charter.is_recorded or entry is UNSET:
        return not base.charter.is_recorded and entry is UNSET
    return entry.past == (base.past or b"") and entry.work == work_of(manifest.contributions)


def _have_right_works(base: Base, contributions: Iterable[Brought]) -> bool:
    return all(says_right_work(base, each) for each in contributions)


def says_right_work(base: Base, brought: Brought) -> bool:
    """Return whether what a member brings says how it came about, where that is audited: of what a group brings, or a
    branch had counted, nobody could. Nor could a member of a stage that computes for a group be struck out."""
    is_audited = base.charter.audits is not UNSET
    if brought.group is not None and (is_audited or base.charter.passages is not UNSET):
        return False
    return (brought.work is not UNSET) == is_audited and not (is_audited and brought.legacy is not None)


def _is_sound_gossip(base: Base, manifest: Manifest) -> bool:
    owners = [part.owner for part in manifest.parts]
    return is_sound_gossip(base, owners, manifest.contributions) and no_results(manifest.parts)


def _has_right_members(base: Base, manifest: Manifest, enacted: Enacted) -> bool:
    left, joined, before = set(manifest.left), set(manifest.joined), set(base.electorate)
    is_change = set(enacted.removed) <= left <= before and not joined & (before | set(enacted.charter.banned))
    is_right_number = 0 < len(manifest.members) <= base.charter.electors
    return is_change and is_right_number and list(manifest.members) == sorted((before - left) | joined)


def _may_await(base: Base, awaited: tuple[PeerId, ...], contributors: list[PeerId]) -> bool:
    may = set(base.electorate) - set(contributors) - set(quarantine.members(base.charter))
    return list(awaited) == sorted(set(awaited) & may)


def is_well_cut(base: Base, peer: PeerId, parts: Sequence[Digest]) -> bool:
    """Return whether `peer` may bring a payload of these parts."""
    return len(parts) == base.num_parts and (not base.is_gossip or is_well_dealt(base, peer, parts))


def is_sound(base: Base, plan: Collect) -> bool:
    peers = [contribution.peer for contribution in plan.contributions]
    are_well_cut = all(is_well_cut(base, each.peer, each.parts) for each in plan.contributions)
    is_known = set(peers) <= set(base.electorate) and set(plan.owners) <= set(base.electorate)
    return (
        bool(peers)
        and peers == sorted(set(peers))
        and are_well_cut
        and countable(base, plan.contributions) == plan.contributions
        and _may_await(base, plan.awaited, peers)
        and _have_right_works(base, plan.contributions)
        and are_due(base, plan.counters or ())
        and is_known
        and len(plan.owners) == base.num_parts
        and (not base.is_gossip or is_sound_gossip(base, plan.owners, plan.contributions))
    )
