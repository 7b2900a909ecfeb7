"""The peer of `weft.Sync` and of `weft.train`, in a thread of its own, and how it leaves.

finish     the loan ends ──► rounds go by until nothing is carried ──► stop
                             at most MOST_ROUNDS, and as long as those take by what was measured, at least LEAST_S
exit       the main thread has ended ──► close, before Python waits for threads that nobody would end
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic

from weft.clock import Clock, SystemClock, Wish
from weft.events import Entry, Notice, RoundCommitted
from weft.ids import several
from weft.launch.peer import Opened, P, Workload, found, join
from weft.launch.session import Options
from weft.peer.peer import Outcome, Peer
from weft.sync.round.machine import MIN_MEASURED, NUM_REMEMBERED, deadline_s

LEAVES_S = 60.0  # for goodbye and checkpoint where the caller broke off: what takes longer is not waited for
LOOK_S = 0.1
MOST_ROUNDS = 2  # that a loop which has ended stays for, so that what it made last is counted
LEAST_S = 60.0  # that it stays for where they take no longer, or none was measured


class PeerThread(threading.Thread, Generic[P]):
    """A peer from its beginning to its end.

    Args:
        given: the ticket of the run to join; None: found one, or go on with it.
        wait_for: with which a founded run begins: so many peers, this one included.
        on_ticket: told how others join a run that is founded.
        on_ended: called when all is over.
    """

    def __init__(
        self,
        options: Options,
        given: str | None,
        wait_for: int,
        on_ticket: Callable[[str], object],
        on_ended: Callable[[], object],
    ) -> None:
        super().__init__(name="weft", daemon=True)
        self._options = options
        self._given = given
        self._wait_for = wait_for
        self._on_ticket = on_ticket
        self._on_ended = on_ended
        self._work: Workload[P] | None = None  # what is trained
        self._task: asyncio.Task[Outcome | None] | None = None
        self._reason = ""  # why it is to stop
        self.loop: asyncio.AbstractEventLoop | None = None
        self.peer: P | None = None  # once others can join
        self.ticket: str | None = None  # a fresh one
        self.outcome: Outcome | None = None
        self._failure: BaseException | None = None

    def begin(self, work: Workload[P]) -> None:
        self._work = work
        self.start()

    def run(self) -> None:
        try:
            # The tls transport watches sockets, which no other loop does on every platform.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                self.outcome = runner.run(self._live())
        except BaseException as error:  # whatever it is, the caller raises it
            self._failure = error
        finally:
            self._options.home.close()
            self._on_ended()

    async def _live(self) -> Outcome | None:
        self.loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._reason:
            raise asyncio.CancelledError
        assert self._work is not None
        if self._given is None:
            return await found(self._work, self._options, wait_for=self._wait_for, on_started=self._begun)
        return await join(self._work, self._given, self._options, on_started=self._begun)

    def _begun(self, peer: P, opened: Opened) -> None:
        self.peer, self.ticket = peer, opened.ticket
        if self._reason:
            peer.stop(self._reason)
        elif self._given is None:
            self._on_ticket(opened.ticket)

    # --- what other threads call ---

    def call(self, work: Callable[[], object]) -> None:
        """Call `work` in the peer's thread, while that runs."""
        if self.loop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self.loop.call_soon_threadsafe(work)

    def leave(self, reason: str) -> None:
        """End soon, with a goodbye and a checkpoint."""
        self._reason = reason
        self.call(self._leave)

    def _leave(self) -> None:
        if self.peer is not None:
            self.peer.stop(self._reason)
        elif self._task is not None:
            self._task.cancel()

    def see_off(self, limit_s: float = LEAVES_S, clock: Clock | None = None) -> None:
        """Wait for goodbye and checkpoint where the caller broke off: what takes longer is not waited for.

        Raises:
            KeyboardInterrupt: a second wish. An interrupt is often told twice within a moment.
        """
        clock = clock or SystemClock()
        began, wish = clock.now(), Wish(clock)
        wish.is_again()  # the first is what broke the caller off
        while self.is_alive() and (left_s := began + limit_s - clock.now()) > 0:
            try:
                self.join(left_s)
            except KeyboardInterrupt:
                if wish.is_again():
                    raise

    def raise_failure(self) -> None:
        """Raise what has ended the peer, where something has."""
        if self._failure is not None:
            raise self._failure


class RoundTimes:
    """A sink that keeps how long this peer's last rounds took."""

    def __init__(self) -> None:
        self.took_s: list[float] = []

    def write(self, entry: Entry) -> None:
        if isinstance(entry.event, RoundCommitted) and entry.event.duration_s:
            took_s = entry.event.work_s + entry.event.duration_s
            self.took_s = [*self.took_s, took_s][-NUM_REMEMBERED:]

    def close(self) -> None:
        pass


def most_s(took_s: Sequence[float]) -> float:
    """Return how long to wait for the next rounds, given how long the last ones took."""
    round_s = deadline_s(took_s) if len(took_s) >= MIN_MEASURED else max(took_s, default=0.0)
    return max(LEAST_S, MOST_ROUNDS * round_s)


async def hand_in(peer: Peer, times: RoundTimes) -> None:
    """Stop `peer` once all that it has made is counted, or will not be soon: then it is said how much that is."""
    began, clock = 0 if peer.head is None else peer.head.round, peer.context.clock
    since = clock.now()
    with suppress(RuntimeError):  # it has ended meanwhile
        await peer.context.compute.train(lambda: None)  # after the last loan
    await asyncio.sleep(LOOK_S)
    while peer.carried_tokens and clock.now() - since < most_s(times.took_s):
        if peer.head is not None and peer.head.round >= began + MOST_ROUNDS:
            break
        await asyncio.sleep(LOOK_S)
    if left := peer.carried_tokens:
        text = f"leaving with {several(left, 'sample')} that no round has counted in {clock.now() - since:.0f} s"
        text += ": the checkpoint holds them, for when the loop is started again"
        peer.context.emit(Notice(text=text))
    peer.stop("finished")


def at_exit(work: Callable[[], object]) -> None:
    """Call `work` when the main thread of this process ends, while other threads still run.

    The module atexit is too late: Python waits for the threads of executors first. A process that was forked off this
    one, as loaders of data are, ends without it.
    """
    process = os.getpid()

    def leave() -> None:
        if os.getpid() == process:
            work()

    threading._register_atexit(leave)  # type: ignore[attr-defined]  # as concurrent.futures does; there is no other way
