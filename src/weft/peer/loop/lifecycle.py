"""How a peer ends (`Shutdown`), and how it pauses (`Pause`).

Its end: why it is told to stop, waiting that ends then, and its last words, in its round and to all linked.

    complete, or asked to leave     the word in the round first, then goodbye
    a step goes on for `SLOW_S`     both, before the step has ended
    something broke here            what of both can still be said: nobody need wait until this peer is suspected

The word in the round is on disk before it is sent, so it is left out where the disk does not take it.

Its pause: who wants it, and the way off the device and back on.

    pause.want("on request")          inner steps end after the one under way, then the device is freed
    pause.want_no_more("on request")  the device is taken again, once nobody wants the pause any more, and warmed up
    await pause.settled()             the device is free, or taken, as it should be

Whoever trains asks `is_on` between steps, and `is_away` before the first: a device that still compiles is waited for by
nobody. Leaving the device runs where training runs, so behind the step under way.

Its device is warmed up so that whatever a first step has to wait for is over before anybody waits for this peer:

    begin    before the first heartbeat: until then nobody counts a peer's silence, nor waits for its start
    renew    before it asks to be counted in: the state it fetched may have come with other lengths of samples

Failure:
- the last words fail in their turn: a notice says so, and the error that ends this peer stays the one that is told.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from weft.errors import WeftError
from weft.events import Emit, Notice, Paused, Resumed
from weft.ids import PeerId, short
from weft.net.link.trial import listed
from weft.net.membership.membership import Membership
from weft.net.node import Node
from weft.peer.context import Context
from weft.peer.round.driver import Participation
from weft.peer.state.replica import Replica
from weft.sync.records.messages import Manifest
from weft.training.learner import Learner

LINGER_S = 60.0  # of a complete run, at most, for who has not yet made the last outer step: it may need the results
BACK_S = 60.0  # who fell silent so recently may come back: killed and started again, or asleep
LOOK_S = 0.2
SLOW_S = 3.0  # after it was told to stop, a peer is still busy: others hear at once that it leaves
TOLD_AFTER = 10  # looks: most wait for less


T = TypeVar("T")


class Stopped(Exception):
    """This peer was told to stop while it waited."""


class Shutdown:
    def __init__(
        self, node: Node, membership: Membership, replica: Replica, participation: Participation, emit: Emit
    ) -> None:
        self.reason = ""  # why this peer is told to stop
        self.failure: Exception | None = None  # what it cannot go on with
        self._node = node
        self._membership = membership
        self._replica = replica
        self._participation = participation
        self._emit = emit
        self._asked = asyncio.Event()
        self._has_left = False  # its round

    def ask(self, reason: str) -> None:
        """Tell this peer to stop; the first reason is the one that is told."""
        self.reason = self.reason or reason
        self._asked.set()

    def fail(self, error: Exception) -> None:
        """Tell it to stop for what it cannot go on with."""
        self.failure = self.failure or error
        self.ask(type(error).__name__)

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or end it when this peer is told to stop.

        Raises:
            Stopped: it was, and the work had not ended by itself.
        """
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Stopped
            return working.result()
        finally:
            for each in (working, stopping):
                each.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def say(self, reason: str) -> None:
        """Say the last word in the round, and goodbye."""
        self._leave()
        await self._membership.say_goodbye(reason)

    async def say_if_slow(self) -> None:
        """Say it as soon as this peer was told to stop and is still busy after a moment."""
        await self._asked.wait()
        await asyncio.sleep(SLOW_S)
        if self.failure is None:
            await self.say(self.reason)

    async def say_if_possible(self, error: Exception) -> None:
        """Say of both what can still be said after `error`, which may be of any kind: a fault of weft's own, too."""
        try:
            self._leave()
        except Exception as another:  # what broke may be what this needs
            self._tell("say its last word in the round", another)
            if (rounds := self._participation.rounds) is not None:
                rounds.close()  # nothing that others say now is answered by what is broken
        try:
            await self._membership.say_goodbye(type(error).__name__)
        except Exception as another:
            self._tell("say goodbye", another)

    async def linger(self, is_awaited: Callable[[], bool] = lambda: False) -> None:
        """Stay for a moment while a member has not told that it made the last outer step: it may need the results.

        Args:
            is_awaited: somebody has not got yet what this peer alone has.
        """
        head = self._replica.head
        assert head is not None
        looks = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while behind := sorted(peer for peer in self._here(head) if self._is_behind(peer, head)):
                    if looks == TOLD_AFTER:
                        who = f"{listed([short(peer) for peer in behind])} {'has' if len(behind) == 1 else 'have'}"
                        text = f"all is trained, but {who} not made the last round yet: this peer waits up to a minute"
                        self._emit(Notice(text=f"{text}, so that the end can be fetched from here"))
                    looks += 1
                    await asyncio.sleep(LOOK_S)
                while is_awaited():  # noqa: ASYNC110  # it has no event to wait for
                    await asyncio.sleep(LOOK_S)

    def _leave(self) -> None:
        rounds = self._participation.rounds
        if rounds is not None and len(rounds.chain.head.members) > 1 and not self._has_left:
            self._has_left = True
            rounds.leave()

    def _here(self, head: Manifest) -> set[PeerId]:
        """Return who has not left, as far as this peer knows: of a member that has yet to speak, the link."""
        unheard = set(head.members) - set(self._membership.members())
        may_return = self._membership.silent(BACK_S)
        here = {*self._membership.alive(), *may_return, *filter(self._node.is_linked, unheard)}
        return {peer for peer in here if not self._node.is_barred(peer)}  # it is let in no sooner

    def _is_behind(self, peer: PeerId, head: Manifest) -> bool:
        beat = self._membership.heartbeat_of(peer)
        if beat is None:
            return peer in head.members and self._node.is_linked(peer)
        if beat.manifest is None:  # it fetches the run's state, perhaps not for the first time; an anchor waits for one
            return not beat.is_anchor
        return beat.branch == head.branch and beat.round < head.round

    def _tell(self, what: str, error: Exception) -> None:
        self._emit(Notice(text=f"this peer ends, but cannot {what}: {type(error).__name__}: {error}"))


