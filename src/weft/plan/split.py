"""How long one layer takes, forward and back: undivided on one peer, split by heads, split by segments of the sequence.

With M elements of matrices, B samples of T tokens, P = B T (T + 1) / 2 pairs of a query and a key it sees, all in fp32:

    work          6 M B T + 14 q_width P    2 and 4 a token and element; of a pair 4 forward, 10 back: scores again
    by heads      4 sums of 4 B T width bytes; each peer sends 2 (n - 1) / n of it, and nobody computes meanwhile
    by segments   3 (n - 1) blocks of 8 B (T / n) kv_width bytes; each peer computes while they are under way, but for
                  the last, the gradient of its own keys and values, which comes home when all is done

and each time that something is handed over there are 1.5 round trips: what is ready is said, asked for, and comes.

A split shortens the time of one micro-batch, and the memory it takes of each peer. Peers with a micro-batch each send
each other nothing and do more in the same time: a split is for micro-batches that are fewer than peers, or that one
cannot hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.model.config import ModelConfig
from weft.pipeline.split.cut import heads_parts, num_pairs, num_tokens, zigzag

NUM_TRIPS = 1.5  # round trips each time that something is handed over
NUM_SUMS = 4  # by heads: after attention and after the ffn, forward and back
PAIR_FORWARD, PAIR_BACK = 4, 10  # operations per pair and channel of queries: 2 products of vectors, and 5
MATRIX_FORWARD, MATRIX_BACK = 2, 4  # per token and element of a matrix
MIN_GAIN = 1.1  # below it a team is not worth what it can lose: measured times differ from these by more

Way = Literal["undivided", "by heads", "by segments"]


@dataclass(frozen=True)
class Layer:
    """What is computed."""

    config: ModelConfig
    batch: int
    seq_len: int

    @property
    def attention_matrices(self) -> int:
        return self.config.width * 2 * (self.config.q_width + self.config.kv_width)

    @property
    def ffn_matrices(self) -> int:
        return 3 * self.config.width * self.config.ffn_width

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def num_pairs(self) -> int:
        return self.batch * self.seq_len * (self.seq_len + 1) // 2

    @property
    def flops(self) -> float:
        """Of its forward and backward pass; scores that the mask hides are not computed."""
        matrices = (MATRIX_FORWARD + MATRIX_BACK) * (self.attention_matrices + self.ffn_matrices) * self.num_tokens
        return matrices + (PAIR_FORWARD + PAIR_BACK) * self.config.q_width * self.num_pairs


@dataclass(frozen=True)
class Link:
    """Between each two of a team. What all of one peer's links carry is `bps` each way."""

    bps: float
    rtt_s: float

    def handover_s(self, nbytes: float) -> float:
        return NUM_TRIPS * self.rtt_s + 8 * nbytes / self.bps


def heads_nbytes(layer: Layer, num_peers: int) -> int:
    """Return what each peer sends, and receives."""
    return NUM_SUMS * 2 * (num_peers - 1) * 4 * layer.num_tokens * layer.config.width // num_peers


def heads_s(layer: Layer, speeds: Sequence[float], link: Link) -> float:
    """Return the seconds of a layer split by heads.

    Args:
        speeds: flops/s of each peer; parts are as unequal as they are.

    Raises:
        ConfigError: more peers than key and value heads.
    """
    config, parts = layer.config, heads_parts(layer.config, speeds)
    of_tokens = (MATRIX_FORWARD + MATRIX_BACK) * layer.num_tokens
    attention = of_tokens * layer.attention_matrices + (PAIR_FORWARD + PAIR_BACK) * config.q_width * layer.num_pairs
    ffn = of_tokens * layer.ffn_matrices
    # All wait for the slowest at each sum.
    pairs = list(zip(parts, speeds, strict=True))
    work_s = max(attention * len(part.groups) / config.num_kv_heads / speed for part, speed in pairs)
    work_s += max(ffn * len(part.columns) / config.ffn_width / speed for part, speed in pairs)
    num_rounds = 1 if len(speeds) == 2 else 2  # each adds all; or each a piece, and gives it to all
    nbytes = heads_nbytes(layer, len(speeds)) / NUM_SUMS / num_rounds
    return work_s + NUM_SUMS * num_rounds * link.handover_s(nbytes)


