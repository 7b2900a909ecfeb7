"""What one member is taught alone, on text of this machine: a training that goes on where it was stopped."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from jaxtyping import Float32
from torch import Tensor

from weft import wire
from weft.compose.descent import DescentConfig, Draw
from weft.compose.shelf import Shelf, through
from weft.compose.space import Space, numbers_digest
from weft.compose.stacks.body import vector_of
from weft.compose.stacks.solo import MemberDescent
from weft.compose.stacks.stack import Stack
from weft.ids import Digest
from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule


@dataclass(frozen=True, eq=False, kw_only=True)
class Lesson(ABC):
    """
    Args:
        body: of the member.
        seed: of whatever is drawn besides text.
    """

    name: ClassVar[str]  # of the training, on a shelf

    space: Space
    body: SectionModule
    training: DescentConfig
    batch_size: int
    seq_len: int
    seed: int

    @property
    @abstractmethod
    def settings(self) -> object:
        """All else that the training depends on: of what records are made of."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """The operations of all steps."""

    @abstractmethod
    def begin(self, draw: Draw) -> MemberDescent[FlatModel]:
        """Return the training before its first step."""

    @property
    def tokens(self) -> int:
        """How many are read, each of them once or more."""
        return self.training.steps * self.batch_size * self.seq_len

    @property
    def member(self) -> Stack:
        """The member, alone."""
        return Stack(self.space, (self.body,))

    def digest(self, text: Digest) -> Digest:
        """Return what names all that the training depends on; `text` names what is read."""
        parts = [self.space.digest, numbers_digest(vector_of(self.body)), text]
        told = msgspec.to_builtins((self.settings, self.training, self.batch_size, self.seq_len, self.seed))
        return wire.digest(msgspec.json.encode([parts, told]))

    def make(self, draw: Draw, shelf: Shelf, on_step: Callable[[], None]) -> Float32[Tensor, " num"]:
        """Return the vector that was trained; arguments as of `making.make`.

        Raises:
            NotFinite: it has diverged.
        """
        steps = self.training.steps
        found = through(
            self.name, steps, lambda: self.begin(draw), lambda made: {"vector": made.vector}, shelf, on_step
        )
        return found["vector"].to(self.space.embed.device)
