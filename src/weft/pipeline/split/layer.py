"""One layer, forward and back, by a team: what each member does of it.

    async with Exchange(exchanges, name, members) as exchange:
        team = Team(exchange, run)
        member = ByHeads(team, part, turn)     # or BySegments(team, layer, inverse, segments)
        y = await member.forward(x)            # of its segment alone, where it is split by segments
        dx = await member.backward(dy)         # by the same members, maybe in another team
    member.gradients                           # of weights: the sum over the team is the layer's

By heads all members have all of x, y, dy and dx, the same bits. By segments each has its tokens of them, and while it
computes on one block of keys and values, the next is on its way.

Failure: as `exchange` has it; nothing has been added to any gradient then.
"""

from collections.abc import Awaitable
from functools import partial

import torch
from torch import Tensor

from weft.model.layers import Block, Rotation
from weft.pipeline.link import Parcel
from weft.pipeline.split.cut import Segment, num_tokens
from weft.pipeline.split.ring_attention import Activations, KeyValues, SegmentPass, segment_rotation
from weft.pipeline.split.team import Branches, Team
from weft.pipeline.split.tensor_parallel import HeadsPass


class ByHeads:
    """A member of a team that splits a layer by heads.

    Args:
        part: this member's, of `tensor_parallel.cut_layer`.
        turn: of all tokens.
    """

    def __init__(self, team: Team, part: Block, turn: Rotation) -> None:
        self.team = team
        self._pass = HeadsPass(part, turn)

    async def forward(self, x: Activations) -> Activations:
        h = await self.team.sum(partial(self._pass.attention, x), onto=x)
        return await self.team.sum(partial(self._pass.ffn, h), onto=h)

    async def backward(self, dy: Activations, team: Team | None = None) -> Activations:
        self.team = team or self.team
        dh = await self.team.sum(partial(self._pass.back, dy), onto=dy)
        return await self.team.sum(partial(self._pass.back, dh), onto=dh)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Of the part's weights; `tensor_parallel.add_gradients` knows where they lie in the layer's."""
        return self._pass.gradients


class BySegments:
    """A member of a team that splits a layer by segments of the sequence.

    Args:
        layer: all of it.
        inverse: angles of `inverse_wavelengths`.
        segments: of all members, in their order.
    """

    def __init__(self, team: Team, layer: Block, inverse: Tensor, segments: tuple[Segment, ...]) -> None:
        self.team = team
        self._segments = segments
        own = segments[team.number]
        self._pass = SegmentPass(layer, own, segment_rotation(inverse, own))

    async def forward(self, x: Activations) -> Activations:
        team = self.team
        own, held = await team.run(partial(self._begin, x))
        self._own, self._own_parcel = own, held
        async with Branches() as branches:
            for step in range(team.size):
                passing = None
                if step < team.size - 1:
                    passing = branches.begin(team.shift(held, self._num(step + 1)))
                await team.run(partial(self._fold, held, step))
                if passing is not None:
                    held = await passing
        return await team.run(self._pass.end)

    async def backward(self, dy: Activations, team: Team | None = None) -> Activations:
        self.team = team = team or self.team
        held = self._own_parcel
        coming: Awaitable[Parcel] | None = None  # the gradient of the next block, as far as it has come
        await team.run(partial(self._pass.begin_back, dy))
        async with Branches() as branches:
            for step in range(team.size):
                passing = None
                if step < team.size - 1:
                    passing = branches.begin(team.shift(held, self._num(step + 1)))
                found = await team.run(partial(self._back, held, step))
                if step == 0:
                    own = found
                else:
                    # The gradient of a block follows it, a step behind; the first to add to it is its owner's next.
                    came = None if coming is None else await coming
                    total = await team.run(partial(self._add, found, came))
                    coming = branches.begin(team.shift(total, self._num(step + 1)))
                if passing is not None:
                    held = await passing
            assert coming is not None
            home = await coming
        return await team.run(partial(self._end_back, own, home))

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Of the layer's weights, as this segment has them."""
        return self._pass.gradients

    # --- in the thread that computes ---

    def _begin(self, x: Activations) -> tuple[KeyValues, Parcel]:
        own = self._pass.begin(x)
        return own, self._packed(own)

    def _fold(self, held: Parcel, step: int) -> None:
        self._pass.fold(self._block(held, step), self._segments[self._owner(step)])

    def _back(self, held: Parcel, step: int) -> KeyValues:
        return self._pass.back(self._block(held, step), self._segments[self._owner(step)])

    def _add(self, found: KeyValues, came: Parcel | None) -> Parcel:
        numbers = torch.cat([found.k.flatten(), found.v.flatten()])
        return self.team.pack(numbers if came is None else numbers + self._unpacked(came, numbers))

    def _end_back(self, own: KeyValues, home: Parcel) -> Activations:
        k, v = self._unpacked(home, own.k).chunk(2)
        return self._pass.end_back(KeyValues(own.k + k.view_as(own.k), own.v + v.view_as(own.v)))

    def _packed(self, block: KeyValues) -> Parcel:
        return self.team.pack(torch.cat([block.k.flatten(), block.v.flatten()]))

    def _unpacked(self, held: Parcel, like: Tensor) -> Tensor:
        return self.team.unpack(held, (self.team.number - 1) % self.team.size, like)

    def _block(self, held: Parcel, step: int) -> KeyValues:
        if step == 0:
            return self._own
        batch, kv_heads, _, head = self._own.k.shape
        k, v = self._unpacked(held, self._own.k).chunk(2)
        shape = batch, kv_heads, num_tokens(self._segments[self._owner(step)]), head
        return KeyValues(k.view(shape), v.view(shape))

    # --- who has what ---

    def _owner(self, step: int) -> int:
        """Return whose block this member has at a step: after the last one its own again."""
        return (self.team.number - step) % self.team.size

    def _num(self, step: int) -> int:
        """Return how many numbers that block has."""
        batch, kv_heads, _, head = self._own.k.shape
        return 2 * batch * kv_heads * num_tokens(self._segments[self._owner(step)]) * head
