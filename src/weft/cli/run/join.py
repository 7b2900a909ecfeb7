"""`weft join`: contribute to a run that somebody holds a ticket for."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.cli.home import home_of
from weft.cli.options import ASKED, own_source, spread, ticket_of, until
from weft.cli.run.torchrun import served
from weft.cli.terminal import TO_SCREEN, say_loading
from weft.clock import Clock, SystemClock
from weft.dashboard import figures
from weft.dashboard.scalars import split_place
from weft.errors import ConfigError
from weft.events import Emit, Entry, Notice, RoundCommitted
from weft.ids import Digest, name_of, several, short
from weft.wire import printable

if TYPE_CHECKING:
    from weft.cli.run.running import Ask
    from weft.launch.terms import Allowance, Terms
    from weft.net.messages import Contact
    from weft.peer.context import Trainers
    from weft.run.config import RunConfig
    from weft.run.machine import CapsConfig


@spread
def join(
    context: typer.Context,
    ticket: Annotated[str | None, typer.Argument(help=f"The ticket; {ASKED}", show_default=False)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Your own text files, folders or globs, for a private run; may be repeated."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the model that the run began with, if you have it: its weights are not fetched then."
        ),
    ] = None,
    blocking: Annotated[
        bool, typer.Option("--blocking", help="If this line is slower than the run, ask members to wait.")
    ] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Of a run with rewards: draw answers for others, and train nothing.")
    ] = False,
    *,
    here: settings.Here,
    hardware: settings.Hardware,
    stay: settings.Stay,
    report: settings.Report = None,
    log: settings.Log = None,
) -> None:
    """Show what a run will cost this machine, ask, and join."""
    from weft.net.ticket import read

    flags = {"is_blocking": blocking or None, "is_drawing_only": draw_only or None}
    chosen = settings.machine_settings(here.machine, here.fields() | hardware.fields() | flags)
    if served(chosen):
        return
    for where in log or ():
        split_place(where)
    text = ticket_of(ticket)
    read(text)  # a bad ticket is refused before anything heavy is loaded
    is_asked = sys.stdin.isatty()
    say_loading(is_quiet=stay.quiet or TO_SCREEN in (log or ()))
    stays = until(stay.until, SystemClock().wall())
    from weft.cli.run.running import Manner, run
    from weft.data.corpus import CorpusConfig
    from weft.launch.corpus import Corpus
    from weft.launch.session import Options
    from weft.stages.launch import prepare
    from weft.store.home import Home

    own = (CorpusConfig(source=own_source(data)), Path.cwd()) if data else None

    def make(ask: "Ask", trainers: "Trainers") -> Corpus:
        def agree(terms: "Terms") -> bool:
            if terms.is_here:  # nothing is fetched and nothing trained
                typer.echo(describe(terms), err=True)
                return True
            watch.agreed(terms)
            typer.echo("\n".join((describe(terms), *capped(chosen.caps))), err=yes or is_asked)
            return yes or (is_asked and ask("join?"))

        return Corpus(agree_to=agree, own_data=own, own_model=model, trainers=trainers, stages=prepare)

    watch = TrafficWatch(SystemClock(), is_told=not stay.parent)
    options = Options(home=Home(home_of(context)), key=here.key, settings=chosen, sinks=(watch,))
    run(
        make,
        options,
        Manner(is_quiet=stay.quiet, until=stays, report=report, parent=stay.parent, logs=tuple(log or ())),
        text,
        watch.started,
    )
    if watch.has_terms and not (yes or is_asked):
        raise ConfigError(
            "these are the terms. weft has no terminal to ask you whether to join, and has joined nothing. To join, "
            f"add --yes to the same command: {with_yes(ticket)}"
        )


def with_yes(given: str | None) -> str:
    """Return how to say yes, with the ticket as it was given; one that was written out is a secret, and left out."""
    shown = "" if given is None else shlex.quote(given) if given == "-" or given.startswith("@") else "TICKET"
    return " ".join(filter(None, ("weft join", shown, "--yes")))


def describe(terms: "Terms") -> str:
    """Return what joining means, line by line."""
    from weft.run.genesis import on_corpus

    run = on_corpus(terms.run)
    if terms.is_complete:
        return "\n".join(_complete(terms))
    where = "the run's, fetched from members" if terms.data_nbytes else "the run's, which this machine has already"
    where = "your own files, which stay here" if run.is_private else where
    memory = figures.nbytes(terms.process_nbytes + terms.memory_nbytes)
    audits = f", {figures.nbytes(terms.audits_nbytes)} for audits" if terms.audits_nbytes else ""
    trained = figures.nbytes(terms.memory_nbytes - terms.audits_nbytes)
    return "\n".join(
        (
            f"run       {run.name}  {terms.ticket.run[:16]}",
            *_through(terms),
            f"length    {terms.length}{'' if terms.left_s is None else ' by those who train now'}",
            f"model     {_model(terms)}",
            f"data      {where}",
            *_stewards(len(run.stewards)),
            *([] if terms.is_drawing_only else _code(run)),
            f"to fetch  {terms.to_fetch}",
            f"disk      {figures.nbytes(terms.disk_nbytes)}",
            f"memory    about {memory}: {figures.nbytes(terms.process_nbytes)} for the program itself, "
            f"{trained} {'to draw texts, and ' * terms.draws_texts}to train on "
            f"{several(terms.micro_batch, 'sample')} at a time{audits}; a batch has {run.train.batch_size}",
            *_network(terms),
        )
    )


def _complete(terms: "Terms") -> tuple[str, str]:
    """Return that nothing is left to train, and what joining is good for then."""
    run = terms.run
    said = f"run {run.name} ({short(terms.ticket.run)}) is complete: nothing is left to train"
    if terms.is_here:
        return said, f"this machine has the model: weft generate {short(terms.ticket.run)}"
    fetched = f"{figures.nbytes(terms.fetch_nbytes)} to fetch, {figures.nbytes(terms.disk_nbytes)} of disk"
    return (said, f"joining only fetches the model of {figures.amount(run.num_parameters)} parameters: {fetched}")


def _through(terms: "Terms") -> list[str]:
    """Return who leads into the run, or that nobody does and where this machine would go on from."""
    from weft.net.link.trial import listed

    if (kept := terms.kept) is not None:
        return [
            "through   nobody: no peer of this run answers now",
            f"from      round {kept.round} or later, which this machine has kept. If you join, {kept.then}",
        ]
    return [f"through   {listed([_name(terms, each) for each in terms.ticket.contacts])}, named on the ticket"]


def _name(terms: "Terms", contact: "Contact") -> str:
    """Return what a member on the ticket is called, by itself or by the ticket; a ticket may hold a part of its key."""
    said = next((name for peer, name in terms.names.items() if peer.startswith(contact.peer)), contact.name)
    return name_of(contact.peer, printable(said))


def _model(terms: "Terms") -> str:
    """Return what is trained, and what part of it this machine would hold."""
    from weft.model.config import num_parameters, plain
    from weft.run.config import RunConfig
    from weft.run.staged import StagedConfig

    run = terms.run
    whole = f"{figures.amount(run.num_parameters)} parameters"
    if isinstance(run, RunConfig) and run.model.adapter:
        whole = f"an adapter of {whole}, beside {figures.amount(num_parameters(plain(run.model)))}"
    if not isinstance(run, StagedConfig):
        return whole
    numbers = [str(stage + 1) for stage in terms.stages]
    called = f"stage{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)} of {run.stages}"
    return f"{whole}; this machine would hold {figures.amount(terms.num_parameters)} of them, {called}"


def _network(terms: "Terms") -> tuple[str, str]:
    """Return what a round moves, and a day, and where that is from."""
    of_round = f"network   {figures.nbytes(terms.round_nbytes)} a round among {_peers(terms)} with this one"
    alone = rest = ""
    if terms.kept is not None:
        return f"{of_round}; nothing while alone", "          (weft says what a day comes to once others are back)"
    if (rounds := terms.rounds) is not None:
        steps = several(terms.run.method.every, "training step")
        if terms.day_nbytes is not None:
            told = several(rounds.num_told, "member") if rounds.num_told > 1 else "a member"
            return (
                f"{of_round}, {_in_all(terms)}",
                f"          (as {told} measured: {figures.nbytes(rounds.round_nbytes)} a round among "
                f"{rounds.num_members}, and {figures.seconds(rounds.round_s)} from one to the next, of {steps}; "
                "weft tells you if it moves far more)",
            )
        alone = f"; a round alone takes {figures.seconds(rounds.round_s)}, of {steps}"
    if terms.rest is not None:
        num_rounds, nbytes = terms.rest
        rest = f", about {figures.nbytes(nbytes)} until the run is complete, in {several(num_rounds, 'round')}"
    return (
        f"{of_round}{rest}, {_teams(terms)}computed from the sizes of model and method",
        f"          (bytes a day are not known: {terms.why_no_day}{alone}. weft says them ten minutes after you join; "
        "weft doctor - estimates them)",
    )


def _in_all(terms: "Terms") -> str:
    if terms.left_nbytes is not None:
        return f"about {figures.nbytes(terms.left_nbytes)} until the run is complete"
    return f"about {figures.nbytes(terms.day_nbytes or 0)} a day"


def capped(caps: "CapsConfig") -> list[str]:
    """Return the line of what this machine's owner allows at most; none where nothing is capped."""
    said = [
        "" if caps.upload_bps is None else f"{figures.rate(caps.upload_bps)} up",
        "" if caps.download_bps is None else f"{figures.rate(caps.download_bps)} down",
        "" if caps.day_nbytes is None else f"{figures.nbytes(caps.day_nbytes)} a day",
        "" if caps.memory_nbytes is None else f"{figures.nbytes(caps.memory_nbytes)} of memory",
        "" if caps.vram_nbytes is None else f"{figures.nbytes(caps.vram_nbytes)} of GPU memory",
        "" if caps.cores is None else several(caps.cores, "core"),
        f"from {' and '.join(caps.hours)}" if caps.hours else "",
    ]
    found = ", ".join(filter(None, said))
    return [f"at most   {found}"] if found else []


