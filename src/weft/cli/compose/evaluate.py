"""`weft compose evaluate`: a composed model on text that nobody trained on, beside its controls, or not at all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.compose.parts import (
    AsJson,
    Device,
    HeldOut,
    Known,
    known_one,
    reader,
    require_one_tokenizer,
    samples,
    seq_len_of,
)
from weft.cli.compose.routed import Routed, measured
from weft.cli.compose.souped import ingredients, soup_at
from weft.cli.compose.souped import told as told_of_soup
from weft.cli.home import home_of
from weft.cli.settings import refuse_idle
from weft.cli.terminal import say_loading
from weft.errors import ConfigError
from weft.ids import several

if TYPE_CHECKING:
    from weft.compose.composed import Experts, Merged, Places, Stacked
    from weft.compose.controls import Control, Report, Row
    from weft.data.rows import Batch
    from weft.data.tokenizer import Tokenizer
    from weft.model.transformer import Transformer

AS_MUCH = 0.9  # of the computing: so much is told as equal

_SAID: "dict[Control, str]" = {
    "best single": "best single member",
    "ensemble": "members asked together, alike",
    "identity": "layers that change nothing, trained alike",
    "copy": "copies of the lowest, trained alike",
    "depth up-scaling": "the lowest, deeper by itself, trained alike",
    "continued": "best single member, trained on",
    "monolith": "one model, trained whole",
    "seed": "what all paths began as",
}
_OF_PATHS: "dict[Control, str]" = _SAID | {
    "best single": "best single path, chosen on this text",
    "ensemble": "all paths asked together, alike",
}
_OF_SOUPS: "dict[Control, str]" = _SAID | {"best single": "best single member, chosen on this text"}


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Name of a composed model or of a soup, its folder, or a folder of paths.", show_default=False
        ),
    ],
    data: HeldOut,
    monolith: Annotated[
        str | None,
        typer.Option(
            help="The member that was trained whole, with as much computing. Of a stack `weft compose plan` says how.",
            metavar="MEMBER",
        ),
    ] = None,
    no_monolith: Annotated[bool, typer.Option("--no-monolith", help="There is none, and the report says so.")] = False,
    windows: Annotated[int, typer.Option(help="Number of samples, spread evenly over the text; 0: all.", min=0)] = 0,
    route_every: Annotated[
        int | None,
        typer.Option(
            help="Of paths: choose each text's path again after so many tokens. Default: once.",
            min=2,
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the loss of a composed model beside its controls."""
    from weft.compose.composed import Experts, Merged, Stacked, find_composed, folder_of, read_composed
    from weft.compose.member import read_member
    from weft.compose.paths.folder import has_paths

    home = home_of(context)
    if folder_of(model, home) is None and has_paths(Path(model)):
        _require_word_of_monolith(monolith, no_monolith)
        whole = None if monolith is None else known_one(context, monolith)
        say_loading()
        _tell_paths(measured(Path(model), home, data, windows, device, route_every, whole), route_every, as_json)
        return
    refuse_idle(context, "it is of paths", "route_every")
    if folder_of(model, home) is None and (soup := soup_at(model, home)) is not None:
        _require_word_of_monolith(monolith, no_monolith)
        whole = None if monolith is None else known_one(context, monolith)
        say_loading()
        report, (num, seq_len) = _souped(soup, home, device, data, windows, whole)
        _tell(
            f"the mean of {', '.join(each.name for each in report.members)}", report, num, seq_len, as_json, _OF_SOUPS
        )
        return
    folder = find_composed(model, home)
    told = read_composed(folder)
    how = f" (`weft compose plan {' '.join(told.members)}` says how to train it)" if isinstance(told, Stacked) else ""
    _require_word_of_monolith(monolith, no_monolith, how)
    whole = None if monolith is None else known_one(context, monolith)
    say_loading()
    from weft.cli.model.trained import open_words

    tokenizer, _ = open_words(str(folder / told.members[0]), home)
    text, _ = samples(tokenizer, data, told.seq_len, windows, unlike=told.text)
    if whole is not None:
        members = [Known(folder / name, read_member(folder / name)) for name in told.members]
        _require_monolith(whole, told.name, members, told.seq_len, home)
    match told:
        case Stacked():
            report = _stack(folder, told, home, device, text, whole)
        case Experts():
            report = _experts(folder, told, tokenizer, home, device, text, whole)
        case Merged():
            report = _merged(folder, told, home, device, text, whole)
    num, seq_len = text.tokens.shape
    _tell((" > " if report.exits else " + ").join(told.members), report, num, seq_len, as_json)


