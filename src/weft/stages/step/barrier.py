"""How far the first stage is, as its members tell: waiting for a step to be over."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weft.ids import PeerId
from weft.net.node import Node
from weft.pipeline.messages import Passing
from weft.pipeline.step import Beat, Beats, Progress

LOOK_S = 0.5  # until it is looked again: that a member is gone is told by nobody


class Barrier:
    """Of one peer.

    Args:
        is_here: whether a peer is a member of the first stage, as far as is known.
    """

    def __init__(self, node: Node, is_here: Callable[[PeerId], bool]) -> None:
        self._node = node
        self._beats = Beats(is_here)
        self._changed = asyncio.Event()  # another each time
        self._last: Passing | None = None
        node.on_note(Passing, self._on_passing)
        node.on_link(self._on_link)

    @property
    def newest(self) -> Beat:
        return self._beats.newest

    @property
    def num_origins(self) -> int:
        return self._beats.num_origins

    def tell(self, beat: Beat, origins: frozenset[PeerId], *, is_done: bool) -> None:
        """Say how far this peer is with what it begins."""
        self._take(self._node.peer, Progress(beat, is_done, origins))
        self._last = Passing(round=beat.round, step=beat.step, is_done=is_done, origins=tuple(sorted(origins)))
        for peer in self._node.peers:
            self._node.post(peer, self._last)

    def look(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_over(self, beat: Beat, is_over: Callable[[], bool]) -> None:
        """Wait for a step to be over, or for `is_over`."""
        await self.until(lambda: self._beats.is_over(beat) or is_over())

    async def until(self, is_so: Callable[[], bool], wakes: "asyncio.Future[Any] | None" = None) -> None:
        """Wait until something is so.

        Args:
            wakes: looks again as soon as this is done.
        """
        while not is_so():
            changing = asyncio.ensure_future(self._changed.wait())
            try:
                others = [] if wakes is None else [wakes]
                await asyncio.wait([changing, *others], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changing.cancel()
                with suppress(asyncio.CancelledError):
                    await changing

    def _take(self, peer: PeerId, progress: Progress) -> None:
        self._beats.told(peer, progress)
        self.look()

    async def _on_passing(self, peer: PeerId, note: Passing) -> None:
        origins = frozenset(PeerId(each) for each in note.origins)
        self._take(peer, Progress(Beat(note.round, note.step), note.is_done, origins))

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:  # should it come back, it says again how far it is
            self._beats.forget(peer)
        elif self._last is not None:
            self._node.post(peer, self._last)
        self.look()
