"""`weft compose think`: a member learns to think in what it writes, where it wrote out steps before.

weft compose think python --data problems.jsonl --name thinker
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.compose.opened import Part, opened_of
from weft.cli.compose.parts import USUAL_BATCH, BatchSize, Device, known_one
from weft.cli.home import home_of
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.ids import several
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.compose.stacks.thoughts import Answered, Curriculum, Thought
    from weft.compose.thinking import Filling, Thinking

TEST_SHARE = 10  # of texts, one is not trained on: by it answers are told
LEAST = 4
_NAMES: "dict[Filling, str]" = {
    "thoughts": "its thoughts",
    "pauses": "a pause for each",
    "nothing": "nothing in their place",
}


def think(
    context: typer.Context,
    member: Annotated[str, typer.Argument(help="Name of a member, or its folder.", show_default=False)],
    data: Annotated[
        list[str],
        typer.Option(
            help='JSON lines of {"question": "...", "steps": ["...", "..."], "answer": "..."}: files, folders or '
            "globs; may be repeated. A tenth is not trained on: how it is answered is told.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Option(help="What the new member is called.", show_default=False)],
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
    origin = Origin(
        how="continued", of=(there.member.weights,), tokens=work.read("thoughts"), flops=work.flops("thoughts")
    )
    trained = body(opened.body.config, made["thoughts"])
    Part(name, opened, trained, origin, "previous").write(registry.folder, opened.space)
    shelf.remove()
    typer.echo(str(registry.place(name)))
    before = work.told(vector_of(opened.body), "nothing", test)
    without = work.told(made["thoughts"], "nothing", test)
    for line in _told(work, before, without, {filling: work.told(made[filling], filling, test) for filling in made}):
        tell(line)


def _split(texts: "Sequence[Thought]", curriculum: "Curriculum", most: int) -> "tuple[list[Thought], list[Thought]]":
    """Return texts to train on, and every tenth, by which answers are told; those that are too long are left out.

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
    return (
        [each for at, each in enumerate(short) if (at + 1) % every],
        [each for at, each in enumerate(short) if not (at + 1) % every],
    )


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
