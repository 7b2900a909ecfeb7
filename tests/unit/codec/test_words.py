"""A patch of words gives the new ones to the bit, has one encoding, and nothing else decodes."""

import struct
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.codec.sparse.words import decode, encode
from weft.errors import PayloadError

KINDS = (np.uint16, np.uint32)
LARGE = 256 * 4096 + 5000  # more than a run


def reference(old: list[int], new: list[int], bits: int) -> str:
    """Return the bits of counts, places and steps of less than a chunk, number by number: as the docstring has it."""

    def rank(word: int) -> int:
        return (1 << bits) - 1 - word if word >> (bits - 1) else word + (1 << (bits - 1))

    def little(number: int, width: int) -> str:
        return format(number, f"0{width}b")[::-1] if width else ""

    def padded(text: str) -> str:
        return text + "0" * (-len(text) % 8)

    places = [place for place, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    k, w = len(places), len(old)
    low = (w // k).bit_length() - 1 if k else 0
    low = 0 if low < 2 else low
    upper = ["0"] * ((k + ((w - 1) >> low) if low else w) if k else 0)
    for number, place in enumerate(places):
        upper[(place >> low) + (number if low else 0)] = "1"
    lower = "".join(little(place & ((1 << low) - 1), low) for place in places)
    lengths = rest = ""
    for place in places:
        moved = rank(new[place]) - rank(old[place])
        step = 2 * moved - 1 if moved > 0 else -2 * moved
        more = step.bit_length() - 1
        lengths += "0" * more + "1"
        rest += little(step - (1 << more), more)
    counts, size = little(k, 16), little(len(lengths), 32)
    return counts + padded("".join(upper)) + padded(lower) + size + padded(lengths) + padded(rest)


def bits_of(data: bytes) -> str:
    return "".join(format(byte, "08b")[::-1] for byte in data)


@given(
    st.sampled_from(KINDS).flatmap(
        lambda kind: st.lists(
            st.tuples(*[st.one_of(st.integers(0, 3), st.integers(0, np.iinfo(kind).max))] * 2), min_size=1, max_size=60
        ).map(lambda pairs: (kind, pairs))
    )
)
@settings(deadline=None, max_examples=120)
def test_it_is_what_its_description_says(drawn: tuple[Any, list[tuple[int, int]]]) -> None:
    kind, pairs = drawn
    old, new = (np.array(side, kind) for side in zip(*pairs, strict=True))
    data = encode(old, new)
    assert bits_of(data) == reference(old.tolist(), new.tolist(), 8 * old.itemsize)
    found = decode(old, memoryview(data))
    assert found.dtype == new.dtype
    assert np.array_equal(found, new)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 1.0])
def test_long_arrays_come_back_to_the_bit(kind: Any, share: float) -> None:
    luck = np.random.default_rng(3)
    old = luck.integers(0, np.iinfo(kind).max, LARGE, endpoint=True, dtype=kind)
    new = np.where(luck.random(LARGE) < share, luck.integers(0, np.iinfo(kind).max, LARGE, dtype=kind), old)
    assert np.array_equal(decode(old, memoryview(encode(old, new))), new)


def test_infinities_and_nans_and_both_zeros_are_numbers_as_others_are() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")], dtype=torch.bfloat16)
    words = values.view(torch.int16).numpy().view(np.uint16)
    pairs = np.array(list(product(words, words)), np.uint16)
    old, new = pairs[:, 0].copy(), pairs[:, 1].copy()
    assert np.array_equal(decode(old, memoryview(encode(old, new))), new)


def test_what_moves_by_one_takes_few_bits() -> None:
    luck = np.random.default_rng(5)
    values = torch.from_numpy(luck.standard_normal(1 << 20).astype(np.float32)).bfloat16()
    old = values.view(torch.int16).numpy().view(np.uint16)
    places = np.flatnonzero(luck.random(len(old)) < 0.01)
    new = old.copy()
    new[places] += luck.choice(np.array([1, 65535], np.uint16), len(places))
    bits = 8 * len(encode(old, new)) / len(places)
    assert bits < 7 + 2.1 + 2 + 0.6  # a place: log2(100) and what Elias and Fano's takes more; a step: 2; counts


def fuzz_cases() -> list[tuple[str, Callable[[bytes], bytes]]]:
    cases: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("cut", lambda data: data[:-1]),
        ("longer", lambda data: data + b"\0"),
        ("empty", lambda _data: b""),
        ("all ones", lambda data: b"\xff" * len(data)),
        ("more changes than words", lambda data: b"\xff\xff" + data[2:]),
    ]
    return cases


@pytest.mark.parametrize(("name", "spoil"), fuzz_cases())
def test_what_no_encoder_makes_is_refused(name: str, spoil: Callable[[bytes], bytes]) -> None:
    old = np.arange(100, dtype=np.uint16)
    data = encode(old, old * 3 % 101)
    with pytest.raises(PayloadError):
        decode(old, memoryview(spoil(data)))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_say_to_be_longer_than_any_are_refused_before_they_are_unpacked(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = np.zeros(4096, kind)
    new = old.copy()
    new[0] = 1
    data = encode(old, new)
    lengths = struct.pack("<I", 8 * (64 << 20)) + bytes(64 << 20)
    forged = data[:-5] + lengths
    assert data[-5:-1] == struct.pack("<I", 1)  # how many bits tell the one step's length
    monkeypatch.setattr("weft.codec.sparse.words.unpacked", lambda *_: pytest.fail("they are unpacked"))
    with pytest.raises(PayloadError, match="steps are not as many"):
        decode(old, memoryview(forged))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_decodes_is_the_encoding_of_what_it_decodes_to(kind: Any) -> None:
    luck, num_decoded = np.random.default_rng(11), 0
    old = luck.integers(0, np.iinfo(kind).max, 300, endpoint=True, dtype=kind)
    new = np.where(luck.random(300) < 0.1, old + luck.integers(0, 9, 300).astype(kind), old)
    data = encode(old, new)
    for bit in range(8 * len(data)):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(old, memoryview(bytes(spoiled)))
        except PayloadError:
            continue
        num_decoded += 1
        assert encode(old, found) == bytes(spoiled)
    assert num_decoded > 50
