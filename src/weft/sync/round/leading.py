"""What a leader says: which plan a round is merged by, and the manifest that comes of it. Pure.

held_back       whose announcements do not count, because they are in quarantine
new_plan        who contributes, who owns which part
new_manifest    what the round has counted, who is a member from then on, and who trains on what
"""

from collections.abc import Sequence, Set

from msgspec import UNSET

from weft.ids import PeerId, Tokens
from weft.sync.governance import accused, countable, enacted, in_effect
from weft.sync.records import messages, quarantine
from weft.sync.records.acts import MAX_ACTS
from weft.sync.records.charter import Charter
from weft.sync.records.counters import planned
from weft.sync.records.messages import claims_in, counted
from weft.sync.records.tuning import chosen
from weft.sync.round import machine
from weft.sync.round.shares import lease, shares, uplinks, uplinks_as_before, without_lease
from weft.wire import digest, digest_of


def held_back(state: machine.State) -> set[PeerId]:
    """Return whose announcements the round does not count, because they are in quarantine."""
    if _is_lifted(state):
        return set()
    charter = state.base.charter
    return {peer for peer, brought in state.ready.items() if not quarantine.may_count(charter, brought)}


def _is_lifted(state: machine.State) -> bool:
    return quarantine.is_lifted(state.base, state.gone | state.farewells.keys())


def new_plan(state: machine.State, usable: set[PeerId], absent: Set[PeerId]) -> messages.Collect:
    """Return a plan: at first every member that is not away owns the part of its own uplink's size, ready or not.

    Another try gives each part another owner, of those that are ready, are in this attempt and whose word is believed.
    What an owner merges and serves would pass a relay twice; where all are relayed somewhere, all own.
    """
    turn, base = state.attempt + state.revision, state.base
    able = usable - absent - state.lacking.keys() - state.refusals.keys()
    if base.is_gossip:
        usable = able - state.silent or able or usable
        owners = _answering(base, usable, turn)
    else:
        owners = _merging(state, able, absent, turn)
    return messages.Collect(
        attempt=state.attempt,
        revision=state.revision,
        contributions=countable(base, (state.ready[peer] for peer in sorted(usable))),
        owners=tuple(owners),
        awaited=_awaited(state, usable, absent),
        counters=planned(base, state.recalled, state.unusable),
    )


def _merging(state: machine.State, able: set[PeerId], absent: Set[PeerId], turn: int) -> list[PeerId]:
    base, new = state.base, set() if _is_lifted(state) else {*quarantine.members(state.base.charter)}
    able = able - new
    present = sorted(able - state.relayed) or sorted(able) or [state.me]
    owners = [present[(part + turn) % len(present)] for part in range(base.num_parts)]
    if not turn and base.num_parts == len(base.electorate):
        away = absent | state.relayed | set(base.newcomers) | new
        owners = [other if peer in away else peer for peer, other in zip(base.electorate, owners, strict=True)]
    return owners


def _answering(base: messages.Base, usable: set[PeerId], turn: int) -> list[PeerId]:
    """Return the owners in a gossip round: all who are counted answer for themselves; for the others, anybody can."""
    others = sorted(usable)
    return [
        peer if peer in usable else others[(part + turn) % len(others)] for part, peer in enumerate(base.electorate)
    ]


def _awaited(state: machine.State, usable: set[PeerId], absent: Set[PeerId]) -> tuple[PeerId, ...]:
    base = state.base
    not_awaited = {*base.newcomers, *base.resting, *state.passing, *quarantine.members(base.charter)}
    return tuple(sorted(set(base.electorate) - usable - absent - not_awaited))


def new_manifest(state: machine.State, plan: messages.Collect) -> messages.Manifest:
    """Return the manifest of a round whose parts are merged."""
    base = state.base
    peers, out = {contribution.peer for contribution in plan.contributions}, plan.counters
    waiting = [warrant for warrant in state.acts if accused(warrant) not in peers]  # nothing of a liar is counted
    acts = in_effect(base.charter, base.body, waiting, MAX_ACTS)
    after, tuned = enacted(base, acts, plan.contributions, countered=out), None
    if after.charter.settings.method.tune and not acts:
        tuned = chosen(after.charter, base.round, state.seen)
    if tuned is not None:
        after = enacted(base, acts, plan.contributions, tuned, out)
    away = state.gone | state.farewells.keys()
    if set(base.electorate) <= away | set(after.removed):  # an act may leave nobody: then it waits
        acts, after, tuned = (), enacted(base, (), plan.contributions, countered=out), None
    left = tuple(peer for peer in base.electorate if peer in away or peer in after.removed)
    room = base.charter.electors - (len(base.electorate) - len(left))
    newcomers = state.joiners - set(base.electorate) - set(after.charter.banned)
    joined = _first(newcomers, max(room, 0), base)
    members = tuple(sorted((set(base.electorate) - set(left)) | set(joined)))
    held = _held(state, plan, members)
    contributions = tuple(map(counted, plan.contributions))
    charter = quarantine.after(after.charter, base.round, members, joined, contributions, held)
    trained = without_lease(base, charter, members, plan.contributions)
    wanted = shares(charter, trained, state.speeds, claims_in(plan))
    leased = lease(base, charter, plan.contributions, {**dict.fromkeys(members, 0), **wanted})
    return messages.Manifest(
        run=base.run,
        branch=base.branch,
        round=base.round,
        attempt=plan.attempt,
        leader=state.me,
        previous=base.previous,
        contributions=contributions,
        awaited=plan.awaited,
        parts=tuple(
            messages.PartResult(owner=owner, result=state.results[part], uplink=base.uplinks[part])
            for part, owner in enumerate(plan.owners)
        ),
        members=members,
        uplinks=_uplinks(state, charter, members, joined),
        joined=joined,
        left=left,
        leases=leased.leases,
        cursor=leased.cursor,
        uncounted=leased.uncounted,
        leased_again=leased.leased_again,
        committed_tokens=Tokens(base.committed_tokens + sum(c.tokens for c in plan.contributions)),
        acts=acts,
        charter=digest_of(charter),
        tuned=tuned,
        is_gossip=base.is_gossip,
        entry=messages.entry_of(base, contributions),
        counters=out,
        held=held or UNSET,
    )


def _first(newcomers: Set[PeerId], room: int, base: messages.Base) -> tuple[PeerId, ...]:
    """Return who has a place of so many, ascending: no key is the first in more rounds than others."""
    by_luck = sorted(newcomers, key=lambda peer: digest(f"{base.previous} {peer}".encode()))
    return tuple(sorted(by_luck[:room]))


def _held(state: machine.State, plan: messages.Collect, members: Sequence[PeerId]) -> tuple[messages.HeldWork, ...]:
    """Return what a manifest holds of what was announced: it counts once others have looked at it."""
    charter = state.base.charter
    brought = [each for peer in quarantine.members(charter) if (each := state.ready.get(peer)) is not None]
    others = set(members) - {each.peer for each in plan.contributions}
    able = [each for each in brought if each.peer in others and quarantine.may_be_held(charter, each)]
    return tuple(messages.HeldWork(peer=each.peer, work=each.work) for each in able if each.work is not UNSET)


def _uplinks(
    state: machine.State, charter: Charter, members: Sequence[PeerId], joined: Sequence[PeerId]
) -> tuple[int, ...]:
    """
    Args:
        charter: after the manifest.
    """
    if quarantine.is_cut_as_before(charter, state.base.round):
        return uplinks_as_before(state.base, members)
    return uplinks(state.base, members, {*joined, *state.relayed, *quarantine.members(charter)}, state.uplinks)
