"""Members without training: production `Node` and `Membership` on a virtual clock, by the hundred, in one process.

What each says is read for the figures. The reader of signed claims is shared, so that a signature is checked once and
not once for each of a thousand receivers; what is believed, passed on and counted in bytes is the same. It does not
know peers that train: a heartbeat says what a member in the middle of a run would say."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

from weft.clock import VirtualClock
from weft.events import Event
from weft.ids import BranchId, Digest, PeerId, Round, RunId
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.membership.gossip import ClaimReader
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.net.transport.memory import SCHEME, MemoryNetwork

RUN = RunId("ab" * 32)


class Seat:
    """One member."""

    def __init__(self, hall: "Hall", number: int, life: int = 0) -> None:
        self.hall = hall
        self.number = number
        identity = Identity.from_seed(hashlib.sha256(f"seat {number}".encode()).digest())
        self.id = identity.peer
        passport = Passport(
            identity=identity,
            run=RUN,
            name=f"seat-{number}",
            admission=ByTicket(secret=bytes(16)),
            instance=life.to_bytes(4, "big") + number.to_bytes(4, "big"),
        )
        self.node = Node(passport, [hall.network.transport(self.id)], hall.clock, self._emit, offload=inline)
        self.membership = Membership(self.node, hall.clock, self._emit, self._status, hall.reader)
        self.is_dead = False

    async def start(self, *contacts: PeerId) -> None:
        await self.node.start()
        for peer in contacts:
            self.node.remember(peer, [SCHEME + peer])
        await self.membership.start()

    def kill(self) -> None:
        """End the process: its streams are reset, and nothing of it runs any more."""
        self.is_dead = True
        self.hall.network.kill(self.id)
        self.hall.end(self)

    def vanish(self) -> None:
        """Cut the machine off: nothing is reset, nothing answers."""
        self.is_dead = True
        for other in self.hall.seats:
            if other is not self:
                self.hall.network.partition(self.id, other.id)
        self.hall.end(self)

    async def leave(self) -> None:
        """Say goodbye and end."""
        await self.membership.say_goodbye("asked to stop")
        self.is_dead = True
        self.hall.end(self)

    async def aclose(self) -> None:
        await self.membership.aclose()
        await self.node.aclose()

    def sent_nbytes(self) -> int:
        return self.node.moved[0]

    def _emit(self, event: Event) -> None:
        if not self.is_dead:
            self.hall.on_event(self, event)

    def _status(self) -> Heartbeat:
        return Heartbeat(
            name=self.node.passport.name,
            branch=BranchId(RUN),
            round=Round(1234),
            manifest=Digest("cd" * 32),
            committed_tokens=1 << 30,
            state="training",
            loss=2.345678,
            tokens_per_s=12345.6,
        )


class Hall:
    """Where they sit: a clock, a network, and who is told what they say."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.clock = VirtualClock()
        self.network = network
        self.reader = ClaimReader(RUN)
        self.seats: list[Seat] = []
        self.on_event: Callable[[Seat, Event], None] = lambda _seat, _event: None
        self._ending: list[asyncio.Task[None]] = []

    @property
    def living(self) -> list[Seat]:
        return [seat for seat in self.seats if not seat.is_dead]

    async def fill(self, num: int, per_s: float) -> None:
        """Seat members until there are `num`, so many a second, each of which knows two that came before."""
        while len(self.seats) < num:
            number = len(self.seats)
            seat = Seat(self, number)
            known = {number * 7919 % number, number // 2} if number else set()
            self.seats.append(seat)
            await seat.start(*(self.seats[other].id for other in sorted(known)))
            await asyncio.sleep(1 / per_s)

    async def again(self, seat: Seat, contact: Seat) -> Seat:
        """Start another process of a member that ended, which knows `contact`."""
        place = self.seats.index(seat)
        another = Seat(self, seat.number, life=len(self._ending))
        self.seats[place] = another
        await another.start(contact.id)
        return another

    def end(self, seat: Seat) -> None:
        """Let a process end whose last word is said."""
        self._ending.append(asyncio.ensure_future(seat.aclose()))

    def run(self, play: Callable[[], Awaitable[None]]) -> None:
        """Play to the end."""

        async def whole() -> None:
            try:
                await play()
            finally:
                await asyncio.gather(*self._ending)
                for seat in self.living:
                    await seat.membership.aclose()
                for seat in self.living:
                    await seat.node.aclose()

        self.clock.run(whole())
