"""Fingerprints are those of a plain reference, and tell an honest row from another."""

import statistics
import struct

import numpy as np
import pytest

from weft import rng
from weft.engine.fingerprint import MAX_NBYTES, NUM, distance, fingerprint, parsed
from weft.errors import PayloadError


def rows(num: int, width: int, seed: int = 0) -> np.ndarray:
    return rng.stream(seed, "rows").standard_normal((num, width)).astype(np.float32)


def bf16(number: float) -> int:
    word = struct.unpack("<I", struct.pack("<f", number))[0]
    upper, rest = word >> 16, word & 0xFFFF
    if rest > 0x8000 or (rest == 0x8000 and upper % 2):
        upper += 1
    return upper - 1 if upper & 0x7FFF == 0x7F80 else upper


def reference(row: list[float]) -> bytes:
    """What the first lines of the module say, number by number."""
    bits = [bf16(number) for number in row]
    order = sorted(range(len(row)), key=lambda place: (-(bits[place] & 0x7FFF), place))
    places = sorted(order[:NUM])
    found, before = b"", -1
    for place in places:
        gap, before = place - before - 1, place
        while gap > 0x7F:
            found += bytes([gap % 128 + 128])
            gap //= 128
        found += bytes([gap])
    for place in places:
        found += struct.pack("<H", bits[place])
    return found


def reference_distance(told: list[tuple[int, int]], row: list[float]) -> float:
    """What the first lines of the module say, number by number."""
    values = {place: struct.unpack("<f", struct.pack("<I", bits << 16))[0] for place, bits in told}
    least = min(map(abs, values.values()))
    apart = [value - row[place] for place, value in values.items()]
    for place, _ in told_by(reference(row), len(row)):
        if place not in values:
            apart.append(max(-least, min(least, row[place])) - row[place])
    middle = statistics.median(apart)
    kept = sorted(abs(each - middle) for each in apart)[: len(apart) - len(apart) // 8]
    return sum(kept) / len(kept)


def told_by(told: bytes, num: int) -> list[tuple[int, int]]:
    places, values = parsed(told, num)
    return list(zip(places.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("width", [3, NUM, NUM + 1, 576, 5000, 70_000])
def test_a_fingerprint_is_that_of_the_reference(width: int) -> None:
    for row in rows(3, width):
        row[::7] = row[0]  # ties
        assert fingerprint(row) == reference(row.tolist())
        assert len(fingerprint(row)) <= MAX_NBYTES


def test_numbers_at_the_ends_of_what_fp32_holds_have_fingerprints() -> None:
    row = np.zeros(100, dtype=np.float32)
    row[:4] = np.finfo(np.float32).max, np.finfo(np.float32).min, np.finfo(np.float32).tiny, -0.0
    assert fingerprint(row) == reference(row.tolist())
    assert distance(fingerprint(row), row) < np.finfo(np.float32).tiny


@pytest.mark.parametrize("noise", [3e-3, 1e-2, 0.1])
def test_a_distance_is_that_of_the_reference(noise: float) -> None:
    for one, more in zip(rows(5, 576), rows(5, 576, 1), strict=True):
        other = one + np.float32(noise) * more
        expected = reference_distance(told_by(fingerprint(one), 576), other.tolist())
        assert distance(fingerprint(one), other) == pytest.approx(expected, rel=1e-5)
        assert expected > 0


def test_a_row_is_far_from_others_and_near_to_itself_with_little_noise() -> None:
    one, other = rows(2, 576)
    rounding = distance(fingerprint(one), one)
    assert 0 < rounding < 2**-8 * np.abs(one).max()
    assert distance(fingerprint(one), one * np.float32(1.001)) < 2 * rounding
    assert distance(fingerprint(one), other) > 100 * rounding
    assert distance(fingerprint(one), -one) > 100 * rounding


def test_what_moves_all_numbers_alike_or_few_of_them_far_is_no_distance() -> None:
    (one,) = rows(1, 576)
    told = fingerprint(one)
    moved = one.copy()
    moved[np.argsort(-np.abs(one))[:4]] *= np.float32(1.5)  # of 40, the largest
    assert distance(told, moved) < 1.5 * distance(told, one)
    high = np.abs(one)
    assert distance(fingerprint(high), high + np.float32(0.01)) < 1.5 * distance(fingerprint(high), high)


@pytest.mark.parametrize(
    "altered",
    [
        lambda told: told[:-1],
        lambda told: told + b"\0\0",
        lambda told: b"",
        lambda told: told[:-2] + struct.pack("<H", 0x7F80),  # infinite
        lambda told: told[:-2] + struct.pack("<H", 0xFFC0),  # not a number
        lambda told: b"\xff\xff\xff" + told[1:],  # a place beyond any
        lambda told: bytes([told[0] | 0x80, 0]) + told[1:],  # a place in a longer form
        lambda told: b"\xff\x03" + told[1:],  # beyond the row
    ],
)
def test_what_is_no_fingerprint_of_such_a_row_is_refused(altered) -> None:
    row = rows(1, 500)[0]
    with pytest.raises(PayloadError):
        distance(altered(fingerprint(row)), row)
