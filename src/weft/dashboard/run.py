"""`weft.Run`: a run that has been logged, as records: for a report, a notebook, or a table of pandas.

run = weft.Run.load("runs/RUN")            a run's folder in the home, a peer's folder in it, or a log file
pandas.DataFrame(run.frame())              a record for each round
run.frame("peers")                         for each peer
run.frame("Evaluated")                     for each event of a kind: docs/formats.md has their fields
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from weft.dashboard.history import History
from weft.dashboard.logs import find_logs, logged
from weft.dashboard.stages import layers_of
from weft.dashboard.view import About
from weft.dashboard.words import in_words
from weft.errors import ConfigError, WeftError
from weft.events import Entry
from weft.ids import Digest, PeerId, RunId
from weft.observe.redact import public_entry
from weft.sync.records.charter import Settings

if TYPE_CHECKING:
    from weft.run.config import Genesis

Record = dict[str, Any]

ROUNDS, PEERS = "rounds", "peers"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as far as logs tell.

    Args:
        title: what people call it.
        entries: all that its peers logged, in the order of their clocks.
        shared: what its peers share; None where it is not here.
        digest: the run's name: of all that its peers share.
    """

    title: str
    history: History
    entries: Sequence[Entry] = ()
    shared: "Genesis | None" = None
    digest: str = ""

    @classmethod
    def load(cls, path: str | Path, *, is_public: bool = False) -> Self:
        """Read a run's logs.

        Args:
            path: a log file, a peer's folder, or a run's folder.
            is_public: leave out what not everybody may see: addresses, paths, tickets.

        Raises:
            ConfigError: there are no logs there, or a line is no event.
        """
        folder = Path(path)
        logs = find_logs(folder)
        shared = shared_by(logs[0])
        about = About() if shared is None else about_of(shared)
        history, entries = History(about), list(logged(logs))
        if is_public:
            entries = [told for entry in entries if (told := public_entry(entry)) is not None]
        for entry in entries:
            history.take(entry)
        title, digest = history.run.name or folder.absolute().name[:16], history.run.id or ""
        return cls(title=title, history=history, entries=entries, shared=shared, digest=digest)

    def frame(self, of: str = ROUNDS) -> list[Record]:
        """Return records of plain values, which `pandas.DataFrame` takes.

        Args:
            of: "rounds", "peers", or a kind of event, as "StepDone".

        Returns:
            Times are seconds since 1970, losses nats per token; names of peers as they call themselves.

        Raises:
            ConfigError: there is no event of that kind; says which there are.
        """
        if of == ROUNDS:
            return self._rounds()
        if of == PEERS:
            return [asdict(peer) for peer in self.history.now.peers]
        found = [entry for entry in self.entries if type(entry.event).__name__ == of]
        if not found:
            there = [ROUNDS, PEERS, *sorted({type(entry.event).__name__ for entry in self.entries})]
            raise ConfigError(f"frame of {of!r:.80}: there is none. There are: {', '.join(there)}.")
        name = self.history.name
        return [{"at": each.at, "peer": name(each.peer), **msgspec.to_builtins(each.event)} for each in found]

    def _rounds(self) -> list[Record]:
        tree = self.history.whole()
        names = [self.history.name(PeerId(peer.key)) for peer in self.history.now.peers]
        losses = {row[1]: row[2] for row in tree["train"]}
        heldout = {row[1]: row[2] for row in tree["heldout"]}
        moved = {row[1]: row[2:] for row in tree["bytes"]}
        return [
            {
                "at": at,
                "round": number,
                "attempt": attempt,
                "leader": None if leader is None else names[leader],
                "tokens": tokens,
                "committed_tokens": committed,
                "num_counted": len(counted),
                "left_out": [names[peer] for peer, _ in left_out],
                "loss": losses.get(committed),
                "heldout_loss": heldout.get(committed),
                "moved_nbytes": moved[committed][0] if committed in moved else None,
                "ring_nbytes": moved[committed][1] if committed in moved else None,
            }
            for at, number, attempt, leader, tokens, committed, counted, left_out, *_ in tree["rounds"]
        ]


def shared_by(log: Path) -> "Genesis | None":
    """Return what the peers of a run share whose log lies in a home of this machine; None where it is not there."""
    folder = log.absolute().parent.parent  # root/runs/RUN/PEER/log.jsonl
    if folder.parent.name != "runs" or len(folder.name) != 64:
        return None
    from weft.run.genesis import MAX_RUN_NBYTES, read_run  # needs torch, for which nobody should wait without need
    from weft.run.machine import PeerConfig
    from weft.store.home import BlobStore

    with suppress(WeftError, OSError, ValueError):
        data = BlobStore(folder.parents[1] / "blobs").read(Digest(folder.name), MAX_RUN_NBYTES)
        return None if data is None else read_run(data, PeerConfig().max_parameters)
    return None


def about_of(run: "Genesis", settings: Settings | None = None) -> About:
    """Return what is known of a run before anything happened.

    Args:
        settings: what holds of it now; None: what it began with.
    """
    from weft.run.staged import StagedConfig  # needs torch, too

    known = about(run.name, run.run, settings or run.settings)
    if not isinstance(run, StagedConfig):
        return known
    return replace(known, num_parameters=run.num_parameters, layers=layers_of(run.cuts))


def about(name: str, run: RunId, settings: Settings) -> About:
    """Return what is known of a run whose model is not."""
    return About(
        name=name,
        id=run,
        total_tokens=settings.tokens,
        tokens_per_step=settings.tokens_per_step,
        method=in_words(settings.method),
    )
