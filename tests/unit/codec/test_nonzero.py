"""Values that are not zero: what they take, and how malformed places are refused."""

import math

import numpy as np
import pytest
import torch

from weft.codec.dense import Bf16, Fp32
from weft.codec.sparse import elias_fano
from weft.codec.sparse.elias_fano import CHUNK, chunks_of
from weft.codec.sparse.nonzero import Nonzero
from weft.errors import PayloadError

NUM = 40 * CHUNK + 1000


def sparse(share: float, num: int = NUM) -> torch.Tensor:
    luck = torch.Generator().manual_seed(round(1e6 * share))
    vector = torch.randn(num, generator=luck)
    return torch.where(torch.rand(num, generator=luck) < share, vector, torch.zeros(()))


def entropy(share: float) -> float:
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_places_take_little_more_than_their_entropy(share: float) -> None:
    vector = sparse(share)
    num_sent = int(torch.count_nonzero(vector))
    data = Nonzero(Bf16()).encode(vector)
    places = 8 * (len(data) - 2 * num_sent - 2 * math.ceil(NUM / CHUNK)) / NUM
    assert places <= (entropy(share) + 0.75 * share if share < 0.25 else 1) + 0.001
    assert len(data) <= Nonzero(Bf16()).nbytes(NUM)


@pytest.mark.parametrize("num_sent", [0, 1, 2, 15, 16, 17, 1023, 1024, 1025, 2048, 4095, 4096])
def test_the_most_that_it_can_be_is_never_passed(num_sent: int) -> None:
    vector = torch.zeros(3 * CHUNK + num_sent % 7)
    for start in range(0, vector.numel(), CHUNK):
        vector[start : start + CHUNK][-num_sent or CHUNK :] = 1.0
    for values in (Bf16(), Fp32()):
        codec = Nonzero(values)
        data = codec.encode(vector)
        assert 0 < len(data) <= codec.nbytes(vector.numel())
        assert torch.equal(codec.decode(data, vector.numel()), vector)
        assert codec.length(bytes(data) + b"what follows", vector.numel()) == len(data)


def test_several_runs_lie_one_behind_the_other() -> None:
    vector = sparse(0.02, 600 * CHUNK + 5)
    codec = Nonzero(Fp32())
    assert torch.equal(codec.decode(codec.encode(vector), vector.numel()), vector)


def test_a_value_that_bf16_makes_zero_is_not_sent() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal / 2**20
    data = Nonzero(Bf16()).encode(torch.tensor([tiny, -tiny, 1.0, -0.0]))
    assert Nonzero(Bf16()).decode(data, 4).tolist() == [0.0, 0.0, 1.0, 0.0]
    assert len(data) == 2 + 1 + 1 + 2  # a count, two upper bits, two lower ones, a value


@pytest.mark.parametrize("values", [Bf16(), Fp32()], ids=["bf16", "fp32"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_that_is_sent_is_refused(values: Bf16 | Fp32, zero: float) -> None:
    vector = torch.tensor([0.0, 3.0])
    data = bytearray(Nonzero(values).encode(vector))
    nbytes = values.nbytes(1)
    data[-nbytes:] = values.encode(torch.tensor([zero]))
    with pytest.raises(PayloadError, match="sends zeros"):
        Nonzero(values).decode(data, 2)


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(PayloadError, match="more values than there are"):
        Nonzero(Bf16()).decode(np.array([11], "<u2").tobytes() + bytes(100), 10)


@pytest.mark.parametrize(("count", "width"), [(3, 4096), (500, 4096), (1500, 4096), (2, 100), (1, 4096)])
def test_every_changed_bit_of_places_is_refused_or_means_others(count: int, width: int) -> None:
    luck = np.random.default_rng(count)
    chunks = chunks_of(width, np.array([count]))
    places = np.sort(luck.choice(width, count, replace=False))
    data = bytearray(elias_fano.encode(chunks, places))
    assert np.array_equal(elias_fano.decode(chunks, memoryview(data)), places)
    seen = 0
    for bit in range(0, 8 * len(data), max(1, len(data) // 20)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = elias_fano.decode(chunks, memoryview(changed))
        except PayloadError:
            continue
        seen += 1
        assert not np.array_equal(found, places)
        assert elias_fano.encode(chunks, found) == bytes(changed)
    assert seen or count == 1500  # of a bitmap every changed bit is another count
