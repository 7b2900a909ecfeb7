"""Sparse codecs against scalar references, their size against the bound, and payloads no encoder makes."""

from math import ceil, comb, log2

import pytest
import torch

from unit.codec import reference
from weft.codec.build import build
from weft.codec.config import RandomKConfig, TopKConfig
from weft.codec.dense import Fp32
from weft.codec.sparse.kept import RandomK, Room, TopK
from weft.errors import NotFinite, PayloadError

CHUNK = 4096
VECTORS = {"heavy-tailed": reference.heavy_tailed, "normal": reference.normal, "few": reference.few_values}


def largest(values: list[float], kept: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))[:kept])


def top_k(values: list[float], chunk: int, kept: int) -> list[float]:
    """Return what is left of `values` where each chunk keeps its largest."""
    left = []
    for start in range(0, len(values), chunk):
        mine = values[start : start + chunk]
        places = set(largest(mine, ceil(kept * len(mine) / chunk)))
        left += [value if place in places else 0.0 for place, value in enumerate(mine)]
    return left


@pytest.mark.parametrize("numbers", VECTORS)
@pytest.mark.parametrize("kept", [1, 64, 100, 3000, 4096])
def test_the_largest_of_each_chunk_are_kept_and_of_equal_ones_the_first(numbers: str, kept: int) -> None:
    vector = VECTORS[numbers](2 * CHUNK + 700)
    codec = TopK(Room(CHUNK, kept), Fp32())
    assert codec.decode(codec.encode(vector), vector.numel()).tolist() == top_k(vector.tolist(), CHUNK, kept)


def test_the_order_in_which_equal_values_lie_decides_nothing_else() -> None:
    codec, vector = TopK(Room(CHUNK, 64), Fp32()), torch.ones(CHUNK)
    decoded = codec.decode(codec.encode(vector), CHUNK)
    assert decoded.tolist() == [1.0] * 64 + [0.0] * (CHUNK - 64)


def test_values_of_a_chunk_share_a_scale_and_no_two_chunks_do() -> None:
    vector = torch.cat([torch.full((CHUNK,), 2.0), torch.full((CHUNK,), -8.0)])
    codec = build(TopKConfig(kept=64, values="sign"))
    decoded = codec.decode(codec.encode(vector), 2 * CHUNK)
    assert decoded[:64].tolist() == [2.0] * 64
    assert decoded[CHUNK : CHUNK + 64].tolist() == [-8.0] * 64


def test_64_of_4096_signs_take_0_135_bits_a_value() -> None:
    num = 100 * CHUNK
    bits = 8 * build(TopKConfig()).nbytes(num) / num
    assert bits == pytest.approx((472 + 64 + 16) / CHUNK)
    assert bits <= 0.14
    bound = log2(comb(CHUNK, 64)) / 64
    assert 1.02 * bound >= 472 / 64


@pytest.mark.parametrize(("kept", "values"), [(64, "int8"), (64, "int4"), (9, "e3m0"), (100, "fp8"), (4096, "int4")])
def test_kept_values_that_the_other_codec_makes_zero_leave_one_encoding(kept: int, values: str) -> None:
    vector = torch.zeros(CHUNK)
    vector[1000 : 1000 + kept] = torch.logspace(-9, 0, min(kept, 3096))
    codec = build(TopKConfig(kept=kept, values=values))  # type: ignore[arg-type]
    data = bytes(codec.encode(vector))
    decoded = codec.decode(data, CHUNK)
    num_left = int(decoded.count_nonzero())
    assert 0 < num_left < kept  # so some are zero
    assert bytes(codec.encode(decoded)) == data


def test_a_payload_that_keeps_zeros_at_other_places_is_refused() -> None:
    codec = TopK(Room(CHUNK, 3), Fp32())
    vector = torch.zeros(CHUNK)
    vector[[7, 8, 9]] = torch.tensor([1.0, 2.0, 3.0])
    data = bytearray(codec.encode(vector))
    data[-4:] = bytes(4)  # the value at place 9: its place would be 0
    with pytest.raises(PayloadError, match="keeps zeros"):
        codec.decode(data, CHUNK)
    vector[9] = 0
    data = bytearray(codec.encode(vector))
    assert data[-12:-8] == bytes(4)  # at place 0
    data[-9] = 0x80  # -0
    with pytest.raises(PayloadError, match="keeps zeros"):
        codec.decode(data, CHUNK)


# --- at random ---


def kept_places(salt: int, num: int = CHUNK, kept: int = 64) -> list[int]:
    codec = RandomK(Room(CHUNK, kept), salt, Fp32())
    return codec.decode(codec.encode(torch.ones(num)), num).nonzero()[:, 0].tolist()


def test_places_are_the_same_for_all_in_a_round_and_others_in_the_next() -> None:
    assert kept_places(3) == kept_places(3)
    assert kept_places(3) != kept_places(4)
    assert len(kept_places(3)) == 64


def test_whole_chunks_keep_the_same_places_so_that_a_part_does_not_depend_on_the_cut() -> None:
    places = kept_places(5, 2 * CHUNK)
    assert places[64:] == [CHUNK + place for place in places[:64]]


@pytest.mark.full
def test_each_place_is_drawn_as_often_as_any_other() -> None:
    drawn = torch.zeros(CHUNK)
    for salt in range(600):
        drawn[kept_places(salt, kept=1024)] += 1
    # 600 draws with a chance of 1/4: 150 each, with a deviation of 10.6
    assert float(drawn.min()) > 150 - 6 * 10.6
    assert float(drawn.max()) < 150 + 6 * 10.6
    assert float(drawn.std()) == pytest.approx(10.6, rel=0.1)


def test_of_those_at_random_places_the_largest_are_kept() -> None:
    vector = reference.normal(3 * CHUNK)
    shown = set(kept_places(2, 3 * CHUNK, kept=410))
    codec = build(RandomKConfig(kept=410, largest=82, values="fp32"), round=2)
    decoded = codec.decode(codec.encode(vector), 3 * CHUNK)
    for start in range(0, 3 * CHUNK, CHUNK):
        places = sorted(place for place in shown if start <= place < start + CHUNK)
        mine = [places[i] for i in largest(vector[places].tolist(), 82)]
        assert decoded[start : start + CHUNK].nonzero()[:, 0].tolist() == [place - start for place in mine]
        assert decoded[mine].tolist() == vector[mine].tolist()


def test_nan_at_a_place_that_is_not_kept_is_refused_all_the_same() -> None:
    codec, vector = RandomK(Room(CHUNK, 64), 0, Fp32()), torch.zeros(CHUNK)
    unkept = next(place for place in range(CHUNK) if place not in kept_places(0))
    vector[unkept] = torch.nan
    with pytest.raises(NotFinite):
        codec.encode(vector)
