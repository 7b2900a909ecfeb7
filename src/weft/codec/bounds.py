"""What a vector and its bytes must satisfy at a codec's border.

The caller's own mistakes (another dtype, another device) are ValueErrors; a vector that diverged is NotFinite; whatever
is wrong with bytes that came from elsewhere is a PayloadError.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.errors import NotFinite, PayloadError
from weft.wire import Buffer

# Elements worked on at a time: 2 MiB of fp32, which the caches that a core shares hold between the passes over them. A
# quarter of that stays in its own, but then calls take a third of the time (benchmarks/reports/codecs.md).
# A multiple of every codec's block.
CHUNK = 1 << 19

Empty = Callable[[int, torch.dtype], Tensor]  # gives memory for so many values of a type, holding anything

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int16: np.int16, torch.int8: np.int8}


def require_flat(vector: Tensor) -> None:
    """Check that `vector` is what codecs take: one dimension, fp32, contiguous, on the CPU."""
    if vector.dim() != 1 or vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise ValueError(f"a codec takes a flat contiguous fp32 CPU tensor, not {vector.dtype} {tuple(vector.shape)}")


def require_nbytes(data: Buffer, nbytes: int) -> memoryview:
    """Return `data` as plain bytes once its length is exactly `nbytes`: nothing was allocated before.

    Raises:
        PayloadError: another length.
    """
    view = plain(data)
    if view.nbytes != nbytes:
        raise PayloadError(f"payload of {view.nbytes} bytes where {nbytes} are due; dropped undecoded")
    return view


def plain(data: Buffer) -> memoryview:
    """Return `data` as bytes, whatever it holds."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def as_buffer(array: np.ndarray) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")  # memoryview cannot cast an empty view


def empty(num: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return CPU memory for `num` values, holding anything.

    numpy asks the system for large pages and torch does not: the first touch of 25 MB then takes 2 ms instead of 12
    (measured on a virtual machine, 4 KiB pages at 1.9 us each).
    """
    return torch.from_numpy(np.empty(num, dtype=_NUMPY[dtype]))


def target(num: int, out: Tensor | None) -> Tensor:
    """Return the tensor of `num` fp32 values to decode into: `out` where it was given."""
    if out is None:
        return empty(num)
    require_flat(out)
    if out.numel() != num:
        raise ValueError(f"decoding {num} values into a tensor of {out.numel()}")
    return out


def largest(values: Float32[Tensor, " num"]) -> float:
    """Return max |values|, NaN if any is NaN. Independent of order."""
    lowest, highest = torch.aminmax(values)
    return max(-float(lowest), float(highest))  # both are NaN where one is


def require_finite_vector(largest_magnitude: float) -> None:
    """Raise NotFinite unless `largest_magnitude` (of a vector of our own) is finite."""
    if not np.isfinite(largest_magnitude):
        raise NotFinite("a vector to be sent holds NaN or infinity; lower the learning rate or resume an earlier state")


def require_finite_payload(largest_magnitude: float) -> None:
    """Raise PayloadError unless `largest_magnitude` (of what a peer sent) is finite."""
    if not np.isfinite(largest_magnitude):
        raise PayloadError("payload holds NaN or infinity; dropped")
