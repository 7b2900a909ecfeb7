"""A space: the frozen ends that decoders share, so that what comes out of one can go into another.

    tokens ──embed──► x ──layers of a member──► x' ──rms norm, gain──► head ──► logits

Members of a space train their layers alone. Its input table has rows of root mean square 1, as what a parameter-free
RMSNorm makes of a stream has, so both are inputs of one scale. With these ends every member alone is an ordinary
decoder, whose embedding and head are two matrices.

A frozen tied embedding for stacked models: snimu.github.io/2025/02/18/model-stacking. Here the norm's gain is folded
into the head.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from jaxtyping import Float, Float32, Int64
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm

from weft import wire
from weft.data.tokenizer import ByteTokenizer, Tokenizer
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.model.flat import base_layout
from weft.model.transformer import Transformer
from weft.model.weights import whole_folder, write_json

FORMAT = 1
_TABLE_EPS = 1e-12  # a row's root mean square is 1 whatever it was, and a row of zeros stays one
TOKENIZER_FILE = "tokenizer.json"
_RECORD, _WEIGHTS = "space.json", "space.safetensors"
_MATRICES = "embed", "norm", "head"


class SpaceRecord(wire.Record, frozen=True, kw_only=True):
    """What names a space: digests of its matrices as little-endian fp32, row by row."""

    format: int = FORMAT
    vocab_size: int
    width: int
    norm_eps: float
    tokenizer: Digest
    embed: Digest
    norm: Digest
    head: Digest


@dataclass(frozen=True, eq=False)
class Space:
    """
    Args:
        embed: what a token goes in as.
        norm: the gain of the norm before the head.
        norm_eps: added to the mean square in that norm.
        tokenizer: its digest.
    """

    embed: Float32[Tensor, "vocab width"]
    norm: Float32[Tensor, " width"]
    head: Float32[Tensor, "vocab width"]
    norm_eps: float
    tokenizer: Digest

    def __post_init__(self) -> None:
        if self.embed.shape != self.head.shape or self.norm.shape != self.embed.shape[1:]:
            raise ConfigError(
                f"space: an input table of {tuple(self.embed.shape)}, a gain of {tuple(self.norm.shape)} and a head of "
                f"{tuple(self.head.shape)} do not belong together."
            )

    @classmethod
    def of(cls, model: Transformer, tokenizer: Digest) -> "Space":
        """Return the space of a trained model: its table's rows at root mean square 1, its norm's gain in the head."""
        table, gain = model.embed.weight.detach().float(), model.norm.weight.detach().float()
        head = model.head_weight.detach().float() * gain
        return cls(normed(table, _TABLE_EPS), torch.ones_like(gain), head.clone(), model.norm.eps, tokenizer)

    @property
    def vocab_size(self) -> int:
        return self.embed.shape[0]

    @property
    def width(self) -> int:
        return self.embed.shape[1]

    @cached_property
    def record(self) -> SpaceRecord:
        return SpaceRecord(
            vocab_size=self.vocab_size,
            width=self.width,
            norm_eps=self.norm_eps,
            tokenizer=self.tokenizer,
            embed=numbers_digest(self.embed),
            norm=numbers_digest(self.norm),
            head=numbers_digest(self.head),
        )

    @cached_property
    def digest(self) -> Digest:
        return wire.digest_of(self.record)

    def require(self, found: SpaceRecord, what: str) -> None:
        """
        Raises:
            ConfigError: `what` belongs to another space; says what differs.
        """
        mine = self.record
        if found != mine:
            names = [name for name in mine.__struct_fields__ if getattr(found, name) != getattr(mine, name)]
            raise ConfigError(
                f"{what} belongs to another space: {', '.join(names)} differ. Members of one space have the same "
                "tokenizer, embedding, norm and head. Train it in this space, or choose another."
            )

    def on(self, device: torch.device) -> "Space":
        return Space(self.embed.to(device), self.norm.to(device), self.head.to(device), self.norm_eps, self.tokenizer)

    def ends(self, config: ModelConfig) -> Float32[Tensor, " ends"]:
        """Return the vector of what is frozen of a model between these ends.

        Raises:
            ConfigError: the model is of another size.
        """
        if (config.vocab_size, config.width) != (self.vocab_size, self.width):
            raise ConfigError(
                f"the model has {config.vocab_size:,} tokens and a width of {config.width}, the space "
                f"{self.vocab_size:,} and {self.width}."
            )
        spans = base_layout(config)
        vector = self.embed.new_empty(spans.num_parameters)
        for span in spans:
            spans.view(vector, span).copy_(getattr(self, span.name.partition(".")[0]))
        return vector

    @classmethod
    def between(cls, config: ModelConfig, ends: Float32[Tensor, " ends"], tokenizer: Digest) -> "Space":
        """Return the space whose ends a model has; as `ends` made them."""
        spans = base_layout(config)
        found = {span.name.partition(".")[0]: spans.view(ends, span).clone() for span in spans}
        return cls(found["embed"], found["norm"], found["head"], config.norm_eps, tokenizer)

    # --- the ends ---

    def begin(self, tokens: Int64[Tensor, "batch tokens"]) -> Float32[Tensor, "batch tokens width"]:
        """Return what the first member reads."""
        return self.embed[tokens]

    def logits(self, x: Float[Tensor, "*dims width"]) -> Float32[Tensor, "*dims vocab"]:
        """Return the logits of each next token, of what a member's last layer made."""
        return linear(rms_norm(x.float(), self.norm.shape, self.norm, self.norm_eps), self.head)

    def loss(
        self, x: Float[Tensor, "batch tokens width"], targets: Int64[Tensor, "batch tokens"]
    ) -> Float32[Tensor, ""]:
        """Return the mean cross entropy of `targets`, nats per token; -100 is not predicted, and counts nothing."""
        return cross_entropy(self.logits(x).flatten(0, -2), targets.flatten())


