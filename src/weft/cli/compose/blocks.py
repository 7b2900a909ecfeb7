"""`weft compose block | blocks`: blocks that are trained alone, each to denoise its part of the noise levels, and what
they are worth one after the other.

weft compose block english 0 --of 4 --data text.txt --name b0     elsewhere: 1, 2 and 3, with the same space
weft compose blocks b0 b1 b2 b3 --data other.txt
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.compose.opened import Asked, begun_from, opened_of, pupil_of
from weft.cli.compose.parts import (
    MOST_CHOSEN,
    USUAL_BATCH,
    USUAL_LR,
    USUAL_STEPS,
    AsJson,
    BatchSize,
    Device,
    HeldOut,
    Members,
    NewMember,
    OneMember,
    PeakRate,
    SeqLen,
    Steps,
    TaughtOn,
    beside_first,
    known,
    known_one,
    require_one_tokenizer,
    samples,
    seq_len_of,
)
from weft.cli.home import home_of
from weft.cli.terminal import say_loading, tell
from weft.errors import ConfigError
from weft.ids import several

if TYPE_CHECKING:
    from weft.cli.compose.opened import Opened
    from weft.compose.blocking import Losses, Told
    from weft.compose.blocks.block import DenoisingBlock


def block(
    context: typer.Context,
    member: OneMember,
    number: Annotated[int, typer.Argument(help="Which part of the noise is its own; 0: the most.", min=0)],
    of: Annotated[int, typer.Option(help="Blocks there will be.", min=1, max=64, show_default=False)],
    data: TaughtOn,
    name: NewMember,
    low: Annotated[
        float, typer.Option(help="The least noise, in lengths of a row of the space.", min=1e-3, max=1e3)
    ] = 1.0,
    high: Annotated[float, typer.Option(help="The most, likewise.", min=1e-3, max=1e3)] = 10.0,
    steps: Steps = USUAL_STEPS,
    lr: PeakRate = USUAL_LR,
    batch_size: BatchSize = USUAL_BATCH,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(help="Of which samples are drawn, and of noise.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Train a block alone, to tell the next token by its noisy row, and note it as a new member."""
    from weft.compose.member import require_causal

    home, there = home_of(context), begun_from(context, member, name)
    require_causal(there.member)
    if number >= of:
        raise ConfigError(f"block {number} --of {of}: blocks are numbered from 0 to {of - 1}.")
    seq_len_of([there.member], seq_len)
    say_loading()
    from weft.compose.blocking import Blocking, decoder_of
    from weft.compose.blocks.kept import write_block
    from weft.compose.blocks.noise import NoiseConfig

    asked = Asked(name, data, steps, lr, batch_size, seq_len, seed, device)
    noise = NoiseConfig(low=low, high=high)
    pupil = pupil_of(home, there, asked, partial(Blocking, noise=noise, place=(number, of)))
    work, flat = pupil.lesson, pupil.lesson.block(pupil.train("training the block"))
    before, after = (work.told(each, pupil.dev) for each in (work.block(), flat))
    pupil.note(home, decoder_of(flat.block), "noise", partial(write_block, flat))
    tell(f"block {number} of {of}, at its own noise: {before:.3f} nats a token before, {after:.3f} now")
    tell(
        "what all blocks are worth, one after the other: weft compose blocks "
        + " ".join(name if at == number else f"BLOCK{at}" for at in range(of))
        + " --data TEXT"
    )


def blocks(
    context: typer.Context,
    members: Members,
    data: HeldOut,
    draws: Annotated[int, typer.Option(help="Of noise, over which a token's likelihood is the mean.", min=1)] = 8,
    num: Annotated[int, typer.Option("--samples", help="Of text that are read; 0: all.", min=0)] = MOST_CHOSEN,
    monolith: Annotated[
        str | None, typer.Option(help="A member that was trained whole, to stand beside them.", metavar="MEMBER")
    ] = None,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(help="Of the noise.", min=0)] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the loss of blocks, one after the other, beside each alone. Nothing is trained."""
    from weft.compose.composed import require_one_space, require_space

    home, there = home_of(context), known(context, members)
    found = [each.member for each in there]
    require_space(found[0])
    require_one_space(found)
    for each in found:
        if each.latents != "noise":
            raise ConfigError(f"{each.name} is no block. `weft compose block {each.name} ...` makes one of it.")
    whole = None if monolith is None else known_one(context, monolith)
    if whole is not None:
        from weft.compose.member import require_causal

        require_causal(whole.member)
        require_one_tokenizer(home, [there[0], whole])
    length = seq_len_of([*found, *([] if whole is None else [whole.member])], seq_len)
    say_loading()
    from weft.cli.model.trained import open_trained, place
    from weft.compose.blocking import told
    from weft.compose.controls import losses
    from weft.model.flat import assemble

    opened = [opened_of(each, home, device) for each in there]
    text, _ = samples(opened[0].trained.tokenizer, data, length, num)
    text = text.to(opened[0].space.embed.device)
    ordered = sorted((_block_of(each) for each in opened), key=lambda each: each[1].number)
    names = [name for name, _ in ordered]
    rows = _rows(names, told([each for _, each in ordered], text, seed, draws), draws)
    if whole is not None:
        trained = open_trained(str(whole.folder), home)
        model = assemble(trained.config, trained.vector.to(place(device)))
        rows.append((f"{whole.member.name}, trained whole", losses(model, text)))
    if as_json:
        typer.echo(json.dumps({name: float(each.double().mean()) for name, each in rows}))
        return
    for line in beside_first(rows, "the blocks are"):
        typer.echo(line)
    if whole is None:
        tell("no model that was trained whole was named (--monolith), and that one is what blocks are held against")


def _block_of(opened: "Opened") -> "tuple[str, DenoisingBlock]":
    from weft.compose.blocks.kept import read_block
    from weft.compose.stacks.body import vector_of

    member = opened.known.member
    flat = read_block(opened.known.folder, opened.body.config, member.weights, opened.space, vector_of(opened.body))
    return member.name, flat.block


def _rows(names: Sequence[str], found: "Told", draws: int) -> "list[tuple[str, Losses]]":
    """Return what is told: what it is, and its losses. The first is what all others are held against."""
    return [
        (f"{' > '.join(names)}, by {several(draws, 'draw')} of noise", found.blocks),
        *([("the same by one draw", found.draw)] if draws > 1 else []),
        *((f"by one draw, after {name}", each) for name, each in zip(names, found.exits, strict=False)),
        *((f"{name} alone, its layers as a decoder", each) for name, each in zip(names, found.alone, strict=True)),
        ("these asked together, alike", found.ensemble),
    ]
