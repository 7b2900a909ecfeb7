"""A model's matrices as a step multiplies by them: full, half, or eight bits.

    fp32   as trained
    bf16   weights and activations rounded to bf16; sums in fp32, as the matmul has them
    int8   weights to seven bits with a scale per output, activations to eight with a scale per row; sums are integers

Integer sums have no order, so a row's numbers do not depend on what else is in the step. Weights have seven bits and
not eight: processors that add pairs of products in 16 bits (AVX2 and AVX-512 without VNNI) saturate in silence beyond
(`probe`).
"""

from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.nn.functional import linear

Kind = Literal["fp32", "bf16", "int8"]
MAX_WEIGHT, MAX_ACTIVATION = 63, 127


class Matrix(Protocol):
    nbytes: int

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        """Return x W^T, fp32."""
        ...


class Full:
    def __init__(self, weight: Float[Tensor, "out in"]) -> None:
        self._weight = weight.float()
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        return linear(x, self._weight)


class Half:
    def __init__(self, weight: Float[Tensor, "out in"]) -> None:
        self._weight = weight.to(torch.bfloat16)
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        return linear(x.to(torch.bfloat16), self._weight).float()


class Eight:
    def __init__(self, weight: Float[Tensor, "out in"]) -> None:
        weight = weight.float()
        scale = weight.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny) / MAX_WEIGHT
        self._weight_t: Int8[Tensor, "in out"] = (weight / scale).round_().to(torch.int8).t()
        self._scale = scale.view(1, -1)
        self.nbytes = self._weight_t.nbytes + self._scale.nbytes

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        scale = x.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny) / MAX_ACTIVATION
        eighths = (x / scale).round_().to(torch.int8)
        return torch._int_mm(eighths, self._weight_t).float().mul_(scale).mul_(self._scale)


MATRICES: dict[Kind, type[Full] | type[Half] | type[Eight]] = {"fp32": Full, "bf16": Half, "int8": Eight}


def probe(device: torch.device) -> bool:
    """Return whether integer products are right on this device, at the largest numbers that occur."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 8, 33):
        x = torch.randint(-MAX_ACTIVATION, MAX_ACTIVATION + 1, (num_rows, 256), dtype=torch.int8, generator=generator)
        weight = torch.randint(-MAX_WEIGHT, MAX_WEIGHT + 1, (64, 256), dtype=torch.int8, generator=generator)
        x[0], weight[0] = MAX_ACTIVATION, MAX_WEIGHT
        try:
            found = torch._int_mm(x.to(device), weight.to(device).t()).cpu()
        except RuntimeError:  # a device without such a matmul, or not of so few rows
            return False
        if not torch.equal(found.long(), x.long() @ weight.long().t()):
            return False
    return True
