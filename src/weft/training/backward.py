"""From a batch to its mean gradient, in micro-batches as large as memory allows, in the precision asked for.

    batch --split--> micro-batches --autocast, loss, backward--> sum of share x gradient = mean over the batch

Memory: where it runs out, the micro-batch is halved and the whole batch begins again, with the same samples.
fp16: its smallest number is 6e-8, so the loss is multiplied before the backward pass and the gradient divided after it
(Micikevicius et al., 1710.03740, section 3.2). The factor is halved, and the batch begins again, where a gradient
overflows; it is doubled after 2000 batches without.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.data.rows import Batch
from weft.events import Emit, FellBack, MicroBatchChanged
from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule
from weft.training.device import Device, allocating, first_line, is_out_of_memory
from weft.training.preference import Sums

T = TypeVar("T")

_Loss = Callable[..., Tensor]  # of a batch's tensors


class Samples(Protocol):
    """Samples as tensors, each with a row for each of them."""

    @property
    def tokens(self) -> Tensor: ...

    def part(self, start: int, stop: int) -> "Samples":
        """Return some of them."""
        ...

    def to(self, device: torch.device) -> "Samples": ...

    def share_of(self, whole: Any) -> float:
        """Return the weight of this part's mean loss in that of all."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Objective(Protocol):
    """A loss beside cross entropy."""

    def loss(self, module: SectionModule, *tensors: Any) -> Tensor:
        """Return the mean over a batch, given as its tensors."""
        ...

    def sums(self, module: SectionModule, batch: Any) -> Sums:
        """Return what is told of held-out samples."""
        ...


class Backward:
    """Gradients and losses of one model on one device.

    Args:
        model: its flat gradient is overwritten.
        device: where its vector lies.
        micro_batch: samples at a time, at first.
        is_compiled: let torch compile the loss; where it cannot, an event says so and the loss is computed as it is.
        objective: the loss; None: cross entropy.
        is_fixed: the micro-batch is not halved: what others compute alike would be otherwise here.
        norm: of the flat gradient.

    A model that leaves out some of what it reads (`adapter.Noise`) is not compiled: what it draws is another thing in
    each step.
    """

    def __init__(
        self,
        model: FlatModel,
        device: Device,
        micro_batch: int,
        *,
        is_compiled: bool,
        emit: Emit,
        objective: Objective | None = None,
        is_fixed: bool = False,
        norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm,
    ) -> None:
        self.micro_batch = micro_batch
        self._is_fixed = is_fixed
        self._norm = norm
        self.scale = LossScale(device.precision == "fp16")
        self._model = model
        self._device = device
        self._emit = emit
        self.is_compiled = is_compiled
        self._objective = objective
        plain: Any = model.module.loss if objective is None else partial(objective.loss, model.module)
        if is_compiled and model.module.noise is not None:
            emit(FellBack(wanted="torch.compile", used="uncompiled", reason="the adapter has dropout"))
            self.is_compiled = is_compiled = False
        self._loss: _Loss = self._compiled(plain) if is_compiled else plain

    def fill(self, batch: Samples, words: Sequence[int] = ()) -> tuple[float, float]:
        """Set the flat gradient to the mean over `batch` and return the mean loss (nats per token) and gradient norm.

        Either may be NaN or infinite: then the parameters cannot be trained on.

        Args:
            words: of each sample, by which some of what is read is left out (`adapter.Noise`); none: nothing is.

        Raises:
            OutOfMemory: not even one sample fits.
        """
        while True:
            loss, norm = self._halving(lambda: self._accumulate(batch, words))
            if math.isfinite(norm):
                self.scale.grow()
                return loss, norm
            if not math.isfinite(loss) or not self.scale.shrink():
                return loss, norm

    def sums(self, module: SectionModule, batch: Samples) -> Sums:
        """Return what is found on `batch` under `module`. The sums are taken in float64.

        Raises:
            OutOfMemory: not even one sample fits.
        """
        return self._halving(lambda: self._add_up(module, batch))

    def rehearse(self, blank: Callable[[int], Samples], num_samples: int) -> None:
        """Do once, on samples that mean nothing, what a batch of `num_samples` and an evaluation will do, in each shape
        they take.

        Args:
            blank: gives so many.

        What has to be compiled, loaded or made smaller is so afterwards. The gradient is zero then; nothing else of the
        model changes, nor does the factor on the loss.

        Raises:
            OutOfMemory: not even one sample fits.
        """
        try:
            self._halving(lambda: self._rehearse(blank, num_samples))
        finally:
            self._model.zero_gradient()

    def _rehearse(self, blank: Callable[[int], Samples], num_samples: int) -> None:
        whole, rest = min(self.micro_batch, num_samples), num_samples % self.micro_batch
        batch = blank(whole + (rest if num_samples > whole else 0))
        self._accumulate(batch, [0] * len(batch.tokens) if self._model.module.noise is not None else ())
        self._add_up(self._model.module, batch)

    def _accumulate(self, batch: Samples, words: Sequence[int]) -> tuple[float, float]:
        scale, gradient, noise = self.scale.value, self._model.gradient, self._model.module.noise
        self._model.zero_gradient()
        total = torch.zeros((), device=gradient.device)
        for start, part, weight in self._micro_batches(batch):
            here = words[start : start + self.micro_batch]
            with nullcontext() if noise is None else noise.of(here):
                with self._device.autocast():
                    loss = self._loss(*part)
                share = loss * weight
                (share * scale).backward()  # type: ignore[no-untyped-call]
            total += share.detach()
        if scale != 1.0:
            gradient.mul_(1 / scale)  # exact: a power of two
        norm = self._norm(gradient)
        loss_value, norm_value = torch.stack((total, norm)).tolist()  # the step's one wait for a GPU
        return loss_value, norm_value

    def _add_up(self, module: SectionModule, batch: Samples) -> Sums:
        total = Sums(0.0)
        with torch.inference_mode():
            for _, part, _ in self._micro_batches(batch):
                with self._device.autocast():
                    found = summed(module, part) if self._objective is None else self._objective.sums(module, part)
                total = total.plus(found)
        return total

    def _micro_batches(self, batch: Samples) -> Iterator[tuple[int, Samples, float]]:
        """Yield micro-batches on the device, each with its first sample's number and its weight: the mean over all is
        the sum of weight x mean."""
        for start in range(0, len(batch.tokens), self.micro_batch):
            part = batch.part(start, start + self.micro_batch)
            yield start, part.to(self._device.torch), part.share_of(batch)

    def _halving(self, work: Callable[[], T]) -> T:
        """Do `work`, again with half the micro-batch as often as memory runs out."""
        while self.micro_batch > 1 and not self._is_fixed:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Only here, after the except clause, has the traceback let go of the tensors.
            self._device.release_cache()
            before, self.micro_batch = self.micro_batch, self.micro_batch // 2
            self._emit(MicroBatchChanged(before=before, after=self.micro_batch, reason=reason))
        several = "one sample" if self.micro_batch == 1 else f"{self.micro_batch} samples at a time, as the run says,"
        with allocating(f"{several} beside {self._model.layout.num_parameters:,} parameters", self._device):
            return work()

    def _compiled(self, plain: _Loss) -> _Loss:
        compiled = torch.compile(plain)

        def loss(*tensors: Tensor | None) -> Tensor:
            try:
                return compiled(*tensors)
            except RuntimeError as error:  # all of the compiler's errors are; those of the loss itself come again
                if is_out_of_memory(error):
                    raise
                reason = first_line(error)
            self._emit(FellBack(wanted="torch.compile", used="uncompiled", reason=reason))
            self.is_compiled, self._loss = False, plain
            return plain(*tensors)

        return loss


