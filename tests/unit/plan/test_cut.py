"""Runs with stages, planned: who holds what, what follows, and how many stages suit."""

from typing import Any

import msgspec
import pytest

from unit.plan.asked import MODEL, machines, question, train
from weft.cost import training as cost
from weft.errors import ConfigError, TooLarge
from weft.model.config import named
from weft.model.sections import sections
from weft.pipeline.config import PipelineConfig
from weft.plan.cut import able, best_stages, planned
from weft.plan.question import Machines
from weft.plan.timing import Line
from weft.sync.method.presets import AsyncDiLoCoConfig, DdpConfig, DiLoCoConfig, spell_out
from weft.training.device import decoder
from weft.training.section_memory import Holding, section_memory

UNTIED = msgspec.structs.replace(MODEL, is_tied=False)
LARGE = msgspec.structs.replace(named("7b", 32_000, 1024), is_tied=False)
FAST = Line(up_bps=1e12, down_bps=1e12)
PIPELINE = PipelineConfig(micro_batch=2)


def free(count: int = 8, name: str = "peers", **fields: Any) -> Machines:
    """Return machines whose processors serve in no time, on lines that hardly matter."""
    usual: dict[str, Any] = {"line": FAST, "is_processor_free": True}
    return machines(name, count, **(usual | fields))


def test_steps_without_a_network_are_the_model_shared_out() -> None:
    # 35m cut in two: of 6 layers 4 lie before, 2 and the head behind; each of as many peers computes its share.
    asked = question(free(2, tokens_per_s=1000.0), model=UNTIED)
    found = planned(asked, PIPELINE, 2)
    shares = [stage.micro_per_s for stage in found.stages]
    whole_s = 2 * 1024 / 1000.0
    assert sum(1 / each for each in shares) == pytest.approx(whole_s)
    assert found.num_micro == 4
    assert found.step.compute_s == pytest.approx(4 / min(shares))
    assert found.tokens == 30 * 8 * 1024
    assert found.tokens_per_s == pytest.approx(found.tokens / found.round_s)
    assert [len(stage.section.layers) for stage in found.stages] == [len(cut.layers) for cut in sections(UNTIED, 2)]


def test_each_machine_goes_to_the_weakest_stage() -> None:
    found = planned(question(free(9), free(3, "slow", tokens_per_s=10_000.0), model=UNTIED), PIPELINE, 3)
    assert sum(stage.num_members for stage in found.stages) == 12
    rates = [stage.micro_per_s for stage in found.stages]
    one = 20_000 / (2 * 1024) * cost.flops_per_token(decoder(UNTIED), 1024)  # operations a second, in micro-batches
    assert one > 0
    assert max(rates) < 2 * min(rates)
    assert {each.machines for stage in found.stages for each in stage.held} == {"peers", "slow"}


def test_who_lacks_the_memory_for_a_section_holds_another() -> None:
    model = msgspec.structs.replace(UNTIED, vocab_size=200_000)  # end sections are far larger than the middle ones
    holding = Holding(model=model, train=train(), choices=spell_out(DiLoCoConfig(every=30), 6), pipeline=PIPELINE)
    cuts = sections(model, 3)
    needs = [section_memory(holding, cut, num_members=2, num_taken=1).on_cpu for cut in cuts]
    assert needs[1] < needs[0] < needs[2]
    small = free(4, "small", memory_nbytes=float(needs[0]))
    large = free(2, "large", memory_nbytes=1e12)
    found = planned(question(small, large, model=model), PIPELINE, 3)
    assert {each.machines for each in found.stages[2].held} == {"large"}
    assert all(each.machines != "small" for each in found.stages[0].held)
    with pytest.raises(TooLarge, match="no machine is left that can hold section"):
        planned(question(small, model=model), PIPELINE, 3)
    assert able(question(small, model=model), PIPELINE, 3, [small, large]) == ["large"]


def test_where_memory_ends_fewer_micro_batches_are_kept() -> None:
    roomy = planned(question(free(8, memory_nbytes=1e12), model=UNTIED), PIPELINE, 4).stages[3].held[0]
    tight = free(8, memory_nbytes=roomy.on_host / 0.91)  # the largest section, and 0.9 of it may be planned for
    held = planned(question(tight, model=UNTIED), PIPELINE, 4).stages[3].held[0]
    assert 2 <= roomy.num_taken <= 8
    assert held.num_taken == roomy.num_taken // 2
    assert held.on_host < roomy.on_host


