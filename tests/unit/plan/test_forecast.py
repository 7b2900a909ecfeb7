"""A plan's figures against each other, and against the rooms they speak of."""

import math
from collections import Counter

import pytest
import torch
from msgspec.structs import replace as replaced

from unit.peer.tiny import run_config
from unit.plan.asked import HOME, MODEL, machines, question, train
from weft.codec.config import Bf16Config, Int8Config
from weft.cost import training as cost
from weft.data.store import Rows
from weft.model.config import num_parameters
from weft.plan.forecast import forecast, leased_tokens, load_of, pace_of
from weft.plan.methods import choose, rows
from weft.plan.profiles import device
from weft.plan.question import OPTIMIZER_NBYTES, tokens_per_s
from weft.plan.timing import Line
from weft.run.machine import PeerConfig
from weft.run.reward import MatchReward
from weft.run.trust import AuditedTrust
from weft.sync.method.choices import SampleConfig
from weft.sync.method.presets import (
    DdpConfig,
    DiLoCoConfig,
    FedAvgConfig,
    MethodConfig,
    PowerSgdConfig,
    StreamingConfig,
)
from weft.training.device import Device, decoder, needed_nbytes

FREE = Line()


def test_speed_and_duration_follow_from_the_round() -> None:
    pace = forecast(question()).pace
    assert pace.tokens == 4 * 30 * 8 * 1024
    assert pace.tokens_per_s == pytest.approx(pace.tokens / pace.round.total_s)
    assert pace.tokens_per_s == pytest.approx(4 * 20_000 * pace.round.utilisation)
    assert pace.total_s == pytest.approx(1e9 / pace.tokens_per_s)


def test_a_run_of_few_tokens_takes_a_whole_round() -> None:
    pace = forecast(question(train=train(tokens=1000))).pace
    assert pace.num_rounds == 1
    assert pace.total_s == pace.round.total_s


def test_bytes_are_those_of_the_reduce_and_its_messages() -> None:
    pace = pace_of(question(method=DdpConfig()))
    num = num_parameters(MODEL)
    reduce = cost.ring_ddp_traffic(num, 4).sent_nbytes
    control = cost.control_traffic(4, pace.round.total_s).sent_nbytes
    assert pace.traffic.sent_nbytes == pytest.approx(reduce + control, abs=8)
    assert pace.gigabytes_per_day == pytest.approx(2 * pace.traffic.sent_nbytes * 86_400 / pace.round.total_s / 1e9)


def test_where_members_are_drawn_a_round_takes_as_long_and_brings_their_share() -> None:
    whole = pace_of(question(method=FedAvgConfig()))
    half = pace_of(question(method=FedAvgConfig(among=SampleConfig(share=0.3))))  # two of four
    assert half.round == whole.round
    assert half.tokens == whole.tokens // 2
    assert half.tokens_per_s == pytest.approx(whole.tokens_per_s / 2)
    assert 0.7 < half.traffic.sent_nbytes / whole.traffic.sent_nbytes < 0.8  # half the payloads, all results


def test_a_device_multiplies_matrices_and_moves_its_optimizers_numbers() -> None:
    found = tokens_per_s(device("rtx4090"), MODEL, train(), efficiency=0.5)
    products_s = 8192 * cost.flops_per_token(decoder(MODEL), 1024) / (0.5 * 165.2e12)
    optimizer_s = OPTIMIZER_NBYTES * num_parameters(MODEL) / 1008e9
    assert found == pytest.approx(8192 / (products_s + optimizer_s))
    assert tokens_per_s(device("rtx4090"), MODEL, train()) < found < tokens_per_s(device("h100-sxm"), MODEL, train())


def test_slower_machines_are_leased_less_unless_all_are_leased_the_same() -> None:
    kinds = machines("fast", 2), machines("slow", 2, tokens_per_s=5_000.0)
    assert leased_tokens(question(*kinds, has_even_leases=False)) == {"fast": 30 * 8192, "slow": 7 * 8192}
    ddp = leased_tokens(question(*kinds, has_even_leases=False, method=DdpConfig()))
    assert ddp == {"fast": 8192, "slow": 2 * 1024}
    even, shared = pace_of(question(*kinds)), pace_of(question(*kinds, has_even_leases=False))
    assert even.round.uneven_s > 0.2 * even.round.total_s
    assert shared.round.uneven_s < 0.05 * shared.round.total_s
    assert shared.tokens_per_s > even.tokens_per_s
    assert shared.tokens_per_s < 2 * 25_000


