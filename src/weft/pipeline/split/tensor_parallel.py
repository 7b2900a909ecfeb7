"""A layer cut by heads: each part computes some heads and some hidden columns, and what they make is summed.

    u_p = attention_p(norm(x))       x + sum u_p = h        heads of part p alone, and their columns of `out`
    w_p = ffn_p(norm(h))             h + sum w_p = y        hidden columns of part p alone, and theirs of `down`

    back, from dy:     dh = dy + sum dw_p/dh        dx = dh + sum du_p/dx        each through the norm, which is linear

So there are two sums forward and two backward, each as large as x. `added` makes them in the order of the parts'
numbers: whoever adds the same numbers finds the same bits. All parts have the norms; the gradient of each weight, norms
as well, is the sum of what the parts find of it.

Numbers are fp32.

Shoeybi et al., Megatron-LM, 1909.08053, section 3, with parts of unequal size.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from weft.model.config import ModelConfig
from weft.model.layers import Block, Rotation
from weft.pipeline.split.cut import HeadsPart

Activations = Float[Tensor, "batch tokens width"]


def part_config(config: ModelConfig, part: HeadsPart) -> ModelConfig:
    """Return the config of a layer that is as small as a part."""
    heads_per_group = config.num_heads // config.num_kv_heads
    return replace(
        config,
        num_heads=len(part.groups) * heads_per_group,
        num_kv_heads=len(part.groups),
        head_width=config.channels_per_head,
        ffn_width=len(part.columns),
        has_out_bias=config.has_out_bias if part.groups.start == 0 else UNSET,  # added once
    )


def cut_layer(layer: Block, config: ModelConfig, part: HeadsPart) -> Block:
    """Return a part of a layer, its weights copied."""
    with torch.device("meta"):
        made = Block(part_config(config, part), layer.attention.layer)
    whole = dict(layer.named_parameters())
    held = {name: _piece(whole[name].detach(), *_place(config, part, name)) for name, _ in made.named_parameters()}
    made.load_state_dict(held, assign=True)
    return made


def add_gradients(
    config: ModelConfig, part: HeadsPart, found: Mapping[str, Tensor], into: Mapping[str, Tensor]
) -> None:
    """Add a part's gradients to where its weights lie in the whole layer's; both by the names of a Block's."""
    for name, gradient in found.items():
        dim, places = _place(config, part, name)
        pieces = torch.split(gradient, [len(place) for place in places], dim) if places else (gradient,)
        for place, piece in zip(places or (range(into[name].shape[dim]),), pieces, strict=True):
            into[name].narrow(dim, place.start, len(place)).add_(piece)


def added(partials: Sequence[Tensor]) -> Tensor:
    """Return the sum of what the parts made, in the order of their numbers."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    return total


class HeadsPass:
    """One micro-batch on its way through a part: four pieces of work, between which the parts' outputs are summed.

    Args:
        part: of `cut_layer`.
        turn: of all tokens.
    """

    def __init__(self, part: Block, turn: Rotation) -> None:
        self._part = part
        self._turn = turn
        self._graphs: list[tuple[Tensor, Tensor]] = []  # input and output, of attention and of the ffn
        self.gradients: dict[str, Tensor] = {}
        """Of the part's weights by name, after the way back."""

    def attention(self, x: Activations) -> Activations:
        """Return what this part's heads add to x."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return self._made(x, self._part.attention(self._part.attention_norm(x), self._turn, None))

    def ffn(self, h: Activations) -> Activations:
        """Return what this part's columns add to h."""
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            return self._made(h, self._part.ffn(self._part.ffn_norm(h)))

    def back(self, dy: Activations) -> Activations:
        """Return what this part has of dh, from dy; called again, of dx, from dh. What passes by is not in it."""
        given, made = self._graphs.pop()
        named = dict(self._part.named_parameters())
        dx, *found = torch.autograd.grad(made, [given, *named.values()], dy, allow_unused=True)
        self.gradients |= {name: each for name, each in zip(named, found, strict=True) if each is not None}
        return dx

    def _made(self, given: Tensor, made: Tensor) -> Tensor:
        self._graphs.append((given, made))
        return made.detach()


def _place(config: ModelConfig, part: HeadsPart, name: str) -> tuple[int, tuple[range, ...]]:
    """Return which rows (0) or columns (1) of a weight a part has; none: all of it."""
    q_width, kv_width, ffn_width = config.q_width, config.kv_width, config.ffn_width
    groups, columns = part.groups, part.columns
    queries = _times(groups, q_width // config.num_kv_heads)
    keys = _times(groups, config.channels_per_head)
    match name:
        case "attention.qkv.weight" | "attention.qkv.bias":
            return 0, (queries, _moved(keys, q_width), _moved(keys, q_width + kv_width))
        case "attention.out.weight":
            return 1, (queries,)
        case "ffn.gate_up.weight":
            return 0, (columns, _moved(columns, ffn_width))
        case "ffn.down.weight":
            return 1, (columns,)
        case _:
            return 0, ()


def _piece(weight: Tensor, dim: int, places: Sequence[range]) -> Tensor:
    if not places:
        return weight.clone()
    return torch.cat([weight.narrow(dim, place.start, len(place)) for place in places], dim)


def _times(run: range, count: int) -> range:
    return range(run.start * count, run.stop * count)


def _moved(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)
