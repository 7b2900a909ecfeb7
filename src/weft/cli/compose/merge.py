"""`weft compose merge | leave`: members that began alike become one model, whose router sends each token to a few of
them; and one leaves it again, with its networks, its rows of the router, and its control.

weft compose merge english python web --data text.txt --name one
weft serve one
weft compose leave one python --name others
weft compose remove one
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.compose.opened import Single
from weft.cli.compose.parts import (
    USUAL_BATCH,
    USUAL_LR,
    USUAL_STEPS,
    BatchSize,
    Device,
    Known,
    Members,
    ModelName,
    NewName,
    PeakRate,
    SeqLen,
    TrainedOn,
    known,
    new_place,
    seq_len_of,
    texts,
    training_of,
)
from weft.cli.home import home_of
from weft.cli.settings import refuse_idle
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.ids import Digest
from weft.progress import Meter

if TYPE_CHECKING:
    from torch import Tensor

    from weft.compose.composed import Composed, Merged
    from weft.compose.member import Member
    from weft.compose.merging import Merge
    from weft.compose.shelf import Shelf


class Thaw(StrEnum):
    router = "router"
    ends = "ends"
    attention = "attention"
    all = "all"


# --- made ---


def merge(
    context: typer.Context,
    members: Members,
    data: TrainedOn,
    name: NewName,
    top: Annotated[
        int, typer.Option(help="By so many members each token is computed; of one a router would learn nothing.", min=2)
    ] = 2,
    thaw: Annotated[
        Thaw,
        typer.Option(
            help="What is trained, stage by stage: the router; then embedding and head, too; then attention; then all."
        ),
    ] = Thaw.router,
    steps: Annotated[int, typer.Option(help="Training steps of each stage.", min=1)] = USUAL_STEPS,
    lr: PeakRate = USUAL_LR,
    batch_size: BatchSize = USUAL_BATCH,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(help="Of the router's first weights, and of what samples are drawn.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Merge members to one model with a router, and train it a little; and its control. Once stopped, it goes on."""
    from weft.compose.member import require_one_parent

    home, there, folder = home_of(context), known(context, members), new_place(context, name)
    require_one_parent([each.member for each in there])
    if top > len(there):
        raise ConfigError(f"--top {top} of {len(there)} members. Choose fewer.")
    say_loading()
    from msgspec import structs

    from weft.cli.model.trained import open_trained, place
    from weft.compose.composed import begun
    from weft.compose.controls import losses
    from weft.compose.descent import windows
    from weft.compose.experts.mixtral import mixtral_config
    from weft.compose.experts.mixture import STAGES, mix
    from weft.compose.experts.soup import Ingredient
    from weft.compose.merging import Merge
    from weft.compose.shelf import Shelf
    from weft.model.flat import assemble
    from weft.sync.method.choices import AdamWConfig
    from weft.wire import digest

    opened = [open_trained(str(each.folder), home) for each in there]
    model, parent, on = there[0].member.model, there[0].member.parent, place(device)
    assert parent is not None  # as members of one beginning have
    length, clock = seq_len_of([each.member for each in there], seq_len), SystemClock()
    text = texts(opened[0].tokenizer, data, length)
    alone = [float(losses(assemble(model, each.vector.to(on)), text.dev.to(on)).mean()) for each in opened]
    best = alone.index(min(alone))
    experts = [Ingredient(each.member.name, it.vector, parent) for each, it in zip(there, opened, strict=True)]
    config, vector = mix(model, experts, seed, top)
    mixtral_config(config, dtype="float32", stop_id=None)  # what cannot be written is said before it is trained
    work = Merge(
        config,
        vector.to(on),
        opened[best].vector.to(on),
        STAGES[: STAGES.index(thaw.value) + 1],
        structs.replace(training_of(steps, lr), optimizer=AdamWConfig(weight_decay=0.0)),
        batch_size,
        length,
    )
    shelf = Shelf(begun(home, name), clock)
    shelf.open(work.digest(digest(f"{text.digest} {seed}".encode())))
    draw = windows(text.train, length, batch_size, seed)
    with Meter("merging", "steps", WorkLine(), clock, work.num_steps) as meter:
        mixed, continued = work.make(lambda number: draw(number).to(on), shelf, meter.add)
    _write(folder, there, work, mixed, Single(opened[best], there[best].member, continued), text.digest)
    shelf.remove()
    typer.echo(str(folder))
    tell(f"what it is worth beside its controls: weft compose evaluate {name} --data TEXT --monolith MEMBER")
    tell(f"to ask it: weft serve {name}")


def _write(folder: Path, there: Sequence[Known], work: "Merge", mixed: "Tensor", single: Single, text: Digest) -> None:
    from weft.compose.composed import Merged, write_composed
    from weft.compose.experts.mixtral import write_mixture
    from weft.compose.member import Origin

    before = single.member
    record = Merged(
        name=folder.name,
        members=tuple(each.member.name for each in there),
        top=work.config.top_k,
        thawed=work.stages,
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        flops=work.flops,
        best=before.name,
        text=text,
    )
    tokens = work.continued.steps * work.batch_size * work.seq_len
    origin = Origin(how="continued", of=(before.weights,), tokens=tokens, flops=work.flops)

    def write_parts(inner: Path) -> None:
        for each in there:
            shutil.copytree(each.folder, inner / each.member.name)
        single.write(inner, record.continued, origin)
        words, came_with = single.base.tokenizer, single.base.came_with
        write_mixture(
            inner / record.mixture, work.config, mixed, words.to_json(), stop_id=words.end_of_text, came_with=came_with
        )

    write_composed(folder, record, write_parts)


# --- left ---


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
