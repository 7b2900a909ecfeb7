"""What was made of members, with what it has to be compared with: a folder that is whole by itself.

    both/ english/  python/             the members as they came: config.json, model.safetensors, member.json, ...
          composed.json                 what was made of them
    of a stack
          stack.1/                      a member as it was trained in the stack
          identity.0/  identity.1/      the same training, with layers that change nothing yet in place of members
          copy.1/  depth.1/             the same training, with copies of the lowest; if asked for
          continued/                    the best single member, trained on with the same compute
          maps.safetensors              of affine handovers, where there are any
    of experts that are asked together
          clusters.bin                  what each is about, where that decides who counts
    of a mixture
          mixture/                      one model, of the family mixtral
          continued/                    as of a stack; of who has left it nothing lies here

A stack alone is never written: who reads it finds its controls beside it.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from jaxtyping import Float32
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from weft.compose.experts.clusters import Clusters, decode
from weft.compose.experts.mixtral import is_mixture
from weft.compose.experts.mixture import Stage
from weft.compose.experts.split import CLUSTERS
from weft.compose.member import MEMBER, Member, read_member, require_name
from weft.compose.space import Space
from weft.compose.stacks.align import AlignConfig
from weft.compose.stacks.body import body, gathered
from weft.compose.stacks.grow import Growth
from weft.compose.stacks.stack import AffineConfig, Seam, Stack
from weft.config import Config
from weft.errors import ConfigError, NoSuchRun, WireError
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.model.flat import assemble
from weft.model.sections import middle
from weft.model.transformer import SectionModule
from weft.model.weights import whole_folder, write_json

FORMAT = 1
COMPOSED = "composed.json"
FOLDER = "composed"  # of a home
MAPS = "maps.safetensors"
MAX_NBYTES = 1 << 20

_Folder = Annotated[str, Meta(pattern=r"\A[\w][\w.-]{0,79}\Z")]
_Hex = Annotated[Digest, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Num = Annotated[int, Meta(ge=0)]


def _require(is_so: bool, field: str) -> None:
    if not is_so:
        raise ConfigError(
            f"{COMPOSED}: {field} does not belong to the members. Copy the folder again, or make it again."
        )


class Places(Config, frozen=True, kw_only=True):
    """A stack of a folder.

    Args:
        members: folders in it, the lowest first.
        maps: what the affine maps of its seams begin with in the file of maps.
    """

    members: Annotated[tuple[_Folder, ...], Meta(min_length=1, max_length=64)]
    seams: tuple[Seam, ...] = ()
    maps: _Folder


class GrownStack(Config, frozen=True, kw_only=True):
    """A control: the lowest member under copies of itself, trained as the stack was.

    Args:
        how: whole copies, or such that lack the layers where they meet.
        flops: that its training took.
    """

    how: Growth
    stack: Places
    flops: _Num


class _Made(Config, frozen=True, kw_only=True):
    """What is told of all that is made of members.

    Args:
        members: folders of them, as they came.
        best: the member that was best on dev text.
        text: what names what was trained on or chosen by.
    """

    format: int = FORMAT
    name: _Folder
    members: Annotated[tuple[_Folder, ...], Meta(min_length=2, max_length=64)]
    best: _Folder
    text: _Hex

    def __post_init__(self) -> None:
        _require(self.best in self.members, "best")

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class Stacked(_Made, frozen=True, kw_only=True, tag_field="type", tag="stack"):
    """
    Args:
        members: the lowest of the stack first.
        stack: what was made of them.
        how: what was done to the stack, in order.
        batch_size, seq_len: of each step.
        flops: that all of it took, beside what the members took; the controls took as many each.
        identity: the lowest member under layers that changed nothing, trained as the stack was.
        growth: other controls of its kind, if they were asked for.
        continued: the best single member on dev text, trained on with as many operations as the stack.
    """

    stack: Places
    how: tuple[AlignConfig, ...]
    batch_size: Annotated[int, Meta(ge=1)]
    seq_len: Annotated[int, Meta(ge=1)]
    flops: _Num
    identity: Places
    growth: Annotated[tuple[GrownStack, ...], Meta(max_length=2)] = ()
    continued: _Folder

    @property
    def folders(self) -> set[str]:
        """Return the folders without which it is not told."""
        grown = (name for each in self.growth for name in each.stack.members)
        return {*self.members, *self.stack.members, *self.identity.members, *grown, self.continued}


class Experts(_Made, frozen=True, kw_only=True, tag_field="type", tag="experts"):
    """Members that are asked together.

    Args:
        weighting: by what each counts (`experts.ensemble`).
        prior: how likely each is before anything is known.
        top: so many of them count; None: all.
        seq_len: of samples by which they were chosen.
    """

    weighting: Literal["uniform", "posterior", "distance"]
    prior: Annotated[tuple[Annotated[float, Meta(gt=0, le=1)], ...], Meta(max_length=64)]
    top: Annotated[int, Meta(ge=1, le=64)] | None = None
    seq_len: Annotated[int, Meta(ge=1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(len(self.prior) == len(self.members), "prior")
        _require((self.top or 1) <= len(self.members), "top")

    @property
    def folders(self) -> set[str]:
        """Return the folders without which it is not told."""
        return set(self.members)


class Merged(_Made, frozen=True, kw_only=True, tag_field="type", tag="mixture"):
    """Members that were merged to one model with a router.

    Args:
        top: of how many of them a token is computed.
        thawed: what was trained, stage by stage.
        flops: that all stages took, beside what the members took; the control took as many.
        left_flops: that members took who have left it, and whose share of the averages stays; None: nobody knows.
        mixture: the folder of the model, of the family mixtral.
        continued: the best single member on dev text, trained on with as many operations.
    """

    top: Annotated[int, Meta(ge=1, le=64)]
    thawed: tuple[Stage, ...]
    batch_size: Annotated[int, Meta(ge=1)]
    seq_len: Annotated[int, Meta(ge=1)]
    flops: _Num
    left_flops: _Num | None = 0
    mixture: _Folder = "mixture"
    continued: _Folder = "continued"

    @property
    def folders(self) -> set[str]:
        """Return the folders without which it is not told."""
        return {*self.members, self.continued}


Composed = Stacked | Experts | Merged


# --- a member as a part of a stack ---


def parts_of(config: ModelConfig, vector: Float32[Tensor, " num"], member: Member) -> tuple[Space, SectionModule]:
    """Return the space that a member is of, and its body.

    Raises:
        ConfigError: it is of none, or its weights have other ends.
    """
    require_space(member)
    whole = assemble(config, vector)
    ends = (whole.embed.weight, whole.norm.weight, whole.head_weight)
    embed, norm, head = (each.detach().clone() for each in ends)
    space = Space(embed, norm, head, whole.norm.eps, member.tokenizer)
    if space.digest != member.space:
        raise ConfigError(
            f"{member.name} says that it is of another space than its weights are of. Make the member again, or copy "
            "it again."
        )
    named = dict(whole.named_parameters())
    return space, body(config, gathered(config, middle(config), named))


def require_space(member: Member) -> None:
    """
    Raises:
        ConfigError: a member is of no space.
    """
    if member.space is None:
        raise ConfigError(
            f"{member.name} has an embedding and a head of its own, so nothing can be put on it. Members of a stack "
            "are trained between the same ends: `weft compose space` writes some, and a run with [model] type = "
            '"space" trains there.'
        )


def require_names(names: Iterable[str]) -> None:
    """
    Raises:
        ConfigError: a member is called as a part of a composed model is.
    """
    if taken := [name for name in names if re.fullmatch(r"continued|mixture|(stack|identity|copy|depth)\.\d+", name)]:
        raise ConfigError(
            f"{taken[0]}: what is made here is called so. Give the member another name: weft compose member FOLDER "
            "--name NAME."
        )


def require_one_space(members: Iterable[Member]) -> None:
    """
    Raises:
        ConfigError: members are of different spaces.
    """
    first, *others = members
    for each in others:
        if each.space != first.space:
            raise ConfigError(
                f"{first.name} and {each.name} are of different spaces, so one cannot read what the other writes. "
                "Choose members of one space: `weft compose list` says which they are of."
            )


# --- folders ---


def place(home: Path, name: str) -> Path:
    return home / FOLDER / name


def folder_of(given: str, home: Path) -> Path | None:
    """Return the folder of a composed model; None: nothing of that name is one."""
    places = [Path(given), *([place(home, given)] if given in names(home) else [])]
    return next((each for each in places if (each / COMPOSED).exists()), None)


def find_composed(given: str, home: Path) -> Path:
    """Return the folder of the composed model that a person means: a folder, or a name of this home.

    Raises:
        NoSuchRun: there is none; says which there are.
    """
    if (folder := folder_of(given, home)) is not None:
        return folder
    there = ", ".join(names(home)) or "none"
    raise NoSuchRun(
        f"{given[:200]!r} is no composed model: neither a folder with {COMPOSED}, nor one of this home ({there}). "
        "`weft compose align`, `mix` and `merge` make one of members."
    )


def names(home: Path) -> list[str]:
    """Return the names of the composed models of a home."""
    return sorted(file.parent.name for file in (home / FOLDER).glob(f"*/{COMPOSED}"))


def read_composed(folder: Path) -> Composed:
    """
    Raises:
        ConfigError: it cannot be read, or its controls are not there.
    """
    file = folder / COMPOSED
    try:
        if file.stat().st_size > MAX_NBYTES:
            raise ConfigError(f"{file}: larger than {MAX_NBYTES} bytes, which none is.")
        found = msgspec.json.decode(file.read_bytes(), type=Stacked | Experts | Merged)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Make the model again, or copy it again.") from None
    if found.format != FORMAT:
        raise ConfigError(
            f"{file}: format {found.format}, and this weft reads {FORMAT}. Install the one that wrote it."
        )
    missing = sorted(name for name in found.folders if not (folder / name / MEMBER).exists())
    if isinstance(found, Merged) and not is_mixture(folder / found.mixture):
        missing.append(found.mixture)
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}: a composed model is told beside its controls, or not at all. Copy "
            "the folder again, whole, or make the model again."
        )
    return found


def write_composed(
    folder: Path, told: Composed, write_parts: Callable[[Path], None], maps: Mapping[str, Tensor] | None = None
) -> None:
    """Write a composed model, whole or not at all.

    Args:
        write_parts: writes all that `told` names into a folder.

    Raises:
        ConfigError: the folder is taken, or cannot be written.
        DiskFull: no room.
    """
    with whole_folder(folder, last=COMPOSED) as partial:
        write_parts(partial)
        if maps:
            (partial / MAPS).write_bytes(save({name: each.cpu().contiguous() for name, each in maps.items()}))
        write_json(partial / COMPOSED, told)


def begun(home: Path, name: str) -> Path:
    """Return where what is trained of a composed model is kept until that is whole."""
    return home / FOLDER / f".{name}.begun"


def remove(home: Path, name: str) -> bool:
    """Remove a composed model of a home, or what was begun of one; return whether there was any."""
    found = [each for each in (place(home, name), begun(home, name)) if require_name(name) and each.exists()]
    for each in found:
        shutil.rmtree(each)
    return bool(found)


def maps_of(places: Places, stack: Stack) -> dict[str, Tensor]:
    """Return the affine maps of a stack, as they are called in the file of maps."""
    return {f"{places.maps}.{number}": each for number, each in enumerate(stack.maps) if each is not None}


def clusters_of(folder: Path, told: Experts) -> Clusters | None:
    """Return what the experts of a folder are about; None: their weights do not follow from that.

    Raises:
        ConfigError: it cannot be read.
    """
    if told.weighting != "distance":
        return None
    try:
        return decode((folder / CLUSTERS).read_bytes())
    except (OSError, WireError) as error:
        raise ConfigError(
            f"{folder / CLUSTERS}: cannot be read: {error}. Copy the folder again, or mix again."
        ) from None


Read = Callable[[Path], tuple[ModelConfig, Tensor]]  # the model in a member's folder, on the device where it computes


def read_stack(folder: Path, places: Places, read: Read) -> Stack:
    """Return a stack of a composed model's folder.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    found = [parts_of(*read(folder / name), read_member(folder / name)) for name in places.members]
    maps: list[Tensor | None] = [None] * len(places.seams)
    if any(isinstance(seam.handover, AffineConfig) for seam in places.seams):
        try:
            kept = load((folder / MAPS).read_bytes())
            for number, seam in enumerate(places.seams):
                if isinstance(seam.handover, AffineConfig):
                    maps[number] = kept[f"{places.maps}.{number}"].to(found[0][0].embed.device, torch.float32)
        except (OSError, KeyError, SafetensorError) as error:
            raise ConfigError(f"{folder / MAPS}: cannot be read: {error}. Make the model again.") from None
    return Stack(found[0][0], tuple(module for _, module in found), places.seams, tuple(maps))
