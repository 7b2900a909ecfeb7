"""Whose word counts where an owner says that it cannot have somebody's contribution, or that it is elsewhere."""

import msgspec
from msgspec import UNSET

from model.world import contribution, first_base
from weft.ids import Attempt, PeerId, Tokens
from weft.sync.governance import charter_after
from weft.sync.records.acts import Weighed
from weft.sync.records.counters import due, with_false
from weft.sync.records.messages import Prepare, Ready, Refuse, Stuck, next_base
from weft.sync.round import round
from weft.sync.round.leading import new_manifest
from weft.sync.round.machine import MergeFailed, Noticed, Recalled, Received, Send, State, TimedOut, Trained
from weft.sync.round.rules import is_sound, is_successor, leader
from weft.wire import digest, digest_of

BASE = msgspec.structs.replace(first_base(5, num_parts=5), keeper=None)
LEADER, A, B, C, D = (leader(BASE, Attempt(attempt)) for attempt in range(5))


def planned(tokens: int = 4, before: State | None = None) -> State:
    """Return the first leader's state once it has planned; each member owns a part."""
    state = before or round.begin(LEADER, BASE)
    for number, peer in enumerate(BASE.electorate):
        parts = contribution(BASE, number, 0).parts
        if peer == LEADER:
            state = round.step(state, Trained(ready=Ready(tokens=Tokens(tokens), parts=parts)))[0]
        else:
            ready = Ready(tokens=Tokens(tokens), parts=parts)
            state = round.step(state, Received(sender=peer, message=ready))[0]
    return state


def stuck(state: State, owner: PeerId, *missing: PeerId, part: int | None = None) -> State:
    """Let an owner say that it lacks contributions."""
    assert state.plan is not None
    part = state.plan.owners.index(owner) if part is None else part
    if owner == state.me:
        return round.step(state, MergeFailed(plan=state.plan, part=part, missing=missing))[0]
    word = Stuck(attempt=state.attempt, revision=state.plan.revision, part=part, missing=missing)
    return round.step(state, Received(sender=owner, message=word))[0]


def counted(state: State) -> set[PeerId]:
    assert state.plan is not None
    return {each.peer for each in state.plan.contributions}


def owners(state: State) -> set[PeerId]:
    assert state.plan is not None
    return set(state.plan.owners)


def test_one_owners_word_keeps_nobody_out_and_it_owns_nothing_more() -> None:
    state = stuck(planned(), A, LEADER, B, C, D)
    assert counted(state) == {LEADER, A, B, C, D}
    assert owners(state) == {LEADER, B, C, D}


def test_who_owns_no_such_part_is_not_heard() -> None:
    before = planned()
    assert before.plan is not None
    for part in (before.plan.owners.index(B), 31):
        assert stuck(before, A, B, part=part) == before
    after = stuck(before, A, B)
    assert stuck(after, B, C, part=before.plan.owners.index(B)).lacking.keys() <= {A, B}
    old = Stuck(attempt=Attempt(0), revision=0, part=before.plan.owners.index(C), missing=(D,))
    assert round.step(after, Received(sender=C, message=old))[0] == after


def test_what_two_owners_lack_is_left_out_and_both_are_believed_again() -> None:
    state = stuck(stuck(planned(), A, D), B, D)
    assert counted(state) == {LEADER, A, B, C}
    assert owners(state) == {LEADER, A, B, C}
    assert (state.unusable, state.lacking) == ({D}, {})


def test_the_leader_believes_itself() -> None:
    assert counted(stuck(planned(), LEADER, D)) == {LEADER, A, B, C}


def test_one_owner_is_believed_of_who_is_away() -> None:
    state = round.step(planned(), Noticed(peer=D, status="suspected"))[0]
    assert counted(stuck(state, A, D)) == {LEADER, A, B, C}


def test_two_that_agree_are_not_believed_of_half_of_all() -> None:
    state = stuck(stuck(planned(), A, B, C, D), B, LEADER, A, C, D)
    assert counted(state) == {LEADER, A, B}
    state = stuck(stuck(planned(), A, B, C), B, A, C)
    assert counted(state) == {LEADER, A, B, D}
    state = stuck(state, D, A, B)
    assert counted(state) == {LEADER, A, B, D}
    assert owners(state) == {LEADER}


