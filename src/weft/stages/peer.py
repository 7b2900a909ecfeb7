"""One peer of a run with stages: which of them it holds, told to all, and what follows from what others tell.

    enter     at the beginning, later, or again (`entering`)
    news      every two seconds, and on a change: this peer's stages, their rounds, rates and queues
    moves     now and then: is this the peer that should go to a weaker stage? (`pipeline.place`)
    empty     a stage that nobody holds is taken up by whoever has its newest state
    tied      who holds an end stage of a model whose embedding is its head holds that matrix, too (`tied`)

Everybody is linked to everybody. Who says nothing for `SILENT_S` is gone.

Failure:
- a peer that vanishes: its stages' other members go on; senders try another (`pipeline.sender`).
- all members of a stage vanish: micro-batches wait; see *empty*. Where nobody has a state, it begins anew, and an event
  says so; but not where one peer is left alone.
- a stage of this peer breaks: the peer ends, and says why.

What a peer does once a run is complete, while all members stay: they are told that it is under way.

The pause of a peer that holds stages.

The ways of one peer to the stages: a sender to each that it sends to, kept up with who computes there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from weft.errors import TooLarge
from weft.events import Notice, StageEmpty, StageHeld, StageLeft
from weft.ids import PeerId, Round
from weft.peer.peer import Outcome
from weft.pipeline.dispatch import Dispatch
from weft.pipeline.link import StageLink
from weft.pipeline.routing import Near, Router
from weft.pipeline.sender import Sender
from weft.pipeline.split.member import HelpDesk
from weft.stages.backup import Backup
from weft.stages.messages import Shelved, StageNews
from weft.stages.placement import MOVES, Placement, Rebalance
from weft.stages.report import StageReports
from weft.stages.shelf import StagesOnDisk
from weft.stages.step.barrier import Barrier
from weft.stages.step.member import Member
from weft.stages.step.membership import Grounds, Kit, Membership
from weft.stages.step.opening import first_weights
from weft.stages.step.teams import leaders
from weft.stages.step.tied import Tied, TiedMember
from weft.stages.table import StageTable
from weft.tasks import Tasks
from weft.training.section_memory import relative_costs


class Ending:
    """
    Args:
        tell: tells everybody whether it is under way.
    """

    def __init__(self, tasks: Tasks, tell: Callable[[], None]) -> None:
        self.work: Callable[[], Awaitable[object]] | None = None  # what is to be done; None: nothing, or it has begun
        self.is_under_way = False
        self._tasks = tasks
        self._tell = tell

    def begin(self) -> None:
        """Begin it, once."""
        if self.work is None:
            return
        work, self.work, self.is_under_way = self.work, None, True

        async def do() -> None:
            try:
                await work()
            finally:
                self.is_under_way = False
                self._tell()

        self._tasks.spawn(do())
        self._tell()


class Pauses:
    """The pause of all that a peer holds, as one."""

    def __init__(self, members: Callable[[], Iterable[Membership]], tell: Callable[[], None]) -> None:
        self._members = members
        self._tell = tell
        self._reasons: list[str] = []

    def want(self, reason: str) -> None:
        self._reasons.append(reason)
        for member in self._members():
            member.peer.pausing.want(reason)
        self._tell()

    def want_no_more(self, reason: str) -> None:
        self._reasons = [each for each in self._reasons if each != reason]
        for member in self._members():
            member.peer.pausing.want_no_more(reason)

    def take_over(self, member: Membership) -> None:
        """Let what has come to be held pause, too, where this peer is paused."""
        for reason in self._reasons:
            member.peer.pausing.want(reason)

    async def settled(self) -> None:
        for member in list(self._members()):
            await member.peer.pausing.settled()
        self._tell()

    @property
    def is_away(self) -> bool:
        return any(member.peer.pausing.is_away for member in self._members())

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)


class Senders:
    def __init__(self, grounds: Grounds, table: StageTable) -> None:
        self._node = grounds.node
        self._link = grounds.link
        self._dispatch = grounds.dispatch
        self._clock = grounds.clock
        self._split = grounds.run.pipeline.split
        self._table = table
        self._routes: dict[int, Router] = {}

    def sender(self, stage: int) -> Sender:
        """Return what sends to a stage: one for all that do."""
        senders = self._dispatch.senders
        if stage not in senders:
            router = self._routes[stage] = Router(self._node.peer)
            senders[stage] = Sender(self._link, stage, router, self._clock)
            self.look()
        return senders[stage]

    def look(self) -> None:
        """Take up who computes which stage now."""
        for stage, router in self._routes.items():
            ready = self._table.ready(stage)
            if self._split is not None:
                leading = leaders(ready, self._split.members)
                ready = {peer: each for peer, each in ready.items() if peer in leading}
            linked = {self._node.peer, *self._node.peers}
            router.seen({peer: Near(rtt_s=0.0, began=each.since) for peer, each in ready.items() if peer in linked})

    async def aclose(self) -> None:
        for sender in self._dispatch.senders.values():
            await sender.aclose()


NEWS_S = 2.0
SILENT_S = 10.0
EMPTY_S = 10.0  # until a stage that nobody holds is taken up
FINISH_S = 30.0  # for a stage to count the last of what the first one has trained


class StagesPeer:
    def __init__(self, kit: Kit) -> None:
        self.table = StageTable(kit.run.stages, has_tied=kit.run.tied is not None, costs=relative_costs(kit.run))
        link = StageLink(kit.node)
        self.grounds = grounds = Grounds(
            **vars(kit),
            link=link,
            dispatch=Dispatch(link),
            barrier=Barrier(kit.node, lambda peer: peer in self.table.ready(0)),
            onward=self.sender,
            ready=self.table.ready,
            helps=HelpDesk.on(link),
            has_busy=self.has_busy,
        )
        self.run = kit.run
        self.context = grounds  # what a peer has under this name: `emit`, `node`
        self._node = grounds.node
        self._senders = Senders(grounds, self.table)
        self.members: dict[int, Member] = {}
        self._coming: set[int] = set()  # stages that are about to be held
        self._unfit: set[int] = set()  # those for which there is no room beside what is held
        self.outcomes: dict[int, Outcome] = {}
        self.failure: Exception | None = None
        self.pausing = Pauses(self._memberships, self.tell)
        self._reports = StageReports(grounds.node, grounds.clock, grounds.emit)
        self._num_held = 0
        self._heard_at: dict[PeerId, float] = {}
        self._empty_since: dict[int, float] = {}
        self._looked_at = grounds.clock.now()
        self._complete_at: float | None = None
        self._last_round = 0  # of the first stage
        self._stop_reason = ""
        self._has_ended = asyncio.Event()
        self._tasks = Tasks(self.fail)
        self._lives = Tasks(self.fail)
        self._tied = Tied(grounds, self.table, self._lives.spawn, self._on_tied)
        self.ending = Ending(self._tasks, self.tell)
        self._backup = Backup(grounds, self.table)
        self._moving = Rebalance(grounds, self.table, self.members, self._hold)
        self._on_disk = StagesOnDisk(grounds.folder)
        self._entering = Placement(grounds, self.table, self._on_disk, self._hold, self._has_ended.set)
        self._node.on_note(StageNews, self._on_news)
        self._node.on_link(self._on_link)
        self._node.on_contact(lambda contact: self._node.keep(contact.peer))

    # --- life ---

    async def found(self, wait_for: int) -> dict[int, Outcome]:
        """Begin the run once `wait_for` peers (this one included) are here, or go on with what is kept here."""
        return await self._live(self._entering.found(wait_for))

    async def join(self) -> dict[int, Outcome]:
        """Take part in a run that others keep, for the first time or again."""
        return await self._live(self._entering.join())

    async def _live(self, coming: "asyncio._CoroutineLike[None]") -> dict[int, Outcome]:
        ticking = self._tasks.spawn(self._tick())
        self._tasks.spawn(self._backup.watch())
        self._tasks.spawn(coming)  # type: ignore[arg-type]
        try:
            await self._has_ended.wait()
            ticking.cancel()
            await self._lives.aclose(grace_s=FINISH_S)
        finally:
            await self._tasks.aclose()
            await self._lives.aclose()
            await self._senders.aclose()
        if self.failure is not None:
            raise self.failure
        return self.outcomes

    def stop(self, reason: str) -> None:
        """Say goodbye in every stage, save, and return from `found` or `join`, soon.

        What this peer alone holds, another keeps first; said twice, nobody waits for that.
        """
        is_first, self._stop_reason = not self._stop_reason, self._stop_reason or reason
        keepers = self._backup.keepers_of(self.members) if is_first else {}
        if keepers and self.failure is None and self._complete_at is None:
            self._tasks.spawn(self._hand_over(keepers, reason))
        else:
            self._stop_all(reason)

    async def _hand_over(self, keepers: dict[int, PeerId], reason: str) -> None:
        for stage in keepers:
            self.members[stage].is_leaving = True
        self.tell()  # nobody sends anything more
        names = ", ".join(self.run.called(stage) for stage in keepers)
        self.grounds.emit(Notice(text=f"nobody else holds {names}: another peer takes the state before this one goes"))
        if self.run.tied is not None:
            keepers |= self._backup.keepers_of([self.run.tied])
        kept = await asyncio.gather(*(self._backup.hand_over(stage, keeper) for stage, keeper in keepers.items()))
        if not all(kept):
            self.grounds.emit(Notice(text="nobody has taken all of it: it stays here, on this peer's disk"))
        self._stop_all(reason)

    def _stop_all(self, reason: str) -> None:
        for member in list(self.members.values()):
            member.stop(reason)
        if not self.members:
            self._tied.stop(reason)
            self._has_ended.set()

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stop(type(error).__name__)

    @property
    def is_stopping(self) -> bool:
        return bool(self._stop_reason)

    @property
    def reason(self) -> str:
        """Return why it was told to stop, if it was."""
        return self._stop_reason

    # --- which stages ---

    def _hold(self, stage: int, reason: str, wait_for: int | None = None, opens: int | None = None) -> None:
        """Hold a stage from now on.

        Args:
            wait_for: members with which to open its run; None: others have, or will.
            opens: the same of the tied matrix, where the stage goes with it.
        """
        if stage in self.members or stage in self._coming or self.is_stopping:
            return
        self._num_held += 1
        self._coming.add(stage)
        self._lives.spawn(self._held(stage, reason, wait_for, opens, self._num_held))

    async def _held(self, stage: int, reason: str, wait_for: int | None, opens: int | None, since: int) -> None:
        """Hold a stage to its end."""
        outer = await first_weights(self.grounds, stage)
        tied = await self._tied.held(stage, opens) if self.run.has_tied(stage) else None
        if self.is_stopping:
            await self._tied.let_go(stage)
            self._has_ended.set()
            return
        emit, compute = self._reports.of(stage, self.grounds.compute)
        try:
            member = Member(replace(self.grounds, emit=emit, compute=compute), stage, since, outer, tied)
        except TooLarge as error:
            if not self.members:
                raise
            self._unfit.add(stage)
            self._coming.discard(stage)
            await self._tied.let_go(stage)
            self.grounds.emit(Notice(text=f"{self.run.called(stage)} is not taken up here: {error}"))
            return
        finally:
            del outer
        self.members[stage] = member
        self._coming.discard(stage)
        num = member.run.num_parameters
        self.grounds.emit(StageHeld(stage=stage, num_stages=self.run.stages, num_parameters=num, reason=reason))
        for peer, news in self.table.peers.items():
            self._meet(member, peer, news)
        self.pausing.take_over(member)
        member.conductor.on_ready = self.tell
        self.tell()
        why = "it broke"
        try:
            if tied is not None:
                await tied.is_here(lambda: member.is_leaving)
            snapshot = await self.grounds.compute.serve(member.snapshot)
            outcome = await member.live(wait_for=wait_for, snapshot=snapshot)
            why = outcome.reason
            if why != MOVES:
                self.outcomes[stage] = outcome
        finally:
            if self.members.get(stage) is member:
                del self.members[stage]
            member.has_ended.set()
            self._unfit.clear()  # there is more room
            await self._tied.let_go(stage)
            self.grounds.emit(StageLeft(stage=stage, reason=why))
            self.tell()
            if not self.members and not self._coming and (why != MOVES or self.is_stopping):
                self._has_ended.set()

    def sender(self, stage: int) -> Sender:
        return self._senders.sender(stage)

    def holding(self, stage: int) -> Membership | None:
        """Return this peer's part in the run of a stage, or of a tied matrix; None: it has none."""
        return self._tied.member if stage == self.run.tied else self.members.get(stage)

    def _memberships(self) -> list[Membership]:
        return [*self.members.values(), *([] if self._tied.member is None else [self._tied.member])]

    def _on_tied(self, member: TiedMember) -> None:
        if not member.is_leaving:
            self.pausing.take_over(member)
        for peer, news in self.table.peers.items():
            self._meet(member, peer, news)
        self.tell()

    # --- now and then ---

    async def _tick(self) -> None:
        for peer in self._node.known_addresses():
            self._node.keep(peer)
        while True:
            now = self.grounds.clock.now()
            self.tell()
            for peer in [peer for peer, at in self._heard_at.items() if now - at > SILENT_S]:
                self._forget(peer)
                self._node.drop(peer, f"silent for {SILENT_S:.0f} s")
            if self._entering.is_over and not self.is_stopping:
                self._look_at_the_end(now)
                if self._complete_at is None or self.has_busy():
                    self._look_at_empty(now)
                    self._tied.look()
                every_s = self.run.pipeline.rebalance_s
                if every_s and now - self._looked_at >= every_s:
                    self._looked_at = now
                    self._tasks.spawn(self._moving.rebalance())
                self._moving.let_go()
            self._reports.show(self.table)
            await asyncio.sleep(NEWS_S)

    def _look_at_empty(self, now: float) -> None:
        me, others, empty = self._node.peer, self.table.others(self._node.peer), set(self.table.empty())
        self._empty_since = {stage: at for stage, at in self._empty_since.items() if stage in empty}
        for stage in sorted(empty):
            if stage in self._unfit or now - self._empty_since.setdefault(stage, now) < EMPTY_S:
                continue
            self._empty_since[stage] = now  # for whoever takes it up to come that far
            keepers = self.table.keepers(stage)
            best = min(keepers, key=lambda peer: (-keepers[peer], peer), default=None)
            self.grounds.emit(
                StageEmpty(stage=stage, restored_by=best, round=Round(0 if best is None else keepers[best]))
            )
            opens = 1 if stage == 0 and self._tied.is_lost else None
            if best == me:
                self._hold(stage, "nobody holds it, and its newest state is here", opens=opens)
            elif best is None and others and me < others[0]:  # alone, it waits for others
                self.grounds.emit(Notice(text=f"nobody has a state of stage {stage + 1}: it begins anew"))
                self._hold(stage, "nobody has a state of it", wait_for=1, opens=opens)

    # --- the end ---

    def _look_at_the_end(self, now: float) -> None:
        """Leave the stages after the first, once that is complete and these have counted the last of it."""
        is_complete = self._is_complete or any(news.is_complete for news in self.table.peers.values())
        if self._complete_at is None and not is_complete:
            return
        self._complete_at = self._complete_at or now
        self._last_round = max([self._last_round, *(each.round for each in self.table.held(0).values())])
        self.ending.begin()
        if self.has_busy() or now - self._complete_at < NEWS_S:  # who is about to fetch says so in its next news
            return
        for member in list(self.members.values()):
            has_all = member.conductor.beat.round >= self._last_round and not member.worker.num_taken
            if member.stage and (has_all or now - self._complete_at >= FINISH_S):
                member.stop("complete")
        if not self.members and not self._coming:
            self._has_ended.set()

    def has_busy(self) -> bool:
        """Whether anybody measures or fetches at the end, this peer included."""
        return self._is_busy or any(news.is_busy for news in self.table.peers.values())

    @property
    def _is_busy(self) -> bool:
        first = self.members.get(0)
        return self.ending.is_under_way or (first is not None and first.is_measuring)

    @property
    def _is_complete(self) -> bool:
        """Whether all is trained, as this peer's own first stage has it."""
        first = self.members.get(0)
        is_at_end = first is not None and first.peer.is_complete
        return is_at_end or (0 in self.outcomes and self.outcomes[0].reason == "complete")

    # --- what is told ---

    def news(self) -> StageNews:
        heads = {member.stage: member.peer.head for member in self._memberships()}
        return StageNews(
            held=tuple(self.members[stage].held for stage in sorted(self.members)),
            kept=tuple(Shelved(stage=stage, round=round) for stage, round in self._on_disk.with_held(heads).items()),
            is_trainer=True,
            is_busy=self._is_busy,
            is_complete=self._is_complete,
            tied=None if self._tied.member is None else self._tied.member.held,
        )

    def tell(self) -> None:
        """Tell everybody what this peer holds."""
        news = self.news()
        self.table.told(self._node.peer, news)
        for peer in self._node.peers:
            self._node.post(peer, news)
        self._senders.look()
        self.grounds.barrier.look()

    # --- what others tell ---

    async def _on_news(self, peer: PeerId, news: StageNews) -> None:
        if not self._node.is_linked(peer):
            return
        self.table.told(peer, news)
        self._heard_at[peer] = self.grounds.clock.now()
        if news.is_complete and not self.is_stopping:
            self._look_at_the_end(self.grounds.clock.now())
        for member in self._memberships():
            self._meet(member, peer, news)
        self._senders.look()
        self.grounds.barrier.look()

    def _meet(self, member: Membership, peer: PeerId, news: StageNews) -> None:
        since = next((each.since for each in news.all_held if each.stage == member.stage), None)
        if since is None:
            member.channel.parted(peer, "it has left the stage")
        elif self._node.is_linked(peer):
            member.channel.met(peer, since)

    def _on_link(self, peer: PeerId, is_up: bool, reason: str) -> None:
        if is_up:  # whoever only watches tells no news, and may be silent
            self._node.post(peer, self.news())
            return
        self._forget(peer, reason)

    def _forget(self, peer: PeerId, reason: str = "it is silent") -> None:
        self._heard_at.pop(peer, None)
        self.table.gone(peer)
        for member in self._memberships():
            member.channel.parted(peer, reason)
        self._senders.look()
        self.grounds.barrier.look()
