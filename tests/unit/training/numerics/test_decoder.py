"""Training steps in exact numbers: near the plain ones, and the same to the bit wherever they are made."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from unit.peer.tiny import run_config
from unit.training.numerics import exact_program
from unit.training.numerics.exact_program import digest_after
from weft.errors import ConfigError
from weft.model.config import Llama3Scaling, ModelConfig, YarnScaling
from weft.model.flat import FlatModel, flatten, over
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.run.trust import AuditedTrust
from weft.sync.merge.outer import norm
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig, OptimizerConfig
from weft.training.numerics.arithmetic import Exact, Fast, arithmetic_of
from weft.training.numerics.decoder import loss
from weft.training.optimizer import build

# Regenerated only on purpose: another digest means that a run's old and new members take each other for cheats.
GOLDEN = "65a18b16ce33947a4476173ea91e166a22d9ea74480f31be8088ff349933f00e"

BASE = ModelConfig(
    vocab_size=61, num_layers=2, num_heads=4, num_kv_heads=2, width=32, ffn_width=48, max_seq_len=96, is_tied=True
)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "queries and keys normed": {"has_qk_norm": True},
    "biases": {"has_qkv_bias": True, "has_out_bias": True},
    "head apart": {"is_tied": False},
    "one key head": {"num_kv_heads": 1},
    "wide heads": {"head_width": 24},
    "window": {"window": 7, "first_windowed": 1},
    "yarn": {"yarn": YarnScaling(factor=4.0, score_factor=1.1, original_seq_len=32)},
    "stretched": {"rope_scaling": Llama3Scaling(factor=8.0, original_seq_len=32)},
}
TEXTS = torch.cat((torch.arange(50), torch.arange(20))).repeat(3, 1)


def model(config: ModelConfig, *, has_recompute: bool = False) -> FlatModel:
    with torch.device("meta"):
        module = Transformer(config, has_recompute=has_recompute)
    noise = torch.randn(initial_vector(config, 1).shape, generator=torch.Generator().manual_seed(2))
    return over(module, initial_vector(config, 1) + 0.05 * noise)


def batch(has_rows: bool) -> tuple[Tensor, ...]:
    tokens, targets = torch.randint(0, 61, (2, 3, 70), generator=torch.Generator().manual_seed(3))
    if not has_rows:
        return tokens, targets
    targets[:, ::3] = -100
    return tokens, targets, TEXTS


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_near_the_plain_ones(form: str, has_rows: bool) -> None:
    config, given = replace(BASE, **FORMS[form]), batch(has_rows)
    plain, exact = model(config), model(config)
    expected, found = plain.module.loss(*given), loss(exact.module, *given)
    torch.autograd.backward((expected, found))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for span in plain.layout:
        one, other = (each.layout.view(each.gradient, span) for each in (exact, plain))
        assert (one - other).norm() <= 2e-5 * other.norm(), span.name


def test_blocks_that_are_computed_again_come_to_the_same_bits() -> None:
    found = []
    for has_recompute in (False, True):
        exact = model(replace(BASE, has_qk_norm=True), has_recompute=has_recompute)
        loss(exact.module, *batch(True)).backward()  # type: ignore[no-untyped-call]
        found.append(exact.gradient)
    assert torch.equal(*found)


def test_what_is_not_a_number_does_not_become_one() -> None:
    exact = model(BASE)
    exact.vector[100] = torch.nan
    found = loss(exact.module, *batch(False))
    found.backward()  # type: ignore[no-untyped-call]
    assert found.isnan()
    assert not Exact().norm(exact.gradient).isfinite()


# --- training steps ---


@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.slow)])  # threads wait for each other
def test_training_steps_are_the_same_to_the_bit_with_any_number_of_threads(num_threads: int, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert digest_after(num_threads, tmp_path) == GOLDEN
    finally:
        torch.set_num_threads(before)


PROCESSORS = {
    "all": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE4": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_training_steps_are_the_same_to_the_bit_on_every_kind_of_processor(
    processor: str, num_threads: int, tmp_path: Path
) -> None:
    program = Path(exact_program.__file__)
    done = subprocess.run(
        [sys.executable, str(program), str(num_threads), str(tmp_path)],
        env=os.environ | PROCESSORS[processor] | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == GOLDEN


@pytest.mark.parametrize("config", [AdamWConfig(weight_decay=0.3), InnerSgdConfig(momentum=0.9), InnerSgdConfig()])
def test_an_exact_optimizer_steps_as_the_fast_one_and_goes_on_where_it_was(config: OptimizerConfig) -> None:
    models = [flatten(Transformer(BASE), "cpu") for _ in range(3)]
    for each in models:
        each.vector.copy_(initial_vector(BASE, 1))
    fast, exact, later = build(config, models[0]), *(Exact().optimizer(config, each) for each in models[1:])
    for number in range(1, 6):
        for each in models:
            each.gradient.copy_(initial_vector(BASE, 1 + number))
        if number == 4:
            models[2].vector.copy_(models[1].vector)
            later.load(exact.state(), 3)
        for each in (fast, exact, *([later] if number >= 4 else [])):
            each.step(0.1 / number)
    torch.testing.assert_close(models[1].vector, models[0].vector, rtol=1e-5, atol=1e-6)
    assert torch.equal(models[2].vector, models[1].vector)
    assert exact.state().keys() == fast.state().keys()


def test_a_run_says_in_which_numbers_it_trains() -> None:
    run = run_config()
    assert isinstance(arithmetic_of(run), Fast)
    assert isinstance(arithmetic_of(replace(run, trust=AuditedTrust())), Fast)
    assert isinstance(arithmetic_of(replace(run, trust=AuditedTrust(numerics="exact"))), Exact)
    with pytest.raises(ConfigError, match="muon"):
        Exact().optimizer(MuonConfig(), model(BASE))


def test_length_and_pull_are_those_of_plain_numbers() -> None:
    x, center, g = (initial_vector(BASE, seed) for seed in (1, 2, 3))
    found, expected = g.clone(), g.clone()
    Exact().pull(found, x, center, 0.3)
    Fast().pull(expected, x, center, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert Exact().norm(g) == norm(g)
    assert Exact().norm(g).item() == pytest.approx(Fast().norm(g).item())