@pytest.mark.parametrize("method", [DdpConfig(), FedAvgConfig(), DiLoCoConfig(), DiLoCoConfig(codec=Bf16Config())])
@pytest.mark.parametrize("is_gpu", [False, True])
def test_memory_is_what_a_peer_asks_for(method: DdpConfig | FedAvgConfig | DiLoCoConfig, is_gpu: bool) -> None:
    own = train(tokens=10**12)
    asked = question(machines(is_gpu=is_gpu, is_half=is_gpu), method=method, train=own)
    run = run_config(method, MODEL, seq_len=1024, batch_size=8, tokens=10**12)
    place = Device(torch.device("cuda", 0) if is_gpu else torch.device("cpu"), "bf16" if is_gpu else "fp32", "any")
    wanted = needed_nbytes(run, PeerConfig(), place, 8)
    hold = forecast(asked).memory[0]
    assert {hold.on_device, hold.on_host} == {0, *wanted.values()} if not is_gpu else set(wanted.values())
    assert (hold.micro_batch, hold.has_room) == (8, None)


@pytest.mark.parametrize("trust", [AuditedTrust(), AuditedTrust(numerics="exact", micro_batch=2)])
def test_memory_has_what_audits_hold_in_it(trust: AuditedTrust) -> None:
    own, kind = train(tokens=10**12), machines(is_gpu=False, is_half=False, memory_nbytes=1e6)
    run = run_config(DiLoCoConfig(), MODEL, seq_len=1024, batch_size=8, tokens=10**12)
    wanted = needed_nbytes(
        replaced(run, trust=trust), PeerConfig(), Device(torch.device("cpu"), "fp32", "any"), trust.micro_batch or 8
    )
    (hold,) = forecast(question(kind, trust=trust, train=own)).memory
    assert hold.on_host == wanted["cpu"]
    assert (hold.micro_batch, hold.has_room) == (trust.micro_batch or 8, False)  # it is the run's, and not made fewer
    assert hold.on_host > forecast(question(kind, train=own)).memory[0].on_host + 100 * num_parameters(MODEL)


@pytest.mark.parametrize("is_gpu", [False, True])
def test_who_learns_from_answers_holds_the_model_that_draws_them(is_gpu: bool) -> None:
    kind = machines(is_gpu=is_gpu, is_half=is_gpu)
    (plain,) = forecast(question(kind)).memory
    (drawing,) = forecast(question(kind, has_reward=True)).memory
    texts = run_config(DiLoCoConfig(every=30), MODEL, seq_len=1024)
    rows = Rows(length=1025, train_trained=9, heldout_trained=9, too_long="cut", date="2026-11-29")
    without = replaced(texts, data=replaced(texts.data, dtype="uint32", train=(), heldout=(), rows=rows))
    tasks = replaced(without.data, rows=replaced(rows, are_tasks=True))
    run = replaced(texts, data=tasks, reward=MatchReward())
    place = Device(torch.device("cuda", 0) if is_gpu else torch.device("cpu"), "bf16" if is_gpu else "fp32", "any")
    more = Counter(needed_nbytes(run, PeerConfig(), place, 1)) - Counter(needed_nbytes(without, PeerConfig(), place, 1))
    whole = 4 * num_parameters(MODEL)
    assert more["cpu"] == drawing.on_host - plain.on_host >= whole
    assert more["cuda:0"] == drawing.on_device - plain.on_device
    assert sum(more.values()) > (2 if is_gpu else 1) * whole


def test_fewer_samples_at_a_time_where_the_device_is_small() -> None:
    holds = [forecast(question(machines(is_gpu=True, memory_nbytes=gb * 1e9))).memory[0] for gb in (80, 4, 0.5)]
    assert [hold.has_room for hold in holds] == [True, True, False]
    assert holds[0].micro_batch > holds[1].micro_batch >= holds[2].micro_batch == 1


