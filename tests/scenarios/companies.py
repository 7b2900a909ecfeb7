"""Peers of a run with stages in one process, on a virtual clock: production code but the transport and the threads."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.clock import VirtualClock
from weft.events import Evaluated, Event, RoundCommitted
from weft.ids import PeerId
from weft.keys import Identity
from weft.launch.guard import DayCount
from weft.launch.session import Options, Session
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import SCHEME, MemoryNetwork
from weft.peer.context import Data
from weft.peer.peer import Outcome
from weft.run.genesis import Sealed
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.stages.gather.gather import Gathered
from weft.stages.launch import gather_at_end, kit_of
from weft.stages.peer import StagesPeer
from weft.stages.step.member import Membership
from weft.store.home import Home
from weft.tasks import Inline
from weft.training.section import SectionTrainer

SECRET = bytes(16)


class Machine:
    """One process of one key."""

    def __init__(self, house: "House", name: str) -> None:
        self.house = house
        self.name = name
        self.identity = Identity.from_seed(hashlib.sha256(name.encode()).digest())
        self.id: PeerId = self.identity.peer
        self.events: list[tuple[float, Event]] = []
        self.company: StagesPeer = None  # type: ignore[assignment]
        self.task: asyncio.Task[dict[int, Outcome]] = None  # type: ignore[assignment]
        self.is_dead = False
        self.number = 0
        self.held: dict[int, Membership] = {}  # all that it held, as it was last
        self.gathers = False
        self.make_section: Callable[..., SectionTrainer] = SectionTrainer
        self.gathered: Gathered | None = None

    def seen(self, kind: type[Event]) -> list[Event]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def emit(self, event: Event) -> None:
        if self.company is not None:
            held = {number: self.company.holdings.holding(number) for number in range(self.company.run.num_pieces)}
            self.held |= {number: each for number, each in held.items() if each is not None}
        if not self.is_dead:
            self.events.append((self.house.clock.now(), event))

    @property
    def outcomes(self) -> dict[int, Outcome]:
        return self.task.result()

    async def gather(self) -> None:
        self.gathered = await gather_at_end(self.company)

    def kill(self) -> None:
        self.is_dead = True
        self.house.network.kill(self.id)
        self.task.cancel()


class House:
    def __init__(
        self,
        sealed: Sealed,
        home: Home,
        clock: VirtualClock,
        *,
        train_s: float = 0.01,
        every_s: float = 0.0,
        has_recompute: bool = False,
        serve_nbytes: int = 0,
    ) -> None:
        self.sealed = sealed
        self.home = home
        self.clock = clock
        self.train_s = train_s
        self.has_recompute = has_recompute
        self.serve_nbytes = serve_nbytes
        self.every_s = every_s  # between two checkpoints; 0: at the end only
        self.network = MemoryNetwork()
        self.machines: list[Machine] = []

    def start(
        self,
        name: str,
        *,
        wait_for: int | None = None,
        again: bool = False,
        gathers: bool = False,
        make_section: Callable[..., SectionTrainer] = SectionTrainer,
    ) -> Machine:
        """Start a machine: the maker, which waits for so many, or another.

        Args:
            gathers: it puts the whole model together at the end.
            make_section: what computes its sections: others than the usual one compute something else.
        """
        machine = Machine(self, name)
        machine.make_section = make_section
        machine.gathers = gathers
        machine.number = sum(each.name == name for each in self.machines)
        others = [each for each in self.machines if each.name != name]
        self.machines.append(machine)
        machine.task = asyncio.get_running_loop().create_task(self._live(machine, others, wait_for))
        return machine

    async def _live(self, machine: Machine, others: Sequence[Machine], wait_for: int | None) -> dict[int, Outcome]:
        run = self.sealed.config
        assert isinstance(run, StagedConfig)
        passport = Passport(
            identity=machine.identity,
            run=run.run,
            name=machine.name,
            admission=ByTicket(secret=SECRET),
            instance=hashlib.sha256(f"{machine.name} {machine.number}".encode()).digest()[:8],
        )
        node = Node(passport, [self.network.transport(machine.id)], self.clock, machine.emit)
        for other in others:
            node.remember(other.id, [SCHEME + other.id], other.name)
        await node.start()
        folder = self.home.folder(run.run, machine.id)
        settings = PeerConfig(
            device="cpu",
            checkpoint_every_s=self.every_s,
            has_recompute=self.has_recompute,
            serve_nbytes=self.serve_nbytes,
        )
        s = Session(
            options=Options(home=self.home, key=None, settings=settings),
            identity=machine.identity,
            folder=folder,
            node=node,
            emit=machine.emit,
            clock=self.clock,
            compute=Inline(self.train_s),
            day=DayCount(folder.moved, settings.caps, self.clock),
        )
        try:
            data = Data(self.sealed.tokenizer, self.sealed.store, self.sealed.index, self.sealed.came_with)
            kit = replace(kit_of(s, run, data), make_section=machine.make_section)
            machine.company = company = StagesPeer(kit)
            if machine.gathers:
                company.ending.plan(machine.gather)
            return await company.live(wait_for)
        finally:
            await node.aclose()

    async def end(self) -> None:
        for machine in self.machines:
            if not machine.task.done():
                machine.kill()
        await asyncio.gather(*(machine.task for machine in self.machines), return_exceptions=True)


def losses(machine: Machine) -> list[float]:
    return [event.loss for event in machine.seen(Evaluated)]  # type: ignore[attr-defined]


def rounds(machine: Machine) -> int:
    return len(machine.seen(RoundCommitted))
