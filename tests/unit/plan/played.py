"""Steps of a pipeline, played: production workers, senders and routes on a memory network, with devices that only wait.

    played(stages, num_micro, Wires(delay_s=0.02))      # seconds of a step, after a few that teach routes who is fast

A step begins all its micro-batches at once, as many at each member of the first stage, and is over once each of them is
counted in each stage.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.clock import VirtualClock
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork
from weft.pipeline.device import Given
from weft.pipeline.link import StageLink
from weft.pipeline.routing import Router
from weft.pipeline.sender import Origin, Sender
from weft.pipeline.worker import CurrentStep, Worker
from weft.wire import Buffer

RUN = RunId("ef" * 32)
TOKENS = bytes(4 * 3)


@dataclass(frozen=True)
class Paces:
    """Seconds of a micro-batch in a section, on one machine."""

    forward_s: float = 1.0
    input_s: float = 1.0
    weights_s: float = 1.0

    def times(self, factor: float) -> "Paces":
        return Paces(self.forward_s * factor, self.input_s * factor, self.weights_s * factor)


@dataclass(frozen=True, kw_only=True)
class Wires:
    delay_s: float = 0.0  # one way, between any two
    bps: float | None = None  # of each peer's line, each way
    nbytes: int = 64  # of activations, and of their gradients


class _Counts:
    """Of weights' gradients, in all stages."""

    def __init__(self) -> None:
        self.num = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def one(self) -> None:
        self.num += 1
        if self.num == self._wanted:
            self._reached.set()

    async def until(self, num: int) -> None:
        self._wanted = num
        self._reached.clear()
        if self.num < num:
            await self._reached.wait()


class _Machine:
    """Lets so much time pass as the work that it does says, one piece at a time."""

    def __init__(self) -> None:
        self.owed_s = 0.0
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], object]) -> object:
        async with self._turn:
            found = work()
            owed_s, self.owed_s = self.owed_s, 0.0
            await asyncio.sleep(owed_s)
            return found


class _Device:
    tokens_nbytes = len(TOKENS)

    def __init__(self, number: int, place: tuple[bool, bool], paces: Paces, nbytes: int, counts: _Counts) -> None:
        self.number, self.paces, self.nbytes, self.counts = number, paces, nbytes, counts
        self.is_first, self.is_last = place
        self.machine = _Machine()
        self._num_made = 0

    def numbers(self) -> Buffer:
        """Return bytes that nobody has made before."""
        self._num_made += 1
        return f"{self.number} {self._num_made}".encode().ljust(self.nbytes, b"\0")

    def input_nbytes(self, _num_samples: int) -> int:
        return self.nbytes

    def gradient_nbytes(self, _num_samples: int) -> int:
        return 0 if self.is_last else self.nbytes

    def forward(self, _given: Given) -> "_Passed":
        self.machine.owed_s += self.paces.forward_s
        return _Passed(self)


class _Passed:
    def __init__(self, device: _Device) -> None:
        self._device = device
        self.output = None if device.is_last else device.numbers()
        self.loss = 1.0 if device.is_last else None

    def backward(self, _gradient: Buffer | None, _member: PeerId | None = None) -> Buffer | None:
        self._device.machine.owed_s += self._device.paces.input_s
        return None if self._device.is_first else self._device.numbers()

    def count(self) -> None:
        self._device.machine.owed_s += self._device.paces.weights_s
        self._device.counts.one()


@dataclass
class _Member:
    stage: int
    node: Node
    link: StageLink
    device: _Device
    senders: dict[int, Sender] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        return self.node.peer


def played(stages: Sequence[Sequence[Paces]], num_micro: int, wires: Wires = Wires(), num_before: int = 3) -> float:
    """Return the virtual seconds of a step.

    Args:
        stages: of each stage its members.
        num_micro: of a step, a multiple of the members of the first stage.
        num_before: steps before the one that counts.
    """
    clock, found = VirtualClock(), list[float]()

    async def play() -> None:
        members = await _started(stages, wires, clock)
        try:
            for _ in range(num_before + 1):
                found.append(await _step(members, num_micro, clock))
        finally:
            for member in members:
                for sender in member.senders.values():
                    await sender.aclose()
                for worker in member.workers:
                    await worker.aclose()
                await member.node.aclose()

    clock.run(play())
    return found[-1]


async def _started(stages: Sequence[Sequence[Paces]], wires: Wires, clock: VirtualClock) -> list[_Member]:
    network, members, counts = MemoryNetwork(delay_s=wires.delay_s), list[_Member](), _Counts()
    last = len(stages) - 1
    for stage, all_paces in enumerate(stages):
        for paces in all_paces:
            number = len(members) + 1
            identity = Identity.from_seed(number.to_bytes(32, "big"))
            passport = Passport(identity=identity, run=RUN, name=f"peer-{number}", admission=Anyone())
            node = Node(passport, [network.transport(identity.peer)], clock, lambda _: None, offload=inline)
            if wires.bps is not None:
                network.set_line(identity.peer, up_bps=wires.bps, down_bps=wires.bps)
            device = _Device(number, (stage == 0, stage == last), paces, wires.nbytes, counts)
            members.append(_Member(stage, node, StageLink(node), device))
    for member in members:
        onward = None if member.stage == last else _sender(member, member.stage + 1, members, wires, clock)
        if member.stage == 0:
            _sender(member, 0, members, wires, clock)
        run = member.device.machine.run
        worker = Worker(
            member.link,
            member.stage,
            member.device,
            onward,
            run,
            CurrentStep(member.stage, clock),
            lambda _: None,  # type: ignore[arg-type]
        )
        worker.start()
        member.workers.append(worker)
        for other in members:
            member.node.remember(other.peer, [f"memory://{other.peer}"])
        await member.node.start()
    for number, member in enumerate(members):
        for other in members[:number]:
            await member.node.connect(other.peer)
    return members


def _sender(member: _Member, stage: int, members: Sequence[_Member], wires: Wires, clock: VirtualClock) -> Sender:
    router = Router(member.peer)
    router.seen({each.peer: 1 for each in members if each.stage == stage})
    member.senders[stage] = Sender(member.link, stage, router, clock, patience_s=1e6)
    return member.senders[stage]


async def _step(members: Sequence[_Member], num_micro: int, clock: VirtualClock) -> float:
    first = [member for member in members if member.stage == 0]
    num_stages, counts = 1 + max(member.stage for member in members), first[0].device.counts
    before, began, each = counts.num, clock.now(), num_micro // len(first)
    numbers = range(before, before + each)  # no other step has these
    origins = [Origin(m.peer, m.senders[0], num_stages, first=numbers.start) for m in first]
    await asyncio.gather(*(origin.begin(Given(1, TOKENS, None)) for origin in origins for _ in numbers))
    await counts.until(before + num_micro * num_stages)
    await asyncio.gather(*(member.device.machine.run(lambda: None) for member in members))  # behind what they still do
    return clock.now() - began
