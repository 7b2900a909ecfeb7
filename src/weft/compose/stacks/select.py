"""Which members go on which: every pair is tried, then orders and subsets are searched. Nothing is trained.

    matrix     dev loss of every ordered pair, at the best scale of its handover, beside that of the lower alone
    search     the best `width` stacks of each depth grow by every member that they lack; told on other text

A large scale hides the upper member: what it adds is small beside what it reads. So a pair is told with what its upper
member contributes, which is its loss less that of the lower alone. The lower alone is also the lower under layers that
change nothing: the column of the identity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from weft.compose.space import Space
from weft.compose.stacks.stack import ScaledConfig, Seam, Stack, handed_over, losses_of
from weft.data.rows import Batch
from weft.errors import ConfigError
from weft.model.transformer import SectionModule

ALPHAS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_AT_A_TIME = 32  # sequences


@dataclass(frozen=True)
class Pair:
    """
    Args:
        alpha: that had the least loss.
        loss: of the pair, on dev.
        contribution: of the upper member: below 0 it helps.
    """

    alpha: float
    loss: float
    contribution: float


@dataclass(frozen=True)
class Matrix:
    """
    Args:
        alone: loss of each member, on dev: the column of the identity.
        pairs: by the lower member and the upper one.
    """

    alone: Mapping[str, float]
    pairs: Mapping[tuple[str, str], Pair]


@dataclass(frozen=True)
class Found:
    """A stack that a search has found.

    Args:
        order: the names of its members, from below.
        alphas: of its seams.
        dev: its loss there, by which it was chosen.
        test: its loss for each sequence of other text.
    """

    order: tuple[str, ...]
    alphas: tuple[float, ...]
    dev: float
    test: Float32[Tensor, " sequences"]


def matrix(space: Space, members: Mapping[str, SectionModule], dev: Batch, alphas: Sequence[float] = ALPHAS) -> Matrix:
    """Return how members go with each other, and each with itself."""
    alone = {name: _single(space, name, module, dev) for name, module in members.items()}
    pairs = {}
    for lower, begun in alone.items():
        for upper, module in members.items():
            found = _extended(space, begun, upper, module, (dev, alphas))
            pairs[lower, upper] = Pair(found.alphas[0], found.loss, found.loss - begun.loss)
    return Matrix({name: each.loss for name, each in alone.items()}, pairs)


def search(
    space: Space,
    members: Mapping[str, SectionModule],
    texts: tuple[Batch, Batch],
    depth: int,
    width: int = 4,
    alphas: Sequence[float] = ALPHAS,
) -> list[Found]:
    """Return the best stack of each depth, the best of all first.

    Args:
        texts: dev, by which stacks are chosen, and test, on which what was chosen is told.
        depth: of members at most, each of which stands in a stack once.
        width: stacks of each depth that grow: the beam.

    Raises:
        ConfigError: there are no members.
    """
    dev, test = texts
    if not members:
        raise ConfigError("selection: no members. It takes one at least.")
    beam, best = [_single(space, name, module, dev) for name, module in members.items()], list[_Candidate]()
    while beam and len(best) < depth:
        beam = sorted(beam, key=attrgetter("loss"))[:width]
        best.append(beam[0])
        beam = [
            _extended(space, below, name, module, (dev, alphas))
            for below in beam
            for name, module in members.items()
            if name not in below.order
        ]
    return [_told(space, members, each, test) for each in sorted(best, key=attrgetter("loss"))]


@dataclass(frozen=True)
class _Candidate:
    """A stack that is tried, and the residual stream that it leaves over dev."""

    order: tuple[str, ...]
    alphas: tuple[float, ...]
    x: Float[Tensor, "batch tokens width"]
    loss: float


@torch.no_grad()
def _single(space: Space, name: str, module: SectionModule, dev: Batch) -> _Candidate:
    x = _run(module, space.begin(dev.tokens), dev)
    return _Candidate((name,), (), x, _loss(space, x, dev))


@torch.no_grad()
def _extended(
    space: Space, below: _Candidate, name: str, module: SectionModule, tuned: tuple[Batch, Sequence[float]]
) -> _Candidate:
    """Return the candidate with one more member, at the scale that has the least loss."""
    dev, alphas = tuned
    tried = []
    for alpha in alphas:
        x = _run(module, handed_over(ScaledConfig(alpha=alpha), below.x, space.norm_eps), dev)
        tried.append(_Candidate((*below.order, name), (*below.alphas, alpha), x, _loss(space, x, dev)))
    return min(tried, key=attrgetter("loss"))


def _told(space: Space, members: Mapping[str, SectionModule], found: _Candidate, test: Batch) -> Found:
    return Found(found.order, found.alphas, found.loss, scaled(space, members, found.order, found.alphas).losses(test))


def scaled(space: Space, members: Mapping[str, SectionModule], order: Sequence[str], alphas: Sequence[float]) -> Stack:
    """Return the stack of these members, from below, with these scales between them."""
    seams = tuple(Seam(handover=ScaledConfig(alpha=alpha)) for alpha in alphas)
    return Stack(space, tuple(members[name] for name in order), seams)


def _run(module: SectionModule, x: Float[Tensor, "batch tokens width"], dev: Batch) -> Tensor:
    positions = dev.positions
    return torch.cat([module(x[here], positions=None if positions is None else positions[here]) for here in _parts(x)])


def _loss(space: Space, x: Float[Tensor, "batch tokens width"], dev: Batch) -> float:
    found = torch.cat([losses_of(space.logits(x[here]), dev.targets[here]) for here in _parts(x)])
    return float(found.mean())


def _parts(x: Tensor) -> list[slice]:
    return [slice(start, start + _AT_A_TIME) for start in range(0, len(x), _AT_A_TIME)]
