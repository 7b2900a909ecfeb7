"""The parts of a block: RMSNorm, rotary positions, attention and its cache, SwiGLU.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Shapes: B batch, T tokens, C width, H query heads, K key and value heads, D channels per head.
Matmuls that read the same input are one matmul: queries, keys and values are rows of `qkv`, gate and up rows of
`gate_up`. Under autocast the residual stream stays in fp32 and matmuls run in the lower precision.

RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864 (pairs i and i + D/2, as in Hugging Face models), grouped-query
attention arXiv:2305.13245, SwiGLU arXiv:2002.05202.
"""

from math import inf
from typing import Any

import torch
from jaxtyping import Float, Int64
from msgspec import UNSET
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from weft.model.config import ModelConfig

Rotation = tuple[Float[Tensor, "*batch tokens 1 head"], Float[Tensor, "*batch tokens 1 head"]]


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*dims width"]) -> Float[Tensor, "*dims width"]:
        x = x.to(self.weight.dtype)  # under autocast queries and keys come in bf16
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling():
            y: Tensor = _CpuRMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return y
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class _CpuRMSNorm(torch.autograd.Function):
    """RMSNorm with its backward pass written out: on a CPU torch composes it of small operations, at twice the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.rsqrt(root * root / x.shape[-1] + eps)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # n = x / rms, y = w n:  dw = sum(g n),  dx = (g w - n mean(g w n)) / rms
        normed, inverse, weight = ctx.saved_tensors
        product = grad * normed
        with torch.autocast("cpu", enabled=False):
            mean = torch.matmul(product, weight).unsqueeze(-1) / weight.shape[0]
        grad_x = torch.addcmul(grad * weight, normed, mean, value=-1).mul_(inverse)
        return grad_x, product.flatten(0, -2).sum(0), None


def rotation(inverse: Float[Tensor, " pairs"], start: int, num_tokens: int) -> Rotation:
    """Return cosines and signed sines for the positions `start ..< start + num_tokens`, fp32, for `rotate`."""
    return rotation_at(inverse, torch.arange(start, start + num_tokens, device=inverse.device))


def rotation_at(inverse: Float[Tensor, " pairs"], positions: Int64[Tensor, "*batch tokens"]) -> Rotation:
    """Return cosines and signed sines for these positions, fp32, for `rotate`."""
    angles = (positions.float()[..., None] * inverse)[..., None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def together(
    positions: Int64[Tensor, "batch tokens"], window: int | None, dtype: torch.dtype
) -> Float[Tensor, "batch 1 tokens tokens"]:
    """Return what is added to scores: 0 where a token sees another, itself or one before it in its text; else -inf.

    Args:
        positions: 0 where a text begins.
        window: how many tokens each sees at most, itself the last; None: all.
        dtype: of queries; else each layer would convert it for itself, and keep it for its backward pass.
    """
    texts = (positions == 0).cumsum(1)
    are_seen = (texts[:, :, None] == texts[:, None, :]).tril()[:, None]
    if window is not None:
        are_seen = are_seen.triu(1 - window)
    return torch.zeros(are_seen.shape, dtype=dtype, device=are_seen.device).masked_fill_(~are_seen, -inf)


def rotate(x: Float[Tensor, "batch tokens heads head"], turn: Rotation) -> Float[Tensor, "batch tokens heads head"]:
    """Turn the pair (i, i + D/2) of each head by its position's angle; computed in fp32."""
    # (a, b) -> (a cos - b sin, b cos + a sin): rolling by D/2 swaps a and b, and the sines carry the sign.
    cos, signed_sin = turn
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def project(layer: nn.Module, x: Float[Tensor, "batch tokens width"], rows: list[int]) -> tuple[Tensor, ...]:
    """Return what each run of `rows` of the layer, linear or with adapters, makes of `x`: [batch, tokens, rows] each.

    Training on a CPU, the weight is cut and not the result: there one large matmul is no faster than its parts, and the
    backward pass of the cut copies a matrix instead of all activations.
    """
    if x.device.type != "cpu" or not torch.is_grad_enabled() or not isinstance(layer, nn.Linear):
        return torch.split(layer(x), rows, dim=-1)
    biases = [None] * len(rows) if layer.bias is None else torch.split(layer.bias, rows)
    return tuple(linear(x, w, b) for w, b in zip(torch.split(layer.weight, rows), biases, strict=True))


