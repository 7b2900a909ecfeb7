"""The round machine where rounds are recorded: what manifests name, and what votes say."""

import msgspec
import pytest

from model.world import contribution, first_base
from weft.ids import Attempt, Digest, PeerId, Tokens
from weft.sync.records.messages import Accept, Entry, Manifest, Propose, Ready, work_of
from weft.sync.round import round
from weft.sync.round.leading import new_manifest
from weft.sync.round.machine import Output, Received, Send, State, StateNamed, Trained
from weft.sync.round.rules import is_successor, leader
from weft.wire import digest, digest_of

PLAIN = msgspec.structs.replace(first_base(4), keeper=None)
BASE = msgspec.structs.replace(PLAIN, charter=msgspec.structs.replace(PLAIN.charter, is_recorded=True), past=b"\1" * 32)
ORDER = [leader(BASE, Attempt(attempt)) for attempt in range(4)]
OWN = digest(b"the state")


def ready_of(peer: PeerId) -> Ready:
    return Ready(tokens=Tokens(4), parts=contribution(BASE, BASE.electorate.index(peer), 0).parts)


def fed(state: State, event: object) -> tuple[State, tuple[Output, ...]]:
    return round.step(state, event)  # type: ignore[arg-type]


def proposed(base: object = BASE) -> Manifest:
    """Return what the first leader proposes."""
    state = round.begin(ORDER[0], base)  # type: ignore[arg-type]
    for peer in ORDER[1:]:
        state, _ = fed(state, Received(sender=peer, message=ready_of(peer)))
    state, _ = fed(state, Trained(ready=ready_of(ORDER[0])))
    assert state.plan is not None
    results = {part: digest(b"merged") for part in range(BASE.num_parts)}
    return new_manifest(msgspec.structs.replace(state, results=results), state.plan)


def vote(state: State, manifest: Manifest) -> Accept:
    _, outputs = fed(state, Received(sender=ORDER[0], message=Propose(attempt=Attempt(0), manifest=manifest)))
    (found,) = [each.message for each in outputs if isinstance(each, Send)]
    assert isinstance(found, Accept)
    return found


def named(base: object, previous: Digest) -> State:
    state, _ = fed(round.begin(ORDER[1], base), StateNamed(previous=previous, name=OWN))  # type: ignore[arg-type]
    return state


def test_a_manifest_names_its_work_and_what_was_before() -> None:
    manifest = proposed()
    assert manifest.entry == Entry(work=work_of(manifest.contributions), past=BASE.past or b"")
    assert is_successor(BASE, manifest)
    assert proposed(PLAIN).entry is msgspec.UNSET


@pytest.mark.parametrize("field", ["work", "past", "entry"])
def test_what_follows_from_the_round_is_no_leaders_choice(field: str) -> None:
    manifest = proposed()
    assert isinstance(manifest.entry, Entry)
    other = {
        "work": msgspec.structs.replace(manifest.entry, work=OWN),
        "past": msgspec.structs.replace(manifest.entry, past=b"\2" * 32),
        "entry": msgspec.UNSET,
    }[field]
    assert not is_successor(BASE, msgspec.structs.replace(manifest, entry=other))
    assert not is_successor(PLAIN, manifest)


def test_a_vote_says_what_state_its_member_has() -> None:
    manifest = proposed()
    found = vote(named(BASE, BASE.previous), manifest)
    assert found == Accept(attempt=Attempt(0), manifest=digest_of(manifest), state=OWN)


def test_who_does_not_know_its_state_votes_all_the_same() -> None:
    manifest = proposed()
    for state in (round.begin(ORDER[1], BASE), named(BASE, digest(b"of another round"))):
        assert vote(state, manifest) == Accept(attempt=Attempt(0), manifest=digest_of(manifest))


def test_votes_of_runs_that_record_nothing_say_nothing() -> None:
    manifest = proposed(PLAIN)
    assert vote(named(PLAIN, PLAIN.previous), manifest) == Accept(attempt=Attempt(0), manifest=digest_of(manifest))
