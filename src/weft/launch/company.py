"""Who trains in a run already and how fast, heard by a peer that is linked and has not decided yet whether to join.

    async with Company(node, clock) as company:
        ...                              # heartbeats come with every link, and every two seconds
        pace = await company.pace()

Whoever takes part sends heartbeats; who only reads the terms sends none, and is not counted. In a run with stages
members speak to those of their own: there all that are linked are taken for members.

It does not know what a round costs. What it hears are others' words: enough for an estimate.
"""

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from weft.clock import Clock
from weft.cost.training import HEARTBEAT_S
from weft.ids import PeerId
from weft.net.messages import Heartbeat
from weft.net.node import Node

CALLED_S = 1.0  # for the other members of a run that has begun to call a newcomer that one of them told them of
HEARD_S = HEARTBEAT_S + 0.5  # for a first heartbeat of who is linked


@dataclass(frozen=True, kw_only=True)
class Pace:
    num_members: int  # that were heard
    num_linked: int = 0  # who are here, heard or not: in a run with stages members speak to those of their stage
    tokens_per_s: float  # inner steps of the fastest of them; 0: none has made any

    def steps_s(self, num_tokens: int) -> float | None:
        """Return the seconds that inner steps on so many tokens take the fastest; None where that is not known."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else None


NOBODY = Pace(num_members=0, tokens_per_s=0.0)


class Company:
    """Listens from the first link on, until it is left; heartbeats are then for `Membership`."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._began = clock.now()
        self._heard: dict[PeerId, Heartbeat] = {}
        self._news = asyncio.Event()

    async def __aenter__(self) -> "Company":
        self._node.on_note(Heartbeat, self._on_heartbeat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.ignore(Heartbeat)

    async def pace(self) -> Pace:
        """Return what was heard, once everybody who may be heard had the time to speak."""
        while self._clock.now() < self._until():
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until() - self._clock.now()):
                    await self._news.wait()
        training = [beat for beat in self._heard.values() if not beat.is_anchor]
        speeds = [beat.tokens_per_s for beat in training if math.isfinite(beat.tokens_per_s)]
        return Pace(num_members=len(training), num_linked=len(self._node.peers), tokens_per_s=max(speeds, default=0.0))

    def _until(self) -> float:
        """Return how long to listen: not at all where a run waits to begin and all that are linked have spoken."""
        if not set(self._node.peers) <= set(self._heard):
            return self._began + HEARD_S
        has_begun = any(beat.manifest is not None for beat in self._heard.values())
        return self._began + (CALLED_S if has_begun else 0.0)

    async def _on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        self._heard[peer] = heartbeat
        self._news.set()
