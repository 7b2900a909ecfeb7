import math

from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.net.membership.broadcasts import LAMBDA, MAX_BROADCASTS, STALE_S, Log, add, leave, meet, pending, prune, take

A, B, C = (PeerId(letter * 64) for letter in "abc")


def test_a_rumour_goes_once_to_each_and_never_back():
    log = add(Log(), ("life", "x"), "x lives", A, 0.0)
    assert not pending(log, A)
    assert pending(log, B)
    log, news = take(log, B, 8, 10)
    assert news == ("x lives",)
    assert not pending(log, B)
    assert take(log, B, 8, 10)[1] == ()
    assert take(log, A, 8, 10)[1] == ()
    assert take(log, C, 8, 10)[1] == ("x lives",)


def test_a_newer_rumour_takes_the_place_of_the_older():
    log = add(Log(), ("life", "x"), "x lives", None, 0.0)
    log, _ = take(log, B, 8, 10)
    log = add(log, ("life", "x"), "x lives again", None, 1.0)
    assert take(log, B, 8, 10)[1] == ("x lives again",)
    assert take(log, C, 8, 10)[1] == ("x lives again",)


def test_what_does_not_fit_comes_next_oldest_first():
    log = Log()
    for number in range(5):
        log = add(log, ("life", str(number)), number, None, 0.0)
    log, first = take(log, A, 2, 10)
    log, second = take(log, A, 2, 10)
    log, third = take(log, A, 2, 10)
    assert (first, second, third) == ((0, 1), (2, 3), (4,))
    assert not pending(log, A)


@given(st.integers(1, 3000))
def test_a_rumour_is_told_a_logarithm_of_times(num_peers):
    log = add(Log(), ("life", "x"), "x lives", None, 0.0)
    num_told = 0
    for number in range(100):
        log, news = take(log, PeerId(f"{number:064x}"), 8, num_peers)
        num_told += len(news)
    assert num_told == min(100, LAMBDA * math.ceil(math.log2(num_peers + 1)))
    assert log.items == {}


def test_the_log_is_bounded_and_forgets_what_is_old():
    log = Log()
    for number in range(MAX_BROADCASTS + 3):
        log = add(log, ("life", str(number)), number, None, float(number > 5))
    assert len(log.items) == MAX_BROADCASTS
    assert next(iter(log.items)) == ("life", "3")
    assert len(prune(log, STALE_S).items) == MAX_BROADCASTS - 3
    assert prune(log, 1.0) is log


def test_who_is_met_anew_is_not_told_what_comparing_will_show():
    log = add(Log(), ("life", "x"), "x lives", None, 0.0)
    log = meet(log, A)
    assert not pending(log, A)
    log = add(log, ("life", "y"), "y lives", None, 0.0)
    assert take(log, A, 8, 10)[1] == ("y lives",)
    assert pending(leave(log, A), A)
