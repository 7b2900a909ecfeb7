"""Members that decide each for itself have versions in common all the while, two at most, and newer ones soon."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from weft.rng import stream
from weft.texts.beside.versions import APART_S, DRAIN_S, SOON_S, STUCK_S, Take, is_due, taken
from weft.texts.member import MAX_VERSIONS

EVERY = 8


def test_the_first_version_is_of_the_first_round_that_is_even() -> None:
    assert [round for round in range(1, 20) if is_due(round, EVERY, None, 0.0, meets_all=True)] == [8, 16]


def test_rounds_that_are_due_lie_so_far_apart_that_texts_end() -> None:
    due = [round for round in range(9, 400) if is_due(round, EVERY, 8, (round - 8) * 0.3, meets_all=True)]
    assert due == [128, 256, 384]
    assert 128 * 0.3 >= APART_S > 64 * 0.3
    assert [round for round in range(9, 40) if is_due(round, EVERY, 8, (round - 8) * 5.0, meets_all=True)] == [
        16,
        24,
        32,
    ]
    assert not is_due(8, EVERY, 8, 100.0, meets_all=False)
    due = [round for round in range(9, 100) if is_due(round, EVERY, 8, (round - 8) * 0.3, meets_all=False)]
    assert due == [32, 64, 96]  # somebody has come


@pytest.mark.parametrize(
    ("ages_s", "others", "num_texts", "expected"),
    [
        ({}, [], {}, Take(None)),
        ({8: 30.0}, [[8]], {8: 3}, Take(None)),
        ({8: 60.0, 16: 30.0}, [[8, 16], [16, 8]], {}, Take(8)),
        ({8: 60.0, 16: 30.0}, [[8, 16], [8]], {}, Take(16)),  # who lags has that one
        ({8: 60.0, 16: 30.0}, [[8, 16], [8]], {8: 1}, Take(16)),
        ({8: 60.0, 16: 30.0}, [[8, 16], [24]], {}, Take(8)),  # who has come has none of both
        ({8: STUCK_S, 16: 30.0}, [[8, 16], [8]], {}, Take(8)),  # for ever nobody is waited for
        ({8: 60.0, 16: 30.0}, [[8, 16]], {8: 1}, None),
        ({8: 60.0, 16: DRAIN_S}, [[8, 16]], {8: 1}, Take(8)),
        ({8: 60.0, 16: 30.0}, [[8, 16]], {16: 1}, Take(8)),
    ],
)
def test_what_most_have_is_kept_and_what_texts_are_drawn_with_is_kept_a_while(
    ages_s: dict[int, float], others: list[list[int]], num_texts: dict[int, int], expected: Take | None
) -> None:
    assert taken(ages_s, others, num_texts) == expected


@dataclass
class Member:
    stage: int
    lags_s: float
    at: dict[int, float] = field(default_factory=dict)  # when the round of each version had settled
    ends_at: dict[int, float] = field(default_factory=dict)  # of the last text of each version
    is_making: bool = False
    settled_at: float = 0.0
    life: int = 0


ROUND, MADE, TEXT, AGAIN = range(4)
LAST_S = 700.0


class Play:
    """Three stages; members decide each for itself, on what all tell at once."""

    def __init__(self, seed: int, most_s: float, num_texts: int, num_again: int) -> None:
        self.draws = draws = stream(seed, "versions")
        self.looks = True
        self.round_s = float(draws.uniform(0.2, most_s))
        self.members = [Member(stage, float(draws.uniform(0.0, 2.0))) for stage in (0, 0, 1, 1, 2)]
        self.events = [
            (round * self.round_s + member.lags_s * float(draws.uniform(0.5, 1.0)), ROUND, number, round)
            for round in range(1, int(LAST_S / self.round_s))
            for number, member in enumerate(self.members)
        ]
        self.events += [(float(at), TEXT, 0, 0) for at in draws.uniform(100.0, LAST_S, num_texts)]
        self.events += [(200.0 * (n + 1), AGAIN, int(draws.integers(5)), 0) for n in range(num_again)]
        heapq.heapify(self.events)

    def common(self) -> set[int]:
        return set.intersection(*(set(member.at) for member in self.members))

    def steps(self) -> Iterator[float]:
        """Yield the time, before each thing happens."""
        while self.events:
            now, kind, number, what = heapq.heappop(self.events)
            yield now
            member = self.members[number]
            if kind == ROUND:
                self._settled(member, number, what, now)
            elif kind == MADE and what // 10**6 == member.life:
                member.at[what % 10**6] = member.settled_at
                member.is_making = False
            elif kind == TEXT and (common := self.common()):
                self._begun(max(common), now)
            elif kind == AGAIN:
                self.members[number] = Member(member.stage, member.lags_s, life=member.life + 1)

    def _settled(self, member: Member, number: int, round: int, now: float) -> None:
        others = [list(other.at) for other in self.members if other is not member and other.at]
        ages_s = {each: now - at for each, at in member.at.items()}
        newest = max(ages_s, default=None)
        meets_all = not self.looks or all(set(each) & set(ages_s) for each in others)
        since_s = 0.0 if newest is None else ages_s[newest]
        if member.is_making or not is_due(round, EVERY, newest, since_s, meets_all=meets_all):
            return
        take = taken(ages_s, others, {each: int(member.ends_at.get(each, 0.0) > now) for each in ages_s})
        if take is None:
            return
        if take.drop is not None:
            del member.at[take.drop]
        member.is_making, member.settled_at = True, now
        assert len(member.at) + 1 <= MAX_VERSIONS
        takes_s = float(self.draws.uniform(0.1, 2.0))
        heapq.heappush(self.events, (now + takes_s, MADE, number, member.life * 10**6 + round))

    def _begun(self, version: int, now: float) -> None:
        until = now + float(self.draws.exponential(20.0))
        for stage in range(3):
            here = [member for member in self.members if member.stage == stage]
            chosen = here[int(self.draws.integers(len(here)))]
            chosen.ends_at[version] = max(until, chosen.ends_at.get(version, 0.0))


@pytest.mark.parametrize("seed", range(8))
def test_members_always_have_versions_in_common_and_newer_ones_soon(seed: int) -> None:
    play, lags = Play(seed, 8.0, num_texts=25, num_again=0), list[float]()
    for now in play.steps():
        if now > 100.0:
            common = play.common()
            assert common, now
            lags.append(now - max(common) * play.round_s)
    assert max(lags) < DRAIN_S + 3 * max(APART_S, EVERY * play.round_s) + 60.0


def longest_alone_s(seed: int, *, looks: bool) -> float:
    """Return how long there was no version in common at most, once somebody had come.

    Args:
        looks: whether members regard who has none in common with them.
    """
    play, alone_since, most_s = Play(seed, 1.0, num_texts=0, num_again=3), None, 0.0
    play.looks = looks
    for now in play.steps():
        if now < 100.0 or play.common():
            alone_since = None
        else:
            alone_since = alone_since or now
            most_s = max(most_s, now - alone_since)
    assert most_s < 3 * EVERY * play.round_s + 8 * SOON_S
    return most_s


@pytest.mark.full
def test_who_has_come_soon_has_a_version_in_common_with_all() -> None:
    looking, blind = (sum(longest_alone_s(seed, looks=looks) for seed in range(8)) for looks in (True, False))
    assert looking < 0.8 * blind
