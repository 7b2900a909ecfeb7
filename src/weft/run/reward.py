"""The table `[reward]`: learning from how answers are judged that the model draws itself."""

from typing import Annotated

import msgspec
from msgspec.structs import replace

from weft.config import Config
from weft.errors import ConfigError
from weft.extension import ExtensionConfig, source_of


class _Reward(Config, frozen=True, kw_only=True, tag_field="type"):
    samples: Annotated[int, msgspec.Meta(ge=2, le=256, description="answers that are drawn to each task")] = 8
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16, description="of an answer")] = 64
    clip: Annotated[
        float,
        msgspec.Meta(gt=0, lt=1, description="how much likelier or unlikelier than drawn an answer's token may become"),
    ] = 0.2


class MatchReward(_Reward, frozen=True, kw_only=True, tag="match"):
    """An answer is worth 1 where it is right, as its task says, and else 0. Group relative policy optimization."""

    runs_code: bool = False
    """There may be tasks with `match = "tests"`: members run code that the model wrote, each in a sandbox."""


class JudgeConfig(ExtensionConfig, frozen=True, kw_only=True, tag=False, tag_field=None):
    """A function from outside of weft (`weft.extend`), which every member has to have."""

    # Left out in a run file: of what this process knows by that name.
    source: Annotated[
        str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z", description="digest of the text it is made by")
    ] = ""


class ExtensionReward(_Reward, frozen=True, kw_only=True, tag="extension"):
    """What an answer is worth, from 0 to 1, is for a function from outside of weft to say."""

    judge: JudgeConfig


RewardConfig = MatchReward | ExtensionReward


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


def with_judge(reward: RewardConfig) -> RewardConfig:
    """Return it with the text of its judge, as a run names it.

    Raises:
        ConfigError: this process knows no such judge.
    """
    if isinstance(reward, ExtensionReward) and not reward.judge.source:
        return replace(reward, judge=replace(reward.judge, source=source_of(reward.judge.name)))
    return reward
