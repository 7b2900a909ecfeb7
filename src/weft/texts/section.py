"""What computes a stage's layers for texts: rows are decoded, passed through, and encoded; the last stage draws.

On the wire each row is encoded by itself, so that a log can be cut at any place, and a row's numbers do not depend on
which others were sent with it. With exact numbers rows are handed on in fp32, and what a model in sections
gives is what it gives whole, to the bit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import Bf16Config
from weft.codec.dense import Fp32
from weft.engine.batch import Piece
from weft.engine.draw import Counts, Drawing, Drawn, draw
from weft.engine.fingerprint import Floats, fingerprint
from weft.engine.load import kind_for
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import num_pages
from weft.engine.step import KeysAndValues, Stepper, Weights, on_host
from weft.errors import ConfigError, PayloadError, WeftError
from weft.pipeline.codec.activations import ActivationConfig, NumberConfig
from weft.texts.forms import Followed
from weft.texts.messages import BLOCK, TOKEN_NBYTES, OpenSequence


def codec_of(activations: ActivationConfig) -> Codec:
    """Return what encodes a row of activations of texts, the same at all peers of a run: the run's own where it is one
    of numbers alone, else bf16."""
    return build(activations if isinstance(activations, NumberConfig) else Bf16Config())


def kind_with(codec: Codec, device: torch.device) -> Kind:
    """Return the numbers of a member: exact ones where activations are handed on whole, and cost no more than int8."""
    kind = kind_for(device)
    return "exact" if kind == "int8" and isinstance(codec, Fp32) else kind


@dataclass(frozen=True)
class Draw:
    """How the token after a piece is drawn.

    Args:
        counts: of the text so far, where penalties need them.
        stop_ids: tokens that end the text.
        most: tokens of the whole text.
        form: that the text follows; None: it is free.
        before: tokens of the text from the form's begin on, before the first that is drawn.
    """

    drawing: Drawing
    counts: Counts | None
    stop_ids: Collection[int] = ()
    most: int = 0
    form: Followed | None = None
    before: Sequence[int] = ()

    def is_signed(self, place: int, token: int) -> bool:
        """Return whether a receipt ends with the row that a token was drawn after."""
        return place % BLOCK == 0 or place + 1 >= self.most or token in self.stop_ids


@dataclass(frozen=True)
class Work:
    """Rows of one text to be computed.

    Args:
        data: tokens before the first section, encoded rows before others.
        pages: of the text.
        draw: after the last `num_draws` of them, in the last section; None: nothing is drawn.
    """

    data: bytes
    num: int
    start: int
    pages: Sequence[int]
    draw: Draw | None = None
    num_draws: int = 1

    @property
    def drawn_places(self) -> range:
        """Return the places of the tokens that are drawn."""
        stop = self.start + self.num + 1
        return range(stop - self.num_draws, stop) if self.draw is not None else range(stop, stop)


@dataclass(frozen=True)
class Done:
    """What came of it.

    Args:
        data: encoded rows for the next section; none of the last.
        drawn: one token for each of `Work.drawn_places`; of a form that is complete none for those behind it.
        fingerprints: of logits that a receipt needs, by the place of the token.
        failed: what is wrong with what came in, or with what came out.
    """

    data: bytes = b""
    drawn: tuple[Drawn, ...] = ()
    fingerprints: Mapping[int, bytes] = field(default_factory=dict)
    failed: WeftError | None = field(default=None, compare=False)


def tokens_of(data: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(data, "<u4")]


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


class Section:
    """Not safe to use from two threads at a time.

    Args:
        codec: of activations between sections.
        digest: of the parameters (`receipt.weights_digest`); None: no receipts are given.

    Raises:
        ConfigError: numbers are exact, and the codec rounds.
    """

    def __init__(self, weights: Weights, kept: KeysAndValues, codec: Codec, digest: bytes | None = None) -> None:
        if weights.kind == "exact" and not isinstance(codec, Fp32):
            raise ConfigError(
                "exact numbers of a model in stages need activations in fp32, and this run rounds them: a text would "
                "not be the same to the bit. Choose other numbers, or a run whose activations are in fp32 (pipeline)."
            )
        self._stepper = Stepper(weights, kept)
        self._codec = codec
        self.digest, self.kind = digest, weights.kind
        self._width = weights.config.width
        self.vocab_size = weights.config.vocab_size
        self.is_first, self.is_last = weights.section.is_first, weights.section.is_last
        self.row_nbytes = codec.nbytes(self._width)
        self.given_nbytes = TOKEN_NBYTES if self.is_first else self.row_nbytes

    @property
    def num_graphs(self) -> int:
        return self._stepper.num_graphs

    def can_draw(self, opened: OpenSequence) -> bool:
        """Return whether all tokens that drawing looks at are in the vocabulary."""
        biased = () if opened.drawing is None else (token for token, _ in opened.drawing.bias)
        return all(token < self.vocab_size for token in (*biased, *tokens_of(opened.tokens)))

    def compute(self, works: Sequence[Work]) -> list[Done]:
        """Compute a step; what is wrong with one text's rows is said of that text alone."""
        found = list[Done | None]()
        pieces = list[Piece]()
        for work in works:
            try:
                given = self._given(work)
            except PayloadError as error:
                found.append(Done(failed=error))
                continue
            found.append(None)
            pieces.append(Piece(given, work.start, work.pages, num_draws=len(work.drawn_places)))
        sound = [work for work, each in zip(works, found, strict=True) if each is None]
        results = iter(self._computed(sound, pieces))
        return [next(results) if each is None else each for each in found]

    def try_out(self, sizes: Sequence[int], pages: Sequence[int]) -> None:
        """Compute a step of texts that nobody has asked for.

        Args:
            sizes: tokens of each.
            pages: for all of them.

        Raises:
            WeftError: it cannot.
        """
        draw = Draw(Drawing(), None, most=1 + max(sizes) + BLOCK) if self.is_last else None  # no receipt ends here
        given = packed([0]) if self.is_first else bytes(self.given_nbytes)
        ends = accumulate(map(num_pages, sizes), initial=0)
        own = [tuple(pages[start:stop]) for start, stop in pairwise(ends)]
        works = [Work(given * num, num, 0, each, draw) for num, each in zip(sizes, own, strict=True)]
        for done in self.compute(works):
            if done.failed is not None:
                raise done.failed

    def _computed(self, works: Sequence[Work], pieces: Sequence[Piece]) -> list[Done]:
        if not pieces:
            return []
        if not self.is_last:
            return [self._encoded(x) for x in self._stepper.pass_on(pieces)]
        logits = iter(on_host(self._stepper.step(pieces)).astype(np.float64))
        return [_drawn([next(logits) for _ in work.drawn_places], work) for work in works]

    def logits(self, work: Work) -> NDArray[np.float64]:
        """Return the logits after each row of a piece, in the last section: [rows, vocab].

        Raises:
            PayloadError: the rows are none.
        """
        piece = Piece(self._given(work), work.start, work.pages, num_draws=work.num)
        return on_host(self._stepper.step([piece])).astype(np.float64)

    def row_of(self, data: bytes) -> Floats:
        """Return what encodes to `data`: one row of activations.

        Raises:
            PayloadError: they encode nothing.
        """
        found: Floats = self._codec.decode(data, self._width).numpy()
        return found

    def _given(self, work: Work) -> list[int] | Tensor:
        if self.is_first:
            tokens = tokens_of(work.data)
            if any(token >= self.vocab_size for token in tokens):
                raise PayloadError("a token is outside the model's vocabulary")
            return tokens
        rows = [
            self._codec.decode(work.data[at : at + self.row_nbytes], self._width)
            for at in range(0, len(work.data), self.row_nbytes)
        ]
        return torch.stack(rows)

    def _encoded(self, x: Float[Tensor, "new width"]) -> Done:
        try:
            rows = x.float().cpu().contiguous()
            return Done(b"".join(bytes(self._codec.encode(row)) for row in rows))
        except WeftError as error:  # not finite
            return Done(failed=error)


def _drawn(logits: Sequence[NDArray[np.float64]], work: Work) -> Done:
    how = work.draw
    if how is None:
        return Done()
    tokens, drawn, fingerprints = list(how.before), list[Drawn](), dict[int, bytes]()
    try:
        for here, place in zip(logits, work.drawn_places, strict=True):
            allowed = None if how.form is None else how.form.allowed_after(tokens)
            if allowed is not None and not allowed.any():
                break
            one = draw(here, how.drawing, place, how.counts, allowed)
            drawn.append(one)
            tokens.append(one.token)
            is_complete = how.form is not None and how.form.is_complete_after(tokens)
            if is_complete or how.is_signed(place, one.token):
                fingerprints[place] = fingerprint(here.astype(np.float32))
        return Done(drawn=tuple(drawn), fingerprints=fingerprints)
    except WeftError as error:
        return Done(failed=error)
