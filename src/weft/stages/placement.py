"""Which stages a peer holds: as the run begins, later, or again; and which of them it leaves.

    maker       waits for peers, and tells all who holds what
    comes       to the stage that is weakest, once any is held
    again       to what waits for its vote; else to what it held before, and others do not hold well; else as who comes
    too late    where all is trained and nobody else is here, it says so and ends. A stage's state may be a step behind
                the first one's, or ahead: then it takes all for trained later, or earlier, by that much

Who of a peer's stages goes elsewhere: a move to a weaker stage, or one of several that others compute, too.

    rebalance    now and then: is this the peer that should go to a weaker stage? (`pipeline.placement`)
    let_go       of several stages one that another peer holds alone

A stage that nobody holds is taken up by whoever has its newest state. Where nobody has one, it begins anew, and an
event says so; but not where one peer is left alone.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from weft.events import Notice, StageEmpty
from weft.ids import PeerId, Round
from weft.launch.peer import BEGUN
from weft.pipeline.placement import GAIN, moves, stage_for, totals_of
from weft.stages.backup import StagesOnDisk
from weft.stages.holdings import MOVES, Holdings
from weft.stages.messages import Held, LeaveAnswer, MayLeave, StageBegin
from weft.stages.step.member import Member
from weft.stages.step.pipeline import Kit
from weft.stages.table import StageTable
from weft.sync.records.messages import Base

EMPTY_S = 10.0  # until a stage that nobody holds is taken up
LOOK_S = 3.0  # at the news of others, before a newcomer chooses
ALONE_S = 30.0  # who comes back to a run that is complete waits so long for others
ALONE = (
    "the run is complete, as far as this peer's state tells, and nobody else is here. What it held stays on its disk. "
    f"To go on, or to put the whole model together, start a member of each stage within {ALONE_S:.0f} seconds"
)


def assigned(peers: Sequence[PeerId], num_stages: int) -> StageBegin:
    """Return who holds what at first: peers take stages in turn, from the first on; of few, each takes several."""
    num = max(len(peers), num_stages)
    return StageBegin(
        peers=tuple(peers[number % len(peers)] for number in range(num)),
        stages=tuple(number % num_stages for number in range(num)),
    )


def waits_for(me: PeerId, last: Base, held: Mapping[PeerId, Held]) -> bool:
    """Return whether a stage waits for a peer's vote: who is there has ended no round since, and is no majority.

    Args:
        last: the round in which the peer voted last.
        held: who is in the stage.
    """
    others = held.keys() & set(last.electorate) - {me}
    if me not in last.electorate or not others or any(each.round > last.round for each in held.values()):
        return False
    return 2 * len(others) <= len(last.electorate)


class Placement:
    """Of one peer.

    Args:
        end: ends the peer's part in the run, which holds nothing yet.
    """

    def __init__(
        self, kit: Kit, table: StageTable, on_disk: StagesOnDisk, holdings: Holdings, end: Callable[[], None]
    ) -> None:
        self._kit = kit
        self._run = kit.run
        self._me = kit.node.peer
        self._table = table
        self._on_disk = on_disk
        self._holdings = holdings
        self._end = end
        self._is_begun = asyncio.Event()
        self._empty_since: dict[int, float] = {}
        kit.node.on_note(StageBegin, self._on_begin)

    @property
    def is_over(self) -> bool:
        """Whether the run has begun, as far as this peer knows, and it has been told what to hold."""
        return self._is_begun.is_set()

    async def found(self, wait_for: int) -> None:
        """Begin the run once `wait_for` peers (this one included) are here, or go on with what is kept here."""
        if self._on_disk.rounds:
            if wait_for > 1:
                self._kit.emit(Notice(text=BEGUN))
            await self.join()
            return
        node = self._kit.node
        while 1 + len(self._table.others(self._me)) < wait_for:
            await asyncio.sleep(0.2)  # news come when they come
            if self._goes_on:
                await self.join()  # elsewhere
                return
        begin = assigned([self._me, *self._table.others(self._me)], self._run.stages)
        for peer in node.peers:
            node.post(peer, begin)
        await self._on_begin(self._me, begin)

    async def join(self) -> None:
        """Take part in a run that others keep, for the first time or again."""
        await asyncio.sleep(LOOK_S)
        if self._on_disk.has_counted(self._run.train.tokens) and not await self._meets_others():
            self._kit.emit(Notice(text=ALONE))
            self._end()
            return
        if not self._is_begun.is_set() and (missed := self._missed()):
            self._is_begun.set()
            for stage in missed:
                self._holdings.hold(stage, "no round of it ends without this peer")
            return
        if kept := self._kept():
            self._is_begun.set()
            for stage in kept:
                self._holdings.hold(stage, "this peer held it before")
            return
        while not self._is_begun.is_set():
            if self._goes_on:
                self._is_begun.set()
                self._holdings.hold(stage_for(self._me, self._weighed(), self._table.costs), "it is the weakest")
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._is_begun.wait()

    def look_at_empty(self, now: float) -> None:
        """Take up those of the stages that nobody holds which are this peer's to take up."""
        others, empty = self._table.others(self._me), set(self._table.empty())
        self._empty_since = {stage: at for stage, at in self._empty_since.items() if stage in empty}
        for stage in sorted(empty):
            if stage in self._holdings.unfit or now - self._empty_since.setdefault(stage, now) < EMPTY_S:
                continue
            self._empty_since[stage] = now  # for whoever takes it up to come that far
            kept = self._table.kept(stage)
            best = min(kept, key=lambda peer: (-kept[peer], peer), default=None)
            self._kit.emit(StageEmpty(stage=stage, restored_by=best, round=Round(0 if best is None else kept[best])))
            opens = 1 if stage == 0 and self._holdings.tied.is_lost else None
            if best == self._me:
                self._holdings.hold(stage, "nobody holds it, and its newest state is here", opens=opens)
            elif best is None and others and self._me < others[0]:  # alone, it waits for others
                self._kit.emit(Notice(text=f"no peer has a state of stage {stage + 1}: it starts over"))
                self._holdings.hold(stage, "nobody has a state of it", wait_for=1, opens=opens)

    async def _on_begin(self, _peer: PeerId, begin: StageBegin) -> None:
        if self._is_begun.is_set():
            return
        self._is_begun.set()
        for stage in range(self._run.stages):
            members = begin.of(stage)
            if self._me in members:
                wait_for = len(set(members)) if members[0] == self._me else None
                ends = {*begin.of(0), *begin.of(self._run.stages - 1)}
                opens = len(ends) if begin.of(0)[0] == self._me else None
                self._holdings.hold(stage, "the run begins", wait_for, opens)

    @property
    def _goes_on(self) -> bool:
        return any(self._table.held(stage) for stage in range(self._run.stages))

    async def _meets_others(self) -> bool:
        """Whether there are any, or come in a while."""
        for _ in range(round(ALONE_S / LOOK_S)):
            if self._table.others(self._me):
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _missed(self) -> list[int]:
        """Return the stages in which no round ends without this peer's vote."""
        voted = {stage: last for stage, last in self._on_disk.voted().items() if stage < self._run.stages}
        return [stage for stage, last in voted.items() if waits_for(self._me, last, self._table.held(stage))]

    def _kept(self) -> list[int]:
        """Return the stages whose newest state is here, of this peer's own if it has any, and that need it."""
        shelved = self._on_disk.own or self._on_disk.rounds
        kept = {stage: round for stage, round in shelved.items() if stage < self._run.stages}
        newest = max(kept.values(), default=0)
        return [stage for stage, round in kept.items() if round == newest and not self._is_well_held(stage)]

    def _is_well_held(self, stage: int) -> bool:
        """Whether others hold a stage, and this peer, which held it too, is needed more elsewhere."""
        totals = totals_of(self._table.rates(), self._table.costs)
        return bool(totals[stage]) and totals[stage] > min(totals) * (1 + GAIN)

    def _weighed(self) -> list[dict[PeerId, float]]:
        """Return the stages' members and rates; one that nobody holds is left to who has its state."""
        return [dict(each) or {self._me: float("inf")} for each in self._table.rates()]


