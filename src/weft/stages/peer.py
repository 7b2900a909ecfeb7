"""One peer of a run with stages: what it tells all of the stages that it holds, and what follows from what others tell.

    placement   at the beginning, later, or again: which stages it takes; now and then, whether another needs it more
    news        every two seconds, and on a change: this peer's stages, their rounds, rates and queues
    holdings    the stages that it holds, each to its end; with an end stage the matrix that both ends have
    ending      once the first stage is complete

Everybody is linked to everybody. Who says nothing for `SILENT_S` is gone.

Failure:
- a peer that vanishes: its stages' other members go on; senders try another (`pipeline.sender`).
- all members of a stage vanish: micro-batches wait until somebody takes it up (`placement`).
- a stage of this peer breaks: the peer ends, and says why.
"""

import asyncio
from collections.abc import Awaitable, Callable

from weft.events import Notice
from weft.ids import PeerId
from weft.peer.peer import Outcome
from weft.stages.backup import Backup, StagesOnDisk
from weft.stages.holdings import Holdings
from weft.stages.messages import Shelved, StageNews
from weft.stages.placement import Placement, Rebalance
from weft.stages.step.member import Member
from weft.stages.step.pipeline import Kit, Pipeline, beside_texts
from weft.tasks import Tasks

NEWS_S = 2.0
SILENT_S = 10.0
FINISH_S = 30.0  # for a stage to count the last of what the first one has trained


class Ending:
    """The end of the run, as one peer sees it: others stay as long as somebody measures or fetches.

    Args:
        end: ends the peer's part in the run, which holds nothing any more.
    """

    def __init__(self, pipeline: Pipeline, holdings: Holdings, tasks: Tasks, end: Callable[[], None]) -> None:
        self._pipeline = pipeline
        self._table = pipeline.table
        self._holdings = holdings
        self._tasks = tasks
        self._end = end
        self._work: Callable[[], Awaitable[object]] | None = None  # None: nothing is to be done, or it has begun
        self._is_working = False
        self._complete_at: float | None = None
        self._last_round = 0  # of the first stage

    def plan(self, work: Callable[[], Awaitable[object]]) -> None:
        """Let `work` be done once the run is complete, while all members stay."""
        self._work = work

    def look(self, now: float) -> None:
        """Leave the stages after the first, once that is complete and these have counted the last of it."""
        holdings, is_complete = self._holdings, any(news.is_complete for news in self._table.peers.values())
        if holdings.is_closed or (self._complete_at is None and not (self.is_complete or is_complete)):
            return
        self._complete_at = self._complete_at or now
        self._last_round = max([self._last_round, *(each.round for each in self._table.held(0).values())])
        self._begin_work()
        if self.has_busy() or now - self._complete_at < NEWS_S:  # who is about to fetch says so in its next news
            return
        for member in list(holdings.members.values()):
            has_all = member.conductor.step.round >= self._last_round and not member.worker.num_taken
            if member.stage and (has_all or now - self._complete_at >= FINISH_S):
                member.stop("complete")
        if holdings.is_empty:
            self._end()

    @property
    def has_come(self) -> bool:
        """Whether all is trained, as far as this peer has heard."""
        return self._complete_at is not None

    @property
    def is_complete(self) -> bool:
        """Whether all is trained, as this peer's own first stage has it."""
        first, outcome = self._first, self._holdings.outcomes.get(0)
        return (first is not None and first.peer.is_complete) or (outcome is not None and outcome.reason == "complete")

    @property
    def is_busy(self) -> bool:
        """Whether this peer measures or fetches at the end."""
        return self._is_working or (self._first is not None and self._first.is_measuring)

    def has_busy(self) -> bool:
        """Whether anybody does, this peer included."""
        return self.is_busy or any(news.is_busy for news in self._table.peers.values())

    @property
    def _first(self) -> Member | None:
        return self._holdings.members.get(0)

    def _begin_work(self) -> None:
        if self._work is None:
            return
        work, self._work, self._is_working = self._work, None, True

        async def do() -> None:
            try:
                await work()
            finally:
                self._is_working = False
                self._pipeline.changed()

        self._tasks.spawn(do())
        self._pipeline.changed()


