"""How long a step takes, and how many tokens the peers of one machine train on in a given time.

Of many short runs half are faster than what is told. The fastest one is up to a fifth faster than that even where
nothing disturbs it, and no run keeps it up. Where another program wants all cores, threads wait for one another, and
single steps take up to a hundred times as long: they are not told of while most are well.

An estimate: peers that share the cores of one machine also exchange and evaluate, and other programs take their share.
What is timed is for others to say: `weft.cli.plan.speed_here` times whole inner steps.
"""

from collections.abc import Callable
from statistics import median

from weft.clock import Clock, SystemClock
from weft.run.config import RunFile

_NUM_WARM = 3  # the first steps allocate, and wake threads
_LEAST_STEPS, _MEASURED_S = 8, 3.0  # timed: so many at least, and then until so much time has passed
_PATIENCE_S = 10.0  # of warm steps and of timed ones: the last of either begins before that
_SHARE = 0.6  # of the time goes into inner steps, in the demo on two cores; the rest: exchange, outer steps, evaluation


def tokens_in(run_file: RunFile, seconds: float, tokens_per_s: float) -> int:
    """Return about how many tokens all peers commit in `seconds`, a whole number of rounds.

    Args:
        tokens_per_s: of each peer's inner steps, with all of them at work.
    """
    train = run_file.train
    every = getattr(run_file.method, "every", 1)
    per_round = every * run_file.peers * train.batch_size * train.seq_len
    wanted = _SHARE * seconds * tokens_per_s * run_file.peers
    return max(1, round(wanted / per_round)) * per_round


def usual_s(step: Callable[[], None], clock: Clock | None = None) -> float:
    """Return the seconds of the median of many steps. Takes about three; of long steps as many as begin in ten seconds
    of warming up, and in ten of timing, one each at least.
    """
    clock = clock or SystemClock()

    def took_s() -> float:
        began = clock.now()
        step()
        return clock.now() - began

    warm_s = 0.0
    for _ in range(_NUM_WARM):
        if warm_s < _PATIENCE_S:
            warm_s += took_s()
    all_s = [took_s()]
    while (len(all_s) < _LEAST_STEPS or sum(all_s) < _MEASURED_S) and sum(all_s) < _PATIENCE_S:
        all_s.append(took_s())
    return median(all_s)
