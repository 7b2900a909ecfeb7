"""A trace played micro-batch by micro-batch: decided as the fluid model decides, and nearly as fast."""

import pytest
from benchmarks.rig.placement import Trace, anywhere, at_the_weakest, nobody, ours, played, preemptions
from benchmarks.rig.stages import Shape
from benchmarks.rig.stages_device import Script
from benchmarks.rig.stages_play import Outcome, play

SHAPE = Shape(num_stages=2, script=Script(forward_s=4.0, input_s=4.0, weights_s=4.0))
HOUR = 3600.0


def test_what_is_even_is_what_all_rates_come_to() -> None:
    found = Outcome(SHAPE, ((1.0, 5.0, 9.0), (2.0, 9.5)), ((0.0, 2.0), (5.0, 4.0)), 0, 0, 0, 0.0, 0.0)
    assert found.even(0.0, 10.0) == pytest.approx((2 + 4) / 2 / 2 / 12)
    assert found.even(5.0, 6.0) == pytest.approx(4 / 2 / 12)
    assert found.by_stage(0.0, 10.0) == pytest.approx((0.3, 0.2))
    assert found.by_stage(1.0, 5.0) == pytest.approx((0.25, 0.25))  # the end is not in it
    assert found.ratio(0.0, 10.0) == pytest.approx(0.2 / 0.125)


def test_peers_that_stay_do_what_they_can() -> None:
    trace = Trace(num_stages=2, hours=0.25, stays=((0.0, HOUR, 1.0),) * 4)
    found = play(trace, anywhere, nobody, SHAPE, every_s=300.0, move_s=60.0)
    assert 0.9 <= found.ratio(300.0, 900.0) <= 1.02
    assert (found.num_moves, found.num_lost) == (0, 0)
    assert 0.9 * found.busy_s < found.useful_s < found.busy_s


@pytest.mark.full
def test_moves_are_those_of_the_fluid_model_and_so_is_nearly_what_is_done() -> None:
    trace = preemptions(2, num_stages=2, num_peers=8, num_last=4, hours=0.5, stay_h=0.5)
    fluid = played(trace, at_the_weakest, ours, every_s=120.0, move_s=30.0)
    found = play(trace, at_the_weakest, ours, SHAPE, every_s=120.0, move_s=30.0)
    assert found.num_moves == fluid.num_moves > 0
    assert fluid.ratio - 0.2 < found.ratio(0.0, HOUR / 2) < fluid.ratio + 0.02
