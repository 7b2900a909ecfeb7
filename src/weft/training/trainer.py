"""Inner steps on this machine's device, evaluation and samples.

    positions --Batches--> batch --Backward--> mean gradient --clip, AdamW--> local parameters

A loss or a gradient that is not finite stops the peer before it reaches the parameters.

For methods that send deltas the trainer owns its parameters and an inner optimizer. For methods that send gradients it
has neither: its parameters are the outer ones (on a CPU, the very same memory), and `gradient` is all it computes.

`park` leaves the device: what it held goes to the host's memory, where it is read and set as before, until `unpark`.

Everything here is synchronous and belongs to one thread at a time, but for `park` and `unpark`, which may come beside
whoever reads or sets what is kept.

The model that a peer trains, over its local parameters: the run's, or the section of it that a stage has.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft import rng
from weft.clock import Clock
from weft.data import Tokenizer
from weft.data.batch import Batches
from weft.errors import CheckpointError
from weft.events import Emit, MicroBatchChanged, WarmedUp
from weft.inference.sample import Sampling, generate
from weft.model import FlatModel, Transformer, assemble, attach, layout
from weft.model.flat import Part
from weft.model.transformer import SectionModule
from weft.run.config import Genesis, RunConfig
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.training import optimizer as inner
from weft.training.backward import Backward, LossScale
from weft.training.device import allocating, check_fits, choose, limit_memory
from weft.training.learner import Work, nothing
from weft.training.optimizer import InnerOptimizer, State
from weft.training.steps import Steps, mean_loss, prompt_ids


def model_over(vector: Tensor, run: RunConfig, peer: PeerConfig) -> FlatModel:
    """Return the run's model over `vector`, with a gradient beside it."""
    section = run.section if isinstance(run, StagedConfig) else None
    with torch.device("meta"):
        module: Part = Transformer(run.model, has_recompute=peer.has_recompute)
        if section is not None:  # whose passes are computed again as wholes, if they are
            module = SectionModule(run.model, section)
    attach(module, vector)
    gradient = torch.zeros_like(vector)
    spans = layout(run.model, section)
    for span in spans:
        module.get_parameter(span.name).grad = spans.view(gradient, span)
    return FlatModel(module, vector, gradient)


@dataclass(frozen=True, kw_only=True)
class Parked:
    """What a trainer that has left its device keeps on the host."""

    vector: Float32[Tensor, " num"]
    anchor: Float32[Tensor, " num"] | None
    moments: State | None  # None: it has no optimizer
    scale: LossScale
    micro_batch: int


