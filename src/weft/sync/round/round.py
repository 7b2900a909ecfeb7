"""One round of one branch as a pure machine: `step(state, input) -> (state, outputs)`.

The electorate agrees on one manifest, around which contributions are announced, planned, merged and held. When members
come, go or fall silent, the next attempt has another leader, which first asks what may have been chosen.

Data. A leader may plan anew until it proposes; a plan that cannot be carried out costs a revision, not an attempt.
A manifest is proposed only once a majority holds every result byte, so whatever is committed can be fetched.

Whose word counts when an owner says that it cannot have somebody's contribution, or cannot decode it.

    owner B: "C has not delivered"     C may have failed, or B lies: one word against another

The leader believes itself. Of others it takes two witnesses to leave a contribution out, its own too: two owners, or
one and membership, which says that C is away; and on their word fewer than half of those that announced are left out.
Whoever stands alone with its word merges nothing more, and what it says it lacks is merged by others. So one liar keeps
nobody out; and whatever the others say, each of them ends few plans: in the end the leader owns all parts itself.

Consensus (by the `rules`): propose, accept, promise, commit. A leader accepts its own proposal on disk before anybody
hears of it, so after a crash it cannot propose another manifest in the same attempt. Every `Persist` stands before the
messages that depend on it.
"""

from collections import Counter
from collections.abc import Set
from typing import assert_never

import msgspec
from msgspec import UNSET, UnsetType

from weft.ids import Attempt, Digest, PeerId
from weft.sync.governance import accused
from weft.sync.records import messages, quarantine
from weft.sync.records.acts import Warrant
from weft.sync.round import machine, rules
from weft.sync.round.groups import is_true
from weft.sync.round.leading import held_back, new_manifest, new_plan
from weft.sync.round.neighbours import NOTHING, is_own
from weft.sync.round.shares import contribution
from weft.wire import digest_of

# Who was cut off alone has gone on by itself, and the others must be able to follow it: by one attempt in two minutes
# (peer/round/timers.py) that is three months. Who skips attempts on purpose never comes near MAX_COUNT within a round.
MAX_ATTEMPTS_AHEAD = 1 << 16


def begin(me: PeerId, base: messages.Base) -> machine.State:
    return machine.State(me=me, durable=rules.Durable(base=base))


def resume(me: PeerId, durable: rules.Durable) -> machine.Result:
    """Return the state of a member that comes back from its disk in the middle of a round."""
    state = machine.State(me=me, durable=durable, attempt=durable.promised, is_back=True)
    return state, (machine.SetTimer(timer="progress", attempt=state.attempt),)


def step(state: machine.State, event: machine.Input) -> machine.Result:
    """Return the state after `event`, and what to do about it, in order."""
    if state.durable.has_left:
        return state, ()
    before = state
    state, outputs = _react(state, event)
    if _is_other_said(before, state) and _is_due(state) and not _is_due(before):
        outputs = (*outputs, machine.SetTimer(timer="progress", attempt=state.attempt))
    to_others: list[machine.Output] = []
    for output in outputs:
        if isinstance(output, machine.Send) and output.to == state.me:  # what a leader tells itself holds at once
            state, more = step(state, machine.Received(sender=state.me, message=output.message))
            to_others += more
        else:
            to_others.append(output)
    return state, tuple(to_others)


def _is_due(state: machine.State) -> bool:
    """Return whether the leader could go on, as far as this member knows; until then nobody is to blame."""
    return state.committed is None and rules.is_under_way(
        state.base, state.ready.keys() | state.passing, state.farewells
    )


def _is_other_said(before: machine.State, after: machine.State) -> bool:
    """Return whether what `_is_due` looks at may have changed."""
    return (
        after.ready is not before.ready
        or after.passing is not before.passing
        or after.farewells is not before.farewells
        or after.committed is not before.committed
        or after.base is not before.base
    )


