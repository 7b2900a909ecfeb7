"""When a peer warms its device up: whatever a first step has to wait for is over before anybody waits for this peer.

    begin    before the first heartbeat: until then nobody counts a peer's silence, nor waits for its start
    renew    before it asks to be counted in: the state it fetched may have come with other lengths of samples

A peer that is paused has left its device, or is about to.

It does not know what a warm-up is (`Learner.warm_up`), nor how others learn of this peer.
"""

from collections.abc import Callable

from weft.peer.context import Place
from weft.peer.loop.pause import Pause
from weft.peer.state.replica import Replica
from weft.train.learner import Learner


class Warming:
    def __init__(self, place: Place, trainer: Learner, replica: Replica, pausing: Pause) -> None:
        self._compute = place.compute
        self._trainer = trainer
        self._replica = replica
        self._pausing = pausing

    async def begin(self, restore: Callable[[], None]) -> None:
        """Start the trainer, take up what `restore` brings, and warm up by the settings that hold then."""

        def take_device() -> None:
            self._trainer.start(self._replica.outer)
            restore()
            self._trainer.heed(self._replica.config)
            if not self._pausing.is_on:
                self._trainer.warm_up()

        await self._compute.train(take_device)

    async def renew(self) -> None:
        self._trainer.heed(self._replica.config)
        if not (self._pausing.is_on or self._trainer.is_warm):
            await self._compute.train(self._trainer.warm_up)
