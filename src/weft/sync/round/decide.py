"""Consensus within a round: propose, accept, promise, commit.

A leader accepts its own proposal on disk before anybody hears of it, so after a crash it cannot propose another
manifest in the same attempt. Every `Persist` stands before the messages that depend on it.
"""

import msgspec

from weft.ids import Attempt, PeerId
from weft.sync.records.messages import Accept, Committed, Manifest, Prepare, Promise, Propose, Refuse, Vote
from weft.sync.round import machine
from weft.sync.round.rules import is_quorum, is_successor, leader, may_accept, may_promise, spent_farewells
from weft.wire import digest_of


def propose(state: machine.State, manifest: Manifest) -> machine.Result:
    """Leader: accept, on disk, then ask the others: after a restart this attempt has the same manifest or none."""
    if not may_accept(state.durable, state.attempt, manifest) or not is_successor(state.base, manifest):
        return state, ()
    vote = Vote(attempt=state.attempt, manifest=manifest)
    durable = msgspec.structs.replace(state.durable, promised=state.attempt, accepted=vote)
    state = machine.replace(state, durable=durable, proposal=manifest, votes=frozenset({state.me}))
    proposal = Propose(attempt=state.attempt, manifest=manifest)
    return machine.then(
        (state, (machine.Persist(durable=durable), machine.Broadcast(message=proposal))), commit_if_chosen
    )


def accept(state: machine.State, sender: PeerId, propose: Propose) -> machine.Result:
    if sender != leader(state.base, propose.attempt) or not is_successor(state.base, propose.manifest):
        return state, ()
    if not may_accept(state.durable, propose.attempt, propose.manifest):
        return state, refuse(state, sender, propose.attempt) if propose.attempt < state.durable.promised else ()
    vote = Vote(attempt=propose.attempt, manifest=propose.manifest)
    durable = msgspec.structs.replace(state.durable, promised=propose.attempt, accepted=vote)
    outputs: tuple[machine.Output, ...] = () if durable == state.durable else (machine.Persist(durable=durable),)
    state = machine.replace(machine.at_attempt(state, propose.attempt), durable=durable)
    accept = Accept(attempt=propose.attempt, manifest=digest_of(propose.manifest))
    return state, (*outputs, machine.Send(to=sender, message=accept))


def count_vote(state: machine.State, sender: PeerId, accept: Accept) -> machine.Result:
    if not machine.is_leading(state) or state.proposal is None or accept.attempt != state.attempt:
        return state, ()
    if accept.manifest != digest_of(state.proposal) or sender not in state.base.electorate:
        return state, ()
    return commit_if_chosen(machine.replace(state, votes=state.votes | {sender}))


def commit_if_chosen(state: machine.State) -> machine.Result:
    if state.proposal is None or state.committed is not None:
        return state, ()
    if not is_quorum(state.base, state.votes, spent_farewells(state.farewells, state.attempt)):
        return state, ()
    committed = Committed(attempt=state.attempt, manifest=state.proposal)
    return conclude(state, committed, (machine.Broadcast(message=committed),))


def conclude(state: machine.State, committed: Committed, outputs: tuple[machine.Output, ...] = ()) -> machine.Result:
    """The round is decided. The driver checked the certificate of a `Committed` that came from elsewhere."""
    if state.committed is not None:
        return state, ()
    state = machine.replace(state, committed=Vote(attempt=committed.attempt, manifest=committed.manifest))
    return state, (*outputs, machine.Commit(attempt=committed.attempt, manifest=committed.manifest))


def promise(state: machine.State, sender: PeerId, prepare: Prepare) -> machine.Result:
    if sender != leader(state.base, prepare.attempt):
        return state, ()
    if prepare.attempt < state.durable.promised:
        return state, refuse(state, sender, prepare.attempt)
    outputs: list[machine.Output] = []
    if may_promise(state.durable, prepare.attempt):
        durable = msgspec.structs.replace(state.durable, promised=prepare.attempt)
        state = machine.replace(machine.at_attempt(state, prepare.attempt), durable=durable)
        outputs += [machine.Persist(durable=durable), machine.SetTimer(timer="progress", attempt=prepare.attempt)]
    if state.announced is not None:  # the leader may not have heard it, or have forgotten it
        outputs.append(machine.Send(to=sender, message=state.announced))
    promise = Promise(attempt=prepare.attempt, accepted=state.durable.accepted)
    return state, (*outputs, machine.Send(to=sender, message=promise))


def refuse(state: machine.State, to: PeerId, attempt: Attempt) -> tuple[machine.Output, ...]:
    """Tell the leader of `attempt` that a later one is promised, so that it stops waiting for this one."""
    return (machine.Send(to=to, message=Refuse(attempt=attempt, promised=state.durable.promised)),)
