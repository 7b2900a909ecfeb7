"""The special sauce: a member learns to write what the members above it would rather read. Only weights travel.

    of a round, with the member as it is then:    h = n(f(x));  z_0 = h
                                                  z_{k+1} = n(z_k - eta dCE(g(z_k), y) / dz_k)      k < K
    its steps:                                    |n(f'(x)) - z_K|^2 / (2 eta K) + lambda CE(f'(x), y)

f is the member, g what lies above it, frozen, and n a RMSNorm without parameters. Whoever has g's weights computes z
itself. With K = 1, a small eta and f' = f the gradient of the first term is that of CE(g(n(f(x))), y): it is training
by gradients that are a round old. eta is also how far a round goes, for the term pulls back what has gone beyond z: a
small one mends little in a few rounds. A larger one bends the way a little, more corrections bend it far: they lead
where g is sure of what it is then told. For z holds the answer. Nothing but these steps ever reads it.

What was made with another member than the round begins with is stale, and refused.

Stacked models: snimu.github.io/2025/02/18/model-stacking. Of gradients that are late: Huo et al., 1804.10574.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor

from weft.compose.descent import Descent, DescentConfig, Draw, State, Trained
from weft.compose.space import normed, numbers_digest
from weft.compose.stacks.body import body, unattached, vector_of
from weft.compose.stacks.stack import PostConfig, Stack
from weft.config import Config
from weft.data.rows import Batch
from weft.errors import ConfigError
from weft.ids import Digest, short
from weft.model.flat import over

Latents = Float[Tensor, "batch tokens width"]


class SauceConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="sauce"):
    """Train a member on what those above it would rather have read."""

    training: DescentConfig
    member: Annotated[int, msgspec.Meta(ge=0, le=1 << 10, description="of the stack, that is trained")] = 0
    per_round: Annotated[int, msgspec.Meta(ge=1, le=10**6, description="steps on latents of one round")] = 36
    corrections: Annotated[int, msgspec.Meta(ge=1, le=16, description="gradient steps on latents: K")] = 1
    eta: Annotated[float, msgspec.Meta(gt=0, le=100, description="how long they are")] = 16.0
    grounding: Annotated[float, msgspec.Meta(ge=0, le=100, description="weight of its own loss: lambda")] = 0.5


@dataclass(frozen=True)
class Cache:
    """Corrected latents of a round.

    Args:
        members: digests of all members of the stack, as they were then.
        first: number of the round's first step.
        latents: of each step.
    """

    members: tuple[Digest, ...]
    first: int
    latents: tuple[Latents, ...]

    def require(self, members: tuple[Digest, ...], first: int) -> None:
        """
        Raises:
            ConfigError: it was made for another round, or with other members.
        """
        if (self.members, self.first) != (members, first):
            raise ConfigError(
                f"latents for the round from step {self.first} on, by members {_said(self.members)}, are stale: the "
                f"round begins with step {first} and members {_said(members)}. Make them anew."
            )


class Sauce(Descent):
    """
    Args:
        stack: not changed: what is trained is a copy.

    Raises:
        ConfigError: there is nothing above the member, or it does not hand over at root mean square 1.
    """

    def __init__(self, config: SauceConfig, stack: Stack, draw: Draw) -> None:
        member = config.member
        if member >= len(stack.seams):
            raise ConfigError(f"sauce: member: {member} has none above it that could correct it. Choose a lower one.")
        if not isinstance(stack.seams[member].handover, PostConfig):
            raise ConfigError(
                'sauce: eta is a length on latents of root mean square 1, which only a handover of type "post" gives. '
                f"Found {msgspec.to_builtins(stack.seams[member].handover)}."
            )
        shape = stack.bodies[member].config
        self._flat = over(unattached(shape), vector_of(stack.bodies[member]))
        self._snapshot = self._flat.vector.clone()
        self._live = stack.with_body(member, self._flat.module)
        self._then = stack.with_body(member, body(shape, self._snapshot))
        self._above = tuple(numbers_digest(vector_of(each)) for each in stack.bodies)
        self._sauce = config
        self._cache: Cache | None = None
        super().__init__(config.training, draw, {"member": Trained.of(self._flat)})

    @property
    def stack(self) -> Stack:
        """The stack with the member as trained so far, which further steps change."""
        return self._live.with_body(self._sauce.member, body(self._flat.config, self._flat.vector))

    def collect(self) -> Cache:
        """Return the corrected latents of the round of the next step."""
        members, first = self._open()
        stop = min(first + self._sauce.per_round, self.config.steps)
        batches = (self._draw(number) for number in range(first, stop))
        return Cache(members, first, tuple(corrected(self._sauce, self._then, batch) for batch in batches))

    def take(self, cache: Cache) -> None:
        """Train this round on latents that somebody else has made, who keeps the weights above to himself.

        Raises:
            ConfigError: they are stale.
        """
        cache.require(*self._open())
        self._cache = cache

    def load(self, state: State) -> None:
        super().load(state)
        self._cache = None

    def _open(self) -> tuple[tuple[Digest, ...], int]:
        """Begin a round if the next step is its first; return whom it began with, and that step's number."""
        within = self.num_steps % self._sauce.per_round
        if not within:
            self._snapshot.copy_(self._flat.vector)
        members, place = self._above, self._sauce.member
        return (*members[:place], numbers_digest(self._snapshot), *members[place + 1 :]), self.num_steps - within

    def _loss(self, number: int) -> Tensor:
        config, batch, member = self._sauce, self._draw(number), self._sauce.member
        first = number - number % config.per_round
        if self._cache is None or self._cache.first != first:
            self._cache = self.collect()
        wanted = self._cache.latents[number - first]
        x = self._live.exits(batch.tokens, batch.positions, num=member + 1)[-1]
        away = (normed(x, self._live.space.norm_eps) - wanted).square().sum() / batch.num_predicted
        # |n(f'(x)) - z_K|^2 / (2 eta K) + lambda CE(f'(x), y)
        loss = away / (2 * config.eta * config.corrections)
        return loss + config.grounding * self._live.space.loss(x, batch.targets) if config.grounding else loss

    def _tensors(self) -> dict[str, Tensor]:
        return {**super()._tensors(), "snapshot": self._snapshot}


def corrected(config: SauceConfig, stack: Stack, batch: Batch) -> Latents:
    """Return what the members above would rather have read than what the member has written: z_K."""
    eps, above = stack.space.norm_eps, config.member + 1
    with torch.no_grad():
        z = normed(stack.exits(batch.tokens, batch.positions, num=above)[-1], eps)
    for _ in range(config.corrections):
        z.requires_grad_(True)
        x = stack.member(above, z, batch.positions)
        for number in range(above + 1, len(stack.bodies)):
            x = stack.member(number, stack.into(number, x), batch.positions)
        # of the sum, so that a step on one token's latent does not depend on how many there are
        (gradient,) = torch.autograd.grad(stack.space.loss(x, batch.targets) * batch.num_predicted, z)
        z = normed(z.detach() - config.eta * gradient, eps)
    return z


def _said(members: tuple[Digest, ...]) -> str:
    return ", ".join(map(short, members))
