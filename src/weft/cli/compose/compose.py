"""`weft compose`: models that were trained with no contact, and what is made of several.

weft compose space MODEL FOLDER          ends that members share, of a trained model
weft compose member last --name english  a trained model, and how it came to be
weft compose list                        the members of this home, and what was made of them
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.compose import alone, blocks, evaluate, experts, merge, paths, reshard, stacks
from weft.cli.compose.described import described, heldout, own_space
from weft.cli.compose.parts import AsJson
from weft.cli.home import find_checkpoint, home_of
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.ids import several, short
from weft.progress import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.compose.member import Member

ModelName = Annotated[
    str, typer.Argument(help='Folder, or a run: its name, its digits, or "last".', show_default=False)
]
_LEARNT = {
    "same": "reads what it wrote",
    "previous": "reads what it wrote a token before",
    "denoise": "sees all of a text",
    "noise": "is a block",
}


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Models trained with no contact, and what is made of several: experts, stacks, paths.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("space")(space)
    app.command("member")(member)
    app.command("list")(list_members)
    app.command("remove")(remove)
    app.command("select")(stacks.select)
    app.command("plan")(stacks.plan)
    app.command("align")(stacks.align)
    app.command("loop")(alone.loop)
    app.command("think")(alone.think)
    app.command("denoise")(alone.denoise)
    app.command("below")(alone.below)
    app.command("block")(blocks.block)
    app.command("blocks")(blocks.blocks)
    app.command("split")(experts.split)
    app.command("mix")(experts.mix)
    app.command("merge")(merge.merge)
    app.command("leave")(merge.leave)
    app.command("route")(paths.route)
    app.command("path")(paths.path)
    app.command("reshard")(reshard.reshard)
    app.command("reroute")(reshard.reroute)
    app.command("evaluate")(evaluate.evaluate)
    app.command("export")(stacks.export)
    return app


def space(
    context: typer.Context,
    model: ModelName,
    folder: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
) -> None:
    """Write the ends of a trained model, between which members train layers: [model] type = "space"."""
    source = find_checkpoint(model, home_of(context))
    say_loading()
    from weft.cli.model.trained import open_trained, say_which
    from weft.compose.space import Space, write_space
    from weft.data.tokenizer import CharTokenizer, JsonTokenizer

    trained = open_trained(str(source), home_of(context))
    say_which(trained, model)
    words = trained.tokenizer
    if isinstance(words, CharTokenizer):  # of an alphabet, which others' text may not have
        words = JsonTokenizer(words.to_json(), words.end_of_text)
    made = own_space(trained, home_of(context)) or Space.of(trained.on("cpu"), words.digest)
    write_space(folder, made, words)
    typer.echo(str(folder))
    tell(f"space {short(made.digest)}: {made.vocab_size:,} tokens, width {made.width}. Members train in it with")
    tell(f'  [model] type = "space", path = "{folder}", num_layers = 4, num_heads = 4, ffn_width = {3 * made.width}')


def member(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help='Folder, or a run: its name, its digits, or "last"; or a member: its name, or its folder.',
            show_default=False,
        ),
    ],
    name: Annotated[str | None, typer.Option(help="What it is called here. Default: as the model is called.")] = None,
    to: Annotated[
        Path | None, typer.Option(help="A folder to write instead, to be carried to another machine.")
    ] = None,
) -> None:
    """Note a trained model as a member: its weights, and how it came to be."""
    from weft.compose.member import MEMBER, require_name
    from weft.compose.registry import Registry, copy_member, write_member

    registry = Registry(home_of(context))
    is_member = (Path(model) / MEMBER).exists()  # also where its weights were left behind
    folder = Path(model) if is_member else find_checkpoint(model, home_of(context))
    if (folder / MEMBER).exists():
        called = require_name(folder.resolve().name if name is None else name)
        place = to or registry.place(called)
        _told(copy_member(folder, place, called), place)
        return
    say_loading()
    from msgspec import structs

    from weft.cli.model.trained import open_trained, say_which

    trained = open_trained(str(folder), home_of(context))
    say_which(trained, model)
    called = require_name("-".join(trained.called.split()) if name is None else name)
    place = to or registry.place(called)
    if place.exists():
        raise ConfigError(f"{place}: exists; a member is never written over. Give it another --name, or remove it.")
    made = structs.replace(described(called, trained, home_of(context)), heldout=heldout(trained, home_of(context)))
    with Meter("writing", "B", WorkLine(), SystemClock(), 4 * trained.vector.numel()) as meter:
        write_member(place, made, lambda inner: trained.export(inner, "float32", meter.add))
    _told(made, place)


def _told(made: "Member", place: Path) -> None:
    typer.echo(str(place))
    tell(_line(made))


def _line(each: "Member") -> str:
    from weft.dashboard import figures
    from weft.model.config import num_parameters

    parts = [f"{figures.amount(num_parameters(each.model))} parameters"]
    if each.space is not None:
        parts.append(f"space {short(each.space)}")
    if each.tokens:
        parts.append(f"{figures.amount(each.tokens)} tokens")
    if each.parent is not None:
        parts.append(f"from {'seed ' + str(each.seed) if each.is_seeded else short(each.parent)}")
    if each.heldout is not None:
        parts.append(f"held out {each.heldout.loss:.3f} nats a token")
    if each.latents != "none":
        parts.append(_LEARNT[each.latents])
    return f"{each.name}: {', '.join(parts)}"


def list_members(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the members of this home, and what was made of them."""
    from weft.compose.composed import names, place, read_composed
    from weft.compose.registry import Registry

    home = home_of(context)
    found = Registry(home).members()
    made = []
    for name in names(home):
        try:
            made.append(read_composed(place(home, name)))
        except ConfigError as error:  # the others are there
            tell(str(error))
    shared = _overlaps(found)
    if as_json:
        import msgspec

        told = {"members": [*found.values()], "composed": made, "overlaps": shared}
        typer.echo(json.dumps(msgspec.to_builtins(told)))
        return
    for name, each in found.items():
        others = [f"{share:.0%} with {other}" for other, share in shared.get(name, {}).items() if share]
        typer.echo(_line(each) + (f"; of its text it shares {', '.join(others)}" if others else ""))
    for one in made:
        typer.echo(f"{one.name}: {one.kind} of {', '.join(one.members)}")
    tell(f"{several(len(found), 'member')} in this home" + (f", {len(made)} composed" if made else ""))


def _overlaps(found: "Mapping[str, Member]") -> dict[str, dict[str, float]]:
    """Return which share of each member's text each other was trained on, too, where both tell of theirs."""
    from weft.compose.member import overlap

    shares = {
        name: {other: overlap(one, found[other]) for other in found if other != name} for name, one in found.items()
    }
    return {name: told for name, each in shares.items() if (told := {k: v for k, v in each.items() if v is not None})}


def remove(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of a member or a composed model of this home.", show_default=False)],
) -> None:
    """Remove a member, or a composed model, from this home, with its weights."""
    from weft.compose import composed
    from weft.compose.registry import Registry

    is_whole = composed.place(home_of(context), name).exists()
    if composed.remove(home_of(context), name):
        tell(
            f"{name} is no composed model any more"
            if is_whole
            else f"what was begun under the name {name} is forgotten"
        )
        return
    Registry(home_of(context)).remove(name)
    tell(f"{name} is no member any more")
