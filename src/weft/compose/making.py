"""Making a stack of members, and its controls: one training after the other, which goes on where it was stopped.

    stack        the members, aligned in the ways that were asked for, one after the other
    identity     the lowest member under layers that change nothing yet, aligned likewise
    copy         the lowest member under copies of itself, aligned likewise
    depth        the same without the layers where they meet (depth up-scaling: `stacks.grow`)
    continued    the member that is best on dev text, alone, for as many operations

The controls are no extra, but for copy and depth, which are made if asked for. Any training makes a stack better than
it was, and only they tell whether the upper members were worth having. They read the same text, batch after batch,
drawn by the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from torch import Tensor

from weft import wire
from weft.compose.descent import DescentConfig, Draw
from weft.compose.shelf import Shelf, later, through
from weft.compose.space import Space, numbers_digest
from weft.compose.stacks.align import (
    AlignConfig,
    ContinueConfig,
    JointConfig,
    OnewayConfig,
    Plan,
    StitchConfig,
    begin,
    plan,
)
from weft.compose.stacks.body import body, identity, vector_of
from weft.compose.stacks.grow import Growth, usual_dropped
from weft.compose.stacks.sauce import SauceConfig
from weft.compose.stacks.stack import AffineConfig, Handover, PostConfig, PreConfig, Seam, Stack
from weft.data.rows import Batch
from weft.errors import ConfigError
from weft.ids import Digest, several
from weft.model.transformer import SectionModule

How = Literal["stitch", "one-way", "sauce", "joint"]
LAYERS_SEED = 9  # of the matrices of layers that change nothing yet


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What some ways are told beside how they train.

    Args:
        exits: of "joint".
        eta, per_round: of "sauce"; None: as is usual.
    """

    exits: Literal["last", "all"] = "last"
    eta: float | None = None
    per_round: int | None = None

    def sauce(self, training: DescentConfig, member: int) -> SauceConfig:
        usual = SauceConfig(training=training, member=member)
        return msgspec.structs.replace(
            usual,
            eta=usual.eta if self.eta is None else self.eta,
            per_round=usual.per_round if self.per_round is None else self.per_round,
        )


def ways_of(
    how: Sequence[How], num: int, training: DescentConfig, tuned: Tuned | None = None
) -> tuple[AlignConfig, ...]:
    """Return the trainings of a stack of `num` members: from below where a member reads, from above where it writes."""
    tuned, found = tuned or Tuned(), list[AlignConfig]()
    for each in how:
        match each:
            case "stitch":
                found += [StitchConfig(training=training, seam=seam) for seam in range(num - 1)]
            case "one-way":
                found += [OnewayConfig(training=training, member=member) for member in range(1, num)]
            case "sauce":
                found += [tuned.sauce(training, member) for member in reversed(range(num - 1))]
            case "joint":
                found.append(JointConfig(training=training, exits=tuned.exits))
    return tuple(found)


def require_ways(how: Sequence[How], handover: Handover) -> None:
    """
    Raises:
        ConfigError: a way does not begin from what is between the members, or from what another way leaves there.
    """
    is_post, is_pre = isinstance(handover, PostConfig), isinstance(handover, PreConfig)
    if not how:
        raise ConfigError("no way of aligning. Name one or more: stitch, one-way, sauce, joint.")
    if "stitch" in how and is_pre:
        raise ConfigError("stitch begins from a handover that norms. Choose post or scaled.")
    last = max((place for place, each in enumerate(how) if each == "sauce"), default=0)
    if "sauce" in how and (not is_post or "stitch" in how[:last]):
        raise ConfigError(
            "sauce needs members that hand over at root mean square 1. Choose the handover post, and "
            "no stitch before it."
        )


def usual_handover(how: Sequence[How]) -> Handover:
    """Return how members hand over where nobody says: raw, where all train at once, as between a decoder's layers."""
    return PreConfig() if set(how) <= {"joint"} else PostConfig()


