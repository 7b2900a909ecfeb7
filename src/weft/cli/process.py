"""How signals end a peer in the foreground, and the event loop that verbs with a network run on.

SIGINT or SIGTERM    the peer says goodbye, saves, and the command exits 0
within two seconds   the same signal, told twice: `timeout` and terminals do so
the same again       the process ends at once
too slow             after `_PATIENCE_S` the process ends by itself, and says so
the parent is gone   as SIGTERM: no peer of a demo outlives the demo
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import psutil
import typer

from weft.cli.screen.screen import Screen
from weft.clock import Clock, SystemClock, Wish

_PATIENCE_S = 22.0  # to say goodbye and save: the promise is 25 s, and a process takes a moment to end
_EARLY_PATIENCE_S = 3.0  # before it takes part there is nobody to say goodbye to
NOTHING_TO_SAVE = "stopped before it joined: there is nothing to save"


class Stopper:
    """Turns the first signal into a goodbye and a second wish into an end."""

    def __init__(self, screen: Screen, clock: Clock | None = None) -> None:
        self._screen = screen
        self._stop_peer: Callable[[str], None] | None = None
        self._wish = Wish(clock or SystemClock())
        self._is_over = False
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

    def started(self, stop: Callable[[str], None]) -> None:
        """Stop a peer from now on: with `stop`, which takes why."""
        self._stop_peer = stop

    def remove(self) -> None:
        """Put back what signals did before, once the peer has ended; a process that was told to end takes them yet."""
        self._is_over = True
        for number, handler in self._before.items() if not self._wish.is_told else ():
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
        name, is_first = signal.Signals(number).name, not self._wish.is_told
        if self._is_asking:
            self._end(0, "not joined")
        if self._wish.is_again():
            self._end(128 + number, f"{name} again: ended at once{'' if self._is_over else ', without saving'}")
        if not is_first:
            return
        if (
            self._stop_peer is None
        ):  # a thread may be packing data or reading weights; both are written whole or not at all
            self._timer = threading.Timer(_EARLY_PATIENCE_S, self._end, (0, NOTHING_TO_SAVE))
        else:
            why = f"still not done {_PATIENCE_S:.0f} s after {name}: ended at once"
            self._timer = threading.Timer(_PATIENCE_S, self._end, (1, why))
        self._timer.daemon = True
        self._timer.start()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop, name)

    def _stop(self, name: str) -> None:
        if self._stop_peer is not None:
            self._stop_peer(f"stopped by {name}")
        elif self._task is not None:
            self._task.cancel()

    def _end(self, code: int, message: str) -> None:
        self._screen.close()
        print(f"weft: {message}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(code)


T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own and return what it returns."""
    # The tls transport watches sockets, which no other loop does on every platform.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(main)


_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 1.0


def stop_with_parent(pid: int) -> None:
    """Send this process SIGTERM once the process `pid` is gone.

    On Linux the kernel does; everywhere a thread looks as well, since the parent may be gone already.
    """
    if sys.platform == "linux" and os.getppid() == pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch, args=(pid,), daemon=True, name="parent-watch").start()


def _watch(pid: int) -> None:
    waiting = threading.Event()
    while psutil.pid_exists(pid) and os.getppid() in (pid, 0):
        waiting.wait(_LOOK_EVERY_S)
    signal.raise_signal(signal.SIGTERM)
