"""Machines that take the virtual seconds of a script for what a section computes, and compute nothing.

    machine = Machine()
    worker = Worker(..., ScriptedDevice(machine, script, ...), run=machine.run, ...)

A device says what a piece of work takes, and the machine lets so much time pass before it hands over what came of it,
one piece at a time, whichever stage it is for. While its process stands still, nothing is computed.

Activations are bytes that no other micro-batch has, of a length that the script sets.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from weft.ids import PeerId
from weft.pipeline.device import Given
from weft.wire import Buffer

T = TypeVar("T")

RESOLUTION_S = 1e-6  # of virtual time: sums of floats are no more exact
TOKENS = bytes(4 * 3)  # of a micro-batch: one sample, of two tokens and what follows


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a micro-batch takes in a section, on a machine of rate 1, and how long what is sent of it is."""

    forward_s: float = 1.0
    input_s: float = 1.0
    weights_s: float = 1.0
    nbytes: int = 4096  # of activations, and of their gradient

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weights_s


class Machine:
    """The processor of one peer."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.frozen_s = 0.0  # how long its process stood still, in all
        self._turn = asyncio.Lock()
        self._owed_s = 0.0
        self._then: list[Callable[[], None]] = []

    def owe(self, takes_s: float, then: Callable[[], None] | None = None) -> None:
        """Let what is being computed take so much longer, and call `then` at its end."""
        self._owed_s += takes_s
        if then is not None:
            self._then.append(then)

    async def run(self, work: Callable[[], T]) -> T:
        """Do `work`, and return what came of it once the time is over that it said it takes."""
        async with self._turn:
            found = work()
            owed_s, then = self._owed_s, self._then
            self._owed_s, self._then = 0.0, []
            await self._pass(owed_s)
            self.busy_s += owed_s
            for each in then:
                each()
            return found

    async def _pass(self, left_s: float) -> None:
        loop = asyncio.get_running_loop()
        while left_s > RESOLUTION_S:
            began, frozen_s = loop.time(), self.frozen_s
            await asyncio.sleep(left_s)
            left_s -= loop.time() - began - (self.frozen_s - frozen_s)


class ScriptedDevice:
    """Of one section on a machine.

    Args:
        rate: of the machine; another of twice the rate takes half the time.
        on_counted: called when the weights' gradients of a micro-batch are computed.
    """

    tokens_nbytes = len(TOKENS)

    def __init__(
        self,
        machine: Machine,
        script: Script,
        rate: float,
        place: tuple[PeerId, bool, bool],
        on_counted: Callable[[], None],
    ) -> None:
        self.machine, self.script, self.rate, self.on_counted = machine, script, rate, on_counted
        self.peer, self.is_first, self.is_last = place
        self._num_made = 0

    def owe(self, takes_s: float, then: Callable[[], None] | None = None) -> None:
        self.machine.owe(takes_s / self.rate, then)

    def numbers(self) -> Buffer:
        """Return as many bytes as the script says, which nobody has made before."""
        self._num_made += 1
        return f"{self.peer} {self._num_made}".encode().ljust(self.script.nbytes, b"\0")

    def input_nbytes(self, _num_samples: int) -> int:
        return self.script.nbytes

    def gradient_nbytes(self, _num_samples: int) -> int:
        return 0 if self.is_last else self.script.nbytes

    def forward(self, _given: Given) -> "ScriptedPassed":
        self.owe(self.script.forward_s)
        return ScriptedPassed(self)


class ScriptedPassed:
    """A micro-batch after the forward pass."""

    def __init__(self, device: ScriptedDevice) -> None:
        self._device = device
        self.output = None if device.is_last else device.numbers()
        self.loss = 1.0 if device.is_last else None

    def backward(self, _gradient: Buffer | None, _member: PeerId | None = None) -> Buffer | None:
        self._device.owe(self._device.script.input_s)
        return None if self._device.is_first else self._device.numbers()

    def count(self) -> None:
        self._device.owe(self._device.script.weights_s, self._device.on_counted)
