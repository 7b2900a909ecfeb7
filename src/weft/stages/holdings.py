"""The stages that one peer holds, each from when it is taken up to its end; with an end stage the matrix of both ends.

    holdings.hold(stage, reason)      from now on; others hear of it
    holdings.members[stage]           this peer's part in the stage's run
    holdings.outcomes[stage]          how it ended

Failure:
- a stage breaks: the peer ends, and says why.
- there is no room for one beside what is held: a notice says so, and it is not taken up until something is let go.
"""

from collections.abc import Callable

from weft.errors import TooLarge
from weft.events import Notice, StageHeld, StageLeft
from weft.ids import PeerId
from weft.peer.peer import Outcome
from weft.stages.step.member import Member, Membership, Tied, TiedMember, first_weights
from weft.stages.step.pipeline import Kit, Pipeline
from weft.tasks import Tasks

MOVES = "goes to another stage"


class Holdings:
    """
    Args:
        fail: ends the peer, which a stage has failed of.
        end: ends it, where it is to hold nothing more.
    """

    def __init__(
        self, kit: Kit, pipeline: Pipeline, fail: Callable[[Exception], None], end: Callable[[], None]
    ) -> None:
        self.members: dict[int, Member] = {}
        self.outcomes: dict[int, Outcome] = {}
        self._kit = kit
        self._pipeline = pipeline
        self._end = end
        self._coming: set[int] = set()  # stages that are about to be held
        self.unfit: set[int] = set()  # those for which there is no room beside what is held
        self._num_held = 0
        self.is_closed = False  # nothing more is taken up
        self._lives = Tasks(fail)
        self.tied = Tied(kit, pipeline, self._lives.spawn, self._on_tied)
        self.pausing = Pauses(self, pipeline)

    def hold(self, stage: int, reason: str, wait_for: int | None = None, opens: int | None = None) -> None:
        """Hold a stage from now on.

        Args:
            wait_for: members with which to open its run; None: others have, or will.
            opens: the same of the tied matrix, where the stage goes with it.
        """
        if stage in self.members or stage in self._coming or self.is_closed:
            return
        self._num_held += 1
        self._coming.add(stage)
        self._lives.spawn(self._held(stage, reason, wait_for, opens, self._num_held))

    def close(self) -> None:
        """Take up nothing more."""
        self.is_closed = True

    def stop(self, reason: str) -> None:
        """Leave all of it."""
        for member in list(self.members.values()):
            member.stop(reason)
        if not self.members:
            self.tied.stop(reason)
            self._end()

    async def aclose(self, grace_s: float = 0.0) -> None:
        await self._lives.aclose(grace_s=grace_s)

    @property
    def is_empty(self) -> bool:
        return not self.members and not self._coming

    def holding(self, stage: int) -> Membership | None:
        """Return this peer's part in the run of a stage, or of a tied matrix; None: it has none."""
        return self.tied.member if stage == self._kit.run.tied else self.members.get(stage)

    def all(self) -> list[Membership]:
        return [*self.members.values(), *([] if self.tied.member is None else [self.tied.member])]

    # --- who else holds them ---

    def meet(self, peer: PeerId) -> None:
        """Take up what the table has of another peer."""
        for member in self.all():
            self._meet(member, peer)

    def part(self, peer: PeerId, reason: str) -> None:
        """Take it up that another is gone."""
        for member in self.all():
            member.channel.parted(peer, reason)

    def _meet_all(self, member: Membership) -> None:
        for peer in self._pipeline.table.peers:
            self._meet(member, peer)

    def _meet(self, member: Membership, peer: PeerId) -> None:
        held = self._pipeline.table.held(member.stage).get(peer)
        if held is None:
            member.channel.parted(peer, "it has left the stage")
        elif self._kit.node.is_linked(peer):
            member.channel.met(peer, held.since)

    # --- one stage ---

    async def _held(self, stage: int, reason: str, wait_for: int | None, opens: int | None, since: int) -> None:
        """Hold a stage to its end."""
        kit, run = self._kit, self._kit.run
        outer = await first_weights(kit, stage)
        tied = await self.tied.held(stage, opens) if run.has_tied(stage) else None
        if self.is_closed:
            await self.tied.let_go(stage)
            self._end()
            return
        try:
            member = Member(kit, self._pipeline, stage, since, outer, tied)
        except TooLarge as error:
            if not self.members:
                raise
            self.unfit.add(stage)
            self._coming.discard(stage)
            await self.tied.let_go(stage)
            kit.emit(Notice(text=f"this peer cannot take {run.called(stage)}: {error}"))
            return
        finally:
            del outer
        self.members[stage] = member
        self._coming.discard(stage)
        num = member.run.num_parameters
        kit.emit(StageHeld(stage=stage, num_stages=run.stages, num_parameters=num, reason=reason))
        self._meet_all(member)
        self.pausing.take_over(member)
        self._pipeline.changed()
        why = "it broke"
        try:
            if tied is not None:
                await tied.is_here(lambda: member.is_leaving)
            snapshot = await kit.compute.serve(member.snapshot)
            outcome = await member.live(wait_for=wait_for, snapshot=snapshot)
            why = outcome.reason
            if why != MOVES:
                self.outcomes[stage] = outcome
        finally:
            if self.members.get(stage) is member:
                del self.members[stage]
            member.has_ended.set()
            self.unfit.clear()  # there is more room
            await self.tied.let_go(stage)
            kit.emit(StageLeft(stage=stage, reason=why))
            self._pipeline.changed()
            if self.is_empty and (why != MOVES or self.is_closed):
                self._end()

    def _on_tied(self, member: TiedMember) -> None:
        if not member.is_leaving:
            self.pausing.take_over(member)
        self._meet_all(member)
        self._pipeline.changed()


class Pauses:
    """The pause of all that a peer holds, as one."""

    def __init__(self, holdings: Holdings, pipeline: Pipeline) -> None:
        self._holdings = holdings
        self._pipeline = pipeline
        self.reasons: tuple[str, ...] = ()

    def want(self, reason: str) -> None:
        self.reasons += (reason,)
        for member in self._holdings.all():
            member.peer.pausing.want(reason)
        self._pipeline.changed()

    def want_no_more(self, reason: str) -> None:
        self.reasons = tuple(each for each in self.reasons if each != reason)
        for member in self._holdings.all():
            member.peer.pausing.want_no_more(reason)

    def take_over(self, member: Membership) -> None:
        """Let what has come to be held pause, too, where this peer is paused."""
        for reason in self.reasons:
            member.peer.pausing.want(reason)

    async def settled(self) -> None:
        for member in self._holdings.all():
            await member.peer.pausing.settled()
        self._pipeline.changed()

    @property
    def is_away(self) -> bool:
        return any(member.peer.pausing.is_away for member in self._holdings.all())
