"""What processors do beside inner steps: terms that grow with what they are of, and who waits for them."""

import pytest
from msgspec.structs import replace

from unit.plan.asked import MODEL, machines, question, train
from weft.codec.config import Bf16Config, Fp32Config, Int8Config
from weft.model.config import num_parameters
from weft.plan.forecast import load_of, pace_of
from weft.plan.processor import MESSAGES_CPU_S, UPKEEP_CPU_S, ProcessorTime, processor_time
from weft.plan.question import Question
from weft.plan.timing import Line
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, FedAvgConfig

FREE = Line()


def served(asked: Question) -> ProcessorTime:
    return processor_time(asked, load_of(asked))


def test_each_other_elector_adds_its_messages_and_each_value_its_arithmetic() -> None:
    four, eight = served(question()), served(question(machines(count=8)))
    assert eight.round_s - four.round_s == pytest.approx(4 * MESSAGES_CPU_S)
    assert eight.values_s == pytest.approx(four.values_s)
    half = replace(MODEL, num_layers=MODEL.num_layers // 2)
    ratio = num_parameters(half) / num_parameters(MODEL)
    assert served(question(model=half)).values_s / four.values_s == pytest.approx(ratio, rel=1e-3)


def test_an_outer_optimizer_with_moments_takes_longer_than_one_without() -> None:
    adamw, nesterov, sgd = (
        served(question(method=method)).values_s
        for method in (DdpConfig(), DiLoCoConfig(codec=Bf16Config()), FedAvgConfig(codec=Bf16Config()))
    )
    assert adamw > nesterov > sgd > 0


def test_bytes_cost_by_their_number() -> None:
    fp32, bf16, int8 = (
        served(question(method=DiLoCoConfig(codec=codec))).bytes_s
        for codec in (Fp32Config(), Bf16Config(), Int8Config())
    )
    assert fp32 == pytest.approx(2 * bf16)
    assert bf16 == pytest.approx(2 * int8, rel=0.02)


def test_an_aggregator_merges_all_of_what_each_of_its_leaves_brings() -> None:
    alone, grouped = served(question(machines(count=4))), served(question(machines(count=40), electors=4))
    assert grouped.round_s == alone.round_s
    assert grouped.values_s > 3 * alone.values_s
    assert grouped.bytes_s > 3 * alone.bytes_s


def test_peers_that_share_a_machine_wait_for_each_others_steps_and_serving() -> None:
    shared = question(machines(line=FREE, tokens_per_s=500.0, crowding=2.0))
    found, round = served(shared), pace_of(shared).round
    steps_s = train().batch_size * train().seq_len * 30 / 500
    busy_s = round.train_s + round.serve_s
    assert round.train_s == pytest.approx(steps_s)
    # All of a round, two peers to a core, do what they do in it and what they do all the time.
    assert busy_s == pytest.approx(steps_s + 2 * (found.total_s + UPKEEP_CPU_S * busy_s))


def test_timers_and_heartbeats_delay_no_step_of_a_gpu_that_a_peer_has_for_itself() -> None:
    on_gpu, on_cpu = (question(machines(line=FREE, is_gpu=is_gpu)) for is_gpu in (True, False))
    assert pace_of(on_gpu).round.serve_s == pytest.approx(served(on_gpu).total_s)
    assert pace_of(on_cpu).round.serve_s > served(on_cpu).total_s


def test_in_a_play_nothing_beside_inner_steps_takes_time() -> None:
    assert pace_of(question(machines(is_processor_free=True))).round.serve_s == 0
