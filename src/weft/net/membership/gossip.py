"""SWIM on a node: claims in and out, pings, comparisons, and the links that are kept; decisions from `swim.step`.

    gossip = Gossip(node, clock, reader, status, on_change, on_failure)
    gossip.start()                       # from now on this peer says that it lives
    gossip.watch(is_active, ...)         # keep few links, or all

With each ping and each answer goes this peer's heartbeat, so that linked peers know how far it is.

Claims are signed records of membership: between the bytes that travel and what is believed stands `ClaimReader`. A
claim that does not hold is the fault of who passes it on: everybody checks before passing on. Claims read lately are
remembered whole, so the same one from many links is checked once; peers of one process may share a reader.

Failure:
- a claim does not hold, or a note is out of bounds: the link it came over is dropped.
- a link is full: what did not fit is lost on it, and found by anti-entropy.
"""

import asyncio
from collections.abc import Callable, Sequence

from blake3 import blake3

from weft.clock import Clock
from weft.errors import WeftError, WireError
from weft.ids import PeerId, RunId
from weft.keys import verify
from weft.net import messages
from weft.net.membership import swim
from weft.net.membership.full_mesh import Heard, LinkLost, Redial, RedialFailed, Stalled, Tick
from weft.net.membership.members import (
    Accused,
    Claim,
    Departed,
    Lives,
    Members,
    differing,
    everything,
    is_behind,
    listing,
    newer,
    sums,
)
from weft.net.node import Node
from weft.tasks import Tasks
from weft.wire import Record, Signed, Signer, decode, seal, unseal

MAX_READ = 4096  # remembered: twice the largest swarm


class Private(Record, frozen=True, kw_only=True, tag="Private"):
    """Signed for its signature alone, which nobody else can make; it is never sent."""

    purpose: str


def secret(signer: Signer, purpose: str) -> bytes:
    """Return 32 bytes that only the holder of the key can know, the same each time."""
    return blake3(seal(signer, Private(purpose=purpose)).signature).digest()


class ClaimReader:
    """Reads claims of one run."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._read: dict[bytes, tuple[Signed, Claim]] = {}  # by signature

    def read(self, signed: Signed) -> Claim:
        """Return what `signed` says, once its signature holds.

        Raises:
            WireError: it does not, is too long, of another run, or no claim.
        """
        known = self._read.get(signed.signature)
        if known is not None and known[0] == signed:
            return known[1]
        if len(signed.body) > messages.MAX_CLAIM_NBYTES:
            raise WireError(f"a claim of {len(signed.body)} bytes exceeds the bound of {messages.MAX_CLAIM_NBYTES}")
        claim = self._unsealed(signed)
        while len(self._read) >= MAX_READ:
            del self._read[next(iter(self._read))]
        self._read[signed.signature] = (signed, claim)
        return claim

    def _unsealed(self, signed: Signed) -> Claim:
        signer = signed.signer
        match signed.kind:
            case "Presence":
                presence = unseal(signed, messages.Presence, verify)
                self._check(presence.run)
                return Lives(signer, presence.instance, presence.incarnation, signed)
            case "Accusation":
                accusation = unseal(signed, messages.Accusation, verify)
                self._check(accusation.run)
                return Accused(accusation.accused, accusation.instance, accusation.incarnation, signer, signed)
            case "Departure":
                departure = unseal(signed, messages.Departure, verify)
                self._check(departure.run)
                return Departed(signer, departure.instance, signed)
        raise WireError("it passed on something that is not a claim of membership")

    def _check(self, run: RunId) -> None:
        if run != self._run:
            raise WireError("a claim of membership is about another run")


def live(signer: Signer, run: RunId, instance: bytes, incarnation: int, contact: messages.Contact) -> Lives:
    """Return this process's own claim to live."""
    presence = messages.Presence(
        run=run,
        instance=instance,
        incarnation=incarnation,
        name=contact.name,
        addresses=contact.addresses[: messages.MAX_ADDRESSES],
    )
    return Lives(signer.peer, instance, incarnation, seal(signer, presence))


