"""What a signal to end does to a process while no peer runs in it: from its first line on, and after its last.

before        modules are imported, or what a peer needs is read: the process ends at once, and with 0 as a peer
a peer runs   `weft.cli.process.Stopper` has the word
after         all is saved, and the process ends by itself; told again two seconds later, it ends at once
Python ends   nothing: what is left takes a moment

A verb that runs no peer has what Python gives it, as soon as it is imported: Ctrl-C interrupts it.

This stands before all else that is imported, so it imports nothing of weft's.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)
NOTHING_TO_SAVE = "stopped before it joined: there is nothing to save"
_OF_PEERS = ("train", "join", "anchor", "demo")


def called(number: int) -> str:
    """Return what a person calls a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class Outside:
    """Handles signals while no peer runs.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.is_of_peer = verb_of(arguments) in _OF_PEERS

    def install(self) -> None:
        for number in ENDING:
            signal.signal(number, self)
        atexit.register(_ignore)  # the first that is registered is the last that is called

    def imported(self) -> None:
        """Give a verb that runs no peer what Python gives it."""
        if not self.is_of_peer:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.is_of_peer and sys.stderr is not None:
            os.write(2, f"{NOTHING_TO_SAVE}\n".encode())
        take_back()
        os._exit(0 if self.is_of_peer else 128 + number)


_undone: list[Callable[[], str]] = []


@contextmanager
def undone(undo: Callable[[], str]) -> Iterator[None]:
    """Have `undo` called where a signal ends the process at once; it returns what to say of that, or nothing."""
    _undone.append(undo)
    try:
        yield
    finally:
        _undone.remove(undo)


def take_back() -> None:
    """Undo what a process has done that ends at once, and say so; from a signal's handler, too."""
    for undo in reversed(_undone):
        if said := undo():
            with suppress(OSError):
                os.write(2, f"{said}\n".encode())


def verb_of(arguments: Sequence[str]) -> str:
    """Return the verb of a command line; empty: there is none."""
    rest = iter(arguments)
    for each in rest:
        if each == "--home":
            next(rest, None)
        elif not each.startswith("-"):
            return each
    return ""


def _ignore() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
