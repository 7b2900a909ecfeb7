"""Text takes its share of a device and no more while training is at work, and all of it else."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise

import pytest
import torch

from weft.clock import SystemClock, VirtualClock
from weft.events import Event, Notice
from weft.rng import stream
from weft.tasks import Inline, Threads
from weft.texts.beside import share as share_of
from weft.texts.beside.share import (
    RESTS_S,
    WINDOW_S,
    Beside,
    Watched,
    filled,
    full,
    is_crowded,
    set_threads,
    taken,
    threads_beside,
    wait_s,
)

CPU = torch.device("cpu")
STEP_S = 0.05


class House:
    """Training and text on a virtual clock."""

    def __init__(self, share: float, piece_s: float = 0.3, step_s: float = STEP_S) -> None:
        self.clock = VirtualClock()
        self.watched = Watched(Inline(piece_s), self.clock)
        self.beside = Beside(share, self.watched, self.clock, CPU, (0, 0), lambda _event: None, Inline(step_s))
        self.steps: list[tuple[float, float]] = []

    def play(self, *parts: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            tasks = [asyncio.ensure_future(part()) for part in parts]
            await tasks[0]
            for task in tasks[1:]:
                task.cancel()

        self.clock.run(whole())

    async def train(self, num: int = 10**9, pause_s: float = 0.001) -> None:
        for _ in range(num):
            await self.watched.train(lambda: None)
            await asyncio.sleep(pause_s)

    async def draw(self) -> None:
        while True:
            await self.beside.turn()
            began = self.clock.now()
            await self.beside.run(lambda: None)
            self.steps.append((began, self.clock.now()))

    def drawn_s(self, since: float, until: float) -> float:
        return sum(ended - began for began, ended in self.steps if since <= began and ended <= until)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_beside_training_text_takes_its_share_and_steps_come_evenly(share: float) -> None:
    house = House(share)
    house.play(lambda: asyncio.sleep(200), house.train, house.draw)
    assert house.drawn_s(100, 200) / 100 == pytest.approx(share, rel=0.03)
    late = [ended for began, ended in house.steps if began > 100]
    assert max(b - a for a, b in pairwise(late)) < 1.5 * STEP_S / share
    for since in range(0, 150, 5):
        assert house.drawn_s(since, since + WINDOW_S) <= 2 * share * WINDOW_S + STEP_S


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_where_training_rests_or_text_may_have_all_nothing_waits(share: float) -> None:
    house = House(share)
    parts = [lambda: asyncio.sleep(60), house.draw, *([house.train] if share == 1.0 else [])]
    house.play(*parts)
    assert house.drawn_s(0, 60) == pytest.approx(60, abs=2 * STEP_S)


def test_training_that_waits_for_others_lends_its_time() -> None:
    house = House(0.3, piece_s=0.1)
    house.play(lambda: asyncio.sleep(100), lambda: house.train(pause_s=0.1), house.draw)
    assert 0.45 < house.drawn_s(50, 100) / 50 < 0.75  # half of it while training is at work: 0.3


def test_once_training_has_ended_text_goes_on_at_once_whatever_it_owes() -> None:
    house = House(0.02, piece_s=1.0)
    house.play(lambda: asyncio.sleep(40), lambda: house.train(20), house.draw)
    ended = 20 * 1.001
    assert house.drawn_s(0, ended) < 1.0
    first = min(began for began, _ in house.steps if began > ended)
    assert first - ended < RESTS_S + 2 * STEP_S
    assert house.drawn_s(first, 40) == pytest.approx(40 - first, abs=2 * STEP_S)


def test_what_is_owed_is_bounded_and_never_more_than_the_share_is_lent() -> None:
    draws = stream(3, "steps")
    bucket, now, spent_s = full(0.3, 0.0), 0.0, 0.0
    for _ in range(2000):
        now += wait_s(bucket, now) + float(draws.exponential(0.01))
        assert filled(bucket, now).level_s <= 3.0
        took_s = float(draws.exponential(0.1))
        now, spent_s = now + took_s, spent_s + took_s
        bucket = taken(bucket, took_s, now)
        assert bucket.level_s >= -3.0
        assert spent_s <= 0.3 * now + 3.0 + took_s
    assert wait_s(taken(bucket, 1000.0, now), now) == pytest.approx(WINDOW_S)


@pytest.mark.parametrize(
    ("num_cores", "usual", "wanted", "expected"),
    [
        (8, 8, 0, (7, 1)),
        (8, 4, 0, (4, 1)),  # two threads of a core count as one
        (2, 2, 0, (1, 1)),
        (1, 1, 0, (1, 1)),
        (8, 8, 5, (5, 3)),
        (8, 8, 8, (8, 1)),  # it is wanted so
    ],
)
def test_threads_of_both_are_as_many_as_cores(
    num_cores: int, usual: int, wanted: int, expected: tuple[int, int]
) -> None:
    assert threads_beside(num_cores, usual, wanted) == expected


def test_threads_that_wait_for_each_other_are_known_by_their_time() -> None:
    assert is_crowded(2.0, 1.0)
    assert not is_crowded(2.0, 1.5)
    assert not is_crowded(0.5, 0.1)  # too short to tell


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_thread_has_its_own_number_and_others_keep_theirs() -> None:
    found: dict[str, int] = {}

    async def play() -> None:
        clock, training = SystemClock(), Threads()
        watched = Watched(training, clock)
        await watched.train(lambda: set_threads(3))
        beside = Beside(0.3, watched, clock, CPU, (3, 2), lambda _event: None)
        await beside.start()
        x = torch.ones(64, 64)

        def num() -> int:
            (x @ x).sum()
            return torch.get_num_threads()

        found["steps"], found["made"] = await beside.run(num), await beside.made(num)
        found["training"], found["copies"] = await watched.train(num), await beside.copied(num)
        await beside.aclose()
        await training.aclose()

    asyncio.run(play())
    assert found == {"steps": 2, "made": 1, "training": 3, "copies": 3}


@pytest.mark.usefixtures("threads")
def test_crowded_steps_go_on_with_one_thread_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, events, set_to = VirtualClock(), list[Event](), list[int]()
    monkeypatch.setattr(share_of, "set_threads", set_to.append)
    beside = Beside(0.3, Watched(Inline(), clock), clock, CPU, (1, 3), events.append)

    async def play() -> None:
        await beside.start()
        for _ in range(5):
            await beside.run(lambda: clock.advance(0.4))  # and nothing is computed meanwhile

    clock.run(play())
    (event,) = events
    assert isinstance(event, Notice)
    assert event.text.endswith("with one thread from now on, in place of 3")
    assert set_to == [3, 1, 1, 1, 1, 1]  # of steps, of what is made, of others; and again
