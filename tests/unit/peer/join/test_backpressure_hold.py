"""Whom a peer's rounds wait for, and for how long at most."""

import pytest

from weft.ids import PeerId
from weft.net.blobs.bulk import SHARE
from weft.peer.join.backpressure import DAY_S, LEAST_REST_S, REST, SILENT_S, TRIAL_S, Ended, HoldRule

A, B = PeerId("a" * 64), PeerId("b" * 64)
LONGEST_S = 600.0


def asking(blocks: HoldRule, peer: PeerId, begin: float, end: float, needs_s: float = 0.1) -> str:
    """Ask every two seconds; return the last answer."""
    now, reason = begin, ""
    while now <= end and not reason:
        reason = blocks.ask(peer, needs_s, now)
        now += 2.0
    return reason


def test_rounds_wait_for_who_asks_until_it_is_in() -> None:
    blocks = HoldRule(LONGEST_S)
    assert blocks.by(0.0) is None
    assert asking(blocks, A, 0.0, 30.0) == ""
    assert blocks.by(31.0) == A
    blocks.end(A, "it is in", 31.0)
    assert blocks.by(31.0) is None
    assert blocks.take_ended(31.0) == [Ended(A, 31.0, "it is in")]
    assert blocks.take_ended(31.0) == []


def test_another_is_told_to_come_later_and_cannot_end_what_is_not_its_own() -> None:
    blocks = HoldRule(LONGEST_S)
    blocks.ask(A, 10.0, 0.0)
    assert "another newcomer" in blocks.ask(B, 10.0, 1.0)
    blocks.end(B, "it is in", 2.0)
    assert blocks.by(2.0) == A


def test_who_falls_silent_is_waited_for_no_more() -> None:
    blocks = HoldRule(LONGEST_S)
    blocks.ask(A, 10.0, 0.0)
    assert blocks.by(SILENT_S - 0.1) == A
    assert blocks.by(SILENT_S) is None
    assert blocks.take_ended(100.0) == [Ended(A, SILENT_S, "it fell silent")]


def test_nobody_is_waited_for_longer_than_is_allowed_however_often_it_asks() -> None:
    blocks = HoldRule(LONGEST_S)
    asking(blocks, A, 0.0, LONGEST_S - 1)
    assert blocks.by(LONGEST_S - 0.1) == A
    assert blocks.by(LONGEST_S) is None
    (ended,) = blocks.take_ended(LONGEST_S + 1)
    assert ended.lasted_s == LONGEST_S
    assert ended.reason == "600 s are over, and it has not caught up"


@pytest.mark.parametrize("lasted_s", [0.0, 1.0, 100.0, LONGEST_S])
def test_after_a_block_there_is_none_for_nine_times_as_long_whoever_asks(lasted_s: float) -> None:
    blocks = HoldRule(LONGEST_S)
    asking(blocks, A, 0.0, lasted_s)
    blocks.end(A, "it is in", lasted_s)
    rest_s = max(REST * lasted_s, LEAST_REST_S)
    assert "at the earliest" in blocks.ask(B, 10.0, lasted_s + rest_s - 1)
    assert blocks.ask(B, 10.0, lasted_s + rest_s) == ""


def test_strangers_that_take_turns_take_a_tenth_of_the_time() -> None:
    blocks, now, waited_s, whole_s = HoldRule(LONGEST_S), 0.0, 0, 12 * 10 * LONGEST_S
    while now < whole_s:
        blocks.ask(PeerId(f"{int(now):064x}"), 1.0, now)
        waiting = blocks.by(now)
        for _ in range(2):
            now += 5.0
            if waiting is not None:
                blocks.ask(waiting, 1.0, now)
                waited_s += 5 if blocks.by(now) == waiting else 0
    assert 0.05 * whole_s < waited_s <= 0.101 * whole_s


def test_a_key_is_waited_for_once_a_day() -> None:
    blocks = HoldRule(10.0)
    blocks.ask(A, 10.0, 0.0)
    blocks.end(A, "it is gone", 2.0)
    assert "in the last day" in blocks.ask(A, 10.0, DAY_S - 1)
    assert blocks.ask(A, 10.0, DAY_S + 1) == ""


def test_who_would_need_far_longer_than_is_allowed_is_declined() -> None:
    """Not who needs a little longer: beside rounds it is sent a quarter of what it is sent without."""
    blocks = HoldRule(LONGEST_S)
    assert "at most 600 s" in blocks.ask(A, SHARE * LONGEST_S + 1, 0.0)
    assert blocks.ask(A, SHARE * LONGEST_S, 0.0) == ""


def test_who_cannot_be_in_in_time_is_given_up_once_its_line_is_known() -> None:
    blocks = HoldRule(LONGEST_S)
    assert asking(blocks, A, 0.0, TRIAL_S - 2, needs_s=LONGEST_S + 100) == ""
    assert "at most 540 s more" in blocks.ask(A, LONGEST_S + 100, TRIAL_S)
    assert blocks.by(TRIAL_S) is None
    assert blocks.take_ended(TRIAL_S)[0].lasted_s == TRIAL_S


def test_a_machine_may_wait_for_nobody() -> None:
    assert "waits for nobody" in HoldRule(0.0).ask(A, 1.0, 0.0)
