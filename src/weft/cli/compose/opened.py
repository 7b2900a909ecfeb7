"""Members with their weights, and as they are written after they were trained here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import typer

from weft.cli.compose.parts import Known, known_one, seq_len_of, texts, training_of
from weft.cli.home import home_of
from weft.cli.terminal import WorkLine
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.progress import Meter

if TYPE_CHECKING:
    from torch import Tensor

    from weft.cli.model.trained import Trained
    from weft.compose.descent import Draw
    from weft.compose.lesson import Lesson
    from weft.compose.member import Latents, Member, Origin
    from weft.compose.shelf import Shelf
    from weft.compose.space import Space
    from weft.data.rows import Batch
    from weft.ids import Digest
    from weft.model.transformer import SectionModule


@dataclass(frozen=True, eq=False)
class Opened:
    """A member of a space."""

    known: Known
    trained: "Trained"
    space: "Space"
    body: "SectionModule"


def begun_from(context: typer.Context, member: str, name: str) -> Known:
    """Return the member that a new one is made of.

    Raises:
        ConfigError: it is of no space, or the name is taken.
    """
    from weft.compose.composed import require_space
    from weft.compose.member import require_name
    from weft.compose.registry import Registry

    there, place = known_one(context, member), Registry(home_of(context)).place(require_name(name))
    if place.exists():
        raise ConfigError(f"{place}: exists; a member is never written over. Choose another --name, or remove it.")
    require_space(there.member)
    return there


def opened_of(there: Known, home: Path, device: str) -> Opened:
    """
    Raises:
        ConfigError: it is of no space, or its weights have other ends.
    """
    from weft.cli.model.trained import open_trained, place
    from weft.compose.composed import parts_of

    trained = open_trained(str(there.folder), home, may_denoise=True)
    space, body = parts_of(trained.config, trained.vector.to(place(device)), there.member)
    return Opened(there, trained, space, body)


@dataclass(frozen=True, eq=False)
class Part:
    """A member of a space as it was trained here."""

    name: str
    base: Opened
    body: "SectionModule"
    origin: "Origin"
    latents: "Latents | None" = None  # that it has learnt to read here; None: nothing new, each place sees those before
    beside: "Callable[[Path, Digest], None] | None" = None  # writes more into its folder, given what names its weights

    def write(self, folder: Path, space: "Space") -> None:
        from msgspec import structs

        from weft.compose.registry import write_member
        from weft.compose.stacks.stack import Stack, whole
        from weft.store.chunks import raw
        from weft.wire import digest

        config, vector = whole(Stack(space, (self.body,)))
        before, trained = self.base.known.member, replace(self.base.trained, config=config, vector=vector.cpu())
        member = before.trained_on(self.name, config, digest(raw(trained.vector)), self.origin)
        member = structs.replace(member, latents=self.latents or member.latents)

        def write_all(inner: Path) -> None:
            trained.export(inner)
            if self.beside is not None:
                self.beside(inner, member.weights)

        write_member(folder / self.name, member, write_all)


@dataclass(frozen=True, eq=False)
class Single:
    """A whole model as it was trained on here."""

    base: "Trained"
    member: "Member"  # that it was
    vector: "Tensor"

    def write(self, folder: Path, name: str, origin: "Origin") -> None:
        from weft.compose.registry import write_member
        from weft.store.chunks import raw
        from weft.wire import digest

        member = self.member.trained_on(name, self.member.model, digest(raw(self.vector)), origin)
        write_member(folder / name, member, replace(self.base, vector=self.vector).export)


# --- what one member is taught alone ---

L = TypeVar("L", bound="Lesson")


@dataclass(frozen=True)
class Asked:
    """How a member is taught: what all lessons have."""

    name: str
    data: list[str]
    steps: int
    lr: float
    batch_size: int
    seq_len: int | None
    seed: int
    device: str


@dataclass(frozen=True, eq=False)
class Pupil(Generic[L]):
    """A member that is taught.

    Args:
        dev: text that is not trained on.
        draw: what is trained on.
    """

    name: str
    opened: Opened
    lesson: L
    dev: "Batch"
    draw: "Draw"
    shelf: "Shelf"

    def train(self, doing: str) -> "Tensor":
        """Return the vector that was trained, from where that was stopped.

        Args:
            doing: what is done, for people who wait.

        Raises:
            NotFinite: it has diverged.
        """
        with Meter(doing, "steps", WorkLine(), SystemClock(), self.lesson.training.steps) as meter:
            return self.lesson.make(self.draw, self.shelf, meter.add)

    def note(
        self,
        home: Path,
        body: "SectionModule",
        latents: "Latents",
        beside: "Callable[[Path, Digest], None] | None" = None,
    ) -> None:
        """Write it as a new member, forget how it was trained, and print where it lies; arguments as of `Part`."""
        from weft.compose.member import Origin
        from weft.compose.registry import Registry

        lesson, registry, before = self.lesson, Registry(home), self.opened.known.member
        origin = Origin(how="continued", of=(before.weights,), tokens=lesson.tokens, flops=lesson.flops)
        Part(self.name, self.opened, body, origin, latents, beside).write(registry.folder, self.opened.space)
        self.shelf.remove()
        typer.echo(str(registry.place(self.name)))


def pupil_of(home: Path, there: Known, asked: Asked, lesson_of: Callable[..., L]) -> Pupil[L]:
    """Return a member that is to be taught, or goes on being taught.

    Args:
        lesson_of: makes the lesson, given all that every one has.

    Raises:
        ConfigError: another lesson was begun under this name, or too little text.
    """
    from weft.compose.composed import begun
    from weft.compose.descent import windows
    from weft.compose.shelf import Shelf

    length = seq_len_of([there.member], asked.seq_len)
    opened = opened_of(there, home, asked.device)
    text, on = texts(opened.trained.tokenizer, asked.data, length), opened.space.embed.device
    lesson = lesson_of(
        space=opened.space,
        body=opened.body,
        training=training_of(asked.steps, asked.lr),
        batch_size=asked.batch_size,
        seq_len=length,
        seed=asked.seed,
    )
    shelf = Shelf(begun(home, asked.name), SystemClock())
    shelf.open(lesson.digest(text.digest))
    draw = windows(text.train, length, asked.batch_size, asked.seed)
    return Pupil(asked.name, opened, lesson, text.dev.to(on), lambda number: draw(number).to(on), shelf)
