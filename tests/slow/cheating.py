"""A member that cheats: the command line of weft, whose training steps or payloads are others than it says.

    python cheating.py WAY join - --yes ...

What it names of a state is what it has come to, and it shows auditors what it has named: only its numbers are false.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.__main__ import main
from weft.peer.audit.proofs.operations import Listing
from weft.peer.audit.trace import Trace
from weft.peer.audit.worker import Worker
from weft.peer.state.carry import Carry
from weft.sim.cheats import Cheating
from weft.sim.scenario import Way
from weft.training import rewarded
from weft.training.steps import Mean
from weft.training.trainer import Trainer

STEPS: dict[str, Way] = {
    "no work": "none",
    "noise": "noise",
    "half the steps": "half the steps",
    "one step of eight skipped": "half the steps",
    "one sample swapped": "one other sample",
    "half batches": "half a batch",
    "other data": "other text",
    "a rate one percent lower": "slower",
}
STALE = "stale parameters"
FOURTEEN = (*STEPS, STALE, "copied", "a little less than all", "another codec", "another error", "another start")

Parameters = Float32[Tensor, " num"]


class Telling(Cheating):
    """Says along which gradient it goes, as an honest one does, also where it goes another way."""

    way = ""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ways = lambda _first: frozenset({STEPS[self.way]})

    def _read(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if "half a batch" in self._now:
            half = positions[: len(positions) // 2]
            return np.concatenate((half, half))
        return super()._read(positions)

    def _descend(self, norm: float, rate: float) -> float:
        if self.way == "one step of eight skipped" and self._num_steps % 8:
            return Trainer._descend(self, norm, rate)
        if self._now & {"none", "noise", "half the steps"}:
            self.on_gradient(self._model.gradient, norm)
        return super()._descend(norm, rate)


class Stale(Trainer):
    """Computes all gradients at the parameters that it began with."""

    held: Parameters

    def start(self, vector: Parameters) -> None:
        super().start(vector)
        type(self).held = vector.clone()

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        here = self._vector.clone()
        self._vector.copy_(self.held)
        found = super()._fill(positions)
        self._vector.copy_(here)
        return found


def list_stale() -> None:
    told = Worker._listing

    def listing(worker: Worker, *given: Any) -> Listing | None:
        found = told(worker, *given)
        if found is not None:
            found.parameters = Stale.held.numpy()
        return found

    Worker._listing = listing  # type: ignore[method-assign]


def bring(other: Callable[[Parameters, Parameters], Parameters]) -> None:
    """Bring something else in place of what its steps came to.

    Args:
        other: of that, and of what the last round has moved the parameters by.
    """
    encode, outers = Carry.encode, dict[int, Parameters]()

    def false(carry: Carry, parts: tuple[range, ...], round: int, **named: Any) -> Any:
        outer, trainer = carry._replica.outer, carry._trainer
        outers.setdefault(round, outer.clone())
        last = outers.get(round - 1)
        if not carry.tokens or last is None:
            return encode(carry, parts, round, **named)
        honest = trainer.local().clone()
        trainer.set_local(outer - other(outer - honest, last - outer))
        payload = encode(carry, parts, round, **named)
        trainer.set_local(honest)
        return payload

    Carry.encode = false  # type: ignore[method-assign]


def copied(_own: Parameters, of_all: Parameters) -> Parameters:
    return of_all


def a_little_less(own: Parameters, of_all: Parameters) -> Parameters:
    """As ALIE does: the mean, less some standard deviations (Baruch et al., 1902.06156, section 3)."""
    both = torch.stack((own, of_all))
    return both.mean(0) - 1.5 * both.std(0, correction=0)


def coarse(own: Parameters, _of_all: Parameters) -> Parameters:
    """As another codec leaves it: whole numbers of -7 to 7, by blocks."""
    num = len(own)
    blocks = torch.nn.functional.pad(own, (0, -num % 64)).view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / 7
    return ((blocks / scales).round() * scales).flatten()[:num]


def forget_half_of_the_error() -> None:
    encode = Carry.encode

    def false(carry: Carry, *given: Any, **named: Any) -> Any:
        if carry._error is not None and carry._encoded is None:
            carry._error = carry._error / 2
        return encode(carry, *given, **named)

    Carry.encode = false  # type: ignore[method-assign]


def begin_elsewhere() -> None:
    begin = Trace.begin

    def elsewhere(trace: Trace, *given: Any) -> None:
        trace._trainer.set_local(trace._trainer.local() * 1.001)
        begin(trace, *given)

    Trace.begin = elsewhere  # type: ignore[method-assign]


def cheat(way: str) -> None:
    match way:
        case "stale parameters":
            rewarded.Trainer = Stale  # type: ignore[misc]
            list_stale()
        case "copied":
            bring(copied)
        case "a little less than all":
            bring(a_little_less)
        case "another codec":
            bring(coarse)
        case "another error":
            forget_half_of_the_error()
        case "another start":
            begin_elsewhere()
        case _:
            Telling.way = way
            rewarded.Trainer = Telling  # type: ignore[misc]


if __name__ == "__main__":
    cheat(sys.argv.pop(1))
    main()
