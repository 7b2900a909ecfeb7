"""Rounds of one stage of a simulated pipeline: what its members counted and hold, and nothing of tensors.

    rounds.join(peer, worker)           # from then on it votes
    await rounds.follow(peer, worker)   # in its own process: reports to each round, and takes up each
    await rounds.run(clock)             # for ever, beside

Every so often all members report. Who has not within a while is left out, so that nothing is assigned; what it has
counted waits for the next. Then, after an exchange, all take the same reports up. A member that stands still takes them
up when it goes on, in their order.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from weft.ids import PeerId
from weft.pipeline.exactly_once import NONE, Batches, BatchId, ExactlyOnce, Told
from weft.pipeline.worker import Worker

NOBODY = PeerId("")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When rounds are."""

    every_s: float = 60.0
    report_s: float = 10.0  # that the others wait for a member's report
    exchange_s: float = 2.0


class _Round:
    def __init__(self, electorate: frozenset[PeerId]) -> None:
        self.electorate = electorate
        self.reports: dict[PeerId, Told] = {}
        self.is_exchanging = False
        self.all_told = asyncio.Event()
        self.over = asyncio.Event()

    def tell(self, peer: PeerId, told: Told) -> None:
        if peer in self.electorate and not self.is_exchanging:
            self.reports[peer] = told
            if len(self.reports) == len(self.electorate):
                self.all_told.set()


class Rounds:
    """Of one stage."""

    def __init__(self, pace: Pace) -> None:
        self.merged: Counter[BatchId] = Counter()  # how often rounds counted each micro-batch
        self.members: dict[PeerId, Worker] = {}
        self._pace = pace
        self._rounds: list[_Round] = []
        self._began = asyncio.Event()  # another each time
        self._evidence = ExactlyOnce()  # of nobody: what is past for who joins

    @property
    def standing(self) -> Batches:
        """Return what members have counted and no round has."""
        return NONE.union(*(worker.counting.exactly_once.counted for worker in self.members.values()))

    @property
    def held(self) -> Batches:
        return NONE.union(*(worker.counting.exactly_once.held for worker in self.members.values()))

    def join(self, peer: PeerId, worker: Worker) -> None:
        """Take a member in; what is past comes with the state that it has fetched."""
        worker.counting.exactly_once = ExactlyOnce(past=self._evidence.past)
        self.members[peer] = worker

    def leave(self, peer: PeerId) -> None:
        self.members.pop(peer, None)

    async def follow(self, peer: PeerId, worker: Worker) -> None:
        """Report to each round from here on, and take it up."""
        number = len(self._rounds)
        if self._rounds and not self._rounds[-1].over.is_set():
            number -= 1
        while True:
            while number == len(self._rounds):
                await self._began.wait()
            found = self._rounds[number]
            number += 1
            found.tell(peer, await worker.counting.report())
            await found.over.wait()
            await worker.counting.close(found.reports, found.electorate)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._pace.every_s)
            await self.round()

    async def round(self) -> None:
        """Hold one round."""
        if not self.members:
            return
        found = _Round(frozenset(self.members))
        self._rounds.append(found)
        self._began.set()
        self._began = asyncio.Event()
        try:
            async with asyncio.timeout(self._pace.report_s):
                await found.all_told.wait()
        except TimeoutError:
            pass
        found.is_exchanging = True
        await asyncio.sleep(self._pace.exchange_s)
        self._evidence = self._evidence.committed(NOBODY, found.reports, found.electorate).exactly_once
        for told in found.reports.values():
            self.merged.update(told.counted)
        found.over.set()
