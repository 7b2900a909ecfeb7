"""Membership on a node: who is alive, told to whoever asks, and as events.

    membership = Membership(node, clock, emit, status)
    await membership.start()
    membership.on_change(callback)        # every output of the machines that is about a member
    await membership.say_goodbye("done")  # before node.aclose()

Up to 32 peers, everybody is linked to everybody and heartbeats to all: proof of life in, decisions from
`full_mesh.step`. Above, a peer keeps few links and `gossip` says who is alive; which of both, `swim.watches_all`
decides. Whoever still wants heartbeats gets them.

Who sends heartbeats is a member of this view, from the first on: a newcomer that still reads the terms, downloads or
compiles sends none and is nobody whose silence matters. Where links are kept to all, every contact is dialled.
`status` returns this peer's own heartbeat; the newest of each other that is linked is kept, and is an event
(`MemberProgress`) where its round or state is new, else every ten seconds.
"""

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress

from weft import events
from weft.clock import Clock
from weft.cost.training import HEARTBEAT_S
from weft.errors import WeftError, WireError
from weft.ids import PeerId, short
from weft.keys import verify
from weft.net.membership import full_mesh, swim
from weft.net.membership.gossip import ClaimReader, Gossip
from weft.net.membership.members import MAX_KNOWN
from weft.net.membership.swim import MAX_ALL, MIN_BOUNDED, watches_all
from weft.net.messages import MAX_REASON_CHARS, Contact, Departure, Farewell, Heartbeat
from weft.net.node import Node
from weft.tasks import Tasks
from weft.wire import seal, unseal

FAREWELL_S = 2.0  # for the others to close their links after a goodbye
IDLE_S = 30.0  # without a byte, before a link that neither side keeps is closed, where few are kept
MAX_IDLE = 16  # such links; the one longest silent makes room
LEAST_S = HEARTBEAT_S / 8  # between two heartbeats of one peer: more often than that nobody has anything to tell
TELL_S = 10.0  # between two events of one whose round and state are what they were
MAX_DEPARTED = 256  # goodbyes remembered: they only keep a process from coming back by mistake

OnChange = Callable[[full_mesh.Change], None]


