"""Peers that do less than they claim, or something else, in as many ways as matter, in every step.

What one names of its states is what it has come to, so it shows auditors what it has named.
"""

from collections.abc import Callable
from hashlib import sha512
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced
from numpy.typing import NDArray

from weft.keys import Identity
from weft.peer.context import MakeTrainer
from weft.peer.state.carry import Carry
from weft.sim.cheats import Cheating
from weft.sim.scenario import Way
from weft.training.steps import Mean
from weft.training.trainer import Trainer
from weft.wire import Signed


def always(way: Way) -> MakeTrainer:
    def make(*given: Any) -> Trainer:
        trainer = Cheating(*given)
        trainer.ways = lambda _first: frozenset({way})
        return trainer

    return make


def bring_more(patch: pytest.MonkeyPatch, is_false: Callable[[Carry], bool], times: float) -> None:
    """Let some bring so many times what their steps have come to."""
    encode = Carry.encode

    def false(carry: Carry, *given: Any, **named: Any) -> Any:
        if not (carry.tokens and is_false(carry)):
            return encode(carry, *given, **named)
        trainer, outer = carry._trainer, carry._replica.outer
        honest = trainer.local().clone()
        trainer.set_local(outer - times * (outer - honest))
        payload = encode(carry, *given, **named)
        trainer.set_local(honest)
        return payload

    patch.setattr(Carry, "encode", false)


class Levered(Cheating):
    """Takes away the smallest second moments, and leaves a little in the first ones: far less than rounding may, but
    each next step moves those numbers so far that within the share of it that is held for honest all others could be
    anything."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ways = lambda _first: frozenset({"levered"})  # type: ignore[arg-type]

    def _descend(self, norm: float, rate: float) -> float:
        norm = super()._descend(norm, rate)
        if "levered" in self._now and self._optimizer is not None:
            state = self._optimizer.state()
            smallest = state["moment2"].argsort()[:8]
            state["moment2"][smallest] = 0.0
            state["moment1"][smallest] = 1e-7
            self._optimizer.load(state, self._num_steps + 1)
        return norm


class Resting(Cheating):
    """Names a model of zeros in all but the first and last state of a lease. Whatever it reads, a training step leaves
    it as it is: so all steps but two are right, and this machine computes none.

    Attributes:
        lease: returns the samples of the present one, in order.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lease: Callable[[], NDArray[np.int64]] = lambda: np.zeros(0, np.int64)
        self.ways = self._way
        self._left = torch.zeros(0)
        self._ends: dict[int, torch.Tensor] = {}  # of each lease, by where the batch of its last step begins

    def _way(self, first: int) -> Any:
        lease = list(self.lease())
        number, num = lease.index(first) // self._run.train.batch_size, len(lease) // self._run.train.batch_size
        return frozenset({"none", "to it" if not number else "from it" if number == num - 1 else "on it"})

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        self._first = int(positions[0])
        return super()._fill(positions)

    def _descend(self, norm: float, rate: float) -> float:
        norm = super()._descend(norm, rate)
        if "to it" in self._now:
            self._left = self._left if self._is_lent else self._vector.clone()
            self._vector.zero_()
            self._scale_moments(0.0, self._num_steps + 1)
        if "from it" in self._now:
            self._vector.copy_(self._ends.setdefault(self._first, self._left - 1e-3))
        return norm


class ByChance(Trainer):
    """No cheat: all members of a run move all parameters by chance, whatever they are."""

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        return Mean(loss=1.0, norm=1.0, num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:
        steps = torch.arange(self._vector.numel(), dtype=torch.float64) + self._num_steps
        self._vector.add_(rate * torch.sin(12.9898 * steps).float())
        return norm


def longer(by: float) -> MakeTrainer:
    """Return trainers whose every step is longer by a share, those that they make of others, too."""

    class Longer(Trainer):
        def _descend(self, norm: float, rate: float) -> float:
            return super()._descend(norm, rate * (1 + by))

    return Longer


# --- signatures ---

_P, _ORDER = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_Point = tuple[int, int]


def signed_otherwise(identity: Identity, letter: Signed, number: int) -> Signed:
    """Return a letter of an identity with another signature that holds: Ed25519 has as many as there are numbers to
    draw (RFC 8032, section 5.1.6, where one of them is to be made of the message)."""
    secret = sha512(identity.private_key.private_bytes_raw()).digest()
    scalar = (int.from_bytes(secret[:32], "little") & (1 << 254) - 8) | 1 << 254
    message = b"weft.signed.v1\x00" + letter.kind.encode() + b"\x00" + letter.body
    base = _point(4 * pow(5, -1, _P) % _P)
    commitment = _packed(_times(number, base))
    challenge = int.from_bytes(sha512(commitment + bytes.fromhex(identity.peer) + message).digest(), "little")
    answer = (number + challenge * scalar) % _ORDER
    return replaced(letter, signature=commitment + answer.to_bytes(32, "little"))


def _point(y: int) -> _Point:
    """Return the point of an even x."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    return (_P - x if x % 2 else x), y


def _times(number: int, point: _Point) -> _Point:
    found: _Point = (0, 1)
    while number:
        if number & 1:
            found = _added(found, point)
        number, point = number >> 1, _added(point, point)
    return found


def _added(one: _Point, other: _Point) -> _Point:
    (a, b), (c, d) = one, other
    product = _D * a * b * c * d % _P
    x = (a * d + b * c) * pow(1 + product, -1, _P) % _P
    return x, (b * d + a * c) * pow(1 - product, -1, _P) % _P


def _packed(point: _Point) -> bytes:
    x, y = point
    return (y | (x & 1) << 255).to_bytes(32, "little")
