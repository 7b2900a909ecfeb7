"""States that a peer keeps inside a lease, beside the one that it begins with: who is audited makes steps again from
the last of them, and not from the beginning.

How many there are follows from what a step takes on this machine and what writing a state takes, and from how often a
contribution is audited (`weft.cost.audits.num_between`). Where steps are as fast as on a GPU, there are none.

They are a convenience: one that is gone, or damaged, costs steps, so they are neither flushed nor kept for long.
"""

from collections import deque
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from torch import Tensor

from weft.clock import Clock
from weft.cost.audits import num_between, spacing
from weft.peer.state.checkpoint import read_vectors
from weft.sync.records.index import StateIndex
from weft.wire import Record

KEPT_ROUNDS, KEPT_S = 2, 30.0  # both over: auditors ask as soon as a round is decided
NUM_STEPS = 16  # the shortest of so many steps was not held up by anything else


class KeptVectors(Record, frozen=True, kw_only=True):
    """Vectors in a file of the folder."""

    file: Annotated[str, Meta(pattern=r"^[a-z]+-[0-9]+[.]safetensors\Z")]
    index: StateIndex

    def read(self, folder: Path, only: str | None = None) -> dict[str, Tensor]:
        """
        Raises:
            CheckpointError: they are not there any more, or others are.
        """
        return dict(read_vectors(folder / self.file, self.index, only))


class Between(Record, frozen=True, kw_only=True):
    """The state after so many steps of a segment."""

    num_steps: int
    kept: KeptVectors


class Spacing:
    """When a state of a lease is kept, by what this machine takes for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps_s = deque[float](maxlen=NUM_STEPS)
        self._written_s = 0.0  # what the last state took
        self._at: float | None = None  # when the step began that is under way; None: it may not have been at once

    def begin(self) -> None:
        """Another step begins, or what is between two steps is over."""
        self._at = self._clock.now()

    def end(self) -> None:
        """The step that was begun is made."""
        if self._at is not None:
            self._steps_s.append(self._clock.now() - self._at)
        self._at = None

    def wrote(self, seconds: float) -> None:
        """A state was written in so many seconds."""
        self._written_s = seconds

    def is_due(self, num_since: int, num_steps: int, rate: float, every: int) -> bool:
        """Return whether a state is to be kept.

        Args:
            num_since: steps since the last that is kept. `num_steps`: of the whole lease.
            rate, every: as of `AuditTerms`.
        """
        if not self._steps_s:
            return False
        num = num_between(num_steps, min(self._steps_s), self._written_s, rate)
        return num > 0 and num_since >= spacing(num_steps, num, every)
