"""What a stack is asked to be: how members are fitted, what lies between them, and which controls are grown."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from weft.cli.compose.parts import USUAL_BATCH, USUAL_STEPS, BatchSize, SeqLen
from weft.cli.settings import refuse_idle
from weft.errors import ConfigError
from weft.ids import several

if TYPE_CHECKING:
    from weft.compose.descent import DescentConfig
    from weft.compose.making import How
    from weft.compose.stacks.align import AlignConfig
    from weft.compose.stacks.grow import Growth
    from weft.compose.stacks.stack import Handover, Seam

T = TypeVar("T", int, float)


class Way(StrEnum):
    stitch = "stitch"
    one_way = "one-way"
    sauce = "sauce"
    joint = "joint"


class Between(StrEnum):
    post = "post"
    pre = "pre"
    scaled = "scaled"


class Exits(StrEnum):
    last = "last"
    all = "all"


class Grown(StrEnum):
    copy = "copy"
    depth = "depth"


_EACH = "One for all, or one between each two, from below."


@dataclass(frozen=True)
class Asked:
    how: Annotated[
        list[Way] | None,
        typer.Option(
            help="one-way: who reads is trained. sauce: who writes. stitch: a map between them. joint: all at once. "
            "Several are done one after the other. [default: one-way]",
            show_default=False,
        ),
    ] = None
    handover: Annotated[
        Between | None,
        typer.Option(
            help="What the next member reads: post, at the scale of an embedding; pre, as it is; scaled, by --scale. "
            "[default: pre for joint alone, else post]",
            show_default=False,
        ),
    ] = None
    scale: Annotated[
        list[float] | None,
        typer.Option(
            help=f"Of --handover scaled; `weft compose select` tells the best. {_EACH} [default: 1]",
            min=1e-3,
            max=1e4,
            show_default=False,
        ),
    ] = None
    cut_last: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Leave out so many of the last layers of who writes. {_EACH} [default: 0]",
            min=0,
            max=1024,
            show_default=False,
        ),
    ] = None
    cut_first: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Leave out so many of the first layers of who reads. {_EACH} [default: 0]",
            min=0,
            max=1024,
            show_default=False,
        ),
    ] = None
    exits: Annotated[
        Exits, typer.Option(help="Of --how joint: whose loss is lowered, the stack's or that after each member.")
    ] = Exits.last
    eta: Annotated[
        float | None,
        typer.Option(
            help="Of --how sauce: how far what a member wrote is moved in a round. [default: 16]",
            min=1e-6,
            max=100.0,
            show_default=False,
        ),
    ] = None
    per_round: Annotated[
        int | None,
        typer.Option(
            help="Of --how sauce: steps of a round, before members above are asked again. [default: 36]",
            min=1,
            max=10**6,
            show_default=False,
        ),
    ] = None
    growth: Annotated[
        list[Grown] | None,
        typer.Option(
            help="A control more, which takes as long as the stack: the lowest member on copies of itself (copy), or "
            "on copies of which a quarter of the layers is left out where they meet (depth). Layers that change "
            "nothing always are one.",
            show_default=False,
        ),
    ] = None
    steps: Annotated[int, typer.Option(help="Training steps of each way.", min=1)] = USUAL_STEPS
    batch_size: BatchSize = USUAL_BATCH
    seq_len: SeqLen = None

    @property
    def ways(self) -> "list[How]":
        return [each.value for each in self.how or [Way.one_way]]

    @property
    def grown(self) -> "tuple[Growth, ...]":
        return tuple(dict.fromkeys(each.value for each in self.growth or []))

    def seams(self, context: typer.Context, num: int) -> "tuple[Seam, ...]":
        """Return what lies between so many members.

        Raises:
            ConfigError: ways and handover do not go together, or an option would change nothing.
        """
        from weft.compose.making import require_ways, usual_handover
        from weft.compose.stacks.stack import PostConfig, PreConfig, ScaledConfig, Seam

        if self.handover is not Between.scaled:
            refuse_idle(context, "only --handover scaled has a scale", "scale")
        if Way.joint not in (self.how or []):
            refuse_idle(context, "only --how joint trains by exits", "exits")
        if Way.sauce not in (self.how or []):
            refuse_idle(context, "only --how sauce goes in rounds", "eta", "per_round")
        between = max(num - 1, 1)
        handovers: list[Handover]
        match self.handover:
            case None:
                handovers = [usual_handover(self.ways)] * between
            case Between.post:
                handovers = [PostConfig()] * between
            case Between.pre:
                handovers = [PreConfig()] * between
            case Between.scaled:
                handovers = [ScaledConfig(alpha=alpha) for alpha in _each("--scale", self.scale or [1.0], between)]
        require_ways(self.ways, handovers[0])
        lasts, firsts = (
            _each(option, given or [0], between)
            for option, given in (("--cut-last", self.cut_last), ("--cut-first", self.cut_first))
        )
        return tuple(
            Seam(handover=handover, cut_last=last, cut_first=first)
            for handover, last, first in zip(handovers, lasts, firsts, strict=True)
        )

    def trainings(self, num: int, training: "DescentConfig") -> "tuple[AlignConfig, ...]":
        """Return the trainings of a stack of so many members."""
        from weft.compose.making import Tuned, ways_of

        tuned = Tuned(exits=self.exits.value, eta=self.eta, per_round=self.per_round)
        return ways_of(self.ways, num, training, tuned)


def _each(option: str, given: Sequence[T], num: int) -> list[T]:
    """Return what was given for all places between members as so many.

    Raises:
        ConfigError: it is given for another number of places.
    """
    if len(given) not in (1, num):
        raise ConfigError(
            f"{option}: {several(len(given), 'value')}, and there {'is' if num == 1 else 'are'} "
            f"{several(num, 'place')} between {several(num + 1, 'member')}. Give one for all, or one for each."
        )
    return list(given) if len(given) == num else list(given) * num