MOVED_S = 120.0  # for which who has moved stays
ASK_S = 5.0


class Rebalance:
    """Of one peer."""

    def __init__(self, kit: Kit, table: StageTable, holdings: Holdings) -> None:
        self._clock = kit.clock
        self._me = kit.node.peer
        self._every_s = kit.run.pipeline.rebalance_s
        self._table = table
        self._holdings = holdings
        self._members = holdings.members
        self._looked_at = kit.clock.now()
        self._moved_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether to look again, which is then done."""
        is_due = self._every_s > 0 and now - self._looked_at >= self._every_s
        if is_due:
            self._looked_at = now
        return is_due

    async def rebalance(self) -> None:
        """Move, if this is the peer that should."""
        now, table = self._clock.now(), self._table
        if table.empty() or len(self._members) != 1 or (self._moved_at is not None and now - self._moved_at < MOVED_S):
            return
        unready = {peer for peer, news in table.peers.items() if [each.state for each in news.held] != ["ready"]}
        for move in moves(table.rates(), staying=unready, costs=table.costs):
            member = self._members.get(move.source)
            if move.peer == self._me and member is not None and await self._may_leave(member):
                self._moved_at = now
                await self._move(member, move.target)

    def let_go(self) -> None:
        """Of several stages, let one go that another peer computes, too."""
        if len(self._members) < 2 or any(member.is_leaving for member in self._members.values()):
            return
        for stage in sorted(self._members):
            others = [peer for peer in self._table.ready(stage) if peer != self._me]
            if any(len(self._table.peers[peer].held) == 1 for peer in others):
                self._members[stage].stop(MOVES)
                return

    async def _move(self, member: Member, target: int) -> None:
        member.stop(MOVES)
        await member.has_ended.wait()  # it says its goodbye, and saves
        self._holdings.hold(target, f"it gains more than stage {member.stage + 1} loses")

    async def _may_leave(self, member: Member) -> bool:
        """Whether another member of the stage stays: asked of each, so that no two leave a stage of two at once."""
        member.leave()
        for peer in sorted(self._table.ready(member.stage)):
            if peer != self._me:
                answer = await member.channel.ask(peer, MayLeave(), LeaveAnswer, deadline_s=ASK_S)
                if answer is not None and answer.does_stay:
                    return True
        member.stay()
        return False
