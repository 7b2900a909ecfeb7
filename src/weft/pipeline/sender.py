"""Sends micro-batches to a stage, and accepts one gradient of each.

    sender = Sender(link, 2, router, clock)
    returned = await sender.send(batch, given, is_first=True)      # the gradient of what was sent, and the loss

A member that cannot take it, that goes, answers with an error or says nothing for too long is left for another one: the
next attempt. What the first has done may still come, and whichever gradient comes first is accepted. Each attempt hears
what became of it, as often as it asks; only one hears that it counts.

Whose queue is empty is not known here. So two members are asked first to take it only if nothing waits for them, the
second if it is about as fast, and then one lets it wait. Who refuses at once was not sent it: that is no attempt.

Failure:
- a call or its answer is lost: it is said again to the same member, who knows what it has taken already.
- nobody takes it: it waits until somebody may.
- a member that delivers other bytes than it named, or signs something else than it was sent: the next attempt.

An `Origin` begins micro-batches, and keeps so many on their way that no stage waits.

    origin = Origin(peer, sender, num_stages=3, first=...)
    returned = await origin.begin(given)       # as many at once as are asked; some of them wait

In a pipeline of S stages 1F1B has S micro-batches on their way for each peer of the first. Here one more each travels
between any two, for links take time, and queues level out what peers do not.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET, UnsetType

from weft.clock import Clock
from weft.errors import ConfigError, DeadlineExceeded, NetError, NotFinite, PeerError, Refused
from weft.ids import PeerId
from weft.pipeline.device import Given
from weft.pipeline.exactly_once import Attempt, BatchId
from weft.pipeline.link import Parcel, StageLink
from weft.pipeline.messages import Backward, Computed, Forward, GivenUp, IsTaken, Verdict
from weft.pipeline.routing import Failure, Pace, Reserved, Router
from weft.pipeline.witness import Witness
from weft.rng import order_key
from weft.tasks import Tasks
from weft.wire import Buffer, Signed

CALL_S = 10.0  # that the answer to a call may take, beside what it makes the other side fetch
NUM_CALLS = 2  # of one attempt: what was lost once is said again
PATIENCE_S = 120.0  # for a gradient, of who is still linked: at least
PATIENT = 4.0  # as many times what gradients take to come back, at least: stages may be slow, and have queues
NUM_ASKED = 2  # members that are asked first to take a micro-batch only if nothing else waits for them
SLOWER = 2.0  # times at most that another is slower than who has something waiting: else it is better to wait, too
LOOK_S = 1.0  # until it is looked again whether somebody takes what nobody takes
MAX_REMEMBERED = 1 << 16  # attempts whose end is known

EncodeFor = Callable[[PeerId], Awaitable[Parcel]]


@dataclass(frozen=True)
class Returned:
    """What came back for a micro-batch."""

    gradient: Buffer | None  # of what was sent, encoded; None: that was tokens
    loss: float
    member: PeerId  # whose it is
    passage: Signed | UnsetType = UNSET  # what it has signed of that, where others look at it


@dataclass
class _Sent:
    batch: BatchId
    is_first: bool
    returned: "asyncio.Future[Returned]"
    trials: dict[Attempt, "_Trial"] = field(default_factory=dict)
    num_queued: int = 0  # members that have not taken it, because others wait for them
    most_s: float = math.inf  # per sample, that others may take for whom it is not left with those
    accepted: Attempt | None = None
    given: dict[PeerId | None, Parcel] = field(default_factory=dict)  # what a member may fetch; None: all may


@dataclass
class _Trial:
    sent: _Sent
    peer: PeerId
    nbytes: int  # of the gradient
    reserved: Reserved | None  # None: settled, or failed
    given_up: "asyncio.Future[None]"  # by the member
    began: float
    request: Forward | None = None  # as it was sent


class Sender:
    """From one peer to the members of a stage.

    Args:
        router: chooses among its members.
        witness: checks and tells what they sign; None: nobody looks at what they compute.
    """

    def __init__(
        self,
        link: StageLink,
        stage: int,
        router: Router,
        clock: Clock,
        *,
        patience_s: float = PATIENCE_S,
        witness: Witness | None = None,
    ) -> None:
        self._witness = witness
        self._link = link
        self._stage = stage
        self._router = router
        self._clock = clock
        self._patience_s = patience_s
        self._return = Pace()
        self._tasks = Tasks()
        self._trials: dict[Attempt, _Trial] = {}
        self._ended: dict[Attempt, bool] = {}  # whether it was accepted; the oldest first
        self._num_sent = 0
        self.num_again = 0  # attempts after the first of a micro-batch
        link.hold(stage, Backward, self.on_backward)
        link.hold(stage, Computed, self.on_computed)
        link.hold(stage, GivenUp, self.on_given_up)

    async def send(
        self, batch: BatchId, given: Given, gradient_nbytes: int, *, is_first: bool, encode: EncodeFor | None = None
    ) -> Returned:
        """Have a micro-batch computed from here on, by whoever can.

        Args:
            gradient_nbytes: how long the gradient of what is sent is.
            is_first: nobody was sent this micro-batch before, in any stage, whom it was not taken from.
            encode: makes the activations for a member; None: those of `given` are for all.
        """
        sent = _Sent(batch, is_first, asyncio.get_running_loop().create_future())
        if given.activations is not None:
            self._give(sent, None, given.activations)
        try:
            left: set[PeerId] = set()
            while not sent.returned.done():
                reserved = self._router.reserve(given.num_samples, self._clock.now(), left, sent.most_s)
                if reserved is None:
                    left.clear()
                    sent.most_s = math.inf
                    if not 0 < sent.num_queued < NUM_ASKED:
                        await asyncio.wait([sent.returned], timeout=LOOK_S)
                    sent.num_queued = NUM_ASKED
                    continue
                attempt = self._attempt(sent)
                given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                trial = _Trial(sent, reserved.peer, gradient_nbytes, reserved, given_up, self._clock.now())
                sent.trials[attempt] = self._trials[attempt] = trial
                trying = self._tasks.spawn(self._try(attempt, trial, given, encode))
                ends: list[asyncio.Future[Any]] = [sent.returned, trying]
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    trying.cancel()
                left.add(trial.peer)
            return sent.returned.result()
        finally:
            self._close(sent)

    async def on_backward(self, peer: PeerId, note: Backward) -> Verdict:
        """Accept a gradient, or say what became of it.

        Raises:
            PeerError: it could not be fetched.
        """
        attempt = Attempt.of(note)
        if (is_accepted := self._ended.get(attempt)) is not None:
            return Verdict(word="accepted" if is_accepted else "refused")
        trial = self._trials.get(attempt)
        if trial is None or trial.peer != peer:
            return Verdict(word="unknown")
        sent = trial.sent
        if sent.accepted is None and not self._is_sound(peer, trial, note):
            return Verdict(word="refused")
        if sent.accepted is None:
            back = None
            if note.gradient is not None:
                back = await self._link.fetch(peer, note.gradient, trial.nbytes)
            # Another's may have come meanwhile.
            if sent.accepted is None:
                sent.accepted = attempt
                self._return.measured(self._clock.now() - trial.began)
                if not sent.returned.done():
                    gradient = None if back is None else back.data
                    sent.returned.set_result(Returned(gradient, note.loss, peer, note.passage))
                if self._witness is not None and note.passage and trial.request is not None:
                    await self._witness.tell(note.passage, trial.request, sent.given.get(None), back)
        return Verdict(word="accepted" if sent.accepted == attempt else "refused")

    def _is_sound(self, peer: PeerId, trial: _Trial, note: Backward) -> bool:
        """Return whether a member has signed what it sends back; leave it for another one where it has not."""
        witness, request = self._witness, trial.request
        if witness is None or request is None or request.is_measured:
            return True
        if (why := witness.why_not(peer, request, note)) is None:
            return True
        if not trial.given_up.done():
            trial.given_up.set_result(None)
            witness.refuse(peer, self._stage, why)
        return False

    async def on_computed(self, peer: PeerId, note: Computed) -> None:
        """Take up a receipt."""
        trial = self._trials.get(Attempt.of(note))
        if trial is not None and trial.peer == peer and trial.reserved is not None:
            self._router.settled(trial.reserved, self._clock.now())
            trial.reserved = None

    async def on_given_up(self, peer: PeerId, note: GivenUp) -> None:
        """Try another member."""
        trial = self._trials.get(Attempt.of(note))
        if trial is not None and trial.peer == peer and not trial.given_up.done():
            trial.given_up.set_result(None)

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def _attempt(self, sent: _Sent) -> Attempt:
        """Return the next attempt's name. No other has it, whoever else sends the same micro-batch."""
        if sent.is_first and not sent.trials:
            return Attempt(sent.batch, 0)
        self._num_sent += 1
        self.num_again += 1
        number = order_key("attempt", self._link.me, *sent.batch, self._num_sent)
        return Attempt(sent.batch, int(number[:15], 16) | 1)

    async def _try(self, attempt: Attempt, trial: _Trial, given: Given, encode: EncodeFor | None) -> None:
        """Return once another member should be tried."""
        why = Failure.ERROR
        try:
            if encode is not None:
                if trial.peer not in trial.sent.given:
                    self._give(trial.sent, trial.peer, await encode(trial.peer))
                given = replace(given, activations=trial.sent.given[trial.peer])
            why = await self._why_not(attempt, trial, given)
        except (NotFinite, ConfigError):  # it cannot be encoded; told where it was computed
            pass
        now = self._clock.now()
        self._router.failed(trial.reserved or Reserved(trial.peer, 0, 0, now), why, now)
        trial.reserved = None

    async def _why_not(self, attempt: Attempt, trial: _Trial, given: Given) -> Failure:
        parted = asyncio.ensure_future(self._link.until_parted(trial.peer))
        try:
            why = await self._handed(attempt, trial, given)
            if why is not None:
                return why
            ends: list[asyncio.Future[None]] = [parted, trial.given_up]
            patience_s = max(self._patience_s, PATIENT * self._return.mean if self._return.is_known else 0.0)
            await asyncio.wait(ends, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            return Failure.ERROR if trial.given_up.done() else Failure.UNREACHABLE
        finally:
            parted.cancel()

    async def _handed(self, attempt: Attempt, trial: _Trial, given: Given) -> Failure | None:
        """Return once the member has taken it, or why it has not."""
        may_wait = trial.sent.num_queued >= min(NUM_ASKED, len(self._router.peers) - 1)
        request = Forward(
            **attempt.at(self._stage),
            num_samples=given.num_samples,
            tokens=given.tokens,
            activations=None if given.activations is None else given.activations.digest,
            round=given.step.round,
            step=given.step.number,
            is_measured=given.is_measured,
            may_wait=may_wait,
        )
        trial.request = request
        for number in range(NUM_CALLS):
            began = self._clock.now()
            try:
                answer = await self._link.call(trial.peer, request, IsTaken, deadline_s=CALL_S)
            except DeadlineExceeded:
                continue
            except (NetError, Refused):
                return Failure.UNREACHABLE
            except PeerError:
                return Failure.ERROR if self._link.is_linked(trial.peer) else Failure.UNREACHABLE
            self._router.answered(trial.peer, self._clock.now() - began)
            if answer.is_taken:
                return None
            if number == 0:  # nothing of it is on its way any more: as if it had not been sent
                del trial.sent.trials[attempt], self._trials[attempt]
            if may_wait:
                return Failure.BUSY
            trial.sent.num_queued += 1
            if trial.peer in self._router.peers:
                trial.sent.most_s = min(trial.sent.most_s, SLOWER * self._router.pace_of(trial.peer))
            return Failure.QUEUED
        return Failure.UNREACHABLE

    def _give(self, sent: _Sent, peer: PeerId | None, what: Parcel) -> None:
        sent.given[peer] = what
        self._link.give(what)

    def _close(self, sent: _Sent) -> None:
        for what in sent.given.values():
            self._link.take_back(what.digest)
        for attempt in sent.trials:
            del self._trials[attempt]
            self._ended[attempt] = attempt == sent.accepted
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.pop(next(iter(self._ended)))


PER_STAGE = 2  # micro-batches on their way


class Origin:
    """Of one member of the first stage.

    Args:
        sender: to the first stage.
        first: number of its first micro-batch: no process of this peer has begun one so high.
    """

    def __init__(self, me: PeerId, sender: Sender, num_stages: int, first: int) -> None:
        self._me = me
        self._sender = sender
        self._next = first
        self._room = asyncio.Semaphore(PER_STAGE * num_stages)

    async def begin(self, given: Given) -> Returned:
        """Have a micro-batch computed and counted by all stages; wait for room before."""
        async with self._room:
            batch, self._next = BatchId(self._me, self._next), self._next + 1
            return await self._sender.send(batch, given, 0, is_first=True)
