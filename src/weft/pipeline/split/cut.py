"""Who of a team computes what of a layer: heads and columns of the ffn, or tokens; in proportion to speeds.

By heads, a part has whole groups of a key and value head with its query heads, and a share of the ffn's hidden columns.
Each has a group at least, so a team has at most as many members as the model has key and value heads.

By segments, a part has tokens. Under a causal mask a late token looks at more keys than an early one, so each part gets
two runs of tokens, one as far from the start as the other from the end (zig-zag):

    T = 12, speeds 2, 1, 1, 2      0 0 1 2 3 3 | 3 3 2 1 0 0      and each has its share of T times T + 1 pairs / 2

The token at place t looks at t + 1 keys and the one mirrored at T - t, together T + 1: a part of a tokens in each run
has a (T + 1) pairs, whatever the shares. A run each would give the last parts most of the work.

Striped assignment of causal work: Brandon et al., Striped Attention, 2311.09431; zig-zag as in common use since.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from weft.config import Config
from weft.errors import ConfigError
from weft.model.config import ModelConfig

MIN_TEAM, MAX_TEAM = 2, 8  # a sum has each member send to each: more would wait for the slowest of many


class SplitConfig(Config, frozen=True, kw_only=True):
    """The table `[pipeline.split]`: for members of a stage with good links to each other."""

    by: Annotated[
        Literal["heads", "segments"],
        Meta(description="what of a layer each computes: heads, or tokens of the sequence"),
    ] = "heads"
    members: Annotated[int, Meta(ge=MIN_TEAM, le=MAX_TEAM, description="of a stage, that compute together")] = 2


Segment = tuple[range, ...]  # runs of tokens, ascending, with a gap between two


def shares(num: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many of `num` things each gets: one at least, else in proportion to speeds as nearly as can be.

    The next one goes to who would take least time with it, of equal ones to the first: the slowest is done soonest
    (D'Hondt's method).

    Raises:
        ConfigError: fewer things than takers, or a speed that is none.
    """
    if num < len(speeds) or not all(0 < speed < float("inf") for speed in speeds):
        raise ConfigError(
            f"split: {num} things among peers of speeds {tuple(speeds)}: each needs one, and a speed > 0."
        )
    # Nobody gets fewer than its proportion rounded down, but for what those take who are owed less than one.
    found = [max(1, int(num * speed / sum(speeds)) - len(speeds)) for speed in speeds]
    for _ in range(num - sum(found)):
        found[min(range(len(speeds)), key=lambda i: ((found[i] + 1) / speeds[i], i))] += 1
    return tuple(found)


def runs(counts: Sequence[int], start: int = 0) -> tuple[range, ...]:
    """Return one range after the other, so long each."""
    found = []
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return tuple(found)


@dataclass(frozen=True)
class HeadsPart:
    """What of a layer one of a team computes."""

    groups: range  # key and value heads, with the query heads that look at them
    columns: range  # of the ffn's hidden ones


def heads_parts(config: ModelConfig, speeds: Sequence[float]) -> tuple[HeadsPart, ...]:
    """Cut a layer by heads for a team of these speeds.

    Raises:
        ConfigError: more members than key and value heads, or no team's number of them.
    """
    _check_team(len(speeds))
    if len(speeds) > config.num_kv_heads:
        raise ConfigError(
            f"split by heads: {len(speeds)} peers, and the model has {config.num_kv_heads} key and value heads. "
            "Take fewer, or split by segments."
        )
    groups, columns = runs(shares(config.num_kv_heads, speeds)), runs(shares(config.ffn_width, speeds))
    return tuple(HeadsPart(*each) for each in zip(groups, columns, strict=True))


def zigzag(num_tokens: int, speeds: Sequence[float]) -> tuple[Segment, ...]:
    """Cut a sequence into an early and a late run for each; the last one's meet in the middle and are one.

    Raises:
        ConfigError: fewer than two tokens for each, or no team's number of members.
    """
    _check_team(len(speeds))
    early = runs(shares(num_tokens // 2, speeds))
    *outer, inner = ((run, range(num_tokens - run.stop, num_tokens - run.start)) for run in early)
    return (*outer, (range(inner[0].start, inner[1].stop),))


def num_tokens(segment: Segment) -> int:
    return sum(map(len, segment))


def num_pairs(queries: Segment, keys: Segment) -> int:
    """Return how many pairs of a query and a key that is not after it there are: the work of attention."""
    total = 0
    for query in queries:
        for key in keys:
            # sum over q of |{k <= q}| = sum over q of clamp(q + 1 - start, 0, n)
            ramp = range(max(query.start, key.start), min(query.stop, key.stop))
            total += sum(place + 1 - key.start for place in (ramp.start, ramp.stop - 1)) * len(ramp) // 2
            total += len(range(max(query.start, key.stop), query.stop)) * len(key)
    return total


def _check_team(num: int) -> None:
    if not MIN_TEAM <= num <= MAX_TEAM:
        raise ConfigError(f"split: a team of {num}. Allowed: {MIN_TEAM} to {MAX_TEAM}.")
