"""Steps lent to a loop: it makes as many as are lent, and stands still between two loans."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from weft.library.learner import Lending

ENDS_S = 20.0  # only ends a test that would hang


def start(work: Callable[[], object]) -> "Future[object]":
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def never() -> bool:
    return False


class Loop:
    """A loop that makes steps as long as it may, and counts those it has begun."""

    def __init__(self, lending: Lending, ends_after: int = 1 << 30) -> None:
        self.num_begun = 0
        self.gate = threading.Semaphore(1 << 20)
        self._lending = lending
        self._ends_after = ends_after
        self.done = start(self._run)

    def _run(self) -> None:
        goes_on = self._lending.begin()
        while goes_on:
            self.num_begun += 1
            self.gate.acquire()
            if self.num_begun == self._ends_after:
                self._lending.leave()
                return
            goes_on = self._lending.made(self.num_begun)


def test_a_loop_makes_what_is_lent_and_waits() -> None:
    lending = Lending()
    loop = Loop(lending)
    assert [made.num_samples for made in lending.lend(3, never)] == [1, 2, 3]
    assert loop.num_begun == 3
    assert [made.num_samples for made in lending.lend(2, never)] == [4, 5]
    lending.end()
    assert loop.done.result(ENDS_S) is None
    assert loop.num_begun == 5


def test_what_is_taken_back_ends_with_the_step_under_way() -> None:
    lending, asked = Lending(), threading.Event()
    loop = Loop(lending)
    loop.gate = threading.Semaphore(2)  # the third step does not end yet

    def should_stop() -> bool:
        if loop.num_begun < 3:
            return False
        asked.set()
        return True

    lent = start(lambda: lending.lend(100, should_stop))
    assert asked.wait(ENDS_S)
    assert not lent.done()
    loop.gate.release(100)
    made = lent.result(ENDS_S)
    assert isinstance(made, list)
    assert len(made) == loop.num_begun == 3
    lending.end()
    loop.done.result(ENDS_S)


def test_a_loop_that_leaves_ends_the_loan_with_what_it_has_made() -> None:
    lending = Lending()
    loop = Loop(lending, ends_after=3)
    assert len(lending.lend(100, never)) == 2
    assert lending.has_left
    assert lending.lend(100, never) == []
    loop.done.result(ENDS_S)


def test_a_loop_that_is_lent_nothing_any_more_is_told() -> None:
    lending = Lending()
    lending.end()
    assert not lending.begin()
    assert not lending.made(4)
