"""The replicated state: outer parameters, outer optimizer, the manifest they belong to, and the charter after it.

Everything here is computed the same way on every member (docs/adr: exact arithmetic), so equal heads mean equal bits.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.errors import CheckpointError, PayloadError
from weft.ids import Round
from weft.run.amend import amended, first_charter
from weft.run.config import Genesis
from weft.run.staged import confinement
from weft.sync.governance import charter_after
from weft.sync.merge.method import OUTER, Method, Scope
from weft.sync.merge.outer import State as OuterState
from weft.sync.merge.outer import StepContext
from weft.sync.merge.reduce import decode_parts, parts_of, reply_codec_in
from weft.sync.merge.sharded import SpreadVector, alike, empty_like
from weft.sync.method.schedule import lr
from weft.sync.records import rewinds
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest, next_base
from weft.wire import Buffer


def is_complete(head: Manifest | None, charter: Charter) -> bool:
    """Whether all is trained, or another run goes on. The last round is a mean, also where an act ends the run."""
    if head is None or head.is_gossip:
        return False
    return head.committed_tokens >= charter.settings.tokens or charter.has_ended


class Replica:
    """
    Args:
        run: the genesis.
    """

    def __init__(self, run: Genesis, outer: Float32[Tensor, " num"]) -> None:
        self.outer = outer
        self.head: Manifest | None = None
        self.run = run
        self._num_decayed, self._shapes = run.vector.num_decayed, run.vector.tensors
        self._confinement = confinement(run)
        self._set_charter(first_charter(run))
        self.scope = Scope(self.method.num_sent(outer.numel()), run.method.fragments)
        self.state: OuterState = {
            name: alike(vector, outer) for name, vector in self.method.init(outer.numel()).items()
        }
        self._merged = None if isinstance(outer, SpreadVector) else torch.empty(self.scope.most_sent)

    @property
    def is_complete(self) -> bool:
        return is_complete(self.head, self.charter)

    def begin(self, opening: Manifest) -> None:
        """Stand at a run's first manifest, with the initial state."""
        self.head = opening

    def apply(
        self, manifest: Manifest, results: tuple[Buffer, ...], earlier: Float32[Tensor, " num"] | None = None
    ) -> None:
        """Make the outer step of a committed round, in place.

        Args:
            earlier: the outer parameters that the run goes back to, where the manifest says that it does.

        Raises:
            PayloadError: a result is not finite or of another size, or `earlier` is missing; nothing has changed.
        """
        back = rewinds.decided(manifest)
        if back is not None and (earlier is None or earlier.numel() != self.outer.numel()):
            raise PayloadError(f"round {manifest.round} goes back to round {back.round}, whose parameters are not here")
        if manifest.has_result:
            round, parts = manifest.round, parts_of(manifest, self.scope)
            merged = empty_like(self.outer) if self._merged is None else self._merged[: self.scope.num_sent(round)]
            decode_parts(reply_codec_in(self.method.choices, round), results, parts, merged)
            self.make_step(round, merged, manifest.committed_tokens)
        if self.head is not None:
            after = charter_after(next_base(self.head, self.charter), manifest)
            if after != self.charter:
                self._set_charter(after)
        if back is not None and earlier is not None:
            self.outer.copy_(earlier)
            for name, vector in self.method.init(self.outer.numel()).items():
                self.state[name].copy_(vector)
        self.head = manifest

    def make_step(self, round: Round, merged: Float32[Tensor, " num_sent"], committed_tokens: int) -> None:
        """Make the outer step on what `round` synchronises, in place."""
        context = self._context(round, committed_tokens)
        if self.scope.fragments == 1:
            self.method.apply(self.outer, self.state, merged, context)
            if self._confinement is not None:
                self._confinement.constrain(self.outer)
            return
        outer = self.scope.take(self.outer, round)
        state = {name: self.scope.take(vector, round) for name, vector in self.state.items()}
        self.method.apply(outer, state, merged, context)
        self.scope.put(self.outer, round, outer)
        for name, vector in state.items():
            self.scope.put(self.state[name], round, vector)

    @property
    def result_nbytes(self) -> int:
        """Return what all results of one round take: what a newcomer fetches for each that it replays."""
        return reply_codec_in(self.method.choices, 0).nbytes(self.scope.most_sent)

    def vectors(self) -> dict[str, Tensor]:
        """Return every replicated vector by name; views, not copies."""
        return {OUTER: self.outer, **self.state}

    def load(self, head: Manifest | None, charter: Charter, vectors: Mapping[str, Tensor]) -> None:
        """Take over another replica's state, and what holds after `head`.

        Raises:
            CheckpointError: vectors are missing, or of another length.
        """
        mine = self.vectors()
        for name, vector in mine.items():
            if name not in vectors or vectors[name].numel() != vector.numel():
                raise CheckpointError(
                    f"no vector {name!r} of {vector.numel()} numbers in this state: it is another run's"
                )
        for name, vector in mine.items():
            vector.copy_(vectors[name])
        self.head = head
        self._set_charter(charter)

    def _set_charter(self, charter: Charter) -> None:
        self.charter = charter
        self.config = amended(self.run, charter)  # to train by
        self.method = Method(self.config.method, self.config.optimizer, self._shapes)

    def _context(self, round: Round, committed_tokens: int) -> StepContext:
        return StepContext(
            number=max(round // self.scope.fragments, 1),  # of this fragment
            round=round,
            lr=lr(self.charter.settings.schedule, committed_tokens),
            num_decayed=self._num_decayed,
            max_norm=self.config.clip if self.config.method.sends_gradient else None,
        )