def accuse(signer: Signer, run: RunId, life: Lives) -> Accused:
    """Return this peer's claim that it cannot reach another."""
    accusation = messages.Accusation(run=run, accused=life.peer, instance=life.instance, incarnation=life.incarnation)
    return Accused(life.peer, life.instance, life.incarnation, signer.peer, seal(signer, accusation))


def contact_of(peer: PeerId, proof: Signed) -> messages.Contact:
    """Return where `peer` may be reached, as it says in a presence that was read before."""
    presence: messages.Presence = decode(proof.body, messages.Presence)
    return messages.Contact(peer=peer, name=presence.name, addresses=presence.addresses)


GREET_S = 1.0  # who says how it uses a link so long after it came up has begun to listen just now
COMPARED_S = 0.5  # between two comparisons that one peer asks for
LEAST_WAIT_S = 0.001  # so that rounding never makes a loop that does not wait


class Gossip:
    """What this peer and others claim of each other.

    Args:
        status: returns this peer's heartbeat.
        on_change: told every output about members, own stalls, and how others use their links.
        on_failure: told what could not be done.
    """

    def __init__(
        self,
        node: Node,
        clock: Clock,
        reader: ClaimReader,
        status: Callable[[], messages.Heartbeat],
        on_change: Callable[[swim.Change | swim.Tied | Stalled], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._node = node
        self._clock = clock
        self._reader = reader
        self._status = status
        self._on_change = on_change
        self._on_failure = on_failure
        identity = node.passport.identity
        members = Members(me=node.peer, instance=node.passport.instance)
        self._state = swim.State(members=members, secret=secret(identity, "overlay"))
        self._pinned: frozenset[PeerId] = frozenset()
        # What was said last on the link that stands, and when.
        self._used: dict[PeerId, tuple[messages.LinkUse, float]] = {}
        self._compared_at: dict[PeerId, float] = {}
        self._num_revived = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = False  # whether this peer says that it lives
        self._tasks = Tasks(on_failure)
        node.on_note(messages.News, self._on_news)
        node.on_note(messages.Probing, self._on_probing)
        node.on_note(messages.Answering, self._on_answering)
        node.on_note(messages.LinkUse, self._on_link_use)
        node.on_note(messages.ReachPlease, self._on_reach_please)
        node.on_note(messages.Reached, self._on_reached)
        node.on_note(messages.ViewSums, self._on_sums)
        node.on_note(messages.ViewList, self._on_list)
        node.consult(self.contact)

    # --- for whoever drives it ---

    def start(self) -> None:
        """Say from now on that this peer lives."""
        self.is_open = True
        self._act(swim.SignLife(self._state.members.incarnation))
        for peer in self._node.peers:
            self.linked(peer)
        self._tick()

    def stop(self) -> None:
        """Say nothing more."""
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()

    async def aclose(self) -> None:
        self.stop()
        await self._tasks.aclose()

    @property
    def members(self) -> Members:
        return self._state.members

    @property
    def is_active(self) -> bool:
        """Return whether few links are kept."""
        return self._state.is_active

    def is_told_bounded(self) -> bool:
        """Return whether somebody linked keeps few links."""
        return any(tie is not None and not tie.watches_all for tie in self._state.links.values())

    def watching_all(self) -> list[PeerId]:
        """Return who of the linked wants a heartbeat every two seconds."""
        return [peer for peer, tie in self._state.links.items() if tie is not None and tie.watches_all]

    def contact(self, peer: PeerId) -> messages.Contact | None:
        """Return where a known peer may be reached, as it says itself."""
        entry = self._state.members.entries.get(peer)
        return None if entry is None else contact_of(peer, entry.life.proof)

    def wanted(self) -> frozenset[PeerId]:
        """Return to whom links are kept where they are few."""
        return self._pinned | frozenset(self._state.kept)

    def is_wanted(self, peer: PeerId) -> bool:
        """Return whether this side or the other keeps the link to `peer`."""
        tie = self._state.links.get(peer)
        return peer in self._pinned or peer in self._state.kept or (tie is not None and tie.is_kept)

    def pin(self, peers: frozenset[PeerId]) -> None:
        """Keep links to `peers`, too, in the place of those pinned before."""
        before, self._pinned = self._pinned, peers
        if self.is_active and peers != before:
            self._keep(self.wanted(), before - self.wanted())

    def watch(self, is_active: bool, present: frozenset[PeerId], gone: frozenset[PeerId]) -> None:
        """Keep few links from now on, or all; `present` and `gone` is what was known so far."""
        self._feed(swim.Watch(is_active, present, gone))
        self._say_uses()

    def linked(self, peer: PeerId) -> None:
        """Take up that a link came up."""
        self._used.pop(peer, None)
        self._feed(swim.Linked(peer))
        self._greet(peer)

    def _greet(self, peer: PeerId) -> None:
        self._say_use(peer)
        if self.is_open and (own := self._state.members.own) is not None:
            self._node.post(peer, messages.News(claims=(own.proof,)))

    def lost(self, peer: PeerId, reason: str) -> None:
        """Take up that a link went down."""
        self._used.pop(peer, None)
        self._compared_at.pop(peer, None)
        self._feed(LinkLost(peer, reason))

    def departed(self, peer: PeerId, instance: bytes, signed: Signed) -> None:
        self._feed(swim.Told(peer, (Departed(peer, instance, signed),)))

    def silent(self, peer: PeerId) -> None:
        """Take up that `peer` was not heard for too long, where all links are kept."""
        self._feed(swim.Silent(peer))

    # --- what others say ---

    async def _on_news(self, peer: PeerId, note: messages.News) -> None:
        self._take(peer, note.claims, is_compared=note.is_compared)

    async def _on_probing(self, peer: PeerId, note: messages.Probing) -> None:
        self._take(peer, note.claims)
        self._feed(swim.Pinged(peer))

    async def _on_answering(self, peer: PeerId, note: messages.Answering) -> None:
        self._take(peer, note.claims)

    async def _on_link_use(self, peer: PeerId, note: messages.LinkUse) -> None:
        _, said_at = self._used.get(peer, (note, 0.0))
        if self._state.links.get(peer) is None and self._clock.now() - said_at >= GREET_S:
            self._used.pop(peer, None)  # it did not listen before
            self._greet(peer)
        tied = swim.Tied(peer, swim.Tie(note.watches_all, note.is_kept))
        self._feed(tied)
        self._on_change(tied)

    async def _on_reach_please(self, peer: PeerId, note: messages.ReachPlease) -> None:
        self._feed(swim.HelpAsked(peer, note.peer))

    async def _on_reached(self, peer: PeerId, note: messages.Reached) -> None:
        self._feed(swim.Helped(peer, note.peer))

    async def _on_sums(self, peer: PeerId, note: messages.ViewSums) -> None:
        now = self._clock.now()
        if now - self._compared_at.get(peer, -COMPARED_S) < COMPARED_S:
            return
        self._compared_at[peer] = now
        empty, others = differing(self.members, note.sums)
        turn = int(now * 1000)  # another bucket first each time: an answer is bounded
        empty = empty[turn % len(empty) :] + empty[: turn % len(empty)] if empty else []
        self._give(peer, everything(self.members, empty))
        if others:
            buckets, listed = listing(self.members, others)
            self._node.post(peer, messages.ViewList(buckets=buckets, listed=listed, is_answer=False))

    async def _on_list(self, peer: PeerId, note: messages.ViewList) -> None:
        self._give(peer, newer(self.members, note.buckets, note.listed))
        if not note.is_answer and is_behind(self.members, note.listed):
            buckets, listed = listing(self.members, note.buckets)
            self._node.post(peer, messages.ViewList(buckets=buckets, listed=listed, is_answer=True))

    def _give(self, peer: PeerId, proofs: Sequence[Signed]) -> None:
        for start in range(0, len(proofs), messages.MAX_NEWS):
            some = tuple(proofs[start : start + messages.MAX_NEWS])
            self._node.post(peer, messages.News(claims=some, is_compared=True))

    def _take(self, peer: PeerId, signed: Sequence[Signed], is_compared: bool = False) -> None:
        claims = []
        try:
            for each in signed:
                entry = self.members.entries.get(each.signer)
                if entry is None or entry.life.proof.signature != each.signature:  # else it is known: most are
                    claims.append(self._reader.read(each))
        except WireError as error:
            self._node.drop(peer, f"it passed on a claim that does not hold: {error}")
            return
        for claim in claims:
            if (at := self._node.last_heard(claim.peer)) is not None and claim.peer in self.members.suspected:
                self._feed(Heard(claim.peer, at))
        if claims:
            self._feed(swim.Told(peer, tuple(claims), is_compared))

    # --- what is done ---

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for peer in swim.awaited(self._state):
            if (at := self._node.last_heard(peer)) is not None:
                self._feed(Heard(peer, at), is_scheduled=False)
        self._feed(Tick())

    def _feed(self, event: swim.Input, is_scheduled: bool = True) -> None:
        if not self.is_open and not isinstance(event, swim.Linked | LinkLost | swim.Tied | swim.Told):
            return
        self._state, outputs = swim.step(self._state, event, self._clock.now())
        for output in outputs:
            try:
                self._act(output)
            except Exception as error:  # one that cannot be done is told, and the others are done
                self._on_failure(error)
        if is_scheduled and self.is_open:
            self._schedule()

    def _schedule(self) -> None:
        now = self._clock.now()
        due = max(swim.next_due(self._state, now), now + LEAST_WAIT_S)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _act(self, output: swim.Output) -> None:
        node = self._node
        match output:
            case swim.Ping(peer=peer, news=news):
                node.post(peer, self._status())
                node.post(peer, messages.Probing(claims=news))
            case swim.Answer(peer=peer, news=news):
                node.post(peer, self._status())
                node.post(peer, messages.Answering(claims=news))
            case swim.Tell(peer=peer, news=news):
                node.post(peer, messages.News(claims=news))
            case swim.AskHelp(peer=peer, target=target):
                node.post(peer, messages.ReachPlease(peer=target))
            case swim.Help(peer=peer, target=target):
                node.post(peer, messages.Reached(peer=target))
            case swim.Compare(peer=peer):
                node.post(peer, messages.ViewSums(sums=sums(self.members)))
            case swim.SignLife(incarnation=incarnation):
                passport = node.passport
                own = live(passport.identity, node.run, passport.instance, incarnation, node.contact(node.peer))
                self._feed(swim.Told(None, (own,)))
            case swim.SignAccusation(life=life):
                self._feed(swim.Told(None, (accuse(node.passport.identity, node.run, life),)))
            case Redial(peer=peer):
                self._tasks.spawn(self._redial(peer))
            case swim.Revive(peer=peer):
                if chosen := peer or self._forgotten():
                    self._tasks.spawn(self._redial(chosen))
            case swim.Keep(peers=peers):
                now_wanted = frozenset(peers) | self._pinned
                self._keep(now_wanted, frozenset(node.kept) - now_wanted)
            case _:
                self._on_change(output)

    def _keep(self, wanted: frozenset[PeerId], unwanted: frozenset[PeerId]) -> None:
        for peer in sorted(unwanted):
            self._node.release(peer)
        for peer in sorted(wanted):
            self._node.keep(peer)
        self._say_uses()

    def _forgotten(self) -> PeerId | None:
        """Return somebody in the address book who is not a member, another one each time."""
        others = [peer for peer in self._node.known_addresses() if peer not in self.members.entries]
        self._num_revived += 1
        return others[self._num_revived % len(others)] if others else None

    def _say_uses(self) -> None:
        for peer in self._node.peers:
            self._say_use(peer)

    def _say_use(self, peer: PeerId) -> None:
        is_kept = not self.is_active or peer in self._pinned or peer in self._state.kept
        use = messages.LinkUse(watches_all=not self.is_active, is_kept=is_kept)
        said, _ = self._used.get(peer, (None, 0.0))
        if self.is_open and said != use and self._node.post(peer, use):
            self._used[peer] = (use, self._clock.now())

    async def _redial(self, peer: PeerId) -> None:
        try:
            await self._node.connect(peer)
        except WeftError as error:
            self._feed(RedialFailed(peer, str(error)))