def _react(state: machine.State, event: machine.Input) -> machine.Result:
    match event:
        case machine.Received():
            return _receive(state, event.sender, event.message)
        case machine.Trained():
            return announce(state, event.ready)
        case machine.Paused():
            return pass_on(state)
        case machine.Lost():
            return give_up(state, event.peer)
        case machine.MergeDone():
            return publish(state, event)
        case machine.MergeFailed():
            return report_stuck(state, event)
        case machine.ResultHeld():
            return hold(state, event.plan, event.part)
        case machine.Measured():
            return machine.replace(state, speeds=event.speeds, uplinks=event.uplinks, seen=event.seen), ()
        case machine.StateNamed():
            is_present = event.previous == state.base.previous
            return (machine.replace(state, own_state=event.name) if is_present else state), ()
        case machine.Rerouted():
            return machine.replace(state, relayed=event.relayed), ()
        case machine.Noticed():
            return _notice(state, event)
        case machine.Moved():
            return take_acts(state, event.acts)
        case machine.Recalled():
            return machine.replace(state, recalled=event.peers), ()
        case machine.TimedOut():
            return _time_out(state, event)
        case machine.Leave():
            return _leave(state)
        case _:
            assert_never(event)


def _receive(state: machine.State, sender: PeerId, message: messages.AnyRoundMessage) -> machine.Result:
    if sender not in state.base.electorate or _reaches_too_far(state, message):
        return state, ()
    if state.committed is not None:
        return state, _tell_the_outcome(state, sender, message)
    match message:
        case messages.Committed():
            return conclude(state, message) if rules.is_successor(state.base, message.manifest) else (state, ())
        case messages.Ready():
            if not rules.is_well_cut(state.base, sender, message.parts) or sender in state.ready:
                return state, ()
            brought = contribution(state.base.charter, sender, message)
            if state.base.is_gossip and not is_own(brought):
                return state, ()
            if not rules.says_right_work(state.base, brought):
                return state, ()
            if message.group is not None and (message.legacy or not is_true(state.base, sender, message.group)):
                return state, ()
            return make_plan(machine.replace(state, ready={**state.ready, sender: brought}))
        case messages.Pass():
            return make_plan(machine.replace(state, passing=state.passing | {sender}))
        case messages.Collect():
            if sender != rules.leader(state.base, message.attempt):
                return state, ()
            if message.attempt < state.attempt:  # it would wait for what this member owns
                return state, refuse(state, sender, message.attempt)
            return follow(machine.at_attempt(state, message.attempt), message, sender)
        case messages.Stuck():
            return replan(state, sender, message)
        case messages.Merged():
            return machine.then(learn_result(state, sender, message), propose_if_held)
        case messages.Holding():
            return count_holder(state, sender, message)
        case messages.Prepare():
            return promise(state, sender, message)
        case messages.Promise():
            return _count_promise(state, sender, message)
        case messages.Propose():
            return accept(state, sender, message)
        case messages.Accept():
            return count_vote(state, sender, message)
        case messages.Refuse():
            return _step_back(state, sender, message)
        case messages.Goodbye():
            return _farewell(state, sender, message)
        case _:
            assert_never(message)


def _reaches_too_far(state: machine.State, message: messages.AnyRoundMessage) -> bool:
    match message:
        case messages.Prepare() | messages.Propose() | messages.Collect():
            return message.attempt > state.attempt + MAX_ATTEMPTS_AHEAD
        case messages.Refuse():
            return message.promised > state.attempt + MAX_ATTEMPTS_AHEAD
        case _:  # counted only within the present attempt
            return False


