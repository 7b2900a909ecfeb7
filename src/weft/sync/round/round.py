"""One round of one branch as a pure machine: `step(state, input) -> (state, outputs)`.

The electorate agrees on one manifest (`decide`, under the `rules` of consensus), around which contributions are
announced, planned, merged and held (`collect`). This file joins the two, and knows what to do when members
come, go or fall silent: the next attempt has another leader, which first asks what may have been chosen.
"""

from typing import assert_never

import msgspec

from weft.ids import Attempt, PeerId
from weft.sync.records import messages
from weft.sync.round import collect, machine, rules
from weft.sync.round.decide import accept, commit_if_chosen, conclude, count_vote, promise, propose
from weft.sync.round.groups import contribution, is_true
from weft.sync.round.neighbours import is_gossip, is_own, is_well_dealt

# Who was cut off alone has gone on by itself, and the others must be able to follow it: by one attempt in two minutes
# (see peer.timers) that is three months. Who leaps on purpose never comes near MAX_COUNT within a round.
MAX_ATTEMPTS_AHEAD = 1 << 16


def begin(me: PeerId, base: messages.Base) -> machine.State:
    """Return the state of a member at the start of a round."""
    return machine.State(me=me, durable=rules.Durable(base=base))


def resume(me: PeerId, durable: rules.Durable) -> machine.Result:
    """Return the state of a member that comes back from its disk in the middle of a round."""
    state = machine.State(me=me, durable=durable, attempt=durable.promised, is_back=True)
    return state, (machine.SetTimer(timer="progress", attempt=state.attempt),)


def step(state: machine.State, event: machine.Input) -> machine.Result:
    """Return the state after `event`, and what to do about it, in order."""
    if state.durable.has_left:
        return state, ()
    was_due = _is_due(state)
    state, outputs = _react(state, event)
    if _is_due(state) and not was_due:
        outputs = (*outputs, machine.SetTimer(timer="progress", attempt=state.attempt))
    to_others: list[machine.Output] = []
    for output in outputs:
        if (
            isinstance(output, machine.Send) and output.to == state.me
        ):  # what a leader says to itself takes effect at once
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


def _react(state: machine.State, event: machine.Input) -> machine.Result:
    match event:
        case machine.Received():
            return _receive(state, event.sender, event.message)
        case machine.Trained():
            group, legacy, proof = event.group, event.legacy, event.proof
            ready = messages.Ready(tokens=event.tokens, parts=event.parts, group=group, legacy=legacy, proof=proof)
            return collect.announce(state, ready)
        case machine.Paused():
            return collect.pass_on(state)
        case machine.Lost():
            return collect.give_up(state, event.peer)
        case machine.MergeDone():
            return collect.publish(state, event)
        case machine.MergeFailed():
            return collect.report_stuck(state, event)
        case machine.ResultHeld():
            return collect.hold(state, event.plan, event.part)
        case machine.Measured():
            return machine.replace(state, speeds=event.speeds, uplinks=event.uplinks, seen=event.seen), ()
        case machine.Rerouted():
            return machine.replace(state, relayed=event.relayed), ()
        case machine.Noticed():
            return _notice(state, event)
        case machine.Moved():
            return collect.take_acts(state, event.acts)
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
            if not is_well_dealt(state.base, sender, message.parts) or sender in state.ready:
                return state, ()
            brought = contribution(state.base.charter, sender, message)
            if is_gossip(state.base) and not is_own(brought):
                return state, ()
            if message.group is not None and (message.legacy or not is_true(state.base, sender, message.group)):
                return state, ()
            return collect.make_plan(machine.replace(state, ready={**state.ready, sender: brought}))
        case messages.Pass():
            return collect.make_plan(machine.replace(state, passing=state.passing | {sender}))
        case messages.Collect():
            if sender != rules.leader(state.base, message.attempt) or message.attempt < state.attempt:
                return state, ()
            return collect.follow(machine.at_attempt(state, message.attempt), message, sender)
        case messages.Stuck():
            return collect.replan(state, sender, message)
        case messages.Merged():
            return machine.then(collect.learn_result(state, sender, message), collect.propose_if_held)
        case messages.Holding():
            return collect.count_holder(state, sender, message)
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
    return propose(state, chosen) if chosen is not None else collect.make_plan(state)


def _step_back(state: machine.State, sender: PeerId, refuse: messages.Refuse) -> machine.Result:
    """Leader: follow a later attempt once too many have promised it for this one to succeed; one's word is not enough.

    Only a leader asks for what can be refused: to anybody else, or of another attempt, a refusal is a rumour.
    """
    if refuse.attempt != state.attempt or rules.leader(state.base, state.attempt) != state.me:
        return state, ()
    if refuse.promised <= state.attempt:
        return state, ()
    state = machine.replace(state, refusals={**state.refusals, sender: refuse.promised})
    others = set(state.base.electorate) - state.refusals.keys()
    if rules.is_quorum(state.base, others, rules.spent_farewells(state.farewells, state.attempt)):
        return state, ()
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
    plan = state.plan
    if plan is not None and peer in plan.owners and state.proposal is None and machine.is_leading(state):
        is_merged = all(part in state.held for part, owner in enumerate(plan.owners) if owner == peer)
        if not is_merged:  # its parts need other owners; of what is held here, others can fetch the bytes
            return collect.make_plan(machine.replace(machine.without_plan(state), revision=state.revision + 1))
    result = _lead_if_promised(state) if state.attempt else collect.make_plan(state)
    return machine.then(machine.then(result, collect.propose_if_held), commit_if_chosen)


def _leave(state: machine.State) -> machine.Result:
    durable = msgspec.structs.replace(state.durable, has_left=True)
    state = machine.replace(state, durable=durable)
    goodbye = messages.Goodbye(promised=durable.promised, accepted=durable.accepted)
    return state, (machine.Persist(durable=durable), machine.Broadcast(message=goodbye))


def _time_out(state: machine.State, expired: machine.TimedOut) -> machine.Result:
    if expired.attempt != state.attempt:
        return state, ()
    if expired.timer == "grace":
        return collect.make_plan(machine.replace(state, is_grace_over=True))
    return _advance(state)
