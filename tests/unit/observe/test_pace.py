"""What a peer measures of its rounds: what lies between them does not count, and few of them tell nothing."""

from typing import Any

import msgspec
import pytest

from commits import committed
from weft import events
from weft.ids import BranchId, PeerId, Round
from weft.observe.pace import KEPT, SLEPT_S, PaceAnswer, RoundPace, Rounds, together

ANNA, BERT, CARL = (PeerId(letter * 64) for letter in "abc")
NOTHING = PaceAnswer(num_rounds=0, num_members=0, round_s=0.0, round_nbytes=0)


class Log:
    """What one peer's log hands to its measure, at a time that a test sets."""

    def __init__(self) -> None:
        self.at = 0.0
        self.pace = RoundPace(self)  # type: ignore[arg-type]

    def now(self) -> float:
        return self.at

    def tell(self, event: events.Event) -> None:
        self.pace.write(events.Entry(v=1, at=0.0, peer=ANNA, event=event))

    def commit(self, after_s: float, nbytes: int = 1000, *others: PeerId, **change: Any) -> None:
        self.at += after_s
        half = nbytes // 2
        commit = committed(contributors=(ANNA, *others), sent_nbytes=half, received_nbytes=half)
        self.tell(msgspec.structs.replace(commit, **change))

    @property
    def answer(self) -> PaceAnswer:
        return self.pace.answer()


def test_a_round_takes_from_one_commit_to_the_next_and_moves_what_was_moved_meanwhile() -> None:
    log = Log()
    log.commit(100.0, 1_000_000, BERT)  # the state came with it
    assert log.answer == NOTHING
    for seconds, nbytes in ((1.0, 1000), (1.0, 1000), (4.0, 4000)):
        log.commit(seconds, nbytes, BERT)
    assert log.answer == PaceAnswer(num_rounds=3, num_members=2, round_s=2.0, round_nbytes=2000)


def test_only_rounds_of_as_many_members_are_told_together() -> None:
    """Whoever was not counted is a member all the same."""
    log = Log()
    for _ in range(5):
        log.commit(0.05, 0)
    assert (log.answer.num_members, log.answer.round_s) == (1, pytest.approx(0.05))
    for _ in range(3):
        log.commit(1.0, 1000, BERT)
    log.commit(1.0, 1000, left_out={BERT: "late"})
    assert log.answer == PaceAnswer(num_rounds=3, num_members=2, round_s=1.0, round_nbytes=1000)


@pytest.mark.parametrize(
    "event",
    [
        events.Paused(reason="night"),
        events.Resumed(reason="night", paused_s=3600.0),
        events.LoopStalled(stall_s=SLEPT_S),
        events.BranchOpened(branch=BranchId("b" * 64), round=Round(1), members=(ANNA,), reason="alone"),
        events.StageLeft(stage=0, reason="moves"),
    ],
)
def test_a_night_is_no_round(event: events.Event) -> None:
    log = Log()
    for _ in range(5):
        log.commit(1.0, 1000, BERT)
    log.tell(event)
    log.at += 36_000
    for _ in range(5):
        log.commit(1.0, 1000, BERT)
    assert (log.answer.num_rounds, log.answer.round_s) == (4, 1.0)


def test_a_busy_moment_is_part_of_a_round() -> None:
    log = Log()
    log.commit(1.0, 1000, BERT)
    log.tell(events.LoopStalled(stall_s=2.0))
    log.commit(3.0, 1000, BERT)
    assert (log.answer.num_rounds, log.answer.round_s) == (1, 3.0)


def test_of_several_stages_the_first_is_followed_and_all_bytes_count() -> None:
    log = Log()
    for _ in range(4):
        log.commit(0.5, 300, stage=2)
        log.commit(0.5, 700, stage=1)
    assert log.answer == PaceAnswer(num_rounds=3, num_members=1, round_s=1.0, round_nbytes=1000)


def test_a_state_for_a_newcomer_is_no_rounds_traffic() -> None:
    """What some rounds have more of is: an evaluation, a mean over all."""
    log = Log()
    for nbytes in (0, 1000, 1000, 5_000_000, 3000, 1000, 1000):
        log.commit(1.0, nbytes, BERT)
    assert log.answer.round_nbytes == (4 * 1000 + 3000) // 5


def test_the_last_rounds_count() -> None:
    log = Log()
    for number in range(3 * KEPT):
        log.commit(10.0 if number < KEPT else 1.0, 1000, BERT)
    assert (log.answer.num_rounds, log.answer.round_s) == (KEPT - 1, 1.0)


def of(num_members: int, round_s: float, round_nbytes: int = 1000, num_rounds: int = 9) -> PaceAnswer:
    return PaceAnswer(num_rounds=num_rounds, num_members=num_members, round_s=round_s, round_nbytes=round_nbytes)


def test_members_figures_are_their_median_so_one_that_lies_changes_little() -> None:
    found = together([of(3, 2.0, 900), of(3, 2.2, 1000), of(3, 1e9, 1 << 50)])
    assert found == Rounds(num_told=3, num_members=3, round_s=2.2, round_nbytes=1000)


def test_who_exchanges_tells_more_than_who_is_alone() -> None:
    found = together([of(1, 0.05, 0), of(2, 2.0)])
    assert found == Rounds(num_told=1, num_members=2, round_s=2.0, round_nbytes=1000)
    assert together([of(1, 0.05, 0)]) == Rounds(num_told=1, num_members=1, round_s=0.05, round_nbytes=0)


def test_two_rounds_tell_nothing_unless_they_took_long() -> None:
    assert together([of(2, 0.1, num_rounds=2), NOTHING, of(2, float("nan"))]) is None
    assert together([of(2, 600.0, num_rounds=1)]) is not None
