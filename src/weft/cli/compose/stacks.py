"""`weft compose plan | align | select | export`: stacks of members, and what they have to be compared with.

weft compose select english python --data other.txt          how they go on each other
weft compose plan english python                             what aligning them takes, and what their controls take
weft compose align english python --data text.txt --name both
weft compose export both FOLDER                              one Hugging Face folder
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UNSET

from weft.cli.compose.opened import Opened, Part, opened_of
from weft.cli.compose.parts import (
    MOST_CHOSEN,
    USUAL_LR,
    AsJson,
    Device,
    HeldOut,
    Known,
    Members,
    ModelName,
    NewName,
    PeakRate,
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
from weft.cli.compose.ways import Asked
from weft.cli.home import home_of
from weft.cli.options import spread
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.dashboard import figures
from weft.errors import ConfigError
from weft.ids import Digest, several
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.compose.composed import Places
    from weft.compose.making import Made, Work
    from weft.compose.member import How, Member
    from weft.compose.space import Space
    from weft.compose.stacks.stack import Seam, Stack
    from weft.model.transformer import SectionModule


@spread
def plan(context: typer.Context, members: Members, asked: Asked) -> None:
    """Show what aligning members takes, what its controls take, and what is moved. No weights are read."""
    seams = asked.seams(context, len(members))
    told = [each.member for each in _stackable(context, members)]
    from weft.compose.stacks.body import unattached

    bodies = tuple(unattached(each.model) for each in told)
    work = _work(_shape(told[0]), bodies, asked, seams, (USUAL_LR, seq_len_of(told, asked.seq_len)))
    for line in _planned(work, told, asked.ways):
        typer.echo(line)


@spread
def align(
    context: typer.Context,
    members: Members,
    data: TrainedOn,
    name: NewName,
    asked: Asked,
    lr: PeakRate = USUAL_LR,
    seed: Annotated[int, typer.Option(help="Of which samples are drawn.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Put members one on the other, train them, and train their controls. What was stopped goes on by the same line."""
    home, seams = home_of(context), asked.seams(context, len(members))
    there, folder = _stackable(context, members), new_place(context, name)
    for each in there:
        if each.member.latents == "denoise":
            tell(f"{each.member.name} has seen all of a text. Here, in whatever is trained, no place sees a later one")
    say_loading()
    from weft.compose.composed import begun
    from weft.compose.descent import windows
    from weft.compose.making import best_of, make
    from weft.compose.shelf import Shelf
    from weft.wire import digest

    opened = [opened_of(each, home, device) for each in there]
    length = seq_len_of([each.member for each in there], asked.seq_len)
    space, bodies = opened[0].space, tuple(each.body for each in opened)
    work = _work(space, bodies, asked, seams, (lr, length))
    text, on, clock = texts(opened[0].trained.tokenizer, data, length), space.embed.device, SystemClock()
    best = best_of(work, text.dev.to(on))
    shelf = Shelf(begun(home, name), clock)
    shelf.open(work.digest(digest(f"{text.digest} {seed}".encode())))
    draw = windows(text.train, length, asked.batch_size, seed)
    with Meter("aligning", "steps", WorkLine(), clock, work.num_steps(best)) as meter:
        made = make(work, best, lambda number: draw(number).to(on), shelf, meter.add)
    _write(folder, work, opened, made, best, text.digest)
    shelf.remove()
    typer.echo(str(folder))
    tell(f"what it is worth beside its controls: weft compose evaluate {name} --data TEXT --monolith MEMBER")
    tell(f"to ask it: weft serve {name}")


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
    from weft.compose.member import require_causal

    home, there = home_of(context), _stackable(context, members)
    for one in there:
        require_causal(one.member)
    say_loading()
    from weft.compose.controls import ensemble
    from weft.compose.stacks.select import matrix, search
    from weft.compose.stacks.stack import Stack

    opened = [opened_of(each, home, device) for each in there]
    length = seq_len_of([each.member for each in there], seq_len)
    space, bodies = opened[0].space, {each.known.member.name: each.body for each in opened}
    text, _ = samples(opened[0].trained.tokenizer, data, length, MOST_CHOSEN)
    dev, test = halves(text, space.embed.device)
    pairs = matrix(space, bodies, dev)
    found = search(space, bodies, (dev, test), min(depth, len(bodies)), beam)
    models = {name: Stack(space, (each,)).logits for name, each in bodies.items()}
    together = [float(ensemble([models[name] for name in each.order], test).mean()) for each in found]
    if as_json:
        told = {
            "alone": dict(pairs.alone),
            "pairs": [
                {"lower": lower, "upper": upper, "scale": pair.alpha, "loss": pair.loss, "adds": pair.contribution}
                for (lower, upper), pair in pairs.pairs.items()
            ],
            "stacks": [
                {
                    "members": each.order,
                    "scales": each.alphas,
                    "dev": each.dev,
                    "test": float(each.test.mean()),
                    "ensemble": ensemble_loss,
                }
                for each, ensemble_loss in zip(found, together, strict=True)
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
    for each, ensemble_loss in zip(found, together, strict=True):
        scales = f", at scale {', '.join(f'{alpha:g}' for alpha in each.alphas)}" if each.alphas else ""
        beside = f"; asked together, alike: {ensemble_loss:.3f}" if each.alphas else ""
        typer.echo(f"{' > '.join(each.order)}: {float(each.test.mean()):.3f} on other text{scales}{beside}")
    tell(
        "scale: how large what goes in is, by an embedding. Beside something large what the upper member adds is small."
    )
    if (best := next((each for each in found if each.alphas), None)) is not None:
        scales = " ".join(f"--scale {alpha:g}" for alpha in best.alphas)
        line = f"weft compose align {' '.join(best.order)} --handover scaled {scales} --data TEXT --name NEW"
        tell(f"to train the best of them, and its controls: {line}")


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
    from weft.compose.member import require_causal

    found = known(context, given)
    require_one_space([each.member for each in found])
    require_causal(found[-1].member)
    for each in found:
        if each.member.model.first_windowed is not UNSET:
            raise ConfigError(
                f"{each.member.name}: its last layers see a window of the text and the others all of it, so none can "
                "stand in another place. Choose members whose layers are alike."
            )
    return found


def _work(
    space: "Space",
    bodies: "tuple[SectionModule, ...]",
    asked: Asked,
    seams: "tuple[Seam, ...]",
    tuned: tuple[float, int],
) -> "Work":
    """Return what is asked for, with a learning rate and so many tokens of a sample."""
    from weft.compose.making import Work

    lr, seq_len = tuned
    how = asked.trainings(len(bodies), training_of(asked.steps, lr))
    return Work(space, bodies, seams, how, asked.batch_size, seq_len, asked.grown)


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

    from weft.compose.member import flops_together
    from weft.cost.training import flops_per_token
    from weft.training.device import decoder

    plans, apart = work.plans(), flops_together(told)
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
        *(f"{f'by {how}':10} {work.flops_of(work.grown(how)):.3g} operations more" for how in work.growth),
    ]
    if apart is None:
        return [*lines, "monolith   what the members took is not known, so neither is how long to train one model"]
    config = structs.replace(told[0].model, num_layers=sum(each.model.num_layers for each in told))
    tokens = int((apart + work.flops) / flops_per_token(decoder(config), work.seq_len))
    return [
        *lines,
        f"monolith   one model with as much computing as members and stack, {apart + work.flops:.3g}: a run with "
        f"[model] num_layers = {config.num_layers} and [train] tokens = {tokens}, then `weft compose member`",
    ]


# --- what was made ---


def _write(folder: Path, work: "Work", opened: Sequence[Opened], made: "Made", best: int, text: Digest) -> None:
    """Write a composed model: members as they came, what was trained of them, and the controls."""
    from weft.compose.composed import GrownStack, Stacked, maps_of, write_composed
    from weft.compose.member import Origin

    stack, parts = _placed("stack", _told_as(work), work, opened, (work.stack, made.stack))
    identity, others = _placed("identity", "identity", work, opened, (work.stack, made.identity))
    base, names = opened[best].known.member, tuple(each.known.member.name for each in opened)
    num_tokens = work.continued(best).training.steps * work.batch_size * work.seq_len
    on = Origin(how="continued", of=(base.weights,), tokens=num_tokens, flops=work.flops)
    parts = [*parts, *others, Part("continued", opened[best], made.continued, on)]
    growth, maps = [], maps_of(stack, made.stack) | maps_of(identity, made.identity)
    for how, grown in made.grown.items():
        begun = work.grown(how)
        told_as: How = "copy" if how == "copy" else "depth up-scaling"
        places, others = _placed(how, told_as, work, [opened[0]] * len(opened), (begun, grown))
        parts, maps = [*parts, *others], maps | maps_of(places, grown)
        growth.append(GrownStack(how=how, stack=places, flops=work.flops_of(begun)))
    record = Stacked(
        name=folder.name,
        members=names,
        stack=stack,
        how=work.how,
        batch_size=work.batch_size,
        seq_len=work.seq_len,
        flops=work.flops,
        identity=identity,
        growth=tuple(growth),
        continued="continued",
        best=base.name,
        text=text,
    )

    def write_parts(partial: Path) -> None:
        for each in opened:
            shutil.copytree(each.known.folder, partial / each.known.member.name)
        for part in parts:
            part.write(partial, work.space)

    write_composed(folder, record, write_parts, maps)


def _placed(
    name: str, how: "How", work: "Work", bases: Sequence[Opened], stacks: "tuple[Stack, Stack]"
) -> "tuple[Places, list[Part]]":
    """Return where the members of a stack will lie, and those of them that are new.

    Args:
        name: that new ones begin with.
        how: it was trained, at last.
        bases: what stood in each place, or what its ends are of.
        stacks: with which bodies nothing is new, and what was made.
    """
    from weft.compose.composed import Places
    from weft.compose.making import changed
    from weft.compose.member import Origin

    before, made = stacks
    of = tuple(dict.fromkeys(each.known.member.weights for each in bases))
    members, parts = list[str](), list[Part]()
    for place, (base, is_new) in enumerate(zip(bases, changed(before, made), strict=True)):
        members.append(f"{name}.{place}" if is_new else base.known.member.name)
        if is_new:
            tokens, flops = work.taken(place, before)
            parts.append(
                Part(members[-1], base, made.bodies[place], Origin(how=how, of=of, tokens=tokens, flops=flops))
            )
    return Places(members=tuple(members), seams=made.seams, maps=name), parts


def _told_as(work: "Work") -> "How":
    """Return how the last training of a stack is called in a member's origins."""
    from weft.compose.stacks.align import ContinueConfig, JointConfig, OnewayConfig, StitchConfig
    from weft.compose.stacks.sauce import SauceConfig

    match work.how[-1]:
        case StitchConfig():
            return "stitch"
        case OnewayConfig():
            return "one-way"
        case SauceConfig():
            return "sauce"
        case JointConfig():
            return "joint"
        case ContinueConfig():
            return "continued"
