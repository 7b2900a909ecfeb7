"""What models say of documents: the features by which they are routed, and their losses under a path.

    z = mean over a text's tokens of what the head reads

z comes from one model that never changes, the one that all paths began as: so it can be computed once, and by anybody.
On two kinds of processors its last digits differ, and so may the path of a document that lies between two. Shards are
therefore told as lists of documents.

DiPaCo: Douillard et al., 2403.10616, section 2.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, linear

from weft.compose.paths.routing import Features
from weft.errors import ConfigError
from weft.model.transformer import Transformer

AT_ONCE = 4096  # tokens of one forward pass
LOGITS_AT_ONCE = 1024  # tokens whose logits are held

Text = NDArray[np.integer]


@torch.inference_mode()
def features(model: Transformer, texts: Sequence[Text]) -> Features:
    """Return z of each text.

    Args:
        model: that all paths began as.
        texts: token ids: the first tokens of a document, as many as the router reads; or a later piece of it.

    Raises:
        ConfigError: a text is empty.
    """
    if any(len(text) == 0 for text in texts):
        raise ConfigError("features: a text is empty. Leave empty documents out: nothing says where they belong.")
    found = np.empty((len(texts), model.config.width))
    for rows in _batches([len(text) for text in texts]):
        longest = max(len(texts[row]) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        is_there = torch.zeros(len(rows), longest, 1)
        for place, row in enumerate(rows):  # what fills up short ones comes after them, and changes nothing before
            tokens[place, : len(texts[row])] = torch.from_numpy(texts[row].astype(np.int64))
            is_there[place, : len(texts[row])] = 1
        device = model.head_weight.device
        x, is_there = model.features(tokens.to(device), None).float(), is_there.to(device)
        found[rows] = ((x * is_there).sum(1) / is_there.sum(1)).cpu().numpy()
    return found


@torch.inference_mode()
def token_losses(model: Transformer, windows: Int64[np.ndarray, "windows words"]) -> Float64[np.ndarray, "windows _"]:
    """Return the loss of each token of a window but its first, nats."""
    device, weight = model.head_weight.device, model.head_weight
    num_windows, num_tokens = windows.shape[0], windows.shape[1] - 1
    found = np.empty((num_windows, num_tokens))
    for rows in _batches([num_tokens] * num_windows):
        words = torch.from_numpy(windows[rows].astype(np.int64)).to(device)
        x, targets = model.features(words[:, :-1], None).flatten(0, 1), words[:, 1:].flatten()
        losses = [
            cross_entropy(linear(x[here], weight).float(), targets[here], reduction="none")
            for here in (slice(start, start + LOGITS_AT_ONCE) for start in range(0, len(targets), LOGITS_AT_ONCE))
        ]
        found[rows] = torch.cat(losses).view(len(rows), num_tokens).cpu().numpy()
    return found


def document_losses(model: Transformer, texts: Sequence[Text]) -> list[Float64[np.ndarray, " _"]]:
    """Return the loss of each token of documents of any length but their first, nats.

    Raises:
        ConfigError: a document has fewer than two tokens.
    """
    lengths = [len(text) - 1 for text in texts]
    if min(lengths, default=1) < 1:
        raise ConfigError("losses: a document of fewer than two tokens. Leave it out: nothing of it is predicted.")
    found = [np.empty(0)] * len(texts)
    for rows in _batches(lengths):
        words = np.zeros((len(rows), lengths[rows[-1]] + 1), dtype=np.int64)
        for place, row in enumerate(rows):  # what fills up short ones comes after them, and changes nothing before
            words[place, : len(texts[row])] = texts[row]
        for losses, row in zip(token_losses(model, words), rows, strict=True):
            found[row] = losses[: lengths[row]]
    return found


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield rows that one forward pass takes, those of like length together."""
    rows = list[int]()
    for row in np.argsort(np.array(lengths, dtype=np.int64), kind="stable").tolist():
        if rows and (len(rows) + 1) * lengths[row] > AT_ONCE:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
