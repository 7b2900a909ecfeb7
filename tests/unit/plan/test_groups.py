"""Two levels by hand. Against plays: tests/scenarios/test_plan.py."""

from typing import Any

import pytest

from weft.codec.dense import Fp32
from weft.plan.groups import grouped_time, largest_group, levels, parted
from weft.plan.timing import Kind, Line, Load, RoundTime, round_time

NUM = 40 * 4096
ELECTORS = 4
FP32 = Fp32()
NOTHING, VECTOR = Load.of(0, ELECTORS, FP32, FP32), Load.of(NUM, ELECTORS, FP32, FP32)


def kind(count: int, train_s: float = 1.0, *, name: str = "lab", **line: Any) -> Kind:
    return Kind(name=name, count=count, line=Line(**line), train_s=train_s)


def test_where_all_vote_a_round_is_the_electorates() -> None:
    all_vote = [kind(ELECTORS, delay_s=0.01, up_bps=1e6)]
    assert grouped_time(all_vote, ELECTORS, VECTOR) == round_time(all_vote, VECTOR)
    assert grouped_time(all_vote, 32, VECTOR) == round_time(all_vote, VECTOR)


@pytest.mark.parametrize(("num_leaves", "num_hops"), [(2, 9), (6, 10), (14, 11)])
def test_without_bytes_leaves_cost_nine_hops_and_one_for_each_step_of_the_tree_beyond_the_first(
    num_leaves: int, num_hops: int
) -> None:
    one = [kind(1 + num_leaves, delay_s=0.01)]
    alone = round_time([kind(1)], NOTHING).total_s
    assert grouped_time(one, 1, NOTHING).total_s == pytest.approx(alone + (num_hops + 1) * 0.02)


def test_payloads_of_a_group_share_the_aggregators_downlink() -> None:
    nbytes = VECTOR.payload_nbytes
    found = grouped_time([kind(1, down_bps=1e6), kind(6, name="leaf", delay_s=0.001)], 1, Load.of(NUM, 1, FP32, FP32))
    assert found.wards_s >= 6 * 8 * nbytes / 1e6


def test_who_computes_longer_hides_the_leaves() -> None:
    quick = kind(8, 1.0, name="leaf", delay_s=0.02)
    slow = kind(ELECTORS, 5.0, name="elector", delay_s=0.01)
    found = grouped_time([slow, quick], ELECTORS, NOTHING)
    assert found.wards_s == 0.0
    assert found.uneven_s == pytest.approx(5.0 - found.train_s)


def test_the_maker_and_who_is_nearest_vote() -> None:
    far, near = kind(5, name="far", delay_s=0.05), kind(5, name="near", delay_s=0.01)
    electors, leaves = parted([far, near], ELECTORS)
    assert [(each.name, each.count) for each in electors] == [("far", 1), ("near", 3)]
    assert [(each.name, each.count) for each in leaves] == [("far", 4), ("near", 2)]
    electors, _ = parted([kind(6), kind(3, name="more")], 3)
    assert [each.count for each in electors] == [2, 1]


def test_the_largest_group_has_more_than_the_mean_and_never_more_than_there_is_room_for() -> None:
    assert largest_group(1, 5) == 5
    assert largest_group(4, 0) == 0
    assert 100 / 4 < largest_group(4, 100) < 40
    assert largest_group(4, 4000) == 63


def test_bytes_that_are_sent_are_received() -> None:
    for num_leaves in (3, 8, 40, 1000):
        found = levels(VECTOR, ELECTORS, num_leaves, 10.0)
        mean = found.mean(ELECTORS, num_leaves)
        assert mean.sent_nbytes == pytest.approx(mean.received_nbytes, rel=1e-3)
        assert found.elector.sent_nbytes > found.ward.sent_nbytes
    assert levels(VECTOR, 4, 400, 1.0).elector.sent_nbytes < 2 * levels(VECTOR, 4, 40, 1.0).elector.sent_nbytes


@pytest.mark.parametrize("num_leaves", [1, 9, 200])
@pytest.mark.parametrize("chance", [{}, {"jitter_s": 0.01, "loss": 0.01}])
def test_the_parts_of_a_round_in_groups_are_all_of_it(num_leaves: int, chance: dict[str, float]) -> None:
    kinds = [kind(2, 2.0, name="fast"), kind(num_leaves + 2, 3.0, name="home", up_bps=2e7, delay_s=0.01, **chance)]
    time = grouped_time(kinds, ELECTORS, VECTOR)
    parts = [getattr(time, name) for name in RoundTime.__dataclass_fields__ if name.endswith("_s")]
    assert time.total_s == pytest.approx(sum(parts))
    assert min(parts) >= 0
    assert time.wards_s > 0
