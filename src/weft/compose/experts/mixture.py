"""Experts in one model: their feed-forward networks stand side by side in each layer, behind a router.

    expert 0 ──ffn──┐                                   x ─► norm ─► router ─► top 2 of p = softmax(W x)
    expert 1 ──ffn──┼─► layer of the mixture                └─► y = sum over the chosen of p_j / sum p * ffn_j(x)
    attention, norms, embedding, head ──mean──► those of the mixture

All experts were branched from one model, so what is not feed-forward can be averaged. Then the mixture is trained for a
little, stage by stage: first the router alone, then the ends, attention and norms, all (`STAGES`). A term of the loss
keeps the router from sending all tokens to few experts.

It is a `Transformer` whose blocks have another `ffn`: caches, losses and drawing are its own. Its vector is laid out as
that of a plain model, with the feed-forward networks of a layer one after the other.

Who opts out is taken out (`without`): its networks and its rows of the router. What it has given to the averages stays
in them; to take that out, too, mix again without it, or train experts with everything else frozen, as FlexOlmo
(arXiv:2507.07024) does.

Branch-Train-MiX: arXiv:2403.07816, section 3; stages: BAR, arXiv:2604.18473; the balance: Switch Transformers,
arXiv:2101.03961, equations 4 to 6.
"""

from collections.abc import Iterator, Sequence
from math import prod, sqrt
from typing import Annotated, Literal, cast, get_args

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from msgspec import Meta
from torch import Tensor, nn

from weft import rng
from weft.compose.experts.soup import Ingredient, mean, require_one_parent
from weft.config import Config
from weft.errors import ConfigError
from weft.model.config import ModelConfig, plain
from weft.model.flat import Layout, Span, layout
from weft.model.initial import STD
from weft.model.layers import SwiGLU
from weft.model.transformer import Transformer

MAX_EXPERTS = 256
BALANCE = 0.01  # how much the balance counts in the loss: Switch, section 2.2; the same in Branch-Train-MiX

Stage = Literal["router", "ends", "attention", "all"]
STAGES: tuple[Stage, ...] = get_args(Stage)  # each trains what those before it do, and more


class MixtureConfig(Config, frozen=True, kw_only=True):
    """A decoder of which each layer has several feed-forward networks."""

    model: ModelConfig
    """What one expert alone is."""
    num_experts: Annotated[int, Meta(ge=1, le=MAX_EXPERTS, description="feed-forward networks in each layer")]
    top_k: Annotated[int, Meta(ge=1, le=MAX_EXPERTS, description="of them that compute a token")] = 2

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ConfigError(f"mixture.top_k: must be at most num_experts = {self.num_experts}. Found {self.top_k}.")
        if plain(self.model) != self.model:
            raise ConfigError("mixture.model: parts of it lie elsewhere. Experts of a mixture are whole models.")


