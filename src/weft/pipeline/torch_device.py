"""Computes a section with torch: activations are decoded, passed through, encoded; gradients the other way.

Of each micro-batch the gradient of its mean loss is added, in the proportion that it has of a full one: the sum over n
full micro-batches, divided by n, is the gradient of the mean of all their samples.

It does not know peers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.codec.codec import Codec
from weft.errors import NotFinite, PayloadError
from weft.model.backward import Passed, forward
from weft.model.flat import FlatModel, Part
from weft.model.sections import Section
from weft.model.transformer import SectionModule
from weft.pipeline.device import TOKEN_NBYTES, Given
from weft.wire import Buffer


@dataclass(frozen=True)
class Codecs:
    activations: Codec
    gradients: Codec  # of activations


class TorchDevice:
    """A section on a device of torch's.

    Args:
        model: of a SectionModule.
        seq_len: tokens of a sample that are predicted.
        batch_size: samples of a full micro-batch.
    """

    def __init__(self, model: FlatModel, codecs: Codecs, seq_len: int, batch_size: int) -> None:
        assert isinstance(model.module, SectionModule)
        self._model = model
        self._codecs = codecs
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._section: Section = model.module.section

    @property
    def tokens_nbytes(self) -> int:
        return TOKEN_NBYTES * (self._seq_len + 1)

    def input_nbytes(self, num_samples: int) -> int:
        return 0 if self._section.is_first else self._codecs.activations.nbytes(self._num(num_samples))

    def gradient_nbytes(self, num_samples: int) -> int:
        return 0 if self._section.is_last else self._codecs.gradients.nbytes(self._num(num_samples))

    def forward(self, given: Given) -> "_TorchPassed":
        tokens, targets = self._tokens(given)
        if given.activations is None:
            x = tokens
        else:
            x = self._decoded(self._codecs.activations, given.activations.data, given.num_samples)

        def compute(module: Part) -> Tensor:
            assert isinstance(module, SectionModule)
            return module.loss(x, targets) if self._section.is_last else module(x)

        passed = forward(self._model, compute, x)
        return _TorchPassed(self, passed, given.num_samples, self._section.is_last)

    def _tokens(self, given: Given) -> tuple[Tensor, Tensor]:
        ids = torch.frombuffer(bytearray(given.tokens), dtype=torch.int32).view(given.num_samples, -1).long()
        if (
            ids.shape[1] != self._seq_len + 1
            or not 0 <= int(ids.min()) <= int(ids.max()) < self._model.config.vocab_size
        ):
            raise PayloadError(f"these are no {given.num_samples} samples of {self._seq_len + 1} tokens of this run")
        ids = ids.to(self._model.vector.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def _num(self, num_samples: int) -> int:
        return num_samples * self._seq_len * self._model.config.width

    def _decoded(self, codec: Codec, data: Buffer, num_samples: int) -> Tensor:
        vector = codec.decode(data, self._num(num_samples)).to(self._model.vector.device)
        return vector.view(num_samples, self._seq_len, self._model.config.width)


class _TorchPassed:
    def __init__(self, device: TorchDevice, passed: Passed, num_samples: int, is_last: bool) -> None:
        self._device = device
        self._passed = passed
        self._num_samples = num_samples
        self.loss: float | None = None
        self.output: Buffer | None = None
        if is_last:
            self.loss = float(passed.output)
            if not torch.isfinite(passed.output):
                raise NotFinite(f"the loss of a micro-batch became {self.loss}")
        else:
            self.output = _encoded(device._codecs.activations, passed.output)

    def backward(self, gradient: Buffer | None) -> Buffer | None:
        device = self._device
        if gradient is None:
            found = self._passed.input_gradient()
        else:
            found = self._passed.input_gradient(device._decoded(device._codecs.gradients, gradient, self._num_samples))
        return None if found is None or device._section.is_first else _encoded(device._codecs.gradients, found)

    def count(self) -> None:
        self._passed.add_weight_gradients(self._num_samples / self._device._batch_size)


def _encoded(codec: Codec, numbers: Tensor) -> Buffer:
    return codec.encode(numbers.detach().float().flatten().cpu())
