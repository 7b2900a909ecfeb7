"""A newcomer whose line is slower than the run asks to be waited for (`Backpressure`); members wait (`Hold`).

    watch     every second: what came, and what the run has added
    tell      a newcomer, once, both figures and what to do about it, where its line is slower than the run; and once
              more when it is in and falls behind again
    ask       where its person wants that (`PeerConfig.is_blocking`): members are asked, every 2 s, to announce nothing

Asked are the members that the manifest names whose state this peer fetches or holds. As soon as half of them decline,
the others are let go: alone they should not wait. They are asked again after a minute, since one who has just waited
for another newcomer rests.

`CatchUp` tells whether it can ever catch up, `Lag` how far it is behind. It needs the state, and of each round that is
committed while it fetches, the results. Where the results alone are as many as what reaches it, it never is done,
however long it goes on.

Members wait where `HoldRule` says so:

    newcomer --BlockPlease--> members, every 2 s     I am not in: announce nothing
    member   trains its lease, and then waits before it announces

Nothing of consensus waits: a round of which no quorum has announced is one in which everybody still trains. So a block
is in force as long as a majority keeps it. Who waits and hears that a quorum has announced all the same goes on, too,
and who never heard of the newcomer, or does not want to wait, is slowed down by the others only.

They wait for one at a time, and not for long:

    nobody ──asks──► waiting for one ──in, gone, silent, too slow, or too long──► nobody, for a while

Whoever is admitted may ask, also under a key made for it, so all bounds but one are on what this peer gives and not on
who asks: `longest_s` of one block, and after it nine times as long without any. So at most a tenth of its time is spent
waiting, whoever comes. The one is for fairness: a key is waited for once a day.

`HoldRule`, `CatchUp` and `Lag` are pure: they are told the time.

Failure:
- this process ends while members wait: they notice its silence.
- nobody waits: this peer goes on as slowly as it did; an event says who declined, and why.
- the newcomer is gone, or falls silent: rounds go on, at the latest after `SILENT_S`.
- it is never in: rounds go on after the longest time that this machine waits.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median_low

from weft.errors import NetError, PeerError, Refused
from weft.events import JoinTooSlow, Notice, RunBlocked, RunUnblocked
from weft.ids import PeerId
from weft.net.blobs.bulk import SHARE
from weft.peer.context import Context
from weft.peer.join.state_transfer import Beats, StateFetch
from weft.peer.messages import BlockAnswer, BlockPlease
from weft.peer.round.driver import Participation
from weft.peer.state.replica import Replica
from weft.sync.records.messages import Manifest

SILENT_S = 8.0  # without a request: as long as a killed peer is taken for a member
REST = 9.0  # times as long as a block lasted there is none after it
LEAST_REST_S = 60.0
DAY_S = 86_400.0  # between two blocks of one key
TRIAL_S = 60.0  # rounds that exchanged when it began have ended, and what a newcomer measures is what its line can do


@dataclass(frozen=True)
class Ended:
    """A block that is over."""

    peer: PeerId
    lasted_s: float
    reason: str


@dataclass(frozen=True)
class _Hold:
    peer: PeerId
    began: float
    asked_at: float


class HoldRule:
    """Of one peer.

    Args:
        longest_s: seconds of one block, at most; 0: it waits for nobody.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._now: _Hold | None = None
        self._ended: list[Ended] = []
        self._rests_until = float("-inf")
        self._blocked_at: dict[PeerId, float] = {}  # within a day: some thousand at most, as each is followed by a rest

    def by(self, now: float) -> PeerId | None:
        """Return for whom rounds wait."""
        self._look(now)
        return None if self._now is None else self._now.peer

    def ask(self, peer: PeerId, needs_s: float, now: float) -> str:
        """Take up a newcomer's request; return why rounds do not wait for it, or nothing where they do.

        Args:
            needs_s: as long it would take by its own account.
        """
        self._look(now)
        if self._now is not None and self._now.peer == peer:
            self._now = replace(self._now, asked_at=now)
            left_s = self._now.began + self._longest_s - now
            if now - self._now.began >= TRIAL_S and needs_s > left_s:
                reason = f"it would take {needs_s:.0f} s more, and this machine waits at most {left_s:.0f} s more"
                self._end(now, reason)
                return reason
            return ""
        reason = self._why_not(peer, needs_s, now)
        if not reason:
            self._now = _Hold(peer, began=now, asked_at=now)
        return reason

    def end(self, peer: PeerId, reason: str, now: float) -> None:
        """Note that nobody need wait for `peer` any more."""
        self._look(now)
        if self._now is not None and self._now.peer == peer:
            self._end(now, reason)

    def take_ended(self, now: float) -> list[Ended]:
        """Return the blocks that ended since this was last called."""
        self._look(now)
        ended, self._ended = self._ended, []
        return ended

    def _why_not(self, peer: PeerId, needs_s: float, now: float) -> str:
        if self._longest_s <= 0:
            return "this machine waits for nobody"
        if self._now is not None:
            return "it waits for another newcomer"
        if now < self._rests_until:
            return f"it has waited for one, and waits again in {self._rests_until - now:.0f} s at the earliest"
        if peer in self._blocked_at:
            return "it has already waited for this key in the last day"
        if needs_s > SHARE * self._longest_s:  # beside rounds it may have had one part in so many of the members' lines
            return f"it would take {needs_s:.0f} s, and this machine waits at most {self._longest_s:.0f} s"
        return ""

    def _look(self, now: float) -> None:
        self._blocked_at = {peer: at for peer, at in self._blocked_at.items() if now - at < DAY_S}
        if self._now is None:
            return
        silent_at, late_at = self._now.asked_at + SILENT_S, self._now.began + self._longest_s
        if now >= min(silent_at, late_at):
            is_silent = silent_at < late_at
            reason = "it fell silent" if is_silent else f"{self._longest_s:.0f} s are over, and it has not caught up"
            self._end(min(silent_at, late_at), reason)

    def _end(self, at: float, reason: str) -> None:
        assert self._now is not None
        lasted_s = at - self._now.began
        self._ended.append(Ended(self._now.peer, lasted_s, reason))
        self._blocked_at[self._now.peer] = self._now.began
        self._rests_until = at + max(REST * lasted_s, LEAST_REST_S)
        self._now = None


