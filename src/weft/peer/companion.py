"""What a peer trains together with, where others compute the rest of its model.

    await companion.train(head, positions, ...)   before the learner is asked for what came of it
    await companion.announcing(payload)           before a round is told that this peer brings something
    await companion.until_lost()                  what others were to bring is gone with them; this peer may train again
    await companion.settling()                    before the outer step of a round
    await companion.settled(manifest, ...)        after it

The rounds of a stage are those of any run. What is particular to it is when a step is over and which micro-batches a
gradient is made of; that its companion knows. A peer that trains a whole model has none.
"""

from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.events import Preferred
from weft.ids import Digest, PeerId, Round
from weft.peer.messages import Evaluation
from weft.sync.records.messages import Manifest


class Unmeasured:
    """Of a run that nobody but its members' own loops can measure: there are no figures."""

    loss: float | None = None  # nats per token
    nats_per_byte: float | None = None
    preferred: Preferred | None = None  # of pairs of answers
    reward: float | None = None  # of answers to tasks
    evaluated_at: Round | None = None  # the round that both are of
    text: str | None = None

    def on_heard(self, callback: Callable[[Evaluation], object]) -> None:
        """Call `callback(evaluation)` for each that another member tells: none, of a run without figures."""

    async def begin(self) -> None:
        """Measure what a run begins with, where that has learnt something before."""

    def tell_begun(self) -> None:
        """Tell the others what was measured then."""

    async def maybe(self, manifest: Manifest) -> None:
        """Evaluate and sample where the run asks for it after this round; break off when this peer is to end."""

    async def finish(self) -> None:
        """Make sure that the final state is evaluated, and sample it."""


class Parameters(Protocol):
    """The run's parameters, as a replica holds them, and the manifest that they belong to."""

    outer: Tensor
    head: Manifest | None


class Companion(Protocol):
    async def train(self, head: Manifest, positions: NDArray[np.int64], is_over: Callable[[], bool]) -> None:
        """Have a lease's inner steps made, and leave with the learner what came of them."""
        ...

    async def announcing(self, payload: Digest | None) -> None:
        """Tell the other members what the payload is made of that this peer is about to announce; None: of nothing."""
        ...

    async def until_lost(self) -> None:
        """Return once all who were about to bring something to the present round are gone, and what they had."""
        ...

    async def settling(self) -> None:
        """End what goes by the parameters as they are: a round's outer step is made next."""
        ...

    async def settled(self, manifest: Manifest, electorate: Collection[PeerId]) -> bool:
        """Take up what a round counted; return whether what this peer carries must be dropped: others count it, too.

        Args:
            electorate: of the round.
        """
        ...

    def evaluator(self, replica: Parameters, is_stopping: Callable[[], bool]) -> Unmeasured: ...
