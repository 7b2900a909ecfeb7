"""Stacks: bodies of one space, one on the other, and the logits after each of them.

    tokens ─► space ─► body 0 ─┬─► seam 0 ─► body 1 ─┬─► ...
                               └─► exit 0            └─► exit 1      logits by the head that all share

A seam says how what came out of a body goes into the next, and which layers are left out there:

    post      n(x)            at root mean square 1, as tokens go in; n is a RMSNorm without parameters
    pre       x               raw, as between two layers of a decoder
    scaled    alpha n(x)
    affine    n(x) W + b      W and b are trained (`align`)

A stack whose seams are all "pre" is one deeper decoder, and `whole` returns it. A body may loop: what comes out of it
goes in again, at root mean square 1 and the same position, as often as it says (`latents` trains bodies to take that).

Stacked models in a frozen embedding: snimu.github.io/2025/02/18/model-stacking.
"""

from dataclasses import dataclass, replace
from typing import Annotated, assert_never

import msgspec
import torch
from jaxtyping import Float, Float32, Int64
from msgspec import UNSET
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.compose.space import Space, normed
from weft.compose.stacks.body import gathered, layers_of, numbered, require_fit
from weft.config import Config
from weft.data.rows import Batch
from weft.errors import ConfigError
from weft.ids import several
from weft.model import sections
from weft.model.config import ModelConfig, plain
from weft.model.transformer import SectionModule, through

MAX_CUT = 1 << 10  # layers: as many as a body may have
Cut = Annotated[int, msgspec.Meta(ge=0, le=MAX_CUT, description="layers that are left out")]


class PostConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="post"):
    """What came out goes in at root mean square 1."""


class PreConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="pre"):
    """What came out goes in as it is."""


class ScaledConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="scaled"):
    """What came out goes in at another root mean square."""

    alpha: Annotated[float, msgspec.Meta(gt=0, le=1e4, description="that root mean square")]


class AffineConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="affine"):
    """What came out goes through an affine map, at root mean square 1 before it."""


Handover = PostConfig | PreConfig | ScaledConfig | AffineConfig


class Seam(Config, frozen=True, kw_only=True):
    """What lies between two bodies."""

    handover: Handover
    cut_last: Cut = 0
    """Of the body below."""
    cut_first: Cut = 0
    """Of the body above."""


Affine = Float[Tensor, "rows width"]  # those of W, then b


def identity_map(width: int) -> Affine:
    """Return the affine map that changes nothing."""
    return torch.cat((torch.eye(width), torch.zeros(1, width)))


