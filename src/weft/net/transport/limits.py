"""What others may take of this process: open files and memory, its processor, and the door.

`Budget`: of its open files, and of its memory, what it gives to connections, and whose come first.

    the process's own files     the newest `spare` of those that it may open are never a connection's: logs,
                                checkpoints, shards
    connections it makes        half of `spare` is theirs before it is lost to those that others make
    members                     control connections up to `links`, bulk streams up to `streams`
    newcomers                   who has proven no key yet, or is not admitted yet: up to `newcomers`

The system gives each new file the lowest number that is free. So a number tells how many are open at least, and none of
this needs to know how many files the process has opened beside.

`Streams` holds the bulk streams of all members. When one more than the bound comes, one of whoever holds most makes
room, one that rests before one that moves bytes.

`Burdens`: what others cost this process in computing, and how long whoever costs too much has to wait.

    a frame decoded, a step of a handler, a blob looked up ──seconds of CPU──► charged to a key and its address
    before more of its bytes are read                      ◄──seconds──────── `pause_s`

Of one core, or of what other programs leave of it, a key may take `SHARE`, over all its streams, and so may all
together that are beyond their own share: many keys of one person get no more than one. An address may take
`ADDRESS_SHARE`, over all its keys; this machine's own has no bound. What was not taken is saved up, for `BURST_S`. What
is sent meanwhile waits at its sender, by the transport's flow control.

Who is asked or told something may cost what that brings: each call that this peer makes adds `CALL_S` to what the other
may take, and each note `NOTE_S`. So neighbours in a pipeline, who call each other for every micro-batch, pass on as
many as they can, and members whose rounds follow one another at once vote as often as they can (docs/log.md). A note
that was agreed on adds `NOTE_S`, too: rows of texts for a step that this peer has made, a token that it asked for.

An honest peer waits for answers, so few of its frames are here at a time, however slowly they are read. Who is beyond
its share for `FLOOD_S`, and each time that more of it was read so much came that `CROWD` frames were in it, floods: its
link ends. Where time is virtual nothing costs anything.

`Gate`: connections that have proven no key yet, and those that have and were not admitted yet.

An attacker can open connections and say nothing, with as many keys as it likes. Each costs a socket until its
deadline, so their number is bounded, over all and per source address. When a newcomer exceeds a bound, the oldest
one in the way is turned out: an honest peer needs milliseconds, so the oldest is the least likely to be one. The
victim for the bound over all comes from the address that holds most, so one crowd cannot push out everybody else.

`Gate` is the bookkeeping, pure. `Handshakes` runs the handshakes under it, and none of an address that has used up its
share of computing (`Burdens`).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta

from weft.clock import Clock, SystemClock, computing, part_given
from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.transport.address import is_loopback, network_of
from weft.net.transport.base import Accept, Lane, OnDrop, Stream
from weft.net.transport.frame import FrameReader
from weft.tasks import Tasks

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

# Of an elector of the largest run: 63 leaves, 31 electors, 8 of the overlay, as many that others keep or twice that, 16
# idle ones (net/membership/membership.py). What is left is for newcomers, who ask one elector after another for a
# place.
MAX_LINKS = 192
# Bulk streams over all members, 0.2 MB each with what OpenSSL and the system hold: 31 members that exchange at once
# need half of them.
MAX_STREAMS = 512
MAX_NEWCOMERS = 4096  # as machine files may ask for
SPARE_PART, LEAST_SPARE, MOST_SPARE = 4, 16, 128  # own files that a process may still want to open


@dataclass(frozen=True)
class Budget:
    """How many connections of which kind a process may hold.

    Args:
        files: numbers of open files that connections may have; None: the system sets no bound.
    """

    files: int | None = None
    spare: int = MOST_SPARE
    newcomers: int = MAX_NEWCOMERS
    links: int = MAX_LINKS
    streams: int = MAX_STREAMS

    def is_taken(self, number: int, *, is_ours: bool) -> bool:
        """Return whether a connection whose file has this number takes what is kept for others.

        Args:
            is_ours: this process has made it.
        """
        return self.files is not None and number >= self.files - (self.spare // 2 if is_ours else self.spare)


def budget_of(files: int | None) -> Budget:
    """Return what a process may hold that may open so many files; None: any number."""
    if files is None:
        return Budget()
    spare = min(max(files // SPARE_PART, LEAST_SPARE), MOST_SPARE)
    left = max(files - 2 * spare, 8)  # as much again is what it has open already
    newcomers = max(left // 4, 4)
    links = min(max((left - newcomers) // 2, 4), MAX_LINKS)
    return replace(
        Budget(files=files, spare=spare),
        newcomers=newcomers,
        links=links,
        streams=min(max(left - newcomers - links, 4), MAX_STREAMS),
    )


class Streams(Generic[K]):
    """Who holds which streams, oldest first, and which of them rest.

    Args:
        most: over all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[PeerId, dict[K, bool]] = {}  # each stream, and whether it rests
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def of(self, peer: PeerId) -> tuple[K, ...]:
        return tuple(self._held.get(peer, ()))

    def enter(self, peer: PeerId, stream: K, *, rests: bool = False) -> bool:
        """Take up a stream; return whether there is room. Where there is none, close what `victim` returns first."""
        if self._num >= self._most:
            return False
        self._held.setdefault(peer, {})[stream] = rests
        self._num += 1
        return True

    def leave(self, peer: PeerId, stream: K) -> None:
        held = self._held.get(peer, {})
        if held.pop(stream, None) is not None:
            self._num -= 1
            if not held:
                del self._held[peer]

    def rest(self, peer: PeerId, stream: K, rests: bool) -> None:
        """Note that a stream waits for its next request from now on, or does so no more."""
        held = self._held.get(peer, {})
        if stream in held:
            del held[stream]  # who has rested longest stands first
            held[stream] = rests

    def victim(self, newcomer: PeerId) -> tuple[PeerId, K] | None:
        """Return the stream that makes room for one of `newcomer`, or None: it holds as many as anybody."""
        by_most = sorted(self._held, key=lambda peer: -len(self._held[peer]))
        for peer in by_most:
            if (stream := next((each for each, rests in self._held[peer].items() if rests), None)) is not None:
                return peer, stream
        if by_most and len(self._held[by_most[0]]) > len(self._held.get(newcomer, ())) + 1:
            return by_most[0], next(iter(self._held[by_most[0]]))
        return None


