"""A peer's pause: who wants it, and the way off the device and back on.

    pause.want("asked to")         inner steps end after the one under way, then the device is freed
    pause.want_no_more("asked to") the device is taken again, once nobody wants the pause any more, and warmed up
    await pause.settled()          the device is free, or taken, as it should be

Whoever trains asks `is_on` between steps, and `is_away` before the first: a device that still compiles is waited for by
nobody. Leaving the device runs where training runs, so behind the step under way.

When a peer warms its device up: whatever a first step has to wait for is over before anybody waits for this peer.

    begin    before the first heartbeat: until then nobody counts a peer's silence, nor waits for its start
    renew    before it asks to be counted in: the state it fetched may have come with other lengths of samples

A peer that is paused has left its device, or is about to.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from weft.errors import WeftError
from weft.events import Paused, Resumed
from weft.peer.context import Context
from weft.peer.state.replica import Replica
from weft.training.learner import Learner


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
        """Start the trainer, take up what `restore` brings, and warm up by the settings that hold then."""

        def take_device() -> None:
            self._trainer.start(self._replica.outer)
            restore()
            self._trainer.apply_settings(self._replica.config)
            if not self.is_on:
                self._trainer.warm_up()

        await self._compute.train(take_device)
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
