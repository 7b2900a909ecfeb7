"""A member knows how fast it is before anybody asks it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from unit.texts.stages import STEP_S, Served
from unit.texts.test_stages import PROMPT, of_the_whole, tokens_of, wanted
from weft.clock import VirtualClock
from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.pages import PagePool
from weft.texts import trial
from weft.texts.section import Section


def test_who_has_computed_nothing_yet_tells_how_long_its_steps_are() -> None:
    served = Served()

    async def play() -> None:
        for member in served.members:
            told = member.served()
            assert told.step_s + told.row_s == pytest.approx(STEP_S)
            assert (told.num_rows, told.num_waiting, member.num_held) == (0, 0, 0)
        known = served.entry.paths._served
        assert len(known) == 6
        assert all(news.served.step_s > 0 for news in known.values()), "nobody was told of it before"

    served.run(play)


@pytest.mark.parametrize("num_pages", [1, trial.ROWS - 1])
def test_who_has_no_pages_for_it_serves_all_the_same(num_pages: int) -> None:
    served, asked = Served((1, 1), num_pages=num_pages), wanted(PROMPT[:20], 3)
    (expected,) = of_the_whole(asked)

    async def play() -> None:
        assert served.members[0].served().num_free == num_pages
        assert await tokens_of(served.entry.begin(asked)) == expected

    served.run(play)


def test_a_section_that_cannot_compute_is_asked_and_says_so_then(monkeypatch: pytest.MonkeyPatch) -> None:
    served, asked = Served((1, 2)), wanted(PROMPT, 3)
    (expected,) = of_the_whole(asked)
    compute = Section.compute

    def fails(self: Section, works):  # type: ignore[no-untyped-def]
        if self is served.members[1]._section:
            raise RuntimeError("a broken device")
        return compute(self, works)

    monkeypatch.setattr(Section, "compute", fails)

    async def play() -> None:
        assert served.members[1].served().step_s == 0.0
        assert await tokens_of(served.entry.begin(asked)) == expected

    served.run(play)


class Slow:
    """A section whose steps last as long as they are told to, in the order in which it is asked.

    Args:
        num_graphs: that were made after each step.
    """

    def __init__(self, clock: VirtualClock, lasts_s: Sequence[float], num_graphs: Sequence[int] = ()) -> None:
        self.clock, self.lasts_s, self.num_graphs = clock, list(lasts_s), 0
        self._graphs, self.asked = list(num_graphs), list[tuple[int, ...]]()

    async def run(self, work: Callable[[], None]) -> None:
        work()
        await asyncio.sleep(self.lasts_s.pop(0))

    def try_out(self, sizes: tuple[int, ...], pages: Sequence[int]) -> None:
        assert len(set(pages)) == len(pages) >= len(sizes)
        self.asked.append(sizes)
        self.num_graphs = self._graphs.pop(0) if self._graphs else self.num_graphs


def measured(
    lasts_s: Sequence[float], turn: Callable[[], Awaitable[None]] | None = None, num_graphs: Sequence[int] = ()
) -> tuple[Slow, Pace, PagePool]:
    clock, pace, pool = VirtualClock(), Pace(), PagePool(16)
    section: Any = Slow(clock, lasts_s, num_graphs)
    clock.run(trial.measure(section, pool, pace, clock, section.run, turn))
    assert pool.num_room == 16
    return section, pace, pool


def test_what_the_first_step_of_a_size_sets_up_is_not_counted() -> None:
    """A row takes 4 ms, eight 11 ms, and 64 tokens that are read beside one 20 ms."""
    lasts_s = [1.0, 0.004, 0.004, 1.0, 0.011, 0.011, 1.0, 0.02, 0.02]
    section, pace, _ = measured(lasts_s)
    assert section.asked == [sizes for sizes in trial.SIZES for _ in range(trial.TIMES)]
    assert pace.step_s(1, 0) == pytest.approx(0.004)
    assert pace.step_s(8, 0) == pytest.approx(0.011)
    assert pace.step_s(1, 0) + pace.read_s(0, 64) == pytest.approx(0.02)


def test_a_step_that_makes_a_graph_is_not_counted() -> None:
    lasts_s = [0.5, 2.0, 0.004, 0.5, 0.011, 0.011, 0.5, 0.02, 0.02]
    _, pace, _ = measured(lasts_s, num_graphs=[0, 1])
    assert pace.step_s(1, 0) == pytest.approx(0.004)


def test_what_a_step_waits_for_is_a_part_of_it_as_for_texts() -> None:
    async def turn() -> None:
        await asyncio.sleep(0.1)

    _, pace, _ = measured([0.01] * 9, turn)
    assert pace.step_s(1, 0) == pytest.approx(0.11)


def test_long_steps_end_it_once_something_is_known() -> None:
    section, pace, _ = measured([2.0] * 9)
    assert section.asked == [(1,)] * 3
    assert pace.step_s(1, 0) == pytest.approx(2.0)


def test_nobody_is_told_of_a_member_before_its_steps_are_measured() -> None:
    """Not by weights that it takes meanwhile, either."""
    served = Served((1, 1))

    async def play() -> None:
        member = await served.come(0)
        member.renew(1, member._section)
        await asyncio.sleep(STEP_S)
        assert member.served().rounds == ()
        assert (0, served.peer(member)) not in served.entry.paths._served or not served.entry.paths.serves(
            served.peer(member)
        )
        await asyncio.sleep(1.0)
        assert member.served().rounds == (1, 0)
        assert served.entry.paths.serves(served.peer(member))

    served.run(play)
