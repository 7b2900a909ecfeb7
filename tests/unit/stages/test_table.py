"""The table of who holds which stage."""

import msgspec
from msgspec import UNSET

from weft.ids import PeerId
from weft.stages.messages import Held, Shelved, StageNews
from weft.stages.table import UNKNOWN, StageTable

A, B, C, D = (PeerId(letter * 64) for letter in "abcd")


def held(stage: int, rate: float = 0.0, state: str = "ready", untrusted: tuple[PeerId, ...] = ()) -> Held:
    named = untrusted or UNSET
    return Held(stage=stage, since=1, state=state, round=3, rate=rate, num_waiting=0, untrusted=named)


def news(*stages: Held, kept: tuple[Shelved, ...] = ()) -> StageNews:
    return StageNews(held=stages, kept=kept, is_trainer=True)


def test_rates_that_nobody_has_measured_are_the_median_of_the_others():
    table = StageTable(3)
    assert table.rates() == [{}, {}, {}]
    table.told(A, news(held(0)))
    assert table.rates() == [{A: UNKNOWN}, {}, {}]
    table.told(B, news(held(0, rate=4.0)))
    table.told(C, news(held(1, rate=8.0)))
    assert table.rates() == [{A: 6.0, B: 4.0}, {C: 8.0}, {}]


def test_who_holds_two_stages_shares_its_rate_among_them():
    table = StageTable(2)
    table.told(A, news(held(0, rate=6.0), held(1, rate=6.0)))
    assert table.rates() == [{A: 3.0}, {A: 3.0}]


def test_who_is_on_its_way_computes_nothing_yet_and_its_stage_is_not_empty():
    table = StageTable(2)
    table.told(A, news(held(1, state="joining")))
    assert table.ready(1) == {}
    assert table.empty() == [0]


def test_who_is_gone_is_in_no_stage():
    table = StageTable(1)
    table.told(A, news(held(0)))
    table.gone(A)
    assert table.empty() == [0]


def test_who_has_a_stages_state_on_its_disk_is_known_with_its_round():
    table = StageTable(2)
    table.told(A, news(kept=(Shelved(stage=1, round=7),)))
    table.told(B, news(held(0), kept=(Shelved(stage=1, round=9), Shelved(stage=0, round=2))))
    assert table.kept(1) == {A: 7, B: 9}


def test_rates_are_of_work_that_is_usual():
    table = StageTable(2, costs=[0.5, 1.5])
    table.told(A, news(held(0, rate=8.0)))
    table.told(B, news(held(1, rate=2.0)))
    assert table.rates() == [{A: 4.0}, {B: 3.0}]


def trusted(**named: tuple[PeerId, ...]) -> set[str]:
    """Return whom work of a stage may be sent to, of the peers of these letters, each of which names some untrusted."""
    table = StageTable(1)
    for letter, untrusted in named.items():
        table.told(PeerId(letter * 64), news(held(0, untrusted=untrusted)))
    return {peer[0] for peer in table.trusted(0)}


def test_whom_most_of_a_stage_have_found_false_or_banned_is_sent_nothing_member_or_not():
    assert trusted(a=(D,), b=(D,), c=(D,), d=()) == {"a", "b", "c"}
    assert trusted(a=(D,), b=(D,), c=(), d=(A, B, C)) == {"a", "b", "c"}, "two of three others"
    assert trusted(a=(D,), b=(), c=(), d=()) == {"a", "b", "c", "d"}
    assert trusted(a=(D,), b=(D,), d=(A, B)) == {"a", "b"}, "its own word counts as one"
    assert trusted(a=(D,), d=(A,)) == {"a", "d"}, "of two neither is believed"
    assert trusted(a=(A, C), b=(A, C), c=(A, C)) == {"b"}, "nobody speaks of itself"


def test_where_nobody_would_be_left_all_are_sent_work():
    assert trusted(a=(B, C), b=(A, C), c=(A, B)) == {"a", "b", "c"}


def test_news_of_who_finds_nobody_false_have_the_bytes_that_they_had():
    assert "untrusted" not in msgspec.to_builtins(held(0))
