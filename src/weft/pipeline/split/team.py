"""What a team does between two pieces of a layer: sums what its members made, or passes something round its ring.

    team = Team(exchange, run)
    y = await team.sum(make, onto=x)        # x + what member 0 made + what member 1 made + ...
    block = await team.shift(held, num)     # to the next member, from the one before
    await team.deal(pieces)                 # from the first to each: `dealt` there; back by `hand_in` and `handed_in`

A sum of two members' numbers: each gives the other all it made, and both add. Of more: each adds a piece for all, and
gives what comes out to all, which is 2 (n - 1) / n of the numbers each way. Either way whatever is added, is added in
the order of the members, so all have the same bits.

Nothing is sent before it is finite, nor used (`NotFinite` of an own number, `PayloadError` of another's). Each member
calls the same in the same order.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.codec.dense import Fp32
from weft.errors import PayloadError
from weft.ids import short
from weft.pipeline.link import Parcel, parcel
from weft.pipeline.split.cut import runs, shares
from weft.pipeline.split.exchange import Exchange
from weft.pipeline.split.tensor_parallel import added
from weft.pipeline.worker import Run

T = TypeVar("T")


class Team:
    """Of one member.

    Args:
        run: runs work that takes a processor's time, as of `Compute.train`.
    """

    def __init__(self, exchange: Exchange, run: Run) -> None:
        self.number = exchange.number
        self.size = len(exchange.members)
        self.run = run
        self._exchange = exchange
        self._codec = Fp32()
        self._counted = 0

    async def sum(self, make: Callable[[], Tensor], *, onto: Tensor) -> Tensor:
        """Return `onto` + the sum of what all members make, each of the shape of `onto`."""
        first, second, others = self._next(), self._next(), self._others
        pieces = self._pieces(onto.numel())
        mine = pieces[self.number]

        def work() -> tuple[Tensor, list[Parcel]]:
            flat = make().flatten()
            return flat, [self.pack(flat[pieces[other].start : pieces[other].stop]) for other in others]

        async def give() -> Tensor:
            flat, parcels = await self.run(work)
            await together(
                *(self._exchange.give(*each) for each in zip(others, [first] * len(others), parcels, strict=True))
            )
            return flat

        own, *taken = await together(give(), *(self._take(each, first, mine, onto) for each in others))

        def add() -> Tensor:
            partials = {self.number: own[mine.start : mine.stop], **dict(zip(others, taken, strict=True))}
            total = added([partials[number] for number in range(self.size)])
            return onto + total.view_as(onto) if self.size == 2 else total

        total: Tensor = await self.run(add)
        return total if self.size == 2 else await self._spread(total, pieces, second, onto)

    async def _spread(self, piece: Tensor, pieces: list[range], number: int, onto: Tensor) -> Tensor:
        """Return `onto` + all pieces: this member's, which it gives to all, and the others'."""
        others, given = self._others, await self.run(lambda: self.pack(piece))
        taking = [self._take(each, number, pieces[each], onto) for each in others]
        _, *taken = await together(together(*(self._exchange.give(each, number, given) for each in others)), *taking)

        def add() -> Tensor:
            found = {self.number: piece, **dict(zip(others, taken, strict=True))}
            return onto + torch.cat([found[each] for each in range(self.size)]).view_as(onto)

        return await self.run(add)

    def shift(self, held: Parcel, num: int) -> Coroutine[Any, Any, Parcel]:
        """Give `held` to the next member; return `num` numbers of the one before. Counts when it is called."""
        number, after, before = self._next(), (self.number + 1) % self.size, (self.number - 1) % self.size

        async def shifted() -> Parcel:
            taken, _ = await together(
                self._exchange.take(before, number, self._codec.nbytes(num)), self._exchange.give(after, number, held)
            )
            found: Parcel = taken
            return found

        return shifted()

    # --- between who leads, the first, and the others ---

    async def deal(self, pieces: Sequence[Tensor]) -> None:
        """Give each of the others its piece."""
        number, others = self._next(), self._others
        parcels = await self.run(lambda: [self.pack(pieces[each]) for each in others])
        await together(*(self._exchange.give(each, number, held) for each, held in zip(others, parcels, strict=True)))

    async def dealt(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return the piece that the first gives."""
        found = await self._take(0, self._next(), range(prod(shape)), like)
        return found.view(*shape)

    async def hand_in(self, piece: Tensor) -> None:
        """Give the first a piece."""
        number, held = self._next(), await self.run(lambda: self.pack(piece))
        await self._exchange.give(0, number, held)

    async def handed_in(self, own: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the first's own piece and those of the others, in their order."""
        number = self._next()
        taking = (self._take(each, number, range(prod(shapes[each])), own) for each in self._others)
        others = await together(*taking)
        return [own, *(each.view(*shape) for each, shape in zip(others, shapes[1:], strict=True))]

    def pack(self, numbers: Tensor) -> Parcel:
        """Return what `numbers` are to others. They must not change before it is taken."""
        return parcel(self._codec.encode(numbers.detach().float().flatten().cpu()))

    def unpack(self, taken: Parcel, source: int, like: Tensor) -> Tensor:
        """Return the flat numbers that a member gave.

        Args:
            like: a tensor on the device where they are needed.

        Raises:
            PayloadError: they are not finite.
        """
        data = memoryview(taken.data).cast("B")
        try:
            return self._codec.decode(data, data.nbytes // self._codec.nbytes(1)).to(like.device)
        except PayloadError as error:
            raise PayloadError(
                f"what {short(self._exchange.members[source])} handed over to its team: {error}"
            ) from None

    @property
    def _others(self) -> list[int]:
        return [number for number in range(self.size) if number != self.number]

    def _pieces(self, num: int) -> list[range]:
        return [range(num)] * 2 if self.size == 2 else list(runs(shares(num, [1.0] * self.size)))

    async def _take(self, source: int, number: int, piece: range, like: Tensor) -> Tensor:
        taken = await self._exchange.take(source, number, self._codec.nbytes(len(piece)))
        return await self.run(lambda: self.unpack(taken, source, like))

    def _next(self) -> int:
        self._counted += 1
        return self._counted - 1


async def together(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return what all `works` return. Where one fails, end the others before its error is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Branches:
    """Works that go on beside the one that begins them, and end with it.

    async with Branches() as branches:
        coming = branches.begin(work)
        ...
        found = await coming
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def begin(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> "Branches":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
