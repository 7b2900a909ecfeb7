"""How much CPU time each thread of this process's children uses, while they run.

    with Threads() as threads: ...
    threads.used(marks)      # between one moment of the wall clock and the next, for a mean child

A child's first thread has its event loop; of the others, the busiest makes inner steps.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

_EVERY_S = 0.2


@dataclass(frozen=True)
class Used:
    """CPU-seconds of a mean child, in each stretch of time."""

    steps_s: NDArray[np.float64]
    loop_s: NDArray[np.float64]
    rest_s: NDArray[np.float64]

    @property
    def beside_s(self) -> NDArray[np.float64]:
        """Return what went on beside inner steps."""
        return self.loop_s + self.rest_s


class Threads:
    """Notes what each thread has used, until it is left."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], list[tuple[float, float]]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Threads":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def used(self, marks: Sequence[float]) -> Used:
        found = []
        for pid in sorted({pid for pid, _ in self._seen}):
            threads = {thread: self._between(pid, thread, marks) for own, thread in self._seen if own == pid}
            if len(threads) < 2:
                continue  # no peer
            loop = threads.pop(pid)
            steps = threads.pop(max(threads, key=lambda thread: float(threads[thread].sum())))
            found.append((steps, loop, sum(threads.values(), np.zeros_like(steps))))
        steps_s, loop_s, rest_s = np.mean(np.asarray(found), axis=0)
        return Used(steps_s, loop_s, rest_s)

    def _between(self, pid: int, thread: int, marks: Sequence[float]) -> NDArray[np.float64]:
        walls, cpu = zip(*self._seen[pid, thread], strict=True)
        return np.diff(np.interp(marks, walls, cpu))

    def _sample(self) -> None:
        own = psutil.Process()
        while not self._is_over.wait(_EVERY_S):
            for child in own.children():
                with suppress(psutil.Error):
                    for each in child.threads():
                        at = time.time(), each.user_time + each.system_time
                        self._seen.setdefault((child.pid, each.id), []).append(at)
