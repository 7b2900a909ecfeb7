"""The states of a piece, by the round of the first stage that is over in them: of the last rounds, and of one to come.

    round = snapshots.round_after(manifest)       # how far the first stage is in a state; None: it is not known
    manifest = await snapshots.at(round)          # its state after so many rounds is kept; None: it is not
    await snapshots.settled(round, manifest)      # its conductor's word, once a round is over, before anything changes

Who puts a model together has all pieces keep the states of one such round, which is asked for before it is there.
"""

import asyncio
from collections.abc import Awaitable, Callable

from weft.ids import Digest

MAX_AHEAD = 64  # rounds: who asks for a later one asks again
MAX_KEPT = 256  # of the last rounds


class Snapshots:
    """Of one member.

    Args:
        pin: keeps the present state for a while.
    """

    def __init__(self, pin: Callable[[], Awaitable[object]]) -> None:
        self._pin = pin
        self._wanted: dict[int, asyncio.Future[Digest | None]] = {}
        self._round = 0
        self._rounds: dict[Digest, int] = {}  # the oldest first

    def round_after(self, manifest: Digest) -> int | None:
        return self._rounds.get(manifest)

    async def at(self, round: int) -> Digest | None:
        if not self._round < round <= self._round + MAX_AHEAD:
            return None
        wanted = self._wanted.setdefault(round, asyncio.get_running_loop().create_future())
        return await asyncio.shield(wanted)

    async def settled(self, round: int, manifest: Digest) -> None:
        self._rounds[manifest] = round
        while len(self._rounds) > MAX_KEPT:
            del self._rounds[next(iter(self._rounds))]
        self._round = round
        due = [each for each in self._wanted if each <= round]
        if round in due:
            await self._pin()
        for each in due:
            self._wanted.pop(each).set_result(manifest if each == round else None)