@dataclass(frozen=True, eq=False)
class Stack:
    """
    Args:
        bodies: of that space, the lowest first; one may stand there several times.
        seams: one less.
        maps: of each seam its affine map, where it has one; empty: none has.
        loops: how often each body computes; empty: once each.

    Raises:
        ConfigError: they do not belong together; says what does not.
    """

    space: Space
    bodies: tuple[SectionModule, ...]
    seams: tuple[Seam, ...] = ()
    maps: tuple[Affine | None, ...] = ()
    loops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num = len(self.bodies)
        if not num:
            raise ConfigError("stack: no members. It takes one at least.")
        if len(self.seams) != num - 1:
            found = several(len(self.seams), "seam")
            raise ConfigError(f"stack: {several(num, 'member')} and {found}. There is a seam between each two.")
        object.__setattr__(self, "maps", self.maps or (None,) * (num - 1))
        object.__setattr__(self, "loops", self.loops or (1,) * num)
        if len(self.loops) != num or min(self.loops) < 1:
            raise ConfigError(f"stack: loops {list(self.loops)}: one number from 1 up for each of {num} members.")
        for number, module in enumerate(self.bodies):
            require_fit(module.config, self.space, f"member {number} of the stack")
            if not self.kept(number):
                raise ConfigError(f"stack: member {number} has {module.config.num_layers} layers, and all are cut off.")
        for number, (seam, matrix) in enumerate(zip(self.seams, self.maps, strict=True)):
            shape = (self.space.width + 1, self.space.width) if isinstance(seam.handover, AffineConfig) else None
            if (None if matrix is None else tuple(matrix.shape)) != shape:
                raise ConfigError(f"stack: seam {number}: an affine handover, and no other, has a map of W and b.")

    def kept(self, number: int) -> range:
        """Return which layers of a body compute."""
        first = self.seams[number - 1].cut_first if number else 0
        last = self.seams[number].cut_last if number < len(self.seams) else 0
        return range(first, self.bodies[number].config.num_layers - last)

    def with_body(self, number: int, module: SectionModule) -> "Stack":
        """Return the stack with another body at that place."""
        return replace(self, bodies=(*self.bodies[:number], module, *self.bodies[number + 1 :]))

    # --- what it computes ---

    def exits(
        self,
        tokens: Int64[Tensor, "batch tokens"],
        positions: Int64[Tensor, "batch tokens"] | None = None,
        *,
        num: int | None = None,
    ) -> list[Float[Tensor, "batch tokens width"]]:
        """Return the residual stream as each body leaves it, raw; the last is that of the stack.

        Args:
            positions: as of a `SectionModule`.
            num: of bodies that compute, the lowest; None: all.
        """
        found, x = list[Tensor](), self.space.begin(tokens)
        for number in range(len(self.bodies) if num is None else num):
            x = self.member(number, self.into(number, x), positions)
            found.append(x)
        return found

    def into(self, number: int, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Return what a body reads, of what the one below has left; the lowest reads what the space begins with."""
        if not number:
            return x
        return handed_over(self.seams[number - 1].handover, x, self.space.norm_eps, self.maps[number - 1])

    def member(
        self,
        number: int,
        x: Float[Tensor, "batch tokens width"],
        positions: Int64[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens width"]:
        """Return what one body makes of what it reads."""
        module, kept = self.bodies[number], self.kept(number)
        layers = list(module.layers.values())[kept.start : kept.stop]
        for loop in range(self.loops[number]):
            x = normed(x, self.space.norm_eps) if loop else x
            x = through(layers, x, module.angle_bits, None, positions, has_recompute=module.has_recompute)
        return x

    def logits(
        self,
        tokens: Int64[Tensor, "batch tokens"],
        positions: Int64[Tensor, "batch tokens"] | None = None,
        *,
        exit: int = -1,
    ) -> Float32[Tensor, "batch tokens vocab"]:
        """Return the logits of each next token, after the body `exit`; -1: after the last."""
        num = range(len(self.bodies))[exit] + 1
        return self.space.logits(self.exits(tokens, positions, num=num)[-1])

    @torch.no_grad()
    def losses(self, batch: Batch, *, exit: int = -1, size: int = 32) -> Float32[Tensor, " sequences"]:
        """Return the loss of each sequence, nats per token.

        Args:
            size: sequences at a time.
        """
        parts = [batch.part(start, start + size) for start in range(0, len(batch.tokens), size)]
        found = [losses_of(self.logits(each.tokens, each.positions, exit=exit), each.targets) for each in parts]
        return torch.cat(found)


def uniform(handover: Handover, num: int) -> tuple[Seam, ...]:
    """Return the seams of so many bodies, all alike."""
    return (Seam(handover=handover),) * (num - 1)


def handed_over(
    handover: Handover, x: Float[Tensor, "batch tokens width"], eps: float, matrix: Affine | None = None
) -> Float[Tensor, "batch tokens width"]:
    """Return what a body reads, of the residual stream that another has left.

    Args:
        eps: of the norm.
        matrix: of an affine handover.
    """
    match handover:
        case PreConfig():
            return x
        case PostConfig():
            return normed(x, eps)
        case ScaledConfig():
            return handover.alpha * normed(x, eps)
        case AffineConfig():
            assert matrix is not None
            return normed(x, eps) @ matrix[:-1] + matrix[-1]
    assert_never(handover)


def losses_of(
    logits: Float32[Tensor, "batch tokens vocab"], targets: Int64[Tensor, "batch tokens"]
) -> Float32[Tensor, " batch"]:
    """Return the mean cross entropy of each sequence, nats per token; -100 is not predicted, and counts nothing."""
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return each.sum(1) / (targets >= 0).sum(1).clamp(min=1)


# --- as one decoder ---


def whole(stack: Stack) -> tuple[ModelConfig, Float32[Tensor, " num"]]:
    """Return the decoder that a stack is, and its vector: to export, to serve, to train on.

    Raises:
        ConfigError: it is none; says why.
    """
    for number, seam in enumerate(stack.seams):
        if not isinstance(seam.handover, PreConfig):
            raise ConfigError(
                f"stack: seam {number}: a decoder norms nothing between its layers, so only handovers of type "
                f'"pre" can be folded into one. Found {msgspec.to_builtins(seam.handover)}. '
                "`weft serve` takes the stack as it is."
            )
    if any(loops != 1 for loops in stack.loops):
        raise ConfigError("stack: a decoder has no loops with a norm between them. Fold it with each body once.")
    config = _common(stack)
    kept = [layers_of(module)[i] for number, module in enumerate(stack.bodies) for i in stack.kept(number)]
    config = msgspec.structs.replace(config, num_layers=len(kept))
    ends = {"embed.weight": stack.space.embed, "norm.weight": stack.space.norm, "head.weight": stack.space.head}
    return config, gathered(config, sections.whole(config), numbered(kept) | ends)


def _common(stack: Stack) -> ModelConfig:
    """Return the config of a decoder with layers of all bodies, but for their number.

    Raises:
        ConfigError: one decoder does not have such layers.
    """
    space, configs = stack.space, [plain(module.config) for module in stack.bodies]
    ends = {"vocab_size": space.vocab_size, "is_tied": False, "norm_eps": space.norm_eps}
    ends["max_seq_len"] = min(config.max_seq_len for config in configs)
    first = msgspec.structs.replace(configs[0], **ends)
    for number, config in enumerate(configs):
        differ = [name for name in _SHAPE if getattr(config, name) != getattr(first, name)]
        if differ:
            raise ConfigError(
                f"stack: all layers of a decoder are alike, and member {number} has others: {', '.join(differ)}."
            )
        if config.first_windowed is not UNSET:
            raise ConfigError(f"stack: member {number} has a window in its last layers only, which no decoder repeats.")
    return first


# All of a config that a layer's numbers depend on.
_SHAPE = tuple(
    name
    for name in ModelConfig.__struct_fields__
    if name not in ("vocab_size", "num_layers", "max_seq_len", "is_tied", "first_windowed")
)
