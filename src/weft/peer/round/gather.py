"""Fetches what is announced for a round, and tells the first leader what has arrived: it counts that.

    member --Ready-------> all      the owner of part i fetches part i at once; who merges all parts, all
    owner  --Gathered----> leader   whose parts are here, and whose cannot be had
    leader                          tells its machine of an announcement once every owner holds the payload; and of one
                                    that is lost, once most owners have asked in vain

To the machine an announcement whose payload still travels is one that is late. So a member with a slow uplink is left
out, and not waited for; its payload goes on travelling. It offers the same bytes in the next round, and is counted in
the one in which they have arrived.

Who announces and does not deliver is not waited for: most owners have to say so, for one of them may lie.

Only the first attempt of a round waits for payloads. Later ones plan with what was announced, and fetch then.
"""

import asyncio
from collections.abc import Mapping

from weft.errors import PayloadError, PeerError
from weft.ids import Attempt, Digest, PeerId
from weft.peer.context import Context
from weft.peer.messages import Gathered
from weft.peer.round.members import Member
from weft.peer.round.payloads import Payloads
from weft.peer.round.timers import Timers
from weft.sync.records.messages import Contribution, Ready
from weft.sync.round.machine import TELL_S, Input, Lost, Trained
from weft.sync.round.round import unanswered
from weft.sync.round.rules import is_under_way, is_well_cut, leader
from weft.sync.round.shares import contribution

REPEAT_S = 4.0  # until an announcement is said again; doubled each time
AGAIN_S = 1.0  # between two tries to fetch a payload that is announced
NUM_TRIES = 3  # in vain, and an owner says so
KEPT_ROUNDS = 2  # that a payload is kept for which nobody announces any more


