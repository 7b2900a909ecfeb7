"""Training a member on what it wrote itself (`stacks.latents`), which goes on where it was stopped."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from jaxtyping import Float32
from torch import Tensor

from weft import wire
from weft.compose.descent import DescentConfig, Draw
from weft.compose.shelf import Shelf, through
from weft.compose.space import Space, numbers_digest
from weft.compose.stacks.body import vector_of
from weft.compose.stacks.latents import LatentConfig, LatentDescent, loop_flops
from weft.compose.stacks.stack import Stack
from weft.ids import Digest
from weft.model.transformer import SectionModule


@dataclass(frozen=True, eq=False)
class Loop:
    """What is asked for.

    Args:
        body: of the member.
        seed: of which positions are replaced.
    """

    space: Space
    body: SectionModule
    config: LatentConfig
    training: DescentConfig
    batch_size: int
    seq_len: int
    seed: int

    @property
    def tokens(self) -> int:
        """Return how many are read, each once or twice."""
        return self.training.steps * self.batch_size * self.seq_len

    @property
    def flops(self) -> int:
        member = Stack(self.space, (self.body,))
        return int(self.batch_size * self.seq_len * loop_flops(self.config, self.training.steps, member, self.seq_len))

    def digest(self, text: Digest) -> Digest:
        """Return what names all that the training depends on; `text` names what is read."""
        parts = [self.space.digest, numbers_digest(vector_of(self.body)), text]
        told = msgspec.to_builtins((self.config, self.training, self.batch_size, self.seq_len, self.seed))
        return wire.digest(msgspec.json.encode([parts, told]))

    def make(self, draw: Draw, shelf: Shelf, on_step: Callable[[], None]) -> Float32[Tensor, " num"]:
        """Return the vector of the member's body after it; arguments as of `making.make`.

        Raises:
            NotFinite: it has diverged.
        """
        member = self.body.config, vector_of(self.body)
        found = through(
            "loop",
            self.training.steps,
            lambda: LatentDescent(self.config, self.training, self.space, member, draw, self.seed),
            lambda descent: {"vector": descent.vector},
            shelf,
            on_step,
        )
        return found["vector"].to(self.space.embed.device)
