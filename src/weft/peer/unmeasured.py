"""What is known of a run's parameters where this peer measures nothing: what others tell.

It does not know how they are measured.
"""

from collections.abc import Callable

from weft.peer.messages import Evaluation
from weft.sync.records.messages import Manifest


class Unmeasured:
    """Of a run that nobody but its members' own loops can measure: there are no figures."""

    loss: float | None = None  # nats per token
    nats_per_byte: float | None = None
    text: str | None = None

    def __init__(self) -> None:
        self.on_heard: Callable[[Evaluation], object] = lambda _evaluation: None

    async def maybe(self, manifest: Manifest) -> None:
        """Evaluate and sample where the run asks for it after this round; break off when this peer is to end."""

    async def finish(self) -> None:
        """Make sure that the final state is evaluated, and sample it."""
