"""The inner optimizers: torch's AdamW, Muon and SGD, number for number, on flat vectors."""

from collections.abc import Callable

import pytest
import torch
from benchmarks.rig.flat import two_groups

from unit.peer.tiny import MODEL
from weft.errors import CheckpointError
from weft.model.flat import FlatModel, flatten, layer_matrices
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig, OptimizerConfig
from weft.training.optimizer import build, orthogonalized


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_steps_are_those_of_torch_bit_for_bit() -> None:
    config = AdamWConfig(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.7)
    model, reference = (flatten(Transformer(MODEL), "cpu") for _ in range(2))
    for one in (model, reference):
        one.vector.copy_(initial_vector(MODEL, 1))
    mine = build(config, model)
    decayed, rest = two_groups(reference)
    theirs = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": config.weight_decay}, {"params": [rest], "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for number in range(1, 6):
        gradient = initial_vector(MODEL, 1 + number)
        model.gradient.copy_(gradient)
        reference.gradient.copy_(gradient)
        mine.step(0.1 / number)
        for group in theirs.param_groups:
            group["lr"] = 0.1 / number
        theirs.step()
    assert torch.equal(model.vector, reference.vector)
    moments = [theirs.state[group]["exp_avg_sq"] for group in (decayed, rest)]
    assert torch.equal(mine.state()["moment2"], torch.cat(moments))


def stepped(config: OptimizerConfig, reference: Callable[[FlatModel], list[torch.optim.Optimizer]]) -> list[FlatModel]:
    """Return two models after five steps on the same gradients: by our optimizer, and by torch's."""
    models = [flatten(Transformer(MODEL), "cpu") for _ in range(2)]
    for model in models:
        model.vector.copy_(initial_vector(MODEL, 1))
    mine, theirs = build(config, models[0]), reference(models[1])
    for number in range(1, 6):
        for model in models:
            model.gradient.copy_(initial_vector(MODEL, 1 + number))
        mine.step(0.1 / number)
        for optimizer in theirs:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / number
            optimizer.step()
    return models


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_sgd_is_that_of_torch(momentum: float) -> None:
    mine, theirs = stepped(
        InnerSgdConfig(momentum=momentum),
        lambda model: [torch.optim.SGD(list(two_groups(model)), lr=1.0, momentum=momentum)],
    )
    torch.testing.assert_close(mine.vector, theirs.vector, rtol=1e-6, atol=1e-7)


def test_muon_is_that_of_torch_and_adamw_takes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MuonConfig(momentum=0.9, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # in which torch multiplies, on a CPU as well

    def reference(model: FlatModel) -> list[torch.optim.Optimizer]:
        blocks, rest = list[torch.nn.Parameter](), dict[bool, list[torch.nn.Parameter]]()
        for span in layer_matrices(MODEL):
            blocks.append(torch.nn.Parameter(model.layout.view(model.vector, span)))
            blocks[-1].grad = model.layout.view(model.gradient, span)
        named = {span.name for span in layer_matrices(MODEL)}
        for span in model.layout:
            if span.name not in named:
                rest.setdefault(span.has_decay, []).append(torch.nn.Parameter(model.layout.view(model.vector, span)))
                rest[span.has_decay][-1].grad = model.layout.view(model.gradient, span)
        muon = torch.optim.Muon(
            blocks, momentum=config.momentum, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(
            [{"params": rest[True], "weight_decay": config.weight_decay}, {"params": rest[False], "weight_decay": 0.0}],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        return [muon, adamw]

    mine, theirs = stepped(config, reference)
    torch.testing.assert_close(mine.vector, theirs.vector, rtol=1e-5, atol=1e-6)


def test_every_matrix_of_a_layer_is_muons_once() -> None:
    spans, model = layer_matrices(MODEL), flatten(Transformer(MODEL), "cpu")
    inside = [span for span in model.layout if span.has_decay and span.name.startswith("layers.")]
    assert sum(span.num for span in spans) == sum(span.num for span in inside)
    assert [span.shape for span in spans[:3]] == [(32, 32), (16, 32), (16, 32)]  # queries, keys, values
    covered = torch.zeros(model.layout.num_parameters)
    for span in spans:
        covered[span.offset : span.stop] += 1
    for span in model.layout:
        assert set(covered[span.offset : span.stop].tolist()) == {1.0 if span in inside else 0.0}


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_what_is_orthogonalized_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(100 * matrix))
    assert 0.3 < float(values.min()) <= float(values.max()) < 1.3
    assert torch.equal(orthogonalized(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig(), InnerSgdConfig(momentum=0.9)])
def test_who_loads_a_state_goes_on_as_if_it_had_never_stopped(config: OptimizerConfig) -> None:
    models = [flatten(Transformer(MODEL), "cpu") for _ in range(2)]
    optimizers = [build(config, model) for model in models]
    for number in range(4):
        for model in models:
            model.gradient.copy_(initial_vector(MODEL, number))
        optimizers[0].step(0.1)
        if number == 2:
            models[1].vector.copy_(models[0].vector)
            optimizers[1].load(optimizers[0].state(), number + 1)
        elif number == 3:
            optimizers[1].step(0.1)
    assert torch.equal(models[0].vector, models[1].vector)
    assert models[0].vector.abs().sum() > 0


def test_another_models_state_is_refused_before_anything_changes() -> None:
    optimizer = build(MuonConfig(), flatten(Transformer(MODEL), "cpu"))
    state = optimizer.state()
    with pytest.raises(CheckpointError, match="moment2 should hold"):
        optimizer.load({**state, "momentum": state["momentum"] + 1, "moment2": torch.zeros(3)}, 1)
    assert not optimizer.state()["momentum"].any()


def test_the_state_is_the_optimizers_own_memory() -> None:
    model = flatten(Transformer(MODEL), "cpu")
    optimizer = build(AdamWConfig(), model)
    state = optimizer.state()
    model.gradient.fill_(1.0)
    optimizer.step(0.1)
    assert state["moment1"].sum() > 0