class MixtureFFN(nn.Module):
    """The feed-forward networks of a layer; each token is computed by the `top_k` that the router holds likeliest."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.model.width, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config.model) for _ in range(config.num_experts))
        self.top_k = config.top_k
        self.balance: Float[Tensor, ""] | None = None  # of the last batch that was trained on

    def forward(self, x_BTC: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        x_NC = x_BTC.flatten(0, 1)
        probabilities = self.router(x_NC).float().softmax(-1)
        shares, chosen = probabilities.topk(self.top_k, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        if self.training:
            self.balance = balance(probabilities, chosen)
        y_NC = torch.zeros_like(x_NC)
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                computed = expert(x_NC[None, tokens])[0] * shares[tokens, place, None]
                y_NC.index_add_(0, tokens, computed.to(y_NC.dtype))
        return y_NC.view_as(x_BTC)


def balance(probabilities: Float[Tensor, "tokens experts"], chosen: Int64[Tensor, "tokens top"]) -> Float[Tensor, ""]:
    """Return how unevenly tokens are sent to experts: 1 where all get equally many, the number of experts at worst."""
    # E sum_i f_i P_i: f_i is the share of choices that fell on i, P_i its mean probability, which has a gradient.
    num_experts = probabilities.shape[1]
    f = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
    return num_experts * (f * probabilities.mean(0)).sum()


class Mixture(Transformer):
    """A whole decoder whose layers have several feed-forward networks."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config.model)
        self.mixture = config
        for block in self.layers.values():
            block.ffn = MixtureFFN(config)

    @property
    def balance(self) -> Float[Tensor, ""]:
        """Return how unevenly the last batch that was trained on was sent to experts, the mean of all layers."""
        found = [cast(MixtureFFN, block.ffn).balance for block in self.layers.values()]
        assert all(each is not None for each in found), "a balance is that of a batch that was trained on"
        return torch.stack(cast(list[Tensor], found)).mean()

    def trained_loss(
        self, tokens: Int64[Tensor, "batch tokens"], targets: Int64[Tensor, "batch tokens"], weight: float = BALANCE
    ) -> Float[Tensor, ""]:
        """Return what a training step lowers: the loss, and `weight` of the balance."""
        return self.loss(tokens, targets) + weight * self.balance

    def thaw(self, stage: Stage) -> None:
        """Give gradients to what is trained in a stage, and to nothing else."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_trained(name, stage))


def is_trained(name: str, stage: Stage) -> bool:
    """Return whether a tensor of the mixture is trained in a stage."""
    return STAGES.index(_stage_of(name)) <= STAGES.index(stage)


def _stage_of(name: str) -> Stage:
    """Return the first stage that trains a tensor."""
    if not name.startswith("layers."):
        return "ends"
    if ".ffn.router." in name:
        return "router"
    return "all" if ".ffn.experts." in name else "attention"


# --- its vector ---


def mixture_layout(config: MixtureConfig) -> Layout:
    """Return where each tensor lies, as `weft.model.flat.layout` does of a plain model."""
    spans: list[Span] = []
    offset = 0
    for name, shape, has_decay in _shapes(config):
        spans.append(Span(name, shape, offset, has_decay))
        offset += prod(shape)
    return Layout(tuple(spans), offset, sum(span.num for span in spans if span.has_decay))


def _shapes(config: MixtureConfig) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    down = config.model.width, config.model.ffn_width
    for span in layout(config.model):
        layer, is_ffn, leaf = span.name.partition(".ffn.")
        if not is_ffn:
            yield span.name, span.shape, span.has_decay
        elif leaf == "gate_up.weight":
            yield f"{layer}.ffn.router.weight", (config.num_experts, config.model.width), True
            for number in range(config.num_experts):
                yield f"{layer}.ffn.experts.{number}.gate_up.weight", span.shape, True
                yield f"{layer}.ffn.experts.{number}.down.weight", down, True


def over(config: MixtureConfig, vector: Float32[Tensor, " num"]) -> tuple[Mixture, Float32[Tensor, " num"]]:
    """Return a mixture whose parameters are views into `vector`, and a vector of its gradients, which are views, too.

    Clear the gradients by `zero_`, as those of a `FlatModel`.

    Raises:
        ConfigError: the vector is not as long as the mixture.
    """
    spans = mixture_layout(config)
    if vector.numel() != spans.num_parameters:
        raise ConfigError(
            f"the mixture has {spans.num_parameters:,} parameters, the vector {vector.numel():,} numbers. They belong "
            "to different configs."
        )
    with torch.device("meta"):
        mixture = Mixture(config)
    gradient = torch.zeros_like(vector)
    for span in spans:
        parameter = nn.Parameter(spans.view(vector, span))
        parameter.grad = spans.view(gradient, span)
        owner, _, leaf = span.name.rpartition(".")
        setattr(mixture.get_submodule(owner), leaf, parameter)
    mixture.angle_bits = mixture.angle_bits.to(vector.device)
    return mixture, gradient


def mix(
    config: ModelConfig, experts: Sequence[Ingredient], seed: int, top_k: int = 2
) -> tuple[MixtureConfig, Float32[Tensor, " num"]]:
    """Return a mixture of experts: their own feed-forward networks, a router yet to be trained, the mean of all else.

    Args:
        config: of each expert.
        experts: the model that they were branched from may be one of them, as in both papers.
        seed: of the router's first weights.
        top_k: of one expert alone 1, whatever is asked for.

    Raises:
        ConfigError: the experts are not of this config, or began at several weights.
    """
    require_one_parent(experts)
    spans = {span.name: span for span in layout(config)}
    num = layout(config).num_parameters
    if experts[0].vector.numel() != num:
        raise ConfigError(
            f"the model has {num:,} parameters, {experts[0].name} {experts[0].vector.numel():,} numbers. They belong "
            "to different configs."
        )
    mixture = MixtureConfig(model=config, num_experts=len(experts), top_k=min(top_k, len(experts)))
    there, shared = mixture_layout(mixture), mean([each.vector for each in experts], [1.0] * len(experts))
    vector = shared.new_empty(there.num_parameters)
    for span in there:
        if ".ffn.router." in span.name:
            part = _drawn(span, seed).to(vector.device)
        else:
            layer, _, rest = span.name.partition(".ffn.experts.")
            number, _, leaf = rest.partition(".")
            source, name = (experts[int(number)].vector, f"{layer}.ffn.{leaf}") if rest else (shared, span.name)
            part = source[spans[name].offset : spans[name].stop]
        vector[span.offset : span.stop] = part
    return mixture, vector


def _drawn(span: Span, seed: int) -> Float32[Tensor, " num"]:
    """Return uniform numbers of the deviation of a model's first weights, the same bits on every machine."""
    words = rng.integers64(rng.stream(seed, "initial", span.name), span.num) >> np.uint64(40)
    numbers = (words.astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(STD * sqrt(3) / (1 << 23))
    return torch.from_numpy(numbers)


def without(
    config: MixtureConfig, vector: Float32[Tensor, " num"], expert: int
) -> tuple[MixtureConfig, Float32[Tensor, " rest"]]:
    """Return the mixture without one expert: it computes as if that had never been among the choices.

    Args:
        expert: its number; those after it count one less then.

    Raises:
        ConfigError: there is no such expert, or no other.
    """
    if not 0 <= expert < config.num_experts or config.num_experts == 1:
        raise ConfigError(
            f"expert {expert} of {config.num_experts} cannot be taken out. Allowed: 0 to {config.num_experts - 1}, "
            "where another remains."
        )
    num = config.num_experts - 1
    rest = MixtureConfig(model=config.model, num_experts=num, top_k=min(config.top_k, num))
    before, there = mixture_layout(config), mixture_layout(rest)
    at = {span.name: span for span in before}
    out = vector.new_empty(there.num_parameters)
    stays = torch.tensor([number for number in range(config.num_experts) if number != expert], device=vector.device)
    for span in there:
        layer, _, tail = span.name.partition(".ffn.experts.")
        number, _, leaf = tail.partition(".")
        name = f"{layer}.ffn.experts.{stays[int(number)]}.{leaf}" if tail else span.name
        found = before.view(vector, at[name])
        there.view(out, span).copy_(found[stays] if ".ffn.router." in name else found)
    return rest, out
