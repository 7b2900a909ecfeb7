"""The round machine where rounds name the state before them: who votes for which, and what later leaders go by."""

import msgspec
import pytest

from model.world import contribution, first_base
from weft.ids import Attempt, Digest, PeerId, Tokens
from weft.sync.records.messages import Accept, AnyRoundMessage, Entry, Manifest, Promise, Propose, Ready, Vote, work_of
from weft.sync.round import round
from weft.sync.round.machine import Broadcast, Output, Received, Send, State, StateNamed, TimedOut, Trained
from weft.sync.round.round import new_manifest
from weft.sync.round.rules import is_successor, leader
from weft.wire import digest, digest_of

PLAIN = msgspec.structs.replace(first_base(4), keeper=None)
BASE = msgspec.structs.replace(PLAIN, charter=msgspec.structs.replace(PLAIN.charter, is_recorded=True), past=b"\1" * 32)
ORDER = [leader(BASE, Attempt(attempt)) for attempt in range(4)]
TRUE, FALSE = digest(b"the state"), digest(b"another")


def ready_of(peer: PeerId) -> Ready:
    return Ready(tokens=Tokens(4), parts=contribution(BASE, BASE.electorate.index(peer), 0).parts)


def begun(me: PeerId, state: Digest | None = TRUE) -> State:
    began = round.begin(me, BASE)
    return began if state is None else fed(began, StateNamed(previous=BASE.previous, name=state))[0]


def fed(state: State, event: object) -> tuple[State, tuple[Output, ...]]:
    return round.step(state, event)  # type: ignore[arg-type]


def hear(state: State, sender: PeerId, message: AnyRoundMessage) -> tuple[State, tuple[Output, ...]]:
    return fed(state, Received(sender=sender, message=message))


def planned(own_state: Digest | None) -> Manifest:
    """Return what the first leader proposes, which has this state."""
    state = begun(ORDER[0], own_state)
    for peer in ORDER[1:]:
        state, _ = hear(state, peer, ready_of(peer))
    state, _ = fed(state, Trained(ready=ready_of(ORDER[0])))
    assert state.plan is not None
    results = {part: digest(b"merged") for part in range(BASE.num_parts)}
    return new_manifest(msgspec.structs.replace(state, results=results), state.plan)


def votes(outputs: tuple[Output, ...]) -> list[Digest]:
    sent = [each.message for each in outputs if isinstance(each, Send)]
    return [Digest(message.manifest) for message in sent if isinstance(message, Accept)]


def proposed(manifest: Manifest, attempt: int = 0) -> Propose:
    return Propose(attempt=Attempt(attempt), manifest=manifest)


def test_a_manifest_names_what_its_leader_has() -> None:
    for own in (TRUE, None):
        manifest = planned(own)
        assert manifest.entry == Entry(work=work_of(manifest.contributions), state=own, past=BASE.past or b"")
        assert is_successor(BASE, manifest)


@pytest.mark.parametrize("field", ["work", "past", "entry"])
def test_what_follows_from_the_round_is_no_leaders_choice(field: str) -> None:
    manifest = planned(TRUE)
    assert isinstance(manifest.entry, Entry)
    other = {
        "work": msgspec.structs.replace(manifest.entry, work=FALSE),
        "past": msgspec.structs.replace(manifest.entry, past=b"\2" * 32),
        "entry": msgspec.UNSET,
    }[field]
    assert not is_successor(BASE, msgspec.structs.replace(manifest, entry=other))
    assert not is_successor(PLAIN, manifest)


def test_a_member_votes_for_its_own_state_or_for_none() -> None:
    for named, is_accepted in ((TRUE, True), (None, True), (FALSE, False)):
        manifest = planned(named)
        _, outputs = hear(begun(ORDER[1]), ORDER[0], proposed(manifest))
        assert votes(outputs) == ([digest_of(manifest)] if is_accepted else [])


@pytest.mark.parametrize(("own", "is_accepted"), [(TRUE, True), (FALSE, False)])
def test_who_has_no_state_yet_votes_once_it_has(own: Digest, is_accepted: bool) -> None:
    manifest = planned(TRUE)
    state, outputs = hear(begun(ORDER[1], None), ORDER[0], proposed(manifest))
    assert votes(outputs) == []
    state, outputs = fed(state, StateNamed(previous=digest(b"of another round"), name=own))
    assert votes(outputs) == []
    state, outputs = fed(state, StateNamed(previous=BASE.previous, name=own))
    assert votes(outputs) == ([digest_of(manifest)] if is_accepted else [])
    assert (state.durable.accepted is not None) == is_accepted


def test_what_was_held_back_is_forgotten_with_its_attempt() -> None:
    manifest = planned(TRUE)
    state, _ = hear(begun(ORDER[1], None), ORDER[0], proposed(manifest))
    state, _ = fed(state, TimedOut(timer="progress", attempt=Attempt(0)))
    assert state.attempt > 0
    _, outputs = fed(state, StateNamed(previous=BASE.previous, name=TRUE))
    assert votes(outputs) == []


def leading(me: PeerId, own: Digest | None = TRUE) -> State:
    """Return the state of the leader of attempt 1, which has heard of no promise yet."""
    state = begun(me, own)
    for peer in ORDER:
        event = Trained(ready=ready_of(peer)) if peer == me else Received(sender=peer, message=ready_of(peer))
        state, _ = fed(state, event)
    state, _ = fed(state, TimedOut(timer="progress", attempt=Attempt(0)))
    assert (state.attempt, leader(BASE, state.attempt)) == (1, me)
    return state


def test_a_later_leader_goes_by_no_promise_that_names_another_state() -> None:
    """One false vote, told by a liar first each time, would hold up every later attempt."""
    false = Vote(attempt=Attempt(0), manifest=planned(FALSE))
    state = leading(ORDER[1])
    state, _ = hear(state, ORDER[0], Promise(attempt=Attempt(1), accepted=false))
    state, _ = hear(state, ORDER[2], Promise(attempt=Attempt(1), accepted=None))
    assert state.plan is None  # two of four, without the liar
    state, _ = hear(state, ORDER[3], Promise(attempt=Attempt(1), accepted=None))
    assert state.plan is not None
    assert state.proposal is None


def test_a_later_leader_repeats_what_names_its_own_state() -> None:
    manifest = planned(TRUE)
    vote = Vote(attempt=Attempt(0), manifest=manifest)
    for own in (TRUE, None):
        state, said = leading(ORDER[1], own), list[Output]()
        for peer, accepted in ((ORDER[0], vote), (ORDER[2], None)):
            state, outputs = hear(state, peer, Promise(attempt=Attempt(1), accepted=accepted))
            said += outputs
        if own is None:  # it has to know what it votes for
            assert state.proposal is None
            state, outputs = fed(state, StateNamed(previous=BASE.previous, name=TRUE))
            said += outputs
        assert state.proposal == manifest
        assert Broadcast(message=proposed(manifest, 1)) in said
