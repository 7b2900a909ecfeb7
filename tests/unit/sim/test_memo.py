"""What the peers of one process find out once."""

import numpy as np
import pytest

from weft.codec.sparse import rank
from weft.codec.sparse.rank import Ranks
from weft.errors import PayloadError
from weft.sim.memo import shared

PLACES = np.array([[0, 5, 9], [1, 2, 3]])


def test_places_are_found_once_alike_and_cannot_be_changed() -> None:
    ranks, usual = Ranks(10, 3), rank.decode
    data = rank.encode(ranks, PLACES)
    with shared():
        one, other = rank.decode(ranks, data, 2), rank.decode(Ranks(10, 3), data.copy(), 2)
        assert one is other
        assert (one == PLACES).all()
        with pytest.raises(ValueError, match="read-only"):
            one[0] = 1
        more = Ranks(12, 3)
        assert (rank.decode(more, rank.encode(more, PLACES), 2) == PLACES).all()
    assert rank.decode is usual


def test_bytes_that_no_encoder_makes_are_refused_each_time() -> None:
    with shared():
        for _ in range(2):
            with pytest.raises(PayloadError):
                rank.decode(Ranks(10, 3), np.full(2, 255, np.uint8), 2)
