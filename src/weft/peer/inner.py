"""The inner optimizer: AdamW on a model's two ranges, matrices that decay and the rest, with flat moments.

    x -= lr wd x (decayed range only);  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g g;
    x -= lr / (1-b1^t) * m / (sqrt(v / (1-b2^t)) + eps)

torch's fused kernel reads and writes each number once. It is called as a function, because the state is ours (two flat
vectors and a count, which a checkpoint saves as they are) and because making a `torch.optim.AdamW` imports the
compiler, which takes seconds. Its last bits differ between instruction sets: it is for what stays on one peer.

It does not know schedules, clipping, or what a gradient is the mean of.

AdamW: Loshchilov and Hutter, 1711.05101, algorithm 2.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from weft.errors import CheckpointError
from weft.model import FlatModel
from weft.sync.choices import AdamWConfig

State = dict[str, Tensor]


class InnerOptimizer:
    def __init__(self, config: AdamWConfig, model: FlatModel) -> None:
        self._config = config
        self._model = model
        self._moment1 = torch.zeros_like(model.vector)
        self._moment2 = torch.zeros_like(model.vector)
        # fp32 on the device, one per range: what the fused kernel counts in. Exact up to 2^24 steps.
        self._counts = [torch.zeros((), device=model.vector.device) for _ in range(2)]

    def step(self, learning_rate: float) -> None:
        """Move the model's vector against its gradient."""
        config, model = self._config, self._model
        border = model.layout.num_decayed
        ranges = (slice(0, border), slice(border, model.layout.num_parameters))
        for here, count, decay in zip(ranges, self._counts, (config.weight_decay, 0.0), strict=True):
            with torch.no_grad():
                adamw(
                    [model.vector[here]],
                    [model.gradient[here]],
                    [self._moment1[here]],
                    [self._moment2[here]],
                    [],
                    [count],
                    fused=True,
                    amsgrad=False,
                    beta1=config.beta1,
                    beta2=config.beta2,
                    lr=learning_rate,
                    weight_decay=decay,
                    eps=config.eps,
                    maximize=False,
                )

    def state(self) -> State:
        """Return the moments, flat fp32 on the CPU; there they share memory with the optimizer."""
        return {"moment1": self._moment1.cpu(), "moment2": self._moment2.cpu()}

    def load(self, state: State, num_steps: int) -> None:
        """Take up the moments that `state` returned after `num_steps` steps, by copying.

        Raises:
            CheckpointError: they belong to another model or are incomplete; nothing is changed.
        """
        size = self._model.layout.num_parameters
        for name in ("moment1", "moment2"):
            found = state[name].numel() if name in state else 0
            if found != size:
                raise CheckpointError(
                    f"the inner optimizer's {name} should hold {size:,} numbers, found {found}. The saved state "
                    "belongs to another run or is incomplete: resume from another checkpoint, or join the run anew."
                )
        self._moment1.copy_(state["moment1"])
        self._moment2.copy_(state["moment2"])
        for count in self._counts:
            count.fill_(num_steps)
