"""What going back comes to: to which rounds, by whose word, and what is left of false works that were counted since."""

import dataclasses

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from charters import charter
from unit.sync.test_governance import BODY, MEMBERS, NAMES, ONE, RUN, TWO, votes, warrant
from unit.sync.test_governance_audits import AUDITED, WEIGHED
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.keys import Identity
from weft.sync.governance import enact, may_note_false, objection
from weft.sync.records import counters, rewinds
from weft.sync.records.acts import Rewind, RewindBallot, Warrant
from weft.sync.records.ancestry import Fork
from weft.sync.records.charter import MAX_REWOUND, Body, Charter, FalseWork, Quarantined, Rewound, Struck
from weft.wire import digest, seal

STEWARDED = replace(AUDITED, stewards=(ONE.peer, TWO.peer), serials=(0, 0))
AT = 30
STATE = digest(b"state")


def back(to: int, state: str = STATE, reason: str = "it diverged") -> Rewind:
    return Rewind(round=Round(to), manifest=digest(b"manifest %d" % to), state=state, reason=reason)


def at_round(number: int) -> Body:
    return dataclasses.replace(BODY, round=Round(number))


def why_not(*made: Warrant, before: Charter = STEWARDED, at: int = AT) -> str:
    return objection(before, at_round(at), made) or ""


def ballots(voters: list[Identity], *wanted: Rewind) -> Warrant:
    cast = [
        seal(each, RewindBallot(run=RUN, rewind=wanted[number % len(wanted)])) for number, each in enumerate(voters)
    ]
    return Warrant(letters=tuple(sorted(cast, key=lambda letter: letter.signer)))


def test_a_steward_brings_a_run_back_and_the_charter_says_so() -> None:
    done = enact(STEWARDED, at_round(AT), (warrant(back(20)),))
    assert (done.is_rewound, done.removed, done.struck) == (True, (), None)
    assert done.charter.rewound == (Rewound(at=Round(AT), to=Round(20)),)
    assert done.charter.settings == STEWARDED.settings
    assert done.charter.serials[STEWARDED.stewards.index(ONE.peer)] == 1


@pytest.mark.parametrize(
    ("to", "is_allowed"), [(AT, False), (AT - 1, False), (AT - 2, True), (AT - 16, True), (AT - 17, False)]
)
def test_it_goes_back_within_sixteen_rounds(to: int, is_allowed: bool) -> None:
    assert (why_not(warrant(back(to))) == "") == is_allowed


def test_where_nobody_audits_nobody_keeps_what_it_takes() -> None:
    assert "does not audit" in why_not(warrant(back(20)), before=replace(STEWARDED, audits=UNSET))


def test_a_round_goes_back_once() -> None:
    assert "goes back once" in why_not(warrant(back(20)), warrant(back(19), who=TWO))


def test_more_than_half_of_the_members_vote_for_the_same_whatever_their_reasons() -> None:
    others = back(20, reason="or for another reason")
    assert enact(AUDITED, at_round(AT), (ballots(MEMBERS[:3], back(20), others),)).charter.rewound
    assert "2 of 5 members" in why_not(ballots(MEMBERS[:2], back(20)), before=AUDITED)
    assert "one round of this run" in why_not(ballots(MEMBERS[:3], back(20), back(21)), before=AUDITED)
    assert "one round of this run" in why_not(ballots(MEMBERS[:3], back(20), back(20, digest(b"x"))), before=AUDITED)
    stranger = [*MEMBERS[:2], Identity.from_seed(bytes(32))]
    assert "only members vote" in why_not(ballots(stranger, back(20)), before=AUDITED)
    twice = Warrant(letters=ballots(MEMBERS[:2], back(20)).letters * 2)
    assert "only members vote" in why_not(twice, before=AUDITED)


def test_a_crowd_of_newcomers_brings_nothing_back() -> None:
    """To go back moves parameters, as work does that nobody has looked at."""
    new = [Quarantined(peer=each, left=1) for each in NAMES]
    before, alone = replace(AUDITED, quarantined=tuple(new[2:])), replace(AUDITED, quarantined=tuple(new[1:]))
    assert "none that is in quarantine" in why_not(ballots(MEMBERS[2:], back(20)), before=before)
    assert "1 of 2 members" in why_not(ballots(MEMBERS[:1], back(20)), before=before)
    assert why_not(ballots(MEMBERS[:2], back(20)), before=before) == ""
    assert "1 of 5 members" in why_not(ballots(MEMBERS[:1], back(20)), before=alone)