def _advance(state: machine.State) -> machine.Result:
    """Give up the present attempt for the next one whose leader is not known to be away."""
    if state.committed is not None:
        return state, ()
    away = state.suspected | state.gone | state.farewells.keys()
    following = [Attempt(state.attempt + 1 + turn) for turn in range(len(state.base.electorate))]
    attempt = next((a for a in following if rules.leader(state.base, a) not in away), following[0])
    state = machine.at_attempt(state, attempt)
    outputs: tuple[machine.Output, ...] = (machine.SetTimer(timer="progress", attempt=attempt),)
    if rules.leader(state.base, attempt) != state.me or not rules.may_promise(state.durable, attempt):
        return state, outputs
    durable = msgspec.structs.replace(state.durable, promised=attempt)
    state = machine.replace(state, durable=durable, promises={state.me: durable.accepted})
    prepare = messages.Prepare(attempt=attempt)
    return machine.then(
        (state, (machine.Persist(durable=durable), machine.Broadcast(message=prepare), *outputs)), _lead_if_promised
    )


def unanswered(state: machine.State) -> messages.Prepare | None:
    """Return what the leader of a later attempt has asked and not heard enough answers to: it may be asked again."""
    is_asking = state.me in state.promises and state.proposal is None and state.committed is None
    return messages.Prepare(attempt=state.attempt) if is_asking and not machine.is_leading(state) else None


def _count_promise(state: machine.State, sender: PeerId, promise: messages.Promise) -> machine.Result:
    if promise.attempt != state.attempt or state.me not in state.promises:
        return state, ()
    if not _may_have_accepted(state, promise.attempt, promise.accepted):
        return state, ()
    return _lead_if_promised(machine.replace(state, promises={**state.promises, sender: promise.accepted}))


def _may_have_accepted(state: machine.State, promised: Attempt, accepted: messages.Vote | None) -> bool:
    """Return whether a member that promised so much could have accepted that: a leader must re-propose it."""
    return accepted is None or (accepted.attempt <= promised and rules.is_successor(state.base, accepted.manifest))


def _lead_if_promised(state: machine.State) -> machine.Result:
    """Leader of a later attempt: with a majority's promises, re-propose what may have been chosen, or plan anew."""
    if state.proposal is not None or not machine.is_leading(state):
        return state, ()
    farewells = [f.accepted for f in state.farewells.values() if f.promised <= state.attempt]
    chosen = rules.newest([*state.promises.values(), *farewells])
    return propose(state, chosen) if chosen is not None else make_plan(state)


def _step_back(state: machine.State, sender: PeerId, refuse: messages.Refuse) -> machine.Result:
    """Leader: wait no more for who is in a later attempt, and follow once too many are for this one to succeed.

    One's word is not enough to follow. Only a leader asks for what can be refused: to anybody else, or of another
    attempt, a refusal is a rumour.
    """
    if refuse.attempt != state.attempt or rules.leader(state.base, state.attempt) != state.me:
        return state, ()
    if refuse.promised <= state.attempt:
        return state, ()
    state = machine.replace(state, refusals={**state.refusals, sender: refuse.promised})
    others = set(state.base.electorate) - state.refusals.keys()
    if rules.is_quorum(state.base, others, rules.spent_farewells(state.farewells, state.attempt)):
        return _disown(state) if _owes(state, sender) else (state, ())
    state = machine.at_attempt(state, min(state.refusals.values()))
    return state, (machine.SetTimer(timer="progress", attempt=state.attempt),)


def _tell_the_outcome(
    state: machine.State, sender: PeerId, message: messages.AnyRoundMessage
) -> tuple[machine.Output, ...]:
    """A member still works on a round that is decided."""
    if state.committed is None or not isinstance(
        message, messages.Ready | messages.Prepare | messages.Promise | messages.Propose | messages.Holding
    ):
        return ()
    outcome = messages.Committed(attempt=state.committed.attempt, manifest=state.committed.manifest)
    return (machine.Send(to=sender, message=outcome),)


def _notice(state: machine.State, notice: machine.Noticed) -> machine.Result:
    peer = notice.peer
    if notice.status == "joining":
        return machine.replace(state, joiners=state.joiners | {peer}), ()
    suspected, gone = state.suspected - {peer}, state.gone - {peer}
    if notice.status == "suspected":
        suspected |= {peer}
    elif notice.status == "gone":
        gone |= {peer}
    state = machine.replace(state, suspected=suspected, gone=gone, joiners=state.joiners - gone)
    return _without(state, peer) if notice.status != "alive" else (state, ())


