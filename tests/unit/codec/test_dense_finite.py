"""What is finite is told from what is not, wherever it stands."""

import pytest
import torch

from weft.codec.dense import CHUNK, Fp32
from weft.errors import NotFinite, PayloadError

LARGEST = torch.finfo(torch.float32).max


def test_the_largest_numbers_pass() -> None:
    vector = torch.full((2 * CHUNK + 1,), LARGEST)
    assert torch.equal(Fp32().decode(Fp32().encode(vector), len(vector)), vector)


@pytest.mark.parametrize("place", [0, CHUNK, 2 * CHUNK])
@pytest.mark.parametrize("values", [("nan",), ("inf",), ("inf", "-inf")])
def test_one_that_is_not_finite_is_found(place: int, values: tuple[str, ...]) -> None:
    vector = torch.ones(2 * CHUNK + 2)
    for offset, value in enumerate(values):
        vector[place + offset] = float(value)
    with pytest.raises(NotFinite):
        Fp32().encode(vector)
    with pytest.raises(PayloadError):
        Fp32().decode(memoryview(vector.numpy()).cast("B"), len(vector))
