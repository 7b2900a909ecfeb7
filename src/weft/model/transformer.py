"""The decoder: embedding, blocks, norm, head.

Build it under `torch.device("meta")` to allocate nothing; `flat.flatten` or `flat.assemble` then gives it memory. The
weights a plain `Transformer(config)` starts with are torch's own and are no run's initial weights (`initial`).

It does not know how it is trained, stored or synchronised.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from weft.model.cache import KVCache
from weft.model.config import ModelConfig
from weft.model.layers import Block, RMSNorm, inverse_wavelengths, rotation


class Transformer(nn.Module):
    """A decoder of the Llama family.

    Args:
        config: its shape.
        has_recompute: keep only each block's input for the backward pass and compute the rest again (about a third more
            time, a fraction of the memory).
    """

    angle_bits: Tensor

    def __init__(self, config: ModelConfig, *, has_recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.has_recompute = has_recompute
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.is_tied else nn.Linear(config.width, config.vocab_size, bias=False)
        # Kept as bits: a cast of the module to half precision must not reach the angles. On the CPU even under meta.
        angles = torch.tensor(inverse_wavelengths(config), dtype=torch.float32, device="cpu")
        self.register_buffer("angle_bits", angles.view(torch.int32), persistent=False)

    def forward(
        self, tokens: Int64[Tensor, "batch tokens"], cache: KVCache | None = None
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Return the logits of each next token.

        Args:
            tokens: ids below vocab_size; with a cache, the tokens that follow those in it.
            cache: appended to when given.

        Raises:
            ValueError: the cache has no room for the tokens.
        """
        logits: Tensor = linear(self.features(tokens, cache), self.head_weight)
        return logits

    def features(
        self, tokens: Int64[Tensor, "batch tokens"], cache: KVCache | None = None
    ) -> Float[Tensor, "batch tokens width"]:
        """Return what the head reads: the normed output of the last block."""
        start = 0 if cache is None else cache.length
        x = self.embed(tokens)
        turn = rotation(self.angle_bits.view(torch.float32), start, tokens.shape[1])
        for block in self.layers:
            if self.has_recompute and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, turn, use_reentrant=False)
            else:
                x = block(x, turn, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        normed: Tensor = self.norm(x)
        return normed

    def next_logits(
        self, tokens: Int64[Tensor, "batch tokens"], cache: KVCache | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Return the logits of the token after the last, fp32: a long prompt's other logits are never computed."""
        last = self.features(tokens, cache)[:, -1]
        return linear(last, self.head_weight).float()

    @property
    def head_weight(self) -> Float[Tensor, "vocab width"]:
        return self.embed.weight if self.head is None else self.head.weight

    def loss(self, tokens: Int64[Tensor, "batch tokens"], targets: Int64[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Return the mean cross entropy of `targets`, in nats per token, computed in fp32."""
        logits = self(tokens)
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten())
