"""A block that is trained alone: it denoises the next token, of a text it knows up to there.

    context   rows of tokens 0..t ─────────► layer 0 ──────► layer 1 ──► ...
                                           keys, values    keys, values
                                                ▼               ▼
    target    row of t, noisy row z of t + 1 ► layer 0 ──────► layer 1 ──► ... ─► c_skip z + c_out n(x) ─► logits

Two streams go through the same layers. The context is clean and causal, as in any decoder: no target and no noise ever
enters it. The targets are as many queries beside it, one for each token: query t reads keys and values of the context
up to t, and of no other query. So nothing that is predicted is seen, but through its own noise. As the context knows no
noise level either, it is read once for all levels.

A query begins as the row of its token; the noisy row of the next is added to it. It and the gains of its norms (1 more
or less than the layers' own) depend on the noise level by functions that are 0 from the highest on. Above it only the
skip is left of the target, and vanishes: with noise without bound a block is an ordinary decoder of its layers. So its
layers are a body like any other.

It learns by cross entropy against the space's frozen head, weighted as EDM weights squares. No gradient leaves it.

Two streams and cross entropy: DiffusionBlocks, arXiv:2506.14202, section 5.4; there the noisy rows are tokens of their
own, which begin as noise alone. Gains by the noise level: DiT, arXiv:2212.09748; on RMSNorm: arXiv:2401.11605.
"""

from collections.abc import Iterator, Sequence
from math import pi, prod
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Float32, Float64, Int64
from msgspec import UNSET
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from weft.compose.blocks.noise import NoiseLevels, c_in, c_out, c_skip, loss_weight
from weft.compose.space import Space, normed
from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, Layout, Span, layout
from weft.model.initial import initial_vector
from weft.model.layers import Block, KVCache, attend, rotation
from weft.model.sections import middle
from weft.model.transformer import SectionModule

NUM_WAVES = 8  # of which gains are sums: a function of one number needs no more to be as smooth as training makes it


class Context(NamedTuple):
    """What a block has read of a text.

    Args:
        rows: of the tokens that were read last.
        start: the place of the first of these.
        keys, values: of each layer, of all tokens.
    """

    rows: Float[Tensor, "batch tokens width"]
    start: int
    keys: Sequence[Float[Tensor, "batch kv_heads all head"]]
    values: Sequence[Float[Tensor, "batch kv_heads all head"]]

    def last(self) -> "Context":
        """Return what predicts only the token after the last."""
        num = self.rows.shape[1]
        return self._replace(rows=self.rows[:, -1:], start=self.start + num - 1)