def _stewards(num: int) -> list[str]:
    keys = several(num, "key")
    return [f"stewards  {keys} that may change the run, and remove and ban peers (docs/stewards.md)"] if num else []


def _code(run: "RunConfig") -> list[str]:
    """Return the line of what a run makes members execute that is not weft's; none where there is no such thing."""
    from weft.run.reward import ExtensionReward, MatchReward

    match run.reward:
        case MatchReward(runs_code=True):
            return ["code      what the model writes is run here, in a sandbox (docs/your_files.md#rewards)"]
        case ExtensionReward(judge=judge):
            return [f"code      {judge.name} judges answers here, by the text {short(Digest(judge.source))}"]
    return []


def _teams(terms: "Terms") -> str:
    from weft.run.staged import StagedConfig

    split = terms.run.pipeline.split if isinstance(terms.run, StagedConfig) else None
    return "" if split is None else f"without the data that a team of {split.members} exchanges in each layer, "


def _peers(terms: "Terms") -> str:
    from weft.run.staged import StagedConfig

    stages = f" in {terms.run.stages} stages" if isinstance(terms.run, StagedConfig) else ""
    return f"{several(terms.num_peers, 'peer')}{stages}"


class TrafficWatch:
    """A sink that says in an event when far more is moved than the terms that were agreed to."""

    def __init__(self, clock: Clock, *, is_told: bool = True) -> None:
        self._clock = clock
        self._is_told = is_told  # else another program started this peer, and nobody was shown its terms
        self._terms: Terms | None = None  # shown, and agreed to if anything follows
        self._emit: Emit | None = None  # of the peer, once there is one
        self._allowance: Allowance | None = None

    @property
    def has_terms(self) -> bool:
        return self._terms is not None

    def agreed(self, terms: "Terms") -> None:
        self._terms = terms

    def started(self, emit: Emit) -> None:
        self._emit = emit

    def write(self, entry: Entry) -> None:
        from weft.launch.terms import Allowance

        if self._terms is None or self._emit is None or not self._is_told:
            return
        if self._allowance is None:
            self._allowance = Allowance(self._terms, self._clock)
        if isinstance(entry.event, RoundCommitted):
            shown = self._terms.day_nbytes
            found = self._allowance.count(entry.event.sent_nbytes + entry.event.received_nbytes)
            if found is not None:
                said = "could not say how much" if shown is None else f"said {figures.nbytes(shown)}"
                moves = f"this machine moves about {figures.nbytes(found)} a day, if the run lasts so long"
                self._emit(Notice(text=f"{moves}; the terms {said}. Ctrl-C leaves it."))

    def close(self) -> None:
        pass
