"""The fluid model of placement: what a stage does, what a move costs, and what SWARM's authors saw."""

import pytest
from benchmarks.rig.placement import Trace, anywhere, at_the_weakest, nobody, ours, played, preemptions, swarms

HOUR = 3600.0


def test_a_pipeline_does_what_its_weakest_stage_does() -> None:
    # Four peers in two stages; one goes in the middle of the hour: 2 and 2, then 1 and 2 of 1.5 each.
    stays = ((0.0, 9 * HOUR, 1.0),) * 3 + ((0.0, HOUR / 2, 1.0),)
    found = played(Trace(num_stages=2, hours=1.0, stays=stays), anywhere, nobody, every_s=300.0, move_s=60.0)
    assert found.ratio == pytest.approx((2 + 1) / (2 + 1.5))
    assert (len(found.by_hour), found.num_moves) == (1, 0)


def test_who_moves_does_nothing_while_it_fetches_a_state() -> None:
    stays = ((0.0, 9 * HOUR, 1.0),) * 6 + ((0.0, 0.0001, 1.0),) * 2  # numbers 6, 7 go at once
    stays = (*stays[:1], stays[6], stays[1], stays[7], *stays[2:6])  # of stage 1: 2 of 4 are left, and 4 of stage 0
    found = played(Trace(num_stages=2, hours=1.0, stays=stays), anywhere, ours, every_s=600.0, move_s=900.0)
    assert found.num_moves == 1
    assert found.ratio == pytest.approx((2 * 600 + 2 * 900 + 3 * 2100) / (3 * 3600), rel=1e-4)


def test_a_trace_is_its_seeds_and_keeps_as_many_as_it_says() -> None:
    assert preemptions(3, hours=4.0) == preemptions(3, hours=4.0) != preemptions(4, hours=4.0)
    trace = preemptions(1, num_peers=100, num_last=40, hours=8.0, stay_h=4.0)
    for hour, expected in ((1.0, 100), (3.9, 100), (7.9, 42)):
        here = sum(came <= hour * HOUR < went for came, went, _ in trace.stays)
        assert here == pytest.approx(expected, abs=8)
    rates = [rate for _, _, rate in preemptions(1, hours=4.0, rates=(1.0, 2.0, 4.0)).stays]
    assert {rates.count(rate) // 30 for rate in (1.0, 2.0, 4.0)} <= {4, 5}


def test_moves_keep_what_a_trace_takes_and_fewer_of_them_than_swarms() -> None:
    trace = preemptions(0, num_stages=8, num_peers=80, num_last=40, hours=12.0, stay_h=12.0)
    alone = played(trace, anywhere, nobody, every_s=300.0, move_s=60.0)
    theirs = played(trace, anywhere, swarms, every_s=300.0, move_s=60.0)
    here = played(trace, at_the_weakest, ours, every_s=300.0, move_s=60.0)
    assert alone.ratio < theirs.ratio < here.ratio
    assert here.num_moves < theirs.num_moves / 2
