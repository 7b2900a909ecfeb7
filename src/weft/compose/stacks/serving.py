"""Stacks as an engine asks them: a step of each member, and a seam before the next.

    pieces ──► embedding, body 0 ──► seam 0 ──► body 1 ──► ... ──► body n, norm, head ──► logits

Each member is a section of a model (`model.sections`), as a stage is, with keys and values of its own in pages of the
same numbers. So texts share pages, give them up and come back as they do with one model. What is cut off a member is
no part of its section.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from msgspec import structs
from torch import Tensor
from torch.nn.functional import rms_norm

from weft.compose.stacks.body import gathered, layers_of, numbered
from weft.compose.stacks.stack import Affine, AffineConfig, PostConfig, PreConfig, ScaledConfig, Seam, Stack
from weft.engine.batch import Piece
from weft.engine.load import NUMBER_NBYTES, Needs, Plan, weights_nbytes
from weft.engine.numbers import MATRICES, Kind, normed
from weft.engine.step import KeysAndValues, Stepper, Weights, page_nbytes
from weft.errors import ConfigError
from weft.model.config import ModelConfig, plain
from weft.model.sections import Section

Rows = Float[Tensor, "rows width"]


class StackSteps:
    """
    Args:
        members: sections, the lowest first.
        seams: one less: what a member reads, of what the one below has left.
    """

    has_sums = True

    def __init__(self, members: Sequence[Stepper], seams: Sequence[Callable[[Rows], Rows]]) -> None:
        (*self._below, self._last), self._seams = members, seams

    @property
    def sums(self) -> Sequence[Float[Tensor, " width"]]:
        return self._last.sums

    @property
    def num_graphs(self) -> int:
        return sum(each.num_graphs for each in (*self._below, self._last))

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece]) -> Float[Tensor, "drawing vocab"]:
        """As of a `Stepper`."""
        for member, seam in zip(self._below, self._seams, strict=True):
            left = member.pass_on(pieces)
            read = torch.split(seam(torch.cat(left)), [len(each) for each in left])
            pieces = [replace(piece, tokens=rows) for piece, rows in zip(pieces, read, strict=True)]
        return self._last.step(pieces)


def needs_of(stack: Stack, kind: Kind, context: int) -> Needs:
    """Return what serving a stack takes; arguments are those of `engine.load.needs`."""
    parts = [_part(stack, number) for number in range(len(stack.bodies))]
    maps = sum(matrix.numel() * NUMBER_NBYTES[kind] for matrix in stack.maps if matrix is not None)
    weights = sum(weights_nbytes(config, kind, section) for config, section in parts) + maps
    a_page = sum(page_nbytes(config, kind, len(section.layers)) for config, section in parts)
    return Needs("the members of the stack take", kind, weights, a_page, context)


def steps_of(stack: Stack, device: torch.device, planned: Plan) -> StackSteps:
    """Return the steps of a stack.

    Raises:
        ConfigError: a member loops.
    """
    kind, eps = planned.kind, stack.space.norm_eps
    if any(loops != 1 for loops in stack.loops):
        raise ConfigError("stack: a member that loops is not served. Stack it as it is, or serve it without its loops.")
    members = []
    for number in range(len(stack.bodies)):
        config, section = _part(stack, number)
        vector = gathered(config, section, _tensors(stack, number)).to(device)
        kept = KeysAndValues(config, planned.num_pages, device, kind, len(section.layers))
        members.append(Stepper(Weights(config, vector, kind, section), kept))
    seams = [
        _seam(seam, kind, eps, None if matrix is None else matrix.to(device))
        for seam, matrix in zip(stack.seams, stack.maps, strict=True)
    ]
    return StackSteps(members, seams)


def _part(stack: Stack, number: int) -> tuple[ModelConfig, Section]:
    """Return a member as a section: between the ends of the space, and without the layers that are cut off."""
    space = stack.space
    config = structs.replace(
        plain(stack.bodies[number].config), vocab_size=space.vocab_size, is_tied=False, norm_eps=space.norm_eps
    )
    return config, Section(number, len(stack.bodies), stack.kept(number), has_table=number == 0)


def _tensors(stack: Stack, number: int) -> dict[str, Tensor]:
    space = stack.space
    ends = {"embed.weight": space.embed, "norm.weight": space.norm, "head.weight": space.head}
    return numbered(layers_of(stack.bodies[number])) | ends


def _seam(seam: Seam, kind: Kind, eps: float, matrix: Affine | None) -> Callable[[Rows], Rows]:
    """Return what `stack.handed_over` does, in the numbers of an engine."""

    def read(x: Rows) -> Rows:
        if kind == "exact":
            return normed(x, x.new_ones(x.shape[-1]), eps)
        return rms_norm(x, x.shape[-1:], eps=eps)

    match seam.handover:
        case PreConfig():
            return lambda x: x
        case PostConfig():
            return read
        case ScaledConfig(alpha=alpha):
            return lambda x: alpha * read(x)
        case AffineConfig():
            assert matrix is not None
            product, shift = MATRICES[kind](matrix[:-1].t().contiguous()), matrix[-1].clone()
            return lambda x: product(read(x)) + shift
