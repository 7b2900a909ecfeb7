"""A peer's checkpoint: what goes into it, when, and how a peer goes on from one.

It does not know the file format (`checkpoint` does), nor whether others have gone further meanwhile.
"""

from contextlib import suppress

import torch

from weft.errors import DiskFull
from weft.events import CheckpointFailed, CheckpointSaved
from weft.peer.amended import first_charter
from weft.peer.checkpoint import Contents, Snapshot, save
from weft.peer.config import RunConfig
from weft.peer.contribution import Carry
from weft.peer.place import Place
from weft.peer.replica import Replica
from weft.peer.trainer import Trainer
from weft.wire import digest_of


class Saver:
    def __init__(self, run: RunConfig, place: Place, replica: Replica, carry: Carry, trainer: Trainer) -> None:
        self._run = run
        self._place = place
        self._replica = replica
        self._carry = carry
        self._trainer = trainer
        self._saved_at = place.clock.now()

    async def save_if_due(self) -> None:
        every_s = self._place.settings.checkpoint_every_s
        if every_s and self._place.clock.now() - self._saved_at >= every_s:
            with suppress(DiskFull):  # an event: the one before stays, and there may be room when the next is due
                await self.save()

    async def save(self) -> None:
        """Write a checkpoint, where there is a state to keep.

        Raises:
            DiskFull: no room; the one before stays.
            CheckpointError: the folder cannot be written.
        """
        path = self._place.folder.checkpoint
        try:
            saved = await self._place.compute.serve(self._save)
        except DiskFull as error:
            self._place.emit(CheckpointFailed(path=str(path), reason=str(error)))
            raise
        else:
            if saved is not None and saved.head is not None:
                nbytes = saved.replicated.nbytes + saved.private.nbytes
                written = digest_of(saved.replicated)
                self._place.emit(CheckpointSaved(path=str(path), round=saved.head.round, digest=written, nbytes=nbytes))
        finally:
            self._saved_at = self._place.clock.now()

    def restore(self, snapshot: Snapshot) -> None:
        """Go on exactly where the snapshot was taken."""
        charter = snapshot.charter or first_charter(self._run)
        self._replica.load(snapshot.head, charter, snapshot.replicated)
        vectors, counters = dict(snapshot.private), dict(snapshot.counters)
        self._carry.load(vectors, counters)
        state = {name: torch.tensor([number], dtype=torch.int64) for name, number in counters.items()}
        self._trainer.load_private_state({**vectors, **state})

    def _save(self) -> Contents | None:
        if self._replica.head is None:
            return None  # a newcomer that holds nothing yet must not overwrite what an earlier process saved
        private = self._trainer.private_state()
        vectors = {name: vector for name, vector in private.items() if vector.is_floating_point()}
        counters = {name: int(vector.item()) for name, vector in private.items() if not vector.is_floating_point()}
        snapshot = Snapshot(
            config=self._run,
            tokenizer=self._place.tokenizer.to_bytes(),
            head=self._replica.head,
            charter=self._replica.charter,
            replicated=self._replica.vectors(),
            private={**vectors, **self._carry.vectors()},
            counters={**counters, **self._carry.counters()},
        )
        return save(self._place.folder.checkpoint, snapshot)
