"""What others cost this process in computing, and how long whoever costs too much has to wait.

    a frame decoded, a step of a handler, a blob looked up ──seconds of CPU──► charged to a key and its address
    before more of its bytes are read                      ◄──seconds──────── `pause_s`

Of one core, or of what other programs leave of it, a key may take `SHARE`, over all its streams, and so may all
together that are beyond their own share: many keys of one person get no more than one. An address may take
`ADDRESS_SHARE`, over all its keys; this machine's own has no bound. What was not taken is saved up, for `BURST_S`. What
is sent meanwhile waits at its sender, by the transport's flow control.

Who is asked or told something may cost what that brings: each call that this peer makes adds `CALL_S` to what the other
may take, and each note `NOTE_S`. So neighbours in a pipeline, who call each other for every micro-batch, pass on as
many as they can, and members whose rounds follow one another at once vote as often as they can (docs/log.md).

An honest peer waits for answers, so few of its frames are here at a time, however slowly they are read. Who is beyond
its share for `FLOOD_S`, and each time that more of it was read so much came that `CROWD` frames were in it, floods: its
link ends. Where time is virtual nothing costs anything.
"""

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

from weft.clock import Clock, computing, kept_waiting
from weft.ids import PeerId
from weft.net.transport.address import network_of
from weft.net.transport.frame import FrameReader

T = TypeVar("T")

SHARE, BURST_S = 0.1, 0.5
ADDRESS_SHARE, ADDRESS_BURST_S = 0.2, 2.0
CALL_S = 5e-3  # of all that a micro-batch takes at one boundary, forward and back, 4.4 ms
NOTE_S = 6e-4  # of what a frame of a round takes to read and to handle, on the mean
MAX_STEP_S = 0.3  # of one charge: a step that meets a collection of garbage takes 0.2 s, and is nobody's cost
MAX_PAUSE_S = 1.0  # however much one frame has cost: no round is lost by it, and nobody taken for gone
FLOOD_S = 10.0
# Half of the calls that a peer may have open at another (`MAX_IN_FLIGHT`). Members of a pipeline have as many as there
# are micro-batches on their way, some ten; who fetches a blob asks for two ranges ahead.
CROWD = 32
GIVEN_S, LEAST_GIVEN = 1.0, 0.02  # how often it is looked how much of a core there is; however little that is
WAITED_S = 1e-3  # for bytes: what is there already is read at once
MAX_REMEMBERED = 1024  # keys, and addresses: a key that comes back has not saved up anew


class Given:
    """What part of the time in which this thread wanted to compute it got to: 1 where nobody else does."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._waited_s = clock, kept_waiting(clock)
        self._looked_at, self._before_s, self._part = clock.now(), self._waited_s(), 1.0

    def part(self) -> float:
        """Return it of the last second or more."""
        took_s = self._clock.now() - self._looked_at
        if took_s >= GIVEN_S:
            waited_s = self._waited_s()
            self._part = min(max(1 - (waited_s - self._before_s) / took_s, LEAST_GIVEN), 1.0)
            self._looked_at, self._before_s = self._clock.now(), waited_s
        return self._part


class Share:
    """Seconds of computing that fill up with time and may be overdrawn by what was done last.

    Args:
        part: of that time; see `Given`.
    """

    def __init__(self, share: float, burst_s: float, now: float, part: Callable[[], float] = lambda: 1.0) -> None:
        self._share, self._burst_s, self._part = share, burst_s, part
        self._level_s, self._filled_at = burst_s, now

    def charge(self, cost_s: float, now: float) -> None:
        self._fill(now)
        self._level_s = min(max(self._level_s - cost_s, -self._share * MAX_PAUSE_S), self._burst_s)

    def pause_s(self, now: float) -> float:
        """Return for how long nothing more should be done."""
        self._fill(now)
        return min(max(0.0, -self._level_s / (self._share * self._part())), MAX_PAUSE_S)

    def _fill(self, now: float) -> None:
        self._level_s = min(self._burst_s, self._level_s + self._share * self._part() * (now - self._filled_at))
        self._filled_at = now


class Shares:
    """One for each name, those used last remembered."""

    def __init__(self, share: float, burst_s: float, part: Callable[[], float]) -> None:
        self._share, self._burst_s, self._part = share, burst_s, part
        self._by_name: dict[str, Share] = {}

    def of(self, name: str, now: float) -> Share:
        found = self._by_name.pop(name, None) or Share(self._share, self._burst_s, now, self._part)
        if len(self._by_name) >= MAX_REMEMBERED:
            del self._by_name[next(iter(self._by_name))]
        self._by_name[name] = found
        return found


class Burdens:
    """Of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock, part = clock, Given(clock).part
        self._keys, self._addresses = Shares(SHARE, BURST_S, part), Shares(ADDRESS_SHARE, ADDRESS_BURST_S, part)
        self._common = Share(SHARE, BURST_S, clock.now(), part)

    def of(self, peer: PeerId, source: str) -> "Burden":
        """Return what counts the cost of a stream.

        Args:
            source: the IP address it comes from; '' where this side dialled.
        """
        return Burden(self._clock, [self._keys.of(peer, self._clock.now()), *self._at(source)], self._common)

    def at(self, source: str) -> "Burden":
        """Return what counts the cost of who has proven no key yet."""
        return Burden(self._clock, self._at(source), self._common)

    def _at(self, source: str) -> list[Share]:
        place = network_of(source)
        return [] if place is None else [self._addresses.of(place, self._clock.now())]


