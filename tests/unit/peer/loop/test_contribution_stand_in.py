"""In whose place somebody trains that was not drawn."""

import msgspec

from model.world import first_base
from weft.peer.loop.contribution import in_place_of

A, B, C, D = first_base(4).electorate
BASE = msgspec.structs.replace(first_base(4), resting=(A, C))  # B and D were drawn


def test_nobody_trains_for_another_while_one_that_was_drawn_is_there() -> None:
    assert [in_place_of(BASE, peer, (A, B, C)) for peer in (A, B, C, D)] == [None] * 4
    assert in_place_of(first_base(4), A, (A,)) is None


def test_where_all_that_were_drawn_are_away_each_lease_is_taken_by_one() -> None:
    assert [in_place_of(BASE, peer, (A, C)) for peer in (A, C)] == [B, D]
    assert in_place_of(BASE, C, (C,)) == B  # the first that rests is away, too
    one = msgspec.structs.replace(BASE, resting=(A, C, D))
    assert [in_place_of(one, peer, (A, C, D)) for peer in (A, C, D)] == [B, None, None]


def test_who_was_drawn_itself_or_is_no_member_stands_in_for_nobody() -> None:
    assert in_place_of(BASE, B, ()) is None
    assert in_place_of(BASE, "e" * 64, ()) is None  # type: ignore[arg-type]
