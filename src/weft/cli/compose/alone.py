"""`weft compose loop | think | denoise | below`: what a member learns alone, before it ever meets another.

weft compose loop python --data text.txt --name looped          to read what it writes
weft compose align english looped --data text.txt --name both --how joint --handover post
weft compose think python --data problems.jsonl --name thinker  to think in what it writes
weft compose denoise python --data text.txt --name filler       to see all of a text, and tell what is masked
weft compose below filler english --data other.txt              what that is worth below a causal member
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.compose.opened import Asked, Part, begun_from, opened_of, pupil_of
from weft.cli.compose.parts import (
    USUAL_BATCH,
    USUAL_LR,
    USUAL_STEPS,
    AsJson,
    BatchSize,
    Device,
    HeldOut,
    NewMember,
    OneMember,
    PeakRate,
    SeqLen,
    Steps,
    TaughtOn,
    beside_first,
    known,
    samples,
    seq_len_of,
)
from weft.cli.home import home_of
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.ids import several
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.compose.stacks.latents import LatentConfig
    from weft.compose.stacks.thoughts import Answered, Curriculum, Thought
    from weft.compose.thinking import Filling, Thinking

TEST_SHARE = 10  # of texts, one is not trained on: by it answers are told
LEAST = 4
_NAMES: "dict[Filling, str]" = {
    "thoughts": "its thoughts",
    "pauses": "a pause for each",
    "nothing": "nothing in their place",
}


class Kind(StrEnum):
    same = "same"
    prev = "prev"


class Masking(StrEnum):
    spans = "spans"
    bert = "bert"


# --- to read what it writes ---


def loop(
    context: typer.Context,
    member: OneMember,
    data: TaughtOn,
    name: NewMember,
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
    steps: Steps = USUAL_STEPS,
    lr: PeakRate = USUAL_LR,
    batch_size: BatchSize = USUAL_BATCH,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(help="Of which samples are drawn, and what is replaced.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Train a member on what it wrote itself, and note that as a new member. Once stopped, it goes on."""
    from weft.compose.member import require_causal

    home, there = home_of(context), begun_from(context, member, name)
    require_causal(there.member)
    seq_len_of([there.member], seq_len)
    say_loading()
    from weft.compose.looping import Loop
    from weft.compose.stacks.body import body
    from weft.compose.stacks.latents import reads_itself

    asked = Asked(name, data, steps, lr, batch_size, seq_len, seed, device)
    pupil = pupil_of(home, there, asked, partial(Loop, config=_config(kind, entropy)))
    opened, config, dev = pupil.opened, pupil.lesson.config, pupil.dev
    before = reads_itself(config, opened.space, opened.body, dev, seed)
    if entropy is not None and isnan(before[1]):
        raise ConfigError(
            f"--entropy {entropy:g}: nowhere in text that is held out is {there.member.name} as unsure as that, so it "
            "would read nothing that it wrote. Lower it."
        )
    made = body(opened.body.config, pupil.train("looping"))
    after = reads_itself(config, opened.space, made, dev, seed)
    pupil.note(home, made, _latents(kind))
    tell(f"alone: {before[0]:.3f} nats a token before, {after[0]:.3f} now")
    if isnan(after[1]):
        why = "" if entropy is None else f": nowhere is it as unsure as {entropy:g} nats"
        tell(f"in text that is held out it reads nothing that it wrote{why}")
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


# --- to think in it ---