@dataclass(frozen=True, eq=False)
class Work:
    """What is asked for.

    Args:
        bodies: of the members, the lowest first.
        growth: controls beside those that always are made.

    Raises:
        ConfigError: the lowest member cannot be grown so.
    """

    space: Space
    bodies: tuple[SectionModule, ...]
    seams: tuple[Seam, ...]
    how: tuple[AlignConfig, ...]
    batch_size: int
    seq_len: int
    growth: tuple[Growth, ...] = ()

    def __post_init__(self) -> None:
        for how in self.growth:
            self.grown(how)  # what cannot be grown is said before anything is trained

    @property
    def stack(self) -> Stack:
        return Stack(self.space, self.bodies, self.seams)

    @property
    def identity(self) -> Stack:
        """The lowest member, with layers that change nothing in place of each other."""
        upper = [
            body(each.config, identity(each.config, LAYERS_SEED + number).to(self.space.embed.device))
            for number, each in enumerate(self.bodies[1:])
        ]
        return Stack(self.space, (self.bodies[0], *upper), self.seams)

    def grown(self, how: Growth) -> Stack:
        """Return the lowest member, grown to as many bodies as the stack has.

        Raises:
            ConfigError: it has too few layers.
        """
        lowest, num = self.bodies[0], len(self.bodies)
        match how:
            case "copy":
                seams = self.seams
            case "depth":
                cut = usual_dropped(lowest.config.num_layers)
                if (least := (cut if num == 2 else 2 * cut) + 1) > lowest.config.num_layers:
                    raise ConfigError(
                        f"growth by depth: where copies meet {several(cut, 'layer')} of each are left out, and the "
                        f"lowest member has {lowest.config.num_layers} in all. It takes {least}; grow by a copy."
                    )
                seams = tuple(msgspec.structs.replace(each, cut_last=cut, cut_first=cut) for each in self.seams)
        return Stack(self.space, (lowest,) * num, seams)

    def single(self, number: int) -> Stack:
        return Stack(self.space, (self.bodies[number],))

    # --- what it takes; of bodies without memory, too ---

    def plans(self, stack: Stack | None = None) -> list[Plan]:
        """Return what each training of the stack takes, or of another in its place."""
        return [plan(each, stack or self.stack, self.batch_size, self.seq_len) for each in self.how]

    def taken(self, number: int, stack: Stack | None = None) -> tuple[int, int]:
        """Return the tokens and operations of the trainings that change a member; of those of all, its part.

        Args:
            stack: as of `plans`.
        """
        tokens, flops = 0, 0.0
        for config, each in zip(self.how, self.plans(stack), strict=True):
            match config:
                case JointConfig():
                    tokens, flops = tokens + each.num_tokens, flops + each.flops / len(self.bodies)
                case OnewayConfig(member=number_) | SauceConfig(member=number_) if number_ == number:
                    tokens, flops = tokens + each.num_tokens, flops + each.flops
                case _:
                    pass
        return tokens, int(flops)

    @property
    def flops(self) -> int:
        """Of all trainings of the stack; of the identity's they are as many."""
        return self.flops_of(self.stack)

    def flops_of(self, stack: Stack) -> int:
        """Return those of another stack that is trained likewise."""
        return int(sum(each.flops for each in self.plans(stack)))

    def continued(self, best: int) -> ContinueConfig:
        """Return how a single member is trained on, to take as many operations as the stack."""
        longest = max((each.training for each in self.how), key=lambda each: each.steps)
        step = ContinueConfig(training=msgspec.structs.replace(longest, steps=1, warmup_steps=0))
        one = plan(step, self.single(best), self.batch_size, self.seq_len).flops
        steps = max(1, round(self.flops / one))
        warmup = min(longest.warmup_steps, steps)
        return ContinueConfig(training=msgspec.structs.replace(longest, steps=steps, warmup_steps=warmup))

    def num_steps(self, best: int) -> int:
        """Return how many steps `make` takes in all."""
        num = 2 + len(self.growth)
        return num * sum(each.training.steps for each in self.how) + self.continued(best).training.steps

    def digest(self, text: Digest) -> Digest:
        """Return what names all that the trainings depend on.

        Args:
            text: names what is trained on, and what the best is chosen by.
        """
        parts = [self.space.digest, *(numbers_digest(vector_of(each)) for each in self.bodies), text]
        told = msgspec.to_builtins((self.seams, self.how, self.batch_size, self.seq_len, self.growth))
        return wire.digest(msgspec.json.encode([parts, told]))


