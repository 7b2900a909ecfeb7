"""Inner steps on this machine's device, evaluation and samples.

    positions --Batches--> micro-batches --loss, backward--> flat gradient --clip, AdamW--> local parameters

A step's gradient is the mean over its batch, gathered from micro-batches as large as memory allows. When memory runs
out the micro-batch is halved and the same step begins again with the same samples: nothing is lost but time, and an
event says so. A loss or a gradient that is not finite stops the peer before it reaches the parameters.

For methods that send deltas the trainer owns its parameters and an inner optimizer. For methods that send gradients it
has neither: its parameters are the outer ones (on a CPU, the very same memory), and `gradient` is all it computes.

Everything here is synchronous and belongs to one thread. It does not know peers, rounds, sockets or asyncio.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft import rng
from weft.clock import Clock
from weft.data import Tokenizer
from weft.data.batch import Batch, Batches
from weft.errors import NotFinite, OutOfMemory
from weft.events import Emit, MicroBatchChanged, StepDone
from weft.ids import Step
from weft.inference.sample import Sampling, generate
from weft.model import FlatModel, Transformer, assemble, attach, layout, num_parameters
from weft.peer.config import PeerConfig, RunConfig
from weft.peer.device import check_fits, choose, is_out_of_memory
from weft.peer.inner import InnerOptimizer, State
from weft.sync.schedule import lr

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a call of the trainer did."""

    num_steps: int
    num_tokens: int
    mean_loss: float  # nats per token; NaN where no step was made
    duration_s: float


