"""Peers of a pipeline in one process, on a virtual clock, whose machines compute nothing and take their time.

What passes between them is production code but the transport, the clock and the device: `Node`, `StageLink`,
`Sender`, `Router`, `Worker` and `Origin`. Members of the first stage begin micro-batches for as long as the
pipeline is open. Who holds which stage all learn a little later than it is so, as from a ledger.

    pipeline = Pipeline(Shape(num_stages=4), clock)
    peer = await pipeline.start(number, rate=1.0)
    pipeline.hold(peer, stage)
    pipeline.move(peer, stage, state_s)        # it leaves at once, and holds the other once it has its state
    await pipeline.kill(peer)                  # without a word

Who leaves a stage takes nothing more there, ends what it has taken, and goes once a round has counted that. A machine
that fetches a state for another stage does so meanwhile.
"""

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rig.stages_device import TOKENS, Machine, Script, ScriptedDevice
from benchmarks.rig.stages_round import Pace, Rounds
from weft.clock import VirtualClock
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.messages import Contact
from weft.net.node import Node
from weft.net.transport.memory import SCHEME, MemoryNetwork
from weft.pipeline.device import Given
from weft.pipeline.link import StageLink
from weft.pipeline.placement import Stage
from weft.pipeline.routing import Router
from weft.pipeline.sender import PATIENCE_S, PER_STAGE, Origin, Sender
from weft.pipeline.worker import CurrentStep, Worker

RUN = RunId("51" * 32)
LOOK_S = 1.0  # until it is looked again whether who leaves a stage has ended its work there


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a pipeline is like."""

    num_stages: int
    script: Script = field(default_factory=Script)
    pace: Pace = field(default_factory=Pace)
    delay_s: float = 0.02  # from one peer to another
    line_bps: float | None = None  # up, and down, of each peer; None: any
    news_s: float = 1.0  # until all know who holds a stage
    gone_s: float = 5.0  # and until they know who is dead, whom links have not told
    patience_s: float = PATIENCE_S


@dataclass(frozen=True)
class _Holding:
    """A peer's part in a stage."""

    stage: int
    worker: Worker
    following: "asyncio.Task[None]"  # the stage's rounds