@dataclass(frozen=True, eq=False)
class Made:
    stack: Stack
    identity: Stack
    grown: Mapping[Growth, Stack]
    continued: SectionModule


def best_of(work: Work, dev: Batch) -> int:
    """Return the number of the member that has the least loss alone, on dev text."""
    losses = [float(work.single(number).losses(dev).mean()) for number in range(len(work.bodies))]
    return losses.index(min(losses))


def make(work: Work, best: int, draw: Draw, shelf: Shelf, on_step: Callable[[], None]) -> Made:
    """Make a stack and its controls, going on from what the shelf holds.

    Args:
        best: as `best_of` returns it.
        draw: what is trained on.
        shelf: opened for this work.
        on_step: told of each step, also of those that were made before.

    Raises:
        ConfigError: an alignment does not fit the stack.
        NotFinite: a training has diverged.
    """
    stack = _aligned("stack", work, work.stack, draw, shelf, on_step)
    identity = _aligned("identity", work, work.identity, draw, shelf, on_step)
    grown = {how: _aligned(how, work, work.grown(how), draw, shelf, on_step) for how in work.growth}
    single = _trained("continued", work.continued(best), work.single(best), draw, shelf, on_step)
    return Made(stack, identity, grown, single.bodies[0])


def _aligned(name: str, work: Work, stack: Stack, draw: Draw, shelf: Shelf, on_step: Callable[[], None]) -> Stack:
    """Return a stack after all of its trainings, each of which reads on where the one before ended."""
    num_before = 0
    for number, config in enumerate(work.how):
        stack = _trained(f"{name} {number}", config, stack, later(draw, num_before), shelf, on_step)
        num_before += config.training.steps
    return stack


def _trained(
    name: str, config: AlignConfig, begun: Stack, draw: Draw, shelf: Shelf, on_step: Callable[[], None]
) -> Stack:
    """Return the stack after one of its trainings."""
    found = through(
        name,
        config.training.steps,
        lambda: begin(config, begun, draw),
        lambda descent: _numbers(descent.stack),
        shelf,
        on_step,
    )
    return _restored(begun, found)


def _numbers(stack: Stack) -> dict[str, Tensor]:
    """Return all that a training may have changed of a stack."""
    found = {f"body.{number}": vector_of(each) for number, each in enumerate(stack.bodies)}
    return found | {f"map.{number}": each.clone() for number, each in enumerate(stack.maps) if each is not None}


def _restored(begun: Stack, numbers: dict[str, Tensor]) -> Stack:
    device = begun.space.embed.device
    bodies = tuple(body(each.config, numbers[f"body.{number}"].to(device)) for number, each in enumerate(begun.bodies))
    maps = tuple(numbers.get(f"map.{number}") for number in range(len(begun.seams)))
    seams = tuple(
        seam if matrix is None else msgspec.structs.replace(seam, handover=AffineConfig())
        for seam, matrix in zip(begun.seams, maps, strict=True)
    )
    there = tuple(None if each is None else each.to(device) for each in maps)
    return replace(begun, bodies=bodies, seams=seams, maps=there)


def changed(before: Stack, after: Stack) -> list[bool]:
    """Return of which bodies a training has changed the numbers."""
    return [not vector_of(one).equal(vector_of(other)) for one, other in zip(before.bodies, after.bodies, strict=True)]
