"""How a peer comes into a run, and back into it.

    the maker      gather: waits for newcomers, then tells all of them the run's first manifest
    a newcomer     enter: fetches the state of a member that is far ahead, or hears the first manifest
                   be_counted_in: follows the chain from outside and asks to be a member, until a manifest says so
    a straggler    catch_up: finds what was decided without it in another's chain; who is too far behind enters anew,
                   and keeps its carry where it is sure that nobody counted it
    once more      resume: back from its checkpoint, enters the run that goes on; where nobody has a state, alone

Failure:
- nobody has the state, or who has it vanishes: the next one is asked, again and again, until the peer is told to stop.
- nobody else is left: the run goes on here, as a branch of its own where others may have gone further.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

from msgspec import UNSET, UnsetType

from weft.errors import NetError, PeerError, Refused, WeftError, WireError
from weft.events import Notice, WorkDropped
from weft.ids import BranchId, Digest, PeerId, Tokens
from weft.net.membership.membership import Membership
from weft.peer.chain import RESULTS_NBYTES, Chain, Heads, branch_name, genesis, open_branch
from weft.peer.context import Context
from weft.peer.fork import ForkWatch, waits_s
from weft.peer.group.records import GroupRecords
from weft.peer.join.backpressure import Backpressure
from weft.peer.join.state_transfer import StateFetch
from weft.peer.messages import GENESIS, ChainAnswer, ChainRequest, Joining, RunBegin
from weft.peer.round.driver import Participation, RoundDriver
from weft.peer.state.carry import FORGOTTEN, OUTDATED, Carry
from weft.peer.state.legacies import Legacies
from weft.peer.state.naming import StateNaming
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import Ranking, StateClient
from weft.run.amend import first_charter
from weft.sync.proof import opened
from weft.sync.records.messages import Manifest, next_base
from weft.sync.round.rules import Durable
from weft.wire import Signed, digest_of, seal

MEET_S, NUM_LOOKS = 1.0, 10
JOINING_S = 1.0  # between two requests to be counted in
JOINING_EXPIRES_S = 5.0  # who has not asked for so long is not counted in
CALL_S = 10.0
PATIENCE_S = 30.0  # with peers that tell of a later state and do not deliver it
Found = Literal["nobody", "reached", "failed"]  # nobody has a state, has a later one, delivers it
OWN_AFTER_S: dict[Found, float] = {"nobody": JOINING_EXPIRES_S, "reached": 0.0, "failed": PATIENCE_S}
AHEAD_NBYTES = RESULTS_NBYTES // 2  # of results, that are fetched before the first of them is applied


class Entrance:
    def __init__(
        self,
        context: Context,
        membership: Membership,
        replica: Replica,
        carry: Carry,
        records: GroupRecords,
        participation: Participation,
        naming: StateNaming,
    ) -> None:
        self._naming = naming
        self._context = context
        self._node = context.node
        self._membership = membership
        self._replica = replica
        self._carry = carry
        self._records = records
        self._participation = participation
        self._asking: dict[PeerId, tuple[Digest, float]] = {}  # what each holds, and when it asked
        self._asked = asyncio.Event()
        self._client = StateClient(context.node, context.compute, context.clock)
        self._order = Ranking(context.node, membership, context.clock)
        self.fork_watch = ForkWatch(context, membership, replica, carry, participation)
        self._state_fetch = StateFetch(context, replica, self.fork_watch.beats)
        self.backpressure = Backpressure(context, replica, self._state_fetch, self.fork_watch.beats, participation)
        self.legacies = Legacies(context, replica)
        self._last_failure = ""  # why a state has not come
        self.signed_opening: Signed | None = None  # how the run began, where this process was there
        self._opening: asyncio.Queue[tuple[Manifest, Signed | UnsetType]] = asyncio.Queue(1)
        self._distrusted: set[PeerId] = set()  # who gave a false state
        self._node.on_note(Joining, self._on_joining)
        self._node.on_note(RunBegin, self._on_opening)

    def askers(self) -> list[PeerId]:
        """Return who holds a state and has asked to be counted in just now."""
        return [peer for peer in self._recent() if self._asking[peer][0] != GENESIS]

    def _recent(self) -> list[PeerId]:
        now = self._context.clock.now()
        return sorted(peer for peer, (_, at) in self._asking.items() if now - at < JOINING_EXPIRES_S)

    # --- the maker ---

    async def gather(self, wait_for: int) -> Manifest:
        """Wait until enough peers hold the initial state, and return the run's first manifest, for `begin` to tell.

        Where a peer comes that kept a state of this run, which its maker has lost, return the head of that instead.
        """
        while len(self._beginners()) + 1 < wait_for:
            self._asked.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(JOINING_S):
                    await self._asked.wait()
            if any(self.fork_watch.has_state(peer) for peer in self._node.peers):
                return await self.enter()
        electors = [self._node.peer, *self._beginners()][: self._replica.run.electors]
        opening = self._first(electors, self._node.peer)
        self._replica.begin(opening)
        return opening

    def begin(self, opening: Manifest) -> None:
        """Tell everybody named that the run has begun."""
        if opening.round or opening.leader != self._node.peer:
            return  # a run that others keep
        self.signed_opening = None if opening.entry is UNSET else seal(self._context.identity, opening)
        for member in opening.members:
            self._node.post(member, RunBegin(opening=opening, signed=self.signed_opening or UNSET))

    async def resume(self, head: Manifest, promised: Durable | None) -> Manifest:
        """Return where to go on from, back from a checkpoint: what others have reached, or `head`.

        Where no other member answers, it waits for them as long as a minority of the run waits.

        Who has said its last word in the round after `head` is no member of it any more. If the others have gone on
        from elsewhere, such a peer follows them even where `head` counts more: on its own it would split the run.
        """
        known = [peer for peer in self._node.known_addresses() if peer != self._node.peer]
        with suppress(WeftError):
            await self._node.connect_any(known)
        heads = await self._states(head)
        if not heads:
            return head if self._has_company(head) else await self._alone(head, promised)
        base = next_base(head, self._replica.charter)
        has_left = promised is not None and promised.has_left and promised.base == base
        if has_left and not await self.fork_watch.later(heads) and all(found != head for _, found in heads):
            with suppress(PeerError, NetError, Refused):
                return await self._take_over(heads)
        return await self.enter()

    def _has_company(self, head: Manifest) -> bool:
        """Return whether other members have come back with a state and, like this peer, find nobody that takes part.

        All had ended, then. Together they go on from what they hold; who is behind follows the others.
        """
        beats = [self._membership.heartbeat_of(peer) for peer in head.members if self._node.is_linked(peer)]
        return any(beat is not None and beat.manifest is not None and beat.branch == head.branch for beat in beats)

    def _patience_s(self, head: Manifest) -> float:
        """Return how long to wait for anybody; a strict run waits with its head, as any member that is left alone."""
        return waits_s(self._replica.run, head.members, self._node.peer) or 0.0

    async def _states(self, head: Manifest) -> Heads:
        """Return what linked peers hold; where nobody has a state yet, wait for other members of `head`.

        Where members have come back with theirs, all are starting just now: for them it waits a little. Whoever else is
        linked (a newcomer, somebody who looks on) is nobody to go on with.
        """
        began, wait_s, is_told = self._context.clock.now(), self._patience_s(head), False
        while True:
            heads, has_company = await self._heads(), self._has_company(head)
            waited_s = self._context.clock.now() - began
            if heads or waited_s >= (JOINING_EXPIRES_S if has_company else wait_s):
                return heads
            if not (is_told or has_company) and (waited_s >= JOINING_EXPIRES_S or not self._node.peers):
                is_told = True
                text = f"no other member answers: waiting {wait_s:.0f} s for them, then going on alone. "
                text += "Members that cannot find this peer need a fresh ticket from it (weft ticket)"
                self._context.emit(Notice(text=text))
            await asyncio.sleep(JOINING_S)

    async def _alone(self, head: Manifest, promised: Durable | None) -> Manifest:
        me, base = self._node.peer, next_base(head, self._replica.charter)
        has_gone_on = promised is not None and (
            promised.base.round > base.round or (promised.base == base and promised.accepted is not None)
        )
        if head.members == (me,) and not has_gone_on:
            return head
        if self._replica.run.is_strict and head.members != (me,):
            return head  # nothing is decided until enough have come back
        opening = open_branch(base, [me], me, branch_name(base, [me], me))
        why = "the run had gone on after this checkpoint" if has_gone_on else "no other member has come so far"
        self._context.emit(Notice(text=f"{why}: going on alone after round {head.round}"))
        await self.legacies.keep_fork()
        # What an earlier process had offered, the others may have counted: counted here, it would come back to them.
        is_doubtful = self._carry.is_restored and not self._carry.sends_gradient
        await self._settle(lambda: self._replica.apply(opening, ()), is_counted=is_doubtful, why=FORGOTTEN)
        return opening

    async def _settle(self, apply: Callable[[], None], *, is_counted: bool, why: str) -> None:
        """Go on from other parameters with what is carried, and tell what of it is dropped."""
        num_carried = self._carry.tokens
        async with self._context.learner_lock:
            await self._context.compute.serve(lambda: self._carry.settle(apply, is_counted))
        if num_dropped := num_carried - self._carry.tokens:
            self._context.emit(WorkDropped(tokens=Tokens(num_dropped), reason=why))

    def _beginners(self) -> list[PeerId]:
        return [peer for peer in self._recent() if self._asking[peer][0] == GENESIS]

    def _first(self, members: list[PeerId], founder: PeerId) -> Manifest:
        base = genesis(self._replica.run.run, founder, first_charter(self._replica.run))
        return open_branch(base, members, founder, base.branch)

    # --- a newcomer ---

    async def enter(self, *, has_own: bool = True) -> Manifest:
        """Return the head to go on from.

        That is the run's first manifest, that of a state fetched from a member, or this peer's own, where nobody has a
        later one or nobody delivers it.

        Args:
            has_own: this peer may go on from what it has; otherwise only where nobody else has anything for long.
        """
        began = self._context.clock.now()
        is_told = False
        while True:
            found = await self._from_others()
            waited_s = self._context.clock.now() - began
            own = self._replica.head if has_own or self._is_deserted(found, waited_s) else None
            if isinstance(found, Manifest):
                return found
            if own is not None and waited_s >= OWN_AFTER_S[found]:
                await self._state_fetch.forget()
                return own
            if waited_s >= PATIENCE_S and not is_told:
                is_told = True
                text = f"no linked peer has delivered a state of this run yet; still asking{self._last_failure}"
                self._context.emit(Notice(text=text))
            if found == "nobody":
                self._ask(BranchId(self._replica.run.run), GENESIS)
            with suppress(TimeoutError):
                async with asyncio.timeout(JOINING_S):
                    opening, signed = await self._opening.get()
                    if self._replica.head is None and self._node.peer in opening.members:
                        self._replica.begin(opening)
                        self.signed_opening = signed or None
                        await self._state_fetch.forget()
                        return opening

    def _is_deserted(self, found: Manifest | Found, waited_s: float) -> bool:
        """Return whether nobody is left who has a state, so that this peer's, which others called false, is the only
        one."""
        head = self._replica.head
        return head is not None and found == "nobody" and waited_s >= max(self._patience_s(head), PATIENCE_S)

    async def _meet(self) -> None:
        """Wait a moment for links: those to all others come up right after the first."""
        known = set(self._node.known_addresses()) - {self._node.peer}
        for _ in range(NUM_LOOKS):
            if known <= set(self._node.peers):
                return
            await asyncio.sleep(MEET_S / NUM_LOOKS)

    async def _from_others(self) -> Manifest | Found:
        """Take over the furthest state that peers deliver, or tell why there is none."""
        if self._replica.head is None and await self._heads():
            await self._meet()  # more who have it
        heads = await self._heads()
        later = await self.fork_watch.later(heads)
        if not later:
            return "reached" if heads else "nobody"
        try:
            return await self._take_over([each for each in later if each[0] not in self._distrusted] or later)
        except (PeerError, NetError, Refused) as error:
            self._last_failure = f": {error}"
            return "failed"

    def distrust(self, donors: Iterable[PeerId]) -> None:
        """Ask these for a state only where nobody else has one: what they gave is not the run's."""
        self._distrusted |= set(donors)

    async def be_counted_in(self, rounds: RoundDriver) -> None:
        """Ask every member to count this peer in, and follow the chain meanwhile: one turn of it.

        Who is far behind does not ask: a leader that replays what was decided before would keep the others waiting.
        """
        head = rounds.chain.head
        if len(head.members) < rounds.chain.charter.electors and self.backpressure.is_near:
            self._ask(head.branch, digest_of(head))
        await asyncio.sleep(JOINING_S / 2)
        if not await self.catch_up(rounds):
            rounds.restart(await self.enter(), self._replica.charter)
        elif rounds.chain.head == head and not rounds.is_member:
            rounds.begin()  # it had given a round up that nobody is further than any more

    async def _heads(self) -> Heads:
        """Return which linked peers have a state, and whose it is: the furthest first, who just failed last."""
        asked = self._order.furthest_first()
        heads: list[tuple[PeerId, Manifest]] = []
        for peer, answer in (await self._client.ask(asked)).items():
            if isinstance(answer, str):
                self._order.note_failure(peer)
            elif answer.head is not None:
                heads.append((peer, answer.head))

        def order(each: tuple[PeerId, Manifest]) -> tuple[bool, int, int, BranchId, PeerId]:
            peer, head = each
            return self._order.has_failed(peer), -head.committed_tokens, -head.round, head.branch, peer

        return sorted(heads, key=order)

    async def _take_over(self, heads: Heads) -> Manifest:
        before = self._replica.head
        try:
            head, charter, vectors = await self._state_fetch.fetch(heads)
        except (PeerError, NetError, Refused):
            self._order.note_failure(*self._state_fetch.failed)
            raise
        if before is not None and before.branch != head.branch:
            text = (
                f"the others went on apart from this peer: it takes over their state of round {head.round}, in place "
            )
            self._context.emit(Notice(text=f"{text}of its own of round {before.round}"))
        # Members may offer an older state, pinned for another. Rounds that count this peer come by again then, and what
        # it has trained since cannot be told from what they count.
        is_back = before is not None and before.branch == head.branch and before.round > head.round
        is_lost = self._carry.tokens > 0 and (is_back or await self._may_be_counted(head))
        mine, chain = self._replica.head, self._participation.chain
        proof = None if mine is None or chain is None else chain.certificate(mine)
        await self.legacies.depart(head, charter, proof)
        load = lambda: self._replica.load(head, charter, vectors)  # noqa: E731
        await self._settle(load, is_counted=is_lost, why=FORGOTTEN if is_lost else OUTDATED)
        self._naming.came_from(self._state_fetch.donors)
        return head

    async def _may_be_counted(self, until: Manifest) -> bool:
        """Return whether the carry may be in a manifest up to `until` that this peer has not seen."""
        head = self._replica.head
        if head is None or (self._carry.offered is None and not self._carry.is_restored):
            return False
        # What this process offered can only be in the next round; what one before it saved, in any.
        last = until.round if self._carry.is_restored else head.round + 1
        chain, know_of_none = Chain(head, self._replica.charter), set[PeerId]()
        for peer in self._order.furthest_first():
            with suppress(PeerError, NetError, Refused):
                while chain.head.round < last:
                    request = ChainRequest(branch=head.branch, after=chain.head.round)
                    answer = await self._node.call(peer, request, ChainAnswer, deadline_s=CALL_S)
                    before = chain.head
                    for certificate in answer.certificates or ():
                        if chain.proven(certificate):
                            chain.append(certificate)
                            if await self._records.counts(certificate.manifest):
                                return True
                    if chain.head == before:
                        if answer.certificates == () and self.fork_watch.has_left(peer, head.branch):
                            know_of_none.add(peer)
                        break
        # A round that was decided somebody decided: where all have left its branch and remember it, it was not.
        is_undecided = know_of_none >= set(head.members) - {self._node.peer} and not self._carry.is_restored
        return chain.head.round < last and not is_undecided

    # --- a straggler ---

    async def catch_up(self, rounds: RoundDriver) -> bool:
        """Follow what was decided without this peer; return False where others are too far ahead to replay it."""
        head = rounds.chain.head
        is_too_far = False
        ahead = self.fork_watch.ahead(head)
        for peer in self._order.furthest_first():
            if peer not in ahead:
                continue
            request = ChainRequest(branch=head.branch, after=head.round)
            answer = await self._node.ask(peer, request, ChainAnswer, deadline_s=CALL_S)
            if answer is None:
                self._order.note_failure(peer)
                continue
            if rounds.chain.head != head:
                return True  # heard meanwhile
            # No more than is kept until the outer steps are made: what had to give way would be fetched again.
            most = max(1, AHEAD_NBYTES // max(self._replica.result_nbytes, 1))
            if sum(rounds.follow(certificate) for certificate in (answer.certificates or ())[:most]):
                return True
            is_too_far = is_too_far or await self.fork_watch.is_too_far(peer, head, answer)
        return not is_too_far

    # --- what others say ---

    async def _on_joining(self, peer: PeerId, joining: Joining) -> None:
        self._asking = {each: self._asking[each] for each in self._recent()}
        self._asking[peer] = (joining.manifest, self._context.clock.now())
        self._asked.set()
        rounds = self._participation.rounds
        is_state = joining.manifest != GENESIS  # what it asked for before the run began counts no more
        if rounds is not None and is_state and joining.branch == rounds.chain.head.branch:
            rounds.notice(peer, "joining")

    async def _on_opening(self, peer: PeerId, begin: RunBegin) -> None:
        is_wanted = self._replica.head is None and self._node.peer in begin.opening.members and self._opening.empty()
        if not is_wanted or begin.opening != self._first(list(begin.opening.members), peer):
            return
        if begin.opening.entry is UNSET or self._is_signed(begin):
            self._opening.put_nowait((begin.opening, begin.signed))

    def _is_signed(self, begin: RunBegin) -> bool:
        """Return whether its sender has signed it, so that this peer can show others how the run began."""
        with suppress(WireError):
            return begin.signed is not UNSET and opened(self._replica.run.run, begin.signed) == begin.opening
        return False

    # --- small things ---

    def _ask(self, branch: BranchId, manifest: Digest) -> None:
        for peer in sorted(self._node.peers):
            self._node.post(peer, Joining(branch=branch, manifest=manifest))
