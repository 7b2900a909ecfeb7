"""How long an inner step of a pipeline takes, among machines on lines: fill, work, what is exposed, and drain.

    fill     forward passes and transfers before a stage until its first micro-batch is there
    work     all micro-batches of the step in that stage: as fast as its members' rates added up
    uneven   its slowest member works on: senders choose apart, and each knows what it has sent itself
    exposed  what it waits for the last gradients from the stages after it, while it has nothing else to do
    drain    input gradients and transfers before it after its last, less the weights' gradients that fill the time

and the step is as long as that stage makes it of which these are the most. A stage works on one thing while others are
under way, so of transfers only those of the first and the last micro-batch are waited for, unless a line is busy for
longer than its machine, or fewer micro-batches may be under way than would hide them (`sender.Origin`).

Where weights' gradients take no time of their own, members are alike, one in each of S stages, and lines are infinite,
M micro-batches take M + S - 1 times one: the bubble of 1F1B and GPipe, (S - 1) / (M + S - 1).

Narayanan et al., PipeDream-Flush, 2006.09503; Qi et al., Zero Bubble Pipeline Parallelism, 2401.10241.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft.cost.pipeline import Crossing
from weft.cost.training import Traffic
from weft.pipeline.sender import PER_STAGE
from weft.pipeline.worker import MAX_OWED, Bounds
from weft.plan.timing import Line

# Each way over a boundary: a call that names what is there, a request for it, the first of its bytes.
NUM_HOPS = 3
NUM_OWED = MAX_OWED - 1  # micro-batches whose weights' gradients a busy member still owes after its last input gradient
# Micro-batches of its slowest member by which a stage is late where several send to several: 1 to 6 in steps that were
# played (tests/unit/plan/played.py), as often in long steps as in short ones, of members alike and of mixed ones.
NUM_UNEVEN = 3.0
# Of a line's rate, where it is busy all the time: what is under way together arrives together, and keeps who waits for
# the first of it waiting (played: 0.75, of one member a stage, lines 0.9 and 1.3 times as busy as machines).
LINE_USE = 0.75
_TINY = 1e-9  # of a micro-batch: sums of floats are no more exact

Limit = Literal["machines", "lines", "under way"]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Members of a stage that are alike. Seconds are of one micro-batch in its section.

    Args:
        num_taken: micro-batches that each keeps at a time, at most.
    """

    name: str
    count: int
    line: Line
    forward_s: float
    input_s: float
    weights_s: float = 0.0
    num_taken: int = Bounds.num_taken

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.input_s + self.weights_s


Stage = tuple[Holder, ...]


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """A pipeline that is to make steps.

    Args:
        between: what a micro-batch moves over each boundary; `entry`: between members of the first stage.
        num_micro: micro-batches of a step, those of all members of the first stage.
    """

    stages: tuple[Stage, ...]
    between: Crossing
    entry: Crossing
    num_micro: int

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_under_way(self) -> int:
        """Return how many micro-batches are on their way at a time, at most."""
        return PER_STAGE * self.num_stages * num_members(self.stages[0])

    def traffic(self, number: int) -> Traffic:
        """Return what a mean member of a stage sends and receives for each micro-batch that it computes."""
        before = self.between if number else self.entry
        num_first = num_members(self.stages[0])
        share = 1.0 if number else (num_first - 1) / num_first  # that another member computes than began it
        after = self.between if number < self.num_stages - 1 else Crossing(down_nbytes=0, up_nbytes=0)
        sent, received = share * before.up_nbytes + after.down_nbytes, share * before.down_nbytes + after.up_nbytes
        if not number:  # members of the first stage begin micro-batches beside
            sent, received = sent + share * before.down_nbytes, received + share * before.up_nbytes
        return Traffic(round(sent), round(received))