def _require_word_of_monolith(monolith: str | None, no_monolith: bool, how: str = "") -> None:
    """
    Raises:
        ConfigError: none is named, and nobody says that there is none; or both.
    """
    if (monolith is None) == (not no_monolith):
        raise ConfigError(
            f"a composed model is told beside one that was trained whole, with as much computing. Name it: --monolith "
            f"MEMBER{how}. Or say --no-monolith: the report says then that there is none."
        )


# --- what is measured ---


def _stack(folder: Path, told: "Stacked", home: Path, device: str, text: "Batch", monolith: Known | None) -> "Report":
    from weft.compose.composed import read_stack
    from weft.compose.controls import OF_STACKS, Report, Row, ensemble
    from weft.compose.member import flops_together, read_member

    read = reader(home, device)
    stack, identity = (read_stack(folder, each, read) for each in (told.stack, told.identity))
    apart = [read_stack(folder, _alone(name), read) for name in told.members]
    continued = read_stack(folder, _alone(told.continued), read)
    here = text.to(stack.space.embed.device)
    members = [read_member(folder / name) for name in told.members]
    flops, together = [each.flops for each in members], flops_together(members)
    alone = tuple(
        Row(name, each.losses(here), number or None)
        for name, each, number in zip(told.members, apart, flops, strict=True)
    )
    best = told.members.index(told.best)

    def on(base: int | None) -> int | None:
        """Return the operations of what was trained on from there, as long as the stack."""
        return base + told.flops if base else None

    exits = range(len(told.members) - 1)
    grown: dict[Control, Row] = {}
    for each in told.growth:
        took = flops[0] + each.flops if flops[0] else None
        name: Control = "copy" if each.how == "copy" else "depth up-scaling"
        grown[name] = Row(name, read_stack(folder, each.stack, read).losses(here), took)
    return Report(
        composed=Row(told.name, stack.losses(here), on(together)),
        exits=tuple(Row(told.members[number], stack.losses(here, exit=number), None) for number in exits),
        members=alone,
        needed=OF_STACKS,
        controls={
            "best single": alone[best],
            "ensemble": Row("ensemble", ensemble([each.logits for each in apart], here), together),
            "identity": Row("identity", identity.losses(here), on(flops[0])),
            **grown,
            "continued": Row("continued", continued.losses(here), on(flops[best])),
            "monolith": _monolith(monolith, home, device, here),
        },
    )


def _experts(
    folder: Path, told: "Experts", words: "Tokenizer", home: Path, device: str, text: "Batch", monolith: Known | None
) -> "Report":
    from weft.compose.asking import weighting_of
    from weft.compose.controls import OF_EXPERTS, Report, Row, ensemble
    from weft.compose.experts.ensemble import likelihoods
    from weft.compose.experts.ensemble import losses as mixed_losses

    models, here, alone, together = _apart(folder, told, home, device, text)
    likely = likelihoods(models, here.tokens, here.targets).cpu()
    found = mixed_losses(weighting_of(folder, told, words), text.tokens, text.targets, likely)
    return Report(
        composed=Row(told.name, found, together),
        exits=(),
        members=alone,
        needed=OF_EXPERTS,
        controls={
            "best single": alone[told.members.index(told.best)],
            "ensemble": Row("ensemble", ensemble(models, here), together),
            "monolith": _monolith(monolith, home, device, here),
        },
    )


