"""What others cost this process in computing, and when whoever costs too much is read more slowly, then no more.

    each step of a handler, each frame decoded ──seconds of CPU──► `charge` of that link
    after each turn of its reader              ──────────────────► `pause_s`: so long nothing of it is read

A link has a share of one core, saved up for a while: `SHARE` of each second, `BURST_S` at once. So has an address, over
all its links, and so have all links together that are beyond their own: many keys of one person get no more than one.
Meanwhile what it sends waits in its own machine, by the transport's flow control.

An honest peer that is read slowly waits for answers, so the stream is soon empty. Whoever goes on sending for `FLOOD_S`
without that happening once floods, and its link ends. Where time is virtual nothing costs anything.
"""

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

from weft.clock import Clock, computing
from weft.ids import PeerId
from weft.net.transport.address import is_loopback

T = TypeVar("T")

SHARE, BURST_S = 0.08, 0.5  # of a core: 31 members that all do their utmost take two and a half
ADDRESS_SHARE, ADDRESS_BURST_S = 0.16, 1.0  # loopback has none: many peers may share a machine
EXCESS_SHARE, EXCESS_BURST_S = 0.08, 0.25  # of all together that are beyond their own
MAX_PAUSE_S = 1.0  # silence that no peer takes for an end
FLOOD_S = 4.0
MAX_ADDRESSES = 1024  # remembered


class Share:
    """Seconds of computing that fill up with time and may be overdrawn by what was done last."""

    def __init__(self, share: float, burst_s: float, now: float) -> None:
        self._share, self._burst_s = share, burst_s
        self._level_s, self._filled_at = burst_s, now

    def charge(self, cost_s: float, now: float) -> None:
        self._fill(now)
        self._level_s = max(self._level_s - cost_s, -self._share * MAX_PAUSE_S)

    def pause_s(self, now: float) -> float:
        """Return for how long nothing more should be done."""
        self._fill(now)
        return max(0.0, -self._level_s / self._share)

    def _fill(self, now: float) -> None:
        self._level_s = min(self._burst_s, self._level_s + self._share * (now - self._filled_at))
        self._filled_at = now


class Burdens:
    """Of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.computed_s = computing(clock)
        self._addresses: dict[str, Share] = {}
        self._excess = Share(EXCESS_SHARE, EXCESS_BURST_S, clock.now())

    def of(self, peer: PeerId, source: str) -> "Burden":
        """Return what counts the cost of a new link.

        Args:
            source: the IP address it comes from; '' where this side dialled.
        """
        return Burden(peer, self, self._clock, self._address(source), self._excess)

    def _address(self, source: str) -> Share | None:
        if not source or is_loopback(source):
            return None
        if source not in self._addresses and len(self._addresses) >= MAX_ADDRESSES:
            del self._addresses[next(iter(self._addresses))]
        return self._addresses.setdefault(source, Share(ADDRESS_SHARE, ADDRESS_BURST_S, self._clock.now()))


class Burden:
    """Of one link."""

    def __init__(self, peer: PeerId, all_: Burdens, clock: Clock, address: Share | None, excess: Share) -> None:
        self.peer = peer
        self.cost_s = 0.0  # so far
        self.num_frames = 0
        self._computed_s = all_.computed_s
        self._clock = clock
        self._own = Share(SHARE, BURST_S, clock.now())
        self._address, self._excess = address, excess
        self._is_beyond = False
        self._busy_since: float | None = None  # beyond its share, and never found empty

    @property
    def is_flood(self) -> bool:
        return self._busy_since is not None and self._clock.now() - self._busy_since >= FLOOD_S

    def idle(self) -> None:
        """Note that nothing of it waited to be read."""
        self._busy_since = None

    def charge(self, cost_s: float) -> None:
        now = self._clock.now()
        self.cost_s += cost_s
        for share in (self._own, self._address, self._excess if self._is_beyond else None):
            if share is not None:
                share.charge(cost_s, now)

    def pause_s(self) -> float:
        """Return for how long nothing of it should be read now."""
        now = self._clock.now()
        pause_s = max(self._own.pause_s(now), 0.0 if self._address is None else self._address.pause_s(now))
        self._is_beyond = pause_s > 0 or (self._is_beyond and self._busy_since is not None)
        if self._is_beyond:
            pause_s = max(pause_s, self._excess.pause_s(now))
            if self._busy_since is None:
                self._busy_since = now
        return min(pause_s, MAX_PAUSE_S)

    def do(self, work: Callable[[], T]) -> T:
        """Do `work` at the cost of this link."""
        began = self._computed_s()
        try:
            return work()
        finally:
            self.charge(self._computed_s() - began)

    def metered(self, work: Awaitable[T]) -> "_Metered[T]":
        """Return `work`, each step of which is charged to this link; not what others do while it waits."""
        return _Metered(self, work)


class _Metered(Generic[T]):
    def __init__(self, burden: Burden, work: Awaitable[T]) -> None:
        self._burden, self._work = burden, work

    def __await__(self) -> Generator[Any, None, T]:
        steps = self._work.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                waits_for = self._burden.do(step)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                yield waits_for
                step = partial(next, steps)
            except BaseException as error:
                step = partial(steps.throw, error)


class Watched(Generic[T]):
    """`work`, of which one can see afterwards whether it had to wait: a machine that is busy takes long without."""

    def __init__(self, work: Awaitable[T]) -> None:
        self._work = work
        self.has_waited = False

    def __await__(self) -> Generator[Any, None, T]:
        steps = self._work.__await__()
        try:
            first = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        self.has_waited = True
        return (yield from _going_on(steps, first))


def _going_on(steps: Generator[Any, Any, T], waits_for: Any) -> Generator[Any, None, T]:
    step: Callable[[], Any]
    while True:
        try:
            yield waits_for
            step = partial(next, steps)
        except BaseException as error:
            step = partial(steps.throw, error)
        try:
            waits_for = step()
        except StopIteration as end:
            result: T = end.value
            return result