def _farewell(state: machine.State, sender: PeerId, goodbye: messages.Goodbye) -> machine.Result:
    if sender in state.farewells or not _may_have_accepted(state, goodbye.promised, goodbye.accepted):
        return state, ()
    state = machine.replace(state, farewells={**state.farewells, sender: goodbye}, joiners=state.joiners - {sender})
    return _without(state, sender)


def _without(state: machine.State, peer: PeerId) -> machine.Result:
    """A peer is away: do what no longer waits for it."""
    if rules.leader(state.base, state.attempt) == peer and state.committed is None:
        return _advance(state)
    if _owes(state, peer):
        return _disown(state)
    result = _lead_if_promised(state) if state.attempt else make_plan(state)
    return machine.then(machine.then(result, propose_if_held), commit_if_chosen)


def _owes(state: machine.State, peer: PeerId) -> bool:
    """Return whether this leader's plan waits for what `peer` merges."""
    plan = state.plan
    if plan is None or state.proposal is not None or not machine.is_leading(state):
        return False
    return any(owner == peer and part not in state.held for part, owner in enumerate(plan.owners))


def _disown(state: machine.State) -> machine.Result:
    """Give the parts other owners; of what is held here, others can fetch the bytes."""
    return make_plan(machine.replace(machine.without_plan(state), revision=state.revision + 1))


def _leave(state: machine.State) -> machine.Result:
    durable = msgspec.structs.replace(state.durable, has_left=True)
    state = machine.replace(state, durable=durable)
    goodbye = messages.Goodbye(promised=durable.promised, accepted=durable.accepted)
    return state, (machine.Persist(durable=durable), machine.Broadcast(message=goodbye))


def _time_out(state: machine.State, expired: machine.TimedOut) -> machine.Result:
    if expired.attempt != state.attempt:
        return state, ()
    if expired.timer == "grace":
        return make_plan(machine.replace(state, is_grace_over=True))
    return _advance(state)


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


def announce(state: machine.State, ready: messages.Ready) -> machine.Result:
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
    return machine.then((state, (machine.Broadcast(message=messages.Pass()),)), make_plan)


def make_plan(state: machine.State) -> machine.Result:
    """Leader: fix who contributes and who owns which part, once everybody expected is ready or grace is over.

    Nobody waits for a newcomer: it may still be fetching what was decided before it was counted in. What it announces
    in time counts like anybody's, and what comes later stays in its carry. The same holds for who was leased nothing,
    for who is paused, and for whose payload is lost; the last two have been heard of, so grace begins with them as with
    who is ready. Where the method waits for who is ready, nobody else is waited for.
    """
    if not machine.is_leading(state) or state.plan is not None or state.proposal is not None:
        return state, ()
    struck = _struck_out(state.acts)
    absent = state.suspected | state.gone | state.farewells.keys() | struck
    ready = {peer for peer in state.ready if peer in state.base.electorate} - state.unusable - struck
    usable = ready - held_back(state)
    if not usable:
        return state, ()
    waiting_for = set(state.base.electorate) - ready - absent - state.unusable - set(state.base.newcomers)
    waiting_for -= state.passing | set(state.base.resting)
    if state.base.charter.settings.method.wait == "ready":
        waiting_for = set()
    if waiting_for and not state.is_grace_over:
        is_grace_due = rules.is_under_way(state.base, ready | state.unusable | state.passing, state.farewells)
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


def replan(state: machine.State, sender: PeerId, stuck: messages.Stuck) -> machine.Result:
    """Leader: an owner cannot have a contribution, so plan again without the one or the other (`judged`).

    What is not counted stays in its owner's carry. What of a false work cannot be had is not taken out.
    """
    plan = state.plan
    if plan is None or state.proposal is not None or (stuck.attempt, stuck.revision) != (plan.attempt, plan.revision):
        return state, ()
    missing = {*(each.peer for each in plan.contributions), *(plan.counters or ())} & set(stuck.missing)
    is_owner = stuck.part < len(plan.owners) and plan.owners[stuck.part] == sender
    if not machine.is_leading(state) or not is_owner or not missing:
        return state, ()
    return make_plan(judged(machine.replace(machine.without_plan(state), revision=state.revision + 1), sender, missing))


