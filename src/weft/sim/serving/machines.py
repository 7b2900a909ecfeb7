"""The machines of a play of serving: members that compute nothing, in the time that it takes, and their lives.

    Agreed      which tokens a text has, so that each answer can be checked
    Computing   what a machine's steps take; `TimedSection` computes nothing and owes that time
    Machine     one member of a stage: it comes, links to its neighbours, leaves, dies and comes back

A token is a function of the text and its place alone, so a text that is mended is right or it is not.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
from blake3 import blake3

from weft.clock import Clock
from weft.engine.draw import Drawn
from weft.engine.scheduling.pages import PAGE
from weft.ids import PeerId
from weft.keys import Identity
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork
from weft.pipeline.link import StageLink
from weft.sim.scenario import Fault, at_present
from weft.sim.serving.node import PlayedNode
from weft.sim.serving.scenario import Server
from weft.sim.world import set_line
from weft.texts.member import Member, listen
from weft.texts.messages import TOKEN_NBYTES, OpenSequence, SectionServed
from weft.texts.section import Done, Section, Work
from weft.texts.trial import counted

VOCAB_SIZE = 32_000
STOP = 0  # the token after an answer
LOG_NBYTES = 1 << 28  # of a machine: a log holds references to the same zeros, whatever it is told to take

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)


class Agreed:
    """What a text says: its answer ends at a place, and its tokens follow from its number."""

    @staticmethod
    def seed(number: int, stop: int) -> bytes:
        """Return the seed of text `number`, whose answer ends at place `stop`."""
        return stop.to_bytes(4, "little") + blake3(number.to_bytes(8, "little")).digest(28)

    @staticmethod
    def token(seed: bytes, place: int) -> int:
        if place >= int.from_bytes(seed[:4], "little"):
            return STOP
        drawn = blake3(seed + place.to_bytes(4, "little")).digest(4)
        return 1 + int.from_bytes(drawn, "little") % (VOCAB_SIZE - 1)


class Computing:
    """Where a machine computes, one step after the other.

    Args:
        like: what it is like at the moment.
    """

    def __init__(self, like: Server) -> None:
        self.like = like
        self.busy_s = 0.0
        self.num_tokens = 0
        self._owed_s = 0.0

    def owe(self, nums: Sequence[int]) -> None:
        """Let a step of so many tokens of each text take its time."""
        num_rows, num_read, _ = counted((0, num) for num in nums)
        self._owed_s += self.step_s(num_rows, num_read)

    def step_s(self, num_rows: int, num_read: int) -> float:
        like = self.like
        return (like.step_ms + like.row_ms * num_rows + like.token_ms * num_read) / 1000

    async def run(self, work: Callable[[], T]) -> T:
        found = work()
        took_s, self._owed_s = self._owed_s, 0.0
        self.busy_s += took_s
        await asyncio.sleep(took_s)
        return found


class TimedSection(Section):
    """Layers that are not there: rows are as long as ever and all zero, and the last stage draws what is agreed."""

    def __init__(self, computing: Computing, row_nbytes: int, *, is_first: bool, is_last: bool) -> None:
        self._computing = computing
        self.vocab_size = VOCAB_SIZE
        self.is_first, self.is_last = is_first, is_last
        self.digest, self.kind = None, "fp32"  # no receipts are given
        self.row_nbytes = row_nbytes
        self.given_nbytes = TOKEN_NBYTES if is_first else row_nbytes
        self._zeros: dict[int, bytes] = {}  # by their number: a log holds the same ones a thousand times

    @property
    def num_graphs(self) -> int:
        return 0

    def compute(self, works: Sequence[Work]) -> list[Done]:
        nums = [work.num for work in works]
        self._computing.num_tokens += sum(nums)
        self._computing.owe(nums)
        return [self._done(work) for work in works]

    def try_out(self, sizes: Sequence[int], pages: Sequence[int]) -> None:
        del pages
        self._computing.owe(sizes)

    def _done(self, work: Work) -> Done:
        if not self.is_last:
            return Done(self._zeros.setdefault(work.num, bytes(work.num * self.row_nbytes)))
        if work.draw is None:
            return Done()
        seed = work.draw.drawing.seed
        return Done(drawn=tuple(Drawn(Agreed.token(seed, place)) for place in work.drawn_places))


class PlayedLink(StageLink):
    """A link whose news goes to others than those who ask once only: all that they take from it is who serves.

    Args:
        askers: who asks for texts.
    """

    def __init__(self, node: Node, askers: Iterable[PeerId]) -> None:
        super().__init__(node)
        self._askers = frozenset(askers)
        self._told: dict[PeerId, tuple[int, ...]] = {}  # whose weights each was told of
        self.on_parted(lambda peer: self._told.pop(peer, None))

    async def tell(self, note: msgspec.Struct) -> None:
        assert isinstance(note, SectionServed)
        for peer in self._node.peers:
            if peer in self._askers or self._told.get(peer) != note.rounds:
                self._told[peer] = note.rounds
                self._node.post(peer, note)


class AskerLink(StageLink):
    """Of an entry: it notes which texts are asked for again once tokens of theirs have come."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.mended: set[bytes] = set()

    async def call(self, peer: PeerId, request: msgspec.Struct, response: type[R], *, deadline_s: float) -> R:
        if isinstance(request, OpenSequence) and request.attempt and request.places[-1] > request.num_prompt:
            self.mended.add(request.sequence)
        return await super().call(peer, request, response, deadline_s=deadline_s)


