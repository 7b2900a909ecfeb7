"""A peer's checkpoint: what goes into it, when, and how a peer goes on from one and from the journal after it."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from weft.errors import CheckpointError, DiskFull
from weft.events import CheckpointFailed, CheckpointSaved, Event, Notice, WorkDropped
from weft.ids import BranchId, Round, Tokens
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.state.carry import FORGOTTEN, OUTDATED, Carry
from weft.peer.state.checkpoint import NAME, Contents, Snapshot, save
from weft.peer.state.mixing import Met
from weft.peer.state.replica import Replica
from weft.run.amend import first_charter
from weft.store.journal import FULL_NBYTES
from weft.sync.merge.reduce import parts_of
from weft.sync.records import rewinds
from weft.sync.records.messages import Base, Certificate, Manifest, counted_of, own_work
from weft.training.learner import Learner
from weft.wire import Buffer, digest_of

TRAINED_AT_MS = "trained_at_ms"  # a counter: when this peer has last trained; none was made before there was one, or 0
NUM_KEPT = 2  # rounds up to a checkpoint that stay in the journal, for others


class Autosave:
    """
    Args:
        save_beside: saves what belongs to the checkpoint that has just been written.
        earlier: returns the parameters that a manifest goes back to, where this disk has them.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        carry: Carry,
        trainer: Learner,
        save_beside: Callable[[], None] = lambda: None,
        earlier: Callable[[Manifest], Tensor | None] = lambda _manifest: None,
    ) -> None:
        self._earlier = earlier
        self._save_beside = save_beside
        self._run = replica.run
        self._context = context
        self._replica = replica
        self._carry = carry
        self._trainer = trainer
        self._saved_at = context.clock.now()
        self._branch = BranchId(replica.run.run)  # of the newest checkpoint
        self._journal = context.journal
        self._replayed: list[Certificate] = []  # the newest
        self._told: list[Event] = []  # what is to be said of it, from the event loop
        self._trained_at_ms, self._num_steps = 0, 0

    async def save_if_due(self) -> None:
        """Write a checkpoint where it is time, where the journal is full, and on another branch than the one before was
        written on: a process that finds that one would go on where this peer has left."""
        if not (every_s := self._context.settings.checkpoint_every_s):
            return
        head = self._replica.head
        is_time = self._context.clock.now() - self._saved_at >= every_s
        is_elsewhere = head is not None and head.branch != self._branch
        if is_time or is_elsewhere or await self._context.compute.serve(self._is_journal_full):
            await self.save_if_possible()

    async def save_if_possible(self) -> bool:
        """Write a checkpoint; where it cannot be written, an event says so, the one before stays, and it returns False:
        there may be room, or the folder writable, when the next is due."""
        try:
            await self.save()
        except (DiskFull, CheckpointError):
            return False
        return True

    async def save(self) -> None:
        """Write a checkpoint, where there is a state to keep.

        Raises:
            DiskFull: no room; the one before stays.
            CheckpointError: the folder cannot be written.
        """
        path = self._context.folder.checkpoint
        try:
            async with self._context.learner_lock:
                saved = await self._context.compute.serve(self._save)
        except (DiskFull, CheckpointError) as error:
            self._context.emit(CheckpointFailed(path=str(path), reason=str(error)))
            raise
        else:
            if saved is not None and saved.head is not None:
                self._branch = saved.head.branch
                nbytes = saved.replicated.nbytes + saved.private.nbytes
                written = digest_of(saved.replicated)
                self._context.emit(
                    CheckpointSaved(path=str(path), round=saved.head.round, digest=written, nbytes=nbytes)
                )
                until = Round(saved.head.round - NUM_KEPT)
                await self._context.compute.serve(lambda: self._journal.forget(until))
        finally:
            self._saved_at = self._context.clock.now()

    def restore(self, snapshot: Snapshot) -> None:
        """Go on exactly where the snapshot was taken, which lets its vectors go."""
        charter = snapshot.charter or first_charter(self._run)
        if snapshot.head is not None:
            self._branch = snapshot.head.branch
        if not snapshot.counters:  # kept for others: nothing of it was this peer's own
            self._carry.settle(lambda: self._replica.load(snapshot.head, charter, snapshot.replicated), False)
            snapshot.let_go()
            return
        self._replica.load(snapshot.head, charter, snapshot.replicated)
        vectors, counters = dict(snapshot.private), dict(snapshot.counters)
        self._trained_at_ms = counters.pop(TRAINED_AT_MS) if TRAINED_AT_MS in counters else self._saved_at_ms()
        self._num_steps = counters.get("num_steps", 0)
        self._carry.load(vectors, counters)
        state = {name: torch.tensor([number], dtype=torch.int64) for name, number in counters.items()}
        self._trainer.load_private_state({**vectors, **state})
        snapshot.let_go()
        vectors.clear()
        self._replay()

    def _replay(self) -> None:
        """Make again, after what was restored, the outer steps that are in the journal."""
        if (head := self._replica.head) is None:
            return
        chain = Chain(head, self._replica.charter)
        for certificate in self._journal.rounds():
            manifest = certificate.manifest
            if manifest.round > chain.head.round:
                results, earlier = self._results(manifest), self._earlier(manifest)
                if (
                    results is None
                    or (earlier is None and rewinds.decided(manifest) is not None)
                    or not chain.proven(certificate)
                    or not self._knows_what_counts(chain.base, manifest)
                ):
                    break
                mine, carried = own_work(manifest, self._context.node.peer), self._carry.tokens
                self._carry.settle(
                    lambda: self._replica.apply(manifest, results, earlier),  # noqa: B023
                    mine is not None,
                    round=manifest.round,
                    met=Met(is_known=False) if manifest.is_gossip else None,
                )
                chain.append(certificate)
                if (lost := carried - self._carry.tokens - (0 if mine is None else mine.tokens)) > 0:
                    why = OUTDATED if mine is None else FORGOTTEN
                    self._told.append(WorkDropped(tokens=Tokens(lost), reason=why))
            self._replayed = [*self._replayed, certificate][-NUM_KEPT:]
        if chain.head.round > head.round:
            text = f"loaded the checkpoint of round {head.round} and what was decided since, up to round"
            self._told.append(Notice(text=f"{text} {chain.head.round}, from this disk"))

    def tell(self) -> None:
        """Say what was restored, before anything that others tell is done on top of it."""
        for event in self._told:
            self._context.emit(event)
        self._told = []

    def hand_on(self, chain: Chain) -> None:
        """Let others have the newest rounds of the journal: who was killed a moment earlier makes them again, too."""
        for certificate in self._replayed:
            if certificate.manifest.branch == chain.head.branch:
                chain.recall(certificate)
                for part in certificate.manifest.parts:
                    if (data := self._journal.result(certificate.manifest.round, part.result)) is not None:
                        chain.keep(certificate.manifest.round, part.result, data)

    def _results(self, manifest: Manifest) -> tuple[Buffer, ...] | None:
        """Return the results that a manifest names; None: they are not all here."""
        found: list[Buffer] = []
        for here, part in zip(parts_of(manifest, self._replica.scope), manifest.parts, strict=True):
            data = self._journal.result(manifest.round, part.result) if len(here) else b""
            if data is None:
                return None
            found.append(data)
        return tuple(found)

    def _knows_what_counts(self, base: Base, manifest: Manifest) -> bool:
        """Return whether the manifest alone tells if what this peer carries is counted in it."""
        mine = counted_of(manifest, self._context.node.peer)
        if mine is not None and mine.legacy is not None:
            return False
        return self._context.node.peer in base.electorate or not self._carry.tokens

    def _saved_at_ms(self) -> int:
        with suppress(OSError):
            return int(1000 * (self._context.folder.checkpoint / NAME).stat().st_mtime)
        return 0

    def _is_journal_full(self) -> bool:
        state_nbytes = sum(vector.nbytes for vector in self._replica.vectors().values())
        return self._journal.nbytes > max(FULL_NBYTES, 2 * state_nbytes)

    def _save(self) -> Contents | None:
        if self._replica.head is None:
            return None  # a newcomer that holds nothing yet must not overwrite what an earlier process saved
        data, private = self._context.data, self._trainer.private_state()
        vectors = {name: vector for name, vector in private.items() if vector.is_floating_point()}
        counters = {name: int(vector.item()) for name, vector in private.items() if not vector.is_floating_point()}
        if (num_steps := counters.get("num_steps", 0)) != self._num_steps:
            self._num_steps, self._trained_at_ms = num_steps, int(1000 * self._context.clock.wall())
        counters[TRAINED_AT_MS] = self._trained_at_ms
        snapshot = Snapshot(
            config=self._run,
            tokenizer=b"" if data is None else data.tokenizer.to_bytes(),
            came_with=b"" if data is None else data.came_with,
            head=self._replica.head,
            charter=self._replica.charter,
            replicated=self._replica.vectors(),
            private={**vectors, **self._carry.vectors()},
            counters={**counters, **self._carry.counters()},
        )
        saved = save(self._context.folder.checkpoint, snapshot)
        self._save_beside()
        return saved
