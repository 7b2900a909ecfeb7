"""A tied matrix in step with the end stages: the companion of its own run's rounds.

    an end stage's step is over ─► it hands in its half of the gradient ─► the matrix's round merges all of them
    ─► the end stage goes on, once its own round is over, too

Who holds either end stage is a member. It brings what its ends hand in, once all that it holds have; one that brings
nothing passes on as soon as another announces something. Which round of the first stage the gradient is of that a round
merges, its members say when they announce; what comes after its round waits for the next.

Failure:
- the round takes longer than `MERGED_S`: micro-batches pass with the matrix as it is, and what was handed in counts in
  a later round.
- an end stage gives up what it brings, because others count it: the matrix's half has been merged.
- this peer is paused: what it had added up goes with its device, as its sections' does.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from weft.ids import Digest, PeerId
from weft.net.channel import Channel
from weft.peer.companion import Parameters, Unmeasured
from weft.pipeline.device import Step
from weft.pipeline.exactly_once import NONE, Told
from weft.pipeline.worker import Sum
from weft.stages.messages import BeatAnswer, BeatRequest
from weft.stages.step.barrier import ASK_S, Barrier, Reports, Snapshots
from weft.sync.records.messages import Manifest
from weft.tasks import Compute
from weft.training.tied import TiedTrainer
from weft.wire import digest_of

NOTHING = -1  # no round
MERGED_S = 120.0  # a matrix of a large model takes a while on a slow line


class TiedConductor:
    def __init__(
        self, channel: Channel, trainer: TiedTrainer, compute: Compute, barrier: Barrier, snapshots: Snapshots
    ) -> None:
        self._snapshots = snapshots
        self._channel = channel
        self._trainer = trainer
        self._compute = compute
        self._barrier = barrier
        self._reports = Reports(channel, barrier.look)
        self._ends: dict[int, int] = {}  # stages that compute here: of which round each has handed in last
        self._num_handed = 0  # samples, that no payload has
        self._next = 0  # the round of the first stage whose gradient is merged now
        self._previous: Digest | None = None
        self._is_stopped = False

    @property
    def step(self) -> Step:
        return Step(self._next, 0)

    def stop(self) -> None:
        """Wait for nobody any more."""
        self._is_stopped = True
        self._barrier.look()

    # --- what end stages of this peer do ---

    def follow(self, stage: int) -> None:
        """Wait for what a stage hands in, from now on."""
        self._ends.setdefault(stage, NOTHING)

    def leave(self, stage: int) -> None:
        """Wait for it no longer."""
        self._ends.pop(stage, None)
        self._barrier.look()

    async def hand_in(self, stage: int, round: int, total: Sum) -> None:
        """Take a stage's half of the gradient of a round; of no samples: it has none."""
        if total.num_samples:
            is_taken = await self._compute.train(lambda: self._trainer.hand_in(total))
            self._num_handed += total.num_samples if is_taken else 0
        self._ends[stage] = round
        self._barrier.look()

    async def merged(self, stage: int, round: int, is_over: Callable[[], bool]) -> None:
        """Wait for the gradient of a round to be merged, or for `is_over`. The stage hands in no more of that one."""
        if stage in self._ends:
            self._ends[stage] = max(self._ends[stage], round)
            self._barrier.look()
        with suppress(TimeoutError):
            async with asyncio.timeout(MERGED_S):
                await self._barrier.until(lambda: is_over() or self._is_stopped or self._next > round)

    # --- what rounds ask of it ---

    async def train(self, head: Manifest, positions: NDArray[np.int64], is_over: Callable[[], bool]) -> None:  # noqa: ARG002
        previous = digest_of(head)
        if self._previous is None:
            await self._reports.ask_all(previous)
            self._next = await self._round_after(previous)
        self._previous = previous
        await self._barrier.until(lambda: is_over() or self._has_all(self._reports.is_coming(previous)))
        self._num_handed = 0

    def _has_all(self, is_announced: bool) -> bool:
        """Whether all that this peer's ends bring is here, and somebody brings something."""
        wanted = min(self._next, self._barrier.steps.newest.round)
        has_all = all(round >= wanted for round in self._ends.values())
        return has_all and (is_announced or bool(self._ends and self._num_handed))

    async def _round_after(self, manifest: Digest) -> int:
        """Return which one follows on a state that this peer has come by; 0, where nobody knows."""
        for peer in self._channel.peers:
            answer = await self._channel.ask(peer, BeatRequest(manifest=manifest), BeatAnswer, deadline_s=ASK_S)
            if answer is not None and answer.beat is not None:
                return answer.beat
        return 0

    async def announcing(self, payload: Digest | None) -> None:
        if self._previous is not None:
            last = max(self._ends.values(), default=NOTHING)
            self._reports.tell(self._previous, payload, max(last, 0), Told(NONE, NONE))

    async def until_lost(self) -> None:
        await self._reports.until_lost(self._previous)

    async def settling(self) -> None:
        """Do nothing: what end stages compute ends with their own rounds."""

    async def settled(self, manifest: Manifest, electorate: Collection[PeerId]) -> bool:  # noqa: ARG002
        self._next = max(self._reports.brought(manifest.previous), default=self._next) + 1
        await self._snapshots.settled(self._next, digest_of(manifest))
        self._barrier.look()
        return False

    def evaluator(self, replica: Parameters, is_stopping: Callable[[], bool]) -> Unmeasured:  # noqa: ARG002
        return Unmeasured()  # this run is never complete
