"""How far work has come that takes long, told in events.

    with Meter("tokenizing", "B", emit, clock, total) as meter:
        meter.add(num)

Work that takes less than `EVERY_S` is not told; longer work is told that often, and once when it is over.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

from weft.clock import Clock
from weft.events import Emit, Working

T = TypeVar("T")

EVERY_S = 2.0
RECENT_S = 10.0  # what rate and time left are judged by


class Meter:
    """Counts the units of one piece of work.

    Args:
        what: as a person reads it, in the form "fetching the state".
        unit: of `total` and `done`: "B" for bytes, else a word for many, as "windows".
        total: None: nobody knows before it is over.
        done: what was done before, which tells nothing of the rate.
    """

    def __init__(
        self, what: str, unit: str, emit: Emit, clock: Clock, total: int | None = None, *, done: int = 0
    ) -> None:
        self._what, self._unit, self._total = what, unit, total
        self._emit, self._clock = emit, clock
        self._done = done
        self._marks = deque([(clock.now(), done)])  # when it was told, and how far it had come
        self._has_told = False

    def add(self, num: int = 1) -> None:
        """Count what was done since the last call."""
        self._done += num
        if self._clock.now() - self._marks[-1][0] >= EVERY_S:
            self._tell(is_over=False)

    def over(self, items: Iterable[T], units: Callable[[T], int]) -> Iterator[T]:
        """Yield items, and count each once it has been used."""
        for item in items:
            yield item
            self.add(units(item))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_told:
            self._tell(is_over=True)

    def _tell(self, *, is_over: bool) -> None:
        now = self._clock.now()
        while len(self._marks) > 1 and self._marks[0][0] < now - RECENT_S:
            self._marks.popleft()
        began, before = self._marks[0]
        rate = (self._done - before) / (now - began) if now > began else 0.0
        done = self._done if self._total is None else min(self._done, self._total)
        self._marks.append((now, self._done))
        self._has_told = True
        self._emit(
            Working(
                what=self._what,
                unit=self._unit,
                done=done,
                total=self._total,
                rate=rate,
                left_s=(self._total - done) / rate if self._total is not None and rate > 0 else None,
                is_over=is_over,
            )
        )
