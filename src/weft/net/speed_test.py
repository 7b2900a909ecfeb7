"""What a member tells who asks about the way to it: its clock, where it sees the asker, how fast bytes pass.

    gauge = SpeedTest(node, clock)          # a member: answers
    answer = await sight(node, peer)        # who asks: the peer's clock and what it sees
    speed = await measure(node, peer)       # bytes both ways, a few seconds

A measurement moves at most `LARGE_NBYTES` each way, of zeros, as blobs do; a member takes part in one at a time, and in
one for each peer within `PAUSE_S`. The time is for people: nothing else depends on another's clock.

Failure:
- the member measures with somebody else, or did so for this peer just now: `CallFailed` says so.
- the link is so slow that the deadline passes: `DeadlineExceeded`.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from weft.clock import Clock
from weft.errors import PeerError
from weft.ids import Digest, PeerId
from weft.net.node import Node
from weft.wire import Buffer, Record, digest

SMALL_NBYTES = 256 << 10  # 2 s of 1 Mbit/s
LARGE_NBYTES = 4 << 20  # where the small one passed within `BRIEF_S`: half a second of 64 Mbit/s
BRIEF_S = 0.5
PAUSE_S = 20.0
SIGHT_S = 10.0  # to tell the time
DEADLINE_S = 30.0
_SIZES = (SMALL_NBYTES, LARGE_NBYTES)


class Sight(Record, frozen=True, kw_only=True, tag="Sight"):
    """A call: what time is it there, and where do you see me?"""


class Seen(Record, frozen=True, kw_only=True, tag="Seen"):
    wall_s: float  # since 1970
    source: Annotated[str, Meta(max_length=64)]  # IP address the link comes from; '' where the member dialled it


class SpeedPlease(Record, frozen=True, kw_only=True, tag="SpeedPlease"):
    """A call: fetch that many zeros from me, and let me fetch as many from you."""

    nbytes: Annotated[int, Meta(ge=1, le=LARGE_NBYTES)]


class SpeedIs(Record, frozen=True, kw_only=True, tag="SpeedIs"):
    fetched_s: float  # how long the member took to fetch


@dataclass(frozen=True)
class Speed:
    up_bps: float
    down_bps: float
    nbytes: int  # each way


@dataclass(frozen=True)
class Sighting:
    seen: Seen
    round_trip_s: float
    ahead_s: float  # of the member's clock before this one's, known to half a round trip


class SpeedTest:
    """A member's side.

    Args:
        node: whose peers may ask.
    """

    def __init__(self, node: Node, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._is_busy = False
        self._measured_at: dict[PeerId, float] = {}
        self._allowed: dict[PeerId, int] = {}  # how many zeros each may fetch now
        node.serve(Sight, self._tell)
        node.serve(SpeedPlease, self._measure)
        node.serve_blobs(self._zeros)

    async def _tell(self, peer: PeerId, _: Sight) -> Seen:
        return Seen(wall_s=self._clock.wall(), source=self._node.source_of(peer)[:64])

    async def _measure(self, peer: PeerId, request: SpeedPlease) -> SpeedIs:
        now = self._clock.now()
        if self._is_busy:
            raise PeerError("another measurement is under way here; try again in a moment")
        if request.nbytes == SMALL_NBYTES:
            if now - self._measured_at.get(peer, -PAUSE_S) < PAUSE_S:
                raise PeerError(f"a measurement with you was made less than {PAUSE_S:g} s ago")
            self._measured_at = {each: at for each, at in self._measured_at.items() if now - at < PAUSE_S}
            self._measured_at[peer] = now
        elif request.nbytes != LARGE_NBYTES or self._allowed.get(peer) != SMALL_NBYTES:
            raise PeerError("a measurement begins with a small one")
        self._is_busy = True
        try:
            began = self._clock.now()
            await self._node.fetch_any([peer], zeros(request.nbytes), request.nbytes)
            self._allowed = {peer: request.nbytes}
            return SpeedIs(fetched_s=self._clock.now() - began)
        finally:
            self._is_busy = False

    def _zeros(self, peer: PeerId, wanted: Digest) -> Buffer | None:
        num_bytes = self._allowed.get(peer)
        return bytes(num_bytes) if num_bytes is not None and wanted == zeros(num_bytes) else None


@lru_cache(maxsize=len(_SIZES))  # asked with every blob that is looked up
def zeros(num_bytes: int) -> Digest:
    return digest(bytes(num_bytes))


async def sight(node: Node, peer: PeerId, clock: Clock) -> Sighting:
    """Return what `peer` sees and what its clock shows.

    Raises:
        PeerError: it does not answer, or cannot.
        NetError, Refused, GenesisMismatch: no link stands; see `Node.connect`.
    """
    await node.connect(peer)  # else dialling would count
    began, wall = clock.now(), clock.wall()
    seen = await node.call(peer, Sight(), Seen, deadline_s=SIGHT_S)
    took_s = clock.now() - began
    return Sighting(seen=seen, round_trip_s=took_s, ahead_s=seen.wall_s - (wall + took_s / 2))


async def measure(node: Node, peer: PeerId, clock: Clock) -> Speed:
    """Return how fast bytes pass to `peer` and from it; of a small measurement, and of a large one where that is quick.

    Raises:
        PeerError: it does not take part now.
    """
    node.serve_blobs(lambda other, wanted: _served(other == peer, wanted))
    speed = await _pass(node, peer, SMALL_NBYTES, clock)
    if 8 * SMALL_NBYTES / min(speed.up_bps, speed.down_bps) < BRIEF_S:
        with suppress(PeerError):  # the small one stands
            speed = await _pass(node, peer, LARGE_NBYTES, clock)
    return speed


async def _pass(node: Node, peer: PeerId, num_bytes: int, clock: Clock) -> Speed:
    answer = await node.call(peer, SpeedPlease(nbytes=num_bytes), SpeedIs, deadline_s=DEADLINE_S)
    began = clock.now()
    async with asyncio.timeout(DEADLINE_S):
        await node.fetch_any([peer], zeros(num_bytes), num_bytes)
    took_s = clock.now() - began
    bits = 8 * num_bytes
    return Speed(up_bps=bits / max(answer.fetched_s, 1e-6), down_bps=bits / max(took_s, 1e-6), nbytes=num_bytes)


def _served(is_asked: bool, wanted: Digest) -> Buffer | None:
    return next((bytes(size) for size in _SIZES if is_asked and wanted == zeros(size)), None)
