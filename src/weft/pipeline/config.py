"""How a run whose model is cut into sections passes micro-batches through them, as a run file says it.

It does not know how many sections there are, nor who holds them.
"""

from typing import Annotated

from msgspec import Meta

from weft.config import Config
from weft.pipeline.activations import BY_DEFAULT, GradientConfig

MAX_MICRO_BATCH = 1 << 10  # samples: their activations are sent in one piece


class PipelineConfig(Config, frozen=True, kw_only=True):
    """The table `[pipeline]`: equal on all peers of a run with stages."""

    micro_batch: Annotated[
        int, Meta(ge=1, le=MAX_MICRO_BATCH, description="samples that pass through the stages together")
    ] = 1
    activations: GradientConfig = BY_DEFAULT
    """Those that need nothing of model, members or samples: `subspace` and `aqsgd` are measured, not for runs yet."""
    gradients: GradientConfig | None = None
    """Of activations; None: as these, where that can be."""
    rebalance_s: Annotated[
        float, Meta(ge=0, description="seconds between two looks whether a peer should change its stage; 0: never")
    ] = 300.0
