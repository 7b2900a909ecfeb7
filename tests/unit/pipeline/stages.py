"""A small model cut into stages of several members each, on a memory network and a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from weft.clock import VirtualClock
from weft.codec.config import Fp32Config
from weft.errors import DeadlineExceeded
from weft.events import Event
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, attach, cut, flatten
from weft.model.initial import initial_vector
from weft.model.sections import sections
from weft.model.transformer import SectionModule, Transformer
from weft.net.admission import Anyone
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import Given
from weft.pipeline.exactly_once import BatchId, Told
from weft.pipeline.link import StageLink
from weft.pipeline.messages import Backward, Forward
from weft.pipeline.routing import Router
from weft.pipeline.sender import Returned, Sender
from weft.pipeline.torch_device import TorchDevice
from weft.pipeline.witness import Witness
from weft.pipeline.worker import Bounds, CurrentStep, Worker
from weft.tasks import Inline
from weft.wire import digest

R = TypeVar("R", bound=msgspec.Struct)
RUN = RunId("cd" * 32)
RUNS = tuple(RunId(digest(f"stage {number}".encode())) for number in range(3))
HEAD = digest(b"head")
SEQ_LEN, BATCH_SIZE = 6, 2
CONFIG = msgspec.convert(
    {
        "vocab_size": 11,
        "num_layers": 3,
        "num_heads": 2,
        "num_kv_heads": 1,
        "width": 8,
        "ffn_width": 12,
        "max_seq_len": 8,
    },
    ModelConfig,
)


class FaultyLink(StageLink):
    """Loses each tenth answer after the work was done, says each tenth thing twice, and each tenth too late."""

    count = 0

    async def call(self, peer: PeerId, request: msgspec.Struct, response: type[R], *, deadline_s: float) -> R:
        assert isinstance(request, Forward | Backward)
        FaultyLink.count += 1
        number = FaultyLink.count % 10
        if number == 3:
            await super().call(peer, request, response, deadline_s=deadline_s)
            raise DeadlineExceeded("the answer was lost")
        if number == 6:
            await super().call(peer, request, response, deadline_s=deadline_s)
        if number == 9:
            asyncio.get_running_loop().call_later(
                deadline_s + 1.0,
                lambda: asyncio.ensure_future(
                    self._late(super(FaultyLink, self).call(peer, request, response, deadline_s=9.0))
                ),
            )
            await asyncio.sleep(deadline_s)
            raise DeadlineExceeded("it came too late")
        return await super().call(peer, request, response, deadline_s=deadline_s)

    async def _late(self, calling: Awaitable[object]) -> None:
        await asyncio.gather(calling, return_exceptions=True)


class Member:
    def __init__(self, stage: int, node: Node, link: StageLink, model: FlatModel) -> None:
        self.stage, self.node, self.link, self.model = stage, node, link, model
        self.senders: dict[int, Sender] = {}
        self.events: list[Event] = []
        self.worker: Worker = None  # type: ignore[assignment]
        self.witness: Witness | None = None
        self.total = torch.zeros_like(model.gradient)  # of the rounds gone by

    @property
    def peer(self) -> PeerId:
        return self.node.peer


class Stages:
    """Of three sections.

    Args:
        sizes: members of each stage.
        train_s: virtual seconds that each piece of work takes.
        is_audited: members sign what they compute.
        has_recompute: they keep inputs alone, and compute forward passes again.
    """

    def __init__(
        self,
        sizes: Iterable[int] = (2, 2, 2),
        *,
        link: Callable[[Node], StageLink] = StageLink,
        train_s: float = 0.05,
        patience_s: float = 60.0,
        bounds: Bounds = Bounds(),  # noqa: B008
        is_audited: bool = False,
        has_recompute: bool = False,
    ) -> None:
        self.is_audited = is_audited
        self.has_recompute = has_recompute
        self.clock = VirtualClock()
        self.network = MemoryNetwork(delay_s=0.005)
        self.sizes = tuple(sizes)
        self.vector = initial_vector(CONFIG, seed=5)
        self._link, self._train_s, self._patience_s, self._bounds = link, train_s, patience_s, bounds
        self.members: list[Member] = []
        self.dead: set[PeerId] = set()
        self.given_up: list[PeerId] = []  # members whose gradient held what others had counted

    def of(self, stage: int) -> list[Member]:
        return [each for each in self.members if each.stage == stage and each.peer not in self.dead]

    def run(self, play: Callable[[], Awaitable[None]]) -> None:
        torch.set_num_threads(1)

        async def whole() -> None:
            await self._start()
            try:
                await play()
            finally:
                for member in self.members:
                    if member.peer not in self.dead:
                        await self.end(member)

        self.clock.run(whole())

    async def end(self, member: Member) -> None:
        for sender in member.senders.values():
            await sender.aclose()
        await member.worker.aclose()
        await member.node.aclose()

    async def _start(self) -> None:
        parts = sections(CONFIG, len(self.sizes))
        seed = 0
        for stage, size in enumerate(self.sizes):
            for _ in range(size):
                seed += 1
                identity = Identity.from_seed(bytes([seed]) * 32)
                passport = Passport(identity=identity, run=RUN, name=f"peer-{seed}", admission=Anyone())
                node = Node(
                    passport, [self.network.transport(identity.peer)], self.clock, lambda _: None, offload=inline
                )
                model = flatten(SectionModule(CONFIG, parts[stage]), "cpu")
                model.vector.copy_(cut(CONFIG, self.vector, parts[stage]))
                self.members.append(Member(stage, node, self._link(node), model))
        codecs = Boundaries(Fp32Config())
        for member in self.members:
            if self.is_audited:
                member.witness = Witness(member.link, RUNS[: len(self.sizes)], self._peers_of, member.events.append)
                member.witness.enter(member.stage, HEAD)
            device = TorchDevice(member.model, codecs, SEQ_LEN, BATCH_SIZE, has_recompute=self.has_recompute)
            onward = None if member.stage == len(self.sizes) - 1 else self._sender(member, member.stage + 1)
            if member.stage == 0:
                self._sender(member, 0)
            compute = Inline(self._train_s)
            member.worker = Worker(
                member.link,
                member.stage,
                device,
                onward,
                compute.train,
                CurrentStep(member.stage, self.clock),
                member.events.append,
                self._bounds,
                witness=member.witness,
            )
            member.worker.start()
            for other in self.members:
                member.node.remember(other.peer, [f"memory://{other.peer}"])
            await member.node.start()
        for number, member in enumerate(self.members):
            for other in self.members[:number]:
                await member.node.connect(other.peer)

    def _peers_of(self, stage: int) -> list[PeerId]:
        return [each.peer for each in self.of(stage)]

    def _sender(self, member: Member, stage: int) -> Sender:
        router = Router(member.peer)
        router.seen({each.peer: 1 for each in self.members if each.stage == stage})
        made = Sender(member.link, stage, router, self.clock, patience_s=self._patience_s, witness=member.witness)
        member.senders[stage] = made
        return made

    async def begin(self, origin: Member, number: int) -> Returned:
        """Have a micro-batch computed by all stages."""
        given = Given(BATCH_SIZE, packed(tokens_of(BatchId(origin.peer, number))), None)
        return await origin.senders[0].send(BatchId(origin.peer, number), given, 0, is_first=True)

    async def round(self, stage: int, left_out: Collection[PeerId] = ()) -> dict[PeerId, Told]:
        """Let a stage merge what it has; return what its members told that were counted."""
        members = self.of(stage)
        told = {each.peer: await each.worker.counting.report() for each in members}
        counted = {peer: each for peer, each in told.items() if peer not in left_out}
        await asyncio.sleep(1.0)  # as an exchange does
        for each in members:
            if each.peer in counted:
                each.total += each.model.gradient
                each.model.zero_gradient()
            closed = await each.worker.counting.close(counted, [one.peer for one in members])
            if closed.given_up:
                self.given_up.append(each.peer)
        return counted

    def total(self, stage: int) -> Tensor:
        """Return the sum of the gradients of all rounds so far, over the members of a stage that live."""
        found = torch.zeros_like(self.of(stage)[0].total)
        for each in self.of(stage):
            found += each.total
        return found

    def expected(self, stage: int, batches: Iterable[BatchId]) -> Tensor:
        """Return the gradient of a stage that these micro-batches have, each once, by the whole model."""
        whole = flatten(Transformer(CONFIG), "cpu")
        attach(whole.module, self.vector.clone())
        total = torch.zeros_like(self.vector)
        for batch in batches:
            ids = tokens_of(batch)
            loss = whole.module.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            named = dict(whole.module.named_parameters())
            found = torch.autograd.grad(loss, [named[span.name] for span in whole.layout])
            total += torch.cat([each.flatten() for each in found])
        return cut(CONFIG, total, sections(CONFIG, len(self.sizes))[stage])


def tokens_of(batch: BatchId) -> Tensor:
    generator = torch.Generator().manual_seed(int(batch.origin[:8], 16) * 1000 + batch.number)
    return torch.randint(0, CONFIG.vocab_size, (BATCH_SIZE, SEQ_LEN + 1), generator=generator)


def packed(ids: Tensor) -> bytes:
    return ids.to(torch.int32).numpy().tobytes()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
