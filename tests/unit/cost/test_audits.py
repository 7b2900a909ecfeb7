"""What audits take: figures reckoned by hand."""

import random
from typing import Any

import pytest

from weft.cost.audits import (
    MAX_BETWEEN,
    MAX_SHOWN_NBYTES,
    Audited,
    Customs,
    Holds,
    Kept,
    Speed,
    cost_of,
    longest_part,
    num_between,
    spacing,
)
from weft.cost.training import Traffic

CUSTOMS = Customs(times=4.0, num_new=10, leases=Kept(20, 150.0), parts=Kept(16, 120.0), between=Kept(2, 30.0))
SPEED = Speed(step_s=2.0, hash_s=1e-6, write_s=1.0, merge_s=10.0)  # nothing is kept inside a lease: it takes too long


def audited(**fields: Any) -> Audited:
    """Of a thousand parameters, ten training steps a lease, 500 bytes of payload, 70 of the result of a part, and so
    many rounds that the first are nothing."""
    usual: dict[str, Any] = {
        "customs": CUSTOMS,
        "rate": 0.1,
        "trace_every": 1,
        "num_members": 5,
        "num_rounds": 10**9,
        "num_parameters": 1000,
        "num_moments": 2,
        "has_error": True,
        "num_steps": 10,
        "payload_nbytes": 500,
        "merged_nbytes": 70,
    }
    return Audited(**(usual | fields))


def holds(num: int, **fields: Any) -> Holds:
    """Of so many parameters, and a codec that leaves something."""
    usual: dict[str, Any] = {
        "num_parameters": num,
        "num_moments": 2,
        "has_error": True,
        "payload_nbytes": 500,
        "has_gradient": False,
        "num_audits": 0.1,
    }
    return Holds(**(usual | fields))


def test_each_state_is_hashed_and_the_one_that_a_lease_begins_with() -> None:
    assert cost_of(audited(), SPEED).hash_s == pytest.approx(11 * 12_000 * 1e-6)
    assert cost_of(audited(trace_every=5), SPEED).hash_s == pytest.approx(3 * 12_000 * 1e-6)
    assert cost_of(audited(trace_every=4, num_moments=0), SPEED).hash_s == pytest.approx(4 * 4_000 * 1e-6)


def test_a_worker_makes_half_a_lease_again_and_an_auditor_what_was_drawn() -> None:
    assert cost_of(audited(), SPEED).again_s == pytest.approx(0.1 * ((5.5 + 1) * 2 + 10))
    assert cost_of(audited(trace_every=5), SPEED).again_s == pytest.approx(0.1 * ((7.5 + 5) * 2 + 10))
    assert cost_of(audited(trace_every=100), SPEED).again_s == pytest.approx(0.1 * ((10 + 10) * 2 + 10))  # a lease


def test_bytes_are_16_to_32_a_parameter_and_what_others_brought_to_a_part() -> None:
    found = cost_of(audited(), SPEED)
    assert found.step_nbytes == (20_000, 32_000)
    assert found.part_nbytes == 400
    assert found.traffic == Traffic(2040, 2040)
    assert cost_of(audited(has_error=False), SPEED).step_nbytes == (16_000, 28_000)
    assert cost_of(audited(num_moments=0, has_error=False), SPEED).step_nbytes == (8_000, 12_000)


def test_memory_is_of_what_is_shown_and_looked_at_and_of_a_trainer_that_is_lent() -> None:
    shown, measured, lent = 2 * 12_000 + 4_000 + 8_000, 5 * 4_000, 2 * 12_000 + 4_000
    rounded = 12_000 + 4_000
    beside = measured + rounded + lent + 500
    assert holds(10**8, num_audits=0.4).shown_nbytes == 2 * 10**5 * shown
    middle = holds(3 * 10**6, num_audits=0.4).shown_nbytes  # of what is as large five are more than enough
    assert middle == 5 * 3000 * shown > MAX_SHOWN_NBYTES > 4 * 3000 * shown
    assert holds(1000, num_audits=0.4).nbytes == 8 * shown + 3 * 3 * 12_000 + beside  # in twenty rounds eight
    assert holds(1000, num_audits=0.01).nbytes == 2 * shown + 3 * 3 * 12_000 + beside
    assert cost_of(audited(), SPEED).memory_nbytes == holds(1000, num_audits=0.4).nbytes
    assert holds(1000, has_error=False).shown_nbytes == 2 * 32_000
    assert holds(1000, has_error=False, has_gradient=True).shown_nbytes == 2 * 36_000


@pytest.mark.parametrize(("num_audits", "num_works"), [(0.01, 3), (0.4, 3), (1.0, 3), (1.5, 4), (4.0, 6)])
def test_three_states_are_held_of_each_work_that_is_drawn_and_of_two_that_are_doubted(
    num_audits: float, num_works: int
) -> None:
    assert holds(1000, num_audits=num_audits).looked_nbytes == num_works * 3 * 12_000 + 5 * 4_000 + 16_000


def test_the_disk_keeps_so_many_rounds_and_in_short_ones_so_many_seconds() -> None:
    found = cost_of(audited(has_error=False), SPEED)
    of_round, of_parts = 16_000, 1070
    assert found.disk_nbytes(60.0) == 21 * of_round + 17 * of_parts
    assert found.disk_nbytes(1.0) == 151 * of_round + 121 * of_parts