def think(
    context: typer.Context,
    member: OneMember,
    data: Annotated[
        list[str],
        typer.Option(
            help='JSON lines of {"question": "...", "steps": ["...", "..."], "answer": "..."}: files, folders or '
            "globs; may be repeated. A tenth is not trained on: how it is answered is told.",
            show_default=False,
        ),
    ],
    name: NewMember,
    latents: Annotated[int, typer.Option(help="Thoughts in place of each step.", min=1, max=64)] = 2,
    stages: Annotated[
        int,
        typer.Option(
            help="With thoughts: in each one step more is left out. After them comes one without any steps.",
            min=1,
            max=64,
        ),
    ] = 3,
    epochs: Annotated[int, typer.Option(help="Of each stage: so often it reads all texts.", min=1, max=10**4)] = 3,
    lr: Annotated[float, typer.Option(help="Learning rate.", min=1e-9, max=10.0)] = 1e-4,
    batch_size: BatchSize = USUAL_BATCH,
    seed: Annotated[int, typer.Option(help="Of the order in which texts are read.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Train a member to think in latents, stage after stage, and two controls alike. Once stopped, it goes on."""
    from weft.compose.composed import begun
    from weft.compose.member import require_causal
    from weft.compose.registry import Registry

    home, there = home_of(context), begun_from(context, member, name)
    registry = Registry(home)
    require_causal(there.member)
    say_loading()
    from weft.compose.member import Origin
    from weft.compose.shelf import Shelf
    from weft.compose.stacks.body import body, vector_of
    from weft.compose.stacks.thoughts import Curriculum
    from weft.compose.thinking import CONTROLS, Thinking, marks_of, texts_of

    opened, clock = opened_of(there, home, device), SystemClock()
    tokenizer = opened.trained.tokenizer
    curriculum = Curriculum(latents_per_step=latents, num_stages=stages, epochs_per_stage=epochs)
    marks = marks_of(tokenizer)
    train, test = _split(texts_of(data, Path.cwd(), tokenizer), curriculum, there.member.model.max_seq_len)
    work = Thinking(opened.space, opened.body, train, marks, curriculum, lr, batch_size, seed)
    shelf = Shelf(begun(home, name), clock)
    shelf.open(work.digest())
    fillings: tuple[Filling, ...] = ("thoughts", *CONTROLS)
    with Meter("thinking", "steps", WorkLine(), clock, len(fillings) * work.num_steps) as meter:
        made = {filling: work.make(filling, shelf, meter.add) for filling in fillings}
    before = work.told(vector_of(opened.body), "nothing", test)
    without = work.told(made["thoughts"], "nothing", test)
    lines = _told(work, before, without, {filling: work.told(made[filling], filling, test) for filling in made})
    origin = Origin(
        how="continued", of=(there.member.weights,), tokens=work.read("thoughts"), flops=work.flops("thoughts")
    )
    trained = body(opened.body.config, made["thoughts"])
    Part(name, opened, trained, origin, "previous").write(registry.folder, opened.space)
    shelf.remove()  # nothing else has the controls: by now their answers are told
    typer.echo(str(registry.place(name)))
    for line in lines:
        tell(line)


def _split(texts: "Sequence[Thought]", curriculum: "Curriculum", most: int) -> "tuple[list[Thought], list[Thought]]":
    """Return texts to train on, and every tenth, by which answers are told: of other questions. Those that are too long
    are left out.

    Raises:
        ConfigError: too few are left.
    """
    from weft.compose.thinking import longest

    short = [each for each in texts if longest(curriculum, each) <= most]
    left = f"; {several(len(texts) - len(short), 'text')} longer than the {most:,} tokens that the member reads"
    if len(short) < LEAST:
        raise ConfigError(
            f"--data: {several(len(short), 'text')} to train on and to be asked"
            f"{left if len(short) < len(texts) else ''}. Give {LEAST} or more."
        )
    if len(short) < len(texts):
        tell(f"left out{left[1:]}")
    every = min(TEST_SHARE, len(short) // 2)
    test = short[every - 1 :: every]
    asked = {tuple(each.question) for each in test}
    train = [each for each in short if tuple(each.question) not in asked]
    if again := len(short) - len(test) - len(train):
        tell(f"not trained on, since their questions are asked at the end: {several(again, 'other text')}")
    if not train:
        raise ConfigError("--data: all texts have the questions that are asked at the end. Give others to train on.")
    return train, test


def _told(work: "Thinking", before: "Answered", without: "Answered", found: "dict[Filling, Answered]") -> list[str]:
    from weft.compose.controls import paired, verdict

    def line(name: str, each: "Answered") -> str:
        share, loss = float(each.are_right.double().mean()), float(each.losses.mean())
        return f"  {name:45} {share:6.1%} right  {loss:.3f} nats a token"

    mine = found["thoughts"]
    lines = [
        f"{several(len(mine.losses), 'answer')} to questions that nobody trained on, no steps written out:",
        line("with its thoughts", mine),
        line("the same, its thoughts left out", without),
        line("before any of it", before),
    ]
    for filling, each in found.items():
        if filling == "thoughts":
            continue
        away, error = paired(mine.losses, each.losses)
        more = work.flops("thoughts") / work.flops(filling)
        lines.append(line(f"trained alike with {_NAMES[filling]}", each))
        than = f"{verdict(mine.losses, each.losses)}: {away:+.3f} ± {error:.3f}"
        lines.append(f"    thoughts are {than}, and took {more:.1f} times the computing")
    return lines


# --- to tell what is masked ---


def denoise(
    context: typer.Context,
    member: OneMember,
    data: TaughtOn,
    name: NewMember,
    masks: Annotated[
        Masking, typer.Option(help="What is left out: spans of seven kinds (UL2), or single tokens (bert).")
    ] = Masking.spans,
    steps: Steps = USUAL_STEPS,
    lr: PeakRate = USUAL_LR,
    batch_size: BatchSize = USUAL_BATCH,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(help="Of which samples are drawn, and what is masked.", min=0)] = 0,
    device: Device = "auto",
) -> None:
    """Train a member to see all of a text and tell what is masked in it, and note that as a new member."""
    home, there = home_of(context), begun_from(context, member, name)
    seq_len_of([there.member], seq_len)
    say_loading()
    from weft.compose.denoising import Denoising
    from weft.compose.stacks.body import body

    asked = Asked(name, data, steps, lr, batch_size, seq_len, seed, device)
    pupil = pupil_of(home, there, asked, partial(Denoising, masks=masks.value))
    opened = pupil.opened
    made = body(opened.body.config, pupil.train("denoising"))
    before, after = (pupil.lesson.told(each, pupil.dev) for each in (opened.body, made))
    pupil.note(home, made, "denoise")
    tell(f"what is masked, seen from both sides: {before:.3f} nats a token before, {after:.3f} now")
    tell(f"what it is worth below a causal member: weft compose below {name} MEMBER --data TEXT")


def below(
    context: typer.Context,
    lower: Annotated[
        str, typer.Argument(help="Name or folder of a member that sees all of a text.", show_default=False)
    ],
    top: Annotated[str, typer.Argument(help="Name or folder of the causal member on it.", show_default=False)],
    data: HeldOut,
    num: Annotated[int, typer.Option("--samples", help="Of text that are read.", min=2, max=4096)] = 32,
    places: Annotated[
        int, typer.Option(help="Of each sample at which the next token is asked for: a pass each.", min=1, max=4096)
    ] = 16,
    seq_len: SeqLen = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Ask a causal member on one that sees all for each token by those before it alone. Nothing is trained."""
    from weft.compose.composed import require_one_space, require_space
    from weft.compose.member import require_causal

    home, there = home_of(context), known(context, [lower, top])
    members = [each.member for each in there]
    require_space(members[0])
    require_one_space(members)
    if members[0].latents != "denoise":
        raise ConfigError(
            f"{members[0].name} does not see all of a text. How it goes below another: weft compose select "
            f"{members[0].name} {members[1].name} --data TEXT. Or teach it: weft compose denoise"
        )
    require_causal(members[1])
    length = seq_len_of(members, seq_len)
    say_loading()
    from weft.compose import denoising

    opened = [opened_of(each, home, device) for each in there]
    space = opened[0].space
    text, _ = samples(opened[0].trained.tokenizer, data, length, num)
    found = denoising.below(space, opened[0].body, opened[1].body, text.to(space.embed.device), places)
    if as_json:
        typer.echo(json.dumps({kind: float(each.double().mean()) for kind, each in found._asdict().items()}))
        return
    names = {
        "stack": f"{members[0].name} > {members[1].name}, by tokens so far that all see each other",
        "masked": "the same where no place sees a later one",
        "top": f"{members[1].name} alone",
        "denoiser": f"{members[0].name} alone, asked for a mask after them",
        "ensemble": "both asked together, alike",
    }
    for line in beside_first([(names[kind], losses) for kind, losses in found._asdict().items()], "the stack is"):
        typer.echo(line)
    tell("to train one on the other, where no place sees a later one:")
    tell(f"weft compose align {members[0].name} {members[1].name} --data TEXT --name NEW")
