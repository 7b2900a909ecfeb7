"""A learner on this machine's device.

    positions --Batches--> batch --Backward--> mean gradient --clip, AdamW--> local parameters

A loss or a gradient that is not finite stops the peer before it reaches the parameters.

For methods that send deltas the trainer owns its parameters and an inner optimizer. For methods that send gradients it
has neither: its parameters are the outer ones (on a CPU, the very same memory), and `gradient` is all it computes.

`park` leaves the device: what it held goes to the host's memory, where it is read and set as before, until `unpark`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float32
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from weft import rng
from weft.clock import Clock
from weft.data.batch import Batches
from weft.data.rows import Batch, blank
from weft.errors import CheckpointError
from weft.events import Emit, MicroBatchChanged, Notice, WarmedUp
from weft.inference.sample import Sampling, generate, timely
from weft.model import flat
from weft.model.flat import Base, FlatModel, assemble, over
from weft.model.sections import Section
from weft.model.transformer import SectionModule, Transformer
from weft.run.config import RunConfig
from weft.run.frozen import Frozen, LoadFrozen
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.run.trust import AuditedTrust
from weft.training.backward import Backward, LossScale, Objective
from weft.training.device import Device, allocating, as_audited, base_numbers, check_fits, choose, limit_memory, to_host
from weft.training.numerics.arithmetic import arithmetic_of
from weft.training.optimizer import InnerOptimizer, State
from weft.training.preference import Preference
from weft.training.steps import Mean, Shown, Stepper

NO_GPU = "no GPU was found, so the cap on its memory (--vram, caps.vram_nbytes) has no effect"


def hold(run: RunConfig, base: Float32[Tensor, " all"], peer: PeerConfig, device: Device) -> Base:
    """Return what the run's adapter goes beside, on the device, as this machine holds it."""
    return flat.hold(run.model, base, _section(run), base_numbers(run, peer, device), device.torch)


def _section(run: RunConfig) -> Section | None:
    return run.section if isinstance(run, StagedConfig) else None


def model_over(vector: Tensor, run: RunConfig, peer: PeerConfig, base: Base | None = None) -> FlatModel:
    """Return the run's model over `vector`, with a gradient beside it.

    Args:
        base: that an adapter goes beside, on the same device.
    """
    section = _section(run)
    with torch.device("meta"):
        module: SectionModule = Transformer(run.model, has_recompute=peer.has_recompute)
        if section is not None:  # whose passes are computed again as wholes, if they are
            module = SectionModule(run.model, section)
    return over(module, vector, base)


@dataclass(frozen=True, kw_only=True)
class Parked:
    """What a trainer that has left its device keeps on the host."""

    vector: Float32[Tensor, " num"]
    center: Float32[Tensor, " num"] | None
    moments: State | None  # None: it has no optimizer
    scale: LossScale
    micro_batch: int


