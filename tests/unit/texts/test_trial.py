"""A member knows how fast it is before anybody asks it."""

import pytest

from unit.texts.stages import STEP_S, Served
from unit.texts.test_stages import PROMPT, of_the_whole, tokens_of, wanted
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
        assert all(each.step_s > 0 for each, _ in known.values()), "nobody was told of it before"

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
