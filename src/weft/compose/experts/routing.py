"""How a mixture of experts is trained for a little, and the control that it is told beside: one expert, trained on.

    router        learns which networks a token is for; nothing else changes
    ends          then embedding, head and last norm, too
    attention     then attention and the other norms
    all           then the experts' networks

What is frozen keeps its bits: it has no gradient, and nothing decays.

Branch-Train-MiX: arXiv:2403.07816; stages: BAR, arXiv:2604.18473.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.compose.descent import Descent, DescentConfig, Draw, Trained
from weft.compose.experts.mixture import MixtureConfig, Stage, is_trained, mixture_layout, over
from weft.cost.training import flops_per_token
from weft.model import flat
from weft.model.config import ModelConfig
from weft.model.transformer import Transformer
from weft.training.device import decoder


class MixtureDescent(Descent):
    """
    Args:
        vector: of the mixture; not changed: what is trained is a copy.
        stage: what is trained.
    """

    def __init__(
        self, training: DescentConfig, config: MixtureConfig, vector: Float32[Tensor, " num"], stage: Stage, draw: Draw
    ) -> None:
        self.vector = vector.clone()
        self._mixture, gradient = over(config, self.vector)
        self._mixture.train()
        self._mixture.thaw(stage)
        super().__init__(training, draw, {"mixture": Trained(self.vector, gradient, 0)})

    def _loss(self, number: int) -> Tensor:
        batch = self._draw(number)
        return self._mixture.trained_loss(batch.tokens, batch.targets)


class WholeDescent(Descent):
    """Training of one whole decoder, of which nothing decays, as of a mixture.

    Args:
        vector: not changed: what is trained is a copy.
    """

    def __init__(
        self, training: DescentConfig, config: ModelConfig, vector: Float32[Tensor, " num"], draw: Draw
    ) -> None:
        with torch.device("meta"):
            model = Transformer(config)
        self._flat = flat.over(model, vector.clone())
        super().__init__(training, draw, {"model": Trained(self._flat.vector, self._flat.gradient, 0)})

    @property
    def vector(self) -> Float32[Tensor, " num"]:
        return self._flat.vector

    def _loss(self, number: int) -> Tensor:
        loss: Tensor = self._flat.module.loss(*self._draw(number))
        return loss


def mixture_flops(config: MixtureConfig, seq_len: int, stage: Stage) -> float:
    """Return the operations of training a mixture on a token: all of it there and back, and the gradients of what is
    trained alone."""
    network = sum(span.num for span in mixture_layout(config) if ".ffn.experts.0." in span.name)
    routers = config.model.num_layers * config.num_experts * config.model.width
    whole = flops_per_token(decoder(config.model), seq_len) + 6.0 * ((config.top_k - 1) * network + routers)
    return whole - 2.0 * sum(num for name, num in _multiplied(config) if not is_trained(name, stage))


def _multiplied(config: MixtureConfig) -> Iterator[tuple[str, float]]:
    """Yield by how many numbers of each matrix a token is multiplied."""
    share = config.top_k / config.num_experts
    for span in mixture_layout(config):
        is_looked_up = span.name == "embed.weight" and not config.model.is_tied
        if span.has_decay and not is_looked_up:
            yield span.name, span.num * (share if ".ffn.experts." in span.name else 1.0)
