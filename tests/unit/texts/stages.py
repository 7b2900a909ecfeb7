"""A small model in stages of several members each that serve texts, and one that asks, on a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

import torch

from unit.engine.test_step import CONFIG, CPU, vector_of
from weft.chat.grammar import Forms
from weft.chat.vocabulary import Vocabulary
from weft.clock import VirtualClock
from weft.codec.build import build
from weft.codec.config import CodecConfig, Fp32Config
from weft.data.tokenizer import CharTokenizer
from weft.engine.draw import Drawing, Drawn
from weft.engine.engine import Engine
from weft.engine.numbers import Kind
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import Text, Wanted
from weft.events import Event
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.model.flat import cut
from weft.model.sections import sections
from weft.net.admission import Anyone
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork
from weft.pipeline.link import StageLink
from weft.store.chunks import raw
from weft.tasks import Inline
from weft.texts.asking.entry import Entry
from weft.texts.forms import FormReader
from weft.texts.member import Member, listen
from weft.texts.receipts.receipt import weights_digest
from weft.texts.section import Section

RUN = RunId("cd" * 32)
TOKENIZER = CharTokenizer.of(["".join(map(chr, range(32, 126))).translate(str.maketrans("", "", "~@#$%^&`|")) + "\n"])
FORMS = Forms(Vocabulary(TOKENIZER), CONFIG.vocab_size)
STEP_S = 0.01


class Served:
    """
    Args:
        sizes: members of each stage.
        num_pages: of each member.
        log_nbytes: of each member.
        codec: of activations.
        kind: of numbers.
        has_guesses: whether tokens are taken before they are drawn.
        silent: members that give no receipts, by number.
        older: members that hold answers to no form, by number.
        num_strangers: peers that only ask.
    """

    def __init__(
        self,
        sizes: Iterable[int] = (2, 2, 2),
        *,
        num_pages: int = 48,
        log_nbytes: int = 1 << 24,
        codec: CodecConfig = Fp32Config(),  # noqa: B008  # frozen
        wait_s: float = 10.0,
        kind: Kind = "fp32",
        has_guesses: bool = True,
        silent: Collection[int] = (),
        older: Collection[int] = (),
        num_strangers: int = 0,
    ) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(delay_s=0.005)
        self.sizes = tuple(sizes)
        self.num_pages, self.log_nbytes, self.wait_s = num_pages, log_nbytes, wait_s
        self.codec = build(codec)
        self.kind = kind
        self.has_guesses = has_guesses
        self.silent, self.older = silent, older
        self.num_strangers, self.strangers = num_strangers, list[StageLink]()
        self.members: list[Member] = []
        self.kept: list[KeysAndValues] = []
        self.nodes: dict[PeerId, Node] = {}
        self.dead: set[PeerId] = set()
        self.events: list[Event] = []
        self.entry: Entry = None  # type: ignore[assignment]
        self._num_secrets = 0

    def run(self, play: Callable[[], Awaitable[None]]) -> None:
        torch.set_num_threads(1)

        async def whole() -> None:
            await self._start()
            try:
                await play()
            finally:
                await self.entry.aclose()
                for member in self.members:
                    if self.peer(member) not in self.dead:
                        await member.aclose()
                for peer, node in self.nodes.items():
                    if peer not in self.dead:
                        await node.aclose()

        self.clock.run(whole())

    def peer(self, member: Member) -> PeerId:
        return member._link.me

    async def _start(self) -> None:
        links = [self._link() for _ in range(1 + sum(self.sizes) + self.num_strangers)]
        self.entry = Entry(
            links[0],
            num_stages=len(self.sizes),
            vocab_size=CONFIG.vocab_size,
            context=CONFIG.max_seq_len,
            row_nbytes=self.codec.nbytes(CONFIG.width),
            clock=self.clock,
            emit=self.events.append,
            wait_s=self.wait_s,
            new_secret=self._secret,
        )
        self.strangers = links[1 + sum(self.sizes) :]
        numbered = iter(links[1:])
        for stage, size in enumerate(self.sizes):
            for _ in range(size):
                self.members.append(self._member(stage, next(numbered)))
        nodes = list(self.nodes.values())
        for node in nodes:
            for other in nodes:
                node.remember(other.peer, [f"memory://{other.peer}"])
            await node.start()
        for number, node in enumerate(nodes):
            for other in nodes[:number]:
                await node.connect(other.peer)
        for member in self.members:
            member.start()
        await asyncio.sleep(0.1)

    def _link(self) -> StageLink:
        seed = len(self.nodes)
        identity = Identity.from_seed(bytes([seed + 1]) * 32)
        passport = Passport(identity=identity, run=RUN, name=f"peer-{seed}", admission=Anyone())
        transports = [self.network.transport(identity.peer)]
        node = Node(passport, transports, self.clock, self.events.append, offload=inline)
        self.nodes[node.peer] = node
        link = StageLink(node)
        listen(link)
        return link

    async def come(self, stage: int) -> Member:
        """Let one more member of a stage come, which is linked to all that live."""
        link = self._link()
        node, member = self.nodes[link.me], self._member(stage, link)
        self.members.append(member)
        await node.start()
        for other in self.nodes.values():
            if other is not node and other.peer not in self.dead:
                for one, to in ((node, other), (other, node)):
                    one.remember(to.peer, [f"memory://{to.peer}"])
                await node.connect(other.peer)
        member.start()
        return member

    def _secret(self, num: int) -> bytes:
        self._num_secrets += 1
        return self._num_secrets.to_bytes(num, "big")

    def section(self, stage: int, vector: torch.Tensor, kept: KeysAndValues) -> Section:
        part = sections(CONFIG, len(self.sizes))[stage]
        own = cut(CONFIG, vector, part)
        return Section(Weights(CONFIG, own, self.kind, part), kept, self.codec, weights_digest(raw(own)))

    def renew(self, round: int, vector: torch.Tensor) -> None:
        """Let all members have other weights."""
        for member, kept in zip(self.members, self.kept, strict=True):
            member.renew(round, self.section(member.stage, vector, kept))

    def _member(self, stage: int, link: StageLink) -> Member:
        part = sections(CONFIG, len(self.sizes))[stage]
        kept = KeysAndValues(CONFIG, self.num_pages, CPU, self.kind, len(part.layers))
        self.kept.append(kept)
        return Member(
            link,
            stage,
            self.section(stage, vector_of(CONFIG), kept),
            round=0,
            num_pages=self.num_pages,
            log_nbytes=self.log_nbytes,
            clock=self.clock,
            run=Inline(STEP_S).train,
            num_stages=len(self.sizes),
            has_guesses=self.has_guesses,
            has_receipts=len(self.members) not in self.silent,
            forms=FormReader(FORMS, Inline().serve) if part.is_last and len(self.members) not in self.older else None,
        )

    def path(self) -> tuple[PeerId, ...]:
        """Return the path of the only text that is under way."""
        (under,) = self.entry._under_way.values()
        return under.peers

    def kill(self, stage: int) -> Member:
        """Kill the member that computes a stage of the only text."""
        return self.kill_peer(self.path()[stage])

    def kill_peer(self, peer: PeerId) -> Member:
        (member,) = [each for each in self.members if self.peer(each) == peer]
        self.network.kill(peer)
        self.dead.add(peer)
        member._tasks.cancel()
        return member


def wanted(prompt: list[int], num: int, temperature: float = 0.0, **options: object) -> Wanted:
    drawing = Drawing(temperature=temperature, seed=bytes([7]) * 32, **options)  # type: ignore[arg-type]
    return Wanted("key", tuple(prompt), num, drawing)


async def drawn_of(text: Text) -> list[Drawn]:
    return [drawn async for drawn in text]


async def tokens_of(text: Text) -> list[int]:
    return [drawn.token for drawn in await drawn_of(text)]


def of_the_whole(*asked: Wanted, vector: torch.Tensor | None = None) -> list[list[int]]:
    """Return what the engine of the whole model draws, each text alone."""
    return [[drawn.token for drawn in text] for text in drawn_by_the_whole(*asked, vector=vector)]


def drawn_by_the_whole(*asked: Wanted, vector: torch.Tensor | None = None, kind: Kind = "fp32") -> list[list[Drawn]]:
    vector = vector_of(CONFIG) if vector is None else vector
    stepper = Stepper(Weights(CONFIG, vector, kind), KeysAndValues(CONFIG, 48, CPU, kind))
    engine = Engine(stepper, vocab_size=CONFIG.vocab_size, context=CONFIG.max_seq_len, num_pages=48)

    async def play() -> list[list[Drawn]]:
        return [await drawn_of(engine.begin(each)) for each in asked]

    try:
        return asyncio.run(play())
    finally:
        engine.close()
