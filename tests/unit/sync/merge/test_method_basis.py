"""Bases: what lies in which tile, what cosines do, and that all of it can be undone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.sync.merge.method import SIDE, Dct, Flat, Tiles, build_basis, cosines
from weft.sync.method.choices import BasisName

shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 200)),
        st.tuples(st.integers(1, 200), st.integers(1, 200)),
        st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 5)),
    ),
    max_size=4,
)


def numbers(num: int) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(num))


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(0, 100))
def test_tiles_are_a_permutation_that_is_undone(tensors: list[tuple[int, ...]], more: int) -> None:
    num = sum(map(math.prod, tensors)) + more
    basis, vector = Tiles(tensors), torch.arange(float(num))
    moved = basis.forward(vector, {}, 1)
    assert torch.equal(moved.sort().values, vector)
    assert torch.equal(basis.inverse(moved, {}, 1), vector)
    assert basis.num_tiled % SIDE**2 == 0


def test_each_whole_tile_of_a_matrix_lies_in_one_piece_and_the_rest_follows() -> None:
    tensors = [(10,), (130, 200), (64, 64)]
    vector = torch.arange(10.0 + 130 * 200 + 64 * 64 + 5)
    moved, matrix = Tiles(tensors).forward(vector, {}, 1), vector[10 : 10 + 130 * 200].view(130, 200)
    tiles = [matrix[y : y + 64, x : x + 64] for y in (0, 64) for x in (0, 64, 128)]
    tiles.append(vector[10 + 130 * 200 : -5].view(64, 64))
    rest = [vector[:10], matrix[:128, 192:].flatten(), matrix[128:].flatten(), vector[-5:]]
    assert torch.equal(moved, torch.cat([*(tile.flatten() for tile in tiles), *rest]))


def test_cosines_are_orthonormal_and_those_of_the_definition() -> None:
    matrix = cosines(torch.device("cpu")).double()
    places = torch.arange(SIDE, dtype=torch.float64)
    plain = torch.cos(torch.pi / SIDE * torch.outer(places, places + 0.5)) * (2 / SIDE) ** 0.5
    plain[0] /= 2**0.5
    torch.testing.assert_close(matrix, plain, rtol=0, atol=1e-7)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(SIDE, dtype=torch.float64), rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(shapes, st.integers(0, 100))
def test_cosines_keep_lengths_and_are_undone(tensors: list[tuple[int, ...]], more: int) -> None:
    vector = numbers(sum(map(math.prod, tensors)) + more)
    basis = Dct(tensors)
    turned = basis.forward(vector, {}, 1)
    torch.testing.assert_close(basis.inverse(turned, {}, 1), vector, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned.norm(), vector.norm(), rtol=1e-5, atol=1e-5)


def test_a_wave_is_one_number_of_its_tile() -> None:
    places = torch.arange(SIDE) + 0.5
    wave = torch.outer(torch.cos(torch.pi / SIDE * 3 * places), torch.cos(torch.pi / SIDE * 5 * places))
    turned = Dct([(SIDE, SIDE)]).forward(wave.flatten(), {}, 1).view(SIDE, SIDE)
    assert float(turned[3, 5]) == pytest.approx(SIDE / 2, rel=1e-5)
    turned[3, 5] = 0
    assert float(turned.abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["flat", "tiles", "dct"])
def test_what_is_turned_is_only_read(name: BasisName) -> None:
    vector = numbers(2 * SIDE * SIDE)
    before, basis = vector.clone(), build_basis(name, [(SIDE, 2 * SIDE)])
    basis.inverse(basis.forward(vector, {}, 1), {}, 1)
    basis.inverse(vector, {}, 1)
    assert torch.equal(vector, before)
    assert isinstance(build_basis("flat", ()), Flat)
