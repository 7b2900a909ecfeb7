"""Rounds by hand, where all that takes time is one thing. Against plays: tests/scenarios/test_plan.py."""

import pytest

from weft.codec.dense import Fp32
from weft.plan.timing import Kind, Line, Load, RoundTime, round_time
from weft.sync.round.machine import FLOOR_S, TELL_S

NUM = 40 * 4096
FP32 = Fp32()
NOTHING = Load.of(0, 4, FP32, FP32)


def kind(count: int = 4, train_s: float = 1.0, *, name: str = "lab", evaluate_s: float = 0.0, **line: float) -> Kind:
    return Kind(name=name, count=count, line=Line(**line), train_s=train_s, evaluate_s=evaluate_s)


def test_without_bytes_a_round_is_its_steps_and_twelve_messages_one_after_another() -> None:
    time = round_time([kind(delay_s=0.01)], NOTHING)
    assert time.total_s == pytest.approx(1.0 + 12 * 0.02 + TELL_S)
    assert (time.train_s, time.uneven_s, time.contribute_s, time.result_s) == (1.0, 0.0, 0.0, 0.0)


def test_of_two_the_one_who_leads_twice_in_a_row_waits_for_nobodys_vote() -> None:
    both, three = round_time([kind(2, delay_s=0.01)], NOTHING), round_time([kind(3, delay_s=0.01)], NOTHING)
    assert both.total_s == pytest.approx(1.0 + 0.19 + TELL_S)
    assert both.total_s < three.total_s


def test_one_peer_alone_only_trains_and_evaluates() -> None:
    alone = round_time([kind(1, 2.0, evaluate_s=3.0, up_bps=1.0)], Load.of(NUM, 1, FP32, FP32, 6))
    assert (alone.total_s, alone.evaluate_s, alone.utilisation) == (2.5, 0.5, 0.8)


def test_payloads_and_results_each_take_three_quarters_of_a_vector_up() -> None:
    time = round_time([kind(up_bps=1e6)], Load.of(NUM, 4, FP32, FP32))
    each_s = 8 * 4 * NUM * 3 / 4 / 1e6
    assert time.contribute_s == pytest.approx(each_s)
    assert time.result_s == pytest.approx(each_s)
    assert time.messages_s < 0.1 * each_s


def test_a_slow_downlink_counts_as_a_slow_uplink_does() -> None:
    load = Load.of(NUM, 4, FP32, FP32)
    up, down = round_time([kind(up_bps=1e6)], load), round_time([kind(down_bps=1e6)], load)
    assert down.contribute_s == pytest.approx(up.contribute_s)


def test_one_narrow_uplink_makes_all_wait() -> None:
    load = Load.of(NUM, 4, FP32, FP32)
    wide, narrow = kind(3, name="wide", up_bps=1e9), kind(1, name="narrow", up_bps=1e6)
    both = round_time([wide, narrow], load)
    assert both.total_s > 1.0 + 2 * 8 * 4 * NUM * 3 / 4 / 1e6
    assert both.total_s > round_time([kind(4, up_bps=1e9)], load).total_s + 7


def test_a_lossy_stream_is_slower_than_its_lines() -> None:
    load = Load.of(NUM, 4, FP32, FP32)
    clean, lossy = kind(delay_s=0.05, up_bps=1e8), kind(delay_s=0.05, up_bps=1e8, loss=0.01)
    assert round_time([lossy], load).contribute_s > 5 * round_time([clean], load).contribute_s


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_jitter_and_loss_only_make_messages_later(loss: float) -> None:
    still = round_time([kind(delay_s=0.02)], NOTHING)
    shaky = round_time([kind(delay_s=0.02, jitter_s=0.02, loss=loss)], NOTHING)
    assert shaky.messages_s > still.messages_s
    assert shaky.messages_s < still.messages_s + 12 * (0.04 + 0.2)


def test_the_others_wait_for_slower_inner_steps() -> None:
    time = round_time([kind(3, 1.0, name="fast"), kind(1, 3.0, name="slow")], NOTHING)
    assert (time.train_s, time.uneven_s) == (1.5, 1.5)
    assert time.late == ()


def test_who_is_a_minute_late_is_not_waited_for() -> None:
    time = round_time([kind(3, 1.0, name="fast"), kind(1, 90.0, name="slow")], NOTHING)
    assert time.late == ("slow",)
    assert time.total_s == pytest.approx(1.0 + FLOOR_S + TELL_S)


def test_an_evaluation_is_waited_for_no_longer_than_a_grace() -> None:
    load = Load.of(0, 4, FP32, FP32, 2)
    short, long = (round_time([kind(evaluate_s=took_s)], load).evaluate_s for took_s in (1.0, 50.0))
    assert short == pytest.approx(0.5 * 1.0, rel=0.3)
    assert long <= FLOOR_S / 2


@pytest.mark.parametrize("num", [0, 4096, 17_024, NUM, 1_000_003])
@pytest.mark.parametrize("num_peers", [1, 2, 5, 32, 200])
def test_the_parts_of_a_round_are_all_of_it(num: int, num_peers: int) -> None:
    line = {"up_bps": 2e7, "down_bps": 1e8, "delay_s": 0.01}
    time = round_time([kind(num_peers, 0.5, evaluate_s=0.2, **line)], Load.of(num, num_peers, FP32, FP32, 5))
    parts = [getattr(time, name) for name in RoundTime.__dataclass_fields__ if name.endswith("_s")]
    assert time.total_s == pytest.approx(sum(parts))
    assert min(parts) >= 0
    assert 0 < time.utilisation <= 1
