"""One round of one branch as a pure machine: `step(state, input) -> (state, outputs)`.

The electorate agrees on one manifest (`decide`, under the `rules` of consensus), around which contributions are
announced, planned, merged and held (`collect`). This file joins the two, and knows what to do when members
come, go or fall silent: the next attempt has another leader, which first asks what may have been chosen.
"""

from typing import assert_never

import msgspec

from weft.ids import Attempt, PeerId
from weft.sync.records.messages import (
    Accept,
    AnyRoundMessage,
    Base,
    Collect,
    Committed,
    Goodbye,
    Holding,
    Merged,
    Pass,
    Prepare,
    Promise,
    Propose,
    Ready,
    Refuse,
    Stuck,
    Vote,
)
from weft.sync.round.collect import (
    announce,
    count_holder,
    follow,
    give_up,
    hold,
    learn_result,
    make_plan,
    pass_on,
    propose_if_held,
    publish,
    replan,
    report_stuck,
    take_acts,
)
from weft.sync.round.decide import accept, commit_if_chosen, conclude, count_vote, promise, propose
from weft.sync.round.groups import contribution, is_true
from weft.sync.round.machine import (
    Broadcast,
    Input,
    Leave,
    Lost,
    Measured,
    MergeDone,
    MergeFailed,
    Moved,
    Noticed,
    Output,
    Paused,
    Persist,
    Received,
    Rerouted,
    Result,
    ResultHeld,
    Send,
    SetTimer,
    State,
    TimedOut,
    Trained,
    at_attempt,
    is_leading,
    replace,
    then,
    without_plan,
)
from weft.sync.round.neighbours import is_gossip, is_own, is_well_dealt
from weft.sync.round.rules import (
    Durable,
    is_quorum,
    is_successor,
    is_under_way,
    leader,
    may_promise,
    newest,
    spent_farewells,
)

# Who was cut off alone has gone on by itself, and the others must be able to follow it: by one attempt in two minutes
# (see peer.timers) that is three months. Who leaps on purpose never comes near MAX_COUNT within a round.
MAX_ATTEMPTS_AHEAD = 1 << 16


def begin(me: PeerId, base: Base) -> State:
    """Return the state of a member at the start of a round."""
    return State(me=me, durable=Durable(base=base))


def resume(me: PeerId, durable: Durable) -> Result:
    """Return the state of a member that comes back from its disk in the middle of a round."""
    state = State(me=me, durable=durable, attempt=durable.promised, is_back=True)
    return state, (SetTimer(timer="progress", attempt=state.attempt),)


def step(state: State, event: Input) -> Result:
    """Return the state after `event`, and what to do about it, in order."""
    if state.durable.has_left:
        return state, ()
    was_due = _is_due(state)
    state, outputs = _react(state, event)
    if _is_due(state) and not was_due:
        outputs = (*outputs, SetTimer(timer="progress", attempt=state.attempt))
    to_others: list[Output] = []
    for output in outputs:
        if isinstance(output, Send) and output.to == state.me:  # what a leader says to itself takes effect at once
            state, more = step(state, Received(sender=state.me, message=output.message))
            to_others += more
        else:
            to_others.append(output)
    return state, tuple(to_others)


def _is_due(state: State) -> bool:
    """Return whether the leader could go on, as far as this member knows; until then nobody is to blame."""
    return state.committed is None and is_under_way(state.base, state.ready.keys() | state.passing, state.farewells)


def _react(state: State, event: Input) -> Result:
    match event:
        case Received():
            return _receive(state, event.sender, event.message)
        case Trained():
            group, legacy, proof = event.group, event.legacy, event.proof
            ready = Ready(tokens=event.tokens, parts=event.parts, group=group, legacy=legacy, proof=proof)
            return announce(state, ready)
        case Paused():
            return pass_on(state)
        case Lost():
            return give_up(state, event.peer)
        case MergeDone():
            return publish(state, event)
        case MergeFailed():
            return report_stuck(state, event)
        case ResultHeld():
            return hold(state, event.plan, event.part)
        case Measured():
            return replace(state, speeds=event.speeds, uplinks=event.uplinks, seen=event.seen), ()
        case Rerouted():
            return replace(state, relayed=event.relayed), ()
        case Noticed():
            return _notice(state, event)
        case Moved():
            return take_acts(state, event.acts)
        case TimedOut():
            return _time_out(state, event)
        case Leave():
            return _leave(state)
        case _:
            assert_never(event)


