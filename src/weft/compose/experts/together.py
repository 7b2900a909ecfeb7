"""Experts that are served together: one step of all of them, and the logarithms of their mixed probabilities.

    pieces ──► each expert's layers ──► its last hidden states ──► its head ──► log p_j
                                                                    log sum_j w_j p_j    what is drawn from

It stands where an engine has a model's `Stepper`. What `ensemble` keeps for each text lies in pages here, beside the
experts' keys and values: for each token of a text the last hidden states, and how much each expert counts after it. So
texts share pages, give them up and come back as they do with one model, and guesses that turn out otherwise are written
over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from weft.compose.experts.ensemble import EVERY, LogWeights, mixed, top_of
from weft.engine.batch import Piece
from weft.engine.scheduling.pages import PAGE
from weft.engine.step import Stepper

_ROWS = 64  # logits of so many tokens at a time: a prompt's would fill memory


@dataclass(frozen=True)
class Rule:
    """How much each expert counts.

    Args:
        log_prior: before anything is known.
        about: what is said of texts, by their tokens so far; None: nothing is, or likelihoods say it.
        top: so many experts count, the rest nothing; None: all.
    """

    kind: Literal["uniform", "posterior", "distance"]
    log_prior: Float32[Tensor, " experts"]
    about: Callable[[Sequence[Sequence[int]]], LogWeights] | None = None
    top: int | None = None

    def heard(self, log_weights: Float32[Tensor, "rows experts"]) -> Float32[Tensor, "rows experts"]:
        """Return logarithms of weights of those that count most, which add up to 1."""
        return log_weights if self.top is None else top_of(log_weights, self.top)


def token_nbytes(widths: Sequence[int]) -> int:
    """Return what is kept for a token beside the experts' keys and values."""
    return sum(4 * width for width in widths) + 4 * len(widths) + 8


class Together:
    """
    Args:
        experts: whole models of one vocabulary, whose keys and values have the same pages.
        widths: of their hidden states.
    """

    has_sums = False
    sums: Sequence[Float[Tensor, " width"]] = ()

    def __init__(self, experts: Sequence[Stepper], widths: Sequence[int], rule: Rule, num_pages: int) -> None:
        self._experts, self._rule = experts, rule
        self._device = rule.log_prior.device
        places = (num_pages + 1) * PAGE  # and a page for nobody, as graphs have it
        self._states = [torch.zeros(places, width, device=self._device) for width in widths]
        self._log_weights = torch.zeros(places, len(experts), device=self._device)
        self._tokens = torch.zeros(places, dtype=torch.int64, device=self._device)

    @property
    def num_graphs(self) -> int:
        return sum(each.num_graphs for each in self._experts)

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece]) -> Float[Tensor, "drawing vocab"]:
        """Compute all rows, and return the logarithms of the mixed probabilities after those that draw, in order."""
        for expert, states in zip(self._experts, self._states, strict=True):
            for piece, x in zip(pieces, expert.pass_on(pieces), strict=True):
                states[self._places(piece, piece.start)] = x
        drawn = []
        for piece in pieces:
            self._tokens[self._places(piece, piece.start)] = torch.as_tensor(piece.tokens, device=self._device)
            self._weigh(piece)
        for piece in pieces:
            at = self._places(piece, piece.stop - piece.num_draws)
            if len(at):
                logs = torch.stack([self._log_probabilities(number, at) for number in range(len(self._experts))], 1)
                drawn.append(mixed(logs, self._rule.heard(self._log_weights[at])))
        return torch.cat(drawn) if drawn else self._states[0].new_empty(0, 0)

    def _places(self, piece: Piece, first: int) -> Int64[Tensor, " places"]:
        """Return where a text's tokens lie, from `first` on."""
        found = [piece.pages[at // PAGE] * PAGE + at % PAGE for at in range(first, piece.stop)]
        return torch.tensor(found, dtype=torch.int64, device=self._device)

    def _weigh(self, piece: Piece) -> None:
        """Keep how much each expert counts after each token of a piece."""
        here, rule = self._places(piece, piece.start), self._rule
        if rule.kind == "uniform":
            self._log_weights[here] = rule.log_prior
        elif rule.kind == "distance":
            self._log_weights[here] = self._by_words(piece)
        else:
            # p(j | x_<=t) ~ p(j | x_<t) p_j(x_t | x_<t); of the first token nobody says anything
            begins = piece.start == 0
            before = rule.log_prior if begins else self._log_weights[self._places(piece, piece.start - 1)[0]]
            told = torch.zeros(len(here), len(self._experts), dtype=torch.float64, device=self._device)
            if len(there := self._places(piece, max(piece.start - 1, 0))[:-1]):
                told[-len(there) :] = self._likelihoods(there, self._tokens[here[-len(there) :]]).double()
            self._log_weights[here] = (before.double() + told.cumsum(0)).log_softmax(-1).float()

    def _by_words(self, piece: Piece) -> Float32[Tensor, "new experts"]:
        """Return what the words say so far, looked at every `EVERY` tokens."""
        assert self._rule.about is not None
        all_places = self._places(piece, 0)
        tokens = self._tokens[all_places].tolist()
        looked = sorted({at // EVERY * EVERY for at in range(piece.start, piece.stop)})
        found = self._rule.about([tokens[: at + 1] for at in looked]).to(self._device)
        rows = [looked.index(at // EVERY * EVERY) for at in range(piece.start, piece.stop)]
        return found[rows]

    def _log_probabilities(self, number: int, at: Int64[Tensor, " places"]) -> Float32[Tensor, "places vocab"]:
        return self._experts[number].logits_of(self._states[number][at]).float().log_softmax(-1)

    def _likelihoods(
        self, at: Int64[Tensor, " places"], targets: Int64[Tensor, " places"]
    ) -> Float32[Tensor, "places experts"]:
        """Return how likely each expert held each target, as a logarithm."""
        found = []
        for start in range(0, len(at), _ROWS):
            some, wanted = at[start : start + _ROWS], targets[start : start + _ROWS, None]
            logs = [
                self._log_probabilities(number, some).gather(1, wanted)[:, 0] for number in range(len(self._experts))
            ]
            found.append(torch.stack(logs, 1))
        return torch.cat(found)
