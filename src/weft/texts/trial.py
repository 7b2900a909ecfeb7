"""Steps of nothing, by which a member knows how fast it is before anybody asks it.

Who asks chooses members by how fast they compute. Of one that has not computed yet nobody knows, and a text that tries
it stays with it to its end.
"""

from collections.abc import Sequence

from weft.engine.scheduling.guess import MAX_GUESSED

ROWS, READ = 8, 64
STEPS: tuple[tuple[int, ...], ...] = ((1,), (1,), (1,), (1,) * ROWS, (1,) * ROWS, (1, READ))  # tokens of each text
NUM_WARM = 1  # of them are not counted: they set up what is set up once


def rows_and_read(sizes: Sequence[int]) -> tuple[int, int]:
    """Return for how many texts a step of so many tokens of each draws, and how many more tokens it
    reads."""
    num_rows = sum(num for num in sizes if num <= 1 + MAX_GUESSED)
    return num_rows, sum(sizes) - num_rows