def identity_of(seed: int, name: str) -> Identity:
    return Identity.from_seed(hashlib.sha256(f"{seed} {name}".encode()).digest())


class Machine:
    """A member of a stage, of one process after the other."""

    def __init__(
        self, name: str, usual: Server, stage: int, network: MemoryNetwork, identity: Identity, clock: Clock
    ) -> None:
        self.name, self.usual, self.stage, self.peer = name, usual, stage, identity.peer
        self.computing = Computing(usual)
        self.in_force: tuple[Fault, ...] = ()
        self.node: PlayedNode | None = None  # None: it is not there
        self.member: Member | None = None
        self.num_lives = 0
        self._there_s = 0.0
        self._network, self._clock = network, clock
        self._came_at = 0.0
        self.arrange()

    def arrange(self) -> None:
        """Give it the line and the speed that it has at the moment."""
        self.computing.like = at_present(self.usual, self.in_force)
        set_line(self._network, self.peer, self.computing.like)

    def there_for(self, now: float) -> float:
        """Return the seconds in which it was there."""
        return self._there_s + (0.0 if self.node is None else now - self._came_at)

    def start(self, num_stages: int, row_nbytes: int, others: Iterable[PlayedNode], askers: Iterable[PeerId]) -> None:
        """Begin to serve: nothing is left of what a process before had."""
        node = self.node = PlayedNode(self._network, self.peer)
        self.num_lives += 1
        self._came_at = self._clock.now()
        link = PlayedLink(node, askers)
        listen(link)
        for other in others:
            node.link_with(other)
        is_last = self.stage == num_stages - 1
        self.member = Member(
            link,
            self.stage,
            TimedSection(self.computing, row_nbytes, is_first=self.stage == 0, is_last=is_last),
            round=0,
            num_pages=self.usual.room_tokens // PAGE,
            log_nbytes=LOG_NBYTES,
            clock=self._clock,
            run=self.computing.run,
            num_stages=num_stages,
        )
        self.member.start()

    async def kill(self) -> None:
        """End as kill -9 does: nothing is said."""
        if self.node is not None:
            self.node.kill()
        await self.stop()

    async def stop(self) -> None:
        """Say goodbye and end."""
        node, member, self.node, self.member = self.node, self.member, None, None
        if node is None or member is None:
            return
        self._there_s += self._clock.now() - self._came_at
        await member.aclose()
        await node.aclose()