def _receive(state: State, sender: PeerId, message: AnyRoundMessage) -> Result:
    if sender not in state.base.electorate or _reaches_too_far(state, message):
        return state, ()
    if state.committed is not None:
        return state, _tell_the_outcome(state, sender, message)
    match message:
        case Committed():
            return conclude(state, message) if is_successor(state.base, message.manifest) else (state, ())
        case Ready():
            if not is_well_dealt(state.base, sender, message.parts) or sender in state.ready:
                return state, ()
            brought = contribution(state.base.charter, sender, message)
            if is_gossip(state.base) and not is_own(brought):
                return state, ()
            if message.group is not None and (message.legacy or not is_true(state.base, sender, message.group)):
                return state, ()
            return make_plan(replace(state, ready={**state.ready, sender: brought}))
        case Pass():
            return make_plan(replace(state, passing=state.passing | {sender}))
        case Collect():
            if sender != leader(state.base, message.attempt) or message.attempt < state.attempt:
                return state, ()
            return follow(at_attempt(state, message.attempt), message, sender)
        case Stuck():
            return replan(state, sender, message)
        case Merged():
            return then(learn_result(state, sender, message), propose_if_held)
        case Holding():
            return count_holder(state, sender, message)
        case Prepare():
            return promise(state, sender, message)
        case Promise():
            return _count_promise(state, sender, message)
        case Propose():
            return accept(state, sender, message)
        case Accept():
            return count_vote(state, sender, message)
        case Refuse():
            return _step_back(state, sender, message)
        case Goodbye():
            return _farewell(state, sender, message)
        case _:
            assert_never(message)


def _reaches_too_far(state: State, message: AnyRoundMessage) -> bool:
    match message:
        case Prepare() | Propose() | Collect():
            return message.attempt > state.attempt + MAX_ATTEMPTS_AHEAD
        case Refuse():
            return message.promised > state.attempt + MAX_ATTEMPTS_AHEAD
        case _:  # counted only within the present attempt
            return False


def _advance(state: State) -> Result:
    """Give up the present attempt for the next one whose leader is not known to be away."""
    if state.committed is not None:
        return state, ()
    away = state.suspected | state.gone | state.farewells.keys()
    following = [Attempt(state.attempt + 1 + turn) for turn in range(len(state.base.electorate))]
    attempt = next((a for a in following if leader(state.base, a) not in away), following[0])
    state = at_attempt(state, attempt)
    outputs: tuple[Output, ...] = (SetTimer(timer="progress", attempt=attempt),)
    if leader(state.base, attempt) != state.me or not may_promise(state.durable, attempt):
        return state, outputs
    durable = msgspec.structs.replace(state.durable, promised=attempt)
    state = replace(state, durable=durable, promises={state.me: durable.accepted})
    prepare = Prepare(attempt=attempt)
    return then((state, (Persist(durable=durable), Broadcast(message=prepare), *outputs)), _lead_if_promised)


def unanswered(state: State) -> Prepare | None:
    """Return what the leader of a later attempt has asked and not heard enough answers to: it may be asked again."""
    is_asking = state.me in state.promises and state.proposal is None and state.committed is None
    return Prepare(attempt=state.attempt) if is_asking and not is_leading(state) else None


def _count_promise(state: State, sender: PeerId, promise: Promise) -> Result:
    if promise.attempt != state.attempt or state.me not in state.promises:
        return state, ()
    if not _may_have_accepted(state, promise.attempt, promise.accepted):
        return state, ()
    return _lead_if_promised(replace(state, promises={**state.promises, sender: promise.accepted}))


