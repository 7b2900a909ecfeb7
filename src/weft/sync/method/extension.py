"""An outer step from outside of weft, whose state is held to what can be digested, shipped and cut into fragments, and
whose every step to numbers: what breaks that ends the peer, before anybody is handed the result.

That it gives the same bits on every machine is for its author to see to.
"""

import math
from typing import Any

import torch
from torch import Tensor

from weft.codec import bounds
from weft.errors import ConfigError, NotFinite, WeftError


class Extension:
    """
    Args:
        name: that the run has it by.
        made: an `Outer` (`outer`).

    Raises:
        ConfigError: it is none.
    """

    def __init__(self, name: str, made: Any) -> None:
        if not all(callable(getattr(made, method, None)) for method in ("init", "apply")):
            raise ConfigError(f"{name}: {type(made).__name__} is not an outer step: it needs init and apply.")
        self._name = name
        self._made = made

    def init(self, num: int) -> dict[str, Tensor]:
        """Return the state before the first step, for `num` parameters.

        Raises:
            ConfigError: it is none that members could keep alike.
            NotFinite: of its own making.
        """
        try:
            state = self._made.init(num)
        except WeftError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._name}: init({num}) raised {type(error).__name__}: {error}. Mend it.") from error
        if not isinstance(state, dict):
            raise ConfigError(f"{self._name}: its state is a {type(state).__name__}: flat vectors by name are due.")
        for name, vector in state.items():
            is_name = isinstance(name, str) and name.isidentifier() and name.isascii() and name != "outer"
            if not is_name or not _is_vector(vector, num):
                raise ConfigError(
                    f"{self._name}: its state {name!r} is not a flat fp32 vector with as many numbers as the "
                    "parameters, on the CPU, under a name of letters, digits and underscores that is not 'outer'."
                )
            self._require_finite(f"its first state {name!r}", vector)
        return state

    def apply(self, outer: Tensor, state: dict[str, Tensor], merged: Tensor, context: Any) -> None:
        """
        Raises:
            ConfigError: it raised, or changed which vectors its state has, or their lengths.
            NotFinite: NaN or infinity in what it made of numbers.
        """
        num, before = outer.numel(), dict(state)
        try:
            self._made.apply(outer, state, merged, context)
        except WeftError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._name}: step {context.number} raised {type(error).__name__}: {error}. Mend it."
            ) from error
        if list(state) != list(before):
            raise ConfigError(f"{self._name}: its state was {_names(before)} and is {_names(state)} after a step.")
        for name, vector in state.items():
            if vector is not before[name] or not _is_vector(vector, num):
                raise ConfigError(
                    f"{self._name}: its state {name!r} is another tensor after a step, or of another shape. Write into "
                    "the one that it is given, as in `vector.mul_(2)`."
                )
            self._require_finite(f"its state {name!r}", vector)
        if not _is_vector(outer, num):
            raise ConfigError(f"{self._name}: it made {tuple(outer.shape)} of {num} parameters. Write into them.")
        self._require_finite("what it made of the parameters", outer)

    def _require_finite(self, what: str, vector: Tensor) -> None:
        if vector.numel() and not math.isfinite(bounds.largest(vector)):
            raise NotFinite(f"{self._name}: {what} holds NaN or infinity. Look at its step, or take smaller ones.")


def _is_vector(vector: Any, num: int) -> bool:
    is_fp32 = isinstance(vector, Tensor) and vector.dtype == torch.float32 and vector.device.type == "cpu"
    return is_fp32 and vector.shape == (num,)


def _names(state: dict[str, Tensor]) -> str:
    return ", ".join(map(repr, state)) or "empty"