class Trainer:
    """The inner loop of one peer.

    Args:
        run: what all peers share.
        peer: what this machine gives.
        batches: the run's training windows.
        emit: told of every step, and where the device made it change its ways.
    """

    def __init__(self, run: RunConfig, peer: PeerConfig, batches: Batches, emit: Emit, clock: Clock) -> None:
        self._run = run
        self._peer = peer
        self._batches = batches
        self._emit = emit
        self._clock = clock
        self._sends_gradient = run.method.send == "gradient"
        self._steps = Steps(run, emit, clock)
        self._warm_shape: tuple[int, int] | None = None  # of a batch that was tried
        self._anchor: Float32[Tensor, " num"] | None = None  # the outer parameters, which inner steps are pulled to
        self._parked: Parked | None = None
        self._parking = threading.Lock()

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
        micro_batch, wanted = self._fitting(), peer.micro_batch or run.train.batch_size
        if micro_batch < min(wanted, run.train.batch_size):
            self._emit(MicroBatchChanged(before=wanted, after=micro_batch, reason="so many surely fit in free memory"))
        is_shared = self._sends_gradient and self.device.is_cpu
        self._take_device(vector if is_shared else vector.to(self.device.torch, copy=True), micro_batch)
        self.set_anchor(vector)
        self._steps.num_made = 0

    def _fitting(self) -> int:
        """Return how many samples at a time fit."""
        return check_fits(self._run, self._peer, self.device)

    def _take_device(self, held: Float32[Tensor, " num"], micro_batch: int) -> None:
        run, peer = self._run, self._peer
        with allocating("the model", self.device):
            self._model = model_over(held, run, peer)
            self._optimizer: InnerOptimizer | None = (
                None if self._sends_gradient else inner.build(run.train.optimizer, self._model)
            )
        self._warm_shape = None
        self._backward = Backward(self._model, self.device, micro_batch, is_compiled=peer.is_compiled, emit=self._emit)

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    def park(self) -> None:
        """Leave the device, if it has not been left."""
        with self._parking:
            if self._parked is not None:
                return
            self._parked = Parked(
                vector=self._model.vector.cpu(),
                anchor=None if self._anchor is None else self._anchor.cpu(),
                moments=None if self._optimizer is None else self._optimizer.state(),
                scale=self._backward.scale,
                micro_batch=self._backward.micro_batch,
            )
            self._anchor = None
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
                self._anchor = None if parked.anchor is None else parked.anchor.to(self.device.torch)
            self._take_device(held, parked.micro_batch)
            if self._optimizer is not None and parked.moments is not None:
                self._optimizer.load(parked.moments, self._steps.num_made)
            self._backward.scale = parked.scale
            self._parked = None

    def heed(self, run: Genesis) -> None:
        """Train by the settings of `run` from now on: those of the same run, as amended."""
        assert isinstance(run, RunConfig)
        if run.train.seq_len != self._batches.seq_len:
            self._batches = self._batches.resized(run.train.seq_len)
        self._run = self._steps.run = run

    @property
    def has_ended(self) -> bool:
        return False

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
        self._backward.rehearse(train.batch_size, train.seq_len)
        self._warm_shape = train.batch_size, train.seq_len
        self._emit(
            WarmedUp(
                is_compiled=self._peer.is_compiled,
                micro_batch=self._backward.micro_batch,
                duration_s=self._clock.now() - began,
            )
        )

    @property
    def micro_batch(self) -> int:
        """Samples that are computed at a time."""
        return self._backward.micro_batch

    # --- methods that send deltas ---

    def train(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,
        pace: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Work:
        """Make inner steps, one for each whole batch in `positions`.

        Args:
            positions: of the run's samples, from this peer's lease.
            committed_tokens: of the run, at the last commit.
            pace: of the whole run, in multiples of this peer's: what all members make while it makes one step.
            should_stop: asked between steps; True ends the call early with what was done.

        Raises:
            NotFinite: a loss or gradient is NaN or infinite; the parameters are those before the step.
            OutOfMemory: not even one sample at a time fits.
        """
        if self._optimizer is None:
            raise RuntimeError("a method that sends gradients makes no inner steps")
        return self._steps.make(positions, committed_tokens, pace, should_stop, self._step)

    def _step(self, positions: NDArray[np.int64], rate: float) -> tuple[float, float]:
        assert self._optimizer is not None
        loss, norm = self._fill_gradient(positions, rate)
        if self._anchor is not None:
            norm = self._pull(self._anchor)
        self._shorten(norm)
        self._optimizer.step(rate)
        return loss, norm

    def local(self) -> Float32[Tensor, " num"]:
        """Return the local parameters on the CPU: there they are the model's own memory, until the next `train`."""
        with self._parking:
            return self._vector.cpu()

    def set_local(self, vector: Float32[Tensor, " num"]) -> None:
        """Set the local parameters, by copying unless they are `vector` already."""
        with self._parking:
            if vector.data_ptr() != self._vector.data_ptr():
                self._vector.copy_(vector)

    @property
    def _vector(self) -> Tensor:
        return self._model.vector if self._parked is None else self._parked.vector

    def set_anchor(self, outer: Float32[Tensor, " num"]) -> None:
        """Let inner steps be pulled towards `outer`, the outer parameters on the CPU, where the method says so.

        There it is the very same memory, and follows what is written to it.
        """
        if not self._run.method.proximal:
            return
        with self._parking:
            if self._parked is not None:
                self._parked = replace(self._parked, anchor=outer)
            elif self._anchor is None or self._anchor.device.type == "cpu":
                self._anchor = outer.to(self.device.torch)
            else:
                self._anchor.copy_(outer)

    def _pull(self, anchor: Tensor) -> float:
        """Add the gradient of mu / 2 |x - outer|^2, and return the norm of the sum. FedProx: 1812.06127, equation 2."""
        gradient, pull = self._model.gradient, self._run.method.proximal
        gradient.add_(self._model.vector, alpha=pull).sub_(anchor, alpha=pull)
        return float(gradient.norm())

    def private_state(self) -> State:
        """Return what only this peer has and an exact resume needs, on the CPU.

        Returns:
            Flat fp32 vectors, views where the device is the CPU, until the next `train`; and counters, each one int64.
        """
        with self._parking:
            if self._parked is None:
                scale, moments = self._backward.scale, None if self._optimizer is None else self._optimizer.state()
            else:
                scale, moments = self._parked.scale, self._parked.moments
            counters = {"num_steps": self._steps.num_made, **scale.counters()}
            state = {name: torch.tensor([count], dtype=torch.int64) for name, count in counters.items()}
            return {**state, **(moments or {})}

    def load_private_state(self, state: State) -> None:
        """Take up what `private_state` returned, by copying.

        Raises:
            CheckpointError: it belongs to another model or is incomplete.
        """
        counters = {name: int(value) for name, value in state.items() if not value.is_floating_point()}
        if "num_steps" not in counters:
            raise CheckpointError(
                "the saved state does not say how many steps were made. Resume from another checkpoint, or join anew."
            )
        if self._optimizer is not None:
            self._optimizer.load(state, counters["num_steps"])
        self._steps.num_made = counters["num_steps"]
        self._backward.scale.load(counters)

    # --- methods that send gradients ---

    def gradient(
        self, positions: NDArray[np.int64], committed_tokens: int, pace: float
    ) -> tuple[Float32[Tensor, " num"], Work]:
        """Return the mean gradient over the samples at `positions`, and change no parameter.

        It is clipped where the error that a codec leaves is kept: what is merged is no gradient then. Elsewhere what is
        merged is clipped.

        On a CPU the gradient is the model's own memory, until the next call.

        Raises:
            NotFinite, OutOfMemory: as `train`.
        """
        began = self._clock.now()
        rate = self._steps.rate(committed_tokens, 1, pace)
        loss, norm = self._fill_gradient(positions, rate)
        if self._run.method.feedback is not None:
            self._shorten(norm)
        self._steps.done(loss, norm, rate, len(positions), began)
        return self._model.gradient.cpu(), self._steps.work([loss], len(positions), began)

    # --- the outer parameters ---

    def evaluate(
        self,
        vector: Float32[Tensor, " num"],
        batches: Batches,
        num_windows: int,
        between: Callable[[], None] = nothing,
    ) -> tuple[float, int]:
        """Return the mean loss of the outer parameters `vector` on held-out windows (nats per token), and their tokens.

        Args:
            between: called after each batch; what it raises ends the evaluation.

        Raises:
            NotFinite: the loss is NaN or infinite.
            OutOfMemory: as `train`.
        """
        module = self._outer_model(vector)
        total, num_tokens = 0.0, 0
        for batch in batches.heldout_batches(num_windows, self._run.train.batch_size):
            total += self._backward.summed_loss(module, batch)
            num_tokens += batch[0].numel()
            between()
        return mean_loss(total, num_tokens), num_tokens

    def sample(
        self,
        vector: Float32[Tensor, " num"],
        tokenizer: Tokenizer,
        prompt: str,
        num_tokens: int,
        seed: int,
        between: Callable[[], None] = nothing,
    ) -> str:
        """Return the text that the outer parameters `vector` write after `prompt`, of at most `num_tokens` tokens.

        An empty prompt stands for the end of the text before; where the tokenizer has none, for its first token.

        Args:
            between: called after each token; what it raises ends the text.

        Raises:
            DataError: the prompt has a character that the tokenizer does not know.
            NotFinite: the model's logits are NaN or infinite.
            OutOfMemory: there is no room for it beside what trains.
        """
        end = tokenizer.end_of_text
        ids = prompt_ids(tokenizer, prompt)
        sampling = Sampling(max_new_tokens=num_tokens, stop_id=end)
        module = self._outer_model(vector)
        with allocating("a text of this length", self.device):
            tokens = generate(module, ids, sampling, rng.stream(seed, "sample"))
            written = []
            for token in tokens:
                written.append(token)
                between()
            return tokenizer.decode(written)

    def _outer_model(self, vector: Tensor) -> Transformer:
        self.device.release_cache()
        with allocating("the outer model beside the local one", self.device):
            return assemble(self._run.model, vector.to(self.device.torch))

    # --- one step ---

    def _fill_gradient(self, positions: NDArray[np.int64], rate: float) -> tuple[float, float]:
        loss, norm = self._backward.fill(self._batches.at(positions))
        self._steps.require_finite(loss, norm, rate)
        return loss, norm

    def _shorten(self, norm: float) -> None:
        if (factor := self._steps.shortening(norm)) != 1.0:
            self._model.gradient.mul_(factor)
