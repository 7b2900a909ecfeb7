"""The members of a home: folders that are made whole or not at all, each under its name.

    HOME/members/
      english/   config.json model.safetensors tokenizer.json member.json

A member is a Hugging Face folder that says how it came to be. It can be copied to another machine and added there.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from weft.compose.member import MEMBER, Member, read_member
from weft.errors import ConfigError, NoSuchRun
from weft.ids import Digest
from weft.model.weights import whole_folder, write_json

FOLDER = "members"


class Registry:
    """
    Args:
        home: the folder of identities, data and runs.
    """

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER

    def members(self) -> dict[str, Member]:
        """Return the members by name, in the order of the alphabet.

        Raises:
            ConfigError: one of them cannot be read.
        """
        folders = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return {each.name: read_member(each) for each in folders if each.is_dir() and not each.name.startswith(".")}

    def place(self, name: str) -> Path:
        return self.folder / name

    def find(self, given: str, base: Path = Path()) -> Path:
        """Return the folder of the member that a person means: a folder, or a name here.

        Args:
            base: the folder that relative paths start from.

        Raises:
            NoSuchRun: there is none; says which there are.
        """
        if (base / given / MEMBER).exists():
            return base / given
        folder = self.place(given)
        if os.sep not in given and not given.startswith(".") and (folder / MEMBER).exists():
            return folder
        names = ", ".join(self.members()) or "none"
        raise NoSuchRun(
            f"{given[:200]!r} is no member: neither a folder with {MEMBER}, nor one of this home ({names}). "
            "`weft compose member MODEL` makes one of a model."
        )

    def holding(self, weights: Digest, besides: Path | None = None) -> Path | None:
        """Return the folder of a member with these weights, of several the one that says most of what was done.

        None: there is none but `besides`. What cannot be read is passed over.
        """
        found = list[tuple[int, Path]]()
        for file in sorted(self.folder.glob(f"[!.]*/{MEMBER}")):
            with suppress(ConfigError):
                member = read_member(file.parent)
                if member.weights == weights and file.parent != besides:
                    found.append((member.flops, file.parent))
        return max(found, key=lambda each: each[0])[1] if found else None

    def remove(self, name: str) -> None:
        """
        Raises:
            NoSuchRun: there is none of that name.
        """
        if name not in self.members():
            raise NoSuchRun(f"{name[:200]!r} is no member of this home: {', '.join(self.members()) or 'it has none'}.")
        shutil.rmtree(self.place(name))


def write_member(folder: Path, member: Member, write_model: Callable[[Path], None]) -> None:
    """Write a member as a folder, whole or not at all.

    Args:
        write_model: writes the model as a Hugging Face folder at a path that is not there yet.

    Raises:
        ConfigError: the folder is taken, or cannot be written.
        DiskFull: no room.
    """
    with whole_folder(folder, last=MEMBER) as partial:
        inner = partial / ".model"
        write_model(inner)
        for file in inner.iterdir():
            file.rename(partial / file.name)
        inner.rmdir()
        write_json(partial / MEMBER, member)


def copy_member(source: Path, folder: Path, name: str) -> Member:
    """Copy a member's folder to a place of its own, and return what it says there.

    Args:
        name: that it has there.

    Raises:
        ConfigError: it is no member, or the place is taken.
        DiskFull: no room.
    """
    member = replace(read_member(source), name=name)
    files = [file for file in source.iterdir() if file.is_file()]
    if not any(file.suffix == ".safetensors" for file in files):
        raise ConfigError(f"{source}: holds no weights (.safetensors). Copy the member's folder again.")

    def copy(inner: Path) -> None:
        inner.mkdir()
        for file in files:
            if file.name != MEMBER:
                shutil.copyfile(file, inner / file.name)

    write_member(folder, member, copy)
    return member
