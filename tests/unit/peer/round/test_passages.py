"""What members of a stage have found of each other: how long it waits, and what it comes to."""

from typing import Any

import pytest
from msgspec.structs import replace

from unit.peer.round.test_acts_pending import BASE, IDENTITIES
from unit.verify.test_passages import MIDDLE
from weft.ids import PeerId, Round
from weft.keys import Identity
from weft.peer.round.passages import kept, letters, still, warrants
from weft.sync.governance import Void
from weft.sync.records.acts import FalsePassage
from weft.sync.records.charter import PassageTerms, Struck
from weft.sync.records.messages import Base
from weft.sync.records.passages import JUDGED_FOR
from weft.wire import Signed, seal

WATCHED = replace(BASE, charter=replace(BASE.charter, passages=PassageTerms(rate=0.1)))
ACCUSED, OTHERS = IDENTITIES[0], IDENTITIES[1:]
ROUND = int(BASE.round)


def found(by: Identity, round: int = ROUND, number: int = 0, about: Identity = ACCUSED) -> Signed:
    passage = seal(about, replace(MIDDLE, run=BASE.run, number=number))
    return seal(by, FalsePassage(run=BASE.run, peer=about.peer, round=Round(round), passage=passage))


def cast(*found_by: Signed, base: Base = WATCHED) -> Any:
    known: Any = {}
    for letter in found_by:
        known = kept(known, base, letter)
    return known


def signers(known: Any, base: Base = WATCHED) -> list[list[PeerId]]:
    return [[letter.signer for letter in each.letters] for each in warrants(known, base)]


def test_more_than_half_of_who_votes_now_is_a_warrant() -> None:
    two, three = cast(*map(found, OTHERS[:2])), cast(*map(found, OTHERS))
    assert (signers(two), signers(three)) == ([], [[each.peer for each in OTHERS]])
    without_one = replace(WATCHED, electorate=tuple(each.peer for each in IDENTITIES[:3]))
    assert signers(three, without_one) == [[each.peer for each in OTHERS[:2]]], "who has left is not counted"


def test_of_one_that_accuses_the_newest_letter_is_kept() -> None:
    old, new = found(OTHERS[0], ROUND - 1), found(OTHERS[0], ROUND, number=3)
    assert list(letters(cast(old, new))) == [new]
    known = cast(new)
    assert kept(known, WATCHED, old) is known
    assert kept(known, WATCHED, new) is known


@pytest.mark.parametrize(
    "change",
    [
        {"charter": replace(WATCHED.charter, struck=(Struck(peer=ACCUSED.peer, round=Round(ROUND)),))},
        {"charter": BASE.charter},
        {"electorate": tuple(each.peer for each in OTHERS)},
        {"round": Round(ROUND + JUDGED_FOR + 1)},
    ],
)
def test_what_comes_to_nothing_is_neither_kept_nor_taken(change: dict[str, Any]) -> None:
    after = replace(WATCHED, **change)
    assert still(cast(found(OTHERS[0])), after) == {}
    with pytest.raises(Void):
        kept({}, after, found(OTHERS[0]))
    assert still(cast(found(OTHERS[0])), WATCHED) == cast(found(OTHERS[0]))
