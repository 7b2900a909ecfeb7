"""Bodies: the layers of a member, without the ends of its space, over one flat vector.

    x ──layers──► x'      [batch, tokens, width] both; no norm before the first layer, and none after the last

A body is a middle section of a decoder, so its vector is laid out as that of any section: what takes weight decay comes
first. A body whose layers write nothing to the residual stream is the identity: a member grows by such layers and says
what it said before.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from msgspec import UNSET
from torch import Tensor

from weft.compose.space import Space
from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import attach, layout
from weft.model.initial import initial_vector
from weft.model.sections import Section, middle
from weft.model.transformer import SectionModule

_WRITES = (".attention.out.weight", ".attention.out.bias", ".ffn.down.weight")  # to the residual stream


def fresh(config: ModelConfig, seed: int) -> Float[Tensor, " num"]:
    """Return the vector that a body is trained from."""
    return initial_vector(config, seed, middle(config))


def identity(config: ModelConfig, seed: int) -> Float[Tensor, " num"]:
    """Return the vector of a body that changes nothing yet, and can be trained: its output projections are 0."""
    vector, spans = fresh(config, seed), layout(config, middle(config))
    for span in spans:
        if span.name.endswith(_WRITES):
            spans.view(vector, span).zero_()
    return vector


def body(config: ModelConfig, vector: Float[Tensor, " num"]) -> SectionModule:
    """Return a body over `vector`, which is not copied; frozen.

    Raises:
        ConfigError: the vector is not as long as the body, or the config has an adapter.
    """
    if config.adapter is not UNSET:
        raise ConfigError("a body with an adapter: merge the adapter into its base first, then stack that.")
    module = unattached(config)
    attach(module, vector)
    return module.requires_grad_(False).eval()


def unattached(config: ModelConfig) -> SectionModule:
    """Return a body without memory, which `flat.attach` or `flat.over` gives it."""
    with torch.device("meta"):
        return SectionModule(config, middle(config))


def require_fit(config: ModelConfig, space: Space, what: str) -> None:
    """
    Raises:
        ConfigError: the residual stream of `what` is not as wide as the space.
    """
    if config.width != space.width:
        raise ConfigError(
            f"{what} has width {config.width}, the space {space.width}. Members have their space's width."
        )


# --- layers apart ---

LayerTensors = Mapping[str, Tensor]  # of one layer, by their names in it


def layers_of(module: SectionModule) -> list[LayerTensors]:
    """Return the tensors of each layer, in the order of the forward pass."""
    return [dict(layer.named_parameters()) for layer in module.layers.values()]


def vector_of(module: SectionModule) -> Float[Tensor, " num"]:
    """Return a copy of a body's flat vector."""
    return joined(module.config, layers_of(module))


def joined(config: ModelConfig, layers: Sequence[LayerTensors]) -> Float[Tensor, " num"]:
    """Return the vector of a body that is made of these layers, in this order.

    Args:
        config: of that body.
    """
    return gathered(config, middle(config), numbered(layers))


def numbered(layers: Sequence[LayerTensors]) -> dict[str, Tensor]:
    """Return the tensors of layers that follow each other, by their names in a decoder."""
    return {f"layers.{number}.{name}": each for number, layer in enumerate(layers) for name, each in layer.items()}


@torch.no_grad()
def gathered(config: ModelConfig, section: Section, tensors: Mapping[str, Tensor]) -> Float[Tensor, " num"]:
    """Return the flat vector of a section whose tensors these are, by name; a copy."""
    return torch.cat([tensors[span.name].flatten() for span in layout(config, section)])
