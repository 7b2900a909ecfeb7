"""What a peer of a run with stages works with, and the pipeline that all its stages share.

    kit         everything with effects, made by `launch` or by a scenario
    pipeline    its link, who holds which stage, what sends to each stage, and how far the first one is

There is one sender to each stage that this peer sends to, kept up with who computes there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.clock import Clock
from weft.events import Emit, Notice
from weft.ids import PeerId, short
from weft.keys import Identity
from weft.net.node import Node
from weft.peer.context import Data
from weft.pipeline.link import StageLink
from weft.pipeline.routing import Router
from weft.pipeline.sender import Sender
from weft.pipeline.split.exchange import Exchanges
from weft.pipeline.witness import Witness
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.run.trust import AuditedTrust
from weft.stages.messages import Held
from weft.stages.report import StageReports
from weft.stages.step.barrier import Barrier
from weft.stages.table import StageTable, leaders
from weft.store.home import Home, PeerFolder
from weft.tasks import Compute
from weft.texts.beside.serving import Serving, cut_of, share_device
from weft.texts.beside.share import Beside
from weft.training.section import SectionTrainer
from weft.training.section_memory import relative_costs
from weft.training.tied import TiedTrainer


@dataclass(frozen=True, kw_only=True)
class Kit:
    """
    Args:
        beside: computes texts, where they are drawn beside training.
    """

    run: StagedConfig  # the whole
    node: Node
    identity: Identity
    home: Home
    folder: PeerFolder  # of the whole run
    settings: PeerConfig
    data: Data
    clock: Clock
    compute: Compute
    emit: Emit
    make_section: Callable[..., SectionTrainer] = SectionTrainer
    make_tied: Callable[..., TiedTrainer] = TiedTrainer
    beside: Beside | None = None


def beside_texts(kit: Kit) -> Kit:
    """Return what a peer works with, which draws texts beside it where its settings say so."""
    if not kit.settings.serve_nbytes:
        return kit
    settings, compute, beside = share_device(kit.settings, kit.compute, kit.clock, kit.emit)
    return replace(kit, settings=settings, compute=compute, beside=beside)


class Pipeline:
    """As one peer is in it.

    Args:
        has_busy: whether anybody evaluates or fetches at the end.
    """

    def __init__(self, kit: Kit, has_busy: Callable[[], bool]) -> None:
        run = kit.run
        self.table = StageTable(run.stages, has_tied=run.tied is not None, costs=relative_costs(run))
        self.link = StageLink(kit.node)
        beside = kit.beside
        self.serving: Serving | None = None
        if beside is not None:
            self.serving = Serving(
                cut_of(run, kit.data.tokenizer), kit.settings, self.link, kit.clock, beside, kit.emit
            )
        self.witness: Witness | None = None
        if isinstance(run.trust, AuditedTrust):
            runs = tuple(run.of_stage(stage).run for stage in range(run.stages))
            self.witness = Witness(self.link, runs, lambda stage: self.table.held(stage).keys(), kit.emit)
        self.barrier = Barrier(kit.node, self.table)
        self.exchanges = Exchanges(self.link)
        self.reports = StageReports(kit.node, kit.clock, kit.emit)
        self.has_busy = has_busy
        self._node = kit.node
        self._clock = kit.clock
        self._split = run.pipeline.split
        self._emit = kit.emit
        self._senders: dict[int, tuple[Sender, Router]] = {}
        self._left_out: set[tuple[int, PeerId]] = set()  # stages, and who is sent nothing of theirs
        self._changed: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever others should hear what this peer holds, and how far that is."""
        self._changed.append(callback)

    def changed(self) -> None:
        for callback in self._changed:
            callback()

    def sender(self, stage: int) -> Sender:
        """Return what sends to a stage: one for all that do."""
        if stage not in self._senders:
            router = Router(self._node.peer)
            self._senders[stage] = Sender(self.link, stage, router, self._clock, witness=self.witness), router
            self._route()
        return self._senders[stage][0]

    def look(self) -> None:
        """Take up what the table says now."""
        self._route()
        self.barrier.look()

    def _route(self) -> None:
        linked = {self._node.peer, *self._node.peers}
        for stage, (_, router) in self._senders.items():
            ready = self._ready(stage)
            if self._split is not None:
                leading = leaders(ready, self._split.members)
                ready = {peer: each for peer, each in ready.items() if peer in leading}
            router.seen({peer: each.since for peer, each in ready.items() if peer in linked})

    def _ready(self, stage: int) -> dict[PeerId, Held]:
        """Return who may be sent work of a stage; say of whom most of it say that it computes something else."""
        ready = self.table.ready(stage)
        if self.witness is None:
            return ready
        trusted = self.table.trusted(stage)
        left_out = {(stage, peer) for peer in ready.keys() - trusted.keys()}
        for _, peer in sorted(left_out - self._left_out):
            text = (
                f"most members of stage {stage + 1} say that {short(peer)} computes something else: it is sent nothing"
            )
            self._emit(Notice(text=text))
        self._left_out = {each for each in self._left_out if each[0] != stage} | left_out
        return trusted

    async def aclose(self) -> None:
        if self.serving is not None:
            await self.serving.aclose()
        for sender, _ in self._senders.values():
            await sender.aclose()
