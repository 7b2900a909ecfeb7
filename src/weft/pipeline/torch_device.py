"""Computes a section with torch: activations are decoded, passed through, encoded; gradients the other way.

What names a sample to codecs that remember is the digest of its tokens and of who is on the other side: a sample that
comes again from there, or goes there again, has the same, wherever it stands.

Of each micro-batch the gradient of its mean loss is added, in the proportion that it has of a full one: the sum over n
full micro-batches, divided by n, is the gradient of the mean of all their samples. Of rows of whole texts, that
proportion is by what is predicted in them.
"""

import math
from functools import partial

import torch
from torch import Tensor

from weft.codec import bounds
from weft.cost.pipeline import NUM_OWED
from weft.data import rows
from weft.data.rows import Batch
from weft.data.store import BEGINS
from weft.errors import NotFinite, PayloadError
from weft.ids import PeerId
from weft.model.backward import Passed, Recomputed, Recomputing, forward
from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule
from weft.pipeline.codec.boundary import Activations, Boundary, Samples, Shape
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import TOKEN_NBYTES, Encode, Given, Ways
from weft.pipeline.written import AsWritten
from weft.wire import Buffer, digest

LEAST_MOVED = 0.05  # of what goes on: a section that has not learnt yet may change next to nothing
LEAST = 1e-30  # of a number: far below, fp32 and bf16 have so few bits that honest machines end far apart


class TorchDevice:
    """A section on a device of torch's.

    Args:
        model: of a SectionModule.
        codecs: makes those of the boundaries before and after it.
        seq_len: tokens of a sample that are predicted.
        batch_size: samples of a full micro-batch.
        has_rows: samples are rows of whole texts.
        has_recompute: keep inputs of micro-batches alone, and compute them again on their way back.
    """

    def __init__(
        self,
        model: FlatModel,
        codecs: Boundaries,
        seq_len: int,
        batch_size: int,
        *,
        has_rows: bool = False,
        has_recompute: bool = False,
    ) -> None:
        self.model = model
        shape = Shape(seq_len, model.config.width, model.config.vocab_size)
        self._before, self._after = codecs.boundary(shape), codecs.boundary(shape)
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._has_rows = has_rows
        self._pass = Recomputing(model, NUM_OWED).forward if has_recompute else partial(forward, model)
        self.section = model.section

    @property
    def tokens_nbytes(self) -> int:
        return TOKEN_NBYTES * (self._seq_len + 1)

    def input_nbytes(self, num_samples: int) -> int:
        return 0 if self.section.is_first else self._before.activations.nbytes(num_samples)

    def gradient_nbytes(self, num_samples: int) -> int:
        return 0 if self.section.is_last else self._after.gradients.nbytes(num_samples)

    def forward(self, given: Given) -> "_TorchPassed":
        edges = self.edges(given)
        x = edges.tokens if given.activations is None else edges.decoded(given.activations.data)

        def compute(module: SectionModule) -> Tensor:
            positions = edges.positions
            return module.loss(x, edges.targets, positions) if self.section.is_last else module(x, positions=positions)

        weights = AsWritten(self.model)
        return _TorchPassed(self._pass(compute, x), edges, self.weight(given), weights)

    def apart(self, given: Given, returned: Buffer | None, theirs: Ways, mine: Ways) -> tuple[float, float]:
        edges = self.edges(given)
        x = None if given.activations is None else edges.decoded(given.activations.data)
        dy = None if returned is None else edges.gradient(returned, None)
        outputs = [edges.output_of(data) for data in (theirs.output, mine.output) if data is not None]
        gradients = [edges.input_gradient_of(data) for data in (theirs.gradient, mine.gradient) if data is not None]
        return _apart(outputs, x), _apart(gradients, dy)

    def edges(self, given: Given) -> "Edges":
        """Return what is before and after the section, of a micro-batch.

        Raises:
            PayloadError: these are no samples of the run.
        """
        words = torch.frombuffer(bytearray(given.tokens), dtype=torch.int32).view(given.num_samples, -1).long()
        ids = words & (BEGINS - 1) if self._has_rows else words
        if (
            words.shape[1] != self._seq_len + 1
            or not 0 <= int(words.min()) <= int(ids.max()) < self.model.config.vocab_size
        ):
            raise PayloadError(f"these are no {given.num_samples} samples of {self._seq_len + 1} tokens of this run")
        batch = rows.batch_of(words, has_rows=self._has_rows)
        return Edges(batch, ids, self._before, self._after, given.sender, self.model.vector.device)

    def weight(self, given: Given) -> float:
        """Return how often the gradient of a micro-batch is added."""
        return given.weight / self._batch_size