def _merged(folder: Path, told: "Merged", home: Path, device: str, text: "Batch", monolith: Known | None) -> "Report":
    from weft.compose.controls import OF_MIXTURES, Report, Row, ensemble, losses
    from weft.compose.experts.mixtral import read_mixture
    from weft.compose.experts.mixture import over
    from weft.model.flat import assemble

    models, here, alone, together = _apart(folder, told, home, device, text)
    best = alone[told.members.index(told.best)]
    config, vector = read_mixture(folder / told.mixture)
    mixture, _ = over(config, vector.to(here.tokens.device))
    continued = assemble(*reader(home, device)(folder / told.continued))
    took = None if together is None or told.left_flops is None else together + told.flops + told.left_flops
    return Report(
        composed=Row(told.name, losses(mixture.eval(), here), took),
        exits=(),
        members=alone,
        needed=OF_MIXTURES,
        controls={
            "best single": best,
            "ensemble": Row("ensemble", ensemble(models, here), together),
            "continued": Row("continued", losses(continued, here), best.flops + told.flops if best.flops else None),
            "monolith": _monolith(monolith, home, device, here),
        },
    )


def _souped(
    soup: Known, home: Path, device: str, data: Sequence[str], windows: int, monolith: Known | None
) -> "tuple[Report, tuple[int, int]]":
    """Return the report of a soup, and how many samples of how many tokens it is of."""
    from weft.cli.model.trained import open_words, place

    parts = ingredients(soup, home)
    seq_len = seq_len_of([soup.member], None)
    if monolith is not None:
        _require_monolith(monolith, soup.member.name, [soup, *parts], seq_len, home)
    tokenizer, _ = open_words(str(soup.folder), home)
    text = samples(tokenizer, data, seq_len, windows)[0].to(place(device))
    num, length = text.tokens.shape
    return told_of_soup(soup, parts, text, home, device, _monolith(monolith, home, device, text)), (num, length)


def _apart(
    folder: Path, told: "Experts | Merged", home: Path, device: str, text: "Batch"
) -> "tuple[list[Transformer], Batch, tuple[Row, ...], int | None]":
    """Return the members, the text where they compute, their losses, and what they took together, if that is known."""
    from weft.compose.controls import Row, losses
    from weft.compose.member import flops_together, read_member
    from weft.model.flat import assemble

    read = reader(home, device)
    models = [assemble(*read(folder / name)) for name in told.members]
    here = text.to(models[0].embed.weight.device)
    members = [read_member(folder / name) for name in told.members]
    alone = tuple(
        Row(name, losses(each, here), member.flops or None)
        for name, each, member in zip(told.members, models, members, strict=True)
    )
    return models, here, alone, flops_together(members)


def _require_monolith(there: Known, name: str, members: Sequence[Known], seq_len: int, home: Path) -> None:
    """
    Args:
        name: of the composed model.
        members: of which none is the one that was trained whole.
        seq_len: of the samples.

    Raises:
        ConfigError: what is to be told beside a composed model is a member of it, or reads other tokens, or fewer.
    """
    require_one_tokenizer(home, [members[0], there])
    if there.member.weights in {each.member.weights for each in members}:
        raise ConfigError(f"--monolith {there.member.name}: a member of {name} itself. Name one trained whole.")
    if there.member.model.max_seq_len < seq_len:
        raise ConfigError(
            f"--monolith {there.member.name} reads {there.member.model.max_seq_len} tokens, and samples have "
            f"{seq_len}. Name one that reads as many."
        )


def _monolith(there: Known | None, home: Path, device: str, text: "Batch") -> "Row | None":
    from weft.cli.model.trained import open_trained
    from weft.compose.controls import Row, losses

    if there is None:
        return None
    model = open_trained(str(there.folder), home).on(device)
    return Row(there.member.name, losses(model, text), there.member.flops or None)


def _alone(name: str) -> "Places":
    from weft.compose.composed import Places

    return Places(members=(name,), maps="none")


