"""The data plane of a round: announce contributions, plan who merges what, merge, hold.

A leader may plan anew until it proposes; a plan that cannot be carried out costs a revision, not an attempt.
A manifest is proposed only once a majority holds every result byte, so whatever is committed can be fetched.

Whose word counts when an owner says that it cannot have somebody's contribution, or cannot decode it.

    owner B: "C has not delivered"     C may have failed, or B lies: one word against another

The leader believes itself. Of others it takes two witnesses to leave a contribution out, its own too: two owners, or
one and membership, which says that C is away; and on their word fewer than half of those that announced are left out.
Whoever stands alone with its word merges nothing more, and what it says it lacks is merged by others. So one liar keeps
nobody out; and whatever the others say, each of them ends few plans: in the end the leader owns all parts itself.
"""

from collections import Counter
from collections.abc import Set

from weft.ids import PeerId, Tokens
from weft.sync.governance.enact import accused, in_effect
from weft.sync.governance.legacy import countable, enacted
from weft.sync.records.acts import MAX_ACTS, Warrant
from weft.sync.records.messages import Base, Collect, Holding, Manifest, Merged, PartResult, Pass, Ready, Stuck
from weft.sync.records.tuning import chosen
from weft.sync.round import machine
from weft.sync.round.decide import propose
from weft.sync.round.groups import claims_in, contribution, counted
from weft.sync.round.leases import lease, shares, without_lease
from weft.sync.round.neighbours import NOTHING, is_gossip
from weft.sync.round.part_sizes import uplinks
from weft.sync.round.rules import is_quorum, is_sound, is_under_way, leader, spent_farewells
from weft.wire import digest_of

WITNESSES = 2


def judged(state: machine.State, owner: PeerId, missing: Set[PeerId]) -> machine.State:
    """Return the leader's state once an owner says that it lacks contributions which are planned."""
    words = {**state.lacking, owner: state.lacking.get(owner, frozenset()) | missing}
    mine = words.pop(state.me, frozenset())
    away = state.suspected | state.gone | state.farewells.keys()
    num_words = Counter(peer for lacking in words.values() for peer in lacking)
    believed = {peer for peer, num in num_words.items() if num + (peer in away) >= WITNESSES}
    unusable = state.unusable | mine
    if 2 * len(unusable | believed) < len(state.ready):
        unusable |= believed
    lacking = {peer: alone for peer, word in words.items() if (alone := word - unusable)}
    return machine.replace(state, unusable=unusable, lacking=lacking)


def announce(state: machine.State, ready: Ready) -> machine.Result:
    if state.committed is not None or state.me in state.ready:
        return state, ()
    mine = contribution(state.base.charter, state.me, ready)
    state = machine.replace(state, ready={**state.ready, state.me: mine}, announced=ready)
    return machine.then((state, (machine.Broadcast(message=ready),)), make_plan)


def pass_on(state: machine.State) -> machine.Result:
    """Bring nothing to this round, and say so."""
    if state.committed is not None or state.me in state.ready or state.me in state.passing:
        return state, ()
    state = machine.replace(state, passing=state.passing | {state.me})
    return machine.then((state, (machine.Broadcast(message=Pass()),)), make_plan)


def make_plan(state: machine.State) -> machine.Result:
    """Leader: fix who contributes and who owns which part, once everybody expected is ready or grace is over.

    Nobody waits for a newcomer: it may still be fetching what was decided before it was counted in. What it announces
    in time counts like anybody's, and what comes later stays in its carry. The same holds for who was leased nothing,
    for who is paused, and for whose payload is lost; the last two have been heard of, so grace begins with them as with
    who is ready. Where the method waits for who is ready, nobody else is waited for.
    """
    if (
        not machine.is_leading(state)
        or state.plan is not None
        or state.proposal is not None
        or state.committed is not None
    ):
        return state, ()
    struck = _struck_out(state.acts)
    absent = state.suspected | state.gone | state.farewells.keys() | struck
    usable = {peer for peer in state.ready if peer in state.base.electorate} - state.unusable - struck
    if not usable:
        return state, ()
    waiting_for = set(state.base.electorate) - usable - absent - state.unusable - set(state.base.newcomers)
    waiting_for -= state.passing | set(state.base.resting)
    if state.base.charter.settings.method.wait == "ready":
        waiting_for = set()
    if waiting_for and not state.is_grace_over:
        is_grace_due = is_under_way(state.base, usable | state.unusable | state.passing, state.farewells)
        return state, (machine.SetTimer(timer="grace", attempt=state.attempt),) if is_grace_due else ()
    plan = new_plan(state, usable, absent)
    has_work = any(each.tokens for each in plan.contributions)  # of nothing there is no mean
    return follow(state, plan, state.me) if has_work else (state, ())


