"""A path's training steps, each handed in to the run of each of its modules.

    a step of the path ──► its modules, copied ──► handed in ──► in the middle of a round: at once
                     ▲                                           at its end: once the round is over
                     └───────── what the run says ◄──────────────┘

A round of each run is as many steps, so usually all runs are at the end of a round at once, and the path waits for all.
But whoever comes in the middle of a round brings runs out of step. Were a path to wait for one run while another wants
steps of it, paths could wait for each other in a circle for ever. So it waits no longer than rounds have taken; then it
makes steps for the runs that want some, and the other modules stay as they were handed in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weft.clock import Clock
from weft.compose.paths.folder import called
from weft.compose.paths.levels import Module
from weft.errors import PeerError
from weft.sync.round.machine import deadline_s

LEAST = 3.0  # times what it usually takes from the first run that wants a step to the last
LOOK_S = 1.0  # some systems deliver no signal in a wait without end


class Ended(Protocol):
    """How a run ended for this peer."""

    @property
    def reason(self) -> str: ...


class Run(Protocol):
    """The run of a module, as `weft.Sync` is."""

    @property
    def round(self) -> int: ...

    @property
    def progress(self) -> float: ...

    @property
    def outcome(self) -> Ended | None: ...

    def start(self) -> None: ...

    def step(self, num_samples: int | None = None, loss: float | Tensor | None = None) -> bool: ...

    def close(self, error: BaseException | None = None) -> None: ...


@dataclass(frozen=True, eq=False)
class Part:
    """A module that is trained in a path.

    Args:
        mine: its tensors in the path's model.
        given: as many for the run, which reads and writes them while the path makes steps for others.
    """

    run: Run
    mine: Sequence[Tensor]
    given: Sequence[Tensor]

    def give(self) -> None:
        _copy(self.given, self.mine)

    def take(self) -> None:
        _copy(self.mine, self.given)


class HandingIn:
    """
    Args:
        parts: of all modules of the path.
        patience: how long to wait for the others once one run wants a step, given how long that took in the last
            rounds: seconds.
    """

    def __init__(
        self,
        parts: Mapping[Module, Part],
        threads: ThreadPoolExecutor,
        clock: Clock,
        patience: Callable[[Sequence[float]], float] = lambda spreads_s: deadline_s(spreads_s, LEAST),
    ) -> None:
        self._parts = dict(parts)
        self._threads = threads
        self._clock = clock
        self._patience = patience
        self._spreads_s = list[float]()
        self._wanting = set(parts)  # modules whose runs want a step
        self._waiting = dict[Future[bool], Module]()  # whose last step was handed in
        self._late = set[Future[bool]]()  # of these, for which nothing waits any more

    @property
    def is_over(self) -> bool:
        """Whether the runs of all modules are complete."""
        return not self._wanting and not self._waiting

    @property
    def num_rounds(self) -> int:
        """The round that all modules have made, of those whose runs go on; of none, the last that one has made."""
        return min((run.round for run in self._going_on), default=self.last_round)

    @property
    def progress(self) -> float:
        """How far the run that is last is, of those that go on, from 0 to 1."""
        return min((run.progress for run in self._going_on), default=1.0)

    @property
    def last_round(self) -> int:
        """The last round that one of the modules has made."""
        return max(part.run.round for part in self._parts.values())

    def start(self) -> None:
        """Begin or join all runs side by side, since each may wait for other peers, and take what they say.

        Raises:
            WeftError: as of `weft.Sync.start`, as soon as one cannot start. Others may still wait then, until all are
                closed; so they may where somebody breaks this off.
        """
        starting = {self._threads.submit(part.run.start) for part in self._parts.values()}
        while starting:
            done, starting = wait(starting, LOOK_S, FIRST_COMPLETED)
            for started in done:
                started.result()
        for part in self._parts.values():
            part.take()

    def close(self, error: BaseException) -> None:
        """Leave all runs because of `error`."""
        for part in self._parts.values():
            part.run.close(error)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let a step be made inside, of which the modules know nothing whose runs want none."""
        held = [(part.mine, [each.clone() for each in part.mine]) for part in self._not_wanting()]
        yield
        for mine, kept in held:
            _copy(mine, kept)

    def hand_in(self, num_samples: int, loss: float) -> None:
        """Hand in the step that was made, and return once a run wants another one, or all are complete.

        Raises:
            PeerError: this peer had to leave a run that was not complete.
            WeftError: it cannot go on.
        """
        for module in sorted(self._wanting):
            part = self._parts[module]
            part.give()
            self._waiting[self._threads.submit(part.run.step, num_samples, loss)] = module
        self._wanting = set()
        while self._waiting and not self._wanting:
            self._wait()

    def _wait(self) -> None:
        """Wait until a run has taken its step, and for the others a while."""
        before = self.last_round
        while not wait(self._waiting, LOOK_S, FIRST_COMPLETED).done:
            pass
        first_s = self._clock.now()
        _, late = wait(self._waiting.keys() - self._late, self._patience(self._spreads_s))
        if self.last_round > before and not late:
            self._spreads_s.append(self._clock.now() - first_s)
        self._late |= late
        for future in [each for each in self._waiting if each.done()]:
            self._late.discard(future)
            self._take_up(self._waiting.pop(future), future.result())

    def _take_up(self, module: Module, goes_on: bool) -> None:
        part = self._parts[module]
        part.take()
        if goes_on:
            self._wanting.add(module)
        else:
            _require_complete(module, part.run)

    @property
    def _going_on(self) -> list[Run]:
        return [self._parts[each].run for each in (*self._wanting, *self._waiting.values())]

    def _not_wanting(self) -> list[Part]:
        return [part for module, part in self._parts.items() if module not in self._wanting]


def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    for there, here in zip(to, of, strict=True):
        there.copy_(here)


def _require_complete(module: Module, run: Run) -> None:
    """
    Raises:
        PeerError: this peer had to leave the run of a module before that was complete.
    """
    if run.outcome is None or run.outcome.reason != "complete":
        why = "it ended" if run.outcome is None else run.outcome.reason
        raise PeerError(
            f"module {called(module)}: this peer left its run before that was complete ({why}), so the path is not "
            "written. Start the same command again: it goes on from what was saved."
        )
