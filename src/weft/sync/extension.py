"""An outer step from outside of weft, whose state is held to what can be digested, shipped and cut into fragments.

That it gives the same bits on every machine is for its author to see to. It does not know where it comes from.
"""

from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError


class Extension:
    """
    Args:
        name: that the run has it by.
        made: an `Outer` (`outer`).
    """

    def __init__(self, name: str, made: Any) -> None:
        self._name = name
        self._made = made

    def init(self, num: int) -> dict[str, Tensor]:
        """Return the state before the first step, for `num` parameters.

        Raises:
            ConfigError: it is none that members could keep alike.
        """
        state: dict[str, Tensor] = self._made.init(num)
        for name, vector in state.items():
            is_vector = vector.dtype == torch.float32 and vector.shape == (num,) and vector.device.type == "cpu"
            if not is_vector or not (name.isidentifier() and name.isascii()) or name == "outer":
                raise ConfigError(
                    f"{self._name}: its state {name!r} is no flat fp32 vector of as many numbers as the parameters, on "
                    "the CPU, under a name of letters, digits and underscores that is not 'outer'."
                )
        return state

    def apply(self, outer: Tensor, state: dict[str, Tensor], merged: Tensor, context: Any) -> None:
        self._made.apply(outer, state, merged, context)
