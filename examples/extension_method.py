"""A method from outside of weft: members' mean delta is a gradient, and one Yogi of all steps along it.

    python examples/extension_method.py                         # the loop of plain_loop.py, by this method
    WEFT_TICKET=weft2... python examples/extension_method.py    # every member runs the same file

A method is five choices; this one brings the last, how what was merged is applied, and takes the others as they are.
All members make this step and must arrive at the same bits: one rounded operation on each number at a time (+ - * / and
sqrt), in the order written, without `alpha=`, addcmul or lerp, which some machines round twice.

FedYogi: Reddi et al., 2003.00295, algorithm 2.
"""

import torch
from torch import Tensor

import weft
from weft.sync.merge.outer import State, StepContext


class Yogi:
    """m = b1 m + (1-b1) d;  v = v - (1-b2) d^2 sign(v - d^2);  x = x - lr m / (sqrt(v) + tau)."""

    def __init__(self, lr: float = 0.03, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        if not (0 < lr <= 10 and 0 <= beta1 < 1 and 0 <= beta2 < 1 and tau > 0):
            raise ValueError("lr from 0 to 10, betas below 1, tau above 0")
        self.lr, self.beta1, self.beta2, self.tau = lr, beta1, beta2, tau

    def init(self, num: int) -> State:
        """Return what is replicated beside the parameters: flat vectors by name, which weft sends to newcomers."""
        return {"m": torch.zeros(num), "v": torch.full((num,), self.tau * self.tau)}

    def apply(self, outer: Tensor, state: State, merged: Tensor, context: StepContext) -> None:
        """Step `outer` and `state` in place; `merged` is the mean of outer - local, and only read."""
        m, v = state["m"], state["v"]
        m.mul_(self.beta1)
        m.add_(merged * (1 - self.beta1))
        square = merged * merged
        v.sub_(torch.sign(v - square) * square * (1 - self.beta2))
        outer.sub_(m / (torch.sqrt(v) + self.tau) * self.lr)


yogi = weft.extend("example.yogi", Yogi)

if __name__ == "__main__":
    import plain_loop

    from weft.codec.config import Int8Config
    from weft.sync.method.choices import Choices

    plain_loop.main(Choices(every=30, send="delta", apply=yogi.outer(lr=0.03), codec=Int8Config()))
