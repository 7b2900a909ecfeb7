"""How a run has the members of a stage compute layers together, as a run file says it."""

from typing import Annotated, Literal

from msgspec import Meta

from weft.config import Config
from weft.pipeline.split.cut import MAX_TEAM, MIN_TEAM


class SplitConfig(Config, frozen=True, kw_only=True):
    """The table `[pipeline.split]`: for members of a stage with good links to each other."""

    by: Annotated[
        Literal["heads", "segments"],
        Meta(description="what of a layer each computes: heads, or tokens of the sequence"),
    ] = "heads"
    members: Annotated[int, Meta(ge=MIN_TEAM, le=MAX_TEAM, description="of a stage, that compute together")] = 2
