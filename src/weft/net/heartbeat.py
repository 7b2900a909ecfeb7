"""Membership on a node: heartbeats out, proof of life in, decisions from `membership.step`, events.

    membership = Membership(node, clock, emit, status)
    await membership.start()
    membership.on_change(callback)        # every output of the machine that is about a member
    await membership.say_goodbye("done")  # before node.aclose()

Every peer that connects is a member of this view, and every contact is dialled, so that all members know each
other. `status` returns this peer's own heartbeat; the newest of each other is kept and is an event
(`MemberProgress`).

It does not know rounds, nor who has a vote.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from weft.clock import Clock
from weft.errors import WeftError, WireError
from weft.events import (
    Emit,
    MemberGone,
    MemberJoined,
    MemberLeft,
    MemberProgress,
    MemberRecovered,
    MemberSuspected,
)
from weft.ids import PeerId
from weft.keys import verify
from weft.net.membership import (
    Gone,
    Heard,
    Input,
    Joined,
    Left,
    LinkLost,
    Member,
    New,
    Output,
    Recovered,
    Redial,
    RedialFailed,
    SaidGoodbye,
    SendHeartbeat,
    State,
    Suspected,
    Tick,
    next_due,
    step,
)
from weft.net.messages import Contact, Farewell, Goodbye, Heartbeat
from weft.net.node import Node
from weft.net.tasks import Tasks
from weft.wire import seal, unseal

FAREWELL_S = 2.0  # for the others to close their links after a goodbye
FORGET_S = 600.0  # a member gone for so long is redialled no more; it still finds its way back by itself

Change = New | Suspected | Recovered | Gone | Left
OnChange = Callable[[Change], None]


class Membership:
    """A view of who is alive.

    Args:
        status: returns what this peer tells of itself every two seconds.
    """

    def __init__(self, node: Node, clock: Clock, emit: Emit, status: Callable[[], Heartbeat]) -> None:
        self._node = node
        self._clock = clock
        self._emit = emit
        self._status = status
        self._state = State()
        self._heartbeats: dict[PeerId, Heartbeat] = {}
        self._departed: dict[PeerId, bytes] = {}  # instances that said goodbye
        self._callbacks: list[OnChange] = []
        self._is_leaving = False
        self._link_ended = asyncio.Event()
        self._tasks = Tasks()
        node.on_note(Heartbeat, self._on_heartbeat)
        node.on_note(Farewell, self._on_farewell)
        node.on_link(self._on_link)
        node.on_contact(self._on_contact)

    async def start(self) -> None:
        """Begin to tick, and dial every known contact. Who is linked already, is a member from now on."""
        for peer in self._node.peers:
            self._on_link(peer, True, "")
        self._tasks.spawn(self._tick())
        for peer in self._node.known_addresses():
            self._node.keep(peer)

    async def aclose(self) -> None:
        """Stop ticking; says no goodbye."""
        self._is_leaving = True
        await self._tasks.aclose()

    def on_change(self, callback: OnChange) -> None:
        """Call `callback(output)` at once for each member that is new, suspected, recovered, gone or has left."""
        self._callbacks.append(callback)

    def alive(self) -> tuple[PeerId, ...]:
        """Return the members that are neither suspected nor gone, in ascending order, without this peer."""
        return tuple(sorted(peer for peer, member in self._state.members.items() if member.status == "alive"))

    def members(self) -> dict[PeerId, Member]:
        """Return every member ever met and what is believed of it."""
        return dict(self._state.members)

    def heartbeat_of(self, peer: PeerId) -> Heartbeat | None:
        """Return what `peer` last told of itself."""
        return self._heartbeats.get(peer)

    async def say_goodbye(self, reason: str) -> None:
        """Tell every linked peer that this one leaves for good, and wait up to two seconds until they know.

        The goodbye is signed, so that a member may show it to others.
        """
        self._is_leaving = True
        goodbye = Goodbye(run=self._node.run, instance=self._node.passport.instance, reason=reason[:200])
        farewell = Farewell(signed=seal(self._node.passport.identity, goodbye))
        for peer in self._node.known_addresses():
            self._node.release(peer)
        told = [peer for peer in self._node.peers if self._node.post(peer, farewell)]
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                while any(self._node.is_linked(peer) for peer in told):
                    self._link_ended.clear()
                    await self._link_ended.wait()

    # --- what happens ---

    async def _tick(self) -> None:
        while True:
            for peer in self._state.members:
                if (at := self._node.last_heard(peer)) is not None:
                    self._feed(Heard(peer, at))
            self._feed(Tick())
            now = self._clock.now()
            await asyncio.sleep(max(next_due(self._state, now) - now, 0.001))

    async def _on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        self._heartbeats[peer] = heartbeat
        self._feed(Heard(peer, self._clock.now()))
        self._emit(
            MemberProgress(
                member=peer,
                name=heartbeat.name,
                round=heartbeat.round,
                state=heartbeat.state,
                loss=heartbeat.loss if heartbeat.loss is not None and math.isfinite(heartbeat.loss) else None,
                tokens_per_s=heartbeat.tokens_per_s,
                link=self._node.link_name(peer),
            )
        )

    async def _on_farewell(self, peer: PeerId, farewell: Farewell) -> None:
        try:
            goodbye = unseal(farewell.signed, Goodbye, verify)
        except WireError as error:
            self._node.drop(peer, f"a goodbye that does not hold: {error}")
            return
        if farewell.signed.signer == peer and goodbye.run == self._node.run:
            self._departed[peer] = goodbye.instance
            self._node.release(peer)
            self._feed(SaidGoodbye(peer))
            self._node.drop(peer, "it said goodbye")

    def _on_link(self, peer: PeerId, is_up: bool, reason: str) -> None:
        if not is_up:
            self._link_ended.set()
        if self._is_leaving:
            return
        if not is_up:
            self._feed(LinkLost(peer, reason))
        elif self._node.instance_of(peer) != self._departed.get(peer):
            self._departed.pop(peer, None)
            self._feed(Joined(peer))
            self._node.keep(peer)

    def _on_contact(self, contact: Contact) -> None:
        if not self._is_leaving and contact.peer not in self._departed:
            self._node.keep(contact.peer)

    # --- what is done about it ---

    def _feed(self, event: Input) -> None:
        self._state, outputs = step(self._state, event, self._clock.now())
        for output in outputs:
            self._act(output)

    def _act(self, output: Output) -> None:
        match output:
            case SendHeartbeat(peers=peers):
                self._send(peers)
                return
            case Redial(peer=peer):
                self._tasks.spawn(self._redial(peer))
                return
            case New(peer=peer):
                self._emit(MemberJoined(member=peer, name=self._node.contact(peer).name))
            case Suspected(peer=peer, silent_s=silent_s, reason=reason):
                self._emit(MemberSuspected(member=peer, silent_s=silent_s, reason=reason))
            case Recovered(peer=peer):
                self._emit(MemberRecovered(member=peer))
            case Gone(peer=peer, silent_s=silent_s):
                self._emit(MemberGone(member=peer, silent_s=silent_s))
                self._node.drop(peer, f"silent for {silent_s:.1f} s")
                self._tasks.spawn(self._forget_later(peer))
            case Left(peer=peer):
                self._emit(MemberLeft(member=peer))
        for callback in list(self._callbacks):
            callback(output)

    def _send(self, peers: tuple[PeerId, ...]) -> None:
        if not self._is_leaving:
            heartbeat = self._status()
            for peer in peers:
                self._node.post(peer, heartbeat)

    async def _redial(self, peer: PeerId) -> None:
        try:
            await self._node.connect(peer)
        except WeftError as error:
            if (at := self._node.last_heard(peer)) is not None:
                self._feed(Heard(peer, at))  # before the link was lost: at the next tick it would look like a recovery
            self._feed(RedialFailed(peer, str(error)))

    async def _forget_later(self, peer: PeerId) -> None:
        await asyncio.sleep(FORGET_S)
        if self._state.members[peer].status == "gone":
            self._node.release(peer)