class Burden:
    """Of one stream.

    Args:
        own: the shares of its key and address.
        common: of all that are beyond their own.
    """

    def __init__(self, clock: Clock, own: list[Share], common: Share) -> None:
        self.cost_s = 0.0  # so far
        self._clock, self._computed_s = clock, computing(clock)
        self._own, self._common = own, common
        self.is_beyond = False  # it has used up its own share and was not found empty since
        self._crowd_since: float | None = None  # None: few frames were there when it was last read

    @property
    def is_flood(self) -> bool:
        since = self._crowd_since
        return self.is_beyond and since is not None and self._clock.now() - since >= FLOOD_S

    def charge(self, cost_s: float) -> None:
        now, cost_s = self._clock.now(), min(cost_s, MAX_STEP_S)
        self.cost_s += cost_s
        for share in self._own:
            share.charge(cost_s, now)
        if self.is_beyond:
            self._common.charge(cost_s, now)

    def call(self) -> None:
        """Note that this peer asks something of the other."""
        now = self._clock.now()
        for share in (*self._own, self._common) if self.is_beyond else self._own:
            share.charge(-CALL_S, now)

    def note(self) -> None:
        """Note that this peer tells the other something. Of many keys that flood none may take more for it."""
        now = self._clock.now()
        for share in self._own:
            share.charge(-NOTE_S, now)

    def pause_s(self) -> float:
        """Return for how long nothing of it should be read now."""
        now = self._clock.now()
        pause_s = max((share.pause_s(now) for share in self._own), default=0.0)
        if pause_s and not self.is_beyond:
            self.is_beyond = True
            self._crowd_since = None if self._crowd_since is None else now
        return max(pause_s, self._common.pause_s(now)) if self.is_beyond else 0.0

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Do `work`, which is not charged; return what it returns, and the seconds of computing that it took."""
        began = self._computed_s()
        return work(), self._computed_s() - began

    def do(self, work: Callable[[], T]) -> T:
        """Do `work` at the cost of this stream."""
        began = self._computed_s()
        try:
            return work()
        finally:
            self.charge(self._computed_s() - began)

    def metered(self, work: Awaitable[T]) -> "_Metered[T]":
        """Return `work`, each step of which is charged to this stream; not what others do while it waits."""
        return _Metered(self, work)

    async def read(self, reader: FrameReader) -> bytes | None:
        """Return the next frame, read at the cost of this stream, and note whether it had to be waited for, and how
        many came with it."""
        began, num_refills, metered = self._clock.now(), reader.num_refills, self.metered(reader.read())
        found = await metered
        now = self._clock.now()
        if metered.has_waited and now - began >= WAITED_S:
            self.is_beyond = False
        if reader.num_refills > num_refills:
            is_crowd = reader.has_ready(CROWD - 1)
            self._crowd_since = (now if self._crowd_since is None else self._crowd_since) if is_crowd else None
        return found


class _Metered(Generic[T]):
    def __init__(self, burden: Burden, work: Awaitable[T]) -> None:
        self._burden, self._work = burden, work
        self.has_waited = False

    def __await__(self) -> Generator[Any, None, T]:
        steps = self._work.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                waits_for = self._burden.do(step)
            except StopIteration as end:
                result: T = end.value
                return result
            self.has_waited = True
            try:
                yield waits_for
                step = partial(next, steps)
            except BaseException as error:
                step = partial(steps.throw, error)
