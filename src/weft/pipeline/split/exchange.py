"""How bytes go from one member of a team to another: one says what is ready, the other fetches it when it asks for it.

    exchanges = Exchanges(link)                                 # one for each peer
    async with Exchange(exchanges, name, members) as exchange:
        await exchange.give(1, number, parcel(data))            # returns once member 1 has it
        taken = await exchange.take(1, number, nbytes)

Members are counted from 0, in the order that all know. Whoever gives waits until it is taken, and whoever takes until
it is there: `patience_s` at most.

Failure: the team is for good links; where one of these happens, all of it fails at once, and whoever needs the layer
computes it undivided.
- a member's link goes down, or it says that it leaves: PeerError at every other member, whoever it waits for.
- a member says nothing for `patience_s`: DeadlineExceeded.
- other bytes than expected, too many, or the same twice: PayloadError here, CallFailed there.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from weft.errors import CallFailed, DeadlineExceeded, NetError, PayloadError, PeerError, Refused
from weft.ids import Digest, PeerId, short
from weft.net.messages import MAX_REASON_CHARS
from weft.pipeline.link import Parcel, StageLink
from weft.pipeline.split import messages
from weft.tasks import Tasks, within
from weft.wire import printable

T = TypeVar("T")

PATIENCE_S = 60.0  # for a member that is linked: what it computes before it gives is part of a layer

MAX_LEFT = 64  # of teams that are joined within moments

Key = tuple[Digest, PeerId, int]  # team, who gives, number


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass
class _Slot:
    """Where what one member says and what this one asks for meet."""

    said: "asyncio.Future[messages.HandedOver]" = field(default_factory=_future)
    taken: "asyncio.Future[PeerError | None]" = field(default_factory=_future)  # or why not
    is_asked_for: bool = False


class Exchanges:
    """Of one peer: those of all teams that it is in."""

    def __init__(self, link: StageLink) -> None:
        self.link = link
        self.slots: dict[Key, _Slot] = {}
        self.joined: dict[Digest, Exchange] = {}
        self._num_waiting: Counter[PeerId] = Counter()
        self.left: dict[Digest, str] = {}  # teams that this peer may yet join, which another left: the oldest first
        link.serve(messages.HandedOver, self._on_handed)
        link.on_note(messages.TeamLeft, self._on_left)
        link.serve_stages(messages.Help, messages.Helps(does=False))
        link.serve_stages(messages.GoBack, messages.Helps(does=False))
        link.serve_stages(messages.SumRequest, messages.SumAnswer(digest=None))
        link.on_stage_note(messages.Counted)

    async def _on_handed(self, peer: PeerId, note: messages.HandedOver) -> messages.HasTaken:
        if self._num_waiting[peer] >= messages.MAX_WAITING:
            raise PayloadError(f"{messages.MAX_WAITING} things of {short(peer)} wait here that nobody has asked for")
        key = (note.team, peer, note.number)
        slot = self.slots.setdefault(key, _Slot())
        if slot.said.done():
            raise PayloadError(f"{short(peer)} hands over number {note.number} twice")
        slot.said.set_result(note)
        self._num_waiting[peer] += 1
        try:
            fault = await slot.taken
        finally:
            self._num_waiting -= Counter({peer: 1})
            if not slot.is_asked_for:
                self.slots.pop(key, None)
        if fault is not None:
            raise fault
        return messages.HasTaken()

    async def _on_left(self, peer: PeerId, note: messages.TeamLeft) -> None:
        exchange, reason = self.joined.get(Digest(note.team)), f"{short(peer)} left it: {printable(note.reason)}"
        if exchange is None:
            self.left[Digest(note.team)] = reason
            while len(self.left) > MAX_LEFT:
                del self.left[next(iter(self.left))]
        elif peer in exchange.members:
            exchange.halt(reason)


class Exchange:
    """Of one member with the others of its team.

    Args:
        team: names what it computes; no two teams of the same peers at a time have the same name.
        members: in the same order at all of them; this peer is one.
    """

    def __init__(
        self, exchanges: Exchanges, team: Digest, members: Sequence[PeerId], *, patience_s: float = PATIENCE_S
    ) -> None:
        self.members = tuple(members)
        self.number = members.index(exchanges.link.me)
        self._exchanges = exchanges
        self._link = exchanges.link
        self._team = team
        self._patience_s = patience_s
        self._tasks = Tasks()
        self._halted: asyncio.Future[str] = _future()

    async def __aenter__(self) -> "Exchange":
        if self._team in self._exchanges.joined:
            raise ValueError(f"this peer is in a team of the name {short(self._team)} already")
        self._exchanges.joined[self._team] = self
        for peer in self._others:
            self._tasks.spawn(self._watch(peer))
        if (reason := self._exchanges.left.pop(self._team, None)) is not None:
            self.halt(reason)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._exchanges.joined[self._team]
        await self._tasks.aclose()
        reason = "it is done" if error is None else type(error).__name__
        for key, slot in list(self._exchanges.slots.items()):
            if key[0] == self._team and not slot.taken.done():
                slot.taken.set_result(CallFailed(f"{short(self._link.me)} left the team: {reason}"))
        if error is not None:
            for peer in self._others:
                await self._link.post(peer, messages.TeamLeft(team=self._team, reason=reason[:MAX_REASON_CHARS]))

    async def give(self, to: int, number: int, what: Parcel) -> None:
        """Let a member have `what`; return once it does."""
        peer = self.members[to]
        nbytes = memoryview(what.data).nbytes
        note = messages.HandedOver(team=self._team, number=number, digest=what.digest, nbytes=nbytes)
        self._link.give(what)
        try:
            await self._unless_halted(self._link.call(peer, note, messages.HasTaken, deadline_s=self._patience_s))
        finally:
            self._link.take_back(what.digest)

    async def take(self, source: int, number: int, nbytes: int) -> Parcel:
        """Return the `nbytes` bytes that a member gives under this number."""
        peer = self.members[source]
        key = (self._team, peer, number)
        slot = self._exchanges.slots.setdefault(key, _Slot())
        slot.is_asked_for = True
        fault: PeerError | None = CallFailed(f"{short(self._link.me)} could not take it")
        try:
            taken = await self._unless_halted(self._taken(peer, slot, number, nbytes))
            fault = None
            return taken
        except PeerError as error:
            fault = error
            raise
        finally:
            self._exchanges.slots.pop(key, None)
            if not slot.taken.done():
                slot.taken.set_result(fault)

    def halt(self, reason: str) -> None:
        """Let everything under way and to come fail."""
        if not self._halted.done():
            self._halted.set_result(reason)

    @property
    def _others(self) -> list[PeerId]:
        return [peer for peer in self.members if peer != self._link.me]

    async def _watch(self, peer: PeerId) -> None:
        if self._link.is_linked(peer):
            await self._link.until_parted(peer)
        self.halt(f"the link to {short(peer)} is down")

    async def _taken(self, peer: PeerId, slot: _Slot, number: int, nbytes: int) -> Parcel:
        def overdue() -> DeadlineExceeded:
            return DeadlineExceeded(
                f"{short(peer)} handed over nothing as number {number} of a team within {self._patience_s:g} s; "
                "compute the layer undivided"
            )

        async with within(self._patience_s, overdue):
            note = await slot.said
            if note.nbytes != nbytes:
                raise PayloadError(
                    f"{short(peer)} hands over {note.nbytes} bytes as number {number} of a team; expected {nbytes}"
                )
            return await self._link.fetch(peer, note.digest, nbytes)

    async def _unless_halted(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; end it where the team halts meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._halted), return_when=asyncio.FIRST_COMPLETED)
            if self._halted.done():
                raise PeerError(f"the team is broken, compute the layer undivided: {self._halted.result()}")
            return task.result()
        except (NetError, Refused) as error:
            raise PeerError(f"a member of a team cannot be reached, compute the layer undivided: {error}") from None
        finally:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # seen: it is raised above, or the team's end is
