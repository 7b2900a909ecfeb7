"""How a round's letters and payloads reach this peer's machine."""

from collections.abc import Callable
from dataclasses import dataclass

from weft.sync.records.messages import Collect
from weft.sync.round.machine import Input, State


@dataclass(frozen=True)
class Reach:
    """How this peer's machine is reached."""

    feed: Callable[[Input], None]  # gives it what it is to hear
    state: Callable[[], State | None]  # None where this peer takes no part in the round

    def plan(self) -> Collect | None:
        """Return the plan that the machine follows, if it knows one."""
        state = self.state()
        return None if state is None else state.plan
