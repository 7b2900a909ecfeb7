"""Adding up a few numbers of all at a time gives the bits of adding up one contribution after the other."""

import pytest
import torch

from weft.codec import bounds
from weft.codec.build import build
from weft.codec.config import Int8Config
from weft.codec.dense import Bf16, Fp32
from weft.errors import PayloadError
from weft.sync.merge.dense import DENSE_STEP, Dense, add_up, check_encoded, is_dense
from weft.sync.merge.mean import MAX_WEIGHT
from weft.sync.merge.reduce import Coding, Merger

NUM = 2 * DENSE_STEP + 77
INT8 = build(Int8Config(), 0)


def vector(seed: int) -> torch.Tensor:
    return torch.randn(NUM, generator=torch.Generator().manual_seed(seed)) * 10.0**seed


def nobody(_number, _values):
    pass


def brought(codec, weights=(3, 0, 5)):
    return [Dense(weight, codec.encode(vector(seed)), codec) for seed, weight in enumerate(weights)]


@pytest.mark.parametrize("codec", [Fp32(), Bf16()], ids=["fp32", "bf16"])
@pytest.mark.parametrize("awaited", [0, 7])
def test_the_bits_are_those_of_a_merger(codec, awaited):
    merger, lengths = Merger(NUM, Coding(codec, codec), awaited), []
    for each in brought(codec):
        merger.add(each.weight, each.data)
        lengths.append(float(torch.linalg.vector_norm(merger.decoded)))
    squares = [0.0] * len(lengths)

    def seen(number, values):
        squares[number] += float(values.double().square().sum())

    mean, faults = add_up(brought(codec), NUM, awaited, bounds.empty, seen)
    assert torch.equal(mean, merger.merged())
    assert faults == [None] * len(lengths)
    assert [square**0.5 for square in squares] == pytest.approx(lengths, rel=1e-4)  # of fp32 sums


@pytest.mark.parametrize("place", [0, DENSE_STEP, NUM - 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_vector_is_named_wherever_it_is_wrong(place, value):
    parts = brought(Fp32())
    wrong = vector(1)
    wrong[place] = value
    parts[1] = Dense(4, memoryview(wrong.numpy()).cast("B"), Fp32())
    _, found = add_up(parts, NUM, 0, bounds.empty, nobody)
    assert [isinstance(each, PayloadError) for each in found] == [False, True, False]


@pytest.mark.parametrize(
    "wrong",
    [Dense(4, bytes(4 * NUM - 4), Fp32()), Dense(MAX_WEIGHT, bytes(4 * NUM), Fp32())],
    ids=["another length", "too much weight"],
)
def test_what_merges_refuse_is_refused(wrong):
    _, found = add_up([*brought(Fp32()), wrong], NUM, 0, bounds.empty, nobody)
    assert [isinstance(each, PayloadError) for each in found] == [False, False, False, True]


def test_of_no_tokens_there_is_no_mean():
    with pytest.raises(PayloadError, match="nothing to merge"):
        add_up(brought(Fp32(), (0, 0)), NUM, 0, bounds.empty, nobody)


def test_others_are_merged_otherwise():
    assert is_dense("peers_mean", brought(Fp32()))
    assert not is_dense("senders_mean", brought(Fp32()))
    assert not is_dense("peers_mean", [*brought(Fp32()), *brought(INT8)])


@pytest.mark.parametrize("codec", [Fp32(), Bf16(), INT8], ids=["fp32", "bf16", "int8"])
def test_bytes_that_decode_pass_and_others_do_not(codec):
    data = bytes(codec.encode(vector(0)))
    check_encoded(codec, data, NUM, bounds.empty)
    with pytest.raises(PayloadError):
        check_encoded(codec, data[:-1], NUM, bounds.empty)
    with pytest.raises(PayloadError):
        check_encoded(codec, b"\xff" * len(data), NUM, bounds.empty)


def test_a_large_part_takes_little_memory_beside_it(monkeypatch):
    asked = []

    def empty(num, dtype):
        asked.append(num)
        return bounds.empty(num, dtype)

    check_encoded(Fp32(), bytes(4 * NUM), NUM, empty)
    assert max(asked) == DENSE_STEP
