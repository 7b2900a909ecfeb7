"""Whether what a letter wants voted for can be applied here, before the machine hears of it.

A vote says that its voter can make the outer step. What cannot be fetched or is no vector is never voted for, so nobody
can make a majority decide it. To the machine the letter is late, or lost.

Failure:
- a leader's own proposal names results that cannot be had or applied: the leader is suspected, the next one leads.
- a manifest accepted before names such results: they are looked for until they are here; until then the round has no
  outcome.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from weft.errors import PeerError
from weft.events import Emit, PayloadRejected
from weft.ids import PeerId
from weft.peer.chain import Chain
from weft.peer.round.merge import RoundMerger
from weft.peer.round.quorum import Quorum
from weft.peer.round.reach import Reach
from weft.sync.records.messages import AnyRoundMessage, Base, Manifest, Propose
from weft.sync.round.machine import Noticed
from weft.sync.round.rules import is_successor
from weft.tasks import Tasks

RECOVER_S = 5.0  # between two looks for results that nobody had


class Validity:
    """Of one peer, round after round.

    Args:
        reach: this peer's machine. It suspects a leader whose own proposal cannot be applied: nobody need wait for the
            next.
    """

    def __init__(
        self,
        chain: Chain,
        merger: RoundMerger,
        quorum: Quorum,
        tasks: Tasks,
        emit: Emit,
        reach: Reach,
    ) -> None:
        self._chain = chain
        self._merger = merger
        self._parts = merger.parts
        self._quorum = quorum
        self._tasks = tasks
        self._emit = emit
        self._feed = reach.feed
        self._running: dict[PeerId, asyncio.Task[None]] = {}  # by sender: what it names is being fetched

    def begin(self) -> None:
        """A round begins."""
        self._running.clear()

    def must_weigh(self, base: Base, named: Manifest) -> bool:
        """Return whether the machine might vote for `named`, and its results are not here."""
        return is_successor(base, named) and not self._parts.has_results(named)

    def weigh(self, sender: PeerId, message: AnyRoundMessage, named: Manifest, take: Callable[[], None]) -> None:
        """Call `take` once what `message` names can be applied here; its sender's later letter replaces it."""
        if sender in self._running:
            self._running[sender].cancel()
        self._running[sender] = self._tasks.spawn(self._weigh(sender, message, named, take))

    async def _weigh(self, sender: PeerId, message: AnyRoundMessage, named: Manifest, take: Callable[[], None]) -> None:
        try:
            await self._merger.check(named)
            await self._parts.results(named)
        except PeerError as error:
            reason = f"it names results that cannot be applied: {error}"
            self._emit(PayloadRejected(round=named.round, member=sender, reason=reason))
            is_its_own = isinstance(message, Propose) and named.attempt == message.attempt
            if is_its_own:
                self._feed(Noticed(peer=sender, status="suspected"))
            else:
                self.recover(named)
            return
        take()

    def recover(self, manifest: Manifest) -> None:
        """Look for the results of what was accepted or decided, until they are here or the round is over."""
        self._tasks.spawn(self._recover(manifest))

    async def _recover(self, manifest: Manifest) -> None:
        base = self._chain.base
        while self._chain.base == base:
            with suppress(PeerError):
                await self._parts.results(manifest)
                self._quorum.find_results()
                return
            self._quorum.lose_results(base)
            await asyncio.sleep(RECOVER_S)
