"""Connections at the door: those that have proven no key yet, and those that have and were not admitted yet.

An attacker can open connections and say nothing, with as many keys as it likes. Each costs a socket until its
deadline, so their number is bounded, over all and per source address. When a newcomer exceeds a bound, the oldest
one in the way is turned out: an honest peer needs milliseconds, so the oldest is the least likely to be one. The
victim for the bound over all comes from the address that holds most, so one crowd cannot push out everybody else.

`Gate` is the bookkeeping, pure. `Handshakes` runs the handshakes under it, and none of an address that has used up its
share of computing (`burden`).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Generic, TypeVar

from msgspec import Meta

from weft.clock import SystemClock
from weft.errors import PeerError
from weft.net.transport.address import is_loopback
from weft.net.transport.base import Accept, Lane, OnDrop, Stream
from weft.net.transport.burden import Burden, Burdens
from weft.tasks import Tasks

K = TypeVar("K")

# Options of transports that listen.
HandshakeS = Annotated[float, Meta(gt=0, le=60, description="seconds a connection has to prove its key")]
MaxHalfOpen = Annotated[int, Meta(ge=1, le=4096, description="connections that have proven no key yet, over all")]
MaxHalfOpenPerIp = Annotated[int, Meta(ge=1, le=4096, description="the same from one address; loopback is exempt")]


class Gate(Generic[K]):
    """The half-open connections, oldest first.

    Args:
        max_total: bound over all addresses.
        max_per_ip: bound for one address. Loopback has only the bound over all: many peers may share a machine.
        state: what the connections are, for people.
    """

    def __init__(self, max_total: int, max_per_ip: int, state: str = "have proven no key") -> None:
        self._max_total = max_total
        self._max_per_ip = max_per_ip
        self._state = state
        self._waiting: dict[K, str] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, newcomer: K, ip: str) -> tuple[K, str] | None:
        """Let `newcomer` from `ip` wait; return who must leave for it, and why, when a bound is reached.

        Args:
            ip: the source address, or any other name of where it comes from.
        """
        victim = self._victim(ip)
        if victim is not None:
            del self._waiting[victim[0]]
        self._waiting[newcomer] = ip
        return victim

    def leave(self, key: K) -> None:
        self._waiting.pop(key, None)

    def _victim(self, ip: str) -> tuple[K, str] | None:
        held = Counter(self._waiting.values())
        if held[ip] >= self._max_per_ip and not is_loopback(ip):
            return self._oldest_of(ip), f"{held[ip]} connections from {ip} {self._state}; the oldest is dropped"
        if len(self._waiting) >= self._max_total:
            worst = held.most_common(1)[0][0]
            return self._oldest_of(worst), f"{len(self._waiting)} connections {self._state}; the oldest is dropped"
        return None

    def _oldest_of(self, ip: str) -> K:
        return next(key for key, its_ip in self._waiting.items() if its_ip == ip)


class Handshakes:
    """The handshakes of incoming connections: each has a deadline, and each that fails is told to `on_drop`.

    Args:
        tasks: where they run, and where `accept` runs for those that succeed.
        deadline_s: how long one may take.
    """

    def __init__(self, tasks: Tasks, gate: Gate[asyncio.Task[None]], deadline_s: float, on_drop: OnDrop) -> None:
        self._tasks = tasks
        self._gate = gate
        self._deadline_s = deadline_s
        self._on_drop = on_drop
        self._evicted: dict[asyncio.Task[None], str] = {}
        self._burdens = Burdens(SystemClock())

    def begin(
        self,
        address: str,
        ip: str,
        verify: Callable[[], Awaitable[tuple[Stream, Lane]]],
        accept: Accept,
        discard: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a handshake, turning out another one when there are too many.

        Args:
            verify: does it; raises `PeerError` when the other side breaks it.
            accept: takes the stream it leads to.
            discard: called at its end, also when `verify` had no chance to begin.
        """
        burden = self._burdens.at(ip)
        if burden.pause_s() > 0:
            discard()
            self._on_drop(address, "handshakes from this address take more than their share of this machine's time")
            return
        task = self._tasks.spawn(self._run(address, burden, verify, accept))

        def ended(_: asyncio.Task[None]) -> None:
            self._gate.leave(task)
            discard()
            reason = self._evicted.pop(task, None)
            if reason is not None:
                self._on_drop(address, reason)

        task.add_done_callback(ended)
        victim = self._gate.enter(task, ip)
        if victim is not None:
            evicted, self._evicted[victim[0]] = victim
            evicted.cancel()

    async def _run(
        self, address: str, burden: Burden, verify: Callable[[], Awaitable[tuple[Stream, Lane]]], accept: Accept
    ) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                stream, lane = await burden.metered(verify())
        except TimeoutError:
            self._on_drop(address, f"it did not prove its key within {self._deadline_s:g} s")
        except PeerError as error:
            self._on_drop(address, str(error))
        else:
            self._tasks.spawn(accept(stream, lane))
