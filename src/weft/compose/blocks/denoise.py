"""Members that denoise: bodies that see all of a text, trained to tell what was masked in it, below a causal top.

    tokens ─ mask ─► rows, the mask's where masked ─► layers, all places see all ─► logits of the token at each place

What comes out at a place is a guess at the token there, not at the next one: the causal member on top makes that shift.
Nothing else differs from any member: the same layers, the same space. But no keys can be cached, for each token changes
what all places before it hold.

And so such a stack can be asked in one honest way. In one pass over a text, what the body makes of place t knows token
t + 1, and the top finds the answer in its input: its loss is low and says nothing (`logits` refuses). What predicts
token t + 1 has to be computed of tokens 0..t alone, body and top both, anew for each t: `prefix_logits`.

Masks are drawn by seed and step. A space has no token for the mask: its row is the mean of all rows, as frozen as they.

BERT: arXiv:1810.04805, section 3.1. The seven denoisers of UL2: arXiv:2205.05131, here equally often. There a span
becomes one token and the decoder writes what was in it; here each token of a span is masked and told at its own place,
as in SpanBERT, arXiv:1907.10529, for a body returns as many places as it takes. Spans are cut as T5 cuts them,
arXiv:1910.10683: so many tokens in so many spans, every such cut equally likely.
"""

from collections.abc import Sequence
from math import inf
from typing import Annotated, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from msgspec import UNSET, Meta
from numpy.typing import NDArray
from torch import Tensor

from weft.compose.space import Space, normed
from weft.config import Config
from weft.data.rows import UNTRAINED
from weft.errors import ConfigError
from weft.model.layers import rotation
from weft.model.transformer import SectionModule
from weft.rng import integers64, stream

_Share = Annotated[float, Meta(gt=0, lt=1, description="of the tokens")]


class Masked(NamedTuple):
    """Texts with something left out.

    Args:
        tokens: what goes in, where it is not masked.
        is_masked: where the mask goes in.
        targets: what was there, where that is asked; else -100.
    """

    tokens: Int64[Tensor, "batch tokens"]
    is_masked: Bool[Tensor, "batch tokens"]
    targets: Int64[Tensor, "batch tokens"]


# --- BERT ---


class BertConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="bert"):
    """Single tokens are asked; most of them are masked, some are another token, some stay."""

    share: _Share = 0.15
    other: Annotated[float, Meta(ge=0, le=1, description="of those asked: another token goes in, any of all")] = 0.1
    same: Annotated[float, Meta(ge=0, le=1, description="of those asked: the token itself goes in")] = 0.1

    def __post_init__(self) -> None:
        if self.other + self.same > 1:
            raise ConfigError(f"bert: other + same is {self.other + self.same:g}; together they are at most 1.")


def bert(config: BertConfig, tokens: Int64[Tensor, "batch tokens"], vocab_size: int, seed: int, step: int) -> Masked:
    """Return texts in which single tokens are asked: in each as many, at least one."""
    num_texts, length = tokens.shape
    num_asked = max(1, round(config.share * length))
    is_asked, is_masked = np.zeros((num_texts, length), bool), np.zeros((num_texts, length), bool)
    given = tokens.cpu().numpy().copy()
    for row in range(num_texts):
        generator = stream(seed, "bert", step, row)
        asked = _chosen(generator, length, num_asked)
        how = _uniform(generator, num_asked)
        others = (integers64(generator, num_asked) % np.uint64(vocab_size)).astype(np.int64)
        is_other = how < config.other
        is_asked[row, asked] = True
        is_masked[row, asked] = how >= config.other + config.same
        given[row, asked[is_other]] = others[is_other]
    return _masked(tokens, given, is_masked, is_asked)


# --- UL2 ---


class Denoiser(NamedTuple):
    """One of UL2's: what share of a text is masked, in spans of which mean length; None: all at the end."""

    share: float
    mean_length: int | None


REGULAR = (Denoiser(0.15, 3), Denoiser(0.15, 8))
SEQUENTIAL = (Denoiser(0.25, None),)
EXTREME = (Denoiser(0.5, 3), Denoiser(0.5, 8), Denoiser(0.15, 64), Denoiser(0.5, 64))
UL2 = (*REGULAR, *SEQUENTIAL, *EXTREME)


def spans(tokens: Int64[Tensor, "batch tokens"], seed: int, step: int, denoisers: Sequence[Denoiser] = UL2) -> Masked:
    """Return texts in which spans are masked, in each by one of `denoisers`.

    Raises:
        ConfigError: texts of one token.
    """
    num_texts, length = tokens.shape
    if length < 2:
        raise ConfigError("a text of one token: nothing is left of it to tell a masked one from. Give longer ones.")
    is_masked = np.zeros((num_texts, length), bool)
    for row in range(num_texts):
        generator = stream(seed, "spans", step, row)
        denoiser = denoisers[int(integers64(generator, 1)[0] % np.uint64(len(denoisers)))]
        is_masked[row] = _span_mask(generator, length, denoiser)
    return _masked(tokens, tokens.cpu().numpy(), is_masked, is_masked)


def _span_mask(generator: np.random.Generator, length: int, denoiser: Denoiser) -> NDArray[np.bool_]:
    num_masked = min(max(1, round(denoiser.share * length)), length - 1)
    if denoiser.mean_length is None:
        return np.arange(length) >= length - num_masked
    num_spans = min(max(1, round(num_masked / denoiser.mean_length)), num_masked, length - num_masked)
    # kept, masked, kept, masked, ...: none of them empty
    lengths = np.stack([_pieces(generator, num, num_spans) for num in (length - num_masked, num_masked)], 1)
    return np.repeat(np.tile([False, True], num_spans), lengths.flatten())


