"""How a run whose model is cut into sections passes micro-batches through them, as a run file says it.

It does not know how many sections there are, nor who holds them.
"""

from typing import Annotated

from msgspec import Meta

from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int4Config, Int8Config
from weft.config import Config

MAX_MICRO_BATCH = 1 << 10  # samples: their activations are sent in one piece

ActivationConfig = Fp32Config | Bf16Config | Fp8Config | Int8Config | Int4Config


class PipelineConfig(Config, frozen=True, kw_only=True):
    """The table `[pipeline]`: equal on all peers of a run with stages."""

    micro_batch: Annotated[
        int, Meta(ge=1, le=MAX_MICRO_BATCH, description="samples that pass through the stages together")
    ] = 1
    activations: ActivationConfig = Bf16Config()
    gradients: ActivationConfig = Bf16Config()  # of activations
    rebalance_s: Annotated[
        float, Meta(ge=0, description="seconds between two looks whether a peer should change its stage; 0: never")
    ] = 300.0
