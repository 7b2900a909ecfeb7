"""When a step of all stages is over, from what members of the first stage tell."""

from weft.ids import PeerId
from weft.pipeline.device import Step
from weft.stages.step.barrier import Progress, Steps

A, B = PeerId("a"), PeerId("b")
BOTH = frozenset((A, B))
SEVENTH = Step(7, 0)


def steps(*here: PeerId) -> Steps:
    return Steps(lambda peer: peer in here)


def test_a_step_is_over_once_all_who_begin_have_all_back():
    heard = steps(A, B)
    heard.told(A, Progress(SEVENTH, True, BOTH))
    assert not heard.is_over(SEVENTH), "the other has not even begun"
    heard.told(B, Progress(SEVENTH, False, BOTH))
    assert not heard.is_over(SEVENTH)
    heard.told(B, Progress(SEVENTH, True, BOTH))
    assert heard.is_over(SEVENTH)


def test_nobody_waits_for_who_is_gone():
    heard = steps(A)
    heard.told(B, Progress(SEVENTH, False, BOTH))
    heard.told(A, Progress(SEVENTH, True, BOTH))
    assert heard.is_over(SEVENTH)


def test_a_step_is_over_where_somebody_is_further():
    heard = steps(A, B)
    heard.told(B, Progress(SEVENTH, False, BOTH))
    heard.told(A, Progress(Step(8, 0), False, frozenset((A,))))
    assert heard.is_over(SEVENTH)
    assert not heard.is_over(Step(8, 0))


def test_of_a_step_that_nobody_has_told_of_it_is_not_known():
    heard = steps(A)
    assert not heard.is_over(SEVENTH)
    heard.told(A, Progress(Step(6, 3), True, frozenset((A,))))
    assert not heard.is_over(SEVENTH)
    assert heard.newest == Step(6, 3)


def test_who_begins_nothing_is_waited_for_by_nobody():
    heard = steps(A, B)
    heard.told(A, Progress(SEVENTH, True, frozenset((A,))))
    assert heard.is_over(SEVENTH)
    assert heard.num_origins == 1