class KVCache:
    """Keys and values of the tokens already read, so that the next token costs one token.

    There is room for `capacity` tokens of `batch` equally long sequences, allocated once; `length` tokens are filled.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.channels_per_head)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def append(
        self,
        layer: int,
        keys: Float[Tensor, "batch kv_heads new head"],
        values: Float[Tensor, "batch kv_heads new head"],
    ) -> tuple[Float[Tensor, "batch kv_heads all head"], Float[Tensor, "batch kv_heads all head"]]:
        """Keep what `layer` computed for the new tokens; return keys and values of all tokens so far.

        `length` moves on only with `advance`, once every layer has appended.

        Raises:
            ValueError: more tokens than there is room for.
        """
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens; {stop} were given. Make a larger one, or clear it.")
        self.keys[layer, :, :, self.length : stop] = keys
        self.values[layer, :, :, self.length : stop] = values
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as read by all layers."""
        self.length += num_tokens

    def clear(self) -> None:
        """Forget all tokens and keep the memory."""
        self.length = 0


class Attention(nn.Module):
    """Causal attention of H query heads over K key and value heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_width = config.channels_per_head
        self.qkv = nn.Linear(config.width, config.q_width + 2 * config.kv_width, bias=config.has_qkv_bias)
        self.out = nn.Linear(config.q_width, config.width, bias=bool(config.has_out_bias))
        self.window = config.window_of(layer)
        self.score_factor = 1.0 if config.yarn is UNSET else config.yarn.score_factor
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.channels_per_head, config.norm_eps)
            self.k_norm = RMSNorm(config.channels_per_head, config.norm_eps)

    def forward(
        self,
        x_BTC: Float[Tensor, "batch tokens width"],
        turn: Rotation,
        cache: KVCache | None,
        seen: Float[Tensor, "batch 1 tokens tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens width"]:
        q_BHTD, k_BKTD, v_BKTD = self.heads(x_BTC, turn)
        if cache is None:
            mixed = attend(q_BHTD, k_BKTD, v_BKTD, self.window, seen)
        else:
            mixed = attend(q_BHTD, *cache.append(self.layer, k_BKTD, v_BKTD), self.window)
        return self.join(mixed)

    def heads(self, x_BTC: Float[Tensor, "batch tokens width"], turn: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [batch, heads, tokens, head], keys and values [batch, kv_heads, tokens, head], turned."""
        batch, tokens, _ = x_BTC.shape
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qk, v = project(self.qkv, x_BTC, [(heads + kv_heads) * self.head_width, kv_heads * self.head_width])
        qk = qk.view(batch, tokens, heads + kv_heads, self.head_width)
        v_BTKD = v.view(batch, tokens, kv_heads, self.head_width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [heads, kv_heads], dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        qk = rotate(qk, turn)
        if self.score_factor != 1.0:
            qk = qk * self.score_factor
        qk = qk.to(v_BTKD.dtype)
        q_BHTD, k_BKTD = torch.split(qk.transpose(1, 2), [heads, kv_heads], dim=1)
        return q_BHTD, k_BKTD, v_BTKD.transpose(1, 2)

    def join(self, mixed_BHTD: Float[Tensor, "batch heads tokens head"]) -> Float[Tensor, "batch tokens width"]:
        """Return what the heads together add to the residual stream."""
        y_BTC: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return y_BTC


def attend(
    q: Float[Tensor, "batch heads new head"],
    k: Float[Tensor, "batch kv_heads all head"],
    v: Float[Tensor, "batch kv_heads all head"],
    window: int | None = None,
    seen: Float[Tensor, "batch 1 new all"] | None = None,
) -> Float[Tensor, "batch heads new head"]:
    """Let the last `new` of `all` tokens look at themselves and at what came before them.

    Args:
        window: how many tokens each sees at most, itself the last; None: all.
        seen: in place of both, as `together` has it, where rows hold several texts.
    """
    if q.is_cuda and q.dtype == torch.float32 and q.shape[1] != k.shape[1]:
        # For groups in fp32 torch has there only the kernel that keeps all scores (2.13).
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    is_grouped = q.shape[1] != k.shape[1]
    num_new, num_all = q.shape[2], k.shape[2]
    if seen is not None:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=is_grouped)
    if window is None or num_all <= window:
        if num_new == num_all:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        if num_new == 1:
            return scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped)
    mask = torch.ones(num_new, num_all, dtype=torch.bool, device=q.device).tril(num_all - num_new)
    if window is not None:
        mask = mask.triu(num_all - num_new - window + 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x_BTC: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        gate, up = project(self.gate_up, x_BTC, [self.down.in_features] * 2)
        y_BTC: Tensor = self.down(silu(gate) * up)
        return y_BTC


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(
        self,
        x: Float[Tensor, "batch tokens width"],
        turn: Rotation,
        cache: KVCache | None = None,
        seen: Float[Tensor, "batch 1 tokens tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens width"]:
        mixed: Tensor = x + self.attention(self.attention_norm(x), turn, cache, seen)
        y: Tensor = mixed + self.ffn(self.ffn_norm(mixed))
        return y