def give_up(state: machine.State, peer: PeerId) -> machine.Result:
    """Leader: wait no more for a payload that cannot be had; its work stays in its owner's carry."""
    if state.plan is not None or peer in state.unusable:
        return state, ()
    return make_plan(machine.replace(state, unusable=state.unusable | {peer}))


def take_acts(state: machine.State, acts: tuple[Warrant, ...]) -> machine.Result:
    """Take up which acts wait. Leader: plan again where the plan counts one that has been struck out since."""
    state = machine.replace(state, acts=acts)
    plan, struck = state.plan, _struck_out(acts)
    if plan is None or state.proposal is not None or not machine.is_leading(state):
        return state, ()
    if not struck & {contribution.peer for contribution in plan.contributions}:
        return state, ()
    return make_plan(machine.replace(machine.without_plan(state), revision=state.revision + 1))


def _struck_out(acts: tuple[Warrant, ...]) -> set[PeerId]:
    return {peer for warrant in acts if (peer := accused(warrant)) is not None}


def new_plan(state: machine.State, usable: set[PeerId], absent: Set[PeerId]) -> Collect:
    """Return a plan: at first every member that is not away owns the part of its own uplink's size, ready or not.

    Another try gives each part another owner, of those that are ready and whose word is believed. What an owner merges
    and serves would pass a relay twice; where all are relayed somewhere, all own.
    """
    turn, base = state.attempt + state.revision, state.base
    able = usable - absent - state.lacking.keys()
    if is_gossip(base):
        usable = able - state.silent or able or usable
        owners = _answering(base, usable, turn)
    else:
        owners = _merging(state, able, absent, turn)
    return Collect(
        attempt=state.attempt,
        revision=state.revision,
        contributions=countable(base, (state.ready[peer] for peer in sorted(usable))),
        owners=tuple(owners),
        awaited=_awaited(state, usable, absent),
    )


def _merging(state: machine.State, able: set[PeerId], absent: Set[PeerId], turn: int) -> list[PeerId]:
    base = state.base
    present = sorted(able - state.relayed) or sorted(able) or [state.me]
    owners = [present[(part + turn) % len(present)] for part in range(base.num_parts)]
    if not turn and base.num_parts == len(base.electorate):
        away = absent | state.relayed | set(base.newcomers)
        owners = [other if peer in away else peer for peer, other in zip(base.electorate, owners, strict=True)]
    return owners


def _answering(base: Base, usable: set[PeerId], turn: int) -> list[PeerId]:
    """Return the owners in a gossip round: all who are counted answer for themselves; for the others, anybody can."""
    others = sorted(usable)
    return [
        peer if peer in usable else others[(part + turn) % len(others)] for part, peer in enumerate(base.electorate)
    ]


def _awaited(state: machine.State, usable: set[PeerId], absent: Set[PeerId]) -> tuple[PeerId, ...]:
    base = state.base
    not_awaited = {*base.newcomers, *base.resting, *state.passing}
    return tuple(sorted(set(base.electorate) - usable - absent - not_awaited))


def replan(state: machine.State, sender: PeerId, stuck: Stuck) -> machine.Result:
    """Leader: an owner cannot have a contribution, so plan again without the one or the other (`sync.stuck`).

    What is not counted stays in its owner's carry.
    """
    plan = state.plan
    if plan is None or state.proposal is not None or (stuck.attempt, stuck.revision) != (plan.attempt, plan.revision):
        return state, ()
    missing = {each.peer for each in plan.contributions} & set(stuck.missing)
    is_owner = stuck.part < len(plan.owners) and plan.owners[stuck.part] == sender
    if not machine.is_leading(state) or not is_owner or not missing:
        return state, ()
    return make_plan(judged(machine.replace(machine.without_plan(state), revision=state.revision + 1), sender, missing))


def follow(state: machine.State, plan: Collect, sender: PeerId) -> machine.Result:
    """Take up a plan of the attempt's leader: merge the parts this member owns."""
    is_old = state.plan is not None and (plan.attempt, plan.revision) <= (state.plan.attempt, state.plan.revision)
    if is_old or not is_sound(state.base, plan) or state.committed is not None:
        return state, ()
    outputs: list[machine.Output] = []
    if sender == state.me:
        outputs.append(machine.Broadcast(message=plan))
    state = machine.replace(machine.without_plan(state), plan=plan)
    outputs += [machine.Merge(plan=plan, part=part) for part, owner in enumerate(plan.owners) if owner == state.me]
    return state, tuple(outputs)


def publish(state: machine.State, done: machine.MergeDone) -> machine.Result:
    plan = done.plan
    if plan != state.plan:
        return state, ()
    merged = Merged(attempt=plan.attempt, revision=plan.revision, part=done.part, result=done.result)
    state = machine.replace(state, results={**state.results, done.part: done.result})
    return machine.then((state, (machine.Broadcast(message=merged),)), lambda state: hold(state, plan, done.part))


