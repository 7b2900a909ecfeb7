"""The game of audits finds who cheats, harms nobody else, and would show it if it did."""

from collections.abc import Iterator

import pytest
from benchmarks.rig.audit_game import Game, Outcomes, Seen, Way

from weft.peer.audit import looking
from weft.peer.round import verdicts
from weft.sim.memo import shared
from weft.sync.records import quarantine

NUM, ROUNDS, SEEDS = 8, 30, range(4)


@pytest.fixture(autouse=True)
def found_once() -> Iterator[None]:
    with shared():
        yield


def play(way: Way, *, rate: float = 0.3, num_rounds: int = ROUNDS) -> list[Outcomes]:
    return [Game(way, seed, rate=rate, num=NUM, links=10).play(num_rounds) for seed in SEEDS]


def seen(outcomes: list[Outcomes]) -> list[Seen]:
    return [each for one in outcomes for each in one.cheats]


def num_honest_out(outcomes: list[Outcomes]) -> int:
    return sum(each.num_honest_out for each in outcomes)


@pytest.mark.parametrize(
    "way",
    [Way(num=1), Way(num=3, looks="at no friend", accuses=True), Way(num=1, idles=0.5), Way(num=2, comes=3, after=3)],
)
def test_who_makes_no_steps_is_out_before_long_and_nobody_else(way: Way) -> None:
    found = play(way)
    assert all(each.out_after is not None for each in seen(found))
    taken = [each.before - round(ROUNDS * each.false_share) for each in seen(found)]
    assert all(0 <= num <= each.before for num, each in zip(taken, seen(found), strict=True))
    assert sum(taken) > len(taken) / 2, "what somebody is struck out for is taken out again"
    assert num_honest_out(found) == 0


def test_where_nobody_is_drawn_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "drawn", lambda *_: None)
    found = play(Way(num=1))
    assert [(each.out_after, each.before, each.share) for each in seen(found)] == len(SEEDS) * [(None, ROUNDS, 1.0)]
    assert sum(each.num_audits for each in found) == 0


def test_a_higher_rate_has_them_out_sooner() -> None:
    slow, fast = ([each.before for each in seen(play(Way(num=1), rate=rate))] for rate in (0.05, 1.0))
    assert sum(fast) < sum(slow)


def test_at_exactly_half_neither_side_strikes_out_the_other() -> None:
    found = play(Way(num=NUM // 2, looks="at no friend", accuses=True))
    assert {each.out_after for each in seen(found)} == {None}
    assert num_honest_out(found) == 0


def test_above_half_the_others_are_struck_out() -> None:
    found = play(Way(num=NUM // 2 + 1, looks="at no friend", accuses=True))
    assert {each.out_after for each in seen(found)} == {None}
    assert num_honest_out(found) > 0


def test_who_accuses_all_harms_nobody_unless_one_voice_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(num=2, idles=0.0, accuses=True)
    assert num_honest_out(play(way)) == 0
    monkeypatch.setattr("weft.sync.governance.is_majority", lambda num, _: num > 0)
    assert num_honest_out(play(way)) > 0


def test_of_a_newcomer_that_makes_no_steps_nothing_counts_unless_works_clear_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = Way(num=1, comes=3)
    assert {each.before for each in seen(play(way))} == {0}
    monkeypatch.setattr(quarantine, "may_count", lambda *_: True)
    monkeypatch.setattr(quarantine, "is_kept", lambda *_: True)
    assert {each.before for each in seen(play(way))} != {0}


def test_who_shows_nothing_is_removed_with_the_third_round_and_comes_again() -> None:
    found = seen(play(Way(num=1, after=3, is_silent=True, again=True), rate=1.0, num_rounds=50))
    assert all(each.out_after is not None and each.num_keys == 1 for each in found), "it is not banned"
    assert all(each.before >= 3 for each in found)


def test_who_is_struck_out_comes_again_with_a_new_key_and_in_quarantine() -> None:
    found = seen(play(Way(num=1, comes=3, after=3, again=True), rate=1.0, num_rounds=50))
    assert all(each.num_keys > 2 for each in found)
    assert all(each.false_share < each.share - each.false_share for each in found), "three honest works cost more"


def test_a_verdict_that_waits_no_longer_strikes_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "warrants", lambda *_: [])
    assert {each.out_after for each in seen(play(Way(num=1)))} == {None}
