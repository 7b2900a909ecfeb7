"""Training loops of a small model, each in a thread of its own with a home of its own, over TLS on loopback.

yard = Yard(tmp_path, samples=400)
a = yard.found("a", wait_for=2)
b = yard.join("b", a)
yard.done(a, b)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from weft.codec.config import Fp32Config
from weft.events import Entry, Event
from weft.library.given import Machine
from weft.library.sync import Sync
from weft.net.transport.tls import TlsConfig
from weft.peer.peer import Outcome
from weft.run.config import SyncConfig
from weft.run.machine import PeerConfig
from weft.sync.method.presets import DiLoCoConfig

ENDS_S = 90.0  # only ends a test that would hang
BATCH, EVERY = 4, 3
METHOD = DiLoCoConfig(every=EVERY, codec=Fp32Config())


def small(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(seed: int, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield samples of one function for ever; which ones, is a loop's own."""
    luck, place = torch.Generator().manual_seed(seed), 0
    while True:
        x = torch.randn(size, 5, generator=luck)
        yield x, (x[:, :1] * x[:, 1:2]).tanh()
        place += 1


class Runner:
    """A loop in a thread: what came of it, and what its peer said."""

    def __init__(self, name: str, model: nn.Module, work: Callable[["Runner"], None]) -> None:
        self.name = name
        self.sync: Sync = None  # type: ignore[assignment]
        self.model = model
        self.entries: list[Entry] = []
        self.error: BaseException | None = None
        self.outcome: Outcome | None = None
        self.num_steps = 0
        self.has_started = threading.Event()
        self.may_step = threading.Semaphore(1 << 20)
        self._work = work
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)

    def _live(self) -> None:
        try:
            with self.sync:
                self.has_started.set()
                self._work(self)
                self.outcome = self.sync.finish()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(ENDS_S)
        assert not self.thread.is_alive(), f"{self.name} hangs: {[entry.event for entry in self.entries][-20:]}"

    def events(self, kind: type[Event]) -> list[Any]:
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    def until(self, kind: type[Event], is_wanted: Callable[[Any], bool]) -> None:
        """Wait until it has said such an event."""
        waited_s = 0.0
        while not any(map(is_wanted, self.events(kind))):
            self.thread.join(0.02)
            waited_s += 0.02
            assert self.thread.is_alive(), self.error
            assert waited_s < ENDS_S

    def waits(self) -> None:
        """Wait until its peer lends it no steps, as it does while it is paused."""
        learner = self.sync._thread.peer._trainer if self.sync._thread.peer is not None else None
        waited_s = 0.0
        while learner is None or not learner.is_parked:
            self.thread.join(0.02)
            waited_s += 0.02
            assert self.thread.is_alive(), self.error
            assert waited_s < ENDS_S

    def vector(self) -> Tensor:
        return torch.cat([parameter.detach().float().reshape(-1) for parameter in self.model.parameters()])

    def write(self, entry: Entry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        pass


def train(runner: Runner, seed: int, size: int = BATCH) -> None:
    """Make steps until the run is complete."""
    optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.05)
    for x, y in batches(seed, size):
        runner.may_step.acquire()
        optimizer.zero_grad()
        loss = mse_loss(runner.model(x), y)
        loss.backward()
        optimizer.step()
        runner.num_steps += 1
        if not runner.sync.step(len(x), loss):
            return


class Yard:
    def __init__(self, root: Path, **config: Any) -> None:
        torch.set_num_threads(1)
        fields: dict[str, Any] = {"samples": 240, "batch_size": BATCH, "method": METHOD, "has_even_leases": True}
        self.config = SyncConfig(**(fields | config))
        self.root = root
        self.runners: list[Runner] = []

    def found(self, name: str, *, wait_for: int = 1, **given: Any) -> Runner:
        return self._start(name, None, wait_for, given)

    def join(self, name: str, other: Runner, **given: Any) -> Runner:
        """Join with the ticket of `other`, once it has one."""
        return self._start(name, ticket_of(other), given.pop("wait_for", 1), given)

    def _start(self, name: str, ticket: str | None, wait_for: int, given: dict[str, Any]) -> Runner:
        model = given.pop("model", None) or small(seed=len(self.runners))
        settings = PeerConfig(name=name, device="cpu", transports=("tls",), tls=TlsConfig(host="127.0.0.1"))
        seed = len(self.runners)
        work = given.pop("work", lambda runner: train(runner, seed))
        runner = Runner(name, model, work)
        if given.pop("is_held", False):
            runner.may_step = threading.Semaphore(0)
        runner.sync = Sync(
            given.pop("tensors", model),
            given.pop("config", self.config),
            ticket=ticket,
            wait_for=wait_for,
            wish=given.pop("wish", "ask"),
            machine=Machine(
                home=self.root / given.pop("home", name), key=given.pop("key", None), settings=settings, sinks=(runner,)
            ),
            on_ticket=lambda ticket: None,
            on_terms=given.pop("on_terms", lambda terms: None),
        )
        assert not given, given
        self.runners.append(runner)
        runner.thread.start()
        return runner

    def done(self, *runners: Runner) -> list[Outcome]:
        """Wait until they end, all with the same parameters, in the model too."""
        for runner in runners:
            runner.join()
        for runner in runners:
            if runner.error is not None:
                raise runner.error
        outcomes = [runner.outcome for runner in runners]
        assert len({outcome.replica for outcome in outcomes if outcome}) == 1
        assert all(runner.vector().equal(runners[0].vector()) for runner in runners)
        return [outcome for outcome in outcomes if outcome]


def ticket_of(runner: Runner) -> str:
    waited_s = 0.0
    while runner.sync.ticket is None:
        runner.thread.join(0.02)
        waited_s += 0.02
        assert runner.thread.is_alive(), runner.error
        assert waited_s < ENDS_S
    return runner.sync.ticket


@contextmanager
def ending(yard: Yard) -> Iterator[None]:
    """End every loop, however the test ends."""
    try:
        yield
    finally:
        for runner in yard.runners:
            runner.may_step.release(1 << 20)
            runner.sync.close()
            runner.thread.join(ENDS_S)
