"""How large a part each member owns."""

import msgspec

from model.world import first_base
from weft.ids import PeerId
from weft.sync.records.messages import MAX_UPLINK
from weft.sync.round.shares import uplinks

BASE = msgspec.structs.replace(first_base(4), uplinks=(MAX_UPLINK,) * 4)
A, B, C, D = BASE.electorate
E = PeerId("ee" * 32)
FAST = dict.fromkeys(BASE.electorate, 1e6)


def levels(rates: dict[PeerId, float], before: tuple[int, ...] = (16, 16, 16, 16)) -> tuple[int, ...]:
    return uplinks(msgspec.structs.replace(BASE, uplinks=before), BASE.electorate, frozenset(), rates)


def test_nothing_measured_changes_nothing() -> None:
    assert levels({}) == (16, 16, 16, 16)
    assert levels({}, (16, 8, 4, 0)) == (16, 8, 4, 0)


def test_who_sends_about_as_fast_owns_as_much() -> None:
    assert levels({A: 1e6, B: 0.6e6, C: 0.9e6, D: 1e6}) == (16, 16, 16, 16)


def test_who_sends_slower_owns_less_and_who_sends_ten_times_slower_nothing() -> None:
    assert levels({A: 1e6, B: 1e6, C: 0.2e6, D: 0.1e6}) == (16, 16, 4, 0)


def test_what_was_given_stays_while_leaders_measure_differently() -> None:
    assert levels({**FAST, C: 0.11e6, D: 0.3e6}, (16, 16, 0, 16)) == (16, 16, 0, 16)
    assert levels({**FAST, C: 0.2e6, D: 0.6e6}, (16, 16, 8, 8)) == (16, 16, 8, 8)


def test_a_line_that_has_become_another_is_noticed() -> None:
    assert levels(FAST, (16, 16, 0, 4)) == (16, 16, 16, 16)
    assert levels({**FAST, D: 0.05e6}) == (16, 16, 16, 0)


def test_a_newcomer_owns_nothing_in_its_first_round_and_then_what_it_sends() -> None:
    joined = uplinks(BASE, (*BASE.electorate, E), frozenset({E}), {**FAST, E: 1e6})
    assert joined == (16, 16, 16, 16, 0)
    base = msgspec.structs.replace(BASE, electorate=(*BASE.electorate, E), newcomers=(E,), uplinks=joined)
    assert uplinks(base, base.electorate, frozenset(), {}) == (16, 16, 16, 16, 16)
    assert uplinks(base, base.electorate, frozenset(), {**FAST, E: 0.2e6}) == (16, 16, 16, 16, 4)
