"""The loss of a decoder in exact numbers, which torch differentiates: the parameters are those of the plain module."""

from typing import cast

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.model import layers
from weft.model.layers import Block, Rotation, rotate
from weft.model.transformer import SectionModule
from weft.training.numerics.functions import Attention, CrossEntropy, Embedding, Gate, Linear, Norm, Seen
from weft.training.numerics.grids import turns

Masks = dict[int | None, Seen]  # by window, of which a model has one kind or two


def loss(
    module: SectionModule,
    tokens: Int64[Tensor, "batch tokens"],
    targets: Int64[Tensor, "batch tokens"],
    positions: Int64[Tensor, "batch tokens"] | None = None,
) -> Float32[Tensor, ""]:
    """Return what `SectionModule.loss` returns, in exact numbers. The module is a whole decoder without an adapter.

    Args:
        targets, positions: as there.
    """
    assert module.embed is not None
    assert module.norm is not None
    x: Tensor = Embedding.apply(module.embed.weight, tokens)  # type: ignore[no-untyped-call]
    places = torch.arange(tokens.shape[1]) if positions is None else positions
    turn, masks = rotation(module.angle_bits.view(torch.float32), places), Masks()
    for each in module.layers.values():
        block = cast(Block, each)
        window = block.attention.window
        if window not in masks:
            masks[window] = seen(tokens.shape[1], window, positions)
        if module.has_recompute and torch.is_grad_enabled():
            x = checkpoint(_block, block, x, turn, masks[window], use_reentrant=False)
        else:
            x = _block(block, x, turn, masks[window])
    logits = _linear(_norm(module.norm, x), module.head_weight)
    found: Tensor = CrossEntropy.apply(logits.flatten(0, 1), targets.flatten())  # type: ignore[no-untyped-call]
    return found


def rotation(inverse: Float32[Tensor, " pairs"], positions: Int64[Tensor, "*batch tokens"]) -> Rotation:
    """Return what `layers.rotation_at` returns: angles are rounded as there, their sines by `grids.turns`."""
    cos, sin = turns((positions.float()[..., None] * inverse)[..., None, :])
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def seen(num_tokens: int, window: int | None, positions: Int64[Tensor, "batch tokens"] | None) -> Seen:
    """Return which tokens each looks at: itself and those before it, of its window and its text."""
    places = torch.arange(num_tokens)[None] if positions is None else positions
    return Seen(layers.together(places, window, torch.float32)[:, 0], window)


def _block(
    block: Block, x: Float32[Tensor, "batch tokens width"], turn: Rotation, looks: Seen
) -> Float32[Tensor, "batch tokens width"]:
    x = x + _attention(block.attention, _norm(block.attention_norm, x), turn, looks)
    gate_up = _linear(_norm(block.ffn_norm, x), block.ffn.gate_up.weight)
    gated: Tensor = Gate.apply(gate_up.flatten(0, -2))  # type: ignore[no-untyped-call]
    return x + _linear(gated.view(*x.shape[:-1], -1), block.ffn.down.weight)


def _attention(
    attention: layers.Attention, x: Tensor, turn: Rotation, looks: Seen
) -> Float32[Tensor, "batch tokens width"]:
    (batch, tokens, _), heads, kv_heads = x.shape, attention.num_heads, attention.num_kv_heads
    qkv = _linear(x, attention.qkv.weight, attention.qkv.bias).view(batch, tokens, -1, attention.head_width)
    qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=2)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = torch.split(qk, [heads, kv_heads], dim=2)
        qk = torch.cat((_norm(attention.q_norm, q), _norm(attention.k_norm, k)), dim=2)
    qk = rotate(qk, turn)
    if attention.score_factor != 1.0:
        qk = qk * attention.score_factor
    q, k = torch.split(qk.transpose(1, 2), [heads, kv_heads], dim=1)
    mixed: Tensor = Attention.apply(q, k, v.transpose(1, 2), looks)  # type: ignore[no-untyped-call]
    return _linear(mixed.transpose(1, 2).flatten(2), attention.out.weight, attention.out.bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = Norm.apply(x, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    return y