# --- computing ---


SHARE, BURST_S = 0.1, 0.5
ADDRESS_SHARE, ADDRESS_BURST_S = 0.1, 1.0
AROUND_S = 2e-5  # that the event loop takes for each step that is charged
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
    """What part of the time in which this process wanted to compute it got to: 1 where nobody else does."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._tell = clock, part_given(clock)
        self._looked_at, self._part = clock.now(), self._tell()

    def part(self) -> float:
        """Return it of the last second or more."""
        now = self._clock.now()
        if now - self._looked_at >= GIVEN_S:
            self._looked_at, self._part = now, max(self._tell(), LEAST_GIVEN)
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
        self._around_s = AROUND_S if isinstance(clock, SystemClock) else 0.0
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
            self.charge(self._computed_s() - began + self._around_s)

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


# --- connections at the door ---


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
    ) -> bool:
        """Start a handshake, turning out another one when there are too many; return whether it was started.

        Args:
            verify: does it; raises `PeerError` when the other side breaks it.
            accept: takes the stream it leads to.
            discard: called at its end, also when `verify` had no chance to begin.
        """
        burden = self._burdens.at(ip)
        if burden.pause_s() > 0:
            discard()
            self._on_drop(address, "handshakes from this address take more than their share of this machine's time")
            return False
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
        return True

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
