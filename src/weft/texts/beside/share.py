"""How much of a device text takes beside training, and on how many threads.

    level(t)    seconds that text may still compute: share * WINDOW_S at most
    + share     each second
    - x         for a step during which training was at work for x seconds

A step begins while the level is above 0 (a token bucket, as networks meter lines with: Turner, "New directions in
communications", 1986), or where training has rested for `RESTS_S`: it waits for others, is paused, or is over. What
text takes of a device that training does not use is not counted. So of any `WINDOW_S` training loses a share at most,
twice that after a rest; and text has all of a device that nobody else needs.

Steps of text have a thread of their own. On a CPU training leaves them a core, and they take what it leaves. They are
short: threads that wait for each other on cores that others use make them many times slower, so they go on with one.

Pure, but for `Watched`, which sees training work, and `Beside`, which waits and computes.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from weft.clock import Clock, SystemClock, computing
from weft.events import Emit, Notice
from weft.tasks import Compute, Inline, Threads

T = TypeVar("T")

WINDOW_S = 10.0
LEAST_S = 1e-3  # that is waited for at a time
RESTS_S = 0.25  # between two pieces of training there are shorter ones, in which no step of text is to begin
JUDGED_S = 1.0  # of steps, before anything is said of their threads
CROWDED = 1.5  # times what a thread computes in a step, the step takes: it waits for others


class Bucket(NamedTuple):
    """
    Args:
        level_s: at a time `at`.
    """

    share: float
    level_s: float
    at: float

    @property
    def most_s(self) -> float:
        return self.share * WINDOW_S


def full(share: float, now: float) -> Bucket:
    """Return a bucket from which nothing was taken yet."""
    return Bucket(share, share * WINDOW_S, now)


def filled(bucket: Bucket, now: float) -> Bucket:
    level_s = bucket.level_s + bucket.share * (now - bucket.at)
    return bucket._replace(level_s=min(level_s, bucket.most_s), at=now)


def taken(bucket: Bucket, took_s: float, now: float) -> Bucket:
    """Return it after a step: below 0 by what was taken too much, of which nothing older than a window is owed."""
    bucket = filled(bucket, now)
    return bucket._replace(level_s=max(bucket.level_s - took_s, -bucket.most_s))


def wait_s(bucket: Bucket, now: float) -> float:
    """Return how long it takes until a step may begin."""
    return max(0.0, -filled(bucket, now).level_s / bucket.share)


def threads_beside(num_cores: int, usual: int, wanted: int) -> tuple[int, int]:
    """Return the threads of training and of steps of text: no more than there are cores, unless more are wanted.

    Args:
        num_cores: that this process may use.
        usual: threads of training without text.
        wanted: of training, as its person says, who means to leave the rest; 0: as usual, and one for text.
    """
    if wanted:
        return wanted, max(1, num_cores - wanted)
    return max(1, min(usual, num_cores - 1)), 1


def is_crowded(wall_s: float, cpu_s: float) -> bool:
    """Return whether steps wait for threads that others keep from computing.

    Args:
        cpu_s: that their own thread computed.
    """
    return wall_s >= JUDGED_S and wall_s > CROWDED * cpu_s


class Watched:
    """A compute that tells when training is at work."""

    def __init__(self, compute: Compute, clock: Clock) -> None:
        self._compute = compute
        self._clock = clock
        self._num = 0  # that are asked for and not done
        self._changed_at = clock.now()  # between work and rest
        self._worked_s = 0.0  # until then

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        self._count(1)
        try:
            return await self._compute.train(work, num_tokens)
        finally:
            self._count(-1)

    async def serve(self, work: Callable[[], T]) -> T:
        return await self._compute.serve(work)

    async def aclose(self) -> None:
        await self._compute.aclose()

    @property
    def worked_s(self) -> float:
        """Return how long training has been at work, all in all."""
        return self._worked_s + (self._clock.now() - self._changed_at if self._num else 0.0)

    @property
    def rested_s(self) -> float:
        """Return for how long training has rested; 0: it is at work."""
        return 0.0 if self._num else self._clock.now() - self._changed_at

    def _count(self, more: int) -> None:
        worked_s, is_change = self.worked_s, 0 in (self._num, self._num + more)
        self._num += more
        if is_change:
            self._worked_s, self._changed_at = worked_s, self._clock.now()


class Beside:
    """Computes steps of text beside training, one at a time, and what they are made with.

    Args:
        share: of the device while training is at work.
        watched: trains, and copies what it trains.
        device: of steps.
        threads: of training and of steps, on a CPU; 0: torch's own choice.
        compute: `train` is for steps, `serve` for what they are made with; None: two threads of its own.
    """

    def __init__(
        self,
        share: float,
        watched: Watched,
        clock: Clock,
        device: torch.device,
        threads: tuple[int, int],
        emit: Emit,
        compute: Compute | None = None,
    ) -> None:
        self._bucket = full(share, clock.now())
        self._watched, self._clock, self._emit = watched, clock, emit
        self._compute = compute or (Threads() if isinstance(clock, SystemClock) else Inline())
        self._num_training, self._num_threads = threads
        self._device = device
        self._stream: Any = None
        self._turn = asyncio.Lock()
        self._has_begun = False
        self._wall_s = self._cpu_s = 0.0  # of steps, since they were last judged

    def __str__(self) -> str:
        share = f"{self._bucket.share:.0%} of the device while it trains"
        num_all = self._num_training + self._num_threads
        return f"{share} ({self._num_threads} of {num_all} threads)" if self._num_threads else share

    async def start(self) -> None:
        """Take threads, or a stream, before anything is computed."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._device.type == "cuda":  # what is launched there goes before what training has launched
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        if self._num_threads:
            await self._take_threads()

    async def aclose(self) -> None:
        await self._compute.aclose()

    async def copied(self, work: Callable[[], T]) -> T:
        """Copy what is trained, beside training."""
        return await self._watched.serve(work)

    async def made(self, work: Callable[[], T]) -> T:
        """Make weights ready, beside steps."""

        def whole() -> T:
            found = work()
            if self._stream is not None:
                torch.cuda.current_stream(self._device).synchronize()  # steps run on another stream
            return found

        return await self._compute.serve(whole)

    async def turn(self) -> None:
        """Wait until a step may begin."""
        while (left_s := wait_s(self._bucket, self._clock.now())) > LEAST_S:
            until_rest_s = RESTS_S - self._watched.rested_s
            if until_rest_s <= 0:
                return
            await asyncio.sleep(max(LEAST_S, min(left_s, until_rest_s)))

    async def between(self) -> None:
        """Wait until the step under way is over."""
        async with self._turn:
            pass

    async def run(self, work: Callable[[], T]) -> T:
        """Compute a step."""
        async with self._turn:
            before_s = self._watched.worked_s
            try:
                return await self._compute.train(lambda: self._timed(work))
            finally:
                self._bucket = taken(self._bucket, self._watched.worked_s - before_s, self._clock.now())
                await self._judge()

    def _timed(self, work: Callable[[], T]) -> T:
        computed_s = computing(self._clock)
        began, before_s = self._clock.now(), computed_s()
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                return work()
        finally:
            self._wall_s += self._clock.now() - began
            self._cpu_s += computed_s() - before_s

    async def _judge(self) -> None:
        """Go on with one thread where several wait for each other."""
        if self._wall_s < JUDGED_S:
            return
        is_so = self._num_threads > 1 and is_crowded(self._wall_s, self._cpu_s)
        self._wall_s = self._cpu_s = 0.0
        if is_so:
            text = (
                f"other programs use the cores of this machine: text is computed with one thread from now on, in place "
                f"of {self._num_threads}"
            )
            self._emit(Notice(text=text))
            self._num_threads = 1
            await self._take_threads()

    async def _take_threads(self) -> None:
        """Set the threads of steps; what is made beside them has one."""
        num = self._num_threads
        await self._compute.train(lambda: set_threads(num))
        await self._compute.serve(lambda: set_threads(1))
        set_threads(self._num_training)  # torch takes what was set last for threads that have not computed yet


def set_threads(num: int) -> None:
    """Let torch compute with so many threads what this one asks for."""
    torch.get_num_threads()  # takes what threads begin with: else the first step would do that, over what is set
    torch.set_num_threads(num)
