"""Sizes that rows of a matmul come in on a CPU.

oneDNN, which multiplies bf16 and eight bits there, compiles code for each shape that it meets, and keeps so many: up to
two thousand, half a megabyte each, unless it is told otherwise (`weft.cli.main`). Fewer shapes are compiled less often.
Matrices take most of a step's time and have one shape each, so few rows are added to theirs; attention has a shape for
each number of pages, too.
"""

from torch import Tensor
from torch.nn.functional import pad


def of_matrices(num: int) -> int:
    """Return the least of 1, 2, ..., 8, 12, 16, ..., 64, 80, 96, ... that is no less than `num`."""
    return _up(num, 1 if num <= 8 else 4 if num <= 64 else 16)


def of_attention(num: int) -> int:
    """Return the least of 1, 2, ..., 8, 16, 32, 64, 128, 192, ... that is no less than `num`."""
    return num if num <= 8 else _up(num, min(64, 1 << (num - 1).bit_length()))


def filled(x: Tensor, num: int) -> Tensor:
    """Return [..., rows, width] with rows of zeros, `num` in all."""
    missing = num - x.shape[-2]
    return pad(x, (0, 0, 0, missing)) if missing else x


def _up(num: int, by: int) -> int:
    return -(-num // by) * by
