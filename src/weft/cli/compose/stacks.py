"""`weft compose plan | align | select | export`: stacks of members, and what they have to be compared with.

weft compose select english python --data other.txt          how they go on each other
weft compose plan english python                             what aligning them takes, and what their controls take
weft compose align english python --data text.txt --name both
weft compose export both FOLDER                              one Hugging Face folder
"""

import json
import shutil
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UNSET

from weft.cli.compose.opened import Opened, Part, opened_of
from weft.cli.compose.parts import (
    MOST_CHOSEN,
    USUAL_BATCH,
    USUAL_LR,
    USUAL_STEPS,
    AsJson,
    BatchSize,
    Device,
    HeldOut,
    Known,
    Members,
    ModelName,
    NewName,
    SeqLen,
    TrainedOn,
    halves,
    known,
    new_place,
    reader,
    samples,
    seq_len_of,
    texts,
    training_of,
)
from weft.cli.home import home_of
from weft.cli.settings import refuse_idle
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.dashboard import figures
from weft.errors import ConfigError
from weft.ids import Digest, several
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.compose.descent import DescentConfig
    from weft.compose.making import How, Made, Work
    from weft.compose.member import Member
    from weft.compose.space import Space
    from weft.compose.stacks.stack import Seam
    from weft.model.transformer import SectionModule


class Way(StrEnum):
    stitch = "stitch"
    one_way = "one-way"
    sauce = "sauce"
    joint = "joint"


class Handover(StrEnum):
    post = "post"
    pre = "pre"
    scaled = "scaled"


Ways = Annotated[
    list[Way] | None,
    typer.Option(
        "--how",
        help="one-way: who reads is trained. sauce: who writes. stitch: a map between them. joint: all at once. "
        "Several are done one after the other. [default: one-way]",
        show_default=False,
    ),
]
Between = Annotated[
    Handover | None,
    typer.Option(
        "--handover",
        help="What the next member reads: post, at the scale of an embedding; pre, as it is; scaled, by --scale. "
        "[default: pre for joint alone, else post]",
        show_default=False,
    ),
]
Scale = Annotated[float, typer.Option(help="Of --handover scaled.", min=1e-3, max=1e4)]
Steps = Annotated[int, typer.Option(help="Training steps of each way.", min=1)]


def plan(
    context: typer.Context,
    members: Members,
    how: Ways = None,
    handover: Between = None,
    scale: Scale = 1.0,
    steps: Steps = USUAL_STEPS,
    batch_size: BatchSize = USUAL_BATCH,
    seq_len: SeqLen = None,
) -> None:
    """Show what aligning members takes, what its controls take, and what is moved. No weights are read."""
    ways = _ways(how)
    seam = _seam(context, ways, handover, scale)
    told = [each.member for each in _stackable(context, members)]
    from weft.compose.stacks.body import unattached

    bodies = tuple(unattached(each.model) for each in told)
    length = seq_len_of(told, seq_len)
    work = _work(_shape(told[0]), bodies, seam, ways, training_of(steps, USUAL_LR), batch_size, length)
    for line in _planned(work, told, ways):
        typer.echo(line)


