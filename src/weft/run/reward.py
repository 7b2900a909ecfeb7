"""The table `[reward]`: learning from how answers are judged that the model draws itself."""

from typing import Annotated

import msgspec

from weft.config import Config
from weft.errors import ConfigError


class MatchReward(Config, frozen=True, kw_only=True, tag_field="type", tag="match"):
    """An answer is worth 1 where it is right, as its task says, and else 0. Group relative policy optimization."""

    samples: Annotated[int, msgspec.Meta(ge=2, le=256, description="answers that are drawn to each task")] = 8
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16, description="of an answer")] = 64
    clip: Annotated[
        float,
        msgspec.Meta(gt=0, lt=1, description="how much likelier or unlikelier than drawn an answer's token may become"),
    ] = 0.2


RewardConfig = MatchReward


def check(reward: RewardConfig, seq_len: int) -> None:
    """Refuse answers for which a row has no room.

    Raises:
        ConfigError: says what to lower.
    """
    if reward.max_tokens >= seq_len:
        raise ConfigError(
            f"reward.max_tokens: an answer of {reward.max_tokens} leaves no room for a task in train.seq_len = "
            f"{seq_len}. Lower it, or raise train.seq_len."
        )
