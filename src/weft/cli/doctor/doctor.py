"""`weft doctor`: what this machine is, can reach and can hold; what blocks, and the exact fix.

With a ticket it tries every way that the ticket names, asks members for the run and its pace, and ends with the exit
code that a join would have. With a run file it says whether that run would fit here, and how fast it would be.
"""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from weft.cli import settings
from weft.cli.home import home_of
from weft.cli.options import NOT_SEEN, ticket_or_none
from weft.cli.terminal import wrapped
from weft.config import load_tree
from weft.dashboard.logs import is_there
from weft.errors import ConfigError, TooLarge, WeftError

if TYPE_CHECKING:
    from weft.cli.doctor.findings import Finding
    from weft.net.ticket import Ticket
    from weft.run.machine import PeerConfig

FORMAT = 1  # of --json: raised when a name there changes or ends; new ones may come

_MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "block": ("BLOCK", "bold red")}


def doctor(
    context: typer.Context,
    given: Annotated[
        str | None,
        typer.Argument(
            metavar="[TICKET|RUN.TOML]",
            help=f"A run file, or a ticket: weft tries its addresses and its run. {NOT_SEEN}",
            show_default=False,
        ),
    ] = None,
    machine: settings.Machine = None,
    port: Annotated[
        int | None,
        typer.Option(help="The port you want to listen on; 0: any. Beats the machine file's.", min=0, max=65535),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs: docs/doctor.md.")] = False,
) -> None:
    """Check this machine: what blocks, fits, how fast; and the run of a ticket or file. Exits 0 if nothing blocks."""
    examination = Examination(given, home_of(context), settings.machine_settings(machine, {"tls.port": port}))
    if as_json:
        findings = list(examination.findings())
        num_blocking = sum(finding.level == "block" for finding in findings)
    else:
        num_blocking = _show(examination.findings())
    failure = examination.failure
    code = 0 if not num_blocking else 1 if failure is None else failure.exit_code
    if as_json:
        typer.echo(_spell(findings, code))
    elif num_blocking:
        what = "weft from running here" if failure is None else "this machine from that run"
        typer.echo(f"\n{num_blocking} of these {'keeps' if num_blocking == 1 else 'keep'} {what}.")
    if code:
        raise typer.Exit(code)


class Examination:
    """Of this machine, and of a run.

    Args:
        given: a ticket, "-" or @FILE where one is, the path of a run file, or None: what the environment says.

    Raises:
        WeftError: what is given is none of these.
    """

    def __init__(self, given: str | None, home: Path, peer: "PeerConfig") -> None:
        from weft.net.ticket import read

        self.failure: type[WeftError] | None = None  # why a run cannot be joined from here
        self._home, self._peer = home, peer
        self._run_path = Path(given) if given is not None and given.endswith(".toml") else None
        if self._run_path is None and given is not None and is_there(Path(given)):
            kind = "folder" if Path(given).is_dir() else "file"
            raise ConfigError(
                f"{given} is a {kind}, and weft doctor takes a run file (.toml) or a ticket. What a run of your own "
                f"text would take, this says before it begins: weft train {shlex.quote(given)}"
            )
        text = ticket_or_none(given) if self._run_path is None else None
        self._ticket = None if text is None else read(text)
        if self._run_path is not None:
            load_tree(self._run_path)  # what is no TOML is refused before anything is measured

    def findings(self) -> "Iterator[Finding]":
        """Yield all findings, as they are made."""
        from weft.cli.doctor.findings import examine

        flops_per_s = 0.0  # of named models that were timed
        for finding in examine(self._home, self._peer.tls, self._models):
            found = finding.facts.get("flops_per_s")
            flops_per_s = found if isinstance(found, float) else flops_per_s
            yield finding
        if self._ticket is not None:
            yield from self._of_ticket(self._ticket, flops_per_s)
        elif self._run_path is not None:
            yield from self._of_file(self._run_path, flops_per_s)

    def _models(self) -> "Iterator[Finding]":
        from weft.cli.doctor.fit import models  # where torch cannot be loaded, that is a finding of its own

        yield from models(self._peer)

    def _of_file(self, path: Path, flops_per_s: float) -> "Iterator[Finding]":
        if not flops_per_s:
            yield _unexamined(str(path))
            return
        from weft.cli.doctor.fit import of_run_file

        yield from self._watched(of_run_file(path, self._home, self._peer, flops_per_s))

    def _of_ticket(self, ticket: "Ticket", flops_per_s: float) -> "Iterator[Finding]":
        from weft.cli.doctor.ticket import examine_ticket

        tried, self.failure, look = examine_ticket(ticket, self._peer, has_torch=flops_per_s > 0)
        yield from tried
        if look is not None:
            from weft.cli.doctor.fit import of_ticket

            yield from self._watched(of_ticket(look, self._home, self._peer, flops_per_s))
        elif not (flops_per_s or self.failure):
            yield _unexamined("the run")

    def _watched(self, findings: "Iterable[Finding]") -> "Iterator[Finding]":
        """Yield findings about a run; a run that does not fit is too large."""
        for finding in findings:
            if finding.level == "block":
                self.failure = self.failure or TooLarge
            yield finding


def _unexamined(what: str) -> "Finding":
    from weft.cli.doctor.findings import Finding

    return Finding("fit", "note", f"{what} was not checked: no model could be timed here, see above")


def _show(findings: "Iterable[Finding]") -> int:
    from rich.console import Console
    from rich.text import Text

    console, num_blocking = Console(), 0
    for finding in findings:
        mark, style = _MARKS[finding.level]
        num_blocking += finding.level == "block"
        width = console.width if console.is_terminal else None
        said = wrapped(f"{mark}  {finding.topic:<9} {finding.text}", width, " " * 17)
        console.print(Text.assemble((mark, style), said.removeprefix(mark)), soft_wrap=True)
        if finding.fix:
            console.print(Text.assemble("       fix       ", (finding.fix, "cyan")), soft_wrap=True)
    return num_blocking


def _spell(findings: "list[Finding]", code: int) -> str:
    told: dict[str, Any] = {
        "format": FORMAT,
        "is_blocked": any(finding.level == "block" for finding in findings),
        "exit_code": code,
        "findings": findings,
    }
    return msgspec.json.encode(told).decode()
