"""No honest member ever signs two notes that contradict each other, whatever is lost, repeated, killed and restarted.

All that a member has said in a world stays in it, so any two notes of one sender can be compared. A disk that forgets
is found out: the search can fail.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.world import Bounds, Search, Taken, World, first_base, ones
from weft.sync.equivocation import binds, equivocation
from weft.sync.records.messages import Base, RoundNote
from weft.sync.round import round


class Contradiction(AssertionError):
    """A member signed what no honest member signs."""


class Witnessing(Search):
    """A search that compares each new note with all that its sender has said before."""

    def __init__(self, base: Base, bounds: Bounds) -> None:
        super().__init__(base, bounds)
        self.num_compared = 0
        self._compared: dict[tuple[int, int], str | None] = {}

    def _settle(self, world: World, number: int, taken: Taken) -> list[World]:
        for fresh in ones(taken.sent & ~world.sent):
            for known in ones(world.sent | taken.sent):
                if self._mail[known][0] == number and (what := self._compare(known, fresh)) is not None:
                    raise Contradiction(f"{what}: {self._mail[known][2]} and {self._mail[fresh][2]}")
        return super()._settle(world, number, taken)

    def _compare(self, known: int, fresh: int) -> str | None:
        if (known, fresh) not in self._compared:
            one, other = self._note(known), self._note(fresh)
            self.num_compared += binds(one.message) and binds(other.message) and known != fresh
            self._compared[known, fresh] = equivocation(one, other)
        return self._compared[known, fresh]

    def _note(self, mail: int) -> RoundNote:
        return RoundNote(branch=self.base.branch, round=self.base.round, message=self._mail[mail][2])


class Forgetful(Witnessing):
    """A disk that does not keep what it was given."""

    def _kill(self, world: World, number: int) -> World:
        fresh = self._intern(self._told(round.begin(self.base.electorate[number], self.base), number))
        after = super()._kill(world, number)
        return after._replace(states=(*after.states[:number], fresh, *after.states[number + 1 :]))


@pytest.mark.full
@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(Bounds(num_attempts=3, num_kills=1), marks=pytest.mark.slow),
        pytest.param(Bounds(num_attempts=2, num_kills=1, num_leaves=1), marks=pytest.mark.slow),
        pytest.param(Bounds(num_attempts=2, num_kills=1), marks=pytest.mark.slow),
        Bounds(num_attempts=2, num_kills=0),
    ],
)
def test_no_interleaving_of_two_members_holds_a_contradiction(bounds: Bounds) -> None:
    search = Witnessing(first_base(2), bounds)
    assert search.run(4_000_000)
    assert search.num_compared > 10


SEARCHES = {num: Witnessing(first_base(num, 2), Bounds(num_attempts=5, num_kills=3, num_leaves=1)) for num in (3, 4)}


def walk(search: Search, turns: list[int]) -> World:
    """Go where the turns lead: to one world after another, each one step on."""
    world = search.start()
    for turn in turns:
        following = [after for after in search.successors(world) if after != world]
        if not following:
            break
        world = following[turn % len(following)]
    return world


TURNS = st.lists(st.integers(0, 1 << 16), min_size=10, max_size=60)


@pytest.mark.parametrize("num_members", [3, 4])
@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
def test_no_walk_of_more_members_comes_to_one(num_members: int, turns: list[int]) -> None:
    walk(SEARCHES[num_members], turns)


def test_a_disk_that_forgets_makes_a_liar() -> None:
    with pytest.raises(Contradiction, match="accepted"):
        Forgetful(first_base(2), Bounds(num_attempts=3, num_kills=1)).run(2_000_000)
