"""`weft ledger`: the rounds that a run records: look them up, and show to anybody who was counted, and for what.

    weft ledger show last                                  the last rounds
    weft ledger stats last                                 what was counted of each peer
    weft ledger prove last --round 17 --peer KEY -o FILE   a file that shows it
    weft ledger check FILE                                 on any machine, with no network

What it reads is on this machine's disk, also while its peer trains.
"""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.home import called, find_run, home_of, no_such_run, say_no_home
from weft.errors import ConfigError, DataError, WireError
from weft.ids import PeerId, Round, RunId, several, short

if TYPE_CHECKING:
    from weft.store.rounds import RoundsFile
    from weft.sync.proof import Shown
    from weft.sync.records.messages import Manifest

FILE = "rounds.db"
_ALL = Path(f"*/{FILE}")
_TURN_ON = 'A run records its rounds where its file says so: [trust] type = "recorded".'

RunName = Annotated[str, typer.Argument(help='Name of the run, its first digits, or "last".', show_default=False)]
StageNumber = Annotated[int | None, typer.Option(min=1, help="Of which stage, where the model is cut into stages.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: one object.")]


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="The rounds that a run records: who was counted, and for what; prove it to others.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("show")(show)
    app.command("stats")(stats)
    app.command("prove")(prove)
    app.command("check")(check)
    return app


