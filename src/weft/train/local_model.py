"""The model that a peer trains, over its local parameters: the run's, or the section of it that a stage has.

It does not know devices.
"""

import torch
from torch import Tensor

from weft.model import FlatModel, Transformer, attach, layout
from weft.model.flat import Part
from weft.model.transformer import SectionModule
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig


def model_over(vector: Tensor, run: RunConfig, peer: PeerConfig) -> FlatModel:
    """Return the run's model over `vector`, with a gradient beside it."""
    section = run.section if isinstance(run, StagedConfig) else None
    with torch.device("meta"):
        module: Part = Transformer(run.model, has_recompute=peer.has_recompute)
        if section is not None:  # whose passes are computed again as wholes, if they are
            module = SectionModule(run.model, section)
    attach(module, vector)
    gradient = torch.zeros_like(vector)
    spans = layout(run.model, section)
    for span in spans:
        module.get_parameter(span.name).grad = spans.view(gradient, span)
    return FlatModel(module, vector, gradient)