def segments_s(layer: Layer, speeds: Sequence[float], link: Link) -> float:
    """Return the seconds of a layer split by segments, zig-zag.

    Args:
        speeds: flops/s of each peer; segments are as unequal as they are.

    Raises:
        ConfigError: fewer than two tokens for each peer.
    """
    num, segments = len(speeds), zigzag(layer.seq_len, speeds)
    most = max(layer.batch * num_tokens(segment) / speed for segment, speed in zip(segments, speeds, strict=True))
    token_s = most * (layer.attention_matrices + layer.ffn_matrices)
    whole = (range(layer.seq_len),)
    most = max(layer.batch * num_pairs(each, whole) / speed for each, speed in zip(segments, speeds, strict=True))
    step_s = most * layer.config.q_width / num
    forward_s, back_s = PAIR_FORWARD * step_s, PAIR_BACK * step_s
    nbytes = max(_block_nbytes(layer, num_tokens(segment)) for segment in segments)
    one_s, two_s = link.handover_s(nbytes), link.handover_s(2 * nbytes)
    # Forward, the next block comes while one is looked at. Back, its gradient follows a step behind, and goes home.
    ring_s = (num - 1) * max(forward_s, one_s) + forward_s
    ring_s += max(back_s, one_s) + (num - 2) * max(back_s, two_s) + max(back_s, one_s if num > 2 else 0.0) + one_s
    return (MATRIX_FORWARD + MATRIX_BACK) * token_s + ring_s


@dataclass(frozen=True)
class Advice:
    way: Way
    seconds: dict[Way, float]  # of a layer, of each way there is; undivided by the fastest
    num_peers: int

    @property
    def gain(self) -> float:
        """How many times as fast as undivided."""
        return self.seconds["undivided"] / self.seconds[self.way]

    @property
    def words(self) -> str:
        others = [f"{way} {_ms(took_s)}" for way, took_s in self.seconds.items() if way not in (self.way, "undivided")]
        beside = f" ({', '.join(others)})" if others else ""
        alone = _ms(self.seconds["undivided"])
        if self.way == "undivided":
            return f"undivided, {alone} a layer: {self.num_peers} peers together would not be faster{beside}"
        return (
            f"{self.way} over {self.num_peers} peers, {_ms(self.seconds[self.way])} a layer: {self.gain:.1f} times as "
            f"fast as undivided, {alone}{beside}; only if there are fewer micro-batches than peers, else each peer "
            "does one"
        )


def advice(layer: Layer, speeds: Sequence[float], link: Link) -> Advice:
    """Return which way is fastest for one micro-batch; a split only where it gains `MIN_GAIN`.

    Args:
        speeds: flops/s of each peer of the team.
    """
    seconds: dict[Way, float] = {"undivided": layer.flops / max(speeds)}
    if len(speeds) <= layer.config.num_kv_heads:
        seconds["by heads"] = heads_s(layer, speeds, link)
    if layer.seq_len >= 2 * len(speeds):
        seconds["by segments"] = segments_s(layer, speeds, link)
    way = min(seconds, key=lambda each: seconds[each])
    if seconds["undivided"] < MIN_GAIN * seconds[way]:
        way = "undivided"
    return Advice(way, seconds, len(speeds))


def _block_nbytes(layer: Layer, num: int) -> int:
    """Return the bytes of the keys and values of `num` tokens of each sample."""
    return 2 * 4 * layer.batch * num * layer.config.kv_width


def _ms(took_s: float) -> str:
    return f"{1e3 * took_s:,.3g} ms" if took_s < 1 else f"{took_s:,.3g} s"