def report_stuck(state: machine.State, failed: machine.MergeFailed) -> machine.Result:
    plan = failed.plan
    stuck = Stuck(attempt=plan.attempt, revision=plan.revision, part=failed.part, missing=failed.missing)
    return state, (machine.Send(to=leader(state.base, plan.attempt), message=stuck),)


def learn_result(state: machine.State, sender: PeerId, merged: Merged) -> machine.Result:
    plan = state.plan
    if plan is None or (merged.attempt, merged.revision) != (plan.attempt, plan.revision):
        return state, ()
    if merged.part in state.results or not 0 <= merged.part < len(plan.owners) or plan.owners[merged.part] != sender:
        return state, ()
    if is_gossip(state.base) and merged.result != NOTHING:
        return state, ()
    state = machine.replace(state, results={**state.results, merged.part: merged.result})
    return state, (machine.Fetch(plan=plan, part=merged.part, result=merged.result),)


def hold(state: machine.State, plan: Collect, part: int) -> machine.Result:
    if plan != state.plan or part not in state.results:
        return state, ()
    state = machine.replace(state, held=state.held | {part})
    if len(state.held) < state.base.num_parts:
        return state, ()
    holding = Holding(attempt=plan.attempt, revision=plan.revision, results=machine.results_of(state))
    return state, (machine.Send(to=leader(state.base, plan.attempt), message=holding),)


def count_holder(state: machine.State, sender: PeerId, holding: Holding) -> machine.Result:
    plan = state.plan
    if plan is None or (holding.attempt, holding.revision) != (plan.attempt, plan.revision):
        return state, ()
    return propose_if_held(machine.replace(state, holders={**state.holders, sender: holding.results}))


def propose_if_held(state: machine.State) -> machine.Result:
    """Leader: propose once a majority holds every result byte, so that no single loss can take a committed one away.

    It holds them itself: proposing is its own vote.
    """
    if not machine.is_leading(state) or state.plan is None or state.proposal is not None:
        return state, ()
    results = machine.results_of(state)
    if len(results) < state.base.num_parts:
        return state, ()
    holders = [peer for peer, held in state.holders.items() if held == results]
    if state.me not in holders:
        return state, ()
    if not is_quorum(state.base, holders, spent_farewells(state.farewells, state.attempt)):
        return state, ()
    return propose(state, new_manifest(state, state.plan))


def new_manifest(state: machine.State, plan: Collect) -> Manifest:
    base = state.base
    peers = {contribution.peer for contribution in plan.contributions}
    waiting = [warrant for warrant in state.acts if accused(warrant) not in peers]  # nothing of a liar is counted
    acts = in_effect(base.charter, base.body, waiting, MAX_ACTS)
    after, tuned = enacted(base, acts, plan.contributions), None
    if not acts and (tuned := chosen(after.charter, base.round, state.seen)) is not None:
        after = enacted(base, acts, plan.contributions, tuned)
    away = state.gone | state.farewells.keys()
    if set(base.electorate) <= away | set(after.removed):  # an act may leave nobody: then it waits
        acts, after, tuned = (), enacted(base, (), plan.contributions), None
    left = tuple(peer for peer in base.electorate if peer in away or peer in after.removed)
    room = base.charter.electors - (len(base.electorate) - len(left))
    newcomers = state.joiners - set(base.electorate) - set(after.charter.banned)
    joined = tuple(sorted(newcomers)[: max(room, 0)])
    members = tuple(sorted((set(base.electorate) - set(left)) | set(joined)))
    trained = without_lease(base, after.charter, members, plan.contributions)
    wanted = shares(after.charter, trained, state.speeds, claims_in(plan))
    leased = lease(base, after.charter, plan.contributions, {**dict.fromkeys(members, 0), **wanted})
    return Manifest(
        run=base.run,
        branch=base.branch,
        round=base.round,
        attempt=plan.attempt,
        leader=state.me,
        previous=base.previous,
        contributions=tuple(map(counted, plan.contributions)),
        awaited=plan.awaited,
        parts=tuple(
            PartResult(owner=owner, result=state.results[part], uplink=base.uplinks[part])
            for part, owner in enumerate(plan.owners)
        ),
        members=members,
        uplinks=uplinks(base, members, {*joined, *state.relayed}, state.uplinks),
        joined=joined,
        left=left,
        leases=leased.leases,
        cursor=leased.cursor,
        uncounted=leased.uncounted,
        leased_again=leased.leased_again,
        committed_tokens=Tokens(base.committed_tokens + sum(c.tokens for c in plan.contributions)),
        acts=acts,
        charter=digest_of(after.charter),
        tuned=tuned,
        is_gossip=is_gossip(base),
    )
