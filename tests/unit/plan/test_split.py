"""When a layer is worth splitting: hand-computed seconds and bytes, slow links and fast ones."""

import msgspec
import pytest
from msgspec.structs import replace

from weft.errors import ConfigError
from weft.model.config import ModelConfig, named
from weft.plan.split import Layer, Link, advice, heads_nbytes, heads_s, segments_s

# Matrices: 8 x (8 + 16) + 8 x 8 = 256 of attention, 3 x 8 x 10 = 240 of the ffn. Pairs of 4 tokens: 10.
CONFIG = msgspec.convert(
    {
        "vocab_size": 11,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "width": 8,
        "ffn_width": 10,
        "max_seq_len": 64,
    },
    ModelConfig,
)
SMALL = Layer(CONFIG, batch=1, seq_len=4)
LINK = Link(bps=1024.0, rtt_s=0.2)  # 128 bytes a second; 0.3 s beside them each time
SLOW, FAST = Link(100e6, 0.002), Link(10e9, 0.0005)
CPU, GPU = 50e9, 10e12


def test_undivided_is_its_operations() -> None:
    assert SMALL.flops == 6 * 496 * 4 + 14 * 8 * 10 == 13024
    assert SMALL.flops / 1000.0 == pytest.approx(13.024)
    assert Layer(CONFIG, batch=3, seq_len=4).flops == 3 * 13024


def test_by_heads_is_half_the_work_and_four_sums() -> None:
    # A sum: 4 bytes x 4 tokens x 8 channels = 128 bytes, 1 s and 0.3 s.
    assert heads_nbytes(SMALL, 2) == 4 * 128
    assert heads_s(SMALL, (1000.0, 1000.0), LINK) == pytest.approx(13.024 / 2 + 4 * 1.3)


def test_by_heads_of_three_is_two_rounds_of_thirds() -> None:
    config = replace(CONFIG, num_heads=3, num_kv_heads=3, head_width=4, ffn_width=12)
    layer = Layer(config, batch=1, seq_len=4)
    assert heads_nbytes(layer, 3) == 4 * 2 * 2 * 128 // 3
    # q_width 12: matrices 8 x 36 + 96 + 288 = 672; 6 x 672 x 4 + 14 x 12 x 10 = 17808.
    one_round = 0.3 + 2 / 3
    expected = 17.808 / 3 + 4 * 2 * one_round
    assert heads_s(layer, (1000.0,) * 3, LINK) == pytest.approx(expected, rel=1e-3)


def test_by_heads_unequal_peers_have_unequal_parts() -> None:
    config = replace(CONFIG, num_heads=4, num_kv_heads=4, head_width=2)
    layer, free = Layer(config, batch=1, seq_len=4), Link(float("inf"), 0.0)
    # 3 heads of 4 and 8 columns of 10 for the one three times as fast, 1 and 2 for the other: 8 / 3 > 2 of its columns.
    attention, ffn = 6 * 256 * 4 + 1120, 6 * 240 * 4
    assert heads_s(layer, (3000.0, 1000.0), free) == pytest.approx(attention / 4000 + max(0.8 / 3, 0.2) * ffn / 1000)


def test_by_segments_blocks_come_while_others_are_looked_at() -> None:
    # Two tokens and five pairs each. Token by token 2 x 496 x 2 = 1984 forward, twice that back.
    # Of pairs, each of two steps: 4 x 8 x 5 / 2 = 80 forward, 200 back. A block: 2 x 4 x 2 x 8 = 128 bytes, 1.3 s.
    expected = 3 * 1.984 + (1.3 + 0.08) + (1.3 + 0.2 + 1.3)
    assert segments_s(SMALL, (1000.0, 1000.0), LINK) == pytest.approx(expected)
    # Over a link that takes no time it is the work alone.
    free = Link(float("inf"), 0.0)
    assert segments_s(SMALL, (1000.0, 1000.0), free) == pytest.approx(13.024 / 2)


def test_by_segments_of_four_gradients_follow_their_blocks() -> None:
    layer = Layer(CONFIG, batch=1, seq_len=8)
    # Two tokens, 9 pairs each. Steps: 4 x 8 x 9 / 4 = 72 forward, 180 back, hidden by blocks of 1.3 s; two take 2.3 s.
    expected = 3 * 1.984 + 3 * 1.3 + 0.072 + (1.3 + 2 * 2.3 + 1.3 + 1.3)
    assert segments_s(layer, (1000.0,) * 4, LINK) == pytest.approx(expected)


def test_more_peers_than_heads_or_tokens_are_refused_and_not_advised() -> None:
    with pytest.raises(ConfigError, match="key and value heads"):
        heads_s(SMALL, (1.0,) * 3, FAST)
    with pytest.raises(ConfigError, match="each needs one"):
        segments_s(SMALL, (1.0,) * 3, FAST)
    assert set(advice(SMALL, (1.0,) * 3, FAST).seconds) == {"undivided"}


def test_over_100_mbit_a_small_model_is_not_worth_splitting() -> None:
    layer = Layer(named("35m", 32_000, 256), batch=8, seq_len=256)
    found = advice(layer, (CPU, CPU), SLOW)
    assert found.way == "undivided"
    assert found.gain == 1.0
    assert found.words.startswith("undivided, ")
    assert min(found.seconds, key=found.seconds.__getitem__) == "undivided"


def test_over_10_gbit_a_wide_model_and_a_long_sequence_are() -> None:
    wide = replace(named("7b", 32_000, 2048), num_kv_heads=32)
    by_heads = heads_s(Layer(wide, batch=1, seq_len=2048), (GPU / 10,) * 2, FAST)
    assert Layer(wide, batch=1, seq_len=2048).flops / (GPU / 10) > 1.8 * by_heads
    long = Layer(named("7b", 32_000, 32_768), batch=1, seq_len=32_768)
    found = advice(long, (GPU,) * 4, FAST)
    assert found.way == "by segments"
    assert 3.5 < found.gain <= 4.0
    assert "by segments over 4 peers" in found.words
    assert "times as fast as undivided" in found.words


def test_few_tokens_of_a_wide_model_go_by_heads() -> None:
    """Blocks of keys and values cost round trips, as sums do; where tokens are fewer than two each there is no ring."""
    layer = Layer(named("7b", 32_000, 2048), batch=64, seq_len=7)
    found = advice(layer, (GPU / 10,) * 4, FAST)
    assert found.way == "by heads"
    assert found.seconds.keys() == {"undivided", "by heads"}


def test_a_gain_within_what_is_not_known_is_not_advised() -> None:
    layer = Layer(named("7b", 32_000, 2048), batch=1, seq_len=2048)
    for bps in (20e6, 100e6, 500e6, 1e9, 10e9):
        found = advice(layer, (GPU / 10,) * 2, Link(bps, 0.001))
        best = min(found.seconds.values())
        assert (found.way == "undivided") == (found.seconds["undivided"] < 1.1 * best)


def test_groups_of_queries_make_segments_cheaper_and_heads_not() -> None:
    many = named("7b", 32_000, 4096)
    few = replace(many, num_kv_heads=2)
    one, other = (Layer(config, batch=1, seq_len=4096) for config in (many, few))
    slow = Link(1.0, 0.0)  # bytes are all that counts
    speeds = (1e15, 1e15)
    assert segments_s(other, speeds, slow) * 4 == pytest.approx(segments_s(one, speeds, slow))
    assert heads_nbytes(other, 2) == heads_nbytes(one, 2)
