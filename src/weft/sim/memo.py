"""What the peers of one process find out once for all: what bytes say, whether a signature holds, which places a rank
means.

    with shared():
        ...

All follow from their arguments alone, and what is found is frozen: so no peer could find anything else. In a play of a
thousand peers each letter is read and checked by dozens of them, and that would be most of the work; in one of four
peers that send the largest of their values at every step, places would be half of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from weft import keys, wire
from weft.codec.sparse import rank
from weft.codec.sparse.rank import Choices, Places

NUM_SHARED = 1 << 14  # records, and signatures: of several rounds of a thousand peers
MAX_PLACES = 1 << 20  # found once: more take more memory than time
NUM_RANKS = 64  # parts of payloads and results: of a round of seven peers


@contextmanager
def shared() -> Iterator[None]:
    read, holds, places = wire._read, keys._holds, rank.decode
    wire._read = lru_cache(NUM_SHARED)(read)
    keys._holds = lru_cache(NUM_SHARED)(holds)
    rank.decode = _once(places)  # type: ignore[assignment]
    try:
        yield
    finally:
        wire._read, keys._holds = read, holds
        rank.decode = places


def _once(
    decode: Callable[[Choices, NDArray[np.uint8], int], Places],
) -> Callable[[Choices, NDArray[np.uint8], int], Places]:
    @lru_cache(NUM_RANKS)
    def found(num: int, kept: int, data: bytes, num_rows: int) -> Places:
        places = decode(rank.build(num, kept), np.frombuffer(data, np.uint8), num_rows)
        places.flags.writeable = False
        return places

    def once(choices: Choices, data: NDArray[np.uint8], num_rows: int) -> Places:
        if num_rows * choices.kept > MAX_PLACES:
            return decode(choices, data, num_rows)
        return found(choices.num, choices.kept, data.tobytes(), num_rows)

    return once
