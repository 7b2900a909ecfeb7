"""States that are asked for before they are there: all pieces' of one beat, for whoever puts the model together.

manifest = await pinning.at(beat)       # a member's answer: its state after so many beats is kept; None: it is not
await pinning.settled(beat, manifest)   # its conductor's word, once a round is over: nothing has changed since
"""

import asyncio
from collections.abc import Awaitable, Callable

from weft.ids import Digest

MAX_AHEAD = 64  # beats: who asks for a later one asks again


class Snapshots:
    """Of one member.

    Args:
        pin: keeps the present state for a while.
    """

    def __init__(self, pin: Callable[[], Awaitable[object]]) -> None:
        self._pin = pin
        self._wanted: dict[int, asyncio.Future[Digest | None]] = {}
        self._beat = 0

    async def at(self, beat: int) -> Digest | None:
        if not self._beat < beat <= self._beat + MAX_AHEAD:
            return None
        wanted = self._wanted.setdefault(beat, asyncio.get_running_loop().create_future())
        return await asyncio.shield(wanted)

    async def settled(self, beat: int, manifest: Digest) -> None:
        self._beat = beat
        due = [each for each in self._wanted if each <= beat]
        if beat in due:
            await self._pin()
        for each in due:
            self._wanted.pop(each).set_result(manifest if each == beat else None)
