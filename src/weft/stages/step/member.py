"""One stage that this peer holds: its membership, and the worker that micro-batches come to."""

from collections.abc import Callable

import msgspec
from torch import Tensor

from weft.ids import PeerId
from weft.peer.companion import Parameters, Unmeasured
from weft.peer.peer import Outcome, Peer
from weft.peer.state.checkpoint import Snapshot
from weft.pipeline.sender import Origin
from weft.pipeline.worker import Bounds, Worker
from weft.stages.messages import Held, LeaveAnswer, MayLeave, State
from weft.stages.report import Busy, Timed
from weft.stages.step.conductor import Conductor, Part
from weft.stages.step.evaluate import Bystander, Needs, StageEvaluator
from weft.stages.step.membership import Grounds, Membership
from weft.stages.step.source import Source
from weft.stages.step.teams import Teams
from weft.stages.step.tied import TiedMember
from weft.training.device import choose
from weft.training.section_memory import fitting


class Member(Membership):
    """
    Args:
        stage, since: as of a membership.
        outer: what its section starts from; becomes its own.
        tied: of the matrix that lies apart from its section, if one does: it has begun.

    Raises:
        TooLarge: the section does not fit this machine.
    """

    conductor: Conductor

    def __init__(self, grounds: Grounds, stage: int, since: int, outer: Tensor, tied: TiedMember | None) -> None:
        super().__init__(grounds, stage, since)
        run, clock = self.run, grounds.clock
        self._measuring: StageEvaluator | None = None  # of the first stage
        self.channel.serve(MayLeave, self._may_leave)
        batches = grounds.data.batches(run, "train")
        matrix = None if tied is None else tied.trainer
        self._tied = None if tied is None else tied.conductor
        self.trainer = grounds.make_section(run, grounds.settings, batches, self._emit_from_thread, clock, matrix)
        self._busy = Busy(run.pipeline.micro_batch)
        work = Timed(grounds.compute, clock, self._busy.note)
        onward = None if stage == run.stages - 1 else grounds.onward(stage + 1)
        bounds = Bounds(num_taken=fitting(run, grounds.settings, choose(grounds.settings)))
        self._teams = self._teamed()
        lead = None if self._teams is None else self._teams.lead
        self.worker = Worker(grounds.link, stage, self.trainer, onward, work.train, clock, grounds.emit, bounds, lead)
        if self._teams is not None:
            self._teams.begin(self.worker)
        self._source: Source | None = None
        if stage == 0:
            first = int(clock.wall() * 1000) << 20  # no process of this peer has begun one so high
            origin = Origin(grounds.node.peer, grounds.onward(0), run.stages, first)
            self._source = Source(origin, batches, run.pipeline.micro_batch, grounds.compute)
        part = Part(
            run=run,
            channel=self.channel,
            worker=self.worker,
            trainer=self.trainer,
            compute=grounds.compute,
            barrier=grounds.barrier,
            source=self._source,
            tied=self._tied,
            teams=self._teams,
            snapshots=self.snapshots,
            make_evaluator=self._evaluator,
        )
        self.conductor = Conductor(part)
        self._standing = self._place(self.trainer, self.conductor, outer)
        self.peer = Peer(run, self._standing)

    def _teamed(self) -> Teams | None:
        grounds = self._grounds
        if self.run.pipeline.split is None:
            return None
        return Teams(
            self.run,
            self.trainer,
            grounds.link,
            grounds.helps,
            grounds.compute,
            grounds.clock,
            grounds.emit,
            lambda: grounds.ready(self.stage),
        )

    async def live(self, *, wait_for: int | None, snapshot: Snapshot | None) -> Outcome:
        self._grounds.dispatch.workers[self.stage] = self.worker
        return await super().live(wait_for=wait_for, snapshot=snapshot)

    def stop(self, reason: str) -> None:
        if self._tied is not None:
            self._tied.leave(self.stage)
        super().stop(reason)

    async def _end(self) -> None:
        if self._grounds.dispatch.workers.get(self.stage) is self.worker:
            del self._grounds.dispatch.workers[self.stage]
        if self._teams is not None:
            await self._teams.aclose()
        await self.worker.aclose()

    @property
    def is_measuring(self) -> bool:
        """Whether it has yet to measure the end of the run."""
        return self._measuring is not None and self.peer.is_complete and not self._measuring.is_measured

    @property
    def held(self) -> Held:
        rate = self._busy.rate if self._teams is None else 0.0  # of who computes with others nothing is measured
        return msgspec.structs.replace(super().held, rate=rate, num_waiting=self.worker.num_taken)

    @property
    def _state(self) -> State:
        state = super()._state
        return "joining" if state == "ready" and not self.conductor.is_in_step else state

    def _evaluator(self, conductor: Conductor, replica: Parameters, is_stopping: Callable[[], bool]) -> Unmeasured:
        grounds = self._grounds
        needs = Needs(grounds.clock, grounds.has_busy, grounds.run.num_parameters)
        if self._source is None:
            return Bystander(needs)
        self._measuring = StageEvaluator(self.run, self._standing, self.trainer, replica, is_stopping)
        return self._measuring.passing(self._source, conductor, needs)

    async def _may_leave(self, _peer: PeerId, _request: MayLeave) -> LeaveAnswer:
        return LeaveAnswer(does_stay=not self.is_leaving and self.conductor.is_ready)