def show(
    context: typer.Context,
    run: RunName,
    last: Annotated[int, typer.Option(min=1, help="So many of the newest rounds.")] = 10,
    round: Annotated[int | None, typer.Option(min=0, help="One round, with all that it counts.")] = None,
    stage: StageNumber = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest rounds, or all of one."""
    file, *_ = _recorded(context, run, stage)
    if round is not None:
        manifest = file.manifest(round)
        if manifest is None:
            raise DataError(f"round {round} is not here, but for its header: this machine was not there.")
        found = [manifest]
    else:
        newest = file.newest() or 0
        numbers = range(max(newest - last + 1, 0), newest + 1)
        found = [manifest for number in numbers if (manifest := file.manifest(number)) is not None]
    if as_json:
        typer.echo(json.dumps({"rounds": [_as_tree(each) for each in found]}))
        return
    for each in found:
        typer.echo(_line(each))
        if round is not None:
            for line in _details(each):
                typer.echo(line)
    typer.echo(f"{len(found)} of {several(len(file.tree()), 'round')} that are known", err=True)


def stats(context: typer.Context, run: RunName, stage: StageNumber = None, as_json: AsJson = False) -> None:
    """Add up what was counted of each peer, in the rounds that this machine was there for."""
    file, *_ = _recorded(context, run, stage)
    tokens, rounds, seen = Counter[PeerId](), Counter[PeerId](), 0
    for manifest in file.manifests():
        seen += 1
        groups = {stakes.sponsor: stakes for stakes in file.groups(manifest.round)}
        for counted in manifest.contributions:
            group = groups.get(counted.peer)
            shares = {counted.peer: counted.tokens}
            if group is not None and counted.group is not None:
                shares = {stake.peer: stake.tokens for stake in group.stakes if stake.tokens}
            tokens.update(shares)
            rounds.update(shares.keys())
    if as_json:
        peers = {peer: {"tokens": num, "rounds": rounds[peer]} for peer, num in tokens.most_common()}
        typer.echo(json.dumps({"rounds": seen, "peers": peers}))
        return
    for peer, num in tokens.most_common():
        typer.echo(f"{peer}  {num:>16,} tokens  {rounds[peer]:>8,} rounds")
    typer.echo(f"of {several(seen, 'round')} that this machine was there for", err=True)


def prove(
    context: typer.Context,
    run: RunName,
    round: Annotated[int, typer.Option(min=1, help="Which round.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.", show_default=False)],
    peer: Annotated[
        str | None, typer.Option(help="Whose work: its key, or the first digits. Default: this machine's.")
    ] = None,
    stage: StageNumber = None,
) -> None:
    """Write a file that shows what a round has counted of a peer."""
    from weft.data.store import write_atomically
    from weft.store import proving
    from weft.wire import encode

    if out.exists():
        raise ConfigError(f"{out} is there already. Name another file, or remove it.")
    file, of, own = _recorded(context, run, stage)
    whose = own if peer is None else _peer_in(file.manifest(round), file, peer)
    proof = proving.prove(file, of, Round(round), whose)
    data = encode(proof)
    write_atomically(out.absolute(), [data])
    typer.echo(f"{out}: {len(data):,} bytes. Anybody can check it: weft ledger check {out}")


def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What `weft ledger prove` has written.", show_default=False)],
    founder: Annotated[
        str | None, typer.Option(help="The key of who made the run, or its first digits: refuse any other.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check such a file, with no network: what it shows, and by whose word."""
    from weft.sync.proof import shown
    from weft.sync.records.proof import MAX_PROOF_NBYTES, WorkProof
    from weft.wire import decode

    say_no_home(context, "a proof is checked by what is in it")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    try:
        proof = decode(data, WorkProof, max_nbytes=MAX_PROOF_NBYTES)
    except WireError:
        raise DataError(f"{file} is no file that `weft ledger prove` has written, or it is damaged.") from None
    try:
        found = shown(proof)
    except WireError as error:
        raise DataError(f"{file} shows nothing: {error}.") from None
    if founder is not None and not found.founder.startswith(founder.lower()):
        raise DataError(f"{file} is of a run that {found.founder} began, and not {founder}.")
    if as_json:
        typer.echo(json.dumps(_tree_of(found)))
        return
    for line in _said(found):
        typer.echo(line)


# --- what is looked up ---


def _recorded(context: typer.Context, given: str, stage: int | None) -> "tuple[RoundsFile, RunId, PeerId]":
    """Return what is recorded here of a run, the run (of the stage), and whose machine this is in it."""
    from weft.store.rounds import RoundsFile

    home = home_of(context)
    run = find_run(given, home, having=(str(_ALL), f"*/stage-*/{FILE}"))
    if run is None:
        raise no_such_run(given, home)
    pattern = str(_ALL) if stage is None else f"*/stage-{stage - 1}/{FILE}"
    found = sorted(run.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        is_staged = stage is None and any(True for _ in run.glob(f"*/stage-*/{FILE}"))
        more = "Each stage records its own: name one with --stage." if is_staged else _TURN_ON
        raise DataError(f"nothing is recorded here of run {called(run)}. {more}")
    path = found[-1]
    file = RoundsFile(path)
    newest = file.newest()
    manifest = None if newest is None else file.manifest(newest)
    if manifest is None:
        raise DataError(f"{path} holds no round yet.")
    return file, RunId(manifest.run), PeerId(path.relative_to(run).parts[0])


def _peer_in(manifest: "Manifest | None", file: "RoundsFile", given: str) -> PeerId:
    if manifest is None:
        raise DataError("this machine was not there in that round. Ask for the proof on one that was.")
    stakes = (stake.peer for group in file.groups(manifest.round) for stake in group.stakes)
    there = {*(each.peer for each in manifest.contributions), *stakes}
    found = [peer for peer in there if peer.startswith(given.lower())]
    if len(found) != 1:
        known = ", ".join(short(peer) for peer in sorted(there))
        raise ConfigError(f"--peer {given[:64]}: round {manifest.round} counts {known}. Give more digits of one.")
    return PeerId(found[0])


# --- what is said ---


def _line(manifest: "Manifest") -> str:
    tokens = sum(each.tokens for each in manifest.contributions)
    changes = [f"{several(len(found), 'peer')} {word}" for found, word in _changes(manifest) if found]
    what = f"{several(len(manifest.contributions), 'peer')} counted, {tokens:,} tokens"
    if not manifest.parts:
        what = "the run begins" if not manifest.round else "a branch begins"
    return "; ".join((f"round {manifest.round:>6,}  {what} (members: {len(manifest.members)})", *changes))


def _changes(manifest: "Manifest") -> tuple[tuple[tuple[PeerId, ...], str], ...]:
    return ((manifest.joined, "joined"), (manifest.left, "left")) if manifest.parts else ()


def _details(manifest: "Manifest") -> list[str]:
    from msgspec import UNSET

    from weft.wire import digest_of

    entry = manifest.entry
    lines = [f"  manifest  {digest_of(manifest)}", f"  leader    {manifest.leader}"]
    if entry is not UNSET:
        lines += [f"  state     {entry.state or '(not told)'}", f"  work      {entry.work}"]
    for each in manifest.contributions:
        through = "" if each.group is None else f"  with a group of {each.group.num_counted + 1}"
        lines.append(f"  counted   {each.peer}  {each.tokens:,} tokens  payload {short(each.payload)}{through}")
    return lines


def _as_tree(manifest: "Manifest") -> dict[str, Any]:
    from msgspec import to_builtins

    from weft.wire import digest_of

    fields = ("round", "branch", "leader", "previous", "members", "joined", "left", "committed_tokens")
    counted = [{"peer": each.peer, "tokens": each.tokens, "payload": each.payload} for each in manifest.contributions]
    tree = to_builtins(manifest)
    entry = tree.get("entry", {})
    named = {name: entry.get(name) for name in ("state", "work")}
    return {"manifest": digest_of(manifest), **{name: tree[name] for name in fields}, **named, "counted": counted}


def _tree_of(found: "Shown") -> dict[str, Any]:
    return {
        "run": found.run,
        "round": found.round,
        "tokens": dict(found.tokens),
        "peer": found.peer,
        "payload": found.payload,
        "founder": found.founder,
        "members": list(found.members),
        "newest": found.newest,
        "split_at": list(found.split_at),
    }


def _said(found: "Shown") -> list[str]:
    lines = [f"round {found.round} of run {found.run}"]
    lines += [f"  counted {peer}: {num:,} tokens" for peer, num in sorted(found.tokens.items())]
    lines.append(f"  payload {found.payload}, brought by {found.peer}")
    lines.append(f"This holds if the run is the one that {found.founder} began (--founder KEY refuses any other),")
    lines.append(f"and if most members were honest, from then to round {found.newest}; those after it:")
    lines += [f"  {peer}" for peer in found.members]
    if found.split_at:
        rounds = ", ".join(map(str, found.split_at))
        lines.append(
            f"In round {rounds} a part of the members went on by its own word, with no majority: believe what came "
            "after only if you know these keys."
        )
    return lines
