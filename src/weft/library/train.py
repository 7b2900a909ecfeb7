"""`weft.train`: the peer of `weft train`, from a notebook or a script.

    chart = weft.Chart()
    outcome = weft.train("run.toml", callbacks=[chart])       # or a table: {"name": "first", "train": {...}}

It returns when the run is complete. The peer lives in a thread of its own; callbacks are called in the caller's, so a
slow one holds up no round, and one that raises, or Ctrl-C, ends the peer with a goodbye and a checkpoint. Called again
it goes on from there.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import NoneType
from typing import Any

from weft.config import from_tree
from weft.data.corpus import CorpusConfig, TextSource
from weft.errors import ConfigError
from weft.events import Emit, Entry
from weft.launch.corpus import Corpus
from weft.launch.peer import Participant, found, join
from weft.launch.session import Options
from weft.library.given import Machine, config_of, require_kind, require_members, require_one_process, show_ticket
from weft.peer.peer import Outcome
from weft.run.config import RunFile

LEAVES_S = 60.0  # for goodbye and checkpoint where the caller broke off
LOOK_S = 0.5  # between two looks whether the caller was interrupted: some systems deliver no signal meanwhile

Config = RunFile | Mapping[str, Any] | str | Path


def train(
    config: Config | None = None,
    *,
    ticket: str | None = None,
    data: Sequence[str | Path] = (),
    wait_for: int = 1,
    machine: Machine | None = None,
    callbacks: Sequence[Callable[[Entry], object]] = (),
    on_ticket: Callable[[str], object] = show_ticket,
) -> Outcome:
    """Make a run, go on with it, or join one, and return when it is complete or this peer had to leave.

    Args:
        config: what `weft train` takes: a run file, its path, or its tables. Paths in it start from its folder, or from
            the folder that this process works in.
        ticket: of the run to join instead. Whoever gives one agrees to what the run costs this machine
            (`weft join TICKET` shows it first).
        data: files and folders to train on, where the run that is joined is private: each peer has its own.
        wait_for: begin once so many peers are here, this one included.
        machine: home, identity, network, caps; None: as `weft train` has them.
        callbacks: each is given every event of this peer, in order.
        on_ticket: told how others join, from another thread. Printed to standard error by default.

    Raises:
        ConfigError: something that weft cannot do is in a file or an argument.
        WeftError: the peer cannot go on.
        Exception: what a callback raised.
    """
    if (config is None) == (ticket is None):
        raise ConfigError('weft.train needs a config, to make a run, or ticket="...", to join one.')
    require_one_process()
    require_kind(ticket, (str, NoneType), "ticket", "a str, as a member printed it, or None")
    require_kind(data, (list, tuple), "data", 'a list of files and folders, as in data=["my/texts"]')
    require_kind(machine, (Machine, NoneType), "machine", "a weft.Machine(home=..., settings=...), or None")
    require_members(wait_for)
    handed = _Handed()
    options = (machine or Machine()).options()
    options = replace(options, sinks=(*options.sinks, handed))
    own = CorpusConfig(source=TextSource(paths=tuple(map(str, data)))) if data else None
    life = _Life(config, ticket, own, wait_for, options, on_ticket)
    thread = threading.Thread(target=life.live, args=(handed,), name="weft", daemon=True)
    thread.start()
    try:
        for entry in handed.entries():
            for callback in callbacks:
                callback(entry)
    except BaseException as error:
        life.stop(type(error).__name__)
        thread.join(LEAVES_S)
        raise
    thread.join()
    if life.failure is not None:
        raise life.failure
    assert life.outcome is not None, "who gave a ticket has agreed"
    return life.outcome


class _Handed:
    """A sink that hands events to another thread."""

    def __init__(self) -> None:
        self._queue = SimpleQueue[Entry | None]()

    def write(self, entry: Entry) -> None:
        self._queue.put(entry)

    def close(self) -> None:
        pass

    def end(self) -> None:
        self._queue.put(None)

    def entries(self) -> Iterator[Entry]:
        """Yield what is written until `end`."""
        while True:
            try:
                entry = self._queue.get(timeout=LOOK_S)
            except Empty:
                continue
            if entry is None:
                return
            yield entry


class _Life:
    """One peer from its beginning to its end, in the thread that calls `live`."""

    def __init__(
        self,
        config: Config | None,
        ticket: str | None,
        own: CorpusConfig | None,
        wait_for: int,
        options: Options,
        on_ticket: Callable[[str], object],
    ) -> None:
        self._described = None if config is None else _described(config)
        self._ticket = ticket
        self._own = None if own is None else (own, Path.cwd())
        self._wait_for = wait_for
        self._options = options
        self._on_ticket = on_ticket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._peer: Participant | None = None
        self._reason = ""  # why it is to stop
        self.outcome: Outcome | None = None
        self.failure: BaseException | None = None

    def live(self, handed: _Handed) -> None:
        try:
            # The tls transport watches sockets, which no other loop does on every platform.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._run())
        except BaseException as error:  # whatever it is, the caller raises it
            self.failure = error
        finally:
            self._options.home.close()
            handed.end()

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._reason:
            return
        work = Corpus(described=self._described, own_data=self._own)
        if self._ticket is not None:
            self.outcome = await join(work, self._ticket, self._options, on_started=self._started)
        else:
            self.outcome = await found(work, self._options, wait_for=self._wait_for, on_started=self._started)

    def _started(self, peer: Participant, ticket: str, _emit: Emit) -> None:
        self._peer = peer
        if self._reason:
            peer.stop(self._reason)
        elif self._ticket is None:
            self._on_ticket(ticket)

    def stop(self, reason: str) -> None:
        """End soon, with a goodbye and a checkpoint; from any thread."""
        self._reason = reason
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._peer is not None:
            self._peer.stop(self._reason)
        elif self._task is not None:
            self._task.cancel()


def _described(config: Config) -> tuple[RunFile, Path]:
    """Return the run that is asked for, and the folder that its paths start from.

    Raises:
        ConfigError: a field is none of a run file's, or out of its range.
    """
    if isinstance(config, Mapping):
        return from_tree(dict(config), RunFile, where="config"), Path.cwd()
    base = Path(config).absolute().parent if isinstance(config, str | Path) else Path.cwd()
    return config_of(config, RunFile, "config"), base
