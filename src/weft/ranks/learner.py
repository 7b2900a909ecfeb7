"""Inner steps that the ranks of a site make together, as rank 0's peer asks for them.

It is what `Trainer` is to a peer of one process; vectors lie on the ranks. A batch is read here and shared with all, so
the others need no data. `park` takes parameters and moments off the devices, into the memory of the ranks' machines.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import numpy as np
import torch
from jaxtyping import Float32
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import Clock
from weft.data.batch import Batches
from weft.data.rows import Batch, blank
from weft.errors import CheckpointError, ConfigError, SiteBroken
from weft.events import Emit, WarmedUp
from weft.inference.sample import Sampling
from weft.model.config import has_base
from weft.ranks import orders
from weft.ranks.shard import moments_of
from weft.ranks.site import Site
from weft.ranks.vector import Moment, SiteVector, spread
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sync.method.choices import AdamWConfig, ExtensionOuterConfig, InnerSgdConfig, SignSgdConfig
from weft.training.optimizer import State
from weft.training.preference import Sums
from weft.training.steps import Mean, Shown, Stepper


class SiteLearner(Stepper):
    """
    Args:
        run: what all peers share.
        micro_batch: samples that a rank computes at a time, at most.
        batches: the run's training windows.
    """

    def __init__(
        self, site: Site, run: RunConfig, micro_batch: int, batches: Batches, emit: Emit, clock: Clock
    ) -> None:
        super().__init__(run, batches, emit, clock)
        self._site = site
        self._most = micro_batch
        self._is_warm = False
        self._center: SiteVector | None = None
        self._parked: tuple[SiteVector, dict[str, SiteVector]] | None = None  # parameters and moments
        self._parking = threading.RLock()

    def start(self, vector: Float32[Tensor, " num"]) -> None:
        self._take_devices(self._there(vector))
        self._num_steps = 0
        self.set_center(vector)

    def _take_devices(self, vector: SiteVector) -> None:
        self._site.order(orders.Begin(run=self._run, local=vector.number))
        self._is_warm = False

    @property
    def is_warm(self) -> bool:
        return self._is_warm or self.is_parked

    def warm_up(self) -> None:
        """Compute a gradient on tokens that mean nothing."""
        if self.is_warm:
            return
        began, train = self._clock.now(), self._run.train
        self._gradient(blank(train.batch_size, train.seq_len, has_rows=self._run.data.has_rows))
        self._site.order(orders.DropGradient())
        self._is_warm = True
        self._emit(WarmedUp(is_compiled=False, micro_batch=self._micro_batch, duration_s=self._clock.now() - began))

    @property
    def _micro_batch(self) -> int:
        """Samples that a rank computes at a time."""
        share = -(-self._run.train.batch_size // self._site.num_ranks)
        return max(min(self._most, share), 1)

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    def park(self) -> None:
        with self._parking:
            if self._parked is None:
                self._parked = self.local(), self._moments()
                self._site.order(orders.Leave())

    def unpark(self) -> None:
        with self._parking:
            if self._parked is not None:
                vector, moments = self._parked
                self._take_devices(vector)
                self._set_moments(moments)
                if self._center is not None:
                    self._site.order(orders.SetAnchor(vector=self._center.number))
                self._parked = None

    # --- steps ---

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        loss, norm = self._gradient(self._batches.at(positions))
        return Mean(loss=loss, norm=norm, num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:
        if self._center is not None:
            norm = cast(float, self._site.order(orders.Pull(strength=self._run.method.proximal)))
        self._site.order(orders.Move(shorten=self._shortening(norm), learning_rate=rate))
        return norm

    def _taken(self, factor: float) -> SiteVector:
        into = self._site.number()
        self._site.order(orders.TakeGradient(shorten=factor, into=into.number))
        return SiteVector(self._site, into)

    def _gradient(self, batch: Batch) -> tuple[float, float]:
        return cast(tuple[float, float], self._on(orders.Gradient, batch))

    def _on(self, kind: type[orders.Gradient | orders.Loss], batch: Batch) -> object:
        num_samples, seq_len = batch.tokens.shape
        order = kind(
            num_samples=num_samples,
            seq_len=seq_len,
            micro_batch=self._micro_batch,
            has_positions=batch.positions is not None,
        )
        return self._site.order(order, *(tensor for tensor in batch if tensor is not None))

    # --- parameters ---

    def local(self) -> SiteVector:
        with self._parking:
            if self._parked is not None:
                return cast(SiteVector, self._parked[0].clone())
            into = self._site.number()
            self._site.order(orders.Local(into=into.number))
            return SiteVector(self._site, into)

    def set_local(self, vector: Float32[Tensor, " num"]) -> None:
        there = self._there(vector)
        with self._parking:
            if self._parked is not None:
                self._parked = cast(SiteVector, there.clone()), self._parked[1]
            else:
                self._site.order(orders.SetLocal(vector=there.number))

    def set_center(self, outer: Float32[Tensor, " num"]) -> None:
        if self._run.method.proximal:
            self._center = self._there(outer)
            with self._parking:
                if self._parked is None:
                    self._site.order(orders.SetAnchor(vector=self._center.number))

    def _there(self, vector: Float32[Tensor, " num"]) -> SiteVector:
        return vector if isinstance(vector, SiteVector) else spread(self._site, vector)

    # --- checkpoints ---

    def private_state(self) -> State:
        moments: State = {name: Moment(self._site, partial(self._read_moment, name)) for name in moments_of(self._run)}
        return {"num_steps": torch.tensor([self._num_steps], dtype=torch.int64), **moments}

    def load_private_state(self, state: State) -> None:
        wanted = moments_of(self._run)
        if "num_steps" not in state or any(name not in state for name in wanted):
            raise CheckpointError(
                "the saved state does not hold what the inner optimizer needs. Resume from another checkpoint, or "
                "join again."
            )
        self._num_steps = int(state["num_steps"])
        for name in wanted:  # one after the other: each lies there twice meanwhile
            self._set_moments({name: self._there(state[name])})

    def _read_moment(self, name: str, where: range) -> Float32[Tensor, " piece"]:
        with self._parking:
            if self._parked is not None:
                return self._parked[1][name].read(where)
            piece = torch.empty(len(where))
            self._site.order(orders.ReadMoment(name=name, start=where.start, stop=where.stop), piece)
            return piece

    def _moments(self) -> dict[str, SiteVector]:
        found = {name: SiteVector(self._site, self._site.number()) for name in moments_of(self._run)}
        if found:
            self._site.order(orders.Moments(into={name: vector.number for name, vector in found.items()}))
        return found

    def _set_moments(self, moments: dict[str, SiteVector]) -> None:
        vectors = {name: vector.number for name, vector in moments.items()}
        self._site.order(orders.SetMoments(vectors=vectors, num_steps=self._num_steps))

    # --- the outer parameters ---

    @contextmanager
    def _showing(self, vector: Float32[Tensor, " num"]) -> Iterator[Shown]:
        def write(ids: list[int], sampling: Sampling, seed: int, within_s: float) -> list[int]:
            order = orders.Generate(prompt=tuple(ids), sampling=sampling, seed=seed, within_s=within_s)
            return cast(list[int], self._site.order(order))

        worn = self._there(vector)
        self._site.order(orders.Wear(vector=worn.number))
        try:
            yield Shown(lambda batch: Sums(cast(float, self._on(orders.Loss, batch))), write)
        finally:
            with suppress(SiteBroken):  # what broke it is told
                self._site.order(orders.Unwear())


def check(run: RunConfig, settings: PeerConfig) -> None:
    """Refuse what a site cannot train.

    Raises:
        ConfigError: says what, and what to do.
    """
    method, optimizer = run.method, run.train.optimizer
    reasons = {
        "method.among: members exchange with neighbours": method.graph is not None,
        'method.fragments, overlap, mix or error = "local"': method.is_streaming,
        'method.merged_by = "all": rank 0 would hold sums of the whole vector': method.is_merged_by_all,
        f"method.basis = {method.basis!r}": method.basis != "flat",
        "method.apply: a step from outside of weft": isinstance(method.apply, ExtensionOuterConfig),
        "method.apply: sign_sgd": isinstance(method.apply, SignSgdConfig),
        "train.optimizer: muon": not isinstance(optimizer, AdamWConfig | InnerSgdConfig),
        'peer.precision = "fp16"': settings.precision == "fp16",
        "peer.is_compiled = true": settings.is_compiled,
        "train.loss: pairs of answers": run.train.loss is not UNSET,
        "adapter, model: a part of it is frozen": has_base(run.model),
        "reward": run.reward is not UNSET,
        "peer.is_drawing_only": settings.is_drawing_only,
        'trust.type = "audited": no process has the whole state of a step': isinstance(run.trust, AuditedTrust),
    }
    for what, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"{what}: a site of several processes cannot train this way. Start one process instead, or choose what "
                "docs/sites.md names."
            )
