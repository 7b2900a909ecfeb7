"""The weights of a run whose activations are sent in a subspace, which the model is held to (`pipeline.subspace`).

It does not know who trains them, nor how coordinates are sent.
"""

from jaxtyping import Float32
from torch import Tensor

from weft.model import ModelConfig, initial_vector
from weft.model.sections import Section
from weft.pipeline.codec.activations import SubspaceConfig
from weft.pipeline.codec.subspace import Confined, confined
from weft.pipeline.config import PipelineConfig
from weft.run.config import Genesis
from weft.run.staged import StagedConfig


def confinement(run: Genesis) -> Confined | None:
    """Return what holds the weights of a stage's run to its space; None: they may be any.

    Raises:
        ConfigError: the space has more dimensions than the model.
    """
    if not isinstance(run, StagedConfig) or run.section is None:
        return None
    return _confined(run.model, run.section, run.pipeline)


def seeded(model: ModelConfig, seed: int, section: Section, pipeline: PipelineConfig) -> Float32[Tensor, " num"]:
    """Return the weights that a piece of a model starts from, in a run that makes them of its seed."""
    vector, held = initial_vector(model, seed, section), _confined(model, section, pipeline)
    if held is not None:
        held.begin(vector)
    return vector


def _confined(model: ModelConfig, section: Section, pipeline: PipelineConfig) -> Confined | None:
    config = pipeline.activations
    return confined(config, model, section) if isinstance(config, SubspaceConfig) and section.num_sections > 1 else None