def test_what_the_leader_brings_is_left_out_like_anybodys() -> None:
    state = stuck(stuck(planned(), A, LEADER), B, LEADER)
    assert counted(state) == {A, B, C, D}


def test_where_nobody_else_is_believed_the_leader_merges_all() -> None:
    state = planned()
    for owner, other in ((A, B), (B, A), (C, D), (D, C)):
        state = stuck(state, owner, other)
    assert owners(state) == {LEADER}
    assert counted(state) == {LEADER, A, B, C, D}


def test_another_attempt_begins_without_suspicion() -> None:
    state = stuck(planned(), A, B)
    assert round.step(state, TimedOut(timer="progress", attempt=Attempt(0)))[0].lacking == {}
    state = stuck(planned(), LEADER, B)
    assert round.step(state, TimedOut(timer="progress", attempt=Attempt(0)))[0].unusable == set()


def test_of_nothing_but_empty_contributions_no_plan_is_made() -> None:
    assert planned(tokens=0).plan is None


def test_who_is_in_a_later_attempt_owns_nothing() -> None:
    """It merges nothing for this one: the leader would wait until a timer runs out."""
    state = planned()
    assert state.plan is not None
    assert A in owners(state)
    ahead = round.step(round.begin(A, BASE), Received(sender=B, message=Prepare(attempt=Attempt(2))))[0]
    after, outputs = round.step(ahead, Received(sender=LEADER, message=state.plan))
    refusal = Refuse(attempt=Attempt(0), promised=Attempt(2))
    assert (after, outputs) == (ahead, (Send(to=LEADER, message=refusal),))
    state = round.step(state, Received(sender=A, message=refusal))[0]
    assert owners(state) == {LEADER, B, C, D}
    assert counted(state) == {LEADER, A, B, C, D}  # what it brought is here
    state = round.step(state, Received(sender=A, message=refusal))[0]
    assert state.plan is not None
    assert state.plan.revision == 1  # said twice, it ends no second plan
    assert owners(stuck(state, B, C)) == {LEADER, C, D}


LIAR = PeerId("ab" * 32)
STRUCK = with_false(
    BASE.charter,
    LIAR,
    BASE.round,
    Weighed(
        branch=BASE.branch,
        manifest=digest(b"counts it"),
        weights=(1,),
        late=0,
        method=digest_of(BASE.charter.settings.method),
    ),
)


def recalled() -> State:
    """Return the first leader's state once it has planned to take a false work out."""
    state = round.begin(LEADER, msgspec.structs.replace(BASE, charter=STRUCK))
    return planned(before=round.step(state, Recalled(peers=frozenset({LIAR})))[0])


def test_who_knows_a_false_work_and_leads_takes_it_out_and_the_manifest_says_so() -> None:
    state = recalled()
    assert state.plan is not None
    assert state.plan.counters == (LIAR,)
    assert is_sound(state.base, state.plan)
    assert not is_sound(BASE, state.plan), "nothing is due there"
    results = {part: digest(bytes([part])) for part in range(5)}
    manifest = new_manifest(msgspec.structs.replace(state, results=results), state.plan)
    assert manifest.counters == (LIAR,)
    assert is_successor(state.base, manifest)
    assert not is_successor(state.base, msgspec.structs.replace(manifest, counters=UNSET))
    assert due(next_base(manifest, charter_after(state.base, manifest))) == ()


def test_what_of_a_false_work_cannot_be_had_is_not_taken_out_in_that_attempt() -> None:
    state = recalled()
    assert stuck(state, A, LIAR).plan.counters == (LIAR,), "one owner's word"
    for after in (stuck(stuck(state, A, LIAR), B, LIAR), stuck(state, LEADER, LIAR)):
        assert after.plan is not None
        assert after.plan.counters is UNSET
        assert counted(after) == {LEADER, A, B, C, D}
        again = round.step(after, TimedOut(timer="progress", attempt=Attempt(0)))[0]
        assert (again.unusable, again.recalled) == (set(), {LIAR})
