"""How members that were trained apart are fitted to each other, and what that takes.

    stitch      an affine map in a seam is trained, all members are frozen
    oneway      a member is trained on what the frozen ones below it write
    sauce       a member is trained on what those above it would rather read (`sauce`)
    joint       all are trained at once, by the loss of the last exit or of all
    continue    a single member is trained on: the control of all the others

Weights travel and not latents: who aligns fetches the others' weights once and computes on its own text. `plan` says
how many bytes that is, and how many the latents would be.

Stitching: Bansal et al., 2106.07682. One way, on frozen layers: growing by layers. All exits: Teerapittayanon et al.,
1709.01686.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Annotated, Literal, assert_never

import msgspec
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from weft.compose.descent import Descent, DescentConfig, Draw, Trained
from weft.compose.stacks.body import body, unattached, vector_of
from weft.compose.stacks.sauce import Sauce, SauceConfig
from weft.compose.stacks.stack import Affine, AffineConfig, PostConfig, PreConfig, ScaledConfig, Stack, identity_map
from weft.config import Config
from weft.cost.pipeline import Flops, section_flops
from weft.cost.training import vector_nbytes
from weft.errors import ConfigError
from weft.model.flat import over
from weft.model.sections import Section, middle, num_section_parameters
from weft.training.section_memory import shape_of

Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 10, description="in the stack, from below")]


class StitchConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="stitch"):
    """Train an affine map between two frozen members."""

    training: DescentConfig
    seam: Place = 0


class OnewayConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="oneway"):
    """Train a member on what the frozen ones below it write."""

    training: DescentConfig
    member: Place = 1


class JointConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="joint"):
    """Train all members at once."""

    training: DescentConfig
    exits: Literal["last", "all"] = "last"
    """Whose loss counts: of all exits the mean."""


class ContinueConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="continue"):
    """Train a single member on."""

    training: DescentConfig


AlignConfig = StitchConfig | OnewayConfig | SauceConfig | JointConfig | ContinueConfig


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What is trained of a stack, and on which losses.

    Args:
        members, maps: that are trained: of bodies and of seams the numbers.
        weights: of each exit that counts, in the loss.
    """

    members: Set[int] = frozenset()
    maps: Set[int] = frozenset()
    weights: Mapping[int, float]

    @property
    def num(self) -> int:
        """How many bodies compute."""
        return max(self.weights) + 1


def aim_of(config: StitchConfig | OnewayConfig | JointConfig | ContinueConfig, stack: Stack) -> Aim:
    """
    Raises:
        ConfigError: the stack has no such member or seam.
    """
    last = len(stack.bodies) - 1
    match config:
        case StitchConfig(seam=seam):
            _require(seam < last, f"stitch: seam: {seam}", stack)
            return Aim(maps={seam}, weights={last: 1.0})
        case OnewayConfig(member=member):
            _require(0 < member <= last, f"oneway: member: {member}", stack)
            return Aim(members={member}, weights={member: 1.0})
        case JointConfig(exits="last"):
            return Aim(members=set(range(last + 1)), weights={last: 1.0})
        case JointConfig():
            return Aim(members=set(range(last + 1)), weights=dict.fromkeys(range(last + 1), 1 / (last + 1)))
        case ContinueConfig():
            _require(last == 0, "continue: a single member", stack)
            return Aim(members={0}, weights={0: 1.0})
    assert_never(config)


def _require(is_there: bool, what: str, stack: Stack) -> None:
    if not is_there:
        num = len(stack.bodies)
        raise ConfigError(f"{what} of a stack of {num}. Members are numbered from 0 below, the lowest reads tokens.")


class Synchronous(Descent):
    """Training by the gradient of the exits' losses, of all that is trained at once.

    Args:
        stack: not changed: what is trained is a copy.
    """

    def __init__(self, training: DescentConfig, stack: Stack, draw: Draw, aim: Aim) -> None:
        self._aim = aim
        self._stack = stack
        self._members = {
            number: over(unattached(stack.bodies[number].config), vector_of(stack.bodies[number]))
            for number in sorted(aim.members)
        }
        self._maps = {number: _TrainedMap(_map_of(stack, number)) for number in sorted(aim.maps)}
        trained = {f"member {number}": Trained.of(flat) for number, flat in self._members.items()}
        trained |= {f"map {number}": each.trained for number, each in self._maps.items()}
        live = stack
        for number, flat in self._members.items():
            live = live.with_body(number, flat.module)
        for number, each in self._maps.items():
            live = _with_map(live, number, each.parameter)
        self._live = live
        super().__init__(training, draw, trained)

    @property
    def stack(self) -> Stack:
        """The stack as trained so far, which further steps change."""
        found = self._stack
        for number, flat in self._members.items():
            found = found.with_body(number, body(flat.config, flat.vector))
        for number, each in self._maps.items():
            found = _with_map(found, number, each.parameter.detach())
        return found

    def _loss(self, number: int) -> Tensor:
        batch, space = self._draw(number), self._live.space
        exits = self._live.exits(batch.tokens, batch.positions, num=self._aim.num)
        losses = [weight * space.loss(exits[exit], batch.targets) for exit, weight in self._aim.weights.items()]
        return torch.stack(losses).sum()


