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

import msgspec
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm

from weft import wire
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.transformer import Transformer


class SpaceRecord(wire.Record, frozen=True, kw_only=True):
    """What names a space: digests of its matrices as little-endian fp32, row by row."""

    format: int = 1
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
        return cls(normed(table, model.norm.eps), torch.ones_like(gain), head.clone(), model.norm.eps, tokenizer)

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
            embed=_digest(self.embed),
            norm=_digest(self.norm),
            head=_digest(self.head),
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


def _digest(matrix: Float32[Tensor, "*dims"]) -> Digest:
    return wire.digest(matrix.detach().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes())


def space_json(record: SpaceRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
