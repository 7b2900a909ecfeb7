"""Mixtures against a layer written out token by token; and of one expert, of equal ones, or of less than there were."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from weft.compose.experts.mixture import (
    STAGES,
    Mixture,
    MixtureConfig,
    MixtureFFN,
    Stage,
    balance,
    is_trained,
    mix,
    mixture_layout,
    over,
    without,
)
from weft.compose.experts.soup import Ingredient
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import AdapterConfig, ModelConfig
from weft.model.flat import assemble, layout
from weft.model.initial import initial_vector
from weft.model.layers import KVCache

PARENT = Digest("a" * 64)


def small(**fields: Any) -> ModelConfig:
    tree = {"vocab_size": 11, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "width": 16, "ffn_width": 24}
    return msgspec.convert({**tree, "max_seq_len": 32, **fields}, ModelConfig)


def experts(num: int, config: ModelConfig) -> list[Ingredient]:
    """Return models that went apart from one, far enough that it matters which of them computes."""
    start, found = initial_vector(config, 0), list[Ingredient]()
    for each in range(num):
        vector = (start + initial_vector(config, each + 1)) / 2
        vector[: layout(config).num_decayed] *= 12
        found.append(Ingredient(f"e{each}", vector, PARENT))
    return found


def mixture(num: int = 3, top_k: int = 2, **fields: Any) -> tuple[MixtureConfig, Tensor]:
    config = small(**fields)
    mixed, vector = mix(config, experts(num, config), seed=1, top_k=top_k)
    for span in mixture_layout(mixed):  # a router that is sure of something
        if ".router." in span.name:
            vector[span.offset : span.stop] *= 20
    return mixed, vector


def evaluated(config: MixtureConfig, vector: Tensor) -> Mixture:
    return over(config, vector)[0].requires_grad_(False).eval()


def tokens_of(config: MixtureConfig | ModelConfig, seed: int = 0) -> Tensor:
    model = config.model if isinstance(config, MixtureConfig) else config
    return torch.randint(0, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(seed))


def reference_ffn(ffn: MixtureFFN, x: Tensor) -> Tensor:
    """Return what a layer of Branch-Train-MiX computes, token by token: sum of softmax(top k of W x)_j * ffn_j(x)."""
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            scores = [float(weight @ x[row, t]) for weight in ffn.router.weight]
            chosen = sorted(range(len(scores)), key=lambda j: -scores[j])[: ffn.top_k]
            powers = {j: torch.tensor(scores[j]).exp() for j in chosen}
            for j in chosen:
                expert: Any = ffn.experts[j]
                gate, up = (expert.gate_up.weight @ x[row, t]).chunk(2)
                out[row, t] += powers[j] / sum(powers.values()) * (expert.down.weight @ (silu(gate) * up))
    return out


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_layer_computes_what_the_formula_says(top_k: int) -> None:
    config, vector = mixture(top_k=top_k)
    ffn: Any = evaluated(config, vector).layers["0"].ffn
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ffn(x), reference_ffn(ffn, x), atol=1e-5, rtol=1e-5)
    chosen = (x @ ffn.router.weight.T).argmax(-1)
    assert len(chosen.unique()) > 1


@pytest.mark.parametrize("is_tied", [False, True])
def test_one_expert_and_equal_experts_are_that_expert(is_tied: bool) -> None:
    config = small(is_tied=is_tied)
    one = experts(1, config)[0]
    tokens = tokens_of(config)
    expected = assemble(config, one.vector)(tokens)
    for num in (1, 4):
        found = evaluated(*mix(config, [one] * num, seed=1))
        assert found.mixture.top_k == min(2, num)
        torch.testing.assert_close(found(tokens), expected, atol=1e-4, rtol=1e-4)


def test_feed_forward_networks_are_the_experts_own_and_all_else_is_their_mean() -> None:
    config = small()
    given = experts(3, config)
    mixed, vector = mix(config, given, seed=1)
    there, plain = mixture_layout(mixed), {span.name: span for span in layout(config)}
    for span in there:
        part = there.view(vector, span)
        if ".ffn.router." in span.name:
            assert 0.015 < part.std() < 0.025
            assert part.abs().max() < 0.04
        elif ".ffn.experts." in span.name:
            layer, _, rest = span.name.partition(".ffn.experts.")
            number, _, leaf = rest.partition(".")
            own = layout(config).view(given[int(number)].vector, plain[f"{layer}.ffn.{leaf}"])
            assert torch.equal(part, own)
        else:
            whole = [layout(config).view(each.vector, plain[span.name]) for each in given]
            torch.testing.assert_close(part, torch.stack(whole).mean(0))
    assert torch.equal(mix(config, given, seed=1)[1], vector)
    assert not torch.equal(mix(config, given, seed=2)[1], vector)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_layout_names_every_parameter_once_and_those_that_decay_first(is_tied: bool) -> None:
    config, vector = mixture(is_tied=is_tied)
    spans, module = mixture_layout(config), evaluated(config, vector)
    assert {span.name: span.shape for span in spans} == {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    }
    assert spans.spans[0].offset == 0
    assert all(one.stop == other.offset for one, other in pairwise(spans))
    assert spans.spans[-1].stop == spans.num_parameters == vector.numel()
    assert [span.has_decay for span in spans] == sorted((span.has_decay for span in spans), reverse=True)
    assert all(span.has_decay == (len(span.shape) == 2) for span in spans)
    assert spans.num_decayed == sum(span.num for span in spans if span.has_decay)


def test_writing_the_vector_changes_the_mixture_and_gradients_are_views() -> None:
    config, vector = mixture()
    module, gradient = over(config, vector)
    tokens = tokens_of(config)
    module.train().trained_loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert gradient.count_nonzero() > 0.5 * gradient.numel()
    before = module.loss(tokens[:, :-1], tokens[:, 1:])
    with torch.no_grad():
        vector -= 0.05 * gradient
    assert module.loss(tokens[:, :-1], tokens[:, 1:]) < before


def test_a_cache_gives_the_logits_of_the_whole() -> None:
    config, vector = mixture()
    module, tokens = evaluated(config, vector), tokens_of(config)
    cache = KVCache(config.model, batch=2, capacity=12, dtype=torch.float32, device=torch.device("cpu"))
    parts = [module(tokens[:, :5], cache), *(module(tokens[:, t : t + 1], cache) for t in range(5, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), module(tokens), atol=1e-5, rtol=1e-5)


def test_the_balance_is_1_where_all_get_equally_many_and_the_number_of_experts_where_one_gets_all() -> None:
    even = torch.full((8, 4), 0.25)
    assert float(balance(even, torch.arange(8)[:, None] % 4)) == pytest.approx(1.0)
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(8, 1)
    assert float(balance(one, torch.zeros(8, 1, dtype=torch.int64))) == pytest.approx(4.0)
    # E sum f P, by hand, of two choices each.
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]])
    expected = 3 * (2 / 4 * 0.55 + 1 / 4 * 0.2 + 1 / 4 * 0.25)
    assert float(balance(probabilities, probabilities.topk(2).indices)) == pytest.approx(expected)


def test_the_balance_moves_tokens_away_from_whom_most_are_sent_to() -> None:
    scores = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    scores[:, 2] += 1.0
    scores.requires_grad_()
    probabilities = scores.softmax(-1)
    uneven = balance(probabilities, probabilities.topk(2).indices)
    uneven.backward()
    assert scores.grad is not None
    assert (scores.grad[:, 2] > 0).all()
    evened = (scores - 30 * scores.grad).softmax(-1)
    assert 1 < balance(evened, evened.topk(2).indices) < uneven


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_what_those_before_it_do_and_more(stage: Stage) -> None:
    config, vector = mixture()
    module, gradient = over(config, vector)
    module.train().thaw(stage)
    tokens = tokens_of(config)
    module.trained_loss(tokens[:, :-1], tokens[:, 1:]).backward()
    spans = mixture_layout(config)
    moved = {span.name for span in spans if spans.view(gradient, span).any()}
    names = {span.name for span in spans if is_trained(span.name, stage)}
    assert moved <= names
    assert {name for name in names if ".experts." not in name} <= moved  # an expert may have had no token
    assert {
        "router": {"layers.0.ffn.router.weight", "layers.1.ffn.router.weight"},
        "ends": {"embed.weight", "norm.weight", "head.weight"},
        "attention": {"layers.0.attention.qkv.weight", "layers.1.ffn_norm.weight"},
        "all": {"layers.0.ffn.experts.0.down.weight"},
    }[stage] <= names
    before = STAGES[max(STAGES.index(stage) - 1, 0)]
    assert {span.name for span in spans if is_trained(span.name, before)} <= names


@pytest.mark.parametrize("expert", [0, 1, 3])
def test_without_an_expert_the_rest_computes_as_if_it_had_never_been_a_choice(expert: int) -> None:
    config, vector = mixture(num=4)
    rest, part = without(config, vector, expert)
    assert rest.num_experts == 3
    module, tokens = evaluated(config, vector), tokens_of(config)
    chosen = list[Tensor]()
    for block in module.layers.values():
        router: Any = block.ffn.router  # type: ignore[union-attr]
        router.register_forward_hook(lambda _module, _given, scores: chosen.append(scores.topk(2, -1).indices))
    module(tokens)
    assert torch.cat(chosen).eq(expert).any()  # it was asked
    for block in module.layers.values():
        block.ffn.router.register_forward_hook(  # type: ignore[union-attr]
            lambda _module, _given, scores: scores.index_fill(-1, torch.tensor([expert]), -torch.inf)
        )
    torch.testing.assert_close(evaluated(rest, part)(tokens), module(tokens), atol=1e-5, rtol=1e-5)


def test_experts_go_one_after_the_other_down_to_one() -> None:
    config, vector = mixture(num=3)
    for num in (2, 1):
        config, vector = without(config, vector, 0)
        assert (config.num_experts, config.top_k) == (num, min(2, num))
    evaluated(config, vector)(tokens_of(config))
    with pytest.raises(ConfigError, match="where another remains"):
        without(config, vector, 0)


def test_an_expert_that_is_not_there_is_not_taken_out() -> None:
    config, vector = mixture()
    for expert in (-1, 3):
        with pytest.raises(ConfigError, match="Allowed: 0 to 2"):
            without(config, vector, expert)


def test_experts_of_several_beginnings_or_sizes_are_refused() -> None:
    config = small()
    one, other = experts(2, config)
    with pytest.raises(ConfigError, match="an ensemble"):
        mix(config, [one, Ingredient("x", other.vector, Digest("b" * 64))], seed=1)
    with pytest.raises(ConfigError, match="different configs"):
        mix(small(width=32), [one, other], seed=1)
    with pytest.raises(ConfigError, match="different configs"):
        over(MixtureConfig(model=config, num_experts=2), one.vector)


def test_configs_that_no_mixture_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        MixtureConfig(model=small(), num_experts=1, top_k=2)
    with pytest.raises(ConfigError, match="whole models"):
        MixtureConfig(model=small(adapter=AdapterConfig(rank=2)), num_experts=2)