class _TrainedMap:
    """An affine map over a vector: W decays, b does not."""

    def __init__(self, matrix: Affine) -> None:
        vector = matrix.detach().flatten().clone()
        self.parameter = nn.Parameter(vector.view(matrix.shape))
        self.trained = Trained(vector, torch.zeros_like(vector), vector.numel() - matrix.shape[1])
        self.parameter.grad = self.trained.gradient.view(matrix.shape)


def _map_of(stack: Stack, seam: int) -> Float32[Tensor, "rows width"]:
    """Return the map that does what a seam does.

    Raises:
        ConfigError: none does.
    """
    same = identity_map(stack.space.width).to(stack.space.embed.device)
    match stack.seams[seam].handover:
        case PostConfig():
            return same
        case ScaledConfig(alpha=alpha):
            return alpha * same
        case AffineConfig():
            found = stack.maps[seam]
            assert found is not None
            return found
        case PreConfig():
            raise ConfigError(
                f'stitch: seam {seam} is of type "pre"; a map begins from one that norms, such as "post".'
            )
    assert_never(stack.seams[seam].handover)


def _with_map(stack: Stack, number: int, matrix: Affine) -> Stack:
    seam = msgspec.structs.replace(stack.seams[number], handover=AffineConfig())
    seams, maps = list(stack.seams), list(stack.maps)
    seams[number], maps[number] = seam, matrix
    return replace(stack, seams=tuple(seams), maps=tuple(maps))


Alignment = Synchronous | Sauce


def begin(config: AlignConfig, stack: Stack, draw: Draw) -> Alignment:
    """Return an alignment before its first step.

    Raises:
        ConfigError: it does not fit the stack.
    """
    if isinstance(config, SauceConfig):
        return Sauce(config, stack, draw)
    return Synchronous(config.training, stack, draw, aim_of(config, stack))


# --- what it takes ---


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an alignment takes.

    Args:
        num_trained: parameters.
        received_nbytes: the weights of all members but the one that whoever aligns has trained itself, once.
        latents_nbytes: what the latents that the members read of each other would be, in their place.
        flops: of all steps.
    """

    num_steps: int
    num_tokens: int
    num_trained: int
    received_nbytes: int
    latents_nbytes: int
    flops: float


def plan(config: AlignConfig, stack: Stack, batch_size: int, seq_len: int) -> Plan:
    """
    Raises:
        ConfigError: the alignment does not fit the stack.
    """
    steps, num_tokens = config.training.steps, config.training.steps * batch_size * seq_len
    sizes = [num_section_parameters(each.config, middle(each.config)) for each in stack.bodies]
    if isinstance(config, SauceConfig):
        members, own, read = {config.member}, config.member, range(len(sizes))
        flops, num_trained = sauce_flops(config, stack, seq_len), sizes[config.member]
    else:
        aim = aim_of(config, stack)
        members, own, read = set(aim.members), min(aim.members | aim.maps), range(aim.num)
        width = stack.space.width
        num_trained = sum(sizes[number] for number in members) + len(aim.maps) * (width + 1) * width
        flops = synchronous_flops(aim, stack, seq_len)
    return Plan(
        num_steps=steps,
        num_tokens=num_tokens,
        num_trained=num_trained,
        received_nbytes=vector_nbytes(sum(sizes[number] for number in read if number != own)),
        latents_nbytes=vector_nbytes((len(read) - 1) * num_tokens * stack.space.width),
        flops=flops * num_tokens,
    )


def synchronous_flops(aim: Aim, stack: Stack, seq_len: int) -> float:
    """Return the operations of training on a token: back only down to what is trained, heads of exits that count."""
    lowest = min(aim.members | {seam + 1 for seam in aim.maps})
    found = 0.0
    for number in range(aim.num):
        each = member_flops(stack, number, seq_len)
        found += each.forward + each.input * (number >= lowest) + each.weights * (number in aim.members)
    return found + len(aim.weights) * head_flops(stack)


def sauce_flops(config: SauceConfig, stack: Stack, seq_len: int) -> float:
    """Return the operations of a token: its latents, their corrections, the member's step on them."""
    flops = [member_flops(stack, number, seq_len) for number in range(len(stack.bodies))]
    below, member, above = flops[: config.member], flops[config.member], flops[config.member + 1 :]
    latents = sum(each.forward for each in [*below, member])
    a_correction = sum(each.forward + each.input for each in above) + head_flops(stack)
    a_step = sum(each.forward for each in below) + member.total + (head_flops(stack) if config.grounding else 0.0)
    return latents + config.corrections * a_correction + a_step


def member_flops(stack: Stack, number: int, seq_len: int) -> Flops:
    """Return what a body computes of a token, as often as it loops."""
    once = section_flops(shape_of(stack.bodies[number].config, Section(1, 3, stack.kept(number))), seq_len)
    loops = stack.loops[number]
    return Flops(forward=loops * once.forward, input=loops * once.input, weights=loops * once.weights)


def head_flops(stack: Stack) -> float:
    """Return what a frozen head computes of a token, there and back."""
    return 2 * 2 * stack.space.vocab_size * stack.space.width
