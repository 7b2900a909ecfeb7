"""Makes the inner steps of this peer's lease, and measures how fast it makes them.

Where members are leased as much as they train, steps are made a few at a time, so that a peer which is later than the
others soon stops and announces what it has. Where all are leased the same, a lease is one piece.

Who rests in a round, because others were drawn, trains in their place once all of those are away.

Otherwise nobody would bring anything, and the round would never end. Of those that rest and are here, in order, each
takes the lease of one that is away, as long as there are any. Two that see it differently may train on the same
samples; no more tokens are counted than were leased.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection
from statistics import median

import numpy as np
from numpy.typing import NDArray

from weft.ids import PeerId
from weft.peer.context import Context
from weft.peer.group.records import lease_of
from weft.peer.round.driver import RoundDriver
from weft.peer.state.carry import Carry
from weft.run.config import Genesis
from weft.sync.records.messages import Base, Manifest
from weft.training.learner import Learner, Work

CALL_S = 0.25  # of inner steps in a call of the device: few enough to stop soon, so many that calls cost nothing
NUM_REMEMBERED = 5  # calls of the device whose speed is remembered: their median forgets what disturbed one or two


class LeaseTraining:
    """Inner steps of one peer.

    Args:
        is_over: returns whether this peer was told to stop, or to pause.
    """

    def __init__(self, context: Context, trainer: Learner, carry: Carry, is_over: Callable[[], bool]) -> None:
        self._context = context
        self._trainer = trainer
        self._carry = carry
        self._is_over = is_over
        self._speeds: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self.work: Work | None = None  # since the last lease began
        self.took_s = 0.0  # of the calls of it
        self.loss: float | None = None  # of the last steps that were made, of this lease or of the one before

    @property
    def tokens_per_s(self) -> float:
        """The median of the last calls; 0.0: none was measured."""
        return median(self._speeds) if self._speeds else 0.0

    def forget(self) -> None:
        """Let a lease that this peer brings nothing of be none that it has made."""
        self.work = None

    async def make(
        self, head: Manifest, leased: NDArray[np.int64], config: Genesis, is_hurried: Callable[[], bool] = lambda: False
    ) -> None:
        """Make the inner steps that are left of what is leased after `head`, as far as there is time.

        Args:
            leased: the positions that this peer trains on, in order.
            config: as amended until `head`.
            is_hurried: asked between calls; True: what is done is enough.
        """
        settings = config.settings
        size = settings.batch_size
        if not len(leased) or self._trainer.has_ended:
            return
        pace = sum(lease.num_windows for lease in head.leases) / len(leased)
        is_whole = config.has_even_leases and config.method.wait == "all"
        is_whole |= self._carry.sends_gradient
        if not self._carry.num_done:
            self.work, self.took_s = None, 0.0
        self._carry.cover(len(leased) // size - self._carry.num_done, settings.tokens_per_step)
        while len(left := leased[self._carry.num_done * size :]) and not self._is_over():
            positions = left if is_whole else left[: self._num_at_once(settings.tokens_per_step) * size]
            made = self._carry.num_done * settings.tokens_per_step * pace  # before this call, in the same round
            if self._context.companion is not None:
                await self._context.companion.train(head, positions, self._is_over)
            await self._step(positions, head.committed_tokens + round(made), pace, settings.seq_len)
            if self._carry.sends_gradient or self._trainer.has_ended or is_hurried():
                return

    async def make_ahead(self, samples: NDArray[np.int64], head: Manifest, config: Genesis) -> None:
        """Make an inner step beyond what is leased after `head`, on positions that nobody is leased."""
        await self._context.compute.serve(self._carry.go_ahead)
        leased = sum(lease.num_windows for lease in head.leases)
        pace = max(1.0, leased / (config.method.every * len(samples)))
        made = round(self._carry.tokens * pace)
        await self._step(samples, head.committed_tokens + made, pace, config.settings.seq_len)

    def _num_at_once(self, tokens_per_step: int) -> int:
        """Return how many inner steps a call makes; one, while it is not known how long a step takes."""
        return max(1, int(CALL_S * self.tokens_per_s / tokens_per_step))

    async def _step(self, positions: NDArray[np.int64], tokens: int, pace: float, seq_len: int) -> None:
        train, trainer, began = self._context.compute.train, self._trainer, self._context.clock.now()
        is_made = self._context.companion is not None  # by whom micro-batches came to
        num_tokens = 0 if is_made else len(positions) * seq_len
        if self._carry.sends_gradient:
            gradient, work = await train(lambda: trainer.gradient(positions, tokens, pace), num_tokens)
            self._carry.add_gradient(gradient, work)
        else:
            work = await train(lambda: trainer.train(positions, tokens, pace, self._is_over), num_tokens)
            self._carry.add_steps(work)
        took_s = self._context.clock.now() - began
        if took_s > 0 and work.num_tokens:
            self._speeds.append(work.num_tokens / took_s)
        self.took_s += took_s
        self.work = work if self.work is None else _sum(self.work, work)
        if work.num_tokens:
            self.loss = self.work.mean_loss


def _sum(one: Work, other: Work) -> Work:
    num_tokens = one.num_tokens + other.num_tokens
    losses = [each.mean_loss * each.num_tokens for each in (one, other) if each.num_tokens]
    return Work(
        num_steps=one.num_steps + other.num_steps,
        num_tokens=num_tokens,
        mean_loss=sum(losses) / num_tokens if num_tokens else math.nan,
        duration_s=one.duration_s + other.duration_s,
    )


LOOK_S = 1.0  # between two looks whether those that were drawn are away


def in_place_of(base: Base, me: PeerId, present: Collection[PeerId]) -> PeerId | None:
    """Return in whose place `me` is to train; None: in nobody's.

    Args:
        present: of the electorate, who is not away.
    """
    to_train = [peer for peer in base.electorate if peer not in base.resting]
    here = [peer for peer in base.resting if peer in present or peer == me]
    if me not in here or any(peer in present for peer in to_train):
        return None
    return dict(zip(here, to_train, strict=False)).get(me)


def leased_instead(rounds: RoundDriver, me: PeerId, head: Manifest) -> NDArray[np.int64]:
    """Return the positions of whoever is away that this peer is to train on: mostly none."""
    base = rounds.chain.base
    other = in_place_of(base, me, rounds.quorum.present()) if rounds.chain.head == head else None
    return lease_of(head.leases if other else (), other)


async def until_needed(rounds: RoundDriver, me: PeerId) -> None:
    """Return once this peer is to train in another's place."""
    await asyncio.sleep(LOOK_S)
    while in_place_of(rounds.chain.base, me, rounds.quorum.present()) is None:  # noqa: ASYNC110  # statuses tell nobody
        await asyncio.sleep(LOOK_S)
