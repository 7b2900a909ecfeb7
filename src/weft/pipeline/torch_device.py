"""Computes a section with torch: activations are decoded, passed through, encoded; gradients the other way.

What names a sample to codecs that remember is the digest of its tokens: both sides of a boundary have those, and a
sample that comes again has the same, wherever it stands.

Of each micro-batch the gradient of its mean loss is added, in the proportion that it has of a full one: the sum over n
full micro-batches, divided by n, is the gradient of the mean of all their samples.

It does not know peers.
"""

import torch
from torch import Tensor

from weft.errors import NotFinite, PayloadError
from weft.model.backward import Passed, forward
from weft.model.flat import FlatModel, Part
from weft.model.sections import Section
from weft.model.transformer import SectionModule
from weft.pipeline.boundary import ActivationCodec, Boundaries, Codecs, Samples, Shape
from weft.pipeline.device import TOKEN_NBYTES, Given
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
        ids, samples = self._samples(given)
        targets = ids[:, 1:].contiguous()
        if given.activations is None:
            x = ids[:, :-1].contiguous()
        else:
            x = self._before.activations.decode(given.activations.data, samples).to(ids.device)

        def compute(module: Part) -> Tensor:
            assert isinstance(module, SectionModule)
            return module.loss(x, targets) if self._section.is_last else module(x)

        return _TorchPassed(self, forward(self._model, compute, x), samples)

    def _samples(self, given: Given) -> tuple[Tensor, Samples]:
        """Return the tokens, on the device, and what codecs are told of them."""
        ids = torch.frombuffer(bytearray(given.tokens), dtype=torch.int32).view(given.num_samples, -1).long()
        if (
            ids.shape[1] != self._seq_len + 1
            or not 0 <= int(ids.min()) <= int(ids.max()) < self._model.config.vocab_size
        ):
            raise PayloadError(f"these are no {given.num_samples} samples of {self._seq_len + 1} tokens of this run")
        starts = range(0, len(given.tokens), self.tokens_nbytes)
        names = (digest(given.tokens[start : start + self.tokens_nbytes]) for start in starts)
        samples = Samples(ids[:, :-1], tuple(int(name[:15], 16) for name in names))
        return ids.to(self._model.vector.device), samples


class _TorchPassed:
    def __init__(self, device: TorchDevice, passed: Passed, samples: Samples) -> None:
        self._device = device
        self._passed = passed
        self._samples = samples
        self.loss: float | None = None
        self.output: Buffer | None = None
        if device._section.is_last:
            self.loss = float(passed.output)
            if not torch.isfinite(passed.output):
                raise NotFinite(f"the loss of a micro-batch became {self.loss}")
        else:
            self.output = self.output_again()

    def output_again(self) -> Buffer:
        """Return the output encoded once more. Before its gradient has come this stands alone, for whoever gets it."""
        return self._encoded(self._device._after.activations, self._passed.output)

    def backward(self, gradient: Buffer | None) -> Buffer | None:
        device, dy = self._device, None
        if gradient is not None:
            dy = device._after.gradients.decode(gradient, self._samples).to(self._passed.output.device)
        found = self._passed.input_gradient(dy)
        return None if found is None else self._encoded(device._before.gradients, found)

    def count(self) -> None:
        self._passed.add_weight_gradients(len(self._samples) / self._device._batch_size)

    def _encoded(self, codec: ActivationCodec, x: Tensor) -> Buffer:
        return codec.encode(x.detach().float().cpu().contiguous(), self._samples)
