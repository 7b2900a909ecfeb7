"""Members that decide each for itself have versions in common all the while, two at most, and newer ones soon."""

import heapq
from dataclasses import dataclass, field

import pytest

from weft.rng import stream
from weft.texts.versions import APART_S, DRAIN_S, MAX_HELD, STUCK_S, Take, is_due, taken

EVERY = 8


def test_the_first_version_is_of_the_first_round_that_is_even() -> None:
    assert [round for round in range(1, 20) if is_due(round, EVERY, None, 0.0)] == [8, 16]


def test_rounds_that_are_due_lie_so_far_apart_that_texts_end() -> None:
    due = [round for round in range(9, 400) if is_due(round, EVERY, 8, (round - 8) * 0.3)]
    assert due == [128, 256, 384]
    assert 128 * 0.3 >= APART_S > 64 * 0.3
    assert [round for round in range(9, 40) if is_due(round, EVERY, 8, (round - 8) * 5.0)] == [16, 24, 32]
    assert not is_due(8, EVERY, 8, 100.0)


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
    made_at: dict[int, float] = field(default_factory=dict)
    ends_at: dict[int, float] = field(default_factory=dict)  # of the last text of each version
    is_making: bool = False


@pytest.mark.parametrize("seed", range(12))
def test_members_always_have_versions_in_common_and_newer_ones_soon(seed: int) -> None:
    draws = stream(seed, "versions")
    round_s = float(draws.uniform(0.05, 8.0))
    members = [Member(stage, float(draws.uniform(0.0, 2.0))) for stage in (0, 0, 1, 1, 2)]
    last_s = 1500.0
    events = [
        (round * round_s + member.lags_s * float(draws.uniform(0.5, 1.0)), 1, number, round)
        for round in range(1, int(last_s / round_s))
        for number, member in enumerate(members)
    ]
    events += [(float(at), 2, -1, 0) for at in draws.uniform(100.0, last_s, 60)]  # a text begins
    heapq.heapify(events)
    lags = list[float]()
    while events:
        now, kind, number, round = heapq.heappop(events)
        common = set.intersection(*(set(member.made_at) for member in members))
        if now > 100.0:
            assert common, now
            lags.append(now - max(common) * round_s)
        if kind == 0:
            members[number].made_at[round] = now
            members[number].is_making = False
        elif kind == 1:
            member = members[number]
            newest = max(member.made_at, default=None)
            since_s = 0.0 if newest is None else now - member.made_at[newest]
            if member.is_making or not is_due(round, EVERY, newest, since_s):
                continue
            take = taken(
                {each: now - at for each, at in member.made_at.items()},
                [list(other.made_at) for other in members if other is not member and other.made_at],
                {each: int(member.ends_at.get(each, 0.0) > now) for each in member.made_at},
            )
            if take is None:
                continue
            if take.drop is not None:
                del member.made_at[take.drop]
            member.is_making = True
            assert len(member.made_at) + 1 <= MAX_HELD
            heapq.heappush(events, (now + float(draws.uniform(0.1, 2.0)), 0, number, round))
        else:
            until = now + float(draws.exponential(20.0))
            for stage in range(3):
                drawing = [member for member in members if member.stage == stage]
                chosen = drawing[int(draws.integers(len(drawing)))]
                chosen.ends_at[max(common)] = max(until, chosen.ends_at.get(max(common), 0.0))
    assert max(lags) < DRAIN_S + 3 * max(APART_S, EVERY * round_s) + 60.0