class Trainer:
    """The inner loop of one peer.

    Args:
        run: what all peers share.
        peer: what this machine gives.
        batches: the run's training windows.
        emit: told of every step and of a micro-batch that was halved.
    """

    def __init__(self, run: RunConfig, peer: PeerConfig, batches: Batches, emit: Emit, clock: Clock) -> None:
        self._run = run
        self._peer = peer
        self._batches = batches
        self._emit = emit
        self._clock = clock
        self._sends_gradient = run.method.send == "gradient"
        self._num_steps = 0
        self._micro_batch = run.train.batch_size

    def start(self, vector: Float32[Tensor, " num"]) -> None:
        """Choose the device and take `vector`, the outer parameters on the CPU, as the local ones.

        Where gradients are sent and the device is the CPU, `vector` itself becomes the model's memory; otherwise it is
        copied. Starting again discards the inner optimizer's state.

        Raises:
            ConfigError: no such device.
            TooLarge: the model does not fit this machine.
        """
        if self._peer.threads:
            torch.set_num_threads(self._peer.threads)
        self.device = choose(self._peer)
        fitting = check_fits(self._run, self._peer, self.device)
        if fitting < self._micro_batch:
            self._set_micro_batch(fitting, "as many samples as are sure to fit")
        is_shared = self._sends_gradient and self.device.is_cpu
        held = vector if is_shared else vector.to(self.device.torch, copy=True)
        self._model = _model_over(self._run, self._peer, held)
        self._optimizer = None if self._sends_gradient else InnerOptimizer(self._run.train.optimizer, self._model)
        module = self._model.module
        self._loss: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(module.loss) if self._peer.is_compiled else module.loss
        )

    @property
    def micro_batch(self) -> int:
        """Samples that are computed at a time."""
        return self._micro_batch

    # --- methods that send deltas ---

    def train(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,
        num_members: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Work:
        """Make inner steps, one for each whole batch in `positions`.

        Args:
            positions: of the run's samples, from this peer's lease.
            committed_tokens: of the run, at the last commit. Step i of this call assumes that every member has made i
                steps since.
            num_members: who trains at this pace, this peer included.
            should_stop: asked between steps; True ends the call early with what was done.

        Raises:
            NotFinite: a loss or gradient is NaN or infinite; the parameters are those before the step.
            OutOfMemory: not even one sample at a time fits.
        """
        if self._optimizer is None:
            raise RuntimeError("a method that sends gradients makes no inner steps")
        began, size, losses = self._clock.now(), self._run.train.batch_size, list[float]()
        for start in range(0, len(positions) - size + 1, size):
            if should_stop():
                break
            rate = self._rate(committed_tokens, len(losses) + 1, num_members)
            began_step = self._clock.now()
            loss, norm = self._fill_gradient(self._batches.at(positions[start : start + size]), rate)
            if norm > self._run.train.clip:
                self._model.gradient.mul_(self._run.train.clip / norm)
            self._optimizer.step(rate)
            losses.append(loss)
            self._step_done(loss, rate, norm, size, began_step)
        return self._work(losses, len(losses) * size, began)

    def local(self) -> Float32[Tensor, " num"]:
        """Return the local parameters on the CPU: there they are the model's own memory, until the next `train`."""
        return self._model.vector.cpu()

    def set_local(self, vector: Float32[Tensor, " num"]) -> None:
        """Set the local parameters, by copying unless they are `vector` already."""
        if vector.data_ptr() != self._model.vector.data_ptr():
            self._model.vector.copy_(vector)

    def private_state(self) -> State:
        """Return what only this peer has and an exact resume needs: on a CPU views, until the next `train`."""
        state = {} if self._optimizer is None else self._optimizer.state()
        state["num_made"] = torch.tensor([self._num_steps], dtype=torch.int64)
        return state

    def load_private_state(self, state: State) -> None:
        """Take up what `private_state` returned, by copying.

        Raises:
            CheckpointError: it belongs to another model or is incomplete.
        """
        if self._optimizer is not None:
            self._optimizer.load(state)
        self._num_steps = int(state["num_made"].item())

    # --- methods that send gradients ---

    def gradient(
        self, positions: NDArray[np.int64], committed_tokens: int, num_members: int
    ) -> tuple[Float32[Tensor, " num"], Work]:
        """Return the mean gradient over the samples at `positions`, unclipped, and change no parameter.

        On a CPU the gradient is the model's own memory, until the next call.

        Raises:
            NotFinite, OutOfMemory: as `train`.
        """
        began = self._clock.now()
        rate = self._rate(committed_tokens, 1, num_members)
        loss, norm = self._fill_gradient(self._batches.at(positions), rate)
        self._step_done(loss, rate, norm, len(positions), began)
        return self._model.gradient.cpu(), self._work([loss], len(positions), began)

    # --- the outer parameters ---

    def evaluate(self, vector: Float32[Tensor, " num"], batches: Batches, num_windows: int) -> tuple[float, int]:
        """Return the mean loss of the outer parameters `vector` on held-out windows (nats per token), and their tokens.

        Raises:
            NotFinite: the loss is NaN or infinite.
            OutOfMemory: as `train`.
        """
        model = assemble(self._run.model, vector.to(self.device.torch))
        total, num_tokens = 0.0, 0
        with torch.inference_mode():
            for batch in batches.heldout_batches(num_windows, self._run.train.batch_size):
                total += self._halving(lambda batch=batch: self._summed_loss(model, batch))  # type: ignore[misc]
                num_tokens += batch[0].numel()
        if not math.isfinite(total):
            raise NotFinite("the held-out loss is NaN or infinite: the run has diverged. Resume from a checkpoint.")
        return total / num_tokens, num_tokens

    def _summed_loss(self, model: Transformer, batch: Batch) -> float:
        total = 0.0
        for tokens, targets in self._micro_batches(batch):
            with self._autocast():
                logits = model(tokens)
            losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
            total += float(losses.double().sum().item())
        return total

    def sample(
        self, vector: Float32[Tensor, " num"], tokenizer: Tokenizer, prompt: str, num_tokens: int, seed: int
    ) -> str:
        """Return the text that the outer parameters `vector` write after `prompt`, of at most `num_tokens` tokens."""
        model = assemble(self._run.model, vector.to(self.device.torch))
        end = tokenizer.end_of_text
        ids = [int(token) for token in tokenizer.encode(prompt)] or [0 if end is None else end]
        sampling = Sampling(max_new_tokens=num_tokens, stop_id=end)
        return tokenizer.decode(list(generate(model, ids, sampling, rng.stream(seed, "sample"))))

    # --- one step ---

    def _fill_gradient(self, batch: Batch, rate: float) -> tuple[float, float]:
        """Set the flat gradient to the mean over `batch`; return loss and gradient norm, both finite."""
        loss, norm = self._halving(lambda: self._accumulate(batch))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"step {self._num_steps + 1} at learning rate {rate:.3g}: the loss is {loss}, the gradient's norm "
                f"{norm}. The parameters are those before it. Lower train.schedule's lr or lengthen its warm-up, "
                "lower train.clip, or train in fp32 or bf16; then resume from the last checkpoint."
            )
        return loss, norm

    def _accumulate(self, batch: Batch) -> tuple[float, float]:
        self._model.zero_gradient()
        total = torch.zeros((), device=self.device.torch)
        for tokens, targets in self._micro_batches(batch):
            with self._autocast():
                loss = self._loss(tokens, targets)
            # The mean over the batch is the mean of the micro-batches' means, each weighted by its samples.
            share = loss * (len(tokens) / len(batch[0]))
            share.backward()  # type: ignore[no-untyped-call]
            total += share.detach()
        norm = torch.linalg.vector_norm(self._model.gradient)
        loss_value, norm_value = torch.stack((total, norm)).tolist()  # the step's one wait for a GPU
        return loss_value, norm_value

    def _micro_batches(self, batch: Batch) -> list[tuple[Int64[Tensor, "micro seq"], Int64[Tensor, "micro seq"]]]:
        tokens, targets = (part.to(self.device.torch) for part in batch)
        return list(zip(torch.split(tokens, self._micro_batch), torch.split(targets, self._micro_batch), strict=True))

    def _autocast(self) -> AbstractContextManager[object]:
        if self.device.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.torch.type, self.device.autocast_dtype)

    def _halving(self, work: Callable[[], T]) -> T:
        """Do `work` again with half the micro-batch as often as memory runs out.

        Raises:
            OutOfMemory: it ran out with one sample.
        """
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).split("\n")[0][:300]
            # Only here, after the except clause, has the traceback let go of the tensors.
            if self.device.torch.type == "cuda":
                torch.cuda.empty_cache()
            if self._micro_batch == 1:
                raise OutOfMemory(
                    f"one sample of {self._run.train.seq_len} tokens does not fit beside a model of "
                    f"{num_parameters(self._run.model):,} parameters on {self.device.name}: {reason}. Close other "
                    "programs, set has_recompute = true or a half precision, or join from a larger machine."
                )
            self._set_micro_batch(self._micro_batch // 2, reason)

    def _set_micro_batch(self, size: int, reason: str) -> None:
        self._emit(MicroBatchChanged(before=self._micro_batch, after=size, reason=reason))
        self._micro_batch = size

    def _rate(self, committed_tokens: int, num_steps: int, num_members: int) -> float:
        made = num_steps * self._run.tokens_per_step * num_members
        return lr(self._run.train.schedule, committed_tokens + made)

    def _step_done(self, loss: float, rate: float, norm: float, num_samples: int, began: float) -> None:
        self._num_steps += 1
        self._emit(
            StepDone(
                step=Step(self._num_steps),
                loss=loss,
                learning_rate=rate,
                gradient_norm=norm,
                num_tokens=num_samples * self._run.train.seq_len,
                duration_s=self._clock.now() - began,
            )
        )

    def _work(self, losses: list[float], num_samples: int, began: float) -> Work:
        return Work(
            num_steps=len(losses),
            num_tokens=num_samples * self._run.train.seq_len,
            mean_loss=sum(losses) / len(losses) if losses else math.nan,
            duration_s=self._clock.now() - began,
        )


def _model_over(run: RunConfig, peer: PeerConfig, vector: Tensor) -> FlatModel:
    with torch.device("meta"):
        module = Transformer(run.model, has_recompute=peer.has_recompute)
    attach(module, vector)
    gradient = torch.zeros_like(vector)
    for span in layout(run.model):
        module.get_parameter(span.name).grad = layout(run.model).view(gradient, span)
    return FlatModel(module, vector, gradient)
