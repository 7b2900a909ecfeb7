"""`weft.Run`: a run that has been logged, as records: for a report, a notebook, or a table of pandas.

run = weft.Run.load("runs/RUN")            a run's folder in the home, a peer's folder in it, or a log file
run = weft.Run.load("a/runs/RUN", "b/runs/RUN")     the same of several homes, as one run
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
from msgspec import UNSET

from weft.dashboard.history import History
from weft.dashboard.logs import find_logs, logged, once, require_one_run, run_of
from weft.dashboard.stages import layers_of, stage_of
from weft.dashboard.view import About
from weft.dashboard.words import in_words
from weft.errors import ConfigError, WeftError
from weft.events import Entry, PeerStarted, RoundProven, StepDone
from weft.ids import Digest, PeerId, RunId
from weft.observe.redact import public_entry
from weft.store.home import PeerFolder
from weft.sync.records.charter import Settings

if TYPE_CHECKING:
    from weft.run.config import Genesis, RunFile

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
        file: the run file, where the peer is heard that made the run.
    """

    title: str
    history: History
    entries: Sequence[Entry] = ()
    shared: "Genesis | None" = None
    digest: str = ""
    file: "RunFile | None" = None

    @classmethod
    def load(cls, *paths: str | Path, is_public: bool = False) -> Self:
        """Read a run's logs.

        Args:
            paths: log files, peers' folders, or the run's folders, of one home or several.
            is_public: leave out what not everybody may see: addresses, paths, tickets.

        Raises:
            ConfigError: there are no logs there, they are of several runs, or a line is no event.
        """
        if not paths:
            raise ConfigError("Run.load needs a path: a log file, or the folder of a run, runs/RUN in the home.")
        logs = tuple(dict.fromkeys(log.absolute() for path in paths for log in find_logs(Path(path))))
        return cls.of(logs, is_public=is_public, title=Path(paths[0]).absolute().name[:16])

    @classmethod
    def of(
        cls,
        logs: Sequence[Path],
        told: Sequence[Entry] = (),
        known: About | None = None,
        *,
        is_public: bool = False,
        title: str = "",
    ) -> Self:
        """Return the run that logs are of.

        Args:
            told: what members tell beside them.
            known: of the run, where its members were asked.
            title: where it has no name.

        Raises:
            ConfigError: logs are of several runs, or a line is no event.
        """
        shared, entries = shared_of(logs), list(logged(logs))
        require_one_run(logs, {run for entry in entries if (run := _told_run(entry)) is not None})
        if is_public:
            entries = [public for entry in entries if (public := public_entry(entry)) is not None]
        if told:
            entries = list(once(sorted([*entries, *_beside(told, entries)], key=lambda entry: entry.at)))
        history = History(known or about_logged(logs))
        for entry in entries:
            history.take(entry)
        title, digest = history.run.name or title, history.run.id or ""
        file = file_of(logs, digest)
        return cls(title=title, history=history, entries=entries, shared=shared, digest=digest, file=file)

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
        heldout = {(row[4], row[1]): row[2] for row in tree["heldout"]}
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
                "heldout_loss": heldout.get((number, committed)),
                "moved_nbytes": moved[committed][0] if committed in moved else None,
                "ring_nbytes": moved[committed][1] if committed in moved else None,
            }
            for at, number, attempt, leader, tokens, committed, counted, left_out, *_ in tree["rounds"]
        ]


def _told_run(entry: Entry) -> str | None:
    """Return the run that an entry names; None: none, or that of a stage."""
    return entry.event.run if isinstance(entry.event, PeerStarted) and stage_of(entry.event) is None else None


def _beside(told: Sequence[Entry], logged: Sequence[Entry]) -> list[Entry]:
    """Return what members told that their logs do not hold in another form: training steps are told as one."""
    until: dict[PeerId, float] = {}
    for entry in logged:
        until[entry.peer] = max(entry.at, until.get(entry.peer, 0.0))
    return [
        entry
        for entry in told
        if not isinstance(entry.event, RoundProven)
        and not (isinstance(entry.event, StepDone) and entry.at <= until.get(entry.peer, 0.0))
    ]


def shared_by(log: Path) -> "Genesis | None":
    """Return what the peers of a run share whose log lies in a home of this machine; None where it is not there."""
    run = run_of(log)
    if run is None:
        return None
    from weft.run.genesis import MAX_RUN_NBYTES, read_run  # needs torch, for which nobody should wait without need
    from weft.run.machine import PeerConfig
    from weft.store.home import BlobStore

    with suppress(WeftError, OSError, ValueError):
        data = BlobStore(log.absolute().parents[3] / "blobs").read(Digest(run), MAX_RUN_NBYTES)
        return None if data is None else read_run(data, PeerConfig().max_parameters)
    return None


def about_logged(logs: Sequence[Path]) -> About:
    """Return what is known of the run that logs are of, before anything happened."""
    shared = shared_of(logs)
    return About() if shared is None else about_of(shared, _settings_of(logs))


def shared_of(logs: Sequence[Path]) -> "Genesis | None":
    """Return what the peers of a run share whose logs these are; None where it is in none of their homes."""
    return next((shared for log in logs if (shared := shared_by(log)) is not None), None)


def _settings_of(logs: Sequence[Path]) -> Settings | None:
    """Return what holds of a run by the newest checkpoint beside these logs; None: nothing was amended, or none is."""
    from weft.peer.state.checkpoint import read_contents  # needs torch, too

    found: dict[int, Settings] = {}
    for log in logs:
        with suppress(WeftError, OSError):
            contents = read_contents(PeerFolder(log.parent).checkpoint)
            if contents.charter is not None and contents.head is not None:
                found[contents.head.round] = contents.charter.settings
    return found[max(found)] if found else None


def file_of(logs: Sequence[Path], digest: str) -> "RunFile | None":
    """Return the run file that the maker of a run kept beside its log; None: it is not here."""
    from weft.config import load
    from weft.run.config import RunFile  # needs torch, too

    for log in logs:
        with suppress(ConfigError):
            file = load(PeerFolder(log.parent).run_file, RunFile)
            if file.run == digest:
                return file
    return None


def about_of(run: "Genesis", settings: Settings | None = None) -> About:
    """Return what is known of a run before anything happened.

    Args:
        settings: what holds of it now; None: what it began with.
    """
    from weft.run.config import RunConfig  # needs torch, as the next
    from weft.run.staged import StagedConfig
    from weft.run.trust import AuditedTrust

    known = replace(about(run.name, run.run, settings or run.settings), num_parameters=run.num_parameters)
    if isinstance(run, RunConfig) and run.train.loss is not UNSET:
        known = replace(known, loss_of="pair")
    if isinstance(run, RunConfig) and run.reward is not UNSET:
        known = replace(known, loss_of="answer")
    if isinstance(run, RunConfig) and isinstance(run.trust, AuditedTrust) and not isinstance(run, StagedConfig):
        known = replace(known, audit_rate=run.trust.audit_rate)
    return replace(known, layers=layers_of(run.cuts)) if isinstance(run, StagedConfig) else known


def about(name: str, run: RunId, settings: Settings) -> About:
    """Return what is known of a run whose model is not."""
    return About(
        name=name,
        id=run,
        total_tokens=settings.tokens,
        tokens_per_step=settings.tokens_per_step,
        method=in_words(settings.method),
    )
