"""Members with their weights, and as they are written after they were trained here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.cli.compose.parts import Known, known_one
from weft.cli.home import home_of
from weft.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from weft.cli.model.trained import Trained
    from weft.compose.member import Latents, Member, Origin
    from weft.compose.space import Space
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
