"""Who is new, odd or silent is looked at more often, for a while, and nobody else."""

from weft.ids import PeerId
from weft.verify.suspicion import LASTS, NEW, TIMES, Suspicion

A, B, C = (PeerId(each * 64) for each in "abc")


def settled() -> Suspicion:
    """Return one that was there when none of three was new any more."""
    suspicion = Suspicion()
    suspicion.decided(NEW + 1, (A, B, C), (A, B, C))
    return suspicion


def test_at_the_begin_of_a_run_all_are_new_until_enough_of_their_work_was_counted() -> None:
    suspicion = Suspicion()
    for round in range(1, NEW + 1):
        suspicion.decided(round, (A, B), (A,) if round % 2 else (A, B))
        assert suspicion.times(A) == (TIMES if round < NEW else 1.0)
        assert suspicion.times(B) == TIMES, "half of its works are missing"


def test_who_was_there_before_this_process_is_not_new_and_who_comes_later_is() -> None:
    suspicion = settled()
    assert suspicion.times(A) == 1.0
    other = PeerId("d" * 64)
    suspicion.decided(NEW + 2, (A, B, C, other), (A,))
    assert (suspicion.times(other), suspicion.times(A)) == (TIMES, 1.0)
    for round in range(NEW):
        suspicion.decided(NEW + 3 + round, (A, B, C, other), (other,))
    assert suspicion.times(other) == 1.0


def test_who_leaves_and_comes_again_is_new_again() -> None:
    suspicion = settled()
    suspicion.decided(NEW + 2, (A, B), (A, B))
    suspicion.decided(NEW + 3, (A, B, C), (A, B, C))
    assert suspicion.times(C) == TIMES


def test_who_strays_in_one_thing_is_looked_at_until_it_is_back_in_all() -> None:
    suspicion = settled()
    suspicion.strays(A, "loss", False)
    suspicion.strays(A, "update", False)
    assert (suspicion.times(A), suspicion.times(B)) == (TIMES, 1.0)
    suspicion.strays(A, "loss", True)
    assert suspicion.times(A) == TIMES
    suspicion.strays(A, "update", True)
    assert suspicion.times(A) == 1.0


def test_who_did_not_answer_is_looked_at_for_some_rounds() -> None:
    suspicion, at = settled(), NEW + 1
    suspicion.unanswered(B, at)
    suspicion.unanswered(B, at - 5)  # of an older round, found later
    suspicion.decided(at + LASTS - 1, (A, B, C), ())
    assert suspicion.times(B) == TIMES
    suspicion.decided(at + LASTS, (A, B, C), ())
    assert suspicion.times(B) == 1.0
