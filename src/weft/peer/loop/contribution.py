"""What this peer contributes to a round: the inner steps of its lease, those it makes ahead, and the payload it offers.

Where members are leased as much as they train, steps are made a few at a time, so that a peer which is later than the
others soon stops and announces what it has. Where all are leased the same, a lease is one piece.

Who rests in a round, because others were drawn, trains in their place once all of those are away:
otherwise nobody would bring anything, and the round would never end. Of those that rest and are here, in order, each
takes the lease of one that is away, as long as there are any. Two that see it differently may train on the same
samples; no more tokens are counted than were leased.

`Ahead` trains on beyond the lease where no round can be decided, for so many inner steps at most, and it says so; and
while a round is decided, where the method says so.

    lease done, announced ── majority lost ── TrainsOn ──► one step at a time ──► `MOST_ROUNDS` H steps ahead: waits

What is made so is neither claimed nor announced. It covers the leases that come (`Carry.cover`): in a branch, once it
opens, or where the majority is, once it is back. The samples lie where nobody is ever leased any. Electors and leaves
do this alike; while a majority is in sight nobody makes more than the method's overlap.

Who sends gradients waits: one at parameters that do not move is one of a larger batch, of which a round counts no more
than the lease, and it is carried through one round only.

`Offering` brings what it has trained, or what a branch of its own had counted:

    Offering ──► RoundDriver.announce           an elector
    Offering ──► Aggregator ──► RoundDriver     an elector that has leaves: their mean
    Offering ──► Leaf                           a leaf: to its aggregator
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection
from fractions import Fraction
from statistics import median

import numpy as np
from numpy.typing import NDArray

from weft.data.assign import beyond
from weft.events import PayloadOffered, TrainsOn
from weft.ids import PeerId, Round
from weft.peer.audit.audits import Audits
from weft.peer.audit.trace import Trace
from weft.peer.context import Context
from weft.peer.group.groups import Groups, Turn
from weft.peer.group.leaf import Leaf
from weft.peer.group.records import lease_of
from weft.peer.loop.answers import Helpers
from weft.peer.round.driver import RoundDriver
from weft.peer.state.carry import Carry
from weft.peer.state.legacies import Legacies
from weft.peer.state.replica import Replica
from weft.run.config import Genesis
from weft.sync.records import quarantine
from weft.sync.records.messages import Base, Manifest, payload_of
from weft.training.learner import Learner, Work
from weft.wire import digest_of

CALL_S = 0.25  # of inner steps in a call of the device: few enough to stop soon, so many that calls cost nothing
NUM_REMEMBERED = 5  # calls of the device whose speed is remembered: their median forgets what disturbed one or two


class LeaseTraining:
    """Inner steps of one peer.

    Args:
        is_over: returns whether this peer was told to stop, or to pause.
        helpers: who draws answers for it; None: none are needed.
        trace: told of what is trained, where that is audited.
    """

    def __init__(
        self,
        context: Context,
        trainer: Learner,
        carry: Carry,
        is_over: Callable[[], bool],
        helpers: Helpers | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._context = context
        self._helpers = helpers
        self._trace = trace
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
        self,
        head: Manifest,
        leased: NDArray[np.int64],
        config: Genesis,
        is_hurried: Callable[[], bool] = lambda: False,
        holder: PeerId | None = None,
        is_outrun: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the inner steps that are left of what is leased after `head`, as far as there is time.

        Args:
            leased: the positions that this peer trains on, in order.
            config: as amended until `head`.
            is_hurried: asked between calls; True: what is done is enough.
            holder: whose lease it is; None: this peer's.
            is_outrun: asked while a companion trains, which waits for others; True: they are far beyond this round.
        """
        settings = config.settings
        size, companion = settings.batch_size, self._context.companion
        if not len(leased) or self._trainer.has_ended:
            return
        pace = Fraction(sum(lease.num_windows for lease in head.leases), len(leased))
        is_whole = config.has_even_leases and config.method.wait == "all"
        is_whole |= self._carry.sends_gradient
        self._carry.make_empty_again()
        if not self._carry.num_done:
            self.work, self.took_s = None, 0.0
        self._carry.cover(len(leased) // size - self._carry.num_done, settings.tokens_per_step)
        if self._trace is not None:
            trace, whose = self._trace, holder or self._context.node.peer
            await self._context.compute.train(lambda: trace.begin(head, whose))
        if self._helpers is not None:
            self._helpers.begin(head, leased[self._carry.num_done * size :], size)

        def is_over() -> bool:
            return self._is_over() or (companion is not None and is_outrun())

        while len(left := leased[self._carry.num_done * size :]) and not is_over():
            positions = left if is_whole else left[: self._num_at_once(settings.tokens_per_step) * size]
            if companion is not None:
                await companion.train(head, positions, is_over)
            await self._step(positions, head, pace, self._carry.num_done, settings.seq_len)
            if self._carry.sends_gradient or self._trainer.has_ended or is_hurried():
                return

    async def make_ahead(self, samples: NDArray[np.int64], head: Manifest, config: Genesis) -> None:
        """Make an inner step beyond what is leased after `head`, on positions that nobody is leased."""
        await self._context.compute.serve(self._carry.go_ahead)
        leased = sum(lease.num_windows for lease in head.leases)
        pace = max(Fraction(1), Fraction(leased, config.method.every * len(samples)))
        num_done = self._carry.tokens // config.settings.tokens_per_step
        await self._step(samples, head, pace, num_done, config.settings.seq_len)

    def _num_at_once(self, tokens_per_step: int) -> int:
        """Return how many inner steps a call makes; one, while it is not known how long a step takes."""
        return max(1, int(CALL_S * self.tokens_per_s / tokens_per_step))

    async def _step(
        self, positions: NDArray[np.int64], head: Manifest, pace: Fraction, num_done: int, seq_len: int
    ) -> None:
        tokens = head.committed_tokens
        train, trainer, began = self._context.compute.train, self._trainer, self._context.clock.now()
        if self._helpers is not None:  # what is waited for them is of a step's time
            await self._helpers.ready(positions)
        is_made = self._context.companion is not None  # by whom micro-batches came to
        num_tokens = 0 if is_made else len(positions) * seq_len
        if self._carry.sends_gradient:
            gradient, work = await train(lambda: trainer.gradient(positions, tokens, pace), num_tokens)
            self._carry.add_gradient(gradient, work)
        else:
            work = await train(lambda: trainer.train(positions, tokens, pace, self._is_over, num_done), num_tokens)
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


def leased_instead(rounds: RoundDriver, me: PeerId, head: Manifest) -> tuple[PeerId | None, NDArray[np.int64]]:
    """Return who is away and in whose place this peer is to train, and on which positions: mostly on none."""
    base = rounds.chain.base
    other = in_place_of(base, me, rounds.quorum.present()) if rounds.chain.head == head else None
    return other, lease_of(head.leases if other else (), other)


async def until_needed(rounds: RoundDriver, me: PeerId) -> None:
    """Return once this peer is to train in another's place."""
    await asyncio.sleep(LOOK_S)
    while in_place_of(rounds.chain.base, me, rounds.quorum.present()) is None:  # noqa: ASYNC110  # statuses tell nobody
        await asyncio.sleep(LOOK_S)


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


class Offering:
    """
    Args:
        audits: says how this peer came to what it brings, where that is audited.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        carry: Carry,
        legacies: Legacies,
        groups: Groups,
        audits: Audits | None = None,
    ) -> None:
        self._audits = audits
        self._me = context.node.peer
        self._compute = context.compute
        self._emit = context.emit
        self._replica = replica
        self._carry = carry
        self._legacies = legacies
        self._groups = groups
        self._companion = context.companion

    async def offer(self, rounds: RoundDriver, turn: Turn) -> None:
        """Announce it, unless the round is decided before it is encoded: it would be counted twice.

        Who lacks what a gossip round builds on says that it brings nothing.
        """
        head, base, ranges = rounds.chain.head, rounds.chain.base, rounds.ranges
        is_for_neighbours = base.is_gossip
        is_new = quarantine.of(base.charter, self._me) is not None  # of whom nothing else is counted
        may_bring_other = rounds.is_member and self._legacies.kept.legacies and not (is_for_neighbours or is_new)
        brought = await self._legacies.to_bring(base, ranges) if may_bring_other else None
        if brought is None and not self._carry.due:
            if self._companion is not None:  # nothing was routed to this peer: nobody should wait for it
                await self._companion.announcing(None)
                self.pass_on(turn)
            return
        mixing = self._carry.mixing
        if is_for_neighbours and mixing is not None and not mixing.is_in_step:
            self.pass_on(turn)
            return
        encode = lambda: self._carry.encode(ranges, head.round + 1, is_gossip=is_for_neighbours)  # noqa: E731
        work = None
        if brought is not None:
            payload = brought.payload
        elif self._audits is not None:
            payload, work = await self._audits.made(head, encode)
            if work is None:
                self.pass_on(turn)
                return
        else:
            payload = await self._compute.serve(encode)
        if brought is None and self._companion is not None:
            await self._companion.announcing(payload_of(part.digest for part in payload))
        if rounds.chain.head != head or head != self._replica.head:
            return
        if work is not None:
            if rounds.is_member:
                self._carry.offer(rounds.announce(self._carry.due, payload, work=work))
        elif brought is None and turn is self._groups.turn:
            through = turn.aggregator if isinstance(turn, Leaf) else None
            self._carry.offer(self._groups.through(turn).announce(self._carry.due, payload), through)
        elif brought is not None and rounds.is_member:
            self._carry.offer(rounds.announce(brought.tokens, payload, brought.kept))
        if self._carry.offered is not None:
            tokens, nbytes = brought.tokens if brought else self._carry.due, sum(len(part.encoded) for part in payload)
            self._emit(PayloadOffered(round=Round(head.round + 1), tokens=tokens, nbytes=nbytes))

    def pass_on(self, turn: Turn) -> None:
        self._groups.through(turn).pass_on()

    def is_in_doubt(self, opening: Manifest, rounds: RoundDriver) -> bool:
        """Return whether the round without which a branch begins may be decided elsewhere, and count this peer there.

        Somebody who is not in the branch has fetched what this peer offered, or results that hold it; what a leaf
        offers is in its aggregator's payload. Of gradients a branch brings nothing to another: none is counted twice.
        """
        if self._carry.offered is None or self._carry.sends_gradient:
            return False
        asked_by = rounds.parts.asked_by
        return bool(asked_by if self._carry.offered_to else asked_by.keys() - set(opening.members))