def _pieces(generator: np.random.Generator, num: int, num_pieces: int) -> NDArray[np.int64]:
    """Return `num` cut into pieces, none of them empty, every such cut equally likely."""
    cuts = np.sort(_chosen(generator, num - 1, num_pieces - 1)) + 1
    return np.diff(cuts, prepend=0, append=num)


# --- draws ---


def _chosen(generator: np.random.Generator, num: int, num_chosen: int) -> NDArray[np.int64]:
    """Return different ones of 0 ..< num, in no order."""
    return np.argsort(integers64(generator, num), kind="stable")[:num_chosen] if num else np.zeros(0, np.int64)


def _uniform(generator: np.random.Generator, num: int) -> NDArray[np.float64]:
    return (integers64(generator, num) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _masked(
    tokens: Int64[Tensor, "batch tokens"],
    given: NDArray[np.int64],
    is_masked: NDArray[np.bool_],
    is_asked: NDArray[np.bool_],
) -> Masked:
    mask, asked, inputs = (torch.from_numpy(each).to(tokens.device) for each in (is_masked, is_asked, given))
    return Masked(inputs, mask, tokens.masked_fill(~asked, UNTRAINED))


# --- bodies ---


def see_all(
    body: SectionModule, x: Float[Tensor, "batch tokens width"], num_seen: Int64[Tensor, " batch"] | None = None
) -> Float[Tensor, "batch tokens width"]:
    """Return what a body makes of a residual stream where every place sees all.

    Args:
        num_seen: in each row all places see so many, the first; None: the whole row.

    Raises:
        ConfigError: the body has a window.
    """
    if body.config.window is not UNSET:
        raise ConfigError(f"a body whose tokens see {body.config.window} at most cannot see all. Take one without.")
    batch, length, _ = x.shape
    seen = torch.zeros(batch, 1, length, length, device=x.device)
    if num_seen is not None:
        is_hidden = torch.arange(length, device=x.device) >= num_seen[:, None]
        seen = seen.masked_fill(is_hidden[:, None, None], -inf)
    turn = rotation(body.angle_bits.view(torch.float32), 0, length)
    for layer in body.layers.values():
        x = layer(x, turn, None, seen)
    return x


def denoising_loss(space: Space, body: SectionModule, masked: Masked) -> Float32[Tensor, ""]:
    """Return the mean cross entropy of what is asked, nats per token."""
    rows = torch.where(masked.is_masked[..., None], mask_row(space), space.begin(masked.tokens))
    return space.loss(see_all(body, rows), masked.targets)


def mask_row(space: Space) -> Float32[Tensor, " width"]:
    """Return what a mask goes in as: the mean of all rows, at their root mean square. It is frozen as they are."""
    return normed(space.embed.mean(0), space.norm_eps)


# --- below a causal top ---


class StackedBody(NamedTuple):
    """A body of a stack, and whether its places see all of a text."""

    body: SectionModule
    sees_all: bool


def logits(
    space: Space, members: Sequence[StackedBody], tokens: Int64[Tensor, "batch tokens"]
) -> Float32[Tensor, "batch tokens vocab"]:
    """Return the logits of each next token in one pass, each member reading at root mean square 1 what the last made.

    Raises:
        ConfigError: a member sees all of a text, so that logits would know what they predict.
    """
    for number, member in enumerate(members):
        if member.sees_all:
            raise ConfigError(
                f"member {number} sees all of a text: in one pass it would tell the members above it the tokens that "
                "they are to predict, and the loss would be far too low. Ask for each token by those before it alone "
                "(prefix_logits)."
            )
    return space.logits(_through(space, members, tokens))


def prefix_logits(
    space: Space, members: Sequence[StackedBody], tokens: Int64[Tensor, " tokens"], places: Int64[Tensor, " places"]
) -> Float32[Tensor, "places vocab"]:
    """Return the logits of the token after each of `places`, computed of the tokens up to there alone.

    It costs as many passes as there are places.

    Raises:
        ConfigError: the last member sees all: what it tells is the token at a place, and not the next.
    """
    if members[-1].sees_all:
        raise ConfigError("the last member sees all of a text: it tells the token at a place. Put a causal one on top.")
    rows = tokens.expand(len(places), -1)
    x = _through(space, members, rows, num_seen=places + 1)
    return space.logits(x[torch.arange(len(places), device=x.device), places])


def _through(
    space: Space,
    members: Sequence[StackedBody],
    tokens: Int64[Tensor, "batch tokens"],
    num_seen: Int64[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch tokens width"]:
    x: Tensor = space.begin(tokens)
    for number, (body, sees_all) in enumerate(members):
        given = normed(x, space.norm_eps) if number else x
        x = see_all(body, given, num_seen) if sees_all else body(given)
    return x


def next_by_mask(
    space: Space, body: SectionModule, tokens: Int64[Tensor, " tokens"], places: Int64[Tensor, " places"]
) -> Float32[Tensor, "places vocab"]:
    """Return the logits of the token after each of `places` by a body that sees all: those up to there, then a mask.

    Args:
        places: before the last token.
    """
    rows = space.begin(tokens).expand(len(places), -1, -1).clone()
    here = torch.arange(len(places), device=rows.device)
    rows[here, places + 1] = mask_row(space)
    return space.logits(see_all(body, rows, places + 2)[here, places + 1])
