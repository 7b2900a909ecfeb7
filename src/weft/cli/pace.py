"""How many tokens the peers of one machine train on in a given time: steps of the model itself, timed.

One peer's pace is measured with the threads that each peer will have, and counted as often as the cores have room for:
threads of a program that wants all cores wait for one another whenever another program has one, and then a step takes
up to a hundred times as long. The fastest of many short runs is what the machine does while nothing disturbs it.

An estimate: peers that share the cores of one machine also exchange and evaluate, and other programs take their share.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.clock import Clock, SystemClock
from weft.data import ByteTokenizer
from weft.model import Transformer
from weft.peer.config import RunFile
from weft.peer.seal import resolve

_NUM_WARM = 3  # the first steps allocate, and wake threads
_LEAST_STEPS, _MEASURED_S = 8, 3.0  # timed: so many at least, and then until so much time has passed
_SHARE = 0.6  # of the time is what is timed here, in the demo on two cores; the rest: optimizer, exchange, evaluation


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured, and what follows from it for all peers of this machine."""

    tokens_per_s: float  # of one peer's inner steps, alone
    num_threads: int  # of that peer
    num_at_once: float  # peers that the cores carry at that pace

    def tokens_in(self, run_file: RunFile, seconds: float) -> int:
        """Return about how many tokens all peers commit in `seconds`, a whole number of rounds."""
        train = run_file.train
        every = getattr(run_file.method, "every", 1)
        per_round = every * run_file.peers * train.batch_size * train.seq_len
        wanted = _SHARE * seconds * self.tokens_per_s * self.num_at_once
        return max(1, round(wanted / per_round)) * per_round


def measure(run_file: RunFile, num_threads: int, *, num_cores: int | None = None, clock: Clock | None = None) -> Pace:
    """Return the pace of peers with `num_threads` each; takes about three seconds.

    Args:
        num_cores: of this machine; None: as many as the system says.
    """
    train = run_file.train
    model = Transformer(resolve(run_file, ByteTokenizer(), Path()))
    tokens = torch.zeros((train.batch_size, train.seq_len), dtype=torch.int64)

    def step() -> None:
        model.loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        step_s = least_s(step, clock)
    finally:
        torch.set_num_threads(before)
    carried = (num_cores or os.cpu_count() or 1) / num_threads
    return Pace(tokens_per_s=tokens.numel() / step_s, num_threads=num_threads, num_at_once=min(run_file.peers, carried))


def least_s(step: Callable[[], None], clock: Clock | None = None) -> float:
    """Return the seconds of the fastest of many steps; takes about three."""
    clock = clock or SystemClock()
    for _ in range(_NUM_WARM):
        step()
    took_s: list[float] = []
    while len(took_s) < _LEAST_STEPS or sum(took_s) < _MEASURED_S:
        began = clock.now()
        step()
        took_s.append(clock.now() - began)
    return min(took_s)
