"""`weft compose loop`: a member learns to read what it writes, before it ever meets another.

weft compose loop python --data text.txt --name looped
weft compose align english looped --data text.txt --name both --how joint --handover post
"""

from enum import StrEnum
from math import isnan
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.compose.opened import Part, opened_of
from weft.cli.compose.parts import (
    USUAL_BATCH,
    USUAL_LR,
    USUAL_STEPS,
    BatchSize,
    Device,
    SeqLen,
    known_one,
    seq_len_of,
    texts,
    training_of,
)
from weft.cli.home import home_of
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.compose.stacks.latents import LatentConfig


class Kind(StrEnum):
    same = "same"
    prev = "prev"


def loop(
    context: typer.Context,
    member: Annotated[str, typer.Argument(help="Name of a member, or its folder.", show_default=False)],
    data: Annotated[
        list[str],
        typer.Option(
            help="Files of text to train on, folders or globs; may be repeated. A tenth is not trained on: its losses "
            "are told.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Option(help="What the new member is called.", show_default=False)],
    kind: Annotated[
        Kind,
        typer.Option(
            help="What it reads in place of a token: same, what came out of it there; prev, what came out one token "
            "before (COCONUT)."
        ),
    ] = Kind.same,
    entropy: Annotated[
        float | None,
        typer.Option(
            help="Only in place of tokens after which it was unsure: its prediction had more nats of entropy. Default: "
            "of any.",
            min=0.0,
            max=32.0,
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = USUAL_STEPS,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=1e-9, max=10.0)] = USUAL_LR,
    batch_size: BatchSize = USUAL_BATCH,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(help="Of which samples are drawn, and what is replaced.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Train a member on what it wrote itself, and note that as a new member. Once stopped, it goes on."""
    from weft.compose.composed import begun, require_space
    from weft.compose.member import require_name
    from weft.compose.registry import Registry

    home, there = home_of(context), known_one(context, member)
    registry = Registry(home)
    if registry.place(require_name(name)).exists():
        raise ConfigError(
            f"{registry.place(name)}: exists; a member is never written over. Choose another --name, or remove it."
        )
    require_space(there.member)
    length = seq_len_of([there.member], seq_len)
    say_loading()
    from weft.compose.descent import windows
    from weft.compose.looping import Loop
    from weft.compose.member import Origin
    from weft.compose.shelf import Shelf
    from weft.compose.stacks.body import body
    from weft.compose.stacks.latents import reads_itself

    opened, clock = opened_of(there, home, device), SystemClock()
    text, on = texts(opened.trained.tokenizer, data, length), opened.space.embed.device
    work = Loop(opened.space, opened.body, _config(kind, entropy), training_of(steps, lr), batch_size, length, seed)
    shelf = Shelf(begun(home, name), clock)
    shelf.open(work.digest(text.digest))
    draw = windows(text.train, length, batch_size, seed)
    with Meter("looping", "steps", WorkLine(), clock, steps) as meter:
        vector = work.make(lambda number: draw(number).to(on), shelf, meter.add)
    made = body(opened.body.config, vector)
    origin = Origin(how="continued", of=(there.member.weights,), tokens=work.tokens, flops=work.flops)
    Part(name, opened, made, origin, _latents(kind)).write(registry.folder, opened.space)
    shelf.remove()
    typer.echo(str(registry.place(name)))
    dev = text.dev.to(on)
    before, after = (reads_itself(work.config, opened.space, each, dev, seed) for each in (opened.body, made))
    tell(f"alone: {before[0]:.3f} nats a token before, {after[0]:.3f} now")
    if entropy is not None and isnan(after[1]):
        tell(f"nowhere was it as unsure as {entropy:g} nats, so it read nothing that it wrote. Lower --entropy.")
    else:
        tell(f"where it reads what it wrote: {before[1]:.3f} before, {after[1]:.3f} now")
    tell(f"whether that helps a stack: weft compose align LOWER {name} --data TEXT --name NEW")


def _config(kind: Kind, entropy: float | None) -> "LatentConfig":
    from weft.compose.stacks.latents import EntropyConfig, LatentConfig, RandomConfig

    select = RandomConfig() if entropy is None else EntropyConfig(threshold=entropy)
    match kind:
        case Kind.same:
            return LatentConfig(kind="same", select=select)
        case Kind.prev:  # what came out before says nothing of a token that cannot be foreseen: half of them stay
            return LatentConfig(kind="prev", select=select, p0=0.05, p1=0.5)


def _latents(kind: Kind) -> Literal["same", "previous"]:
    match kind:
        case Kind.same:
            return "same"
        case Kind.prev:
            return "previous"