def _may_have_accepted(state: State, promised: Attempt, accepted: Vote | None) -> bool:
    """Return whether a member that promised so much could have accepted that: a leader must re-propose it."""
    return accepted is None or (accepted.attempt <= promised and is_successor(state.base, accepted.manifest))


def _lead_if_promised(state: State) -> Result:
    """Leader of a later attempt: with a majority's promises, re-propose what may have been chosen, or plan anew."""
    if state.proposal is not None or not is_leading(state):
        return state, ()
    farewells = [f.accepted for f in state.farewells.values() if f.promised <= state.attempt]
    chosen = newest([*state.promises.values(), *farewells])
    return propose(state, chosen) if chosen is not None else make_plan(state)


def _step_back(state: State, sender: PeerId, refuse: Refuse) -> Result:
    """Leader: follow a later attempt once too many have promised it for this one to succeed; one's word is not enough.

    Only a leader asks for what can be refused: to anybody else, or of another attempt, a refusal is a rumour.
    """
    if refuse.attempt != state.attempt or leader(state.base, state.attempt) != state.me:
        return state, ()
    if refuse.promised <= state.attempt:
        return state, ()
    state = replace(state, refusals={**state.refusals, sender: refuse.promised})
    others = set(state.base.electorate) - state.refusals.keys()
    if is_quorum(state.base, others, spent_farewells(state.farewells, state.attempt)):
        return state, ()
    state = at_attempt(state, min(state.refusals.values()))
    return state, (SetTimer(timer="progress", attempt=state.attempt),)


def _tell_the_outcome(state: State, sender: PeerId, message: AnyRoundMessage) -> tuple[Output, ...]:
    """A member still works on a round that is decided."""
    if state.committed is None or not isinstance(message, Ready | Prepare | Promise | Propose | Holding):
        return ()
    outcome = Committed(
        attempt=state.committed.attempt,
        manifest=state.committed.manifest,
    )
    return (Send(to=sender, message=outcome),)


def _notice(state: State, notice: Noticed) -> Result:
    peer = notice.peer
    if notice.status == "joining":
        return replace(state, joiners=state.joiners | {peer}), ()
    suspected, gone = state.suspected - {peer}, state.gone - {peer}
    if notice.status == "suspected":
        suspected |= {peer}
    elif notice.status == "gone":
        gone |= {peer}
    state = replace(state, suspected=suspected, gone=gone, joiners=state.joiners - gone)
    return _without(state, peer) if notice.status != "alive" else (state, ())


def _farewell(state: State, sender: PeerId, goodbye: Goodbye) -> Result:
    if sender in state.farewells or not _may_have_accepted(state, goodbye.promised, goodbye.accepted):
        return state, ()
    state = replace(state, farewells={**state.farewells, sender: goodbye}, joiners=state.joiners - {sender})
    return _without(state, sender)


def _without(state: State, peer: PeerId) -> Result:
    """A peer is away: do what no longer waits for it."""
    if leader(state.base, state.attempt) == peer and state.committed is None:
        return _advance(state)
    plan = state.plan
    if plan is not None and peer in plan.owners and state.proposal is None and is_leading(state):
        is_merged = all(part in state.held for part, owner in enumerate(plan.owners) if owner == peer)
        if not is_merged:  # its parts need other owners; of what is held here, others can fetch the bytes
            return make_plan(replace(without_plan(state), revision=state.revision + 1))
    result = _lead_if_promised(state) if state.attempt else make_plan(state)
    return then(then(result, propose_if_held), commit_if_chosen)


def _leave(state: State) -> Result:
    durable = msgspec.structs.replace(state.durable, has_left=True)
    state = replace(state, durable=durable)
    goodbye = Goodbye(promised=durable.promised, accepted=durable.accepted)
    return state, (Persist(durable=durable), Broadcast(message=goodbye))


def _time_out(state: State, expired: TimedOut) -> Result:
    if expired.attempt != state.attempt:
        return state, ()
    if expired.timer == "grace":
        return make_plan(replace(state, is_grace_over=True))
    return _advance(state)