def normed(x: Float[Tensor, "*dims width"], eps: float) -> Float[Tensor, "*dims width"]:
    """Return rows at root mean square 1: a RMSNorm without parameters."""
    return rms_norm(x, x.shape[-1:], eps=eps)


def numbers_digest(numbers: Float[Tensor, "*dims"]) -> Digest:
    """Return what names a matrix, or a model's flat vector: the digest of its numbers as little-endian fp32."""
    return wire.digest(numbers.detach().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes())


# --- folders ---


def write_space(folder: Path, space: Space, tokenizer: Tokenizer) -> None:
    """Write a space as a folder: its record, its matrices, and the tokenizer's file where that is no plain bytes.

    Raises:
        ConfigError: the folder is taken, or cannot be written; or the tokenizer is not the space's.
        DiskFull: no room.
    """
    if tokenizer.digest != space.tokenizer:
        raise ConfigError(f"{folder}: the tokenizer is not the one that the space names.")
    matrices = {name: getattr(space, name).detach().cpu().contiguous() for name in _MATRICES}
    with whole_folder(folder, last=_RECORD) as partial:
        (partial / _WEIGHTS).write_bytes(save(matrices))
        if not isinstance(tokenizer, ByteTokenizer):
            (partial / TOKENIZER_FILE).write_bytes(tokenizer.to_json())
        write_json(partial / _RECORD, space.record)


def read_space(folder: Path) -> Space:
    """Return the space that a folder holds, every byte checked.

    Raises:
        ConfigError: no space, or one that was altered; names the file.
    """
    file = folder / _RECORD
    try:
        record = msgspec.json.decode(file.read_bytes(), type=SpaceRecord)
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no space: it has no {_RECORD}. `weft compose space MODEL` makes one.") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Make the space again, or copy it again.") from None
    if record.format != FORMAT:
        raise ConfigError(
            f"{file}: format {record.format}, and this weft reads {FORMAT}. Install the version that made it."
        )
    try:
        found = load((folder / _WEIGHTS).read_bytes())
        embed, norm, head = (found[name].float() for name in _MATRICES)
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{folder / _WEIGHTS}: cannot be read: {error}. Make the space again.") from None
    space = Space(embed, norm, head, record.norm_eps, record.tokenizer)
    space.require(record, str(folder))
    return space
