"""`weft ledger`: the rounds that a run records: look them up, and show to anybody who was counted, and for what.

    weft ledger show last                                  the last rounds
    weft ledger stats last                                 what was counted of each peer
    weft ledger prove last --round 17 --peer KEY -o FILE   a file that shows it
    weft ledger evidence last --round 17 -o FILE           another, with what a member was struck out for
    weft ledger check FILE                                 either, on any machine, with no network
    weft ledger check last --segments 100                  training steps made again, of what an anchor has kept

What it reads is on this machine's disk, also while its peer trains.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.home import called, find_run, home_of, no_such_run, say_no_home
from weft.cli.settings import refuse_idle
from weft.cli.watch.archived import Asked, check_run
from weft.errors import ConfigError, DataError, WireError
from weft.ids import Digest, PeerId, Round, RunId, Tokens, several, short

if TYPE_CHECKING:
    from weft.events import ActEnacted
    from weft.store.rounds import RoundsFile
    from weft.sync.proof import Shown
    from weft.sync.records.acts import Warrant
    from weft.sync.records.messages import Manifest

LAST = 10  # rounds that are shown
_COUNTED, _DECIDED = ("peer", "tokens", "payload", "work"), ("kind", "subject", "by", "reason")
_TURN_ON = 'A run records its rounds where its file says so: [trust] type = "recorded", or "audited".'

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
    app.command("evidence")(evidence)
    app.command("check")(check)
    return app


def show(
    context: typer.Context,
    run: RunName,
    last: Annotated[int | None, typer.Option(min=1, help="So many of the newest rounds. Default: 10.")] = None,
    round: Annotated[int | None, typer.Option(min=0, help="One round, with all that it counts.")] = None,
    stage: StageNumber = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest rounds, or all of one."""
    if round is not None and last is not None:
        raise ConfigError("--last: no effect with --round, which names one. Give one of them.")
    file, *_ = _recorded(context, run, stage)
    if round is not None:
        found = [_manifest(file, round)]
    else:
        newest = file.newest() or 0
        numbers = range(max(newest - (last or LAST) + 1, 0), newest + 1)
        found = [manifest for number in numbers if (manifest := file.manifest(number)) is not None]
    if as_json:
        typer.echo(json.dumps({"rounds": [_as_tree(each) for each in found]}))
        return
    for each in found:
        typer.echo(_line(each))
        if round is not None:
            for line in _details(each):
                typer.echo(line)
    typer.echo(f"{len(found)} of {several(file.num(), 'round')} that are known", err=True)


def stats(context: typer.Context, run: RunName, stage: StageNumber = None, as_json: AsJson = False) -> None:
    """Add up what was counted of each peer, in the rounds that this machine was there for."""
    from weft.sync.proof import tokens_in
    from weft.wire import digest_of

    file, *_ = _recorded(context, run, stage)
    tokens, rounds, seen = Counter[PeerId](), Counter[PeerId](), 0
    of_others = {"legacies": 0, "unknown": 0}
    for manifest in file.manifests():
        seen += bool(manifest.parts)
        lists = {digest_of(each): tokens_in(each) for each in file.groups(manifest.round)}
        for counted in manifest.contributions:
            if counted.legacy is not None:
                of_others["legacies"] += counted.tokens
                continue
            shares: dict[PeerId, Tokens] = {PeerId(counted.peer): counted.tokens}
            if counted.group is not None:
                shares = lists.get(Digest(counted.group.record), {})
                of_others["unknown"] += 0 if shares else counted.tokens
            tokens.update(shares)
            rounds.update(shares.keys())
    if as_json:
        peers = {peer: {"tokens": num, "rounds": rounds[peer]} for peer, num in tokens.most_common()}
        typer.echo(json.dumps({"rounds": seen, "peers": peers, **of_others}))
        return
    for peer, num in tokens.most_common():
        typer.echo(f"{peer}  {num:>16,} tokens  {rounds[peer]:>8,} rounds")
    if of_others["legacies"]:
        typer.echo(f"{of_others['legacies']:,} tokens more were counted by branches that came back")
    if of_others["unknown"]:
        typer.echo(f"{of_others['unknown']:,} tokens more are of groups whose lists of peers are not here")
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
    from weft.sync.proof import shown
    from weft.wire import encode

    if out.exists():
        raise ConfigError(f"{out} is there already. Name another file, or remove it.")
    file, of, own = _recorded(context, run, stage)
    whose = own if peer is None else _peer_in(_manifest(file, round), file, peer)
    proof = proving.prove(file, of, Round(round), whose)
    shown(proof)  # a round may have been decided while it was made
    data = encode(proof)
    write_atomically(out.absolute(), [data])
    typer.echo(f"{out}: {len(data):,} bytes. Anybody can check it: weft ledger check {out}")


