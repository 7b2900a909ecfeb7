"""One peer in the foreground: shows it, stops it when asked, says how it ended. What train and join have in common.

    SIGINT or SIGTERM    the peer says goodbye, saves, and the command exits 0
    the same again       the process ends at once
    too slow             after `_PATIENCE_S` the process ends by itself, and says so

It imports torch: verbs import it when they run.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import typer

from weft.cli.parent import stop_with_parent
from weft.cli.place import command_for
from weft.cli.screen import Screen, make_screen
from weft.cli.summary import summary
from weft.cli.until import Contributed, Until
from weft.cli.view import Facts
from weft.data import write_atomically
from weft.errors import ConfigError
from weft.peer.config import RunConfig
from weft.peer.footing import Options
from weft.peer.peer import Outcome, Peer

_PATIENCE_S = 22.0  # to say goodbye and save: the promise is 25 s, and a process takes a moment to end
_EARLY_PATIENCE_S = 3.0  # before it takes part there is nobody to say goodbye to
_NOTHING_TO_SAVE = "stopped before it took part: there is nothing to save"

OnStarted = Callable[[Peer, str], None]
Ask = Callable[[str], bool]
Start = Callable[[Options, OnStarted, Ask], Awaitable[Outcome | None]]


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a peer is run, as opposed to what it does."""

    is_quiet: bool
    prints_ticket: bool
    report: Path | None = None
    parent: int = 0  # a process to stop with; 0: none
    wait_for: int = 1  # peers with which the run begins
    until: Until = field(default_factory=Until)  # when it leaves by itself


def run(start: Start, options: Options, manner: Manner) -> None:
    """Run one peer to its end and print how it ended.

    Raises:
        WeftError: as `weft.peer.launch`.
    """
    if manner.report is not None:
        _check_report(manner.report)
    screen = make_screen(is_quiet=manner.is_quiet)
    stopper = _Stopper(screen)
    if manner.parent:
        stop_with_parent(manner.parent)
    contributed = Contributed(manner.until)
    options = replace(options, sinks=(*options.sinks, screen, contributed), until=manner.until.wall)

    def on_started(peer: Peer, ticket: str) -> None:
        stopper.peer = peer
        contributed.stop, contributed.emit = peer.stop, peer.place.emit
        if manner.prints_ticket:
            print(ticket, flush=True)  # noqa: T201  # the one line that was asked for
            print("others join with: weft join TICKET", file=sys.stderr, flush=True)  # noqa: T201
        screen.start(facts_of(peer.run, manner.wait_for))

    async def main() -> Outcome | None:
        stopper.install(asyncio.get_running_loop())
        return await start(options, on_started, stopper.ask)

    try:
        # The tls transport watches sockets, which no other loop does on every platform.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            outcome = runner.run(main())
    except asyncio.CancelledError:
        print(_NOTHING_TO_SAVE, file=sys.stderr)  # noqa: T201
        return
    finally:
        stopper.remove()
        screen.close()
    if outcome is not None:
        print(summary(outcome, screen.view, command_for(options.home.root)), flush=True)  # noqa: T201
        if manner.report is not None:
            write_atomically(manner.report, [msgspec.json.encode(report_of(outcome))])


def facts_of(run: RunConfig, wait_for: int) -> Facts:
    """Return what the view needs to know of a run."""
    return Facts(run=run.name, total_tokens=run.train.tokens, tokens_per_step=run.tokens_per_step, wait_for=wait_for)


def _check_report(report: Path) -> None:
    """Refuse a report below folders of which more than the last is missing: the path is mistyped."""
    folder = report.absolute().parent
    if not folder.exists() and not folder.parent.is_dir():
        raise ConfigError(f"--report {report}: there is no folder {folder.parent}. Make it, or name another place.")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer ended, for programs: what `--report` writes."""

    reason: str
    run: str
    peer: str
    round: int
    committed_tokens: int
    replica: str
    loss: float | None
    nats_per_byte: float | None
    sample: str | None
    sent_nbytes: int
    received_nbytes: int
    checkpoint: str
    successor: str | None = None


def report_of(outcome: Outcome) -> Report:
    return Report(
        reason=outcome.reason,
        run=outcome.run.run,
        peer=outcome.peer,
        round=outcome.round,
        committed_tokens=outcome.committed_tokens,
        replica=outcome.replica,
        loss=outcome.loss,
        nats_per_byte=outcome.nats_per_byte,
        sample=outcome.sample,
        sent_nbytes=outcome.sent_nbytes,
        received_nbytes=outcome.received_nbytes,
        checkpoint=str(outcome.checkpoint),
        successor=None if outcome.successor is None else outcome.successor.run,
    )


class _Stopper:
    """Turns the first signal into a goodbye and the second into an end."""

    def __init__(self, screen: Screen) -> None:
        self.peer: Peer | None = None
        self._screen = screen
        self._num_signals = 0
        self._is_asking = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._task = loop, asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            # Not the loop's own handlers: these run even while the loop is busy, and on every platform.
            self._before[number] = signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Put back what signals did before, once the peer has ended."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None:
            self._timer.cancel()

    def ask(self, question: str) -> bool:
        """Ask the person at the terminal, from any thread. A signal meanwhile is a no, for which nothing waits."""
        self._is_asking = True
        try:
            return typer.confirm(question, default=True, err=True)
        finally:
            self._is_asking = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._num_signals += 1
        name = signal.Signals(number).name
        if self._is_asking:
            self._end(0, "not joined")
        if self._num_signals > 1:
            self._end(128 + number, f"{name} again: ended at once, without saving")
        if self.peer is None:  # a thread may be packing data or reading weights; both are written whole or not at all
            self._timer = threading.Timer(_EARLY_PATIENCE_S, self._end, (0, _NOTHING_TO_SAVE))
        else:
            why = f"not done {_PATIENCE_S:.0f} s after {name}: ended"
            self._timer = threading.Timer(_PATIENCE_S, self._end, (1, why))
        self._timer.daemon = True
        self._timer.start()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop, name)

    def _stop(self, name: str) -> None:
        if self.peer is not None:
            self.peer.stop(f"asked to by {name}")
        elif self._task is not None:
            self._task.cancel()

    def _end(self, code: int, message: str) -> None:
        self._screen.close()
        print(f"weft: {message}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(code)
