"""A peer's end: why it is told to stop, waiting that ends then, and its last words, in its round and to all linked.

    complete, or asked to leave     the word in the round first, then goodbye
    something broke here            what of both can still be said: nobody need wait until this peer is suspected

The word in the round is on disk before it is sent, so it is left out where the disk does not take it.

Failure:
- the last words fail in their turn: a notice says so, and the error that ends this peer stays the one that is told.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from weft.events import Emit, Notice
from weft.ids import PeerId
from weft.net.membership.membership import Membership
from weft.net.node import Node
from weft.peer.round.driver import Participation
from weft.peer.state.replica import Replica
from weft.sync.records.messages import Manifest

LINGER_S = 60.0  # of a complete run, at most, for who has not yet made the last outer step: it may need the results
LOOK_S = 0.2


T = TypeVar("T")


class Stopped(Exception):
    """This peer was told to stop while it waited."""


class Shutdown:
    """Of one peer."""

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

    async def linger(self) -> None:
        """Stay for a moment while a member has not told that it made the last outer step: it may need the results."""
        head = self._replica.head
        assert head is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while True:
                    if not any(self._is_behind(peer, head) for peer in self._here(head)):
                        return
                    await asyncio.sleep(LOOK_S)

    def _leave(self) -> None:
        rounds = self._participation.rounds
        if rounds is not None and len(rounds.chain.head.members) > 1:
            rounds.leave()

    def _here(self, head: Manifest) -> set[PeerId]:
        """Return who has not left, as far as this peer knows: of a member that has yet to speak, the link."""
        silent = set(head.members) - set(self._membership.members())
        return {*self._membership.alive(), *filter(self._node.is_linked, silent)}

    def _is_behind(self, peer: PeerId, head: Manifest) -> bool:
        beat = self._membership.heartbeat_of(peer)
        if beat is None:
            return peer in head.members and self._node.is_linked(peer)
        if beat.manifest is None:  # it has not spoken since the run began
            return peer in head.members
        return beat.branch == head.branch and beat.round < head.round

    def _tell(self, what: str, error: Exception) -> None:
        self._emit(Notice(text=f"this peer ends, and cannot {what}: {type(error).__name__}: {error}"))
