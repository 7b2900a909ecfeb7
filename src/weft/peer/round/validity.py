"""Whether what a letter wants voted for can be applied here, before the machine hears of it.

A vote says that its voter can make the outer step. What cannot be fetched or is no vector is never voted for, so nobody
can make a majority decide it. To the machine the letter is late, or lost.

Failure:
- a leader's own proposal names results that cannot be had or applied: the leader is suspected, the next one leads.
- a manifest accepted before names such results: they are looked for until they are here; until then the round has no
  outcome.
"""

import asyncio
from contextlib import suppress

from weft.errors import PeerError
from weft.events import Emit, PayloadRejected
from weft.ids import PeerId
from weft.peer.round.member import Member
from weft.peer.round.merge import RoundMerger
from weft.peer.round.quorum import Quorum
from weft.sync.records.messages import AnyRoundMessage, Base, Manifest, Propose
from weft.sync.round.machine import Noticed
from weft.sync.round.rules import is_successor

RECOVER_S = 5.0  # between two looks for results that nobody had


class Validity:
    """Of one peer, round after round."""

    def __init__(self, member: Member, merger: RoundMerger, quorum: Quorum, emit: Emit) -> None:
        self._member = member
        self._merger = merger
        self._parts = merger.parts
        self._quorum = quorum
        self._emit = emit

    def must_weigh(self, base: Base, named: Manifest) -> bool:
        """Return whether the machine might vote for `named`, and its results are not here."""
        return is_successor(base, named) and not self._parts.has_results(named)

    async def weigh(self, sender: PeerId, message: AnyRoundMessage, named: Manifest) -> bool:
        """Return, once that is known, whether what `message` names can be applied here.

        A leader whose own proposal cannot be is suspected: nobody need wait for the next.
        """
        try:
            await self._merger.check(named)
            await self._parts.results(named)
        except PeerError as error:
            reason = f"it names results that cannot be applied: {error}"
            self._emit(PayloadRejected(round=named.round, member=sender, reason=reason))
            is_its_own = isinstance(message, Propose) and named.attempt == message.attempt
            if is_its_own:
                self._member.feed(Noticed(peer=sender, status="suspected"))
            else:
                self.recover(named)
            return False
        return True

    def recover(self, manifest: Manifest) -> None:
        """Look for the results of what was accepted or decided, until they are here or the round is over."""
        self._member.tasks.spawn(self._recover(manifest))

    async def _recover(self, manifest: Manifest) -> None:
        base = self._member.base
        while self._member.base == base:
            with suppress(PeerError):
                await self._parts.results(manifest)
                self._quorum.find_results()
                return
            self._quorum.lose_results(base)
            await asyncio.sleep(RECOVER_S)
