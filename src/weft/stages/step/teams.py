"""A member's part in the teams of its stage, where a run says that members compute each micro-batch together."""

from weft.errors import CallFailed
from weft.events import TeamFormed
from weft.ids import Digest
from weft.pipeline.device import Step
from weft.pipeline.split.leader import Leader
from weft.pipeline.split.member import Means, TeamMember
from weft.pipeline.worker import CurrentStep
from weft.run.staged import StagedConfig
from weft.stages.step.pipeline import Kit, Pipeline
from weft.stages.table import Team, team_of
from weft.training.section import SectionTrainer


class Teams:
    """Of one member of one stage.

    Args:
        run: of the stage.
        current: the step that it is at.
    """

    def __init__(
        self, kit: Kit, pipeline: Pipeline, run: StagedConfig, trainer: SectionTrainer, current: CurrentStep
    ) -> None:
        split, stage = run.pipeline.split, run.stage
        assert split is not None, "the run has no teams"
        assert trainer.split is not None, "the run has no teams"
        assert stage is not None, "the team of which stage?"
        self._trainer = trainer
        self._table = pipeline.table
        self._stage = stage
        self._size = split.members
        self._me = pipeline.link.me
        self._emit = kit.emit
        self._seen: Team = ()
        self._told: Team = ()
        self._state: Digest | None = None
        means = Means(
            stage=stage,
            link=pipeline.link,
            exchanges=pipeline.exchanges,
            team=self._own,
            section=trainer,
            layers=trainer.split,
            run=kit.compute.train,
            seq_len=run.train.seq_len,
            micro_batch=run.pipeline.micro_batch,
            batch_size=run.train.batch_size,
        )
        self.leader = Leader(means, kit.clock)
        self._member = TeamMember(means, current)

    async def collect(self) -> bool:
        """Add what the team found to this member's gradient; return whether all of it was to be had."""
        try:
            total = self._trainer.here.model.gradient
        except CallFailed:  # it is paused, and what was added up went with its device
            self.leader.forget()
            return False
        return await self.leader.collect(total)

    def forget(self) -> None:
        """Forget what others have of this member's gradient, which is nothing from now on."""
        self.leader.forget()

    def advance(self, step: Step, state: Digest) -> None:
        """Forget what was of earlier steps, and of other weights than those after a manifest."""
        if state != self._state:
            self._state = state
            self._member.advance(step)
        self._look()

    async def aclose(self) -> None:
        await self._member.aclose()
        await self.leader.aclose()

    def _look(self) -> None:
        """Tell with whom this peer computes, once that is so for a second time: as a run begins it is not settled."""
        before, self._seen = self._seen, self._own() if self._me in self._table.ready(self._stage) else ()
        if self._seen and self._seen == before != self._told:
            self._told = self._seen
            self._emit(TeamFormed(stage=self._stage, members=self._seen, size=self._size))

    def _own(self) -> Team:
        return team_of(self._me, self._table.ready(self._stage), self._size)
