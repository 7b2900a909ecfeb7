"""What a step computes: pieces of texts, and the same as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in a step.

    Args:
        tokens: new ones; after the first section, what the one before made of them, fp32.
        start: the position of the first.
        pages: of the sequence, those of the new tokens among them.
        num_draws: after how many of the last the logits are wanted.
        sums: whether the sum of the last hidden states of these tokens is.
    """

    tokens: Sequence[int] | Float[Tensor, "new width"]
    start: int
    pages: Sequence[int]
    num_draws: int
    sums: bool = False

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Spread(NamedTuple):
    """Texts that are computed together: as many new tokens each, and as many pages.

    Args:
        start, num, num_new, kept: as of `attention.Group`.
        num_all: tokens for which there are pages.
        starts: places of the first new tokens.
    """

    start: int
    num: int
    num_new: int
    num_all: int
    kept: Int64[Tensor, " places"]
    starts: Int64[Tensor, " num"]


class Batch(NamedTuple):
    """The rows of a step, those of one text together.

    Args:
        given: tokens, or what the section before made of them.
        places: of each, in its text.
        written: where keys and values of the new tokens go, by row and head.
    """

    given: Tensor
    places: Int64[Tensor, " rows"]
    written: Int64[Tensor, " written"]
    spreads: tuple[Spread, ...]

    @property
    def tensors(self) -> list[Tensor]:
        of_spreads = [each for spread in self.spreads for each in (spread.kept, spread.starts)]
        return [self.given, self.places, self.written, *of_spreads]

    def cloned(self) -> "Batch":
        spreads = tuple(each._replace(kept=each.kept.clone(), starts=each.starts.clone()) for each in self.spreads)
        return Batch(self.given.clone(), self.places.clone(), self.written.clone(), spreads)