def test_the_multiplier_is_the_product_of_its_parts() -> None:
    kinds = machines("a", 3), machines("b", 1, tokens_per_s=9_000.0, line=FREE)
    plan = forecast(question(*kinds, train=train(evaluate_every=5)))
    penalty = plan.pace.penalty
    assert penalty is not None
    assert penalty.more_tokens is not None
    ratio = plan.pace.total_s / plan.cluster_s * penalty.more_tokens
    assert plan.multiplier.of_time == pytest.approx(ratio)
    assert plan.multiplier.of_energy == pytest.approx(plan.bill.kwh / plan.cluster_bill.kwh * penalty.more_tokens)
    assert math.prod(part.factor for part in plan.multiplier.time[1:]) == pytest.approx(plan.multiplier.of_distance)
    assert {"machines", "uneven machines", "exchange", "method"} <= {part.name for part in plan.multiplier.time}


def test_energy_and_money_are_those_of_machines_that_train_and_wait() -> None:
    plan = forecast(question())
    round = plan.pace.round
    joules = 4 * 400 * (round.train_s + 0.3 * (round.total_s - round.train_s)) * plan.pace.num_rounds
    assert plan.bill.kwh == pytest.approx(joules / 3.6e6)
    assert plan.bill.money == pytest.approx(0.25 * plan.bill.kwh)
    rented = forecast(question(machines(price_per_hour=0.5))).bill
    assert rented.money == rented.rent == pytest.approx(4 * 0.5 * plan.pace.total_s / 3600)


def test_in_one_place_nothing_is_lost_to_distance() -> None:
    here = machines(line=FREE, is_processor_free=True)
    parts = {part.name: part.factor for part in forecast(question(here, method=DdpConfig())).multiplier.time}
    assert parts["exchange"] == parts["method"] == parts["uneven machines"] == 1
    assert parts["messages"] == pytest.approx(1, abs=0.03)  # owners tell together what they hold


# --- methods ---


def test_narrow_lines_want_rarer_outer_steps() -> None:
    kinds = [machines(line=Line(up_bps=bps, down_bps=bps), is_processor_free=True) for bps in (1e12, 1e8, 1e7)]
    chosen = [choose(rows(question(kind))).choices.every for kind in kinds]
    assert chosen[0] == 1
    assert chosen == sorted(chosen)
    assert chosen[-1] >= 100


def test_no_row_is_chosen_of_which_the_loss_is_not_known_or_the_rounds_are_few() -> None:
    asked = question(train=train(tokens=20_000_000))
    table = rows(asked)
    objections = {row.name: row.objection for row in table}
    assert "published" in objections["fedavg H=30 bf16"]
    assert "too few rounds: " in objections["diloco H=300 int8"]
    assert choose(table).objection == ""


def test_the_runs_own_method_is_a_row_once() -> None:
    for method in (DdpConfig(), DiLoCoConfig(every=30), DiLoCoConfig(every=77), FedAvgConfig(every=30)):
        table = rows(question(method=method))
        assert [row.is_asked for row in table].count(True) == 1
        assert len({row.name for row in table}) == len(table)


def test_where_everything_is_objected_to_the_runs_own_stays() -> None:
    asked = question(machines(line=HOME), method=FedAvgConfig(every=1000), train=train(tokens=1))
    table = [row for row in rows(asked) if row.objection]
    assert choose(table).is_asked


def test_of_a_projection_nobody_knows_the_loss() -> None:
    assert forecast(question(method=DdpConfig())).pace.penalty is not None
    assert forecast(question(method=PowerSgdConfig())).pace.penalty is None


@pytest.mark.parametrize(
    ("less", "more", "times"),
    [
        (PowerSgdConfig(), DdpConfig(), 0.1),
        (StreamingConfig(codec=Int8Config(), every=40), DiLoCoConfig(every=10), 0.26),
    ],
)
def test_what_a_round_does_not_encode_is_not_sent(less: MethodConfig, more: MethodConfig, times: float) -> None:
    fewer, all_of_it = load_of(question(method=less)), load_of(question(method=more))
    assert fewer.payload_nbytes < times * all_of_it.payload_nbytes
