"""One model out of all stages: their sections, fetched one after the other, as one checkpoint of the whole run.

    gathered = await Gather(run, means, readers, here, members).gather(into)

Each stage counts its own rounds, and one that was slow has fewer: what says which states belong together is how many
rounds of the first stage are in them. Members are asked to keep the states that they hold; where these are not of one
such round, to keep those after one that is still to come. Where that does not succeed within `AGREE_S`, because rounds
go by too fast or a stage stands still, the newest of each is taken, and a notice says so. A section that lies on this
machine, in the state that is wanted, is not fetched. Where nobody tells of the first stage's rounds, as among sections
on a disk, each stage's own are taken in their place.

No more than one section is in memory: what comes goes into a mapped file (`Assembled`). A section's tensors lie in the
whole's vector in the same order, with those of other sections between them; tensors that lie side by side in both are
one stretch.

Failure:
- a member vanishes: other members of its stage deliver; there are none: all begins anew, `TRIES` times, with what has
  come of other stages left where it is.
- a stage that nobody holds, nor this machine: PeerError, which names it.
- no room on the disk: DiskFull, before anything is fetched.
"""

import asyncio
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from weft.clock import Clock
from weft.errors import CheckpointError, DiskFull, NetError, PeerError, Refused
from weft.events import CheckpointSaved, Emit, Notice
from weft.ids import Digest, PeerId, Round
from weft.model.flat import layout
from weft.peer.state.checkpoint import Snapshot, load_model, read_contents, save
from weft.peer.state.state_client import Offered
from weft.run.staged import StagedConfig
from weft.stages.reader import StageReader
from weft.store.chunks import chunk_bytes
from weft.store.home import PeerFolder
from weft.store.pool import Pool
from weft.sync.merge.method import OUTER
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.tasks import Compute
from weft.wire import Buffer, digest_of

AGREE_S = 60.0  # for all stages to come to one round
AHEAD = 2  # rounds, from the newest that is known
TRIES = 3
ROOM = 2.05  # times the vector: the mapped file, and the checkpoint that is written from it
AGAIN_S = 15.0  # a stage that has lost all its members may be restored meanwhile


@dataclass(frozen=True)
class Found:
    """A section's state on this machine.

    Args:
        pieces: yields the outer parameters, where states are merged; raises CheckpointError where they are no longer
            those of `head`.
        round: of the first stage, so many are in it; of the stage itself, where that is not known.
    """

    head: Manifest
    charter: Charter | None
    pieces: Callable[[], Iterator[Buffer]]
    round: int


Choice = tuple[int, Found | Offered]  # with its round


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a gatherer works with."""

    tokenizer: bytes  # its blob
    came_with: bytes  # the blob of what came with the model; empty: nothing did
    scratch: Path  # a folder for what is put together
    compute: Compute
    clock: Clock
    emit: Emit


@dataclass(frozen=True, kw_only=True)
class Gathered:
    checkpoint: Path
    rounds: tuple[Round, ...]  # of each stage
    fetched_nbytes: int


class Assembled:
    """A whole model put together from its sections, as a checkpoint has it, in a file that is mapped into memory.

    Args:
        run: the whole.
        scratch: a folder for the file, which has no name.

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
            f"{place} has {free / 1e9:.3g} GB left, and the whole model takes {needed / 1e9:.3g} GB while weft puts it "
            "together. Make room, or choose a folder on another disk."
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
    return f"the sections are of different rounds; the newest of each are: {each}"