# --- what is told ---


def _tell(
    made_of: str, report: "Report", num: int, seq_len: int, as_json: bool, said: "Mapping[Control, str]" = _SAID
) -> None:
    if as_json:
        typer.echo(json.dumps(_tree(report)))
        return
    typer.echo(f"nats a token, over {several(num, 'sample')} of {several(seq_len, 'token')}")
    for line in _lines(f"{report.composed.name}: {made_of}", report, said):
        typer.echo(line)


def _tell_paths(found: Routed, every: int | None, as_json: bool) -> None:
    if as_json:
        cost = {"read": found.cost.num_read, "read_again": found.cost.num_again}
        typer.echo(json.dumps(_tree(found.report) | cost | {"has_rerouter": found.has_rerouter}))
        return
    scored = f"the last {several(found.num_scored, 'token')} of each: those before decide its first path"
    typer.echo(f"nats a token, over {several(found.num_samples, 'sample')}, {scored}")
    routed = "routed once" if every is None else f"routed every {several(every, 'token')}"
    for line in _lines(f"{found.name}: {found.num_paths} paths, {routed}", found.report, _OF_PATHS):
        typer.echo(line)
    if found.by:
        typer.echo(found.by)
    if found.cost.num_again:
        share = found.cost.num_again / (found.cost.num_read - found.cost.num_again)
        typer.echo(f"paths that take over read {share:.0%} of the text once more")


def _lines(title: str, report: "Report", said: "Mapping[Control, str]" = _SAID) -> list[str]:
    from weft.compose.controls import paired, verdict

    def row(name: str, each: "Row", more: str = "") -> str:
        flops = "" if each.flops is None else f"{each.flops:.3g} operations"
        return f"{name:42} {each.loss:7.3f}  {flops:20}  {more}".rstrip()

    lines = [row(title, report.composed)]
    if (adds := report.adds) is not None:
        lines.append(f"  its last member adds {adds[0]:+.3f} ± {adds[1]:.3f}")
    lines += [row(f"  after {each.name}", each) for each in report.exits]
    lines += [row(f"{each.name} alone", each) for each in report.members]
    lines.append(f"controls, and how the loss of {report.composed.name} differs from theirs")
    for name, each in report.controls.items():
        if each is None:
            lines.append(f"{said[name]:42}    none was trained")
            continue
        away, error = paired(report.composed.losses, each.losses)
        found = f"{away:+.3f} ± {error:.3f}, {verdict(report.composed.losses, each.losses)}"
        lines.append(row(said[name], each, found + _computing(name, each, report.composed)))
    return lines


def _computing(name: "Control", row: "Row", composed: "Row") -> str:
    """Return what is said of one model that was trained whole, but not with as much computing."""
    if name != "monolith":
        return ""
    if row.flops is None or composed.flops is None:
        unknown = "it" if row.flops is None else composed.name
        return f"; what {unknown} took is not known"
    share = row.flops / composed.flops
    if share < AS_MUCH:
        return f"; it took {share:.2g} of the computing"
    return f"; it took {share:.3g} times the computing" if share > 1 / AS_MUCH else ""


def _tree(report: "Report") -> dict[str, Any]:
    from weft.compose.controls import paired, verdict

    def row(each: "Row | None") -> Any:
        if each is None:
            return None
        away, error = paired(report.composed.losses, each.losses)
        told = {"difference": away, "error": error, "it_is": verdict(report.composed.losses, each.losses)}
        return {"name": each.name, "loss": each.loss, "flops": each.flops, **told}

    return {
        "name": report.composed.name,
        "loss": report.composed.loss,
        "flops": report.composed.flops,
        "adds": report.adds,
        "members": _rows(report.members, row),
        "exits": _rows(report.exits, row),
        "controls": {name: row(each) for name, each in report.controls.items()},
    }


def _rows(rows: "Sequence[Row]", told: Any) -> list[Any]:
    return [told(each) for each in rows]
