"""Learning from pairs of answers, of which one was chosen and one rejected.

    DPO     -log s(b (log p(c)/p0(c) - log p(r)/p0(r)))
    ORPO    -log p(c) / |c|  -  w log s(log odds(c) - log odds(r)),    odds = q / (1 - q),  q = p^(1/length)

c and r are the chosen and the rejected answer, s the logistic function, p the model's probability of an answer, p0 that
of the model that the run began with. What b (log p/p0) says of an answer is its reward.

DPO arXiv:2305.18290, equation 7; ORPO arXiv:2403.07691, equations 3 to 7.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from msgspec import UNSET
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, logsigmoid

from weft.data.rows import UNTRAINED, Batch, pairs_of, sums_of_texts
from weft.events import Preferred
from weft.model.transformer import SectionModule
from weft.run.config import DpoConfig, OrpoConfig, PreferenceConfig
from weft.training.learner import Measured


class Sums(NamedTuple):
    """What was found on held-out windows, summed: divided by how many there are, their means.

    Args:
        loss: nats.
        right: pairs of which the chosen answer has the higher reward.
        margin: of its reward above the other's, nats.
        kl: of each predicted token from what the run began with, nats.
        num_tokens: that were predicted, of which the divergence is.
    """

    loss: float
    right: float = 0.0
    margin: float = 0.0
    kl: float = 0.0
    num_tokens: float = 0.0

    def plus(self, other: "Sums") -> "Sums":
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


def mean_of(total: Sums, num: int, *, is_paired: bool) -> Measured:
    """Return the means of `num` predicted tokens, or pairs."""
    if not is_paired:
        return Measured(total.loss / num, num)
    kl = total.kl / total.num_tokens if total.num_tokens else UNSET
    preferred = Preferred(accuracy=total.right / num, margin=total.margin / num, kl=kl)
    return Measured(total.loss / num, num, preferred)


class Preference:
    """A loss of pairs.

    Args:
        reference: the model that the run began with; None: the loss needs none.
    """

    def __init__(self, config: PreferenceConfig, reference: SectionModule | None) -> None:
        self._config, self._reference = config, reference

    def loss(
        self,
        module: SectionModule,
        tokens: Int64[Tensor, "batch seq"],
        targets: Int64[Tensor, "batch seq"],
        positions: Int64[Tensor, "batch seq"],
    ) -> Float[Tensor, ""]:
        """Return the mean over all pairs; 0 where there are none."""
        there = pairs_of(targets, positions)
        logits, first = module(tokens, positions=positions), self._first(tokens, positions)
        losses, _ = self._of_pairs(logits, first, targets, positions)
        return (losses * there).sum() / there.sum().clamp(min=1)

    def sums(self, module: SectionModule, batch: Batch) -> Sums:
        """Return what `weft` tells of held-out pairs."""
        tokens, targets, positions = batch
        assert positions is not None
        there, logits = pairs_of(targets, positions), module(tokens, positions=positions)
        first = self._first(tokens, positions)
        losses, margins = (each[there].double() for each in self._of_pairs(logits, first, targets, positions))
        divergence, num = 0.0, 0
        if first is not None:
            predicted = targets != UNTRAINED
            expected, found = (log_softmax(each[predicted].float(), -1) for each in (first, logits))
            divergence, num = float(kl_div(expected, found, reduction="sum", log_target=True)), int(predicted.sum())
        return Sums(float(losses.sum()), float((margins > 0).sum()), float(margins.sum()), divergence, num)

    def _first(
        self, tokens: Int64[Tensor, "batch seq"], positions: Int64[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq vocab"] | None:
        """Return the reference's logits; None: there is none."""
        if self._reference is None:
            return None
        with torch.no_grad():
            logits: Tensor = self._reference(tokens, positions=positions)
            return logits

    def _of_pairs(
        self,
        logits: Float[Tensor, "batch seq vocab"],
        first: Float[Tensor, "batch seq vocab"] | None,
        targets: Int64[Tensor, "batch seq"],
        positions: Int64[Tensor, "batch seq"],
    ) -> tuple[Float[Tensor, "batch pair"], Float[Tensor, "batch pair"]]:
        """Return the loss and the reward's margin of each pair; of those that are not there, anything finite.

        Args:
            first: the reference's logits.
        """
        scores = _scores(logits, targets, positions)
        match self._config:
            case DpoConfig(beta=beta):
                assert first is not None
                rewards = beta * (scores - _scores(first, targets, positions))
                margins = rewards[..., 0] - rewards[..., 1]
                return -logsigmoid(margins), margins
            case OrpoConfig(weight=weight):
                lengths = sums_of_texts((targets != UNTRAINED).long(), positions).clamp(min=1)
                means = scores / lengths
                # Of 1 - q: a text that is certain has no odds.
                odds = means - torch.log1p(-torch.exp(means.clamp(max=-1e-6)))
                margins = odds[..., 0] - odds[..., 1]
                return -means[..., 0] - weight * logsigmoid(margins), margins


def _scores(
    logits: Float[Tensor, "batch seq vocab"], targets: Int64[Tensor, "batch seq"], positions: Int64[Tensor, "batch seq"]
) -> Float[Tensor, "batch pair 2"]:
    """Return the log probability of each answer, nats, computed in fp32."""
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return -sums_of_texts(losses.view(targets.shape), positions)
