"""How a run whose model is cut into sections passes micro-batches through them, as a run file says it."""

from typing import Annotated

from msgspec import Meta

from weft.config import Config
from weft.pipeline.codec.activations import BY_DEFAULT, ActivationConfig, GradientConfig, check_gradients
from weft.pipeline.messages import MAX_MICRO_BATCH
from weft.pipeline.split.cut import SplitConfig


class PipelineConfig(Config, frozen=True, kw_only=True):
    """The table `[pipeline]`: equal on all peers of a run with stages."""

    micro_batch: Annotated[
        int, Meta(ge=1, le=MAX_MICRO_BATCH, description="samples that pass through the stages together")
    ] = 1
    activations: ActivationConfig = BY_DEFAULT
    gradients: GradientConfig | None = None
    """Of activations; None: as these, where that can be."""
    split: SplitConfig | None = None
    """Whether members of a stage compute each micro-batch together."""
    rebalance_s: Annotated[
        float, Meta(ge=0, description="seconds between two looks whether a peer should change its stage; 0: never")
    ] = 300.0

    def __post_init__(self) -> None:
        check_gradients(self.activations, self.gradients)