class DenoisingBlock(SectionModule):
    """Layers, and what tells them of a noisy target. Called as a module it is the layers alone: a body.

    Args:
        config: of its layers.
        number: which of `num_blocks` equal parts of the noise levels is its own; 0 has the most noise.
    """

    def __init__(self, config: ModelConfig, space: Space, levels: NoiseLevels, number: int, num_blocks: int) -> None:
        if config.adapter is not UNSET:
            raise ConfigError("a block with an adapter: merge the adapter into its base first.")
        if not config.width == space.width == levels.width:
            raise ConfigError(
                f"a block of width {config.width} in a space of {space.width} with noise for {levels.width}: give all "
                "three the width of the space."
            )
        if not 0 <= number < num_blocks:
            raise ConfigError(f"block {number} of {num_blocks}: blocks are numbered from 0 to {num_blocks - 1}.")
        super().__init__(config, middle(config))
        self.space = space
        self.levels = levels
        self.number = number
        self.num_blocks = num_blocks
        self.target = nn.Linear(config.width, config.width, bias=False)
        self.gains = nn.ModuleDict({name: nn.Linear(NUM_WAVES, 2 * config.width, bias=False) for name in self.layers})

    # --- what it computes ---

    def read(self, tokens: Int64[Tensor, "batch tokens"], cache: KVCache | None = None) -> Context:
        """Return the context of tokens; with a cache, of those that follow what is in it, to which they are added.

        Raises:
            ValueError: the cache has no room for the tokens.
        """
        start = 0 if cache is None else cache.length
        turn = rotation(self.angle_bits.view(torch.float32), start, tokens.shape[1])
        x = rows = self.space.begin(tokens)
        all_keys, all_values = list[Tensor](), list[Tensor]()
        for number, layer in enumerate(self._layers()):
            q, keys, values = layer.attention.heads(layer.attention_norm(x), turn)
            if cache is not None:
                keys, values = cache.append(number, keys, values)
            all_keys.append(keys)
            all_values.append(values)
            if number + 1 < len(self.layers):  # nobody asks what the last one makes of the context
                x = _added(layer, x, q, keys, values)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return Context(rows, start, all_keys, all_values)

    def denoise(
        self, context: Context, z: Float[Tensor, "batch tokens width"], sigma: Float32[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens width"]:
        """Return the clean row of each next token, as far as it can be told.

        Args:
            z: its noisy row.
            sigma: the deviation of that noise.
        """
        share = self.levels.share_of(sigma)[..., None]
        waves, sigma = _waves(share).to(z.dtype), sigma[..., None]
        turn = rotation(self.angle_bits.view(torch.float32), context.start, z.shape[1])
        x = context.rows + share.to(z.dtype) * self.target(c_in(sigma) * z)
        for layer, gains, keys, values in zip(
            self._layers(), self.gains.values(), context.keys, context.values, strict=True
        ):
            attention_gain, ffn_gain = gains(waves).chunk(2, -1)
            q, _, _ = layer.attention.heads(layer.attention_norm(x) * (1 + attention_gain), turn)
            x = _added(layer, x, q, keys, values, ffn_gain)
        # D = c_skip z + c_out F
        return c_skip(sigma) * z + c_out(sigma) * normed(x, self.space.norm_eps)

    def predict(
        self, context: Context, z: Float[Tensor, "batch tokens width"], sigma: Float32[Tensor, "batch tokens"]
    ) -> Float32[Tensor, "batch tokens vocab"]:
        """Return the logits of each next token. The arguments are those of `denoise`."""
        return self.space.logits(self.denoise(context, z, sigma))

    # --- what it is trained by ---

    def loss_of_step(
        self, tokens: Int64[Tensor, "batch tokens"], targets: Int64[Tensor, "batch tokens"], seed: int, step: int
    ) -> Float32[Tensor, ""]:
        """Return the loss of a training step, at levels and with noise that belong to seed and step.

        Args:
            targets: one place further; -100 is not predicted.
        """
        batch, num_tokens = tokens.shape
        sigma, noise = self.levels.draw(self.number, self.num_blocks, seed, step, (batch, num_tokens))
        return self.loss_at(tokens, targets, sigma.to(tokens.device), noise.to(tokens.device))

    def loss_at(
        self,
        tokens: Int64[Tensor, "batch tokens"],
        targets: Int64[Tensor, "batch tokens"],
        sigma: Float32[Tensor, "batch tokens"],
        noise: Float32[Tensor, "batch tokens width"],
    ) -> Float32[Tensor, ""]:
        """Return the weighted mean cross entropy, nats per token."""
        is_predicted = targets >= 0
        # z = y + sigma n
        z = self.space.begin(targets.clamp(min=0)) + sigma[..., None] * noise
        logits = self.predict(self.read(tokens), z, sigma)
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return (loss_weight(sigma) * losses).sum() / is_predicted.sum().clamp(min=1)

    def _layers(self) -> Iterator[Block]:
        return (cast(Block, each) for each in self.layers.values())


def _added(
    layer: Block,
    x: Float[Tensor, "batch tokens width"],
    q: Float[Tensor, "batch heads tokens head"],
    keys: Float[Tensor, "batch kv_heads all head"],
    values: Float[Tensor, "batch kv_heads all head"],
    ffn_gain: Tensor | None = None,
) -> Float[Tensor, "batch tokens width"]:
    """Return the stream after a layer, of the queries that it made there."""
    mixed: Tensor = x + layer.attention.join(attend(q, keys, values, layer.attention.window))
    before: Tensor = layer.ffn_norm(mixed)
    y: Tensor = mixed + layer.ffn(before if ffn_gain is None else before * (1 + ffn_gain))
    return y


def _waves(share: Float64[Tensor, "*dims 1"]) -> Float64[Tensor, "*dims waves"]:
    """Return sin((k - 1/2) pi share): sums of these can be any smooth function of the share that is 0 at 0."""
    return (share * pi * (torch.arange(NUM_WAVES, device=share.device) + 0.5)).sin()


# --- as one vector ---


def block_layout(config: ModelConfig) -> Layout:
    """Return where each tensor of a block lies: first those of its layers as in a body, then what tells the noise.

    What tells the noise takes no weight decay.
    """
    body = layout(config, middle(config))
    spans, offset = list(body.spans), body.num_parameters
    shapes = {"target.weight": (config.width, config.width)}
    shapes |= {f"gains.{layer}.weight": (2 * config.width, NUM_WAVES) for layer in range(config.num_layers)}
    for name, shape in shapes.items():
        spans.append(Span(name, shape, offset, has_decay=False))
        offset += prod(shape)
    return Layout(tuple(spans), offset, body.num_decayed)


def fresh(config: ModelConfig, seed: int) -> Float32[Tensor, " num"]:
    """Return the vector that a block is trained from: its layers as those of any body, and no answer to noise yet."""
    body = initial_vector(config, seed, middle(config))
    return torch.cat((body, body.new_zeros(block_layout(config).num_parameters - len(body))))


def body_of(config: ModelConfig, vector: Float[Tensor, " num"]) -> Float[Tensor, " part"]:
    """Return the part of a block's vector that is its layers: the vector of a body; not copied."""
    return vector[: layout(config, middle(config)).num_parameters]


class FlatBlock(FlatModel):
    """A block whose parameters are views into one vector, and its gradients into another."""

    def __init__(self, block: DenoisingBlock, vector: Float[Tensor, " num"]) -> None:
        """
        Raises:
            ConfigError: the vector is not as long as the block.
        """
        super().__init__(block, vector, torch.zeros_like(vector))
        self.layout = block_layout(block.config)
        self.block = block
        if vector.numel() != self.layout.num_parameters:
            raise ConfigError(
                f"the block has {self.layout.num_parameters:,} parameters, the vector {vector.numel():,} numbers. They "
                "belong to different configs."
            )
        block.angle_bits = block.angle_bits.to(vector.device)
        for span in self.layout:
            owner, _, leaf = span.name.rpartition(".")
            parameter = nn.Parameter(self.layout.view(vector, span))
            parameter.grad = self.layout.view(self.gradient, span)
            setattr(block.get_submodule(owner), leaf, parameter)


def block_over(
    vector: Float[Tensor, " num"], config: ModelConfig, space: Space, levels: NoiseLevels, place: tuple[int, int]
) -> FlatBlock:
    """Return a block over `vector`, which is not copied.

    Args:
        place: its number, and how many blocks there are.

    Raises:
        ConfigError: the vector is not as long as the block, or it does not fit the space.
    """
    with torch.device("meta"):
        block = DenoisingBlock(config, space, levels, *place)
    return FlatBlock(block, vector)
