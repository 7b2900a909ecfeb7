"""How signals end a peer in the foreground, and the event loop that verbs with a network run on.

Ctrl-C or SIGTERM    the peer says goodbye, saves, and the command exits 0
within two seconds   the same signal, told twice: `timeout` and terminals do so
the same again       the process ends at once
nothing to save      nobody waits longer than `_REST_S` for what still computes, nor than `_CLOSES_S` once all is saved
too slow             after `_PATIENCE_S` the process ends by itself, and says so
the parent is gone   as SIGTERM: no peer of a demo outlives the demo

What signals do before there is a peer, and after it: `weft.cli.signals`.
"""

import asyncio
import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import psutil

from weft.cli.screen.screen import Screen
from weft.cli.signals import ENDING, NOTHING_TO_SAVE, Outside, called, take_back
from weft.cli.terminal import agrees
from weft.clock import Clock, SystemClock, Wish

_PATIENCE_S = 22.0  # to say goodbye and save: the promise is 25 s, and a process takes a moment to end
_REST_S = 3.0  # where nothing is to be saved: a goodbye takes two at most
_CLOSES_S = 8.0  # where all is saved: to close the network, and to say how it ended
_LOOK_S = 0.2
_RESTS = "stopped: all is saved, and what still computes is not waited for"


class Stopper:
    """Turns the first signal into a goodbye and a second wish into an end."""

    def __init__(self, screen: Screen, clock: Clock | None = None) -> None:
        self._screen = screen
        self._clock = clock or SystemClock()
        self._stop_peer: Callable[[str], None] | None = None
        self._is_at_rest: Callable[[], bool] = lambda: True
        self._wish = Wish(self._clock)
        self._is_over = threading.Event()
        self._is_asking = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._before: dict[int, Any] = {}

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._task = loop, asyncio.current_task()
        for number in ENDING:
            # Not the loop's own handlers: these run even while the loop is busy, and on every platform.
            self._before[number] = signal.signal(number, self._on_signal)

    def started(self, stop: Callable[[str], None], is_at_rest: Callable[[], bool]) -> None:
        """Stop a peer from now on.

        Args:
            stop: tells it to, and why.
            is_at_rest: says, from any thread, whether it has nothing to save, or has saved it all.
        """
        self._stop_peer, self._is_at_rest = stop, is_at_rest

    def remove(self) -> None:
        """Let signals be, once the peer has ended: all is saved, and a process that was told to end ends by itself.

        Where `Outside` handled them before, or one has come, only a second wish counts. Else they do what they did.
        """
        self._is_over.set()
        for number, handler in self._before.items() if not self._wish.is_told else ():
            if not isinstance(handler, Outside):
                signal.signal(number, handler)

    def ask(self, question: str) -> bool:
        """Ask the person at the terminal, from any thread. A signal meanwhile is a no, for which nothing waits."""
        self._is_asking = True
        try:
            return agrees(question, default=True)
        finally:
            self._is_asking = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name, is_first, is_over = called(number), not self._wish.is_told, self._is_over.is_set()
        if self._is_asking:
            self._end(0, "not joined")
        if self._wish.is_again():
            self._end(128 + number, f"{name} again: ended at once{'' if is_over else ', without saving'}")
        if not is_first or is_over:
            return
        threading.Thread(target=self._wait, args=(name,), daemon=True, name="patience").start()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop, name)

    def _stop(self, name: str) -> None:
        if self._stop_peer is not None:
            self._screen.note(f"{name}: this peer saves and says goodbye")
            self._stop_peer(f"stopped by {name}")
        elif self._task is not None:
            self._task.cancel()

    def _wait(self, name: str) -> None:
        """Wait until the peer has ended, as long as there is something to wait for; then end the process.

        A thread may yet pack data, read weights or warm up. What is written is written whole or not at all.
        """
        began, rests_since, was_busy = self._clock.now(), None, False
        while not self._is_over.wait(_LOOK_S):
            now, is_at_rest = self._clock.now(), self._is_at_rest()
            was_busy |= not is_at_rest
            rests_since = (now if rests_since is None else rests_since) if is_at_rest else None
            if rests_since is not None and now - rests_since >= (_CLOSES_S if was_busy else _REST_S):
                self._end(0, _RESTS if was_busy else NOTHING_TO_SAVE)
            if now - began >= _PATIENCE_S:
                self._end(1, f"still not done {_PATIENCE_S:.0f} s after {name}: ended at once")

    def _end(self, code: int, message: str) -> None:
        self._screen.close()
        print(f"weft: {message}", file=sys.stderr, flush=True)  # noqa: T201
        take_back()
        os._exit(code)


T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own and return what it returns."""
    try:  # a loop that could not open what it needs tells of itself when it goes
        with selectors.DefaultSelector():
            for each in socket.socketpair():
                each.close()
    except OSError:
        main.close()
        raise
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