class Membership:
    """Who is alive, as this peer knows it.

    Args:
        status: returns what this peer tells of itself.
        reader: of others' claims, where several peers of one process share it.
    """

    def __init__(
        self,
        node: Node,
        clock: Clock,
        emit: events.Emit,
        status: Callable[[], Heartbeat],
        reader: ClaimReader | None = None,
    ) -> None:
        self._node = node
        self._clock = clock
        self._emit = emit
        self._status = status
        # None: few links are kept, and gossip says who is alive.
        self._state: full_mesh.State | None = full_mesh.State()
        self._heartbeats: dict[PeerId, Heartbeat] = {}
        self._beating: dict[PeerId, bytes] = {}  # instances that have sent a heartbeat
        self._taken_at: dict[PeerId, float] = {}  # when a heartbeat was last taken up
        self._told_at: dict[PeerId, float] = {}  # and when one was last an event
        self._departed: dict[PeerId, bytes] = {}  # instances that said goodbye
        self._sought: dict[PeerId, float] = {}  # dialled though no member, and since when no link stands
        self._turned_away: set[PeerId] = set()
        self._callbacks: list[OnChange] = []
        self._is_leaving = False
        self._heartbeat_at = 0.0  # where few links are kept
        self._settled_at = 0.0  # since when this peer runs, and knows so few or many
        self._is_few = True
        self._has_changed = True  # who is known, or how others use their links, since the regime was chosen
        self._tasks = Tasks(self._tell_failure)
        reader = reader or ClaimReader(node.run)
        self._gossip = Gossip(node, clock, reader, status, self._on_gossip, self._tell_failure)
        node.on_note(Heartbeat, self._on_heartbeat)
        node.on_note(Farewell, self._on_farewell)
        node.on_link(self._on_link)
        node.on_contact(self._on_contact)

    async def start(self) -> None:
        """Begin to send heartbeats and to watch, and dial every known contact."""
        self._settled_at = self._clock.now()
        self._gossip.start()
        self._tasks.spawn(self._tick())
        for peer in self._node.known_addresses():
            self._node.keep(peer)

    async def aclose(self) -> None:
        """Stop ticking; says no goodbye."""
        self._is_leaving = True
        await self._gossip.aclose()
        await self._tasks.aclose()

    def on_change(self, callback: OnChange) -> None:
        """Call `callback(output)` at once for each member that is new, suspected, recovered, gone or has left."""
        self._callbacks.append(callback)

    def alive(self) -> tuple[PeerId, ...]:
        """Return the members that are neither suspected nor gone, in ascending order, without this peer."""
        return tuple(sorted(peer for peer, member in self.members().items() if member.status == "alive"))

    def silent(self, within_s: float) -> tuple[PeerId, ...]:
        """Return who is suspected or gone, has not left, and was heard less than `within_s` ago, in ascending order."""
        since, away = self._clock.now() - within_s, ("suspected", "gone")
        return tuple(
            sorted(peer for peer, member in self.members().items() if member.status in away and member.heard_at > since)
        )

    def members(self) -> dict[PeerId, full_mesh.Member]:
        """Return every member that is not forgotten and what is believed of it."""
        if self._state is not None:
            return dict(self._state.members)
        entries = self._gossip.members.entries
        return {peer: full_mesh.Member(status=entry.status, heard_at=entry.since) for peer, entry in entries.items()}

    @property
    def watches_all(self) -> bool:
        return self._state is not None

    def pin(self, peers: Iterable[PeerId]) -> None:
        """Keep links to `peers`, whatever the regime, in the place of those pinned before."""
        self._gossip.pin(frozenset(peers) - {self._node.peer})

    def relayed(self) -> frozenset[PeerId]:
        """Return who reaches somebody through a third only, this peer among them: as they say, or as is seen here."""
        said = {peer for peer, beat in self._heartbeats.items() if beat.is_relayed}
        seen = {peer for peer in self._node.peers if self._node.is_relayed(peer)}
        return frozenset(said | seen | ({self._node.peer} if seen else set()))

    def heartbeat_of(self, peer: PeerId) -> Heartbeat | None:
        return self._heartbeats.get(peer)

    def standing(self, peer: PeerId) -> int | None:
        """Return what another is to whoever looks for the run: 0 an anchor, which stays, 1 a peer.

        None: it sends no heartbeat. It watches, or has not begun.
        """
        beat = self._heartbeats.get(peer)
        return None if beat is None else int(not beat.is_anchor)

    async def say_goodbye(self, reason: str) -> None:
        """Leave; see the function of this name."""
        self._is_leaving = True
        self._gossip.stop()
        await say_goodbye(self._node, reason)

    # --- what happens ---

    async def _tick(self) -> None:
        while True:
            now = self._clock.now()
            due = now + full_mesh.TICK_S
            self._choose(now)
            if self._state is not None:
                for peer in list(self._beating):
                    if (at := self._node.last_heard(peer)) is not None:
                        self._feed(full_mesh.Heard(peer, at))
                self._feed(full_mesh.Tick())
                self._seek_no_more(now, self._state.members)
                due = full_mesh.next_due(self._state, now)
            else:
                if now >= self._heartbeat_at:
                    self._heartbeat_at = now + HEARTBEAT_S
                    self._send(self._gossip.watching_all())
                self._close_idle(now)
            await asyncio.sleep(max(due - now, 0.001))

    def _choose(self, now: float) -> None:
        """Go over to few links, or back to all, where the number of peers asks for it."""
        if self._state is not None and not self._has_changed:
            return
        self._has_changed = False
        members = self._gossip.members
        num_known = members.num_present
        if self._state is not None:
            here = [peer for peer, member in self._state.members.items() if member.status in ("alive", "suspected")]
            num_known += sum(peer not in members.entries or peer in members.buried for peer in here)
        if (num_known < MIN_BOUNDED) != self._is_few:
            self._is_few, self._settled_at = not self._is_few, now
        settled_s = now - self._settled_at
        is_all = watches_all(self.watches_all, num_known, settled_s, self._gossip.is_told_bounded())
        if is_all != self.watches_all:
            self._go_over(is_all, now)

    def _go_over(self, is_all: bool, now: float) -> None:
        before = self.members()
        present = frozenset(peer for peer, member in before.items() if member.status in ("alive", "suspected"))
        self._state = None
        self._gossip.watch(not is_all, present, frozenset(before) - present)
        self._node.introduce(is_all)
        self._sought.clear()
        members = self._gossip.members
        after = [peer for peer in members.entries if peer not in members.buried]
        if is_all:
            alive = full_mesh.Member(status="alive", heard_at=now)
            self._state = full_mesh.State(members=dict.fromkeys(after[: MAX_ALL - 1], alive))
            for peer, entry in members.entries.items():
                if entry.status != "left":  # those gone as well: a network that was cut in two may be whole again
                    self._seek(peer)
        for peer in sorted(set(after) - present):
            self._safely(full_mesh.New(peer))
        for peer in sorted(present - set(after)):
            self._safely(full_mesh.Gone(peer, 0.0))

    def _close_idle(self, now: float) -> None:
        """Close links that neither side keeps: those long silent, and the longest silent of too many."""
        unwanted = [peer for peer in self._node.peers if not self._gossip.is_wanted(peer)]
        silent = sorted((self._node.last_heard(peer) or now, peer) for peer in unwanted if peer in self._beating)
        num_extra = len(silent) - MAX_IDLE
        for place, (heard_at, peer) in enumerate(silent):
            if now - heard_at >= IDLE_S or place < num_extra:
                self._node.drop(peer, "nobody needs the link any more")

    async def _on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        instance = self._node.instance_of(peer)
        if not instance or instance == self._departed.get(peer):  # the last words of a link that went down
            return
        now, before = self._clock.now(), self._heartbeats.get(peer)
        is_same_process = self._beating.get(peer) == instance
        if before is not None and is_same_process and now - self._taken_at.get(peer, -math.inf) < LEAST_S:
            return  # nobody has so much to tell: the next one says it, too
        self._heartbeats[peer], self._taken_at[peer] = heartbeat, now
        self._beating[peer] = instance
        if self.watches_all:
            self._choose(self._clock.now())
        self._feed(full_mesh.Joined(peer))
        is_same = before is not None and is_same_process and _summary(before) == _summary(heartbeat)
        if is_same and now - self._told_at.get(peer, -math.inf) < TELL_S:
            return
        self._told_at[peer] = now
        self._emit(
            events.MemberProgress(
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
            departure = unseal(farewell.signed, Departure, verify)
        except WireError as error:
            self._node.drop(peer, f"a goodbye that does not hold: {error}")
            return
        if farewell.signed.signer == peer and departure.run == self._node.run:
            if len(self._departed) >= MAX_DEPARTED:
                del self._departed[next(iter(self._departed))]
            self._departed[peer] = departure.instance
            self._beating.pop(peer, None)
            self._sought.pop(peer, None)
            self._node.release(peer)
            self._gossip.departed(peer, departure.instance, farewell.signed)
            self._feed(full_mesh.SaidGoodbye(peer))
            self._node.drop(peer, "it said goodbye")

    def _on_link(self, peer: PeerId, is_up: bool, reason: str) -> None:
        if self._is_leaving:
            return
        self._has_changed = True
        if not is_up:
            self._turned_away.discard(peer)
            self._gossip.lost(peer, reason)
            if self.watches_all:
                self._feed(full_mesh.LinkLost(peer, reason))
            elif peer not in self._gossip.members.entries:  # nobody will say when to forget it
                for kept in (self._heartbeats, self._beating, self._taken_at, self._told_at):
                    kept.pop(peer, None)
            return
        self._gossip.linked(peer)
        instance = self._node.instance_of(peer)
        if instance == self._departed.get(peer):
            return
        self._departed.pop(peer, None)
        if self._beating.get(peer) != instance:
            self._beating.pop(peer, None)  # another process: its bytes say nothing of one that sent heartbeats
        if self.watches_all:
            if peer in self._beating:
                self._feed(full_mesh.Heard(peer, self._clock.now()))
            self._seek(peer)
        if self._gossip.is_open:
            self._node.post(peer, self._status())

    def _on_contact(self, contact: Contact) -> None:
        if self.watches_all and not self._is_leaving and contact.peer not in self._departed:
            self._seek(contact.peer)

    def _seek(self, peer: PeerId) -> None:
        self._sought[peer] = self._clock.now()
        self._node.keep(peer)

    def _seek_no_more(self, now: float, members: dict[PeerId, full_mesh.Member]) -> None:
        for peer, since in list(self._sought.items()):
            if peer in members:
                del self._sought[peer]  # the machine says when to forget it
            elif self._node.is_linked(peer):
                self._sought[peer] = now
            elif now - since >= full_mesh.FORGET_S:
                self._forget(peer)

    def _forget(self, peer: PeerId) -> None:
        if self._node.is_hearsay(peer):  # others are dialled on: a network may be away for hours
            self._node.release(peer)
        for kept in (self._heartbeats, self._beating, self._departed, self._sought, self._taken_at, self._told_at):
            kept.pop(peer, None)

    # --- what is done about it ---

    def _feed(self, event: full_mesh.Input) -> None:
        if self._state is not None:
            self._state, outputs = full_mesh.step(self._state, event, self._clock.now())
            for output in outputs:
                self._safely(output)

    def _on_gossip(self, output: swim.Change | swim.Tied | full_mesh.Stalled) -> None:
        self._has_changed = True
        if not self.watches_all and not isinstance(output, swim.Tied):
            self._safely(output)

    def _safely(self, output: full_mesh.Output) -> None:
        try:
            self._act(output)
        except Exception as error:  # one that cannot be done is told, and the others are done
            self._tell_failure(error)

    def _act(self, output: full_mesh.Output) -> None:
        match output:
            case full_mesh.SendHeartbeat():
                self._send(self._node.peers)
                return
            case full_mesh.Stalled(stall_s=stall_s):
                self._emit(events.LoopStalled(stall_s=stall_s))
                return
            case full_mesh.Redial(peer=peer):
                self._tasks.spawn(self._redial(peer))
                return
            case full_mesh.Forgotten(peer=peer):
                self._forget(peer)
                return
            case full_mesh.Full(peer=peer):
                self._turn_away(peer)
                return
            case full_mesh.New(peer=peer):
                self._emit(events.MemberJoined(member=peer, name=self._node.contact(peer).name))
            case full_mesh.Suspected(peer=peer, silent_s=silent_s, reason=reason):
                self._emit(events.MemberSuspected(member=peer, silent_s=silent_s, reason=reason))
                if self.watches_all:
                    self._gossip.silent(peer)
            case full_mesh.Recovered(peer=peer):
                self._emit(events.MemberRecovered(member=peer))
            case full_mesh.Gone(peer=peer, silent_s=silent_s):
                self._emit(events.MemberGone(member=peer, silent_s=silent_s))
                if peer in self._beating:  # else another process of that peer is linked by now, and not yet ready
                    self._node.drop(peer, f"silent for {silent_s:.1f} s")
            case full_mesh.Left(peer=peer):
                self._node.release(peer)
                self._emit(events.MemberLeft(member=peer))
        self._has_changed = True
        for callback in list(self._callbacks):
            callback(output)

    def _send(self, peers: Iterable[PeerId]) -> None:
        if not self._is_leaving:
            heartbeat = self._status()
            for peer in peers:
                try:
                    self._node.post(peer, heartbeat)
                except Exception as error:  # others must hear from this peer all the same
                    self._tell_failure(error)

    def _turn_away(self, peer: PeerId) -> None:
        if peer not in self._turned_away:
            self._turned_away.add(peer)
            name = self._node.contact(peer).name or short(peer)
            text = f"{name} is no member here: one peer watches {MAX_KNOWN} at most"
            self._emit(events.Notice(text=text))

    async def _redial(self, peer: PeerId) -> None:
        try:
            await self._node.connect(peer)
        except WeftError as error:
            if (at := self._node.last_heard(peer)) is not None:
                # Before the link was lost: at the next tick it would look like a recovery.
                self._feed(full_mesh.Heard(peer, at))
            self._feed(full_mesh.RedialFailed(peer, str(error)))

    def _tell_failure(self, error: Exception) -> None:
        text = f"membership goes on after a fault in weft: {type(error).__name__}: {error}"
        self._emit(events.Notice(text=text))


def _summary(heartbeat: Heartbeat) -> tuple[object, ...]:
    """Return what people want to see at once when it changes."""
    return heartbeat.name, heartbeat.round, heartbeat.state, heartbeat.loss is None


async def say_goodbye(node: Node, reason: str) -> None:
    """Tell every linked peer that this one leaves for good, and wait up to two seconds until they know.

    The goodbye is signed, so that a member may show it to others.
    """
    departure = Departure(run=node.run, instance=node.passport.instance, reason=reason[:MAX_REASON_CHARS])
    farewell = Farewell(signed=seal(node.passport.identity, departure))
    link_ended = asyncio.Event()
    node.on_link(lambda *_: link_ended.set())
    for peer in node.known_addresses():
        node.release(peer)
    told = [peer for peer in node.peers if node.post(peer, farewell)]
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            while any(node.is_linked(peer) for peer in told):
                link_ended.clear()
                await link_ended.wait()
