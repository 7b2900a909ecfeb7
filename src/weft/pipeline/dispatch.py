"""Where what others say of micro-batches arrives: at the worker, or the sender, of the stage that it names.

A peer may hold several stages, and begin micro-batches beside. What names a stage that it does not hold is answered so
that whoever said it goes elsewhere.
"""

from weft.ids import PeerId
from weft.pipeline.link import StageLink
from weft.pipeline.messages import Backward, Computed, Forward, GivenUp, IsTaken, Verdict
from weft.pipeline.sender import Sender
from weft.pipeline.worker import Worker


class Dispatch:
    """Of one peer."""

    def __init__(self, link: StageLink) -> None:
        self.workers: dict[int, Worker] = {}  # by the stage that it works in
        self.senders: dict[int, Sender] = {}  # by the stage that it sends to
        link.serve(Forward, self._on_forward)
        link.serve(Backward, self._on_backward)
        link.on_note(Computed, self._on_computed)
        link.on_note(GivenUp, self._on_given_up)

    async def _on_forward(self, peer: PeerId, request: Forward) -> IsTaken:
        worker = self.workers.get(request.stage)
        return IsTaken(is_taken=False) if worker is None else await worker.on_forward(peer, request)

    async def _on_backward(self, peer: PeerId, request: Backward) -> Verdict:
        sender = self.senders.get(request.stage)
        return Verdict(word="unknown") if sender is None else await sender.on_backward(peer, request)

    async def _on_computed(self, peer: PeerId, note: Computed) -> None:
        if (sender := self.senders.get(note.stage)) is not None:
            await sender.on_computed(peer, note)

    async def _on_given_up(self, peer: PeerId, note: GivenUp) -> None:
        if (sender := self.senders.get(note.stage)) is not None:
            await sender.on_given_up(peer, note)
