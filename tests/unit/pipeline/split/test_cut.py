"""Who gets what of a layer: everything once, by speed, and causal work alike for all."""

import msgspec
import pytest

from unit.pipeline.split.reference import contiguous
from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.pipeline.split.cut import heads_parts, num_pairs, num_tokens, shares, zigzag

CONFIG = msgspec.convert(
    {
        "vocab_size": 11,
        "num_layers": 1,
        "num_heads": 16,
        "num_kv_heads": 8,
        "width": 32,
        "ffn_width": 50,
        "max_seq_len": 64,
    },
    ModelConfig,
)
SPEEDS = [(1.0, 1.0), (5.0, 3.0), (1.0, 2.0, 1.0, 3.0), (100.0, 1.0, 1.0), (1.0,) * 8]


@pytest.mark.parametrize(
    ("num", "speeds", "expected"),
    [
        (8, (5.0, 3.0), (5, 3)),
        (8, (1.0, 1.0), (4, 4)),
        (7, (1.0, 1.0), (4, 3)),
        (8, (100.0, 1.0, 1.0), (6, 1, 1)),
        (3, (1.0, 2.0, 9.0), (1, 1, 1)),
    ],
)
def test_shares_follow_speeds_and_nobody_gets_nothing(
    num: int, speeds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert shares(num, speeds) == expected


@pytest.mark.parametrize("speeds", [*SPEEDS, (1e6, 1.0, 1.0, 2.0, 0.1)])
@pytest.mark.parametrize("num", [8, 9, 50, 333])
def test_shares_are_those_of_giving_out_one_after_the_other(num: int, speeds: tuple[float, ...]) -> None:
    found = [1] * len(speeds)
    for _ in range(num - len(speeds)):
        found[min(range(len(speeds)), key=lambda i: ((found[i] + 1) / speeds[i], i))] += 1
    assert shares(num, speeds) == tuple(found)


@pytest.mark.parametrize("speeds", [(1.0, 0.0), (1.0, float("nan")), (1.0, -2.0), (1.0, float("inf")), (1.0,) * 9])
def test_what_is_no_speed_and_more_takers_than_things_are_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="split"):
        shares(8, speeds)


@pytest.mark.parametrize("speeds", SPEEDS)
def test_every_head_and_column_is_in_one_part(speeds: tuple[float, ...]) -> None:
    parts = heads_parts(CONFIG, speeds)
    assert [group for part in parts for group in part.groups] == list(range(8))
    assert [column for part in parts for column in part.columns] == list(range(50))
    assert len(parts) == len(speeds)


def test_a_faster_peer_has_five_heads_of_eight() -> None:
    assert [len(part.groups) for part in heads_parts(CONFIG, (5.0, 3.0))] == [5, 3]


def test_more_peers_than_key_and_value_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 key and value heads"):
        heads_parts(msgspec.structs.replace(CONFIG, num_kv_heads=2), (1.0,) * 3)
    for num in (1, 9):
        with pytest.raises(ConfigError, match=f"a team of {num}"):
            zigzag(64, (1.0,) * num)


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("cut", [contiguous, zigzag])
@pytest.mark.parametrize("length", [16, 33, 1000])
def test_every_token_is_in_one_segment(cut: type, speeds: tuple[float, ...], length: int) -> None:
    segments = cut(length, speeds)
    assert sorted(place for segment in segments for run in segment for place in run) == list(range(length))
    assert sum(map(num_tokens, segments)) == length
    whole = (range(length),)
    assert sum(num_pairs(segment, whole) for segment in segments) == length * (length + 1) // 2


def test_pairs_are_counted_as_they_are() -> None:
    segments = [*zigzag(23, (1.0, 2.0, 1.0)), (range(4, 9), range(11, 12)), (range(5, 7),)]
    for queries in segments:
        for keys in segments:
            seen = [(q, k) for run in queries for q in run for other in keys for k in other if k <= q]
            assert num_pairs(queries, keys) == len(seen)


@pytest.mark.parametrize("speeds", SPEEDS)
def test_zigzag_gives_each_its_share_of_the_causal_work_and_contiguous_does_not(speeds: tuple[float, ...]) -> None:
    length = 1024
    whole = (range(length),)
    for segment in zigzag(length, speeds):
        assert num_pairs(segment, whole) == num_tokens(segment) * (length + 1) // 2
    per_token = [num_pairs(segment, whole) / num_tokens(segment) for segment in contiguous(length, speeds)]
    assert per_token[-1] > 1.5 * per_token[0]


def test_zigzag_is_balanced_at_each_step_of_the_ring() -> None:
    """All wait for the slowest at each step: work must be equal then, and not only in all."""
    length, num = 1024, 4

    def most(segments: tuple[tuple[range, ...], ...]) -> int:
        steps = [[num_pairs(segments[i], segments[(i - j) % num]) for i in range(num)] for j in range(num)]
        return sum(map(max, steps))

    ideal = length * (length + 1) / 2 / num
    assert most(zigzag(length, (1.0,) * num)) < 1.01 * ideal
    assert most(contiguous(length, (1.0,) * num)) > 1.7 * ideal