class Trainer(Stepper):
    """The inner loop of one peer.

    Args:
        run: what all peers share.
        peer: what this machine gives.
        batches: the run's training windows.
        emit: told of every step, and where the device made it change its ways.
        frozen: loads what it computes with and never changes, when it takes the device.
    """

    def __init__(
        self, run: RunConfig, peer: PeerConfig, batches: Batches, emit: Emit, clock: Clock, frozen: LoadFrozen = Frozen
    ) -> None:
        super().__init__(run, batches, emit, clock)
        self._load_frozen = frozen
        self._base_here: Base | None = None  # on the device
        self._peer = as_audited(run, peer)
        self._arithmetic = arithmetic_of(run)
        self._sends_gradient = run.method.sends_gradient
        self._warm_shape: tuple[int, int] | None = None  # of a batch that was tried
        self._center: Float32[Tensor, " num"] | None = None  # the outer parameters, which inner steps are pulled to
        self._parked: Parked | None = None
        self._parking = threading.Lock()
        self.has_started = False
        # Told before each step along which gradient it goes, until that is shortened, and how long it is.
        self.on_gradient: Callable[[Tensor, float], None] = lambda _gradient, _norm: None
        self.on_batch: Callable[[Batch], None] = lambda _batch: None  # told of which samples, before that

    def start(self, vector: Float32[Tensor, " num"]) -> None:
        """Choose the device and take `vector`, the outer parameters on the CPU, as the local ones.

        Where gradients are sent and the device is the CPU, `vector` itself becomes the model's memory; otherwise it is
        copied. Starting again discards the inner optimizer's state.

        Raises:
            ConfigError: no such device.
            TooLarge: the model does not fit this machine.
            OutOfMemory: another program was faster to take what was free.
        """
        run, peer = self._run, self._peer
        if peer.num_threads:
            torch.set_num_threads(peer.num_threads)
        self.device = choose(peer)
        if peer.caps.vram_nbytes is not None:
            limit_memory(self.device, peer.caps.vram_nbytes)
            if self.device.is_cpu and peer.device == "auto":
                self._emit(Notice(text=NO_GPU))
        micro_batch, wanted = self._fitting(), peer.micro_batch or run.train.batch_size
        if micro_batch < min(wanted, run.train.batch_size):
            self._emit(
                MicroBatchChanged(before=wanted, after=micro_batch, reason="this many are sure to fit in free memory")
            )
        is_shared = self._sends_gradient and self.device.is_cpu
        self._take_device(vector if is_shared else vector.to(self.device.torch, copy=True), micro_batch)
        self.set_center(vector)
        self._num_steps = 0
        self.has_started = True

    def _fitting(self) -> int:
        return check_fits(self._run, self._peer, self.device)

    def _take_device(self, held: Float32[Tensor, " num"], micro_batch: int) -> None:
        run, peer = self._run, self._peer
        with allocating("the model", self.device):
            frozen = self._load_frozen()
            reference = None if frozen.reference is None else frozen.reference.to(self.device.torch)
            base = None if frozen.base is None else hold(run, frozen.base, peer, self.device)
            del frozen
            model = model_over(held, run, peer, base)
            optimizer = None if self._sends_gradient else self._arithmetic.optimizer(run.train.optimizer, model)
            objective = self._objective(reference, base)
        self._base_here, self._model = base, model
        self._optimizer: InnerOptimizer | None = optimizer
        self._warm_shape = None
        self._backward = Backward(
            self._model,
            self.device,
            micro_batch,
            is_compiled=peer.is_compiled,
            emit=self._emit,
            objective=objective,
            is_fixed=isinstance(run.trust, AuditedTrust),
            norm=self._arithmetic.norm,
        )

    def _objective(self, reference: Tensor | None, base: Base | None) -> Objective | None:
        """Return the run's loss; None: cross entropy, as fast as may be.

        Args:
            reference, base: of `Frozen`, on the device.
        """
        run = self._run
        if run.train.loss is UNSET:
            return self._arithmetic.objective
        return Preference(run.train.loss, None if reference is None else assemble(run.model, reference, base))

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    def park(self) -> None:
        with self._parking:
            if self._parked is not None:
                return
            self._parked = Parked(
                vector=to_host(self._model.vector),
                center=None if self._center is None else to_host(self._center),
                moments=None if self._optimizer is None else self._optimizer.state(),
                scale=self._backward.scale,
                micro_batch=self._backward.micro_batch,
            )
            self._center = self._base_here = None
            del self._model, self._optimizer, self._backward
        self.device.release_cache()

    def unpark(self) -> None:
        """Take the device again, as it was left.

        Raises:
            OutOfMemory: another program has taken it; what was parked is still here.
        """
        with self._parking:
            parked = self._parked
            if parked is None:
                return
            with allocating("the model", self.device):
                held = parked.vector.to(self.device.torch)
                self._center = None if parked.center is None else parked.center.to(self.device.torch)
            self._take_device(held, parked.micro_batch)
            if self._optimizer is not None and parked.moments is not None:
                self._optimizer.load(parked.moments, self._num_steps)
            self._backward.scale = parked.scale
            self._parked = None

    @property
    def is_warm(self) -> bool:
        """Whether a step will wait for nothing but itself: true, too, where there is no device to warm up."""
        return self._parked is not None or self._warm_shape == (self._run.train.batch_size, self._run.train.seq_len)

    def warm_up(self) -> None:
        """Compile, load and allocate what a step and an evaluation need, by making both on tokens that mean nothing.

        Parameters, optimizer, counters and the order of the data stay as they are, to the last bit.

        Raises:
            OutOfMemory: as `train`.
        """
        if self.is_warm:
            return
        began, train = self._clock.now(), self._run.train
        self._rehearse()
        self._warm_shape = train.batch_size, train.seq_len
        self._emit(
            WarmedUp(
                is_compiled=self._backward.is_compiled,
                micro_batch=self._backward.micro_batch,
                duration_s=self._clock.now() - began,
            )
        )

    def _rehearse(self) -> None:
        train, data = self._run.train, self._run.data
        of = partial(blank, seq_len=train.seq_len, has_rows=data.has_rows, is_paired=data.is_paired)
        self._backward.rehearse(of, train.batch_size)

    @property
    def micro_batch(self) -> int:
        return self._backward.micro_batch

    @property
    def num_steps(self) -> int:
        """Inner steps that its optimizer has made."""
        return self._num_steps

    # --- the vector ---

    def local(self) -> Float32[Tensor, " num"]:
        """Return the local parameters on the CPU: there they are the model's own memory, until the next `train`."""
        with self._parking:
            return to_host(self._vector)

    def set_local(self, vector: Float32[Tensor, " num"]) -> None:
        """Set the local parameters, by copying unless they are `vector` already."""
        with self._parking:
            if vector.data_ptr() != self._vector.data_ptr():
                self._vector.copy_(vector)

    @property
    def _vector(self) -> Tensor:
        return self._model.vector if self._parked is None else self._parked.vector

    def set_center(self, outer: Float32[Tensor, " num"]) -> None:
        """Let inner steps be pulled towards `outer`; on a CPU what is written to it later counts, too."""
        if not self._run.method.proximal:
            return
        with self._parking:
            if self._parked is not None:
                self._parked = replace(self._parked, center=outer)
            elif self._center is None or self._center.device.type == "cpu":
                self._center = outer.to(self.device.torch)
            else:
                self._center.copy_(outer)

    def private_state(self) -> State:
        """Return what an exact resume needs: on a CPU views, until the next `train`."""
        with self._parking:
            if self._parked is None:
                scale, moments = self._backward.scale, None if self._optimizer is None else self._optimizer.state()
            else:
                scale, moments = self._parked.scale, self._parked.moments
            counters = {"num_steps": self._num_steps, **scale.counters()}
            state = {name: torch.tensor([count], dtype=torch.int64) for name, count in counters.items()}
            return {**state, **(moments or {})}

    def load_private_state(self, state: State) -> None:
        counters = {name: int(value) for name, value in state.items() if not value.is_floating_point()}
        if "num_steps" not in counters:
            raise CheckpointError(
                "the saved state does not say how many steps were made. Resume from another checkpoint, or join again."
            )
        if self._optimizer is not None:
            self._optimizer.load(state, counters["num_steps"])
        self._num_steps = counters["num_steps"]
        self._backward.scale.load(counters)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let what is set and trained meanwhile be another's: afterwards all is as it was, and nothing was told.

        Raises:
            OutOfMemory: there is no room on the host for what is this peer's own meanwhile.
        """
        with allocating("another's training steps beside this peer's own", self.device):
            local, state = self.local().clone(), {name: value.clone() for name, value in self.private_state().items()}
            held = self._center  # on a CPU the outer parameters themselves, which are written to later
            center = held if held is None or self.device.is_cpu else held.clone()
        run, batches, emit = self._run, self._batches, self._emit
        on_step, on_gradient, on_batch = self.on_step, self.on_gradient, self.on_batch
        self._emit, self.on_step = (lambda _event: None), (lambda _num: None)
        self.on_gradient = lambda _gradient, _norm: None
        self.on_batch = lambda _batch: None
        try:
            yield
        finally:
            self._run, self._batches, self._emit = run, batches, emit
            self.on_step, self.on_gradient, self.on_batch = on_step, on_gradient, on_batch
            self.set_local(local)
            self.load_private_state(state)
            self._center = center

    # --- steps ---

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        batch = self._batches.at(positions)
        self.on_batch(batch)
        loss, norm = self._backward.fill(batch, self._words(positions))
        return Mean(loss=loss, norm=norm, num_samples=len(positions))

    def _words(self, positions: NDArray[np.int64]) -> list[int]:
        """Return by what each sample is computed with some of what is read left out; nothing where all is read."""
        if self._model.module.noise is None:
            return []
        streams = (rng.stream(self._run.seed, "dropout", int(each)) for each in positions)
        return [int(rng.integers64(each, 1)[0]) for each in streams]

    def _descend(self, norm: float, rate: float) -> float:
        if self._optimizer is None:
            raise RuntimeError("a method that sends gradients makes no inner steps")
        if self._center is not None:
            norm = self._pull(self._center)
        self.on_gradient(self._model.gradient, norm)
        self._shorten(self._shortening(norm))
        self._optimizer.step(rate)
        return norm

    def _pull(self, center: Tensor) -> float:
        """Add the gradient of mu / 2 |x - outer|^2, and return the norm of the sum. FedProx: 1812.06127, equation 2."""
        gradient = self._model.gradient
        self._arithmetic.pull(gradient, self._model.vector, center, self._run.method.proximal)
        return float(self._arithmetic.norm(gradient))

    def _taken(self, factor: float) -> Float32[Tensor, " num"]:
        self._shorten(factor)
        return to_host(self._model.gradient)

    def _shorten(self, factor: float) -> None:
        if factor != 1.0:
            self._model.gradient.mul_(factor)

    @contextmanager
    def _showing(self, vector: Float32[Tensor, " num"]) -> Iterator[Shown]:
        self.device.release_cache()
        with allocating("the outer model beside the local one", self.device):
            module = assemble(self._run.model, vector.to(self.device.torch), self._base_here)

        def write(ids: list[int], sampling: Sampling, seed: int, within_s: float) -> Iterator[int]:
            with allocating("a text of this length", self.device):
                yield from timely(generate(module, ids, sampling, rng.stream(seed, "sample")), within_s)

        yield Shown(partial(self._backward.sums, module), write)