def evidence(
    context: typer.Context,
    run: RunName,
    round: Annotated[int, typer.Option(min=1, help="Which round has struck it out.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.", show_default=False)],
    stage: StageNumber = None,
) -> None:
    """Write a file with the evidence by which a round has struck a member out."""
    from weft.data.store import write_atomically
    from weft.sync.governance import read_lie
    from weft.wire import encode

    if out.exists():
        raise ConfigError(f"{out} is there already. Name another file, or remove it.")
    file, *_ = _recorded(context, run, stage)
    found = _evidence_in(_manifest(file, round))
    if found is None:
        raise DataError(
            f"round {round} has struck nobody out by evidence. What it decided: weft ledger show {run} --round {round}"
        )
    lie, data = read_lie(found), encode(found)
    write_atomically(out.absolute(), [data])
    typer.echo(f"{out}: {len(data):,} bytes, of {short(lie.peer)}. Anybody can check it: weft ledger check {out}")


def check(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            help="What `weft ledger prove` or `evidence` has written; with --segments or --all: a run.",
            show_default=False,
        ),
    ],
    founder: Annotated[
        str | None, typer.Option(help="The key of who began the run, or its first 16 digits or more: refuse any other.")
    ] = None,
    accept_few: Annotated[
        bool, typer.Option(help="Where half of the members, or a branch, went on with no majority, believe those.")
    ] = False,
    segments: Annotated[
        int | None,
        typer.Option(
            min=1, help="Make the training steps of so many leases again, drawn by chance: `weft anchor --keep all`."
        ),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="The same of all leases.")] = False,
    device: Annotated[str, typer.Option(help="With --segments or --all: where torch runs.")] = "auto",
    threads: Annotated[
        int, typer.Option(help="The same: threads of torch on the CPU; 0: its own choice.", min=0, max=1024)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Check such a file, with no network: what it shows, and by whose word. Or make training steps of a run again."""
    from weft.sync.proof import shown
    from weft.sync.records.acts import Warrant
    from weft.sync.records.proof import MAX_PROOF_NBYTES, WorkProof
    from weft.wire import decode

    if founder is not None and not re.fullmatch(r"[0-9a-fA-F]{16,64}", founder):
        raise ConfigError(f"--founder {founder[:80]}: that is no key. Give its 64 hex digits, or the first 16 or more.")
    if all or segments is not None:
        if all:
            refuse_idle(context, "with --all nothing is drawn", "segments")
        refuse_idle(context, "rounds of an archive are believed by a majority's votes alone", "accept_few")
        asked = Asked(None if all else segments, founder, device, threads)
        check_run(file, home_of(context), asked, as_json=as_json)
        return
    refuse_idle(context, "a file is checked without torch", "device", "threads")
    say_no_home(context, "such a file is checked by what is in it")
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        more = "To make training steps of a run again, say how many: --segments 100."
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}. {more}") from error
    proof: WorkProof | Warrant
    for kind in (WorkProof, Warrant):
        try:
            proof = decode(data, kind, max_nbytes=MAX_PROOF_NBYTES)
            break
        except WireError:
            continue
    else:
        raise DataError(f"{file} is no file that `weft ledger prove` or `evidence` has written, or it is damaged.")
    if isinstance(proof, Warrant):
        if founder is not None or accept_few:
            raise ConfigError("--founder, --accept-few: no effect on evidence, which the liar itself has signed.")
        _say_lie(file, proof, as_json)
        return
    try:
        found = shown(proof)
    except WireError as error:
        raise DataError(f"{file} shows nothing: {error}.") from None
    if founder is not None and not found.founder.startswith(founder.lower()):
        raise DataError(f"{file} is of a run that {found.founder} began, and not {founder}.")
    if found.by_few and not accept_few:
        peers = sorted({peer for each in found.by_few.values() for peer in each})
        raise DataError(
            f"{file} rests on few: no majority signed round {', '.join(map(str, found.by_few))} on the way, but "
            f"{', '.join(peers)} alone. If you know these keys and believe them, add --accept-few."
        )
    if as_json:
        typer.echo(json.dumps(_tree_of(found)))
        return
    for line in _said(found):
        typer.echo(line)


# --- what is looked up ---


def _recorded(context: typer.Context, given: str, stage: int | None) -> "tuple[RoundsFile, RunId, PeerId]":
    """Return what is recorded here of a run, the run (of the stage), and whose machine this is in it."""
    from weft.store.home import ROUNDS
    from weft.store.rounds import RoundsFile

    home = home_of(context)
    run = find_run(given, home, having=(f"*/{ROUNDS}", f"*/stage-*/{ROUNDS}"))
    if run is None:
        raise no_such_run(given, home)
    found = sorted(run.glob(f"*/{ROUNDS}" if stage is None else f"*/stage-{stage - 1}/{ROUNDS}"))
    if not found:
        is_staged = stage is None and any(True for _ in run.glob(f"*/stage-*/{ROUNDS}"))
        more = "Each stage records its own: name one with --stage." if is_staged else _TURN_ON
        raise DataError(f"nothing is recorded here of run {called(run)}. {more}")
    files = {path: RoundsFile(path) for path in found}
    path = max(files, key=lambda each: files[each].newest() or 0)  # of several peers of this home the furthest
    newest = files[path].newest()
    manifest = None if newest is None else files[path].manifest(newest)
    if manifest is None:
        raise DataError(f"{path} holds no round yet.")
    return files[path], RunId(manifest.run), PeerId(path.relative_to(run).parts[0])


def _manifest(file: "RoundsFile", round: int) -> "Manifest":
    newest = file.newest() or 0
    if round > newest:
        raise DataError(f"round {round} is not here: the newest is {newest}.")
    if (manifest := file.manifest(round)) is None:
        raise DataError(f"of round {round} the header alone is here: this machine was not there, or that is long ago.")
    return manifest


def _peer_in(manifest: "Manifest", file: "RoundsFile", given: str) -> PeerId:
    stakes = (stake.peer for group in file.groups(manifest.round) for stake in group.stakes)
    there = {*(each.peer for each in manifest.contributions), *stakes}
    found = [peer for peer in there if peer.startswith(given.lower())]
    if len(found) != 1:
        known = ", ".join(short(peer) for peer in sorted(there)) or "nobody"
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

    from weft.peer.round.acts import told
    from weft.wire import digest_of

    entry = manifest.entry
    lines = [f"  manifest  {digest_of(manifest)}", f"  leader    {manifest.leader}"]
    if entry is not UNSET:
        lines.append(f"  work      {entry.work}")
    for each in manifest.contributions:
        through = "" if each.group is None else f"  with a group of {each.group.num_counted + 1}"
        traced = "" if each.work is UNSET else f"  work {short(Digest(each.work))}"
        lines.append(f"  counted   {each.peer}  {each.tokens:,} tokens  payload {short(each.payload)}{traced}{through}")
    for peer, work in _waits(manifest):
        lines.append(f"  waits     {peer}  work {short(work)}")
    for peer, work, by in _cleared(manifest):
        lines.append(f"  cleared   {peer}  work {short(work)}, by {', '.join(map(short, by))}")
    lines += [_decided(each) for each in told(manifest)]
    if (proven := _evidence_in(manifest)) is not None:
        how = f"weft ledger evidence {manifest.run[:8]} --round {manifest.round} -o FILE"
        lines.append(f"  evidence  {proven.nbytes:,} bytes: {how}")
    return lines


def _evidence_in(manifest: "Manifest") -> "Warrant | None":
    """Return by which evidence a round has struck a member out; None: by none."""
    from weft.sync.governance import accused, findings_in
    from weft.sync.records.acts import FalsePassage

    told = (each for each in manifest.acts if each.letters[0].kind != FalsePassage.__name__)  # by a majority
    proven = (each for each in told if accused(each) is not None and not findings_in(each))
    return next(proven, None)


def _say_lie(file: str, warrant: "Warrant", as_json: bool) -> None:
    """
    Raises:
        DataError: it proves nothing.
    """
    from weft.sync.governance import Void, read_lie

    try:
        lie = read_lie(warrant)
    except Void as error:
        raise DataError(f"{file} proves nothing: {error}.") from None
    if as_json:
        named = {"peer": lie.peer, "run": lie.run, "branch": lie.branch, "round": lie.round}
        typer.echo(json.dumps({**named, "lie": lie.what, "work": lie.work, "part": lie.part}))
        return
    of = f"branch {lie.branch}" if lie.run is None else f"run {lie.run}"
    typer.echo(f"round {lie.round} of {of}")
    typer.echo(f"  lied      {lie.peer}: {lie.what}")
    typer.echo(
        "It has signed that itself: nobody else's word is needed. A machine that computes wrongly signs it, too."
    )


def _waits(manifest: "Manifest") -> list[tuple[PeerId, Digest]]:
    """Return what newcomers have brought that counts later."""
    return [(PeerId(each.peer), Digest(each.work)) for each in manifest.held or ()]


def _cleared(manifest: "Manifest") -> list[tuple[PeerId, Digest, tuple[PeerId, ...]]]:
    """Return what may count from the next round on, and who has found it right."""
    from weft.sync.governance import clears, findings_in

    first = [(findings_in(each)[0], each.letters) for each in manifest.acts if clears(each)]
    return [(PeerId(one.peer), Digest(one.work), tuple(each.signer for each in letters)) for one, letters in first]


def _decided(act: "ActEnacted") -> str:
    by = f", by {', '.join(map(short, act.by))}" if act.by else ""
    reason = f": {act.reason}" if act.reason else ""
    return f"  decided   {act.kind} {act.subject}".rstrip() + by + reason


def _as_tree(manifest: "Manifest") -> dict[str, Any]:
    from msgspec import to_builtins

    from weft.peer.round.acts import told
    from weft.wire import digest_of

    fields = ("round", "branch", "leader", "previous", "members", "joined", "left", "committed_tokens")
    tree = to_builtins(manifest)
    counted = [{name: each.get(name) for name in _COUNTED} for each in tree["contributions"]]
    named = {name: tree[name] for name in fields}
    acts = [{name: to_builtins(getattr(each, name)) for name in _DECIDED} for each in told(manifest)]
    work = tree.get("entry", {}).get("work")
    waits = [{"peer": peer, "work": name} for peer, name in _waits(manifest)]
    cleared = [{"peer": peer, "work": name, "by": list(by)} for peer, name, by in _cleared(manifest)]
    of_new = {"waits": waits, "cleared": cleared} if waits or cleared else {}
    return {"manifest": digest_of(manifest), **named, "work": work, "counted": counted, **of_new, "decided": acts}


def _tree_of(found: "Shown") -> dict[str, Any]:
    return {
        "run": found.run,
        "round": found.round,
        "tokens": dict(found.tokens),
        "leases": None if found.leases is None else [[each.peer, each.start, each.stop] for each in found.leases],
        "brought_by": found.brought_by,
        "is_legacy": found.is_legacy,
        "payload": found.payload,
        "founder": found.founder,
        "last": found.last,
        "members": list(found.members),
        "by_few": {str(round): list(peers) for round, peers in found.by_few.items()},
    }


def _said(found: "Shown") -> list[str]:
    lines = [f"round {found.round} of run {found.run}"]
    if found.is_legacy:
        lines.append("  counted what another branch had counted, and no work of who brought it:")
    lines += [f"  counted {peer}: {num:,} tokens" for peer, num in sorted(found.tokens.items())]
    for lease in found.leases or ():
        lines.append(f"  leased to {lease.peer} in the round before: samples {lease.start:,} to {lease.stop - 1:,}")
    lines.append(f"  payload {found.payload}, brought by {found.brought_by}")
    if len(found.tokens) > 1 or found.brought_by not in found.tokens:
        lines.append("  how much of it is whose, who brought it has said; members have counted the sum")
    lines.append(f"The run was begun by {found.founder}: compare this key with one that you have from elsewhere.")
    lines.append(f"It holds if most members were honest in each round from then to round {found.last}; after that one:")
    return lines + [f"  {peer}" for peer in found.members]