def follow(state: machine.State, plan: messages.Collect, sender: PeerId) -> machine.Result:
    """Take up a plan of the attempt's leader: merge the parts this member owns."""
    is_old = state.plan is not None and (plan.attempt, plan.revision) <= (state.plan.attempt, state.plan.revision)
    if is_old or not rules.is_sound(state.base, plan) or state.committed is not None:
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
    by, head = _named(state.base, plan)
    merged = messages.Merged(
        attempt=plan.attempt, revision=plan.revision, part=done.part, result=done.result, plan=by, head=head
    )
    state = machine.replace(state, results={**state.results, done.part: done.result})
    return machine.then((state, (machine.Broadcast(message=merged),)), lambda state: hold(state, plan, done.part))


def _named(base: messages.Base, plan: messages.Collect) -> tuple[Digest | UnsetType, Digest | UnsetType]:
    """Return what an owner says that it has merged by, and after which manifest; unset: nobody will merge it again."""
    return (UNSET, UNSET) if base.charter.audits is UNSET else (digest_of(plan), base.previous)


def report_stuck(state: machine.State, failed: machine.MergeFailed) -> machine.Result:
    plan = failed.plan
    stuck = messages.Stuck(attempt=plan.attempt, revision=plan.revision, part=failed.part, missing=failed.missing)
    return state, (machine.Send(to=rules.leader(state.base, plan.attempt), message=stuck),)


def learn_result(state: machine.State, sender: PeerId, merged: messages.Merged) -> machine.Result:
    plan = state.plan
    if plan is None or (merged.attempt, merged.revision) != (plan.attempt, plan.revision):
        return state, ()
    if merged.part in state.results or not 0 <= merged.part < len(plan.owners) or plan.owners[merged.part] != sender:
        return state, ()
    if state.base.is_gossip and merged.result != NOTHING:
        return state, ()
    if (merged.plan, merged.head) != _named(state.base, plan):  # its leader has sent others another
        return state, ()
    state = machine.replace(state, results={**state.results, merged.part: merged.result})
    return state, (machine.Fetch(plan=plan, part=merged.part, result=merged.result),)


def hold(state: machine.State, plan: messages.Collect, part: int) -> machine.Result:
    if plan != state.plan or part not in state.results:
        return state, ()
    state = machine.replace(state, held=state.held | {part})
    if len(state.held) < state.base.num_parts:
        return state, ()
    holding = messages.Holding(attempt=plan.attempt, revision=plan.revision, results=machine.results_of(state))
    return state, (machine.Send(to=rules.leader(state.base, plan.attempt), message=holding),)


def count_holder(state: machine.State, sender: PeerId, holding: messages.Holding) -> machine.Result:
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
    if not rules.is_quorum(state.base, holders, rules.spent_farewells(state.farewells, state.attempt)):
        return state, ()
    return propose(state, new_manifest(state, state.plan))


def propose(state: machine.State, manifest: messages.Manifest) -> machine.Result:
    """Leader: accept, on disk, then ask the others: after a restart this attempt has the same manifest or none."""
    if not rules.may_accept(state.durable, state.attempt, manifest) or not rules.is_successor(state.base, manifest):
        return state, ()
    vote = messages.Vote(attempt=state.attempt, manifest=manifest)
    durable = msgspec.structs.replace(state.durable, promised=state.attempt, accepted=vote)
    state = machine.replace(state, durable=durable, proposal=manifest, votes=frozenset({state.me}))
    proposal = messages.Propose(attempt=state.attempt, manifest=manifest)
    return machine.then(
        (state, (machine.Persist(durable=durable), machine.Broadcast(message=proposal))), commit_if_chosen
    )


