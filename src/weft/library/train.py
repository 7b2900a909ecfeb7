"""`weft.train`: the peer of `weft train`, from a notebook or a script.

    chart = weft.Chart()
    outcome = weft.train("run.toml", callbacks=[chart])       # or a table: {"name": "first", "train": {...}}

It returns when the run is complete. The peer lives in a thread of its own; callbacks are called in the caller's, so a
slow one holds up no round, and one that raises, or Ctrl-C, ends the peer with a goodbye and a checkpoint. Called again
it goes on from there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import NoneType
from typing import Any

from weft.config import from_tree, said, told_idle
from weft.data.corpus import CorpusConfig, source_of
from weft.errors import ConfigError
from weft.events import Entry
from weft.launch.corpus import Corpus
from weft.launch.kept import Wish
from weft.launch.peer import Participant
from weft.library.given import (
    Machine,
    config_of,
    notes_on,
    require_kind,
    require_members,
    require_one_process,
    require_wish,
    show_terms,
    show_ticket,
)
from weft.library.thread import PeerThread
from weft.peer.peer import Outcome
from weft.run.config import RunFile
from weft.run.idle import without_effect

LOOK_S = 0.5  # between two looks whether the caller was interrupted: some systems deliver no signal meanwhile

Config = RunFile | Mapping[str, Any] | str | Path


def train(
    config: Config | None = None,
    *,
    ticket: str | None = None,
    data: Sequence[str | Path] = (),
    wait_for: int = 1,
    wish: Wish = "ask",
    machine: Machine | None = None,
    callbacks: Sequence[Callable[[Entry], object]] = (),
    on_ticket: Callable[[str], object] = show_ticket,
    on_terms: Callable[[str], object] = show_terms,
) -> Outcome:
    """Make a run, go on with it, or join one, and return when it is complete or this peer had to leave.

    Args:
        config: what `weft train` takes: a run file, its path, or its tables. Paths in it start from its folder, or from
            the folder that this process works in.
        ticket: of the run to join instead. Whoever gives one agrees to what the run costs this machine.
        data: files and folders to train on, where the run that is joined is private: each peer has its own.
        wait_for: begin once so many peers are here, this one included.
        wish: where the home holds a run of that name which differs: "go on" with it, by what config says now; begin
            "new" beside it; or "ask", which raises ConfigError and says what differs.
        machine: home, identity, network, caps; None: as `weft train` has them.
        callbacks: each is given every event of this peer, in order.
        on_ticket: told how others join, from another thread. Printed to standard error by default.
        on_terms: told in one line what joining costs this machine, before anything is fetched, from another thread;
            what it raises, this raises, and nothing is joined. Printed to standard error by default.

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
    require_wish(wish)
    handed = _Handed()
    options = (machine or Machine()).options()
    options = replace(options, sinks=(*options.sinks, handed))
    own = (CorpusConfig(source=source_of([str(path) for path in data], Path.cwd())), Path.cwd()) if data else None
    described = None if config is None else _described(config)
    notes = list(notes_on(options.settings, "training", ticket, wait_for, wish))
    if described is not None:
        notes += told_idle("config", said(described[0]), without_effect(described[0]))
    work = Corpus(described=described, own_data=own, wish=wish, notes=notes, on_terms=on_terms)
    thread = PeerThread[Participant](options, ticket, wait_for, on_ticket, handed.end)
    thread.begin(work)
    try:
        for entry in handed.entries():
            for callback in callbacks:
                callback(entry)
    except BaseException as error:
        thread.leave(type(error).__name__)
        thread.see_off()
        raise
    thread.join()
    thread.raise_failure()
    assert thread.outcome is not None, "who gave a ticket has agreed"
    return thread.outcome


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


def _described(config: Config) -> tuple[RunFile, Path]:
    """Return the run that is asked for, and the folder that its paths start from.

    Raises:
        ConfigError: a field is none of a run file's, or out of its range.
    """
    if isinstance(config, Mapping):
        return from_tree(dict(config), RunFile, where="config"), Path.cwd()
    base = Path(config).absolute().parent if isinstance(config, str | Path) else Path.cwd()
    return config_of(config, RunFile, "config"), base
