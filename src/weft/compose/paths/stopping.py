"""Early stopping, path by path: each is read with the parameters that were best on its own shard's validation set.

A path goes on training all the same, since others share its modules. What is kept is a whole path: beside the modules,
one more model for each path, on its own peer.

DiPaCo: Douillard et al., 2403.10616, section 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32
from torch import Tensor

from weft.compose.paths.features import Text, document_losses
from weft.compose.paths.levels import Path
from weft.errors import NotFinite
from weft.model.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Best:
    """
    Args:
        loss: on the shard's validation set, nats per token.
        round: after which it was found.
        vector: of the whole path then.
    """

    loss: float
    round: int
    vector: Float32[Tensor, " num"]


def heldout_loss(model: Transformer, texts: Sequence[Text]) -> float:
    """Return the loss of a shard's validation set, nats per token.

    Args:
        texts: its documents, one at least, of two tokens or more.
    """
    return float(np.concatenate(document_losses(model, texts)).mean())


def better(before: Best | None, loss: float, after_round: int, vector: Float32[Tensor, " num"]) -> Best:
    """Return what is kept of a path after one more round: a copy, if it is better than all before; equal is not.

    Raises:
        NotFinite: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise NotFinite(
            f"round {after_round}: a path's validation loss is {loss}: it has diverged. Go back to the modules of an "
            "earlier round, with a lower inner or outer learning rate."
        )
    if before is not None and before.loss <= loss:
        return before
    return Best(loss, after_round, vector.clone())


class EarlyStopping:
    """The best parameters of all paths so far."""

    def __init__(self) -> None:
        self.best: dict[Path, Best] = {}

    def hear(self, path: Path, loss: float, after_round: int, vector: Float32[Tensor, " num"]) -> bool:
        """Take in what a path came to; return whether it is kept. The arguments are those of `better`."""
        before = self.best.get(path)
        self.best[path] = better(before, loss, after_round, vector)
        return self.best[path] is not before
