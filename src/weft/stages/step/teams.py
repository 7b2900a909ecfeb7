"""Members of a stage that compute each micro-batch together, where a run says so: who leads whom, and a member's part.

    ready    d a c e b   size 2        (a, b) (c, d) (e)        the first leads; who is left over computes alone

All who know the same members find the same teams. Micro-batches go to those who lead.
"""

from collections.abc import Callable, Collection, Iterable

from weft.clock import Clock
from weft.errors import CallFailed
from weft.events import Emit, TeamFormed
from weft.executor import Compute
from weft.ids import Digest, PeerId
from weft.pipeline.link import StageLink
from weft.pipeline.split.leader import Lead
from weft.pipeline.split.member import HelpDesk, Helping, Means
from weft.pipeline.step import Beat
from weft.pipeline.worker import Worker
from weft.run.staged import StagedConfig
from weft.training.section import SectionTrainer

Team = tuple[PeerId, ...]


def teams(ready: Iterable[PeerId], size: int) -> list[Team]:
    """Return all teams of a stage's members; of who is left over each is one."""
    order = sorted(ready)
    num_whole = len(order) // size * size
    whole = [tuple(order[start : start + size]) for start in range(0, num_whole, size)]
    return [*whole, *((peer,) for peer in order[num_whole:])]


def leaders(ready: Collection[PeerId], size: int) -> frozenset[PeerId]:
    return frozenset(team[0] for team in teams(ready, size))


def team_of(peer: PeerId, ready: Collection[PeerId], size: int) -> Team:
    """Return the team that a peer is in; of one that is not ready, itself."""
    return next((team for team in teams(ready, size) if peer in team), (peer,))


class Teams:
    """Of one member of one stage.

    Args:
        ready: who computes the stage's micro-batches, now; this peer may be one.
    """

    def __init__(
        self,
        run: StagedConfig,
        trainer: SectionTrainer,
        link: StageLink,
        dispatch: HelpDesk,
        compute: Compute,
        clock: Clock,
        emit: Emit,
        ready: Callable[[], Collection[PeerId]],
    ) -> None:
        split, stage = run.pipeline.split, run.stage
        assert split is not None, "the run has no teams"
        assert trainer.split is not None, "the run has no teams"
        assert stage is not None, "the team of which stage?"
        self._trainer = trainer
        self._dispatch = dispatch
        self._stage = stage
        self._size = split.members
        self._me = link.me
        self._emit = emit
        self._ready = ready
        self._seen: Team = ()
        self._told: Team = ()
        means = Means(
            link=link,
            handover=dispatch.handover,
            layers=trainer.split,
            run=compute.train,
            seq_len=run.train.seq_len,
            micro_batch=run.pipeline.micro_batch,
            batch_size=run.train.batch_size,
        )
        self._worker: Worker | None = None
        self._state: Digest | None = None
        self.lead = Lead(means, stage, lambda: trainer.here, self._led, clock)
        self._helping = Helping(means, self._own, self._until_due)

    def begin(self, worker: Worker) -> None:
        """Help others from now on, in step with this peer's worker."""
        self._worker = worker
        self._dispatch.at[self._stage] = self._helping

    async def collect(self) -> bool:
        """Add what the team found to this member's gradient; return whether all of it was to be had."""
        try:
            total = self._trainer.here.model.gradient
        except CallFailed:  # it is paused, and what was added up went with its device
            self.lead.forget()
            return False
        return await self.lead.collect(total)

    def forget(self) -> None:
        """Forget what others have of this member's gradient, which is nothing from now on."""
        self.lead.forget()

    def advance(self, beat: Beat, state: Digest) -> None:
        """Forget what was of earlier steps, and of other weights than those after a manifest."""
        if state != self._state:
            self._state = state
            self._helping.advance(beat)
        self._look()

    async def aclose(self) -> None:
        if self._dispatch.at.get(self._stage) is self._helping:
            del self._dispatch.at[self._stage]
        await self.lead.aclose()
        await self._helping.aclose()

    def _look(self) -> None:
        """Tell with whom this peer computes, once that is so for a second time: as a run begins it is not settled."""
        before, self._seen = self._seen, self._own() if self._me in self._ready() else ()
        if self._seen and self._seen == before != self._told:
            self._told = self._seen
            self._emit(TeamFormed(stage=self._stage, members=self._seen, size=self._size))

    def _own(self) -> Team:
        return team_of(self._me, self._ready(), self._size)

    def _led(self) -> Team:
        team = self._own()
        return team[1:] if team[0] == self._me else ()

    async def _until_due(self, beat: Beat) -> None:
        assert self._worker is not None
        await self._worker.until_due(beat)
