"""Whom a text has come by, as programs are told."""

import pytest

from unit.texts.asking.test_path import peer
from weft.texts.asking.course import MAX_MENDS, Course


def test_a_course_tells_whom_a_text_has_come_by_and_how_long_nothing_came() -> None:
    course = Course()
    first, second, third = (peer(0), peer(1)), (peer(0), peer(2)), (peer(3), peer(4))
    course.stopped("declined", 0.5)  # nobody had begun
    assert course.tree() == {"members": [], "rounds": [], "mends": [], "num_mends": 0}
    assert course.runs(first, 7, 0)
    assert not course.runs(first, 7, 0)  # the same ones, again
    course.stopped("parted", 1.0)
    assert course.runs(second, 7, 0)
    course.came(3.0)
    course.came(3.5)
    course.stopped("silent", 4.0)
    course.stopped("declined", 4.2)  # of the next that was asked
    course.came(4.3)  # which was under way
    assert course.runs(third, 8, 3)
    assert [each.pause_s for each in course.mends] == [2.0, None, None]
    course.came(5.0)
    course.stopped("unread", 6.0)
    assert course.runs(first, 8, 4)
    course.came(60.0)
    mends = [(each.stage, each.before, each.member, each.num_drawn, each.why) for each in course.mends]
    assert mends == [
        (1, peer(1), peer(2), 0, "parted"),
        (0, peer(0), peer(3), 3, "silent"),
        (1, peer(2), peer(4), 3, "silent"),
        (0, peer(3), peer(0), 4, "unread"),
        (1, peer(4), peer(1), 4, "unread"),
    ]
    pauses = [each["pause_s"] for each in course.tree()["mends"]]
    assert pauses == [2.0, pytest.approx(0.7), pytest.approx(0.7), None, None]
    assert course.rounds == [(7, 0), (8, 3)]


def test_of_many_mends_the_last_are_told_and_all_are_counted() -> None:
    course = Course()
    for number in range(MAX_MENDS + 10):
        course.stopped("parted", number)
        course.runs((peer(number % 2),), number, number)
    told = course.tree()
    assert (len(told["mends"]), len(told["rounds"]), told["num_mends"]) == (MAX_MENDS, MAX_MENDS, MAX_MENDS + 9)
    assert told["mends"][-1]["after_tokens"] == MAX_MENDS + 9
