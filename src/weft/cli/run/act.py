"""`weft act`: what those who may change a run, and its members, decide about it, handed in at any member.

Without --ticket it goes to a member on this machine. An act is signed here with --key, a vote with the identity that
takes part from here; neither key leaves this machine.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from weft.cli import settings
from weft.cli.home import home_of
from weft.cli.options import NOT_SEEN, spread, ticket_or_none, ticket_text
from weft.cli.process import run_loop
from weft.cli.run.ticket import ticket_here
from weft.clock import SystemClock
from weft.config import dump
from weft.errors import ActVoid, ConfigError, KeyFileError, Refused
from weft.ids import PeerId, Round, RunId, several, short
from weft.wire import Signed, printable

if TYPE_CHECKING:
    from weft.keys import Identity
    from weft.net.node import Node
    from weft.net.ticket import Ticket
    from weft.peer.messages import CharterAnswer
    from weft.sync.records.acts import AnyDeed

T = TypeVar("T")

_Peer = Annotated[str, typer.Argument(help="Public key, or the first digits of a member's.", show_default=False)]
_Round = Annotated[int, typer.Argument(help="The last round whose training stays.", min=1, show_default=False)]
_Reason = Annotated[str, typer.Option(help="The reason; everybody can read it.")]
_VoterKey = Annotated[Path | None, typer.Option(help="Key file of a member. Default: the one that trains here.")]
_WaitS = Annotated[float, typer.Option(help="Seconds to wait for the decision.", min=0)]
_SUCCESSOR = 'Ticket of the run that follows ("-" reads it, @FILE too), or its name.'
_WAIT_S = 120.0  # a round of a slow run takes minutes; the act is decided without whoever handed it in


@dataclass(frozen=True)
class Where:
    """Which run, and the way there."""

    ticket: Annotated[
        str | None, typer.Option(help=f"Ticket of the run; {NOT_SEEN} Default: that of a member here.")
    ] = None
    run: Annotated[
        str | None, typer.Option(help="Name of the run or its first digits, if members of several run here.")
    ] = None
    transports: settings.Transports = None


@dataclass(frozen=True)
class Act:
    """Who acts, and why."""

    key: Annotated[Path, typer.Option(help="Key file of somebody who may change the run.", show_default=False)]
    reason: _Reason = ""
    wait_s: _WaitS = _WAIT_S


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Act on a run: remove, ban, pardon, amend, succeed, rewind, or vote as a member (docs/stewards.md).",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for verb in (show, remove, ban, pardon, amend, succeed):
        app.command(verb.__name__)(verb)
    app.command("rewind")(rewind)
    app.command("vote-out")(vote_out)
    app.command("vote-rewind")(vote_rewind)
    return app


@spread
def show(context: typer.Context, where: Where) -> None:
    """Print the state of a run: who may change it, members, banned keys, settings as amended, a successor."""
    from weft.keys import Identity
    from weft.launch.visit import ask_charter

    found = _ticket(context, where)
    answer = _visit(found, Identity.generate(), where.transports, lambda node: ask_charter(node, SystemClock()))
    typer.echo(describe(answer))


@spread
def remove(context: typer.Context, peer: _Peer, *, act: Act, where: Where) -> None:
    """Remove a member. It may join again."""
    from weft.sync.records.acts import Remove

    _act(context, act, where, lambda answer, reason: Remove(peer=_key_of(peer, answer.members), reason=reason))


@spread
def ban(context: typer.Context, peer: _Peer, *, act: Act, where: Where) -> None:
    """Remove a key and refuse it from now on."""
    from weft.sync.records.acts import Ban

    _act(context, act, where, lambda answer, reason: Ban(peer=_key_of(peer, answer.members), reason=reason))


@spread
def pardon(context: typer.Context, peer: _Peer, *, act: Act, where: Where) -> None:
    """Lift the ban of a key."""
    from weft.sync.records.acts import Pardon

    _act(context, act, where, lambda answer, reason: Pardon(peer=_key_of(peer, answer.charter.banned), reason=reason))


@spread
def amend(
    context: typer.Context,
    changes: Annotated[
        list[str], typer.Option("--set", metavar="FIELD=VALUE", help="As in a run file: --set method.every=50.")
    ],
    *,
    act: Act,
    where: Where,
) -> None:
    """Go on with other settings from the next round on: rates, training steps per round, codecs, lengths, totals."""
    from weft.run.amend import amendment

    parsed = settings.changes_of(changes)
    _act(context, act, where, lambda answer, reason: amendment(answer.charter.settings, parsed, reason))


@spread
def succeed(
    context: typer.Context,
    successor: Annotated[str, typer.Argument(help=_SUCCESSOR, show_default=False)],
    at_once: Annotated[
        bool, typer.Option("--at-once", help="End this run with its next round, not when it is complete.")
    ] = False,
    without_ticket: Annotated[
        bool, typer.Option("--without-ticket", help="Tell members only the run's name: they must ask for a ticket.")
    ] = False,
    *,
    act: Act,
    where: Where,
) -> None:
    """Name the run that continues this one."""
    from weft.net.ticket import read
    from weft.sync.records.acts import MAX_TICKET_CHARS, Succeed

    successor = ticket_text(successor)
    is_name = _is_key(successor)
    if is_name:
        settings.refuse_idle(context, "the successor is given by its name, so there is no ticket", "without_ticket")
    run = RunId(successor) if is_name else read(successor).run
    told = "" if is_name or without_ticket else successor.strip()
    if len(told) > MAX_TICKET_CHARS:
        raise ConfigError(f"a ticket of {len(told)} characters does not fit into an act. Add --without-ticket.")
    _act(context, act, where, lambda _, reason: Succeed(run=run, is_at_once=at_once, reason=reason, ticket=told))


@spread
def rewind(context: typer.Context, round: _Round, *, act: Act, where: Where) -> None:
    """Go on with the parameters after an earlier round, one of the last 16: what was trained since is dropped."""
    from weft.launch.visit import ask_rewind

    async def deed(node: "Node", _answer: "CharterAnswer", reason: str) -> "AnyDeed":
        return await ask_rewind(node, Round(round), reason, SystemClock())

    _act_by(context, act, where, deed)


@dataclass(frozen=True)
class Vote:
    """Who votes, and why."""

    key: _VoterKey = None
    connect_with: Annotated[
        Path | None, typer.Option(help="Key file to connect with, if the run admits by key: one that trains nowhere.")
    ] = None
    reason: _Reason = ""
    wait_s: _WaitS = 5.0


@spread
def vote_out(context: typer.Context, peer: _Peer, *, vote: Vote, where: Where) -> None:
    """Vote, as a member, to remove another; it takes more than half of the members."""
    from weft.launch.visit import ballot_of

    async def letter(voter: "Identity", node: "Node", answer: "CharterAnswer") -> Signed:
        return ballot_of(voter, node, answer.charter, _key_of(peer, answer.members), _checked(vote.reason))

    _vote(context, vote, where, letter)


@spread
def vote_rewind(context: typer.Context, round: _Round, *, vote: Vote, where: Where) -> None:
    """Vote, as a member, to go back to the parameters after an earlier round; it takes more than half of them."""
    from weft.launch.visit import ask_rewind, rewind_ballot_of

    async def letter(voter: "Identity", node: "Node", _answer: "CharterAnswer") -> Signed:
        return rewind_ballot_of(voter, node, await ask_rewind(node, Round(round), _checked(vote.reason), SystemClock()))

    _vote(context, vote, where, letter)


# --- handing in ---


def _vote(
    context: typer.Context,
    vote: Vote,
    where: Where,
    letter: "Callable[[Identity, Node, CharterAnswer], Awaitable[Signed]]",
) -> None:
    from weft.keys import Identity, load_identity

    found, connect_with = _ticket(context, where), vote.connect_with
    voter = load_identity(vote.key) if vote.key is not None else _member_here(context, found)
    try:
        visitor = Identity.generate() if connect_with is None else load_identity(connect_with)
        _hand_in(found, visitor, partial(letter, voter), vote.wait_s, where.transports)
    except Refused as error:
        if found.secret is not None or connect_with is not None:
            raise
        raise Refused(
            f"{error}. If the run admits by key, a vote needs a second key to connect with: add --connect-with and the "
            "file of a key that the run lists, or that may change the run, and that no process trains with."
        ) from error


def _act(context: typer.Context, act: Act, where: Where, deed: "Callable[[CharterAnswer, str], AnyDeed]") -> None:
    async def at_once(_node: "Node", answer: "CharterAnswer", reason: str) -> "AnyDeed":
        return deed(answer, reason)

    _act_by(context, act, where, at_once)


def _act_by(
    context: typer.Context, act: Act, where: Where, deed: "Callable[[Node, CharterAnswer, str], Awaitable[AnyDeed]]"
) -> None:
    from weft.keys import load_identity
    from weft.launch.visit import act_of

    reason, ticket, steward = _checked(act.reason), _ticket(context, where), load_identity(act.key)

    async def letter(node: "Node", answer: "CharterAnswer") -> Signed:
        stewards = answer.charter.stewards
        if not stewards:
            raise ActVoid(
                f"run {short(ticket.run)} has no stewards, so nobody can change it alone. A majority of its members "
                "can remove a key or go back: weft act vote-out, vote-rewind"
            )
        if steward.peer not in stewards:
            listed = ", ".join(short(each) for each in stewards)
            raise ActVoid(f"{act.key} holds {short(steward.peer)}, which may not change this run. Stewards: {listed}.")
        return act_of(steward, node, answer.charter, await deed(node, answer, reason))

    _hand_in(ticket, steward, letter, act.wait_s, where.transports)


def _hand_in(
    ticket: "Ticket",
    identity: "Identity",
    letter: "Callable[[Node, CharterAnswer], Awaitable[Signed]]",
    wait_s: float,
    transports: str | None,
) -> None:
    from weft.launch.visit import ask_charter, hand_in
    from weft.peer.messages import HandInAnswer
    from weft.peer.round.acts import kind_of, subject_of

    async def work(node: "Node") -> "tuple[Signed, HandInAnswer]":
        signed = await letter(node, await ask_charter(node, SystemClock()))
        return signed, await hand_in(node, signed, SystemClock(), wait_s)

    signed, answer = _visit(ticket, identity, transports, work)
    what = f"{kind_of(signed)} {subject_of(signed)[:16]}".strip()
    match answer.outcome:
        case "decided":
            typer.echo(f"decided: {what}")
        case "waits":
            typer.echo(
                f"waits: {what}. Members keep it and decide it with one of the next rounds (a vote: once more than "
                "half of them have cast it); you can stop waiting. `weft act show` shows the result."
            )
        case "refused":
            raise ActVoid(f"{what} has no effect: {answer.reason}.")


def _visit(ticket: "Ticket", identity: "Identity", transports: str | None, work: "Callable[[Node], Awaitable[T]]") -> T:
    from weft.launch.visit import visit

    chosen = settings.machine_settings(None, {"transports": settings.check_transports(transports)}, use="visit")

    async def main() -> T:
        async with visit(ticket, identity, chosen) as node:
            return await work(node)

    return run_loop(main())


# --- what was given ---


def _ticket(context: typer.Context, where: Where) -> "Ticket":
    from weft.net.ticket import read

    if where.ticket is not None:
        settings.refuse_idle(context, "the ticket says which run it is", "run")
    is_elsewhere = where.ticket is not None or where.run is None  # what is typed comes before the environment
    text = ticket_or_none(where.ticket) if is_elsewhere else None
    return read(text or ticket_here(where.run, home_of(context)))


def _member_here(context: typer.Context, ticket: "Ticket") -> "Identity":
    from weft.keys import load_identity

    home = home_of(context)
    for path in sorted((home / "keys").glob("*.pem")):
        try:
            identity = load_identity(path)
        except KeyFileError:
            continue
        if (home / "runs" / ticket.run / identity.peer).is_dir():
            return identity
    raise ConfigError(f"no identity in {home} takes part in run {short(ticket.run)}. Name the member's with --key.")


def _key_of(given: str, known: tuple[PeerId, ...]) -> PeerId:
    """Return the key that `given` is, or that of those known which begins with it.

    Raises:
        ConfigError: none does, or several do.
    """
    if _is_key(given):
        return PeerId(given)
    found = [peer for peer in known if given and peer.startswith(given)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(short(peer) for peer in known[:8]) or "none"
    how = "several keys begin" if found else "no key begins"
    raise ConfigError(f"{how} with {given[:64]!r}; there are: {listed}. Give more digits, or all 64.")


def _is_key(given: str) -> bool:
    return len(given) == 64 and all(letter in "0123456789abcdef" for letter in given)


def _checked(reason: str) -> str:
    from weft.net.messages import MAX_REASON_CHARS

    if len(reason) > MAX_REASON_CHARS or printable(reason) != reason:
        raise ConfigError(f"--reason should be one printable line of at most {MAX_REASON_CHARS} characters.")
    return reason


def describe(answer: "CharterAnswer") -> str:
    """Return what holds of a run, line by line."""
    from weft.run.amend import as_run_file

    charter = answer.charter
    lines = [f"round     {answer.round}, {several(len(answer.members), 'member')}"]
    lines += [f"member    {peer}" for peer in answer.members]
    acted = zip(charter.stewards, charter.serials, strict=True)
    stewards = [f"steward   {peer}  {several(count, 'act')}" for peer, count in acted]
    lines += stewards or ["steward   none: nobody can act alone"]
    lines += [f"banned    {peer}" for peer in charter.banned]
    lines += [f"voted out {each.peer}  {several(each.times, 'time')}" for each in charter.expelled]
    lines += [f"went back in round {each.at} to the parameters after round {each.to}" for each in charter.rewound or ()]
    if charter.successor is not None:
        when = "ended with it" if charter.successor.is_at_once else "once this one is complete"
        lines.append(f"successor {charter.successor.run}  {when}")
    return "\n".join([*lines, "", dump(as_run_file(charter.settings)).rstrip()])