def summed(module: SectionModule, part: Samples) -> Sums:
    """Return the cross entropy of a micro-batch, added up."""
    assert isinstance(part, Batch)
    logits = module(part.tokens, positions=part.positions)
    losses = cross_entropy(logits.float().flatten(0, 1), part.targets.flatten(), reduction="none")
    return Sums(float(losses.cpu().double().sum()))


class LossScale:
    """The factor on an fp16 loss: a power of two. Where nothing needs one, it is 1 and stays it."""

    FIRST, MOST = 2.0**16, 2.0**24
    GROWS_AFTER = 2000  # batches; the paper's figure, and that of torch's GradScaler

    def __init__(self, is_needed: bool) -> None:
        self.value = self.FIRST if is_needed else 1.0
        self.num_good = 0  # batches since it last changed
        self._is_needed = is_needed

    def grow(self) -> None:
        """Note a batch whose gradient was finite."""
        self.num_good += 1
        if self._is_needed and self.num_good >= self.GROWS_AFTER:
            self.value, self.num_good = min(2 * self.value, self.MOST), 0

    def counters(self) -> dict[str, int]:
        """Return what an exact resume needs; nothing where no factor is needed."""
        return {"loss_scale": int(self.value), "num_good": self.num_good} if self._is_needed else {}

    def load(self, counters: Mapping[str, int]) -> None:
        """Take up what `counters` returned; begin anew where they are from training in another precision."""
        if self._is_needed and {"loss_scale", "num_good"} <= counters.keys():
            self.value, self.num_good = float(counters["loss_scale"]), counters["num_good"]

    def shrink(self) -> bool:
        """Note a gradient that overflowed; return whether a smaller factor is left to try."""
        if self.value <= 1.0:
            return False
        self.value, self.num_good = self.value / 2, 0
        return True
