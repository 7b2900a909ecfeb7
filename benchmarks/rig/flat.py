"""What is measured and tested against: a flat model for an optimizer of torch, and a whole vector of its sections'."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, layout
from weft.model.sections import sections


def two_groups(model: FlatModel) -> tuple[nn.Parameter, nn.Parameter]:
    """Return (decayed, rest) as two flat parameters over the same memory, gradients attached.

    An optimizer that treats numbers one by one (AdamW, SGD) is several times faster on two long vectors than on a
    hundred small tensors, and its result is the same.
    """
    border = model.layout.num_decayed
    decayed, rest = nn.Parameter(model.vector[:border]), nn.Parameter(model.vector[border:])
    decayed.grad, rest.grad = model.gradient[:border], model.gradient[border:]
    return decayed, rest


def join(config: ModelConfig, parts: Sequence[Float[Tensor, " _"]]) -> Float[Tensor, " num"]:
    """Return the whole's vector of those of all its sections; of a tied matrix the first one's.

    Raises:
        ConfigError: a vector is not as long as its section.
    """
    at = {span.name: span for span in layout(config)}
    vector = parts[0].new_empty(layout(config).num_parameters)
    for part, section in reversed(list(zip(parts, sections(config, len(parts)), strict=True))):
        there = layout(config, section)
        if part.numel() != there.num_parameters:
            raise ConfigError(
                f"section {section.number} of {len(parts)} has {there.num_parameters:,} parameters, the vector "
                f"{part.numel():,} numbers."
            )
        for span in there:
            vector[at[span.name].offset : at[span.name].stop] = part[span.offset : span.stop]
    return vector