def accept(state: machine.State, sender: PeerId, propose: messages.Propose) -> machine.Result:
    if sender != rules.leader(state.base, propose.attempt) or not rules.is_successor(state.base, propose.manifest):
        return state, ()
    if quarantine.is_put_out(state.base, state.me, propose.manifest):
        return state, ()
    if not rules.may_accept(state.durable, propose.attempt, propose.manifest):
        return state, refuse(state, sender, propose.attempt) if propose.attempt < state.durable.promised else ()
    vote = messages.Vote(attempt=propose.attempt, manifest=propose.manifest)
    durable = msgspec.structs.replace(state.durable, promised=propose.attempt, accepted=vote)
    outputs: tuple[machine.Output, ...] = () if durable == state.durable else (machine.Persist(durable=durable),)
    state = machine.replace(machine.at_attempt(state, propose.attempt), durable=durable)
    accept = accept_of(state, propose.attempt, propose.manifest)
    return state, (*outputs, machine.Send(to=sender, message=accept))


def accept_of(state: machine.State, attempt: Attempt, manifest: messages.Manifest) -> messages.Accept:
    """Return a member's vote, which says what state it has where that is recorded."""
    named = UNSET if state.own_state is None or not state.base.charter.is_recorded else state.own_state
    return messages.Accept(attempt=attempt, manifest=digest_of(manifest), state=named)


def count_vote(state: machine.State, sender: PeerId, accept: messages.Accept) -> machine.Result:
    if not machine.is_leading(state) or state.proposal is None or accept.attempt != state.attempt:
        return state, ()
    if accept.manifest != digest_of(state.proposal) or sender not in state.base.electorate:
        return state, ()
    return commit_if_chosen(machine.replace(state, votes=state.votes | {sender}))


def commit_if_chosen(state: machine.State) -> machine.Result:
    if state.proposal is None or state.committed is not None:
        return state, ()
    if not rules.is_quorum(state.base, state.votes, rules.spent_farewells(state.farewells, state.attempt)):
        return state, ()
    committed = messages.Committed(attempt=state.attempt, manifest=state.proposal)
    return conclude(state, committed, (machine.Broadcast(message=committed),))


def conclude(
    state: machine.State, committed: messages.Committed, outputs: tuple[machine.Output, ...] = ()
) -> machine.Result:
    """The round is decided. The driver checked the certificate of a `Committed` that came from elsewhere."""
    if state.committed is not None:
        return state, ()
    state = machine.replace(state, committed=messages.Vote(attempt=committed.attempt, manifest=committed.manifest))
    return state, (*outputs, machine.Commit(attempt=committed.attempt, manifest=committed.manifest))


def promise(state: machine.State, sender: PeerId, prepare: messages.Prepare) -> machine.Result:
    if sender != rules.leader(state.base, prepare.attempt):
        return state, ()
    if prepare.attempt < state.durable.promised:
        return state, refuse(state, sender, prepare.attempt)
    outputs: list[machine.Output] = []
    if rules.may_promise(state.durable, prepare.attempt):
        durable = msgspec.structs.replace(state.durable, promised=prepare.attempt)
        state = machine.replace(machine.at_attempt(state, prepare.attempt), durable=durable)
        outputs += [machine.Persist(durable=durable), machine.SetTimer(timer="progress", attempt=prepare.attempt)]
    if state.announced is not None:  # the leader may not have heard it, or have forgotten it
        outputs.append(machine.Send(to=sender, message=state.announced))
    promise = messages.Promise(attempt=prepare.attempt, accepted=state.durable.accepted)
    return state, (*outputs, machine.Send(to=sender, message=promise))


def refuse(state: machine.State, to: PeerId, attempt: Attempt) -> tuple[machine.Output, ...]:
    """Tell the leader of `attempt` that this member is in a later one, so that it stops waiting for it."""
    return (machine.Send(to=to, message=messages.Refuse(attempt=attempt, promised=state.attempt)),)
