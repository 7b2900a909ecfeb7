"""What members' findings on each other's work come to."""

import dataclasses

import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from charters import charter
from unit.sync.test_governance import BODY, MEMBERS, NAMES, RUN
from weft.ids import BranchId, PeerId, Round
from weft.keys import Identity
from weft.sync.governance import accused, clears, enact, objection
from weft.sync.records.acts import Finding, Outcome, Warrant, Weighed
from weft.sync.records.charter import UNANSWERED_FOR, AuditTerms, Body, Charter, FalseWork, Quarantined, Unanswered
from weft.wire import Signed, digest, digest_of, seal

AUDITED = replace(charter(4), audits=AuditTerms(rate=0.1, trace_every=1))
WORK, BRANCH = digest(b"work"), BranchId(digest(b"branch"))
ACCUSED = NAMES[0]
OTHERS = MEMBERS[1:]


def finding(who: Identity, outcome: Outcome = "differs", round: int = 6, before: int = 0, work: str = WORK) -> Finding:
    return Finding(
        run=RUN, peer=ACCUSED, round=Round(round), work=work, before=before, outcome=outcome, why=who.peer[:8]
    )


def found(voters: list[Identity], outcome: Outcome = "differs", round: int = 6) -> Warrant:
    cast = [seal(each, finding(each, outcome, round, before=number)) for number, each in enumerate(voters)]
    return Warrant(letters=tuple(sorted(cast, key=lambda letter: letter.signer)))


def by(letter: Signed) -> PeerId:
    return letter.signer


def why_not(made: Warrant, before: Charter = AUDITED, at: int = 7) -> str:
    return objection(before, at_round(at), (made,)) or ""


def at_round(number: int) -> Body:
    return dataclasses.replace(BODY, round=Round(number))


def test_more_than_half_of_the_members_strike_a_key_out_whichever_steps_they_have_done() -> None:
    done = enact(AUDITED, BODY, (found(OTHERS[:3]),))
    assert (done.struck, done.removed, done.charter.banned) == (ACCUSED, (ACCUSED,), (ACCUSED,))
    assert done.charter.is_dealt_with(ACCUSED, Round(6))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (found(OTHERS[:2]), "2 of 5 members that judge it are not a majority"),
        (found([*OTHERS[:2], MEMBERS[0]]), "only other members judge"),
        (found([*OTHERS[:2], Identity.from_seed(bytes(32))]), "only other members judge"),
        (found(OTHERS[:3], "equal"), "does not wait for that"),
        (
            Warrant(letters=tuple(sorted((*found(OTHERS[:2]).letters, *found(OTHERS[2:3], "equal").letters), key=by))),
            "some find no fault",
        ),
        (Warrant(letters=tuple(reversed(found(OTHERS[:3]).letters))), "each once"),
        (
            Warrant(letters=(*found(OTHERS[:2]).letters, seal(OTHERS[3], finding(OTHERS[3], work=digest(b"other"))))),
            "not on one work",
        ),
    ],
)
def test_fewer_or_others_or_on_something_else_come_to_nothing(made: Warrant, reason: str) -> None:
    assert reason in why_not(made)


def test_where_nobody_is_audited_nobody_is_judged() -> None:
    assert "nobody's work is audited" in why_not(found(OTHERS), before=replace(AUDITED, audits=UNSET))


def test_one_lie_is_dealt_with_once() -> None:
    after = enact(AUDITED, BODY, (found(OTHERS),)).charter
    pardoned = replace(after, banned=())
    assert "banned already" in why_not(found(OTHERS), before=pardoned)
    assert enact(pardoned, at_round(9), (found(OTHERS, round=8),)).struck == ACCUSED


def unanswered(before: Charter, round: int) -> tuple[Charter, tuple[PeerId, ...]]:
    done = enact(before, at_round(round + 1), (found(OTHERS, "unanswered", round),))
    return done.charter, done.removed