def test_a_stage_exchanges_its_section_among_its_members() -> None:
    asked = question(machines(count=8), model=UNTIED)
    found, whole = planned(asked, PIPELINE, 2), cost.vector_nbytes(asked.num_parameters) / 4
    for stage in found.stages:
        num = stage.num_members
        micro = (
            found.num_steps * found.num_micro / num * found.between.total_nbytes
        )  # of an end stage: sent and received
        moved = stage.traffic.sent_nbytes + stage.traffic.received_nbytes
        rounds = 2 * (num - 1) / num * 2 * stage.num_parameters * (1 + 4 / 256)  # int8, both halves, both ways
        assert moved == pytest.approx(micro + rounds, rel=0.01)
        assert stage.num_parameters < whole
    assert found.exchange_s > 0


def test_ddp_exchanges_after_each_step() -> None:
    ddp = planned(question(machines(count=4), method=DdpConfig(), model=UNTIED), PIPELINE, 2)
    diloco = planned(question(machines(count=4), model=UNTIED), PIPELINE, 2)
    assert (ddp.num_steps, diloco.num_steps) == (1, 30)
    assert ddp.tokens_per_s < diloco.tokens_per_s


def test_fewer_bytes_a_number_cross_faster() -> None:
    speeds = []
    for config in ({"type": "fp32"}, {"type": "bf16"}, {"type": "int8"}, {"type": "int4"}):
        pipeline = msgspec.convert({"micro_batch": 2, "activations": config}, PipelineConfig)
        speeds.append(planned(question(machines(count=6), model=UNTIED), pipeline, 3).tokens_per_s)
    assert speeds == sorted(set(speeds))


@pytest.mark.parametrize(
    ("changes", "num", "words"),
    [
        ({"model": MODEL}, 2, "tied to its head"),
        ({}, 7, "of a model of 6 layers"),
        ({"method": AsyncDiLoCoConfig()}, 2, "all members of a stage make each round together"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], num: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(question(free(8), **({"model": UNTIED} | changes)), PIPELINE, num)


def test_more_stages_than_peers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 among 2 peers"):
        planned(question(free(2), model=UNTIED), PIPELINE, 3)


# --- how many ---


def test_whole_models_are_best_where_they_fit() -> None:
    best = best_stages(question(machines(count=8), model=UNTIED), PIPELINE)
    assert best.num_stages == 1
    assert best.why.startswith("whole models fit all machines")
    assert set(best.cuts) == {2, 3, 4, 5, 6}


def test_stages_are_best_where_whole_models_do_not_fit() -> None:
    gpus = machines(count=16, memory_nbytes=24e9, is_gpu=True, is_half=True, line=Line(up_bps=1e9, down_bps=1e9))
    best = best_stages(question(gpus, model=LARGE), PipelineConfig())
    assert best.num_stages == max(best.cuts, key=lambda num: best.cuts[num].tokens_per_s)
    assert best.num_stages > 4
    assert "no machine has the memory for the whole model" in best.why
    assert all(whole.objection == "does not fit any machine" for whole in best.whole)


@pytest.mark.full
def test_a_few_machines_that_hold_whole_models_lose_to_many_that_do_not() -> None:
    small = free(30, "small", memory_nbytes=24e9, is_gpu=True, is_half=True)
    large = free(2, "large", memory_nbytes=400e9, is_gpu=True, is_half=True)
    best = best_stages(question(small, large, model=LARGE), PipelineConfig())
    assert best.num_stages > 1
    assert all(whole.objection == "fits 2 of 32 machines" for whole in best.whole)
    assert "whole models" in best.why


def test_a_tied_model_is_not_cut() -> None:
    best = best_stages(question(free(8)), PIPELINE)
    assert (best.num_stages, best.cuts) == (1, {})
    assert "tied" in best.why
    with pytest.raises(ConfigError, match="no machine has the memory"):
        best_stages(question(free(8, memory_nbytes=1e6)), PIPELINE)