class Gather:
    """
    Args:
        run: the whole.
        readers: of each stage that has members; none offline.
        here: returns the states of a stage that lie here now.
        members: returns who holds a stage now.
    """

    def __init__(
        self,
        run: StagedConfig,
        means: Means,
        readers: Mapping[int, StageReader],
        here: Callable[[int], Sequence[Found]],
        members: Callable[[int], Sequence[PeerId]] = lambda _stage: (),
    ) -> None:
        self._run = run
        self._means = means
        self._readers = readers
        self._here = here
        self._members = members
        self._pins: dict[int, dict[int, Offered]] = {}  # of each stage, by round
        self._placed: dict[int, Digest] = {}  # the state's head, of stages that have come
        self._fetched_nbytes = 0

    async def gather(self, into: Path) -> Gathered:
        """Put the sections together, and write the checkpoint of the whole into a folder.

        Raises:
            PeerError, NetError, Refused: a section cannot be had.
            DiskFull: no room; CheckpointError: the folder cannot be written.
        """
        whole = await self._means.compute.serve(lambda: Assembled(self._run, self._means.scratch))
        chosen = await self._all_in(whole)
        states = {stage: each for stage, (_, each) in chosen.items()}
        numbers = {stage: number for stage, (number, _) in chosen.items()}
        if len(set(numbers.values())) > 1:
            self._means.emit(Notice(text=in_words(self._run, numbers)))
        rounds, first = {stage: each.head.round for stage, each in states.items()}, states[0]
        snapshot = Snapshot(
            config=self._run,
            tokenizer=self._means.tokenizer,
            came_with=self._means.came_with,
            head=first.head,
            charter=first.charter,
            replicated={OUTER: whole.vector},
            counters={f"stage_{stage}_round": int(round) for stage, round in rounds.items()},
        )
        contents = await self._means.compute.serve(lambda: save(into, snapshot))
        written = digest_of(contents.replicated)
        nbytes = contents.replicated.nbytes
        self._means.emit(CheckpointSaved(path=str(into), round=first.head.round, digest=written, nbytes=nbytes))
        return Gathered(
            checkpoint=into,
            rounds=tuple(rounds[stage] for stage in sorted(rounds)),
            fetched_nbytes=self._fetched_nbytes,
        )

    async def _all_in(self, whole: Assembled) -> dict[int, Choice]:
        failure: Exception | None = None
        for number in range(TRIES):
            try:
                await asyncio.sleep(AGAIN_S if number and self._readers else 0.0)
                chosen = await self._agree()
                for stage, (_, each) in chosen.items():
                    if self._placed.get(stage) != digest_of(each.head):
                        self._placed.pop(stage, None)
                        await self._place(stage, each, whole)
                        self._placed[stage] = digest_of(each.head)
            except (PeerError, NetError, Refused, CheckpointError) as error:
                failure = error
                self._pins.clear()
            else:
                return chosen
        assert failure is not None
        raise failure

    async def _place(self, stage: int, chosen: Found | Offered, whole: Assembled) -> None:
        if isinstance(chosen, Offered):
            self._fetched_nbytes += await self._readers[stage].pull(
                chosen, (OUTER,), lambda _name, start, data: whole.put(stage, start, data), self._means.emit
            )
            return

        def put() -> None:
            start = 0
            for piece in chosen.pieces():
                whole.put(stage, start, piece)
                start += memoryview(piece).nbytes // 4

        await self._means.compute.serve(put)

    # --- which states ---

    async def _agree(self) -> dict[int, Choice]:
        """Return the states to take, of one round if it can be had; members keep those that they are to deliver."""
        clock, until = self._means.clock, self._means.clock.now() + AGREE_S
        stages = range(self._run.num_pieces)
        await asyncio.gather(*(self._pin(stage) for stage in stages))
        ahead = AHEAD
        while True:
            found = {stage: self._choices(stage) for stage in stages}
            goal = common(found)
            if goal is not None:
                return {stage: (goal, found[stage][goal]) for stage in stages}
            newest = {stage: max(found[stage]) for stage in stages}
            left_s = until - clock.now()
            if left_s <= 0 or not await self._pin_at(max(newest.values()) + ahead, left_s):
                return {stage: (newest[stage], found[stage][newest[stage]]) for stage in stages}
            ahead *= 2  # rounds that go by before all have heard of it

    async def _pin_at(self, round: int, left_s: float) -> bool:
        """Have the members of all pieces keep their states after a round; return whether it is worth another look."""
        members = {stage: self._members(stage) for stage in range(self._run.num_pieces)}
        if not all(stage in self._readers and each for stage, each in members.items()):
            return False
        asked = await asyncio.gather(
            *(self._readers[stage].pin_at(each, round, left_s) for stage, each in members.items())
        )
        for stage, offered in zip(members, asked, strict=True):
            if offered is not None:
                self._pins.setdefault(stage, {})[round] = offered
        return True

    async def _pin(self, stage: int) -> None:
        members = self._members(stage)
        if stage in self._readers and members:
            with suppress(PeerError, NetError, Refused):  # it may lie here
                offered = await self._readers[stage].pin(members)
                round = await self._readers[stage].beat(offered.donors, digest_of(offered.head))
                self._pins.setdefault(stage, {})[int(offered.head.round) if round is None else round] = offered

    def _choices(self, stage: int) -> dict[int, Found | Offered]:
        """Return the states that can be had of a stage, by round.

        Raises:
            PeerError: none.
        """
        found: dict[int, Found | Offered] = dict(self._pins.get(stage, {}))
        pinned = {digest_of(pin.head): round for round, pin in self._pins.get(stage, {}).items()}
        for each in self._here(stage):
            if (round := pinned.get(digest_of(each.head))) is not None:
                found[round] = each  # which need not be fetched
            elif not pinned:  # else it may be of long ago, or of a branch that was left
                found[each.round] = each
        if not found:
            raise PeerError(f"no linked peer holds {self._run.called(stage)}, and neither does this machine")
        return found


# --- what lies here ---


def found_in(folders: Sequence[PeerFolder], run: StagedConfig, stage: int) -> list[Found]:
    """Return the sections of a stage in the folders of this machine's peers, the newest first."""
    found = []
    for folder in folders:
        path = folder.stage(stage).checkpoint
        with suppress(CheckpointError):  # none, or damaged
            contents = read_contents(path)
            if contents.head is not None and contents.run == run.of_stage(stage).run:
                head = contents.head
                found.append(Found(head, contents.charter, _reader(path, head), int(head.round)))
    return sorted(found, key=lambda each: -each.head.round)


def folders_of(run_folder: Path) -> list[PeerFolder]:
    """Return those of this home's peers, in a folder of a run."""
    return [PeerFolder(path) for path in sorted(run_folder.glob("*")) if path.is_dir()]


def _reader(path: Path, head: Manifest) -> Callable[[], Iterator[Buffer]]:
    def read() -> Iterator[Buffer]:
        _, _, vector = load_model(path)
        if read_contents(path).head != head:
            raise CheckpointError(f"{path} was replaced by a newer one while it was read")
        yield from chunk_bytes(vector)

    return read
