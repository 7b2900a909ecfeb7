"""One peer in the foreground: shows it, stops it when asked, says how it ended. What train and join have in common.

It imports torch: verbs import it when they run.
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import typer

from weft.cli.home import command_for
from weft.cli.options import Contributed, Until
from weft.cli.process import Stopper, run_loop, stop_with_parent
from weft.cli.run.summary import Begun, summary
from weft.cli.run.torchrun import trainers
from weft.cli.screen.screen import make_screen
from weft.cli.signals import NOTHING_TO_SAVE
from weft.cli.terminal import TO_SCREEN
from weft.config import alike
from weft.dashboard.logs import first_measured
from weft.dashboard.run import about_of
from weft.dashboard.scalars import make_sink
from weft.data.store import write_atomically
from weft.errors import CheckpointError, ConfigError
from weft.events import Emit, Preferred
from weft.launch.peer import Opened, Participant, Workload, found, join
from weft.launch.session import Options
from weft.net.ticket import why_long
from weft.peer.context import Trainers
from weft.peer.peer import Outcome
from weft.peer.state.checkpoint import read_contents
from weft.store.home import PeerFolder

_OTHERS = "others join with this ticket, which is a secret: on their machines, `weft join -` asks for it"
_LASTING = "the ticket leads to this machine; once others have joined, `weft ticket` prints one that leads to them, too"

Ask = Callable[[str], bool]
Make = Callable[[Ask, Trainers], Workload[Participant]]


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a peer is run, as opposed to what it does."""

    is_quiet: bool
    report: Path | None = None
    parent: int = 0  # a process to stop with; 0: none
    wait_for: int = 1  # peers with which the run begins
    until: Until = field(default_factory=Until)  # when it leaves by itself
    logs: tuple[str, ...] = ()  # where curves are drawn, too
    source: str = ""  # the text or run file that was given, as a shell takes it
    is_text: bool = False


def run(
    make: Make,
    options: Options,
    manner: Manner,
    ticket: str | None = None,
    on_started: Callable[[Emit], None] = lambda _emit: None,
) -> None:
    """Run one peer to its end and print how it ended.

    Args:
        make: returns what is trained, given who answers a question and who makes the inner steps.
        ticket: of the run that is joined; None: `make` says which is founded.
        on_started: told what to tell the peer's log, once there is one.

    Raises:
        WeftError: as `weft.launch.peer`.
        typer.Exit: a signal came before there was a peer.
    """
    if manner.report is not None:
        _check_report(manner.report)
    boards = tuple(map(make_sink, manner.logs))
    is_for_program = TO_SCREEN in manner.logs  # which reads standard error
    screen = make_screen(is_quiet=manner.is_quiet or is_for_program)
    stopper = Stopper(screen)
    if manner.parent:
        stop_with_parent(manner.parent)
    contributed = Contributed(manner.until)
    options = replace(
        options, sinks=(*options.sinks, screen, contributed, *boards), until=manner.until.wall, aside=screen.aside
    )

    def started(peer: Participant, opened: Opened) -> None:
        stopper.started(peer.stop, lambda: peer.is_at_rest)
        contributed.started(peer.stop, opened.emit)
        on_started(opened.emit)
        if ticket is None and opened.stand == "complete":
            screen.say()  # that it is: there is nothing to join or to watch
            return
        waits_for = manner.wait_for if opened.stand == "new" else 1
        if ticket is None:
            print(opened.ticket, flush=True)  # noqa: T201  # the one line that was asked for
            if not is_for_program:
                print("\n".join(_said(opened.ticket, waits_for)), file=sys.stderr, flush=True)  # noqa: T201
        now = None if opened.charter is None else opened.charter.settings
        screen.start(about_of(peer.run, now), waits_for)

    async def main(who: Trainers) -> Outcome | None:
        stopper.install(asyncio.get_running_loop())
        work = make(stopper.ask, who)
        if ticket is None:
            return await found(work, options, wait_for=manner.wait_for, on_started=started)
        return await join(work, ticket, options, on_started=started)

    try:
        with trainers(options.settings) as who:
            outcome = run_loop(main(who))
    except asyncio.CancelledError:
        if not is_for_program:
            print(NOTHING_TO_SAVE, file=sys.stderr)  # noqa: T201
        raise typer.Exit from None
    finally:
        stopper.remove()
        screen.close()
    if outcome is not None:
        begun = Begun(source=manner.source, is_text=manner.is_text, key=options.key)
        command = command_for(options.home.root)
        before = first_measured(PeerFolder(outcome.checkpoint.parent).log)
        print(summary(outcome, screen.view, command, begun, _num_members(outcome), before), flush=True)  # noqa: T201
        if manner.report is not None:
            write_atomically(manner.report, [msgspec.json.encode(report_of(outcome))])


def _said(ticket: str, waits_for: int) -> list[str]:
    """Return what a person should know of a ticket, in lines."""
    begins = "" if waits_for == 1 else f"training begins once {waits_for} peers are here; --wait-for 1 begins at once"
    return list(filter(None, (_OTHERS, _LASTING, why_long(ticket), begins)))


def _check_report(report: Path) -> None:
    """Refuse a report below folders of which more than the last is missing: the path is mistyped."""
    folder = report.absolute().parent
    if not folder.exists() and not folder.parent.is_dir():
        raise ConfigError(f"--report {report}: there is no folder {folder.parent}. Make it, or name another place.")


def _num_members(outcome: Outcome) -> int:
    """Return how many hold the run, as its checkpoint says."""
    with suppress(CheckpointError):
        head = read_contents(outcome.checkpoint).head
        return 1 if head is None else len(head.members)
    return 1


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
    evaluated_at: int | None = None  # the round that loss and nats_per_byte are of
    preferred: Preferred | None = None  # of pairs of answers
    reward: float | None = None  # of answers to tasks
    successor: str | None = None


def report_of(outcome: Outcome) -> Report:
    told_otherwise = {
        "run": outcome.run.run,
        "checkpoint": str(outcome.checkpoint),
        "successor": None if outcome.successor is None else outcome.successor.run,
    }
    return Report(**alike(Report, outcome) | told_otherwise)
