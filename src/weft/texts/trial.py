"""Steps of nothing, by which a member knows how fast it is before anybody asks it.

Who asks chooses members by how fast they compute. Of one that has not computed yet nobody knows, and a text that tries
it stays with it to its end. Of each size the first step is not counted: it sets up what is set up once.

Failure:
- it has no pages for a step, or a step fails: it learns from what others ask.
- steps are long, or wait for the device: after `MOST_S` what is known by then is enough.
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from weft.clock import Clock
from weft.engine.scheduling.guess import MAX_GUESSED
from weft.engine.scheduling.pace import Pace, pairs_of
from weft.engine.scheduling.pages import PagePool, num_pages
from weft.pipeline.worker import Run
from weft.texts.section import Section

ROWS, READ = 8, 64
SIZES: tuple[tuple[int, ...], ...] = ((1,), (1,) * ROWS, (1, READ))  # tokens of each text of a step
TIMES = 3
MOST_S = 5.0


async def measure(
    section: Section, pool: PagePool, pace: Pace, clock: Clock, run: Run, turn: Callable[[], Awaitable[None]] | None
) -> None:
    """Note how long steps take; arguments as of `member.Member`."""
    since = clock.now()
    for sizes in SIZES:
        for time in range(TIMES):
            began, num_graphs = clock.now(), section.num_graphs
            if began - since >= MOST_S or (pages := pool.take((), sum(map(num_pages, sizes)))) is None:
                return
            try:
                if turn is not None:
                    await turn()
                await run(partial(section.try_out, sizes, pages))
            except Exception:  # out of memory, a broken device
                return
            finally:
                pool.release(pages)
            if time and section.num_graphs == num_graphs:
                num_rows, num_read, num_pairs = counted((0, num) for num in sizes)
                pace.note(num_rows, num_read, clock.now() - began, num_pairs)


def counted(pieces: Iterable[tuple[int, int]]) -> tuple[int, int, int]:
    """Return for how many rows a step draws, how many more tokens it reads, and pairs of one of these and one before
    it (`Pace.note`).

    Args:
        pieces: where each begins in its text, and how many tokens it has.
    """
    num_rows = num_read = num_pairs = 0
    for start, num in pieces:
        if num <= 1 + MAX_GUESSED:
            num_rows += num
        else:
            num_read, num_pairs = num_read + num, num_pairs + pairs_of(start, num)
    return num_rows, num_read, num_pairs
