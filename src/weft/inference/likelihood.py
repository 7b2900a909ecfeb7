"""How likely a model thinks texts, many at once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, UInt32
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from weft.model.transformer import Transformer

TOKENS_AT_ONCE = 4096  # of one forward pass
LOGITS_AT_ONCE = 1024  # tokens whose logits are held


class Scored(NamedTuple):
    """A text, of which some tokens are asked about; never the first, which nothing predicts."""

    ids: UInt32[np.ndarray, " tokens"]
    is_asked: Bool[np.ndarray, " tokens"]


def log_likelihoods(model: Transformer, texts: Sequence[Scored]) -> Iterator[tuple[int, float]]:
    """Yield the number of each text and the log-probability of what is asked of it, nats; the shortest text first."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number].ids))
    at_once = list[int]()
    for number in order:
        if at_once and (len(at_once) + 1) * len(texts[number].ids) > TOKENS_AT_ONCE:
            yield from zip(at_once, _together(model, [texts[each] for each in at_once]), strict=True)
            at_once = []
        at_once.append(number)
    if at_once:
        yield from zip(at_once, _together(model, [texts[each] for each in at_once]), strict=True)


@torch.inference_mode()
def _together(model: Transformer, texts: Sequence[Scored]) -> list[float]:
    """Return the log-probabilities of a few texts; those after a text's end change nothing before it."""
    longest, weight = max(len(text.ids) for text in texts), model.head_weight
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    is_asked = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text.ids)] = torch.from_numpy(text.ids.astype(np.int64))
        is_asked[row, 1 : len(text.ids)] = torch.from_numpy(text.is_asked[1:])
    tokens, is_asked = tokens.to(weight.device), is_asked.to(weight.device)
    before = model.features(tokens, None)[:, :-1][is_asked[:, 1:]]
    targets = tokens[is_asked]
    losses = torch.cat(
        [
            _losses(before[start : start + LOGITS_AT_ONCE], weight, targets[start : start + LOGITS_AT_ONCE])
            for start in range(0, max(len(targets), 1), LOGITS_AT_ONCE)
        ]
    )
    rows = torch.nonzero(is_asked)[:, 0].cpu()
    sums = torch.zeros(len(texts), dtype=torch.float64).index_add_(
        0, rows, losses.cpu().double()
    )  # not every GPU has fp64
    return [-each for each in sums.tolist()]


def _losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(linear(x, weight).float(), targets, reduction="none")