def test_newcomers_are_audited_four_times_as_often_in_their_first_rounds() -> None:
    assert audited(num_rounds=10).num_audits == pytest.approx(0.4)
    assert audited(num_rounds=40).num_audits == pytest.approx(0.1 * (4 + 3) / 4)
    assert audited().num_audits == pytest.approx(0.1)
    assert audited(rate=1.0, num_members=3, num_rounds=10).num_audits == 2.0  # no more than there are others
    assert audited(num_members=1).num_audits == 0.0


@pytest.mark.parametrize(("num_audits", "num_members"), [(0.1, 3), (0.4, 8), (1.0, 5), (2.0, 3)])
def test_who_has_most_to_do_again_is_as_chance_has_it(num_audits: float, num_members: int) -> None:
    """The closed form beside as many draws."""
    dice, num = random.Random(7), 20_000
    others = num_members - 1

    def drawn() -> float:
        is_looked_at = any(dice.random() < num_audits / others for _ in range(others))
        return dice.random() if is_looked_at else 0.0

    mean = sum(max(drawn() for _ in range(num_members)) for _ in range(num)) / num
    assert longest_part(num_audits, num_members) == pytest.approx(mean, abs=0.01)


def test_nobody_is_waited_for_where_nobody_is_audited() -> None:
    assert longest_part(0.0, 5) == longest_part(0.0, 1) == 0.0
    alone = cost_of(audited(num_members=1), SPEED)
    assert (alone.waited_s, alone.again_s, alone.traffic) == (0.0, 0.0, Traffic(0, 0))
    assert alone.round_s == alone.hash_s > 0


def test_a_round_waits_for_the_longest_no_longer_than_a_lease_and_on_one_machine_for_all() -> None:
    apart = cost_of(audited(num_members=3), SPEED)
    q = 1 - 0.95**2
    longest = 1 - (1 - (1 - q) ** 4) / (4 * q)
    assert longest > 0.1  # leases: more than who is late can miss
    assert apart.waited_s == pytest.approx(0.1 * (10 + 1.5) * 2 + 1.0)
    few = cost_of(audited(rate=1.0, num_members=3), SPEED)
    assert few.waited_s == pytest.approx(max(few.again_s, (10 * longest_part(1.0, 3) + 1.5) * 2 + 10))
    shared = cost_of(audited(num_members=3), Speed(step_s=2.0, hash_s=1e-6, write_s=1.0, merge_s=10.0, crowding=3.0))
    assert shared.waited_s == shared.again_s
    assert shared.hash_s == pytest.approx(3 * apart.hash_s)


def test_states_inside_a_lease_are_as_many_as_make_the_sum_least() -> None:
    """Beside all other numbers of them."""
    for num_steps, step_s, state_s, rate in ((100, 1.0, 0.3, 0.1), (40, 0.1, 0.02, 0.1), (100, 0.1, 0.3, 0.5)):
        sums = [num * state_s + rate * num_steps * step_s / (num + 1) for num in range(MAX_BETWEEN + 1)]
        found = num_between(num_steps, step_s, state_s, rate)
        assert sums[found] <= 1.01 * min(sums)
    assert num_between(100, 1.0, 1e-9, 0.1) == num_between(100, 0.0, 0.0, 0.1) == MAX_BETWEEN
    assert num_between(4, 1.0, 1e-9, 0.1) == 3
    assert num_between(1, 1.0, 1e-9, 0.1) == num_between(100, 0.01, 10.0, 0.1) == 0
    assert [spacing(100, 3, 1), spacing(100, 3, 10), spacing(100, 0, 1), spacing(7, 3, 1)] == [25, 30, 100, 2]


def test_who_keeps_states_inside_a_lease_makes_fewer_steps_again_and_writes_more() -> None:
    given = {"num_steps": 100, "num_members": 3}
    without, fast = cost_of(audited(**given), SPEED), Speed(step_s=2.0, hash_s=1e-6, write_s=1e-4, merge_s=10.0)
    found = cost_of(audited(**given), fast)
    assert num_between(100, 2.0, 12_000 * 1.01e-4, 0.1) == 3
    assert found.keep_s == pytest.approx(3 * 12_000 * 1e-4)
    assert found.again_s == pytest.approx(0.1 * ((12.5 + 1.5) * 2 + 10))
    assert without.again_s == pytest.approx(0.1 * ((50 + 1.5) * 2 + 10))
    assert found.waited_s == pytest.approx(0.1 * (25 + 1.5) * 2 + 1.0)
    assert found.round_s == pytest.approx(found.hash_s + found.keep_s + found.waited_s)
    assert found.round_s < without.round_s
    assert (found.between_nbytes, without.between_nbytes, without.keep_s) == (3 * 12_000, 0, 0.0)
    assert found.disk_nbytes(60.0) - without.disk_nbytes(60.0) == 3 * 3 * 12_000
    assert found.disk_nbytes(1.0) - without.disk_nbytes(1.0) == 31 * 3 * 12_000
    rare = cost_of(audited(**given, trace_every=40), fast)
    assert rare.between_nbytes == 2 * 12_000  # every 40th state has a name, and 40 and 80 are the only ones inside
