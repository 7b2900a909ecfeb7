"""Inner steps lent by a peer to a loop of somebody's own, which makes them in its own thread.

    the peer's training thread      lend(n) ───────────────── waits ──────────────────► [what was made]
    the loop's thread                  └► begin() … step … made() … step … made() ─ waits ─┘   next lend ─► …

The loop runs only while steps are lent; between two loans it waits inside `begin` or `made`, and its tensors may be
read and written. Steps may be taken back: the one under way is finished, and no further one begins. The loop may leave
for good; then nothing is lent any more.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

LOOK_S = 0.1  # between two looks whether steps are to be taken back


@dataclass(frozen=True)
class Made:
    """One inner step of the loop."""

    num_samples: int
    loss: float  # NaN: it was not told


class Lending:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_lent = 0  # steps that the loop may make, the one under way included
        self._made: list[Made] = []  # of the present loan
        self._is_over = False
        self._has_left = False

    @property
    def has_left(self) -> bool:
        """Whether the loop makes no more steps."""
        return self._has_left

    @property
    def is_last(self) -> bool:
        """Whether no step is lent beyond the one under way."""
        return self._num_lent <= 1

    # --- the peer's side ---

    def lend(self, num_steps: int, should_stop: Callable[[], bool]) -> list[Made]:
        """Let the loop make so many steps; return those it made once it waits again, or has left.

        Args:
            should_stop: asked from time to time; True takes back what is not begun.
        """
        with self._changed:
            self._made, self._num_lent = [], num_steps
            self._changed.notify_all()
            while self._num_lent > 0 and not self._has_left:
                self._changed.wait(LOOK_S)
                if should_stop():
                    self._num_lent = min(self._num_lent, 1)
            self._num_lent = 0
            return self._made

    def end(self) -> None:
        """Let the loop wait no more: nothing will be lent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- the loop's side ---

    def begin(self) -> bool:
        """Wait until a step may be made; return False where none will be."""
        with self._changed:
            while self._num_lent <= 0 and not self._is_over:
                self._changed.wait(1.0)  # not for ever: some systems deliver no signal meanwhile
            return not self._is_over

    def made(self, num_samples: int, loss: float = math.nan) -> bool:
        """Hand in the step that was just made, and wait until another may be made; as `begin`."""
        with self._changed:
            if not self._is_over:
                self._made.append(Made(num_samples, loss))
                self._num_lent -= 1
                self._changed.notify_all()
        return self.begin()

    def leave(self) -> None:
        """Make no more steps."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()
