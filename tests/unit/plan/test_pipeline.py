"""Steps of a pipeline: at their limits, by hand, and against production workers on a virtual clock."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from unit.plan.played import Paces, Wires, played
from weft.cost.pipeline import Crossing
from weft.cost.training import Traffic
from weft.plan.pipeline import LINE_USE, NUM_UNEVEN, Holder, Pipe, Stage, makespan_s, rate, step_time
from weft.plan.timing import Line

NOTHING = Crossing(down_nbytes=0, up_nbytes=0)
LETTERS = Crossing(down_nbytes=600, up_nbytes=700)  # about as many


def holder(factor: float = 1.0, count: int = 1, **fields: Any) -> Holder:
    """Return members that take a second for each of the three parts of a micro-batch, times a factor."""
    usual: dict[str, Any] = {"line": Line(), "forward_s": factor, "input_s": factor, "weights_s": factor}
    return Holder(name=f"x{factor}", count=count, **(usual | fields))


def whole_backward(**fields: Any) -> Holder:
    """Return a member whose backward pass is not cut in two, as in 1F1B."""
    return holder(**({"input_s": 2.0, "weights_s": 0.0} | fields))


def pipe(*stages: Stage, num_micro: int = 16, between: Crossing = NOTHING) -> Pipe:
    return Pipe(stages=stages, between=between, entry=NOTHING, num_micro=num_micro)


# --- limits ---


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("num_micro", [8, 32])
def test_one_peer_a_stage_without_a_network_has_the_bubble_of_1f1b(num_stages: int, num_micro: int) -> None:
    step = step_time(pipe(*[(whole_backward(),)] * num_stages, num_micro=num_micro))
    assert step.total_s == pytest.approx(3.0 * (num_micro + num_stages - 1))
    assert step.bubble == pytest.approx((num_stages - 1) / (num_micro + num_stages - 1))
    assert step.utilisation == pytest.approx([num_micro / (num_micro + num_stages - 1)] * num_stages)
    assert step.limit == "machines"


def test_weights_gradients_fill_a_part_of_the_bubble() -> None:
    # Of 4 stages the last begins 3 s late. Its last input gradient is done while it owes 3 x 1 s of others' weights
    # and its own; it goes back through 3 stages in 3 s, and the first needs 1 s more for its weights.
    step = step_time(pipe(*[(holder(),)] * 4))
    assert step.total_s == pytest.approx(3.0 + 48.0 - 3.0 + 3.0 + 1.0)
    assert step.bubble == pytest.approx(4 / 52)


def test_rates_of_unequal_peers_add_up() -> None:
    unequal = (holder(1.0), holder(2.0), holder(4.0))
    assert rate(unequal) == pytest.approx((1 + 1 / 2 + 1 / 4) / 3)
    steps = [step_time(pipe(unequal, unequal, num_micro=num)) for num in (700, 1400)]
    assert 700 / (steps[1].total_s - steps[0].total_s) == pytest.approx(rate(unequal))
    assert steps[1].compute_s == pytest.approx(1400 / rate(unequal))


def test_the_slowest_stage_decides() -> None:
    slow = (holder(2.0), holder(2.0, 2))
    step = step_time(pipe((holder(0.5),), slow, (holder(0.5),), num_micro=600))
    assert step.bottleneck == 1
    assert step.total_s == pytest.approx(600 / rate(slow) + step.bubble_s + step.uneven_s)
    assert step.utilisation[1] > 0.95
    assert step.utilisation[0] == pytest.approx(600 * 1.5 / step.total_s)


def test_several_who_send_to_several_leave_uneven_ends() -> None:
    one = step_time(pipe((holder(),), (holder(2.0, 2),), (holder(),)))
    assert one.uneven_s == 0.0  # who sends alone knows what all have
    assert step_time(pipe((holder(count=2),), (holder(2.0, 2),))).uneven_s == pytest.approx(6.0 * NUM_UNEVEN)


# --- by hand ---


def test_whole_micro_batches_go_to_whoever_is_done_first() -> None:
    assert makespan_s([(3.0, 1), (12.0, 1)], 5) == pytest.approx(12.0)  # four and one
    assert makespan_s([(3.0, 1), (12.0, 1)], 4) == pytest.approx(12.0)
    assert makespan_s([(3.0, 2)], 16) == pytest.approx(24.0)
    assert makespan_s([(0.1, 1)], 3) == pytest.approx(0.3)


def test_the_last_and_the_first_micro_batch_wait_for_transfers_by_hand() -> None:
    # 1 MB down at 8 Mbit/s is 1 s, back 2 MB are 2 s; three hops of 2 x 10 ms each way; the other end is faster.
    line = Line(up_bps=8e6, down_bps=80e6, delay_s=0.01)
    between = Crossing(down_nbytes=1_000_000, up_nbytes=2_000_000)
    stages = [(whole_backward(forward_s=10.0, line=line),)] * 2
    step = step_time(pipe(*stages, between=between, num_micro=4))
    assert step.compute_s == pytest.approx(48.0)
    assert step.bubble_s == pytest.approx(12.0)
    assert step.transfer_s == pytest.approx(3.0)
    assert step.latency_s == pytest.approx(2 * 3 * 0.02)
    assert step.told_s == pytest.approx(0.02)
    assert step.total_s == pytest.approx(63.14)


def test_a_line_that_is_busier_than_its_machine_sets_the_pace() -> None:
    thin = Line(up_bps=8e6, down_bps=8e6)
    between = Crossing(down_nbytes=2_000_000, up_nbytes=2_000_000)
    steps = [step_time(pipe(*[(holder(line=thin),)] * 3, between=between, num_micro=num)) for num in (100, 200)]
    assert steps[0].limit == "lines"
    assert steps[0].bottleneck == 1  # which sends both ways
    assert steps[1].total_s - steps[0].total_s == pytest.approx(100 * 4.0 / LINE_USE)


def test_no_more_are_under_way_than_may_be() -> None:
    far = Line(delay_s=10.0)  # 20 s a hop: a micro-batch is under way for 2 + 2 + 2 x 3 x 20 = 124 s; four at a time
    steps = [step_time(pipe((holder(line=far),), (holder(line=far),), num_micro=num)) for num in (100, 200)]
    assert steps[0].limit == "under way"
    assert steps[1].total_s - steps[0].total_s == pytest.approx(100 * 124.0 / 4)
    less = (holder(line=far, num_taken=2),)
    held = [step_time(pipe((holder(line=far),), less, num_micro=num)) for num in (100, 200)]
    # At the second: 2 s there, and a hop until its sender's word.
    assert held[1].total_s - held[0].total_s == pytest.approx(100 * max(124.0 / 4, 22.0 / 2))


def test_members_of_the_first_stage_hand_micro_batches_to_each_other() -> None:
    between, entry = Crossing(down_nbytes=1000, up_nbytes=2000), Crossing(down_nbytes=100, up_nbytes=10)
    found = Pipe(stages=((holder(count=4),), (holder(),), (holder(),)), between=between, entry=entry, num_micro=16)
    assert found.num_under_way == 2 * 3 * 4
    # Of four micro-batches three are another's: 75 down and 7.5 up for what it computes, and for what it begins.
    assert found.traffic(0) == Traffic(round(1000 + 75 + 7.5), round(2000 + 75 + 7.5))
    assert found.traffic(1) == Traffic(3000, 3000)
    assert found.traffic(2) == Traffic(2000, 1000)


# --- monotony ---


@pytest.mark.parametrize(
    "worse",
    [
        {"line": Line(up_bps=5e6, down_bps=50e6, delay_s=0.02)},
        {"line": Line(up_bps=10e6, down_bps=5e6, delay_s=0.02)},
        {"line": Line(up_bps=10e6, down_bps=50e6, delay_s=0.3)},
        {"forward_s": 1.5},
        {"input_s": 1.5},
        {"weights_s": 1.5},
    ],
    ids=repr,
)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_nothing_that_is_worse_makes_a_step_shorter(worse: dict[str, Any], number: int) -> None:
    usual = holder(count=2, line=Line(up_bps=10e6, down_bps=50e6, delay_s=0.02))
    stages = [(usual,)] * 3
    between = Crossing(down_nbytes=1_000_000, up_nbytes=1_000_000)
    before = step_time(pipe(*stages, between=between))
    stages[number] = (replace(usual, **worse),)
    assert step_time(pipe(*stages, between=between)).total_s >= before.total_s - 1e-9


def test_parts_of_a_step_add_up_and_none_is_negative() -> None:
    usual = holder(count=3, line=Line(up_bps=10e6, down_bps=50e6, delay_s=0.02))
    step = step_time(pipe((usual,), (usual, holder(3.0)), (usual,), between=LETTERS, num_micro=31))
    parts = step.compute_s, step.bubble_s, step.uneven_s, step.transfer_s, step.latency_s, step.told_s
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(step.total_s)


# --- against production workers ---


def reckoned(stages: Sequence[Sequence[Paces]], num_micro: int, wires: Wires) -> float:
    """Return what `played` measures: a step without its end being told."""
    bps = math.inf if wires.bps is None else wires.bps
    line = Line(up_bps=bps, down_bps=bps, delay_s=wires.delay_s / 2)
    made = [
        tuple(
            Holder(
                name="one",
                count=1,
                line=line,
                forward_s=paces.forward_s,
                input_s=paces.input_s,
                weights_s=paces.weights_s,
            )
            for paces in stage
        )
        for stage in stages
    ]
    between = Crossing(down_nbytes=wires.nbytes + 600, up_nbytes=wires.nbytes + 700)
    step = step_time(Pipe(stages=tuple(made), between=between, entry=LETTERS, num_micro=num_micro))
    return step.total_s - step.told_s


ONE = Paces()
SLOW = ONE.times(2.0)


@pytest.mark.parametrize(
    ("stages", "num_micro", "wires"),
    [
        ([[ONE]] * 2, 8, Wires()),
        ([[ONE]] * 4, 16, Wires()),
        ([[Paces(1.0, 2.0, 0.0)]] * 4, 8, Wires()),
        ([[SLOW], [ONE], [ONE]], 16, Wires()),
        ([[ONE], [SLOW], [ONE]], 16, Wires()),
        ([[ONE], [ONE], [SLOW]], 16, Wires()),
        ([[ONE]] * 4, 16, Wires(delay_s=0.2)),
        ([[ONE]] * 4, 16, Wires(bps=8e6, nbytes=250_000)),
    ],
    ids=repr,
)
def test_a_step_of_single_members_takes_what_production_workers_take(
    stages: list[list[Paces]], num_micro: int, wires: Wires
) -> None:
    assert reckoned(stages, num_micro, wires) == pytest.approx(played(stages, num_micro, wires, 1), rel=0.01)


@pytest.mark.parametrize(
    ("stages", "num_micro", "wires"),
    [
        ([[ONE] * 2] * 3, 32, Wires()),
        ([[ONE] * 2] * 3, 32, Wires(delay_s=0.2)),
        ([[ONE, SLOW], [ONE, ONE], [SLOW, ONE]], 32, Wires()),
        ([[ONE]] * 4, 16, Wires(delay_s=1.0)),  # no more may be under way
    ],
    ids=repr,
)
def test_a_step_of_several_members_takes_about_what_production_workers_take(
    stages: list[list[Paces]], num_micro: int, wires: Wires
) -> None:
    # Where all take whole seconds, which of those that are due at once goes first is chance.
    assert reckoned(stages, num_micro, wires) == pytest.approx(played(stages, num_micro, wires, 2), rel=0.3)
