"""What members of a stage find of what others compute: when it strikes one out."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from charters import charter
from unit.sync.test_governance import BODY, MEMBERS, NAMES, RUN
from unit.verify.test_passages import MIDDLE
from weft.ids import Round, RunId
from weft.keys import Identity
from weft.sync.governance import accused, enact, objection
from weft.sync.records.acts import FalsePassage, Warrant
from weft.sync.records.charter import Body, Charter, PassageTerms, Struck
from weft.sync.records.passages import JUDGED_FOR
from weft.wire import Signed, digest, seal

WATCHED = replace(charter(4), passages=PassageTerms(rate=0.1))
ACCUSED, OTHERS = MEMBERS[0], MEMBERS[1:]
STRANGER = Identity.from_seed(bytes(32))


def letter(by: Identity, about: Identity = ACCUSED, number: int = 0, round: int = 6, **fields: Any) -> Signed:
    passage = seal(fields.pop("author", about), replace(MIDDLE, run=fields.pop("of", RUN), number=number))
    return seal(
        by, FalsePassage(**{"run": RUN, "peer": about.peer, "round": Round(round), "passage": passage} | fields)
    )


def warrant(*letters: Signed) -> Warrant:
    return Warrant(letters=tuple(sorted(letters, key=lambda each: each.signer)))


def why_not(made: Warrant, before: Charter = WATCHED, at: Body = BODY) -> str:
    return objection(before, at, (made,)) or ""


MOST = warrant(*(letter(each, number=number) for number, each in enumerate(OTHERS[:3])))


def test_more_than_half_of_a_stage_strike_a_member_out_whichever_micro_batches_they_have_computed() -> None:
    assert len({each.body for each in MOST.letters}) == 3
    done = enact(WATCHED, BODY, (MOST,))
    assert (done.struck, done.removed, done.charter.banned) == (NAMES[0], (NAMES[0],), (NAMES[0],))
    assert accused(MOST) == NAMES[0]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (warrant(*(letter(each) for each in OTHERS[:2])), "2 of 5 members are not a majority"),
        (warrant(*(letter(each) for each in [*OTHERS[:2], ACCUSED])), "only other members judge"),
        (warrant(*(letter(each) for each in [*OTHERS[:2], STRANGER])), "only other members judge"),
        (warrant(*MOST.letters[:2], letter(OTHERS[3], about=OTHERS[1])), "not of one member"),
        (Warrant(letters=tuple(reversed(MOST.letters))), "one has signed two"),
        (Warrant(letters=(*MOST.letters[:2], MOST.letters[1])), "one has signed two"),
        (warrant(*MOST.letters[:2], letter(OTHERS[3], author=OTHERS[0])), "not signed by who is accused"),
        (warrant(*MOST.letters[:2], letter(OTHERS[3], of=RunId(digest(b"other")))), "of another run"),
        (
            warrant(*(letter(each, of=RunId(digest(b"b")), run=RunId(digest(b"b"))) for each in OTHERS[:3])),
            "it is of run",
        ),
        (warrant(*(letter(each, round=BODY.round + 1) for each in OTHERS[:3])), "still to come"),
        (warrant(*MOST.letters[:2], replace(letter(OTHERS[3]), signature=bytes(64))), "does not hold"),
    ],
)
def test_fewer_or_others_or_what_the_accused_has_not_signed_strike_out_nobody(made: Warrant, reason: str) -> None:
    assert reason in why_not(made)


def test_what_was_found_long_ago_or_before_it_was_struck_out_last_counts_no_more() -> None:
    late = dataclasses.replace(BODY, round=Round(6 + JUDGED_FOR + 1))
    assert "long ago" in why_not(MOST, at=late)
    pardoned = replace(WATCHED, struck=(Struck(peer=NAMES[0], round=Round(6)),))
    assert "banned already" in why_not(MOST, pardoned)


def test_where_nothing_is_computed_again_nobody_is_struck_out_for_it() -> None:
    assert "nobody computes again" in why_not(MOST, charter(4))