def align(
    context: typer.Context,
    members: Members,
    data: TrainedOn,
    name: NewName,
    how: Ways = None,
    handover: Between = None,
    scale: Scale = 1.0,
    steps: Steps = USUAL_STEPS,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=1e-9, max=10.0)] = USUAL_LR,
    batch_size: BatchSize = USUAL_BATCH,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(help="Of which samples are drawn.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Put members one on the other, train them, and train their controls. What was stopped goes on by the same line."""
    ways, home = _ways(how), home_of(context)
    seam = _seam(context, ways, handover, scale)
    there, folder = _stackable(context, members), new_place(context, name)
    say_loading()
    from weft.compose.composed import begun
    from weft.compose.descent import windows
    from weft.compose.making import best_of, make
    from weft.compose.shelf import Shelf
    from weft.wire import digest

    opened = [opened_of(each, home, device) for each in there]
    length = seq_len_of([each.member for each in there], seq_len)
    space, bodies = opened[0].space, tuple(each.body for each in opened)
    work = _work(space, bodies, seam, ways, training_of(steps, lr), batch_size, length)
    text, on, clock = texts(opened[0].trained.tokenizer, data, length), space.embed.device, SystemClock()
    best = best_of(work, text.dev.to(on))
    shelf = Shelf(begun(home, name), clock)
    shelf.open(work.digest(digest(f"{text.digest} {seed}".encode())))
    draw = windows(text.train, length, batch_size, seed)
    with Meter("aligning", "steps", WorkLine(), clock, work.num_steps(best)) as meter:
        made = make(work, best, lambda number: draw(number).to(on), shelf, meter.add)
    _write(folder, work, opened, made, best, text.digest)
    shelf.remove()
    typer.echo(str(folder))
    tell(f"what it is worth beside its controls: weft compose evaluate {name} --data TEXT --monolith MEMBER")


def select(
    context: typer.Context,
    members: Members,
    data: HeldOut,
    depth: Annotated[int, typer.Option(help="Members of a stack at most.", min=1, max=64)] = 2,
    beam: Annotated[int, typer.Option(help="Stacks of each depth that grow.", min=1, max=64)] = 4,
    seq_len: SeqLen = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show how every two members go on each other, and the best stacks of them. Nothing is trained."""
    home, there = home_of(context), _stackable(context, members)
    say_loading()
    from weft.compose.stacks.select import matrix, search

    opened = [opened_of(each, home, device) for each in there]
    length = seq_len_of([each.member for each in there], seq_len)
    space, bodies = opened[0].space, {each.known.member.name: each.body for each in opened}
    text, _ = samples(opened[0].trained.tokenizer, data, length, MOST_CHOSEN)
    dev, test = halves(text, space.embed.device)
    pairs = matrix(space, bodies, dev)
    found = search(space, bodies, (dev, test), min(depth, len(bodies)), beam)
    if as_json:
        told = {
            "alone": dict(pairs.alone),
            "pairs": [
                {"lower": lower, "upper": upper, "scale": pair.alpha, "loss": pair.loss, "adds": pair.contribution}
                for (lower, upper), pair in pairs.pairs.items()
            ],
            "stacks": [
                {"members": each.order, "scales": each.alphas, "dev": each.dev, "test": float(each.test.mean())}
                for each in found
            ],
        }
        typer.echo(json.dumps(told))
        return
    width = max(map(len, bodies))
    for name, loss in pairs.alone.items():
        typer.echo(f"{name:{width}} alone {'':{width}}  {loss:.3f} nats a token")
    for (lower, upper), pair in pairs.pairs.items():
        line = f"{upper:{width}} on    {lower:{width}}  {pair.loss:.3f}, adds {pair.contribution:+.3f}"
        typer.echo(f"{line}, at scale {pair.alpha:g}")
    for each in found:
        scales = f", at scale {', '.join(f'{alpha:g}' for alpha in each.alphas)}" if each.alphas else ""
        typer.echo(f"{' > '.join(each.order)}: {float(each.test.mean()):.3f} on other text{scales}")
    tell(
        "scale: how large what goes in is, by an embedding. Beside something large what the upper member adds is small."
    )
    tell("weft compose align trains them, and their controls")


def export(
    context: typer.Context,
    model: ModelName,
    target: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
) -> None:
    """Write a mixture, or a stack with the handover pre, as one Hugging Face folder."""
    from weft.compose.composed import Merged, Stacked, find_composed, read_composed
    from weft.model.weights import whole_folder

    home = home_of(context)
    folder = find_composed(model, home)
    told = read_composed(folder)
    if isinstance(told, Merged):
        with whole_folder(target, last="config.json") as partial:
            shutil.copytree(folder / told.mixture, partial, dirs_exist_ok=True)
        typer.echo(str(target))
        tell(f"one model of the family mixtral: weft serve {target}")
        return
    if not isinstance(told, Stacked):
        raise ConfigError(f"{told.name} is several models that are asked together, no single one: weft serve {model}")
    say_loading()
    from weft.cli.model.trained import Trained, open_words
    from weft.compose.composed import read_stack
    from weft.compose.stacks.stack import whole

    config, vector = whole(read_stack(folder, told.stack, reader(home, "cpu")))
    first = folder / told.members[0]
    tokenizer, came_with = open_words(str(first), home)
    trained = Trained(first, config, vector, tokenizer, None, came_with=came_with)
    with Meter("writing", "B", WorkLine(), SystemClock(), 4 * vector.numel()) as meter:
        trained.export(target, "float32", meter.add)
    typer.echo(str(target))
    tell(f"one decoder of {several(config.num_layers, 'layer')}: weft serve {target}")


# --- what was asked for ---


def _stackable(context: typer.Context, given: Sequence[str]) -> list[Known]:
    from weft.compose.composed import require_one_space

    found = known(context, given)
    require_one_space([each.member for each in found])
    for each in found:
        if each.member.model.first_windowed is not UNSET:
            raise ConfigError(
                f"{each.member.name}: its last layers see a window of the text and the others all of it, so none can "
                "stand in another place. Choose members whose layers are alike."
            )
    return found


def _ways(how: list[Way] | None) -> "list[How]":
    return [each.value for each in how or [Way.one_way]]


def _seam(context: typer.Context, ways: "list[How]", handover: Handover | None, scale: float) -> "Seam":
    from weft.compose.making import require_ways, usual_seam
    from weft.compose.stacks.stack import PostConfig, PreConfig, ScaledConfig, Seam

    if handover is not Handover.scaled:
        refuse_idle(context, "only --handover scaled has a scale", "scale")
    match handover:
        case None:
            seam = usual_seam(ways)
        case Handover.post:
            seam = Seam(handover=PostConfig())
        case Handover.pre:
            seam = Seam(handover=PreConfig())
        case Handover.scaled:
            seam = Seam(handover=ScaledConfig(alpha=scale))
    require_ways(ways, seam)
    return seam


def _work(
    space: "Space",
    bodies: "tuple[SectionModule, ...]",
    seam: "Seam",
    ways: "list[How]",
    training: "DescentConfig",
    batch_size: int,
    seq_len: int,
) -> "Work":
    from weft.compose.making import Work, ways_of

    num = len(bodies)
    return Work(space, bodies, (seam,) * (num - 1), ways_of(ways, num, training), batch_size, seq_len)


def _shape(member: "Member") -> "Space":
    """Return a space of a member's size without memory: enough to say what something takes."""
    import torch

    from weft.compose.space import Space

    config = member.model
    with torch.device("meta"):
        table = torch.empty(config.vocab_size, config.width)
        return Space(table, torch.empty(config.width), table, config.norm_eps, member.tokenizer)


def _planned(work: "Work", told: "Sequence[Member]", ways: Sequence[str]) -> list[str]:
    from msgspec import structs

    from weft.cost.training import flops_per_token
    from weft.training.device import decoder

    plans, apart = work.plans(), [each.flops for each in told]
    received, latents = max(each.received_nbytes for each in plans), sum(each.latents_nbytes for each in plans)
    lines = [
        f"{' > '.join(each.name for each in told)}, {', then '.join(ways)}: {several(len(plans), 'training')} of "
        f"{several(plans[0].num_steps, 'step')}, {figures.amount(plans[0].num_tokens)} tokens each",
        f"trained    {figures.amount(max(each.num_trained for each in plans))} parameters at a time",
        f"fetched    {figures.nbytes(received)}, the others' weights, once; what they would write for each other is "
        f"{figures.nbytes(latents)}",
        f"computed   {work.flops:.3g} operations",
        "controls   as much for layers that change nothing, in place of the upper members; as much for the best single "
        f"member, trained on ({several(work.continued(0).training.steps, 'step')} if it is {told[0].name})",
    ]
    if not all(apart):
        return [*lines, "monolith   what the members took is not known, so neither is how long to train one model"]
    config = structs.replace(told[0].model, num_layers=sum(each.model.num_layers for each in told))
    tokens = int((sum(apart) + work.flops) / flops_per_token(decoder(config), work.seq_len))
    return [
        *lines,
        f"monolith   one model with as much computing as members and stack, {sum(apart) + work.flops:.3g}: a run with "
        f"[model] num_layers = {config.num_layers} and [train] tokens = {tokens}, then `weft compose member`",
    ]


# --- what was made ---


def _write(folder: Path, work: "Work", opened: Sequence[Opened], made: "Made", best: int, text: Digest) -> None:
    """Write a composed model: members as they came, what was trained of them, and the controls."""
    from weft.compose.composed import Places, Stacked, maps_of, write_composed
    from weft.compose.making import changed
    from weft.compose.member import Origin

    names = tuple(each.known.member.name for each in opened)
    of = tuple(each.known.member.weights for each in opened)

    def told(name: str, how: str) -> "tuple[Places, list[Part]]":
        stack = made.stack if name == "stack" else made.identity

        def origin(place: int) -> Origin:
            tokens, flops = work.taken(place)
            return Origin(how=how, of=of, tokens=tokens, flops=flops)  # type: ignore[arg-type]  # one of `How`

        is_new = changed(work.stack, stack)
        parts = [
            Part(f"{name}.{place}", opened[place], stack.bodies[place], origin(place))
            for place in range(len(names))
            if is_new[place]
        ]
        members = tuple(f"{name}.{place}" if new else names[place] for place, new in enumerate(is_new))
        return Places(members=members, seams=stack.seams, maps=name), parts

    stack, parts = told("stack", _told_as(work))
    identity, others = told("identity", "identity")
    num_tokens = work.continued(best).training.steps * work.batch_size * work.seq_len
    on = Origin(how="continued", of=(of[best],), tokens=num_tokens, flops=work.flops)
    parts = [*parts, *others, Part("continued", opened[best], made.continued, on)]
    record = Stacked(
        name=folder.name,
        members=names,
        stack=stack,
        how=work.how,
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        flops=work.flops,
        identity=identity,
        continued="continued",
        best=names[best],
        text=text,
    )

    def write_parts(partial: Path) -> None:
        for each in opened:
            shutil.copytree(each.known.folder, partial / each.known.member.name)
        for part in parts:
            part.write(partial, work.space)

    write_composed(folder, record, write_parts, maps_of(stack, made.stack) | maps_of(identity, made.identity))


def _told_as(work: "Work") -> str:
    """Return how the last training of a stack is called in a member's origins."""
    told = str(type(work.how[-1]).__struct_config__.tag)
    return {"oneway": "one-way"}.get(told, told)