BLOCK_LOOK_S = 0.5  # between two looks whether there is still something to wait for


class Hold:
    def __init__(self, context: Context, participation: Participation) -> None:
        self._clock = context.clock
        self._emit = context.emit
        self._participation = participation
        self._longest_s = context.settings.max_blocked_s
        self._blocks = HoldRule(self._longest_s)
        self._news = asyncio.Event()
        context.node.serve(BlockPlease, self._consider)

    async def passed(self, is_moot: Callable[[], bool]) -> None:
        """Return once no newcomer is waited for, or as soon as `is_moot` says that waiting is of no use."""
        while self._blocks.by(self._clock.now()) is not None and not is_moot():
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(BLOCK_LOOK_S):
                    await self._news.wait()
        self._tell()

    def forget(self, peer: PeerId) -> None:
        self._end(peer, "it is gone")

    async def _consider(self, peer: PeerId, please: BlockPlease) -> BlockAnswer:
        if not please.needs_s:
            self._end(peer, "it has caught up")
            return BlockAnswer(is_given=False)
        if not self._participation.is_member:  # its waiting means nothing
            return BlockAnswer(is_given=False, reason="it takes no part in rounds itself")
        now = self._clock.now()
        before, reason = self._blocks.by(now), self._blocks.ask(peer, please.needs_s, now)
        self._tell()
        if not reason and before != peer:
            self._emit(RunBlocked(by=peer, needs_s=please.needs_s, longest_s=self._longest_s))
        return BlockAnswer(is_given=not reason, reason=reason)

    def _end(self, peer: PeerId, reason: str) -> None:
        self._blocks.end(peer, reason, self._clock.now())
        self._tell()

    def _tell(self) -> None:
        for ended in self._blocks.take_ended(self._clock.now()):
            self._emit(RunUnblocked(by=ended.peer, blocked_s=ended.lasted_s, reason=ended.reason))
            self._news.set()


TELL_AFTER_S, TELL_AFTER_ROUNDS = 20.0, 3  # before that a pace is luck
RECENT_S = 15.0  # what is said of the near future is by these last seconds


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A newcomer's line and its run."""

    received_bps: float  # by this machine
    added_bps: float  # by the run's results


