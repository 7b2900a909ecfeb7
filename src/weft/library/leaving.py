"""How a loop leaves: with what it made last counted, where that can be waited for, and at the latest at Python's exit.

finish     the loan ends ──► rounds go by until nothing is carried ──► stop
                             at most MOST_ROUNDS, and as long as those take by what was measured, at least LEAST_S
exit       the main thread has ended ──► close, before Python waits for threads that nobody would end
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.events import Entry, Notice, RoundCommitted
from weft.peer.peer import Peer
from weft.sync.round.machine import MIN_MEASURED, NUM_REMEMBERED, deadline_s

LOOK_S = 0.1
MOST_ROUNDS = 2  # that a loop which has ended stays for, so that what it made last is counted
LEAST_S = 60.0  # that it stays for where they take no longer, or none was measured


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
        text = f"leaving with {left} samples that no round has counted in {clock.now() - since:.0f} s: the checkpoint "
        peer.context.emit(Notice(text=text + "holds them, for when the loop is started again"))
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