def test_the_same_votes_bring_it_back_once_and_what_is_dropped_is_no_place_to_go_to() -> None:
    cast = ballots(MEMBERS[:3], back(20))
    after = enact(AUDITED, at_round(AT), (cast,)).charter
    assert "gone back behind round 20" in why_not(cast, before=after, at=AT + 1)
    for dropped in (21, AT - 1):
        assert "gone back" in why_not(ballots(MEMBERS[:3], back(dropped)), before=after, at=AT + 2)
    for good in (19, AT, AT + 1):
        assert why_not(ballots(MEMBERS[:3], back(good)), before=after, at=AT + 3) == ""


def test_a_run_goes_back_so_often_and_no_more() -> None:
    full = tuple(Rewound(at=Round(2 * each + 2), to=Round(2 * each)) for each in range(MAX_REWOUND))
    assert "which is the most" in why_not(warrant(back(AT - 2)), before=replace(STEWARDED, rewound=full))


# --- false works ---


def false(peer: PeerId, counted: int, taken_out: int | None = None) -> FalseWork:
    work = FalseWork(peer=peer, round=Round(counted), weighed=WEIGHED)
    return work if taken_out is None else replace(work, taken_out=Round(taken_out))


def test_what_was_counted_since_is_gone_and_what_was_taken_out_since_is_back() -> None:
    works = (false(NAMES[0], 18, 19), false(NAMES[1], 19, 25), false(NAMES[2], 22), false(NAMES[3], 23, 28))
    done = enact(replace(STEWARDED, false_works=works), at_round(AT), (warrant(back(20)),))
    assert done.charter.false_works == (works[0], false(NAMES[1], 19))
    only = enact(replace(STEWARDED, false_works=works[2:]), at_round(AT), (warrant(back(20)),))
    assert only.charter.false_works is UNSET


def test_of_a_dropped_round_nobody_notes_what_is_to_be_taken_out() -> None:
    after = enact(STEWARDED, at_round(AT), (warrant(back(20)),)).charter
    assert rewinds.is_dropped(after, Round(21))
    assert rewinds.is_dropped(after, Round(AT))
    assert not rewinds.is_dropped(after, Round(20))
    assert not rewinds.is_dropped(after, Round(AT + 1))
    assert counters.with_false(after, NAMES[0], Round(21), WEIGHED) == after
    assert counters.with_false(after, NAMES[0], Round(20), WEIGHED) != after
    struck = replace(after, struck=(Struck(peer=NAMES[0], round=Round(AT)),))
    assert not may_note_false(struck, NAMES[0], Round(21))
    assert may_note_false(struck, NAMES[0], Round(20))


def test_a_branch_that_went_back_to_before_it_began_brings_nothing() -> None:
    def fork(at: int) -> Fork:
        manifest, branch = Digest(digest(b"manifest")), BranchId(digest(b"branch"))
        return Fork(branch=branch, round=Round(at), manifest=manifest, members=NAMES, committed_tokens=Tokens(7))

    after = enact(STEWARDED, at_round(AT), (warrant(back(20)),)).charter
    for began, is_behind in ((20, False), (21, False), (22, True), (AT, True), (AT + 1, False)):
        assert rewinds.is_behind(after, fork(began)) == is_behind
        assert counters.is_mixed(after, fork(began)) == is_behind
    assert not rewinds.is_behind(charter(1), fork(5))


# --- reading ---


def test_letters_say_what_they_want() -> None:
    assert rewinds.read(warrant(back(20)).letters[0]) == back(20)
    assert rewinds.read(ballots(MEMBERS[:1], back(20)).letters[0]) == back(20)
    assert rewinds.read(votes(MEMBERS[:1], NAMES[1]).letters[0]) is None
    broken = seal(ONE, RewindBallot(run=RUN, rewind=back(20)))
    assert rewinds.read(replace(broken, body=b"nothing")) is None
