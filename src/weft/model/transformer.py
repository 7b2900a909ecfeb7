"""The decoder: embedding, blocks, norm, head; whole, or one section of it.

Build it under `torch.device("meta")` to allocate nothing; `flat.flatten` or `flat.assemble` then gives it memory. The
weights a plain `Transformer(config)` starts with are torch's own and are no run's initial weights (`initial`).
"""

from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Float, Int64
from msgspec import UNSET
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from weft.model.adapter import Noise, adapt
from weft.model.config import ModelConfig
from weft.model.layers import Block, KVCache, RMSNorm, rotation, rotation_at, together
from weft.model.sections import Section, whole
from weft.model.wavelengths import inverse_wavelengths


class SectionModule(nn.Module):
    """A section of a decoder of the Llama family, its parameters under the names that they have in the whole.

    Args:
        config: of the whole.
        has_recompute: keep only each block's input for the backward pass and compute the rest again (about a third more
            time, a fraction of the memory).
    """

    angle_bits: Tensor

    def __init__(self, config: ModelConfig, section: Section, *, has_recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.section = section
        self.has_recompute = has_recompute
        self.embed = _table(config) if section.has_table else None
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in section.layers})
        self.norm = RMSNorm(config.width, config.norm_eps) if section.is_last else None
        has_head = section.is_last and not config.is_tied
        self.head = nn.Linear(config.width, config.vocab_size, bias=False) if has_head else None
        self.register_buffer("angle_bits", _angle_bits(config), persistent=False)
        if config.has_frozen_ends:
            for end in (self.embed, self.norm, self.head):
                if end is not None:
                    end.requires_grad_(False)
        self.noise: Noise | None = None  # of a model whose adapter leaves out some of what it reads
        if config.adapter is not UNSET:
            self.requires_grad_(False)
            noise = Noise(config.adapter.dropout or 0.0)
            for layer in section.layers:
                adapt(self.get_submodule(f"layers.{layer}"), config, layer, noise)
            self.noise = noise if noise.share else None

    def forward(self, x: Tensor, *, positions: Int64[Tensor, "batch tokens"] | None = None) -> Tensor:
        """Return activations [batch, tokens, width]; the last section: logits [batch, tokens, vocab].

        Args:
            x: what the section before returned; the first section: tokens [batch, tokens], ids below vocab_size.
            positions: of each token in its own text, which begins at 0 and sees no other; None: each row is one text.
        """
        has_recompute = self.has_recompute
        x = through(self.layers.values(), self.begin(x), self.angle_bits, None, positions, has_recompute=has_recompute)
        return x if self.norm is None else self.logits(x)

    def loss(
        self, x: Tensor, targets: Int64[Tensor, "batch tokens"], positions: Int64[Tensor, "batch tokens"] | None = None
    ) -> Float[Tensor, ""]:
        """Return the mean cross entropy of `targets`, nats per token, computed in fp32. Only the last section can.

        Args:
            targets: where there are `positions`, -100 for what is not predicted; if that is all, the loss is 0.
        """
        logits = self(x, positions=positions)
        return mean_loss(logits, targets) if positions is None else loss_of_predicted(logits, targets)

    # --- before the layers and after them, for who computes those apart ---

    def begin(self, x: Tensor) -> Float[Tensor, "batch tokens width"]:
        """Return what the first of its layers reads."""
        if not self.section.is_first:
            return x
        assert self.embed is not None
        embedded: Tensor = self.embed(x)
        return embedded

    def logits(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens vocab"]:
        """Return the logits of what the last layer made. Only the last section can."""
        assert self.norm is not None
        return linear(self.norm(x), self.head_weight)

    @property
    def head_weight(self) -> Float[Tensor, "vocab width"]:
        head = self.embed if self.head is None else self.head
        assert head is not None
        return head.weight


def _table(config: ModelConfig) -> nn.Embedding:
    """Return an embedding; on "meta" without drawing values, for which torch would load its compiler: 1.5 seconds."""
    weight = torch.empty(config.vocab_size, config.width)
    return nn.Embedding(config.vocab_size, config.width, _weight=weight if weight.is_meta else None)


class Transformer(SectionModule):
    """A whole decoder.

    Args:
        config, has_recompute: as of a `SectionModule`.
    """

    embed: nn.Embedding
    norm: RMSNorm

    def __init__(self, config: ModelConfig, *, has_recompute: bool = False) -> None:
        super().__init__(config, whole(config), has_recompute=has_recompute)

    def forward(
        self,
        tokens: Int64[Tensor, "batch tokens"],
        cache: KVCache | None = None,
        *,
        positions: Int64[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Return the logits of each next token.

        Args:
            tokens: ids below vocab_size; with a cache, the tokens that follow those in it.
            cache: appended to when given.
            positions: as of a `SectionModule`; not with a cache.

        Raises:
            ValueError: the cache has no room for the tokens.
        """
        logits: Tensor = linear(self.features(tokens, cache, positions), self.head_weight)
        return logits

    def features(
        self,
        tokens: Int64[Tensor, "batch tokens"],
        cache: KVCache | None,
        positions: Int64[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens width"]:
        """Return what the head reads: the normed output of the last block."""
        x, has_recompute = self.embed(tokens), self.has_recompute
        x = through(self.layers.values(), x, self.angle_bits, cache, positions, has_recompute=has_recompute)
        normed: Tensor = self.norm(x)
        return normed

    def next_logits(
        self, tokens: Int64[Tensor, "batch tokens"], cache: KVCache | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Return the logits of the token after the last, fp32: a long prompt's other logits are never computed."""
        last = self.features(tokens, cache)[:, -1]
        return linear(last, self.head_weight).float()


def through(
    blocks: Iterable[nn.Module],
    x: Float[Tensor, "batch tokens width"],
    angle_bits: Tensor,
    cache: KVCache | None,
    positions: Int64[Tensor, "batch tokens"] | None = None,
    *,
    has_recompute: bool,
) -> Float[Tensor, "batch tokens width"]:
    """Return what blocks make of the embeddings of tokens, or of what blocks before made."""
    num_tokens, inverse = x.shape[1], angle_bits.view(torch.float32)
    if positions is None:
        turn = rotation(inverse, 0 if cache is None else cache.length, num_tokens)
    else:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        turn = rotation_at(inverse, positions)
    masks = dict[int | None, Tensor]()  # by window, of which a model has one kind or two
    for block in blocks:
        if positions is not None and (window := cast(Block, block).attention.window) not in masks:
            masks[window] = together(positions, window, dtype)
        seen = None if positions is None else masks[cast(Block, block).attention.window]
        if has_recompute and cache is None and torch.is_grad_enabled():
            x = checkpoint(block, x, turn, None, seen, use_reentrant=False)
        else:
            x = block(x, turn, cache, seen)
    if cache is not None:
        cache.advance(num_tokens)
    return x


def mean_loss(logits: Float[Tensor, "batch tokens vocab"], targets: Int64[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
    """Return the mean cross entropy, in nats per token, computed in fp32."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def loss_of_predicted(
    logits: Float[Tensor, "batch tokens vocab"], targets: Int64[Tensor, "batch tokens"]
) -> Float[Tensor, ""]:
    """Return the mean cross entropy over targets that are not -100, as `mean_loss`; 0 where all are."""
    total = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (targets >= 0).sum().clamp(min=1)


def _angle_bits(config: ModelConfig) -> Tensor:
    """Return the angles as bits, which a cast to half precision does not reach. On the CPU even under meta."""
    angles = torch.tensor(inverse_wavelengths(config), dtype=torch.float32, device="cpu")
    return angles.view(torch.int32)
