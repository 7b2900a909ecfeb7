"""One stage that this peer holds: its membership, and the worker that micro-batches come to."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
from torch import Tensor

from weft.ids import PeerId
from weft.peer.companion import Parameters, Unmeasured
from weft.peer.peer import Outcome, Peer
from weft.peer.state.checkpoint import Snapshot
from weft.pipeline.sender import Origin
from weft.pipeline.step import CurrentStep
from weft.pipeline.worker import Bounds, Worker
from weft.stages.messages import Held, LeaveAnswer, MayLeave, State
from weft.stages.step.conductor import Conductor, Part
from weft.stages.step.evaluate import Bystander, Needs, StageEvaluator
from weft.stages.step.membership import Membership
from weft.stages.step.pipeline import Kit, Pipeline
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

    def __init__(
        self, kit: Kit, pipeline: Pipeline, stage: int, since: int, outer: Tensor, tied: TiedMember | None
    ) -> None:
        micro_batch = kit.run.pipeline.micro_batch
        emit, self._compute = pipeline.reports.of(stage, kit.compute, micro_batch)
        kit = replace(kit, emit=emit, compute=self._compute)
        super().__init__(kit, pipeline, stage, since)
        run, clock = self.run, kit.clock
        self._evaluator: StageEvaluator | None = None  # of the first stage
        self.channel.serve(MayLeave, self._may_leave)
        batches = kit.data.batches(run, "train")
        matrix = None if tied is None else tied.trainer
        self._tied = None if tied is None else tied.conductor
        self.trainer = kit.make_section(run, kit.settings, batches, self._emit_from_thread, clock, matrix)
        current, onward = CurrentStep(stage, clock), None if stage == run.stages - 1 else pipeline.sender(stage + 1)
        bounds = Bounds(num_taken=fitting(run, kit.settings, choose(kit.settings)))
        is_split = run.pipeline.split is not None
        self._teams = Teams(kit, pipeline, run, self.trainer, current) if is_split else None
        leader = None if self._teams is None else self._teams.leader
        work = self._compute.piece
        self.worker = Worker(pipeline.link, stage, self.trainer, onward, work, current, emit, bounds, leader)
        self._source: Source | None = None
        if stage == 0:
            first = int(clock.wall() * 1000) << 20  # no process of this peer has begun one so high
            origin = Origin(kit.node.peer, pipeline.sender(0), run.stages, first)
            self._source = Source(origin, batches, micro_batch, kit.compute)
        part = Part(
            run=run,
            channel=self.channel,
            worker=self.worker,
            trainer=self.trainer,
            compute=kit.compute,
            pipeline=pipeline,
            source=self._source,
            tied=self._tied,
            teams=self._teams,
            snapshots=self.snapshots,
            make_evaluator=self._make_evaluator,
        )
        self.conductor = Conductor(part)
        self._context = self._make_context(self.trainer, self.conductor, outer)
        self.peer = Peer(run, self._context)

    async def live(self, *, wait_for: int | None, snapshot: Snapshot | None) -> Outcome:
        self.worker.start()
        return await super().live(wait_for=wait_for, snapshot=snapshot)

    def stop(self, reason: str) -> None:
        if self._tied is not None:
            self._tied.leave(self.stage)
        super().stop(reason)

    async def _end(self) -> None:
        self.worker.stop()
        if self._teams is not None:
            await self._teams.aclose()
        await self.worker.aclose()

    @property
    def is_measuring(self) -> bool:
        """Whether it has yet to measure the end of the run."""
        return self._evaluator is not None and self.peer.is_complete and not self._evaluator.is_measured

    @property
    def held(self) -> Held:
        rate = self._compute.rate if self._teams is None else 0.0  # of who computes with others nothing is measured
        return msgspec.structs.replace(super().held, rate=rate, num_waiting=self.worker.num_taken)

    @property
    def _state(self) -> State:
        state = super()._state
        return "joining" if state == "ready" and not self.conductor.is_in_step else state

    def _make_evaluator(self, conductor: Conductor, replica: Parameters, is_stopping: Callable[[], bool]) -> Unmeasured:
        kit = self._kit
        needs = Needs(kit.clock, self._pipeline.has_busy, kit.run.num_parameters)
        if self._source is None:
            return Bystander(needs)
        evaluator = StageEvaluator(self.run, self._context, self.trainer, replica, is_stopping)
        self._evaluator = evaluator.passing(self._source, conductor, needs)
        return self._evaluator

    async def _may_leave(self, _peer: PeerId, _request: MayLeave) -> LeaveAnswer:
        return LeaveAnswer(does_stay=not self.is_leaving and self.conductor.is_ready)
