"""What a member of a stage remembers of the past; what it counts, the search of `tests/model` goes through."""

from weft.ids import PeerId
from weft.pipeline.exactly_once import MAX_PAST, NONE, Attempt, BatchId, ExactlyOnce, Told

A, B = PeerId("aa" * 32), PeerId("bb" * 32)


def test_what_is_long_past_is_forgotten_and_the_rest_never_counted_again() -> None:
    exactly_once = ExactlyOnce()
    for number in range(0, 3 * MAX_PAST, MAX_PAST // 4):
        counted = frozenset(BatchId(A, number + each) for each in range(MAX_PAST // 4)) | {BatchId(B, 7)}
        exactly_once = exactly_once.report().committed(B, {A: Told(counted, NONE)}, [A]).exactly_once
    assert {batch.number for batch in exactly_once.past if batch.origin == A} == set(range(2 * MAX_PAST, 3 * MAX_PAST))
    assert BatchId(B, 7) in exactly_once.past  # another origin's numbers are others
    again = Attempt(BatchId(A, 3 * MAX_PAST - 1), 0)
    assert exactly_once.computed(again).accepted(again).counted == NONE