def test_who_leaves_auditors_without_an_answer_in_three_rounds_of_forty_is_removed() -> None:
    first, removed = unanswered(AUDITED, 6)
    assert (first.unanswered, removed) == ((Unanswered(peer=ACCUSED, rounds=(Round(6),)),), ())
    second, removed = unanswered(first, 8)
    assert removed == ()
    third, removed = unanswered(second, 6 + UNANSWERED_FOR)
    assert (removed, third.banned) == ((ACCUSED,), ())
    # A round later the first of them is forgotten.
    later, removed = unanswered(second, 7 + UNANSWERED_FOR)
    assert removed == ()
    assert later.unanswered == (Unanswered(peer=ACCUSED, rounds=(Round(8), Round(7 + UNANSWERED_FOR))),)


def test_verdicts_of_before_it_was_removed_remove_nobody_who_has_come_again() -> None:
    """Whoever has kept them may tell them again."""
    charter, removed = AUDITED, tuple[PeerId, ...]()
    for round in (6, 8, 10):
        charter, removed = unanswered(charter, round)
    assert removed == (ACCUSED,)
    for round in (6, 8, 10, 11):
        assert "counted already" in why_not(found(OTHERS, "unanswered", round), before=charter, at=12)
    assert why_not(found(OTHERS, "unanswered", 12), before=charter, at=13) == ""


def test_what_is_long_ago_takes_no_room() -> None:
    old, new = (Unanswered(peer=NAMES[number], rounds=(Round(round),)) for number, round in ((1, 6), (2, 7)))
    done = enact(replace(AUDITED, unanswered=(old, new)), at_round(47), (found(OTHERS, "unanswered", 46),))
    assert done.charter.unanswered == (Unanswered(peer=ACCUSED, rounds=(Round(46),)), new)


def test_one_round_without_an_answer_counts_once_and_not_for_ever() -> None:
    first, _ = unanswered(AUDITED, 6)
    assert "counted already" in why_not(found(OTHERS, "unanswered", 6), before=first)
    assert "long ago" in why_not(found(OTHERS, "unanswered", 6), at=7 + UNANSWERED_FOR)


def test_who_was_shown_other_steps_adds_to_those_that_were_shown_nothing() -> None:
    """Who answers some and is silent to others is not struck out, and does not go free."""
    cast = [seal(each, finding(each, "differs" if number else "unanswered")) for number, each in enumerate(OTHERS[:3])]
    mixed = Warrant(letters=tuple(sorted(cast, key=lambda letter: letter.signer)))
    done = enact(AUDITED, BODY, (mixed,))
    assert (done.struck, done.removed) == (None, ())
    assert done.charter.unanswered == (Unanswered(peer=ACCUSED, rounds=(Round(6),)),)
    assert accused(mixed) is None
    assert accused(found(OTHERS[:3])) == ACCUSED


WEIGHED = Weighed(
    branch=BRANCH, manifest=digest(b"counts it"), weights=(3, 5), late=2, method=digest_of(AUDITED.settings.method)
)


def weighed(*said: Weighed | UnsetType) -> Warrant:
    cast = [seal(who, replace(finding(who), weighed=each)) for who, each in zip(OTHERS[: len(said)], said, strict=True)]
    return Warrant(letters=tuple(sorted(cast, key=lambda letter: letter.signer)))


def test_what_more_than_half_say_alike_was_counted_of_it_is_to_be_taken_out_again() -> None:
    other = replace(WEIGHED, late=3)
    for said in ((WEIGHED,) * 3, (WEIGHED, other, WEIGHED, WEIGHED)):
        done = enact(AUDITED, BODY, (weighed(*said),))
        assert done.struck == ACCUSED
        assert done.charter.false_works == (FalseWork(peer=ACCUSED, round=Round(6), weighed=WEIGHED),)


def test_a_key_is_struck_out_also_where_nothing_can_be_taken_out() -> None:
    other = replace(WEIGHED, late=3)
    for said in ((UNSET,) * 3, (WEIGHED, other, WEIGHED), (WEIGHED, WEIGHED, UNSET)):
        done = enact(AUDITED, BODY, (weighed(*said),))
        assert (done.struck, done.charter.false_works) == (ACCUSED, UNSET)