def num_members(stage: Stage) -> int:
    return sum(holder.count for holder in stage)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of an inner step, by what they go to, and how busy stages are.

    Args:
        compute_s: all micro-batches in the slowest stage, as fast as its members' rates added up.
        bubble_s: fill, drain and what is exposed, were there no network; with whole micro-batches not being sharable.
        uneven_s: the slowest member works on.
        transfer_s: bytes on their way that are waited for. latency_s: so of messages.
        told_s: that nothing is left to be done is on its way to all.
        bottleneck: the stage that decides, and why.
    """

    compute_s: float
    bubble_s: float
    uneven_s: float
    transfer_s: float
    latency_s: float
    told_s: float
    bottleneck: int
    limit: Limit
    utilisation: tuple[float, ...]

    @property
    def total_s(self) -> float:
        waited_s = self.bubble_s + self.uneven_s + self.transfer_s + self.latency_s
        return self.compute_s + waited_s + self.told_s

    @property
    def bubble(self) -> float:
        """Return the share of a step in which the slowest stage would stand still, were there no network."""
        return self.bubble_s / (self.compute_s + self.bubble_s)


def step_time(pipe: Pipe) -> StepTime:
    """Return the time of a step in the long run: routes know who is fast, and nobody fails."""

    def over(line_of: Callable[[Line], Line]) -> Pipe:
        stages = (tuple(replace(holder, line=line_of(holder.line)) for holder in stage) for stage in pipe.stages)
        return replace(pipe, stages=tuple(stages))

    near, here = over(lambda line: replace(line, delay_s=0.0)), over(lambda _line: Line())
    even, alone, with_bytes, whole = _Way(here, num_uneven=0.0), _Way(here), _Way(near), _Way(pipe)
    compute_s = max(pipe.num_micro / rate(stage) for stage in here.stages)
    total_s = whole.total_s
    return StepTime(
        compute_s=compute_s,
        bubble_s=even.total_s - compute_s,
        uneven_s=alone.total_s - even.total_s,
        transfer_s=with_bytes.total_s - alone.total_s,
        latency_s=total_s - with_bytes.total_s,
        told_s=whole.told_s,
        bottleneck=whole.bottleneck,
        limit=whole.limit,
        utilisation=tuple(
            pipe.num_micro * (num_members(stage) / rate(stage)) / (num_members(stage) * (total_s + whole.told_s))
            for stage in here.stages
        ),
    )


def rate(stage: Stage) -> float:
    """Return the micro-batches that machines of a stage compute in a second: the sum of theirs."""
    return sum(holder.count / holder.compute_s for holder in stage)


def makespan_s(paces: Sequence[tuple[float, int]], num: int) -> float:
    """Return how long `num` pieces take that go to whoever has them done first.

    Args:
        paces: seconds of a piece, and how many members need so many.
    """
    time_s = num / sum(count / pace_s for pace_s, count in paces)
    while sum(count * int(time_s / pace_s + _TINY) for pace_s, count in paces) < num:
        time_s = min((int(time_s / pace_s + _TINY) + 1) * pace_s for pace_s, _ in paces)
    return time_s


class _Way:
    """One step over the lines that a pipe has."""

    def __init__(self, pipe: Pipe, num_uneven: float = NUM_UNEVEN) -> None:
        self._pipe = pipe
        self._num_uneven = num_uneven
        stages = pipe.stages
        self._paces = [
            [(_pace_s(holder, pipe.traffic(number)), holder.count) for holder in stage]
            for number, stage in enumerate(stages)
        ]
        self._forward_s = [self._mean([holder.forward_s for holder in stage], n) for n, stage in enumerate(stages)]
        self._input_s = [self._mean([holder.input_s for holder in stage], n) for n, stage in enumerate(stages)]
        self._weights_s = [self._mean([holder.weights_s for holder in stage], n) for n, stage in enumerate(stages)]
        self._down_s = [self._between_s(n, n + 1, pipe.between.down_nbytes) for n in range(pipe.num_stages - 1)]
        self._up_s = [self._between_s(n + 1, n, pipe.between.up_nbytes) for n in range(pipe.num_stages - 1)]
        self._enter_s = self._hop_s(0, 0) if num_members(stages[0]) > 1 else 0.0
        self._rooms = [self._room(number) for number in range(pipe.num_stages)]
        ends = [(self._until_s(number), number) for number in range(pipe.num_stages)]
        self.total_s, latest = max(ends, key=lambda end: (end[0], -end[1]))
        self.bottleneck = latest
        self.limit: Limit = "machines"
        if self._held_up_s(latest):
            self.limit = "under way"
        elif self._work_s(latest) > (1 + _TINY) * self._compute_s(latest):
            self.limit = "lines"
        # The last member of the first stage to have its micro-batches back says so to all.
        self.told_s = max(self._hop_s(0, number) for number in range(pipe.num_stages))

    def _until_s(self, number: int) -> float:
        """Return when all is done, were this stage the one that decides."""
        first, last = self._forward_s, self._input_s
        fill_s = self._enter_s + sum(first[:number]) + sum(self._down_s[:number])
        beyond_s = sum(first[number + 1 :]) + sum(last[number + 1 :])
        beyond_s += sum(self._down_s[number:]) + sum(self._up_s[number:])
        whole_s = first[number] + last[number] + self._weights_s[number]
        owed_s = min(NUM_OWED, self._pipe.num_micro / num_members(self._pipe.stages[number])) * self._weights_s[number]
        # In the steady state as many gradients come back meanwhile as forward passes are made: forward passes are over.
        exposed_s = max(0.0, beyond_s * first[number] / whole_s - owed_s)
        drain_s = sum(last[:number]) + sum(self._up_s[:number]) + self._weights_s[0]
        work_s = self._work_s(number) + self._uneven_s(number) + self._held_up_s(number)
        return fill_s + work_s + exposed_s + max(0.0, drain_s - owed_s)

    def _uneven_s(self, number: int) -> float:
        num_senders = num_members(self._pipe.stages[max(0, number - 1)])
        if min(num_senders, num_members(self._pipe.stages[number])) == 1:
            return 0.0
        return self._num_uneven * max(pace_s for pace_s, _ in self._paces[number])

    def _room(self, number: int) -> tuple[float, float]:
        """Return how long a micro-batch takes from this stage on and back, and how many may be there at a time."""
        pipe, stage = self._pipe, self._pipe.stages[number]
        round_trip_s = sum(self._forward_s[number:]) + sum(self._input_s[number:])
        round_trip_s += sum(self._down_s[number:]) + sum(self._up_s[number:])
        room = sum(holder.count * holder.num_taken for holder in stage)
        if number:
            return round_trip_s + self._hop_s(number - 1, number), room  # until its sender's word
        return round_trip_s + 2 * self._enter_s, min(room, pipe.num_under_way)

    def _held_up_s(self, number: int) -> float:
        """Return how much longer a stage takes because others wait for room: all micro-batches after the first."""
        num, work_s = self._pipe.num_micro, self._work_s(number)
        late = [(num - room) * max(0.0, trip_s / room - work_s / num) for trip_s, room in self._rooms if num > room]
        return max(late, default=0.0)

    def _work_s(self, number: int) -> float:
        return makespan_s(self._paces[number], self._pipe.num_micro)

    def _compute_s(self, number: int) -> float:
        holders = self._pipe.stages[number]
        return makespan_s([(holder.compute_s, holder.count) for holder in holders], self._pipe.num_micro)

    def _mean(self, values: Sequence[float], number: int) -> float:
        """Return a stage's mean over micro-batches, of which each member gets a share by its pace."""
        shares = self._shares(number)
        return sum(share * value for share, value in zip(shares, values, strict=True))

    def _shares(self, number: int) -> list[float]:
        rates = [count / pace_s for pace_s, count in self._paces[number]]
        return [each / sum(rates) for each in rates]

    def _between_s(self, source: int, target: int, nbytes: int) -> float:
        """Return how long it takes until what one stage has is at the other, in the mean."""
        found = 0.0
        for here, share in zip(self._pipe.stages[source], self._shares(source), strict=True):
            for there, other in zip(self._pipe.stages[target], self._shares(target), strict=True):
                found += share * other * 8 * nbytes / min(here.line.up_bps, there.line.down_bps)
        return found + NUM_HOPS * self._hop_s(source, target)

    def _hop_s(self, source: int, target: int) -> float:
        delays = [
            sum(
                share * holder.line.delay_s
                for holder, share in zip(self._pipe.stages[number], self._shares(number), strict=True)
            )
            for number in (source, target)
        ]
        return sum(delays)


def _pace_s(holder: Holder, traffic: Traffic) -> float:
    """Return the seconds from one micro-batch to the next: of the machine, or of a direction of its line."""
    up_s = 8 * traffic.sent_nbytes / holder.line.up_bps
    down_s = 8 * traffic.received_nbytes / holder.line.down_bps
    return max(holder.compute_s, max(up_s, down_s) / LINE_USE)
