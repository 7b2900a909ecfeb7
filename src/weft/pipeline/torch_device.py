"""Computes a section with torch: activations are decoded, passed through, encoded; gradients the other way.

What names a sample to codecs that remember is the digest of its tokens and of who is on the other side: a sample that
comes again from there, or goes there again, has the same, wherever it stands.

Of each micro-batch the gradient of its mean loss is added, in the proportion that it has of a full one: the sum over n
full micro-batches, divided by n, is the gradient of the mean of all their samples.

It does not know peers.
"""

import torch
from torch import Tensor

from weft.codec import bounds
from weft.errors import NotFinite, PayloadError
from weft.ids import PeerId
from weft.model.backward import Passed, forward
from weft.model.flat import FlatModel, Part
from weft.model.sections import Section
from weft.model.transformer import SectionModule
from weft.pipeline.boundary import Activations, Boundaries, Boundary, Codecs, Samples, Shape
from weft.pipeline.device import TOKEN_NBYTES, Encode, Given
from weft.wire import Buffer, digest

__all__ = ["Codecs", "TorchDevice"]


class TorchDevice:
    """A section on a device of torch's.

    Args:
        model: of a SectionModule.
        codecs: makes those of the boundaries before and after it.
        seq_len: tokens of a sample that are predicted.
        batch_size: samples of a full micro-batch.
    """

    def __init__(self, model: FlatModel, codecs: Boundaries, seq_len: int, batch_size: int) -> None:
        assert isinstance(model.module, SectionModule)
        self._model = model
        shape = Shape(seq_len, model.config.width, model.config.vocab_size)
        self._before, self._after = codecs.boundary(shape), codecs.boundary(shape)
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._section: Section = model.module.section

    @property
    def tokens_nbytes(self) -> int:
        return TOKEN_NBYTES * (self._seq_len + 1)

    def input_nbytes(self, num_samples: int) -> int:
        return 0 if self._section.is_first else self._before.activations.nbytes(num_samples)

    def gradient_nbytes(self, num_samples: int) -> int:
        return 0 if self._section.is_last else self._after.gradients.nbytes(num_samples)

    def forward(self, given: Given) -> "_TorchPassed":
        ids = self._ids(given)
        x, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous().to(self._model.vector.device)
        before, after = self._before, self._after
        samples = _samples(ids, given.sender if before.has_memory else None)
        if given.activations is not None:
            x = before.activations.decode(given.activations.data, samples)
        x = x.to(targets.device)

        def compute(module: Part) -> Tensor:
            assert isinstance(module, SectionModule)
            return module.loss(x, targets) if self._section.is_last else module(x)

        passed = forward(self._model, compute, x)
        return _TorchPassed(passed, self._section, before, after, ids, samples, len(ids) / self._batch_size)

    def _ids(self, given: Given) -> Tensor:
        """Return the tokens, on the CPU."""
        ids = torch.frombuffer(bytearray(given.tokens), dtype=torch.int32).view(given.num_samples, -1).long()
        if (
            ids.shape[1] != self._seq_len + 1
            or not 0 <= int(ids.min()) <= int(ids.max()) < self._model.config.vocab_size
        ):
            raise PayloadError(f"these are no {given.num_samples} samples of {self._seq_len + 1} tokens of this run")
        return ids


class _TorchPassed:
    """
    Args:
        ids: tokens; `samples`: what the boundary before is told of them.
        weight: of its gradient.
    """

    def __init__(
        self,
        passed: Passed,
        section: Section,
        before: Boundary,
        after: Boundary,
        ids: Tensor,
        samples: Samples,
        weight: float,
    ) -> None:
        self._passed = passed
        self._before, self._after = before, after
        self._ids, self._samples = ids, samples
        self._weight = weight
        self.loss: float | None = None
        self.output: Buffer | Encode | None = None
        if section.is_last:
            self.loss = float(passed.output)
            if not torch.isfinite(passed.output):
                raise NotFinite(f"the loss of a micro-batch became {self.loss}")
        elif after.has_memory:
            bounds.require_finite_vector(bounds.largest(_numbers(passed.output).flatten()))
            self.output = self._output_for
        else:
            self.output = after.activations.encode(_numbers(passed.output), samples)

    def backward(self, gradient: Buffer | None, member: PeerId | None = None) -> Buffer | None:
        dy = None
        if gradient is not None:
            samples = _samples(self._ids, member) if self._after.has_memory else self._samples
            dy = self._after.gradients.decode(gradient, samples).to(self._passed.output.device)
        found = self._passed.input_gradient(dy)
        return None if found is None else self._before.gradients.encode(_numbers(found), self._samples)

    def count(self) -> None:
        self._passed.add_weight_gradients(self._weight)

    def _output_for(self, member: PeerId) -> Buffer:
        return self._after.activations.encode(_numbers(self._passed.output), _samples(self._ids, member))


def _samples(ids: Tensor, peer: PeerId | None) -> Samples:
    """Return what the codecs of a boundary are told of a micro-batch.

    Args:
        peer: on its other side; None: to these codecs all are alike.
    """
    names = (digest(f"{peer or ''} {row.tolist()}".encode()) for row in ids)
    return Samples(ids[:, :-1], tuple(int(name[:15], 16) for name in names))


def _numbers(x: Tensor) -> Activations:
    return x.detach().float().cpu().contiguous()