class StagePeer:
    """One process. `name` is its number: by it ties of placement are broken as in the fluid model."""

    def __init__(self, pipeline: "Pipeline", number: int, rate: float) -> None:
        self.number, self.rate = number, rate
        self.name = PeerId(f"{number:064x}")
        self.machine = Machine()
        self.useful_s = 0.0  # of its machine's, for what was counted here
        self.holding: _Holding | None = None
        self.target: int | None = None  # the stage whose state it fetches
        self.is_dead = False
        self.num_begun = self.num_returned = 0
        self.workers: list[Worker] = []  # of the stage that it holds, and of those that it is leaving
        self.routes: dict[int, Router] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.context = pipeline.clock.context_of(self)
        identity = Identity.from_seed(hashlib.sha256(f"stage peer {number}".encode()).digest())
        instance = hashlib.sha256(self.name.encode()).digest()[:8]
        passport = Passport(identity=identity, run=RUN, name=str(number), admission=Anyone(), instance=instance)
        transport = pipeline.network.transport(identity.peer)
        self.node = Node(passport, [transport], pipeline.clock, lambda _event: None, offload=inline)
        self.node.consult(lambda peer: Contact(peer=peer, name="", addresses=(SCHEME + peer,)))
        self.link = StageLink(self.node)
        self.senders: dict[int, Sender] = {}

    @property
    def id(self) -> PeerId:
        return self.node.peer

    @property
    def stage(self) -> int | None:
        return None if self.holding is None else self.holding.stage

    @property
    def num_again(self) -> int:
        return sum(sender.num_again for sender in self.senders.values())

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Do this in the peer's own process."""
        task = asyncio.get_running_loop().create_task(work, context=self.context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def aclose(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sender in self.senders.values():
            await sender.aclose()
        for worker in list(self.workers):
            await worker.aclose()
        await self.node.aclose()


@dataclass
class Seen:
    """What happened."""

    finished: list[list[float]]  # of each stage, when weights' gradients of a micro-batch were counted
    rates: list[tuple[float, float]] = field(default_factory=list)  # the sum of all rates, and since when
    num_moves: int = 0
    num_again: int = 0  # attempts after the first of a micro-batch, of who is dead
    num_lost: int = 0  # counted by a member that died before a round did so
    busy_s: float = 0.0  # of the machines of the dead
    useful_s: float = 0.0


class Pipeline:
    """All of them, and what joins them."""

    def __init__(self, shape: Shape, clock: VirtualClock) -> None:
        self.shape, self.clock = shape, clock
        self.network = MemoryNetwork(delay_s=shape.delay_s)
        self.peers: dict[int, StagePeer] = {}  # who lives
        self.rounds = [Rounds(shape.pace) for _ in range(shape.num_stages)]
        self.is_open = True
        self.seen = Seen([[] for _ in range(shape.num_stages)])
        loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = {loop.create_task(rounds.run()) for rounds in self.rounds}

    def of(self, stage: int) -> list[StagePeer]:
        """Return who holds a stage."""
        return [peer for peer in self.peers.values() if peer.stage == stage]

    def told(self) -> list[Stage]:
        """Return the stages as placement sees them, with those that are on their way to them."""
        return [
            {peer.name: peer.rate for peer in self.peers.values() if stage in (peer.stage, peer.target)}
            for stage in range(self.shape.num_stages)
        ]

    async def start(self, number: int, rate: float = 1.0) -> StagePeer:
        """Let a peer come that holds nothing yet."""
        peer = StagePeer(self, number, rate)
        if self.shape.line_bps is not None:
            self.network.set_line(peer.id, up_bps=self.shape.line_bps, down_bps=self.shape.line_bps)
        self.peers[number] = peer
        self._weigh()
        await peer.spawn(_started(peer.node))
        return peer

    def hold(self, peer: StagePeer, stage: int) -> None:
        """Let a peer, which holds nothing, be a member of a stage from now on."""
        shape, last = self.shape, self.shape.num_stages - 1
        onward = None if stage == last else self._sender(peer, stage + 1)

        def counted() -> None:
            self.seen.finished[stage].append(self.clock.now())
            peer.useful_s += shape.script.total_s / peer.rate

        place = (peer.id, stage == 0, stage == last)
        device = ScriptedDevice(peer.machine, shape.script, peer.rate, place, counted)
        current = CurrentStep(stage, self.clock)
        worker = Worker(peer.link, stage, device, onward, peer.machine.run, current, lambda _event: None)
        worker.start()
        peer.workers.append(worker)
        self.rounds[stage].join(peer.id, worker)
        following = peer.spawn(self.rounds[stage].follow(peer.id, worker))
        peer.holding, peer.target = _Holding(stage, worker, following), None
        if stage == 0:
            origin = Origin(peer.id, self._sender(peer, 0), shape.num_stages, first=peer.num_begun)
            for _ in range(PER_STAGE * shape.num_stages):
                peer.spawn(self._begin(peer, origin, worker))
        self._tell_soon(stage, shape.news_s)

    def move(self, peer: StagePeer, stage: int, state_s: float) -> None:
        """Let a member leave its stage for another, whose state takes it so long to fetch."""
        held = peer.holding
        assert held is not None
        held.worker.stop()
        peer.holding, peer.target = None, stage
        self._tell_soon(held.stage, self.shape.news_s)
        self.seen.num_moves += 1
        peer.spawn(self._leave(peer, held))
        peer.spawn(self._arrive(peer, stage, state_s))

    async def kill(self, peer: StagePeer) -> None:
        """End a peer's process as kill -9 does."""
        peer.is_dead = True
        del self.peers[peer.number]
        self.network.kill(peer.id)
        self.clock.thaw(peer)  # so that its tasks end
        if peer.stage is not None:
            self._tell_soon(peer.stage, self.shape.gone_s)
        for stage, rounds in enumerate(self.rounds):
            if (worker := rounds.members.get(peer.id)) is not None:
                self.seen.num_lost += len(worker.counting.exactly_once.counted)
                self.rounds[stage].leave(peer.id)
        self._weigh()
        await peer.aclose()
        self.seen.num_again += peer.num_again
        self.seen.busy_s += peer.machine.busy_s
        self.seen.useful_s += peer.useful_s

    async def freeze(self, peer: StagePeer, lasts_s: float) -> None:
        """Let a peer's process stand still for so long, as between SIGSTOP and SIGCONT."""
        self.clock.freeze(peer)
        await asyncio.sleep(lasts_s)
        peer.machine.frozen_s += lasts_s
        self.clock.thaw(peer)

    async def drained(self) -> None:
        """Begin nothing more, and return once all that was begun by who lives has come back, and is counted."""
        self.is_open = False
        while True:
            is_back = all(peer.num_returned == peer.num_begun for peer in self.peers.values())
            workers = [worker for rounds in self.rounds for worker in rounds.members.values()]
            if is_back and not any(
                each.num_taken or each.counting.exactly_once.counted or each.counting.exactly_once.held
                for each in workers
            ):
                return
            await asyncio.sleep(LOOK_S)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in list(self.peers.values()):
            await self.kill(peer)

    # --- inside ---

    def _sender(self, peer: StagePeer, stage: int) -> Sender:
        """Return what sends a peer's work to a stage: one, however often it holds the one before."""
        if stage not in peer.senders:
            router = peer.routes[stage] = Router(peer.id)
            router.seen(self._near(stage))
            peer.senders[stage] = Sender(peer.link, stage, router, self.clock, patience_s=self.shape.patience_s)
        return peer.senders[stage]

    def _near(self, stage: int) -> dict[PeerId, int]:
        return {each.id: 1 for each in self.of(stage)}

    def _tell_soon(self, stage: int, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._tell, stage)

    def _tell(self, stage: int) -> None:
        for peer in self.peers.values():
            if stage in peer.routes:
                peer.routes[stage].seen(self._near(stage))

    def _weigh(self) -> None:
        self.seen.rates.append((self.clock.now(), sum(peer.rate for peer in self.peers.values())))

    async def _begin(self, peer: StagePeer, origin: Origin, worker: Worker) -> None:
        """Begin one micro-batch after the other while the peer is that member."""
        while self.is_open and peer.holding is not None and peer.holding.worker is worker:
            peer.num_begun += 1
            await origin.begin(Given(1, TOKENS, None))
            peer.num_returned += 1

    async def _arrive(self, peer: StagePeer, stage: int, state_s: float) -> None:
        await asyncio.sleep(state_s)
        self.hold(peer, stage)

    async def _leave(self, peer: StagePeer, held: _Holding) -> None:
        """End a member's part in a stage once it owes nothing there."""
        exactly_once = held.worker.counting.exactly_once
        while held.worker.num_taken or exactly_once.counted or exactly_once.held:
            await asyncio.sleep(LOOK_S)
            exactly_once = held.worker.counting.exactly_once
        if self.rounds[held.stage].members.get(peer.id) is held.worker:
            self.rounds[held.stage].leave(peer.id)
        held.following.cancel()
        peer.workers.remove(held.worker)
        await held.worker.aclose()


async def _started(node: Node) -> None:
    await node.start()