class Edges:
    """What comes to a section and goes from it, of one micro-batch: as bytes to others, as numbers here.

    Args:
        ids: of all samples, one token more than is predicted.
        sender: who sends it; None: it begins here.
        device: where numbers are needed.
    """

    def __init__(
        self, batch: Batch, ids: Tensor, before: Boundary, after: Boundary, sender: PeerId | None, device: torch.device
    ) -> None:
        self._ids, self._before, self._after = ids, before, after
        self._samples = _samples(ids, sender) if before.has_memory else Samples(ids[:, :-1], tuple(range(len(ids))))
        self._device = device
        tokens, targets, positions = batch
        self.tokens, self.targets = tokens.to(device), targets.to(device)
        self.positions = None if positions is None else positions.to(device)

    def decoded(self, activations: Buffer) -> Tensor:
        return self._before.activations.decode(activations, self._samples).to(self._device)

    def output(self, y: Tensor) -> Buffer | Encode:
        """Return activations for the next section.

        Raises:
            NotFinite: a number is not.
        """
        if not self._after.has_memory:
            return self._after.activations.encode(_numbers(y), self._samples)
        bounds.require_finite_vector(bounds.largest(_numbers(y).flatten()))
        return lambda member: self._after.activations.encode(_numbers(y), _samples(self._ids, member))

    def output_of(self, data: Buffer) -> Tensor:
        """Return activations that were encoded for the next section."""
        return self._after.activations.decode(data, self._samples).to(self._device)

    def input_gradient_of(self, data: Buffer) -> Tensor:
        """Return a gradient that was encoded for the section before."""
        return self._before.gradients.decode(data, self._samples).to(self._device)

    def gradient(self, data: Buffer, member: PeerId | None) -> Tensor:
        """Return the gradient of the output, of a member of the next stage."""
        samples = _samples(self._ids, member) if self._after.has_memory else self._samples
        return self._after.gradients.decode(data, samples).to(self._device)

    def input_gradient(self, dx: Tensor) -> Buffer:
        return self._before.gradients.encode(_numbers(dx), self._samples)


class _TorchPassed:
    """
    Args:
        weight: of its gradient.
        weights: of the model, as they were when it began.
    """

    def __init__(self, passed: Passed | Recomputed, edges: Edges, weight: float, weights: AsWritten) -> None:
        self._weights = weights
        self._passed = passed
        self._edges = edges
        self._weight = weight
        self.loss: float | None = None
        self.output: Buffer | Encode | None = None
        if passed.output.dim():
            self.output = edges.output(passed.output)
        else:
            self.loss = finite_loss(passed.output)

    def backward(self, gradient: Buffer | None, member: PeerId | None = None) -> Buffer | None:
        dy = None if gradient is None else self._edges.gradient(gradient, member)
        with self._weights.needed():
            found = self._passed.input_gradient(dy)
        return None if found is None else self._edges.input_gradient(found)

    def count(self) -> None:
        self._passed.add_weight_gradients(self._weight)


def _apart(both: list[Tensor], origin: Tensor | None) -> float:
    """Return how far the first of two lies from the second, relative to how far that is from where both come from.

    Whoever is before or after a section chooses how large numbers are: in fp32 lengths would be infinite, or nothing.
    """
    if len(both) < 2:
        return -1.0
    theirs, mine = both
    length, distance = _length(mine), _length(theirs - mine)
    moved = max(length if origin is None else _length(mine - origin), LEAST_MOVED * length)
    return distance / max(moved, LEAST * math.sqrt(mine.numel()))


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def finite_loss(loss: Tensor) -> float:
    """
    Raises:
        NotFinite: it is not.
    """
    if not torch.isfinite(loss):
        raise NotFinite(f"the loss of a micro-batch became {float(loss)}")
    return float(loss)


def _samples(ids: Tensor, peer: PeerId | None) -> Samples:
    """Return what the codecs of a boundary are told of a micro-batch.

    Args:
        peer: on its other side; None: to these codecs all are alike.
    """
    names = (digest(f"{peer or ''} {row.tolist()}".encode()) for row in ids)
    return Samples(ids[:, :-1], tuple(int(name[:15], 16) for name in names))


def _numbers(x: Tensor) -> Activations:
    return x.detach().float().cpu().contiguous()
