"""A member: a trained model and how it came to be, so that others know what it may be put together with.

    folder/ config.json  model.safetensors  tokenizer.json  ...      as `weft export` writes it
            member.json                                              what this module reads and writes

Weights may be averaged where members began alike (`parent`), and layers put one on the other where members are of one
space. What was trained on the same text is told by the digests of its shards.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft import wire
from weft.config import Config
from weft.data.store import DataIndex
from weft.errors import ConfigError
from weft.ids import Digest, short
from weft.model.config import ModelConfig

FORMAT = 1
MEMBER = "member.json"
MAX_NBYTES = 8 << 20

_Hex = Annotated[Digest, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_NAME = r"\A\w[\w.-]{0,63}\Z"
_Name = Annotated[str, Meta(pattern=_NAME)]
_Num = Annotated[int, Meta(ge=0)]

Latents = Literal["none", "previous", "same", "denoise", "noise"]
"""Its own outputs of the token before, or of the same; texts of which a part is masked, which it sees all of; or noisy
rows of the next token, of which block.bin tells it."""
How = Literal[
    "trained",
    "stitch",
    "one-way",
    "sauce",
    "joint",
    "continued",
    "identity",
    "copy",
    "depth up-scaling",
    "soup",
    "mixture",
]


class TextOf(Config, frozen=True, kw_only=True):
    """A shard of text that it was trained on."""

    digest: _Hex
    num_tokens: _Num


class Origin(Config, frozen=True, kw_only=True):
    """One thing that was done to make it, the last one last.

    Args:
        of: digests of the weights of the members that it was made of.
        tokens: that were read in it.
        flops: that it took, forward and backward.
        made: digest of the weights that came of it. What made the same weights is one thing, and counts once.
    """

    how: How
    of: tuple[_Hex, ...] = ()
    tokens: _Num = 0
    flops: _Num = 0
    made: _Hex | None = None


class Heldout(Config, frozen=True, kw_only=True):
    """A loss on held-out text: nats per token, over so many tokens, and what names the text."""

    loss: float
    num_tokens: _Num
    text: _Hex


class Member(Config, frozen=True, kw_only=True):
    """
    Args:
        model: of which weights are, whole: embedding, layers, norm, head.
        weights: digest of the flat vector.
        space: whose ends it has; None: its own.
        parent: digest of the vector that training began with.
        is_seeded: that vector is random; else it had learnt something.
        run: that trained it; None: no run of weft.
        texts: shards that it was trained on; none: they are private, or nobody knows.
        latents: what else than embeddings it has learnt to read. `weft compose loop`, `think`, `denoise` and
            `block` train it so.
    """

    format: int = FORMAT
    name: _Name
    model: ModelConfig
    weights: _Hex
    tokenizer: _Hex
    space: _Hex | None = None
    seed: _Num = 0
    parent: _Hex | None = None
    is_seeded: bool = False
    run: _Hex | None = None
    texts: tuple[TextOf, ...] = ()
    origins: Annotated[tuple[Origin, ...], Meta(max_length=256)] = ()
    heldout: Heldout | None = None
    latents: Latents = "none"

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in _once(self.origins))

    @property
    def flops(self) -> int:
        return sum(each.flops for each in _once(self.origins))

    def trained_on(self, name: str, model: ModelConfig, weights: Digest, origin: Origin) -> "Member":
        """Return what it is after more training, under another name.

        Its texts and its held-out loss are not told any more: no run packed what it read last. Of masks and of noise it
        knows no more: it was trained to tell the next token by those before it.
        """
        origins = (*self.origins, msgspec.structs.replace(origin, made=weights))
        latents: Latents = "none" if self.latents in ("denoise", "noise") else self.latents
        return msgspec.structs.replace(
            self, name=name, model=model, weights=weights, origins=origins, texts=(), heldout=None, latents=latents
        )


def flops_together(members: Sequence[Member]) -> int | None:
    """Return what members took together; what several began with counts once. None: of one it is not known."""
    if not all(each.flops for each in members):
        return None
    return sum(each.flops for each in _once([origin for member in members for origin in member.origins]))


def _once(origins: Sequence[Origin]) -> list[Origin]:
    named = {each.made: each for each in origins if each.made is not None}
    return [*named.values(), *(each for each in origins if each.made is None)]


def require_name(name: str) -> str:
    """
    Raises:
        ConfigError: nothing can be called so.
    """
    if re.fullmatch(_NAME, name) is None:
        raise ConfigError(
            f"--name {name[:80]}: a name has letters, digits, dots, dashes and underscores, at most 64, and begins "
            "with one of the first two. Choose another."
        )
    return name


def texts_of(index: DataIndex) -> tuple[TextOf, ...]:
    return tuple(TextOf(digest=info.digest, num_tokens=info.num_tokens) for info in index.train)


def overlap(one: Member, other: Member) -> float | None:
    """Return the share of one's text that another was trained on, too; None: nobody knows."""
    both, total = {each.digest for each in other.texts}, sum(each.num_tokens for each in one.texts)
    if not both or not total:
        return None
    return sum(each.num_tokens for each in one.texts if each.digest in both) / total


def require_weights(member: Member, found: Digest, folder: Path) -> None:
    """
    Raises:
        ConfigError: the weights beside a member are not those that it tells of.
    """
    if found != member.weights:
        raise ConfigError(
            f"{folder / MEMBER} tells of the weights {short(member.weights)}, and beside it are {short(found)}: one of "
            f"them was altered. Copy the member's folder again. If it is another model now, remove {MEMBER}."
        )


def require_causal(member: Member) -> None:
    """
    Raises:
        ConfigError: a member sees all of a text, so it tells no next token.
    """
    if member.latents == "denoise":
        raise ConfigError(
            f"{member.name} sees all of a text and tells what is masked in it: it writes no next token. Put a causal "
            f"member on it: weft compose align {member.name} MEMBER --data TEXT --name NEW"
        )


def require_one_parent(members: Sequence[Member]) -> None:
    """
    Raises:
        ConfigError: members did not begin alike, so that an average of their weights means nothing.
    """
    first = members[0]
    for each in members[1:]:
        if each.parent is None or each.parent != first.parent or each.model != first.model:
            raise ConfigError(
                f"weights of {first.name} and {each.name} cannot be averaged: they did not begin with the same weights "
                f"({_called(first.parent)} and {_called(each.parent)}). Ask both together: an ensemble. Or train both "
                "from one model."
            )


def _called(digest: str | None) -> str:
    return "unknown" if digest is None else short(digest)


def read_member(folder: Path) -> Member:
    """Return what a folder says of the member in it.

    Raises:
        ConfigError: it says nothing, or something else.
    """
    file = folder / MEMBER
    try:
        if file.stat().st_size > MAX_NBYTES:
            raise ConfigError(f"{file}: larger than {MAX_NBYTES} bytes, which is no member's.")
        member = msgspec.json.decode(file.read_bytes(), type=Member)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is no member: it has no {MEMBER}. `weft compose member MODEL` makes one of a model."
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Make the member again, or copy it again.") from None
    if member.format != FORMAT:
        raise ConfigError(
            f"{file}: format {member.format}, and this weft reads {FORMAT}. Install the one that wrote it."
        )
    return member


def name_of_text(index: DataIndex) -> Digest:
    """Return what names the held-out text of an index."""
    return wire.digest("".join(info.digest for info in index.heldout).encode())
