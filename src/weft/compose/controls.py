"""A composed model beside its controls: losses on text that nobody trained on, and what each took.

    composed      the stack, the exits below its last member, the members alone
    controls      best single      the member that was best on dev text
                  ensemble         the members asked together, each for as much
                  identity         layers that change nothing in place of the upper members, trained as the stack was
                  copy             copies of the lowest member in place of the upper ones, trained likewise
                  depth up-scaling the same without the layers where they meet; both if asked for
                  continued        the best single, trained on with as many operations as the stack
                  monolith         one model, trained with all operations that members and stack took

                  seed             what all paths began as

Experts that are asked together have no training of their own: they are told beside `best single`, `ensemble` and
`monolith`. A mixture has no layers that could change nothing: it is told beside all but `identity` and `seed`. Paths
are told beside the best of them, chosen on the same text, and beside all of them asked together, `seed` and `monolith`.

Differences are paired: of the same sequences, with the standard error of their mean. Below `TIE` nats, or two standard
errors, they are ties.

Why these: stacks of members that were trained apart lost against all of them but the first, in models of 1 MB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Literal

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.compose.experts.ensemble import Model, likelihoods
from weft.data.rows import Batch
from weft.errors import ConfigError

TIE = 0.015

Control = Literal["best single", "ensemble", "identity", "copy", "depth up-scaling", "continued", "monolith", "seed"]
OF_STACKS: tuple[Control, ...] = ("best single", "ensemble", "identity", "continued", "monolith")
OF_EXPERTS: tuple[Control, ...] = ("best single", "ensemble", "monolith")
OF_MIXTURES: tuple[Control, ...] = ("best single", "ensemble", "continued", "monolith")
OF_PATHS: tuple[Control, ...] = ("best single", "ensemble", "seed", "monolith")

Losses = Float32[Tensor, " sequences"]


@dataclass(frozen=True, eq=False)
class Row:
    """
    Args:
        losses: nats per token of each sequence.
        flops: of all that made it, members and their training together; None: nobody knows.
    """

    name: str
    losses: Losses
    flops: int | None

    @property
    def loss(self) -> float:
        return float(self.losses.double().mean())


@dataclass(frozen=True, eq=False)
class Report:
    """
    Args:
        exits: of a stack after each member below the last.
        needed: its controls.
        controls: of each its row; None of the monolith: it is told that there is none.

    Raises:
        ConfigError: a control is missing.
    """

    composed: Row
    exits: tuple[Row, ...]
    members: tuple[Row, ...]
    needed: tuple[Control, ...]
    controls: dict[Control, Row | None]

    def __post_init__(self) -> None:
        if missing := [name for name in self.needed if name not in self.controls]:
            raise ConfigError(f"a composed model is told beside its controls: {', '.join(missing)} is missing.")
        if none := [name for name, row in self.controls.items() if row is None and name != "monolith"]:
            raise ConfigError(f"a composed model is told beside its controls: {', '.join(none)} was not measured.")

    @property
    def adds(self) -> tuple[float, float] | None:
        """What the last member of a stack adds to the loss, and the standard error: below 0 it helps."""
        return paired(self.composed.losses, self.exits[-1].losses) if self.exits else None


def paired(losses: Losses, than: Losses) -> tuple[float, float]:
    """Return the mean difference of losses of the same sequences, two at least, and its standard error."""
    away = (losses - than).double()
    return float(away.mean()), float(away.std()) / sqrt(len(away))


def verdict(losses: Losses, than: Losses) -> Literal["better", "worse", "a tie"]:
    """Return what a paired difference comes to."""
    mean, error = paired(losses, than)
    if abs(mean) < max(TIE, 2 * error):
        return "a tie"
    return "better" if mean < 0 else "worse"


@torch.no_grad()
def ensemble(models: Sequence[Model], batch: Batch) -> Losses:
    """Return the losses of models that are asked together: the mean of their probabilities."""
    likely = likelihoods(models, batch.tokens, batch.targets)
    return -(likely.logsumexp(-1) - log(len(models))).mean(1)


@torch.no_grad()
def losses(model: Model, batch: Batch) -> Losses:
    """Return the loss of each sequence of running text, nats per token."""
    return -likelihoods([model], batch.tokens, batch.targets)[..., 0].mean(1)