class Pause:
    """Of one peer, off at first.

    Args:
        on_failure: told where the device cannot be taken again: another program has taken it meanwhile.
    """

    def __init__(
        self, context: Context, trainer: Learner, replica: Replica, on_failure: Callable[[Exception], None]
    ) -> None:
        self._trainer = trainer
        self._replica = replica
        self._compute = context.compute
        self._clock = context.clock
        self._emit = context.emit
        self._on_failure = on_failure
        self._reasons: list[str] = []
        self._began = 0.0
        self._is_armed = False  # the trainer has its device
        self._moving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.num_changes = 0

    async def begin(self, restore: Callable[[], None]) -> None:
        """Start the trainer, take up what `restore` brings, and warm up by the settings that hold then.

        Cancelled, it ends once all is restored: half of it must not be saved. The thread may go on warming up.
        """

        loop, is_restored = asyncio.get_running_loop(), asyncio.Event()

        def take_device() -> None:
            self._trainer.start(self._replica.outer)
            restore()
            self._trainer.apply_settings(self._replica.config)
            loop.call_soon_threadsafe(is_restored.set)
            if not self.is_on:
                self._trainer.warm_up()

        taking = asyncio.ensure_future(self._compute.train(take_device))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            restoring = asyncio.ensure_future(is_restored.wait())
            await asyncio.wait((taking, restoring), return_when=asyncio.FIRST_COMPLETED)
            restoring.cancel()
            taking.add_done_callback(lambda taken: taken.cancelled() or taken.exception())  # nobody asks any more
            raise
        self._arm()

    async def renew(self) -> None:
        """Warm up again, where settings have changed."""
        self._trainer.apply_settings(self._replica.config)
        if not (self.is_on or self._trainer.is_warm):
            await self._compute.train(self._trainer.warm_up)

    @property
    def is_on(self) -> bool:
        return bool(self._reasons)

    @property
    def is_away(self) -> bool:
        """Whether nothing can be trained: it is on, or the device is not ready again."""
        return self.is_on or self._is_moving

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)

    def want(self, reason: str) -> None:
        if reason in self._reasons:
            return
        self._reasons.append(reason)
        if len(self._reasons) == 1:
            self._began = self._clock.now()
            self._emit(Paused(reason=reason))
            self._turn()

    def want_no_more(self, reason: str) -> None:
        if reason not in self._reasons:
            return
        self._reasons.remove(reason)
        if not self._reasons:
            self._emit(Resumed(reason=reason, paused_s=self._clock.now() - self._began))
            self._turn()

    def _arm(self) -> None:
        """From now on a pause frees the device."""
        self._is_armed = True
        if self.is_on:
            self._turn()

    async def settled(self) -> None:
        """Wait until the device is free, or taken, as it should be."""
        while self._is_moving and self._trainer.is_parked != self.is_on:
            await self.change()

    async def ended(self) -> None:
        """Wait until something can be trained."""
        while self.is_away:
            await self.change()

    async def change(self, since: int | None = None) -> None:
        """Wait until the pause begins or ends, or the device has been left or taken, or is ready again.

        Args:
            since: `num_changes` when the caller last looked; None: now.
        """
        before = self.num_changes if since is None else since
        while self.num_changes == before:
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        if self._is_moving and self._moving is not None:
            await asyncio.wait([self._moving])

    @property
    def _is_moving(self) -> bool:
        return self._moving is not None and not self._moving.done()

    def _note_change(self) -> None:
        self.num_changes += 1
        self._changed.set()

    def _turn(self) -> None:
        self._note_change()
        if self._is_armed and not self._is_moving:
            self._moving = asyncio.ensure_future(self._move())

    async def _move(self) -> None:
        """Follow what is wanted, however often that changes meanwhile."""
        with suppress(asyncio.CancelledError):
            while (work := self._next()) is not None:
                try:
                    await self._compute.train(work)
                except WeftError as error:
                    self._on_failure(error)
                    break
                self._note_change()
        self._note_change()

    def _next(self) -> Callable[[], None] | None:
        trainer = self._trainer
        if self.is_on:
            return None if trainer.is_parked else trainer.park
        if trainer.is_parked:
            return trainer.unpark
        return None if trainer.is_warm else trainer.warm_up