def test_what_is_said_of_another_false_work_of_a_key_that_is_struck_out_takes_nothing_from_the_first() -> None:
    """Who brings two could else have what the first has moved stay, by a word of a friend on the second."""
    first = enact(AUDITED, at_round(8), (weighed(WEIGHED, WEIGHED, WEIGHED),)).charter
    cast = [seal(who, replace(finding(who, round=7, work=digest(b"other")), weighed=WEIGHED)) for who in OTHERS[:3]]
    without = dataclasses.replace(at_round(9), electorate=tuple(each.peer for each in OTHERS))
    after = enact(first, without, (Warrant(letters=tuple(sorted(cast, key=by))),)).charter
    assert [each.round for each in after.false_works or ()] == [6, 7]


# --- what waits in quarantine ---

WAITS = replace(
    AUDITED,
    quarantined=(Quarantined(peer=ACCUSED, left=2, work=WORK, round=Round(6)), Quarantined(peer=NAMES[1], left=1)),
)


def test_more_than_half_of_the_settled_members_clear_what_waits() -> None:
    settled = OTHERS[1:]  # three of five members
    assert "1 of 3 members that are not in quarantine" in why_not(found(settled[:1], "equal"), WAITS)
    with_a_newcomer = found([OTHERS[0], *settled[:2]], "equal")
    assert "none that is in quarantine" in why_not(with_a_newcomer, WAITS), "who is in quarantine clears nobody"
    done = enact(WAITS, BODY, (found(settled[:2], "equal"),))
    assert (done.removed, done.struck, done.charter.banned) == ((), None, ())
    assert [each.is_cleared for each in done.charter.quarantined or ()] == [True, UNSET]
    assert clears(found(settled[:2], "equal"))
    assert not clears(found(settled[:2]))


def test_what_is_cleared_or_is_another_work_or_of_another_round_is_not_cleared_again() -> None:
    cleared = enact(WAITS, BODY, (found(OTHERS[1:], "equal"),)).charter
    assert "does not wait" in why_not(found(OTHERS[1:], "equal"), cleared)
    assert "does not wait" in why_not(found(OTHERS[1:], "equal", round=5), WAITS)


def test_what_waits_and_is_found_false_strikes_its_key_out() -> None:
    assert enact(WAITS, BODY, (found(OTHERS[1:3]),)).struck == ACCUSED


# --- judges ---


def with_newcomers(*numbers: int) -> Charter:
    return replace(AUDITED, quarantined=tuple(Quarantined(peer=NAMES[number], left=1) for number in numbers))


@pytest.mark.parametrize("outcome", ["differs", "unanswered"])
def test_newcomers_that_look_at_nothing_keep_settled_members_from_no_majority(outcome: Outcome) -> None:
    """Of five members three are settled, the accused among them: two strike it out, as of three members."""
    before, two = with_newcomers(3, 4), found([MEMBERS[1], MEMBERS[2]], outcome)
    done = enact(before, BODY, (two,))
    assert (done.struck == ACCUSED, done.charter.unanswered is not UNSET) == (
        outcome == "differs",
        outcome != "differs",
    )
    assert "2 of 5" in why_not(two)


def test_newcomers_that_lie_are_no_majority_however_many() -> None:
    before = with_newcomers(2, 3, 4)
    assert "none that is in quarantine" in why_not(found([MEMBERS[2], MEMBERS[3], MEMBERS[4]]), with_newcomers(3, 4))
    assert why_not(found([MEMBERS[2], MEMBERS[3], MEMBERS[4]]), before) == "", "beside the accused one settled member"


def test_of_the_settled_members_more_than_half_say_alike_what_was_counted() -> None:
    said = [seal(who, replace(finding(who), weighed=WEIGHED)) for who in (MEMBERS[1], MEMBERS[2])]
    warrant = Warrant(letters=tuple(sorted(said, key=by)))
    assert enact(with_newcomers(3, 4), BODY, (warrant,)).charter.false_works
    assert "1 of 3" in why_not(found([MEMBERS[1]]), with_newcomers(3, 4)), "one alone strikes nobody out"