class CatchUp:
    """Of one newcomer.

    Args:
        result_nbytes: what one round adds.
    """

    def __init__(self, result_nbytes: int) -> None:
        self._result_nbytes = result_nbytes
        self._recent: deque[tuple[float, int]] = deque()  # when, and received up to then
        self._last: tuple[float, int, int] | None = None  # when, round, received up to then
        self._passed_s = 0.0
        self._received_nbytes = 0
        self._num_rounds = 0

    def look(self, now: float, round: int, received_nbytes: int, *, is_fetching: bool) -> None:
        """Take up how things stand.

        Args:
            round: the latest of the run.
            received_nbytes: by this machine up to now, whatever it is.
            is_fetching: since the last look, so that what it received says what its line can do.
        """
        if self._last is not None and is_fetching:
            at, before, received = self._last
            self._passed_s += now - at
            self._num_rounds += max(round - before, 0)
            self._received_nbytes += received_nbytes - received
        self._last = now, round, received_nbytes
        self._recent.append((now, received_nbytes))
        while now - self._recent[0][0] > RECENT_S:
            self._recent.popleft()

    def too_slow(self) -> Figures | None:
        """Return both figures where the line is no faster than the run; None: it is, or that cannot be said yet."""
        if self._passed_s < TELL_AFTER_S or self._num_rounds < TELL_AFTER_ROUNDS:
            return None
        figures = Figures(
            received_bps=8 * self._received_nbytes / self._passed_s,
            added_bps=8 * self._result_nbytes * self._num_rounds / self._passed_s,
        )
        return figures if figures.received_bps <= figures.added_bps else None

    def needs_s(self, left_nbytes: int) -> float:
        """Return how long so many bytes take at what came lately; infinite where nothing did."""
        if not left_nbytes:
            return 0.0
        (since, before), (now, received) = self._recent[0], self._recent[-1]
        come = received - before
        return left_nbytes * (now - since) / come if come > 0 else float("inf")


class Lag:
    """For how long the oldest round that a peer lacks has been known to it.

    In seconds, since rounds of some runs take tenths of them, and what others tell of theirs is two seconds old.
    """

    def __init__(self) -> None:
        self._lacking: deque[tuple[int, float]] = deque()  # a round, and when it was first heard of; ascending

    def note(self, reached: int, latest: int, now: float) -> None:
        """Take up which round this peer has reached, and the latest that others tell of."""
        while self._lacking and self._lacking[0][0] <= reached:
            self._lacking.popleft()
        while self._lacking and self._lacking[-1][0] > latest:  # of a branch that was left, or nobody tells of it now
            self._lacking.pop()
        if latest > max(reached, self._lacking[-1][0] if self._lacking else reached):
            self._lacking.append((latest, now))

    def lasts_s(self, reached: int, now: float) -> float:
        """Return it, for a peer that has reached a round; 0 where it lacks none."""
        return next((now - at for round, at in self._lacking if round > reached), 0.0)


LOOK_S = 1.0
ASK_S = 2.0  # between two requests: several are lost before members take this peer for silent
AGAIN_S = 60.0
CALL_S = 5.0
NOTHING = -1  # before the first round
NEAR_S = 5.0  # heartbeats come every 2 s, and the results of a round take a moment


