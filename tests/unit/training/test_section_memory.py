"""What holding a section takes of memory, against the tensors themselves."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from weft.codec.config import Bf16Config
from weft.cost import pipeline as cost_pipeline
from weft.model.config import ModelConfig
from weft.model.flat import flatten
from weft.model.sections import sections
from weft.model.transformer import SectionModule
from weft.pipeline.codec.activations import LplrConfig, SubspaceConfig
from weft.pipeline.config import PipelineConfig
from weft.run.config import TrainConfig
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, OptimizerConfig
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, spell_out
from weft.sync.method.schedule import ConstantConfig
from weft.training import optimizer as inner
from weft.training.device import Device
from weft.training.section_memory import (
    Holding,
    least_nbytes,
    most_taken,
    needed_nbytes,
    section_memory,
    shape_of,
    usual_taken,
)

MODEL = ModelConfig(
    vocab_size=300, num_layers=7, num_heads=4, num_kv_heads=2, width=64, ffn_width=96, max_seq_len=32, has_qk_norm=True
)


def train(optimizer: OptimizerConfig = AdamWConfig()) -> TrainConfig:  # noqa: B008
    return TrainConfig(seq_len=32, batch_size=8, tokens=10**6, schedule=ConstantConfig(), optimizer=optimizer)


def holding(**fields: Any) -> Holding:
    usual: dict[str, Any] = {
        "model": MODEL,
        "train": train(),
        "choices": spell_out(DiLoCoConfig(every=30), 3),
        "pipeline": PipelineConfig(micro_batch=2),
    }
    return Holding(**(usual | fields))


def tensors_nbytes(*found: torch.Tensor) -> int:
    return sum(each.untyped_storage().nbytes() for each in found)


@pytest.mark.parametrize("optimizer", [AdamWConfig(), InnerSgdConfig(momentum=0.9), InnerSgdConfig(momentum=0.0)])
@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_parameters_gradient_and_moments_are_those_of_the_tensors(num: int, optimizer: OptimizerConfig) -> None:
    for section in sections(MODEL, num):
        flat = flatten(SectionModule(MODEL, section), "cpu")
        made = inner.build(optimizer, flat)
        memory = section_memory(holding(train=train(optimizer)), section, num_members=3, num_taken=4)
        assert memory.local == tensors_nbytes(flat.vector)
        assert memory.gradient == tensors_nbytes(flat.gradient)
        assert memory.inner_optimizer == tensors_nbytes(*made.state().values())


def test_outer_state_is_the_sections_alone() -> None:
    whole, *_ = sections(MODEL, 1)
    parts = [section_memory(holding(), each, num_members=3, num_taken=1) for each in sections(MODEL, 3)]
    one = section_memory(holding(), whole, num_members=3, num_taken=1)
    for name in ("local", "gradient", "inner_optimizer", "outer", "outer_optimizer", "merged"):
        assert sum(getattr(part, name) for part in parts) == getattr(one, name), name


def test_activations_grow_with_what_is_under_way() -> None:
    section = sections(MODEL, 3)[1]
    memories = [section_memory(holding(), section, num_members=3, num_taken=num) for num in (1, 2, 5)]
    each = cost_pipeline.under_way_nbytes(shape_of(MODEL, section), holding().micro)
    assert [b.activations - a.activations for a, b in pairwise(memories)] == [each, 3 * each]
    assert memories[2].peak_nbytes - memories[0].peak_nbytes == 4 * each


def test_the_largest_section_decides_who_can_join() -> None:
    cuts = sections(MODEL, 3)
    needs = [section_memory(holding(), cut, num_members=1, num_taken=1).on_cpu for cut in cuts]
    assert least_nbytes(holding(), cuts) == cost_pipeline.BASE_NBYTES + max(needs)
    assert least_nbytes(holding(), sections(MODEL, 7)) < least_nbytes(holding(), cuts)


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [(Bf16Config(), 2 * 2 * 32 * 64), (SubspaceConfig(rank=8), 2 * 2 * 32 * 8), (LplrConfig(rank=4), None)],
    ids=repr,
)
def test_bytes_of_a_micro_batch_are_its_codecs(config: Any, nbytes: int | None) -> None:
    micro = holding(pipeline=PipelineConfig(micro_batch=2, activations=config)).micro
    assert micro.num_samples == 2
    assert 0 < micro.activations_nbytes < 4 * 2 * 32 * 64
    assert nbytes is None or micro.activations_nbytes == micro.gradients_nbytes == nbytes
    assert holding(pipeline=PipelineConfig(micro_batch=100)).micro.num_samples == 8


def test_a_member_keeps_its_share_of_what_is_under_way() -> None:
    assert usual_taken(3) == 6
    assert usual_taken(3, num_first=4, num_members=4) == 6
    assert usual_taken(3, num_first=1, num_members=2) == 3
    assert usual_taken(3, num_first=8, num_members=2) == 16
    assert usual_taken(20) == 16


def test_on_a_gpu_lies_what_is_trained_with() -> None:
    section = sections(MODEL, 3)[0]
    for method, has_moments in ((DiLoCoConfig(every=30), True), (DdpConfig(), False)):
        choices = spell_out(method, 3)
        memory = section_memory(holding(choices=choices), section, num_members=3, num_taken=2)
        device, host = memory.on_gpu
        moments = memory.inner_optimizer if has_moments else 0
        assert device == memory.local + memory.gradient + moments + max(memory.activations, memory.local)
        assert host == memory.peak_nbytes - memory.activations - memory.gradient - moments


CPU = Device(torch.device("cpu"), "fp32", "cpu")
GPU = Device(torch.device("cuda:0"), "bf16", "gpu")


def test_what_a_member_needs_is_told_by_place() -> None:
    section = sections(MODEL, 3)[2]
    memory = section_memory(holding(), section, num_members=4, num_taken=2)
    half = section_memory(holding(), section, num_members=4, num_taken=2, is_half=True)
    assert needed_nbytes(holding(), section, CPU, num_taken=2) == {"cpu": memory.on_cpu}
    device, host = half.on_gpu
    assert needed_nbytes(holding(), section, GPU, num_taken=2) == {"cpu": host, "cuda:0": device}


def test_as_many_micro_batches_are_kept_as_fit() -> None:
    section = sections(MODEL, 3)[1]
    needed = {num: needed_nbytes(holding(), section, CPU, num_taken=num)["cpu"] for num in (1, 2, 4, 8, 16)}
    for free, num_taken in (
        (10 * needed[16], 16),
        (int(needed[16] / 0.9) + 2, 16),
        (int(needed[16] / 0.9) - 2, 8),
        (int(needed[4] / 0.9) - 2, 2),
        (int(needed[1] / 0.9) - 2, 0),
    ):
        assert most_taken(holding(), section, CPU, {"cpu": free}) == num_taken
    few = most_taken(holding(), section, CPU, {"cpu": int(needed[8] / 0.9)})
    assert most_taken(holding(), section, CPU, {"cpu": int(needed[8] / 0.9)}, has_recompute=True) > few
    plenty = 10**12
    assert most_taken(holding(), section, GPU, {"cpu": plenty, "cuda:0": 1000}) == 0
    assert most_taken(holding(), section, GPU, {"cpu": 1000, "cuda:0": plenty}) == 0
    assert most_taken(holding(), section, GPU, {"cpu": plenty, "cuda:0": plenty}) == 16
