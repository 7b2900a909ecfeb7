"""Training a member on what it wrote itself (`stacks.latents`), which goes on where it was stopped."""

from dataclasses import dataclass
from typing import ClassVar

from weft.compose.descent import Draw
from weft.compose.lesson import Lesson
from weft.compose.stacks.body import vector_of
from weft.compose.stacks.latents import LatentConfig, LatentDescent, loop_flops


@dataclass(frozen=True, eq=False, kw_only=True)
class Loop(Lesson):
    """What is asked for; its seed is that of which positions are replaced."""

    name: ClassVar[str] = "loop"

    config: LatentConfig

    @property
    def settings(self) -> object:
        return self.config

    @property
    def flops(self) -> int:
        a_token = loop_flops(self.config, self.training.steps, self.member, self.seq_len)
        return int(self.batch_size * self.seq_len * a_token)

    def begin(self, draw: Draw) -> LatentDescent:
        member = self.body.config, vector_of(self.body)
        return LatentDescent(self.config, self.training, self.space, member, draw, self.seed)