class Backpressure:
    """Of one peer.

    Args:
        beats: returns what linked peers told last.
    """

    def __init__(
        self, context: Context, replica: Replica, state_fetch: StateFetch, beats: Beats, participation: Participation
    ) -> None:
        self._node = context.node
        self._clock = context.clock
        self._emit = context.emit
        self._is_blocking = context.settings.is_blocking
        self._replica = replica
        self._state_fetch = state_fetch
        self._beats = beats
        self._participation = participation
        self._pace = CatchUp(replica.result_nbytes)
        self._lag = Lag()
        self._is_in = False  # it has been in sync: a newcomer no more
        self._is_told = False
        self._asks_at = float("inf")  # when members are asked next
        self._waiting: set[PeerId] = set()  # who waits for this peer
        self._last_refusal = ""

    @property
    def is_near(self) -> bool:
        """Whether this peer lacks at most what was committed just now: who lacks more is of no use as a member."""
        return self._lag.lasts_s(self._reached(), self._clock.now()) < NEAR_S

    async def watch(self) -> None:
        """Watch the line. Run until cancelled."""
        while True:
            self._lag.note(self._reached(), self._latest(), self._clock.now())
            if not self._is_in and self._is_in_sync():
                await asyncio.sleep(LOOK_S)  # so that its request to be counted in is there first
                await self._let_go()
                self._enter()
            self._look()
            if not self._is_in and self._clock.now() >= self._asks_at:
                await self._ask_to_wait()
            await asyncio.sleep(LOOK_S)

    def _enter(self) -> None:
        """Be a newcomer no more; who was told that its line is too slow is watched on, and told once more."""
        self._is_in = True
        self._is_told = not self._is_told
        self._pace = CatchUp(self._replica.result_nbytes)

    def _look(self) -> None:
        if self._is_in and self._is_told:
            return
        _, received = self._node.moved
        is_fetching = self._is_behind() if self._is_in else self._is_fetching()
        self._pace.look(self._clock.now(), self._latest(), received, is_fetching=is_fetching)
        figures = None if self._is_told else self._pace.too_slow()
        if figures is not None:
            self._is_told = True
            needs_s = self._needs_s()
            self._emit(
                JoinTooSlow(
                    received_bps=figures.received_bps,
                    added_bps=figures.added_bps,
                    needs_s=needs_s,
                    is_blocking=self._is_blocking and not self._is_in,
                    is_in=self._is_in,
                )
            )
            if self._is_blocking and not self._is_in:
                self._asks_at = self._clock.now()

    def _needs_s(self) -> int:
        return max(1, round(min(self._pace.needs_s(self._left_nbytes()), DAY_S)))

    async def _ask_to_wait(self) -> None:
        members = self._members()
        answers = await self._ask(members, self._needs_s())
        self._waiting |= {peer for peer, refusal in answers.items() if not refusal}
        refusals = {peer: refusal for peer, refusal in answers.items() if refusal}
        if 2 * len(refusals) < len(members):
            self._asks_at = self._clock.now() + ASK_S
            return
        await self._let_go()
        self._asks_at = self._clock.now() + AGAIN_S
        said = f"members do not wait for this machine ({len(refusals)} of {len(members)}): "
        said += "; ".join(sorted(set(refusals.values())))
        if said != self._last_refusal:
            self._last_refusal = said
            self._emit(Notice(text=said))

    async def _let_go(self) -> None:
        waiting, self._waiting = sorted(self._waiting), set()
        await self._ask(waiting, 0)

    async def _ask(self, members: Sequence[PeerId], needs_s: int) -> dict[PeerId, str]:
        """Return why each of `members` does not wait for this peer; nothing: it does."""
        please = BlockPlease(needs_s=needs_s)
        asked: list[Awaitable[str]] = [self._ask_one(peer, please) for peer in members]
        return dict(zip(members, await asyncio.gather(*asked), strict=True))

    async def _ask_one(self, peer: PeerId, please: BlockPlease) -> str:
        try:
            answer = await self._node.call(peer, please, BlockAnswer, deadline_s=CALL_S)
        except (PeerError, NetError, Refused) as error:
            return str(error)
        return "" if answer.is_given else answer.reason or "it declines"

    # --- how far this peer has come ---

    def _latest(self) -> int:
        """Return the round that most linked members have reached, on this peer's branch: one may claim anything."""
        head = self._head()
        told = [(peer, beat) for peer, beat in self._beats().items() if beat.manifest is not None]
        if head is not None:
            told = [(peer, beat) for peer, beat in told if peer in head.members and beat.branch == head.branch]
        return median_low(beat.round for _, beat in told) if told else NOTHING

    def _head(self) -> Manifest | None:
        """Return the manifest whose state is coming, or else of what is here."""
        partial = self._state_fetch.under_way
        return self._replica.head if partial is None else partial.head

    def _reached(self) -> int:
        return NOTHING if self._replica.head is None else self._replica.head.round

    def _is_in_sync(self) -> bool:
        rounds, head = self._participation.rounds, self._replica.head
        return rounds is not None and head is not None and head == rounds.chain.head and self.is_near

    def _is_fetching(self) -> bool:
        rounds = self._participation.rounds
        return self._state_fetch.under_way is not None or (
            rounds is not None and rounds.chain.head != self._replica.head
        )

    def _is_behind(self) -> bool:
        """Return whether who was in lacks bytes, and for long: before that its line need not have been busy."""
        rounds = self._participation.rounds
        if rounds is None or self.is_near:
            return False
        return self._state_fetch.under_way is not None or not rounds.parts.has_results(rounds.chain.head)

    def _left_nbytes(self) -> int:
        partial, head = self._state_fetch.under_way, self._head()
        if head is None:
            return sum(4 * vector.numel() for vector in self._replica.vectors().values())
        num_rounds = max(self._latest() - head.round, 0)
        return (0 if partial is None else partial.missing_nbytes) + num_rounds * self._replica.result_nbytes

    def _members(self) -> list[PeerId]:
        head = self._head()
        members = self._node.peers if head is None else head.members
        return [peer for peer in members if peer != self._node.peer]
