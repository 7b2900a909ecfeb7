"""`weft compose merge`: members that began alike become one model, whose router sends each token to a few of them.

weft compose merge english python --data text.txt --name one
weft serve one
"""

import shutil
from collections.abc import Sequence
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
    NewName,
    SeqLen,
    TrainedOn,
    known,
    new_place,
    seq_len_of,
    texts,
    training_of,
)
from weft.cli.home import home_of
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.ids import Digest
from weft.progress import Meter

if TYPE_CHECKING:
    from torch import Tensor

    from weft.compose.merging import Merge


class Thaw(StrEnum):
    router = "router"
    ends = "ends"
    attention = "attention"
    all = "all"


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
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=1e-9, max=10.0)] = USUAL_LR,
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
