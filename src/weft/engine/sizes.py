"""Sizes that rows of a matmul come in on a CPU: 1, 2, ..., 8, 12, 16, ..., 64, 80, 96, ...

oneDNN, which multiplies bf16 and eight bits there, compiles code for each number of rows that it meets and never lets
it go: a server whose steps are of all sizes grows for hours (docs/log.md). What is added is a few percent.
"""

from torch import Tensor
from torch.nn.functional import pad


def sized(num: int) -> int:
    """Return the least size that is no less than `num`."""
    by = 1 if num <= 8 else 4 if num <= 64 else 16
    return -(-num // by) * by


def filled(x: Tensor) -> Tensor:
    """Return [..., rows, width] with rows of zeros up to the next size."""
    missing = sized(x.shape[-2]) - x.shape[-2]
    return pad(x, (0, 0, 0, missing)) if missing else x
