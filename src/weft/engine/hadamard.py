"""Rows in other coordinates, in which no number is far larger than the others: rounding to eight bits then loses less
(QuaRot, arXiv:2404.00456, section 3).

    x W^T = (x H)(W H)^T      H: Hadamard's matrix over its width's root, in blocks of up to `BLOCK` channels

W H is made once, x H in each step. What QuaRot folds into the matrices before is not: norms' weights would be part of
the matrices behind them, which in some models keep numbers small that are a thousand times as large as all others.
"""

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 64

_WHOLE = 2.0**46  # sums of `BLOCK` integers up to it are whole in fp64
_NUM_AT_ONCE = 2**22  # numbers: what is held in between is no larger, whatever the matrix


class Turn:
    """x H, times the root that a weight is divided by once more (`of_weight`).

    Args:
        width: of a row; where no power of two divides it, nothing is turned.
        is_whole: whether sums are of integers, which have the same bits in every order.
    """

    def __init__(self, width: int, device: torch.device, *, is_whole: bool) -> None:
        self._block = min(BLOCK, width & -width)
        self._is_whole = is_whole
        self._signs = _signs(self._block).to(device, torch.float64 if is_whole else torch.float32)

    def __call__(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        if self._block == 1:
            return x
        if not self._is_whole:
            return (x.view(-1, self._block) @ self._signs).view(x.shape)
        most = x.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).double()
        whole = (x * (_WHOLE / most)).round_()
        return (whole.view(-1, self._block) @ self._signs).view(x.shape).mul_(most / _WHOLE).float()

    def of_weight(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return W H over the root: a row and a weight that are turned have the product that they had."""
        num = max(1, _NUM_AT_ONCE // weight.shape[1])
        return torch.cat([self(some) for some in torch.split(weight, num)]).div_(self._block)


def _signs(size: int) -> Float[Tensor, "size size"]:
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found