class Gather:
    def __init__(self, context: Context, member: Member, parts: Payloads, timers: Timers) -> None:
        self.has_said = False  # this peer's announcement, which its machine has not heard of yet
        self._clock = context.clock
        self._timers = timers
        self._member = member
        self._parts = parts
        self._round = 0  # counts rounds of this process
        self.announced: dict[PeerId, tuple[Digest, ...]] = {}  # parts of all payloads of the present round
        self._quorum_at: float | None = None  # since when a quorum has announced
        self._held_back: dict[PeerId, Input] = {}  # announcements that the machine has not heard of
        self._told: dict[PeerId, Gathered] = {}  # leader: by owner
        self._lost: set[PeerId] = set()  # leader: who is not waited for
        self._early: dict[PeerId, Gathered] = {}  # of the round after this one
        self._fetching: dict[Digest, asyncio.Task[None]] = {}
        self._refused: set[Digest] = set()  # their bytes are not what was announced
        self._num_failed: dict[Digest, int] = {}  # tries to fetch it
        self._wanted_in: dict[Digest, int] = {}  # the last round in which it was announced
        self._is_telling = False
        self._repeating: asyncio.Task[None] | None = None
        context.node.on_note(Gathered, self._on_gathered)

    def begin(self) -> None:
        self._round += 1
        self.announced, self._held_back, self._lost = {}, {}, set()
        base, early, self._early = self._member.base, self._early, {}
        self._told = {
            peer: note
            for peer, note in early.items()
            if peer in base.electorate and (note.branch, note.round) == (base.branch, base.round)
        }
        self._quorum_at, self.has_said = None, False
        if self._repeating is not None:
            self._repeating.cancel()
        for wanted in [each for each, last in self._wanted_in.items() if last <= self._round - KEPT_ROUNDS]:
            del self._wanted_in[wanted]
            if (task := self._fetching.pop(wanted, None)) is not None:
                task.cancel()
            self._parts.forget(wanted)
            self._refused.discard(wanted)
            self._num_failed.pop(wanted, None)

    @property
    def has_quorum(self) -> bool:
        return self._quorum_at is not None

    @property
    def is_waiting(self) -> bool:
        """Whether this peer leads the first attempt, and so waits for payloads."""
        state = self._member.state
        if state is None or state.attempt or state.is_back or state.committed is not None:
            return False
        return leader(state.base, Attempt(0)) == self._member.peer

    def announce(self, ready: Ready, trained: Trained) -> None:
        """Announce this peer's payload, which is served already.

        Args:
            trained: what the machine is to hear of it; it would announce it too.
        """
        self.has_said = self.is_waiting
        if self.has_said:
            self._say(ready)  # the machine would when the owners hold it: they begin to fetch now
        self.hear(self._member.peer, ready, trained)
        self._repeating = self._member.tasks.spawn(self._repeat(ready))

    def _say(self, ready: Ready) -> None:
        electorate, state = self._member.base.electorate, self._member.state
        self._member.say(electorate, ready)
        if state is not None and (asked := unanswered(state)) is not None:
            self._member.say(electorate, asked)

    async def _repeat(self, ready: Ready) -> None:
        """Say it again while the round lasts: letters get lost with links, and who is behind does not hear them."""
        base, wait_s = self._member.base, REPEAT_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s *= 2
            if self._member.base != base:
                return
            self._say(ready)

    def hear(self, peer: PeerId, ready: Ready, event: Input) -> None:
        """A member has announced its payload: fetch what is this peer's to merge, and feed the machine in time.

        Args:
            ready: the announcement.
            event: as the machine is to hear of it.
        """
        base = self._member.base
        if peer in self.announced:  # said again: the leader may not have heard either what is here
            self._tell_soon()
            return
        if not is_well_cut(base, peer, ready.parts):
            return
        self.announced[peer] = ready.parts
        self._timers.note_ready(peer)
        if self._quorum_at is None and is_under_way(base, self.announced):
            self._quorum_at = self._clock.now()
            self._timers.note_quorum()
        self._fetch_mine(contribution(base.charter, peer, ready))
        self._held_back[peer] = event
        self.check()

    def check(self) -> None:
        """Let those announcements through whose payloads every owner holds; all of them where nobody waits."""
        if not self._held_back:
            return
        said = {**self._told, self._member.peer: self._mine()} if self.is_waiting else {}
        for peer in list(self._held_back):
            if peer in self._held_back and (not self.is_waiting or self._is_gathered(peer, said)):
                event = self._held_back.pop(peer)
                if self._quorum_at is not None:
                    self._timers.note_gathering(self._clock.now() - self._quorum_at)
                self._member.feed(event)
            elif peer in self._held_back and peer not in self._lost and self._is_lost(peer, said):
                self._lost.add(peer)
                self._member.feed(Lost(peer=peer))

    # --- what this peer merges ---

    def _fetch_mine(self, brought: Contribution) -> None:
        base, me = self._member.base, self._member.peer
        if me not in base.electorate or base.num_parts != len(base.electorate):
            return
        for part, num in self._parts.wanted(base, brought.peer)[base.electorate.index(me)].items():
            wanted = brought.parts[part]
            self._wanted_in[wanted] = self._round
            is_mine = brought.peer == me
            if self._parts.is_here(wanted) if is_mine else self._is_held(brought, wanted, num):
                self._tell_soon()
            elif wanted not in self._fetching:
                self._fetching[wanted] = self._member.tasks.spawn(self._fetch(brought, wanted, num))

    def _is_held(self, brought: Contribution, wanted: Digest, num: int) -> bool:
        return self._parts.hold(wanted) or self._parts.take(brought, wanted, num)

    async def _fetch(self, brought: Contribution, wanted: Digest, num: int) -> None:
        while wanted in self._wanted_in:
            try:
                await self._parts.gather(brought, wanted, num)
            except PayloadError:
                self._refused.add(wanted)  # planned in, it is refused aloud; the others need not wait for it
            except PeerError:
                self._num_failed[wanted] = self._num_failed.get(wanted, 0) + 1
                if self._num_failed[wanted] == NUM_TRIES:
                    self._tell_soon()
                await asyncio.sleep(AGAIN_S)
                continue
            self._fetching.pop(wanted, None)
            self._tell_soon()
            return

    def _mine(self) -> Gathered:
        """Return whose parts are here, of those that this peer merges, and whose cannot be had."""
        base, me = self._member.base, self._member.peer
        here, missing = list[PeerId](), list[PeerId]()
        if me in base.electorate:
            index = base.electorate.index(me)
            for peer, parts in sorted(self.announced.items()):
                wanted = [parts[part] for part in self._parts.wanted(base, peer)[index]]
                away = [each for each in wanted if not (self._parts.is_here(each) or each in self._refused)]
                if not away:
                    here.append(peer)
                elif any(self._num_failed.get(each, 0) >= NUM_TRIES for each in away):
                    missing.append(peer)
        return Gathered(branch=base.branch, round=base.round, peers=tuple(here), missing=tuple(missing))

    def _tell_soon(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            self._member.tasks.spawn(self._tell())

    async def _tell(self) -> None:
        await asyncio.sleep(TELL_S)
        self._is_telling = False
        first, mine = leader(self._member.base, Attempt(0)), self._mine()
        if first == self._member.peer:
            self.check()
        elif mine.peers or mine.missing:
            self._member.post((first,), mine)

    # --- the first leader ---

    async def _on_gathered(self, peer: PeerId, note: Gathered) -> None:
        base = self._member.base
        if (note.branch, note.round) == (base.branch, base.round + 1):
            self._early[peer] = note  # it has heard a decision that this peer has not
        elif (note.branch, note.round) == (base.branch, base.round) and peer in base.electorate:
            self._told[peer] = note
            self.check()

    def _is_gathered(self, peer: PeerId, said: Mapping[PeerId, Gathered]) -> bool:
        owners = (owner for owner in self._owners(peer) if owner != peer)
        return all(owner in said and peer in said[owner].peers for owner in owners)

    def _is_lost(self, peer: PeerId, said: Mapping[PeerId, Gathered]) -> bool:
        if not any(note.missing for note in said.values()):
            return False
        owners = [owner for owner in self._owners(peer) if owner != peer]
        return 2 * sum(owner in said and peer in said[owner].missing for owner in owners) > len(owners)

    def _owners(self, peer: PeerId) -> list[PeerId]:
        """Return who wants something of what `peer` brings, and is not away."""
        state, base = self._member.state, self._member.base
        assert state is not None
        away = state.suspected | state.gone | state.farewells.keys()
        wanted = self._parts.wanted(base, peer)
        return [owner for owner, mine in zip(base.electorate, wanted, strict=True) if mine and owner not in away]