class News:
    """What one peer tells all others of its stages, and what it hears of theirs."""

    def __init__(self, kit: Kit, pipeline: Pipeline, holdings: Holdings, ending: Ending, on_disk: StagesOnDisk) -> None:
        self._node = kit.node
        self._clock = kit.clock
        self._pipeline = pipeline
        self._table = pipeline.table
        self._holdings = holdings
        self._ending = ending
        self._on_disk = on_disk
        self._heard_at: dict[PeerId, float] = {}
        pipeline.on_change(self.tell)
        kit.node.on_note(StageNews, self._on_news)
        kit.node.on_link(self._on_link)
        kit.node.on_contact(lambda contact: kit.node.keep(contact.peer))

    def tell(self) -> None:
        """Tell everybody what this peer holds."""
        news = self._news()
        self._table.told(self._node.peer, news)
        for peer in self._node.peers:
            self._node.post(peer, news)
        self._pipeline.look()

    def drop_silent(self, now: float) -> None:
        for peer in [peer for peer, at in self._heard_at.items() if now - at > SILENT_S]:
            self._forget(peer, "it is silent")
            self._node.drop(peer, f"silent for {SILENT_S:.0f} s")

    def _news(self) -> StageNews:
        members, tied = self._holdings.members, self._holdings.tied.member
        heads = {member.stage: member.peer.head for member in self._holdings.all()}
        return StageNews(
            held=tuple(members[stage].held for stage in sorted(members)),
            kept=tuple(Shelved(stage=stage, round=round) for stage, round in self._on_disk.with_held(heads).items()),
            is_trainer=True,
            is_busy=self._ending.is_busy,
            is_complete=self._ending.is_complete,
            tied=None if tied is None else tied.held,
        )

    async def _on_news(self, peer: PeerId, news: StageNews) -> None:
        if not self._node.is_linked(peer):
            return
        self._table.told(peer, news)
        self._heard_at[peer] = self._clock.now()
        if news.is_complete:
            self._ending.look(self._clock.now())
        self._holdings.meet(peer)
        self._pipeline.look()

    def _on_link(self, peer: PeerId, is_up: bool, reason: str) -> None:
        if is_up:  # whoever only watches tells no news, and may be silent
            self._node.post(peer, self._news())
        else:
            self._forget(peer, reason)

    def _forget(self, peer: PeerId, reason: str) -> None:
        self._heard_at.pop(peer, None)
        self._table.gone(peer)
        self._holdings.part(peer, reason)
        self._pipeline.look()


class StagesPeer:
    def __init__(self, kit: Kit) -> None:
        self.kit = kit = beside_texts(kit)
        self.run = kit.run
        self.failure: Exception | None = None
        self.reason = ""  # why it was told to stop, if it was
        self._has_ended = asyncio.Event()
        self._tasks = Tasks(self.fail)
        self._pipeline = Pipeline(kit, lambda: self.ending.has_busy())
        self.table = table = self._pipeline.table
        self.holdings = holdings = Holdings(kit, self._pipeline, self.fail, self._has_ended.set)
        self.members, self.outcomes, self.pausing = holdings.members, holdings.outcomes, holdings.pausing
        self.ending = Ending(self._pipeline, holdings, self._tasks, self._has_ended.set)
        self._backup = Backup(kit, table)
        self._rebalance = Rebalance(kit, table, holdings)
        on_disk = StagesOnDisk(kit.folder)
        self._placement = Placement(kit, table, on_disk, holdings, self._has_ended.set)
        self._news = News(kit, self._pipeline, holdings, self.ending, on_disk)

    async def live(self, wait_for: int | None) -> dict[int, Outcome]:
        """Take part to the end; return how each stage ended that it held last.

        Args:
            wait_for: as of `Placement.found`; None: join.
        """
        ticking = self._tasks.spawn(self._tick())
        self._tasks.spawn(self._backup.watch())
        self._tasks.spawn(self._placement.join() if wait_for is None else self._placement.found(wait_for))
        try:
            await self._has_ended.wait()
            ticking.cancel()
            await self.holdings.aclose(grace_s=FINISH_S)
        finally:
            await self._tasks.aclose()
            await self.holdings.aclose()
            await self._pipeline.aclose()
        if self.failure is not None:
            raise self.failure
        return self.outcomes

    async def _tick(self) -> None:
        for peer in self.kit.node.known_addresses():
            self.kit.node.keep(peer)
        while True:
            now = self.kit.clock.now()
            self._news.tell()
            self._pipeline.barrier.tell_again()
            self._news.drop_silent(now)
            if self._placement.is_over and not self.reason:
                self.ending.look(now)
                if not self.ending.has_come or self.ending.has_busy():
                    self._placement.look_at_empty(now)
                    self.holdings.tied.look()
                if self._rebalance.is_due(now):
                    self._tasks.spawn(self._rebalance.rebalance())
                self._rebalance.let_go()
            self._pipeline.reports.show(self.table)
            await asyncio.sleep(NEWS_S)

    # --- how it ends ---

    @property
    def is_at_rest(self) -> bool:
        """As `Peer.is_at_rest`, of all that it holds."""
        return all(member.peer.is_at_rest for member in self.holdings.all())

    def stop(self, reason: str) -> None:
        """Say goodbye in every stage, save, and return from `live`, soon.

        What this peer alone holds, another keeps first; said twice, nobody waits for that.
        """
        is_first, self.reason = not self.reason, self.reason or reason
        self.holdings.close()
        backups = self._backup.backups_of(self.members) if is_first else {}
        if backups and self.failure is None and not self.ending.has_come:
            self._tasks.spawn(self._hand_over(backups, reason))
        else:
            self.holdings.stop(reason)

    async def _hand_over(self, backups: dict[int, PeerId], reason: str) -> None:
        for stage in backups:
            self.members[stage].leave()
        self._news.tell()  # nobody sends anything more
        names = ", ".join(self.run.called(stage) for stage in backups)
        self.kit.emit(Notice(text=f"nobody else holds {names}: this peer stays until another has taken the state"))
        if self.run.tied is not None:
            backups |= self._backup.backups_of([self.run.tied])
        kept = await asyncio.gather(*(self._backup.hand_over(stage, peer) for stage, peer in backups.items()))
        if not all(kept):
            self.kit.emit(Notice(text="no other peer has taken all of it: it stays on this peer's disk"))
        self.holdings.stop(reason)

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stop(type(error).__name__)
