"""A whole model put together from its sections, in a file that is mapped into memory; and which rounds go together.

    whole = Assembled(run, scratch)    # a file without a name: what of it is in memory, the system says
    whole.put(stage, start, data)      # numbers of a section, from `start` on
    whole.vector                       # the model's, as a checkpoint has it

A section's tensors lie in the whole's vector in the same order, with those of other sections between them; tensors that
lie side by side in both are one stretch.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from weft.errors import DiskFull
from weft.model.flat import layout
from weft.run.staged import StagedConfig
from weft.store.pool import Pool
from weft.wire import Buffer

ROOM = 2.05  # times the vector: the mapped file, and the checkpoint that is written from it


class Assembled:
    """
    Args:
        run: the whole.
        scratch: a folder for the file.

    Raises:
        DiskFull: there is no room for the model, nor for its checkpoint.
    """

    def __init__(self, run: StagedConfig, scratch: Path) -> None:
        require_room(run, scratch)
        self.run = run
        self.vector = Pool(0, scratch).empty(run.num_parameters)
        self._stretches = [list(stretches(run, stage)) for stage in range(run.num_pieces)]

    def put(self, stage: int, start: int, data: Buffer) -> None:
        """Put numbers of a section in their places.

        Args:
            start: of the first of them, in the section's vector.
        """
        values = torch.from_numpy(np.frombuffer(data, dtype="<f4"))
        stop = start + values.numel()
        for here, there, num in self._stretches[stage]:
            first, last = max(here, start), min(here + num, stop)
            if first < last:
                self.vector[there + first - here : there + last - here] = values[first - start : last - start]


def stretches(run: StagedConfig, stage: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each stretch of a section begins, where it does in the whole, and how many numbers it has."""
    at = {span.name: span.offset for span in layout(run.model)}
    here, there, num = 0, 0, 0
    for span in layout(run.model, run.pieces[stage]):
        if num and at[span.name] == there + num:
            num += span.num
            continue
        if num:
            yield here, there, num
        here, there, num = span.offset, at[span.name], span.num
    yield here, there, num


def require_room(run: StagedConfig, folder: Path) -> None:
    """
    Raises:
        DiskFull: `folder` lies on a disk without room for the whole model, twice: while it is put together, and as its
            checkpoint.
    """
    place = next(each for each in (folder, *folder.parents) if each.exists())
    needed, free = int(4 * ROOM * run.num_parameters), shutil.disk_usage(place).free
    if free < needed:
        raise DiskFull(
            f"{place} has {free / 1e9:.3g} GB left, and the whole model takes {needed / 1e9:.3g} GB while it is put "
            "together. Make room, or take a folder on another disk."
        )


def common(states: Mapping[int, Collection[int]]) -> int | None:
    """Return the newest number that all stages have; None: there is none.

    Args:
        states: the numbers of those that can be had of each stage.
    """
    both = set.intersection(*map(set, states.values())) if states else set()
    return max(both, default=None)


def in_words(run: StagedConfig, rounds: Mapping[int, int]) -> str:
    """Return, for a person, that sections are not of one moment."""
    each = ", ".join(f"round {round} for {run.called(stage)}" for stage, round in sorted(rounds.items()))
    return f"the sections are not of one round; the newest that could be had of each: {each}"
