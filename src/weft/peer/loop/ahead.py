"""Trains on ahead of the leases where no round can be decided: for so many inner steps at most, and it says so. And
while a round is decided, where the method says so.

    lease done, announced ── majority lost ── TrainsOn ──► one step at a time ──► `MOST_ROUNDS` H steps ahead: waits

What is made so is neither claimed nor announced. It covers the leases that come (`Carry.cover`): in a branch, once it
opens, or where the majority is, once it is back. The samples lie where nobody is ever leased any. Electors and leaves
do this alike; while a majority is in sight nobody makes more than the method's overlap.

Who sends gradients waits: one at parameters that do not move is one of a larger batch, of which a round counts no more
than the lease, and it is carried through one round only.
"""

import asyncio
from collections.abc import Callable

from weft.data.assign import beyond
from weft.events import TrainsOn
from weft.ids import Round
from weft.peer.context import Context
from weft.peer.loop.lease import LeaseTraining
from weft.peer.state.carry import Carry
from weft.run.config import Genesis
from weft.sync.records.messages import Manifest
from weft.wire import digest_of

MOST_ROUNDS = 4  # of inner steps: what is made further and further from the others is worth less and less


def num_more(
    every: int, num_ahead: int, *, is_lost: bool, has_offered: bool, sends_gradient: bool, overlap: int = 0
) -> int:
    """Return how many inner steps may be made now beyond the lease.

    Args:
        every: inner steps of a round.
        overlap: of those that follow, which the method makes while a round is decided.
        num_ahead: that were made so already, and that no lease has covered yet.
        is_lost: no majority is in sight.
        has_offered: the lease is done, and what came of it is announced.
    """
    if not has_offered or sends_gradient:
        return 0
    return max(0, (MOST_ROUNDS * every if is_lost else overlap) - num_ahead)


class Ahead:
    """Of one peer.

    Args:
        lost: set while no majority is in sight.
        is_over: returns whether this peer was told to stop, or to pause.
    """

    def __init__(
        self, context: Context, training: LeaseTraining, carry: Carry, lost: asyncio.Event, is_over: Callable[[], bool]
    ) -> None:
        self._context = context
        self._training = training
        self._carry = carry
        self._lost = lost
        self._is_over = is_over
        self._told: Manifest | None = None  # after which it has said so

    def num_more(self, config: Genesis) -> int:
        """Return how many inner steps this peer may make now."""
        if self._is_over():
            return 0
        return num_more(
            config.method.every,
            self._num_ahead(config),
            is_lost=self._lost.is_set(),
            has_offered=self._carry.offered is not None,
            sends_gradient=self._carry.sends_gradient,
            overlap=config.method.overlap,
        )

    async def wanted(self, config: Genesis) -> None:
        """Return when a step may be made. Where that depends on more than the majority, ask again."""
        if not self.num_more(config):
            await self._lost.wait()
        if not self.num_more(config):
            await asyncio.Event().wait()

    async def make(self, head: Manifest, config: Genesis) -> None:
        """Make one inner step beyond what is leased after `head`, if one may be made."""
        num_more = self.num_more(config)
        if not num_more:
            return
        if head != self._told and self._lost.is_set():
            self._told = head
            self._context.emit(TrainsOn(branch=head.branch, round=Round(head.round + 1), steps=num_more))
        size = config.settings.batch_size
        start = self._num_ahead(config) * size
        samples = beyond(config.seed, digest_of(head), self._context.node.peer, start + size)[start:]
        await self._training.make_ahead(samples, head, config)

    def _num_ahead(self, config: Genesis) -> int:
        return -(-self._carry.ahead // config.settings.tokens_per_step)
