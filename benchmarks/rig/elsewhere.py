"""Training steps of a member in a process of its own, with other instruction sets and another number of threads.

    with machines() as all_machines:
        trainer = Elsewhere(all_machines["SSE4.1, two threads"], run, peer, batches, emit, clock, load_frozen)

What a trainer keeps stays here: parameters, moments, counters. For each step they go to the process with the batch, and
what the step comes to comes back. Loss, gradient and its length, the pull, shortening and the optimizer are computed
there; payloads, merging and outer steps here, which come to the same bits everywhere.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import SystemClock
from weft.data.batch import Batches
from weft.data.rows import Batch
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.training.steps import Mean
from weft.training.trainer import Trainer

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
PROCESSORS: dict[str, dict[str, str]] = {"all": {}, "AVX2": AVX2, "SSE4.1": SSE}
PATIENT = {"OMP_WAIT_POLICY": "passive"}  # threads that wait take no core from the others
KINDS: dict[str, tuple[int, dict[str, str]]] = {
    f"{name}, {'one thread' if threads == 1 else 'two threads'}": (threads, environment)
    for threads in (1, 2)
    for name, environment in PROCESSORS.items()
}


class Begin(NamedTuple):
    """Train this run from now on."""

    run: RunConfig
    vector: Tensor


class Fill(NamedTuple):
    """Find the gradient of a batch."""

    vector: Tensor
    batch: Batch


class Descend(NamedTuple):
    """Step along the gradient that was found last."""

    num_steps: int
    moments: Mapping[str, Tensor]
    center: Tensor | None
    norm: float
    rate: float


class Descended(NamedTuple):
    """What a step comes to.

    Args:
        gradient, given: as `Trainer.on_gradient` is told.
    """

    norm: float
    vector: Tensor
    moments: dict[str, Tensor]
    gradient: Tensor
    given: float


class Machine:
    """A process that makes steps."""

    def __init__(self, threads: int, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "benchmarks.rig.elsewhere", str(threads)]
        path = os.pathsep.join(sys.path)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, **PATIENT, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._run: RunConfig | None = None

    def begin(self, run: RunConfig, vector: Tensor) -> None:
        """Train this run from now on, unless it does."""
        if self._run != run:
            self._run = run
            self.ask(Begin(run, vector))

    def ask(self, asked: object) -> Any:
        """Return what the process answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, asked)
        return pickle.load(self._process.stdout)

    @property
    def cpu_s(self) -> float:
        """Return the CPU time that the process has taken."""
        spent = psutil.Process(self._process.pid).cpu_times()
        return float(spent.user + spent.system)

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=20)


def _send(pipe: IO[bytes], what: object) -> None:
    pickle.dump(what, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


@contextmanager
def machines() -> Iterator[dict[str, Machine]]:
    """Start a machine of each kind; end them."""
    started = {name: Machine(*kind) for name, kind in KINDS.items()}
    try:
        yield started
    finally:
        for each in started.values():
            each.end()


class Elsewhere(Trainer):
    """Makes its steps on another machine."""

    def __init__(self, machine: Machine, *given: Any) -> None:
        super().__init__(*given)
        self._machine = machine

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        self._machine.begin(self._run, self._vector)
        loss, norm = self._machine.ask(Fill(self._vector, self._batches.at(positions)))
        return Mean(loss=loss, norm=norm, num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:
        assert self._optimizer is not None, "a method that sends gradients makes no inner steps"
        moments = self._optimizer.state()
        done: Descended = self._machine.ask(Descend(self._num_steps, moments, self._center, norm, rate))
        self._model.gradient.copy_(done.gradient)
        self.on_gradient(self._model.gradient, done.given)
        self._vector.copy_(done.vector)
        self._optimizer.load(done.moments, self._num_steps + 1)
        return done.norm


class _There(Trainer):
    """What makes the steps, in the other process: what it begins with comes with each."""

    def fill(self, asked: Fill) -> tuple[float, float]:
        self.set_local(asked.vector)
        return self._backward.fill(asked.batch)

    def descend(self, asked: Descend) -> Descended:
        self.load_private_state({**asked.moments, "num_steps": torch.tensor([asked.num_steps])})
        if asked.center is not None:
            self.set_center(asked.center)
        told = list[tuple[Tensor, float]]()
        self.on_gradient = lambda gradient, norm: told.append((gradient.clone(), norm))
        norm = self._descend(asked.norm, asked.rate)
        assert self._optimizer is not None
        return Descended(norm, self._vector, self._optimizer.state(), *told[0])


def serve(threads: int, asks: IO[bytes], answers: IO[bytes]) -> None:
    """Make steps until nobody asks any more."""
    torch.set_num_threads(threads)
    trainer: _There | None = None
    peer = PeerConfig(device="cpu", threads=threads)
    while True:
        try:
            asked = pickle.load(asks)
        except EOFError:
            return
        if isinstance(asked, Begin):
            unread: Batches = None  # type: ignore[assignment]
            trainer = _There(asked.run, peer, unread, lambda _event: None, SystemClock())
            trainer.start(asked.vector)
            _send(answers, None)
        elif trainer is not None:
            _send(answers, trainer.fill(asked) if isinstance(asked, Fill) else trainer.descend(asked))


if __name__ == "__main__":
    from benchmarks.rig import elsewhere  # by whose name records are told apart, and not by that of the program

    elsewhere.serve(int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
