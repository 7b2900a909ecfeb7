"""`weft compose leave`: a member leaves a mixture: its networks and its rows of the router, and its control.

weft compose leave one python --name others
weft compose remove one
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.compose.opened import Single
from weft.cli.compose.parts import USUAL_LR, Device, ModelName, NewName, new_place, texts, training_of
from weft.cli.home import home_of
from weft.cli.settings import refuse_idle
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.compose.composed import Composed, Merged
    from weft.compose.member import Member
    from weft.compose.shelf import Shelf


def leave(
    context: typer.Context,
    model: ModelName,
    member: Annotated[str, typer.Argument(help="Name of the member that leaves.", show_default=False)],
    name: NewName,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Where the best member leaves: the text that the mixture was made with. On it the best of the others "
            "is trained on, in place of the control that leaves with the member.",
            show_default=False,
        ),
    ] = None,
    lr: Annotated[float, typer.Option(help="Of that: as of the merge.", min=1e-9, max=10.0)] = USUAL_LR,
    seed: Annotated[int, typer.Option(help="Of that: of what samples are drawn.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Write a mixture without one of its members, and without what was made of that one alone."""
    from msgspec import structs

    from weft.compose.composed import find_composed, read_composed
    from weft.compose.member import read_member

    home, folder = home_of(context), find_composed(model, home_of(context))
    told = _mixture(read_composed(folder), member)
    if member != told.best:
        refuse_idle(
            context, f"{told.best} was the best member and stays, with its control", "data", "lr", "seed", "device"
        )
    elif data is None:
        raise ConfigError(
            f"{member} was the best member, so a control of {told.name} is of its weights, and leaves with it. Give "
            "--data, the text that the mixture was made with: the best of the others is trained on."
        )
    place, left = new_place(context, name), _left(told, member, read_member(folder / member))
    say_loading()
    from weft.cli.model.trained import open_words
    from weft.compose.composed import begun, write_composed
    from weft.compose.experts.mixtral import read_mixture, write_mixture
    from weft.compose.experts.mixture import without
    from weft.compose.shelf import Shelf

    def keep_control(inner: Path) -> None:
        shutil.copytree(folder / told.continued, inner / told.continued)

    shelf = Shelf(begun(home, name), SystemClock())
    record = left
    write_control: Callable[[Path], None] = keep_control
    if data is not None:
        record, write_control = _trained_on(home, folder, left, _Asked(data, lr, seed, device), shelf)
    config, vector = without(*read_mixture(folder / told.mixture), told.members.index(member))
    words, came_with = open_words(str(folder / record.best), home)

    def write_parts(inner: Path) -> None:
        for each in record.members:
            shutil.copytree(folder / each, inner / each)
        write_control(inner)
        write_mixture(
            inner / record.mixture, config, vector, words.to_json(), stop_id=words.end_of_text, came_with=came_with
        )

    write_composed(place, structs.replace(record, name=name, top=config.top_k), write_parts)
    shelf.remove()
    typer.echo(str(place))
    tell(
        f"attention, norms and ends are still a mean with {member}'s share. To take that out, too, merge the others "
        f"anew: weft compose merge {' '.join(record.members)} --data TEXT --name NEW"
    )
    tell(f"{folder} holds {member} as before: weft compose remove {told.name}")


def _mixture(told: "Composed", member: str) -> "Merged":
    """
    Raises:
        ConfigError: it is none, or has no such member, or too few others.
    """
    from weft.compose.composed import Experts, Merged

    others = " ".join(each for each in told.members if each != member)
    if isinstance(told, Experts):
        raise ConfigError(f"{told.name}: its members are whole. Mix the others again: weft compose mix {others}.")
    if not isinstance(told, Merged):
        raise ConfigError(f"{told.name}: a stack is made of its members anew: weft compose align {others}.")
    if member not in told.members:
        raise ConfigError(f"{member[:80]} is no member of {told.name}: {', '.join(told.members)}.")
    if len(told.members) == 2:
        raise ConfigError(f"{told.name}: without {member} it is {others} alone. Serve that: weft serve {others}.")
    return told


def _left(told: "Merged", member: str, before: "Member") -> "Merged":
    """Return what is told of a mixture without a member, whose best is still to be found where that one was."""
    from msgspec import structs

    rest = tuple(each for each in told.members if each != member)
    took = before.flops or None
    return structs.replace(
        told,
        members=rest,
        best=told.best if told.best in rest else rest[0],
        left_flops=None if told.left_flops is None or took is None else told.left_flops + took,
    )


@dataclass(frozen=True)
class _Asked:
    data: Sequence[str]
    lr: float
    seed: int
    device: str


def _trained_on(
    home: Path, folder: Path, left: "Merged", asked: _Asked, shelf: "Shelf"
) -> "tuple[Merged, Callable[[Path], None]]":
    """Return what is told of a mixture with the best of its members, and what writes that one, trained on."""
    from msgspec import json, structs, to_builtins

    from weft.cli.model.trained import open_trained, place
    from weft.compose.controls import losses
    from weft.compose.descent import windows
    from weft.compose.member import Origin, read_member
    from weft.compose.merging import continued, continued_steps
    from weft.model.flat import assemble
    from weft.sync.method.choices import AdamWConfig
    from weft.wire import digest

    opened, on = [open_trained(str(folder / name), home) for name in left.members], place(asked.device)
    text = texts(opened[0].tokenizer, asked.data, left.seq_len)
    if text.digest != left.text:
        raise ConfigError(f"--data: {left.name} was made with other text, and its control reads the same. Name that.")
    alone = [float(losses(assemble(each.config, each.vector.to(on)), text.dev.to(on)).mean()) for each in opened]
    number = alone.index(min(alone))
    best, member = opened[number], read_member(folder / left.members[number])
    steps = continued_steps(best.config, left.flops, left.batch_size, left.seq_len)
    training = structs.replace(training_of(steps, asked.lr), optimizer=AdamWConfig(weight_decay=0.0))
    told = [member.weights, text.digest, to_builtins(training), left.batch_size, left.seq_len, asked.seed]
    shelf.open(digest(json.encode(told)))
    draw = windows(text.train, left.seq_len, left.batch_size, asked.seed)
    with Meter("training on", "steps", WorkLine(), SystemClock(), steps) as meter:
        vector = continued(
            training, best.config, best.vector.to(on), lambda number: draw(number).to(on), shelf, meter.add
        )
    single = Single(best, member, vector)
    tokens = steps * left.batch_size * left.seq_len
    origin = Origin(how="continued", of=(member.weights,), tokens=tokens, flops=left.flops)
    return structs.replace(left, best=member.name), lambda inner: single.write(inner, left.continued, origin)
