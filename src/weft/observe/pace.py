"""How long rounds take a peer and what it moves in them, as it measures them; told to who asks before joining.

    events ──RoundCommitted──► RoundPace        the last commits: when each was, and all bytes moved up to then
    newcomer ──PaceRequest──► a member          what do rounds take you?
             ◄──PaceAnswer──                    seconds and bytes of one, in the mean

Only rounds count between which nothing was in the way: a pause, a sleeping machine, a lost majority or another number
of members begins them anew. Bursts of bytes are left out. Of several stages the first is followed, and the bytes are
those of all.

A peer that does not know the request answers with an error, and is left out.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Annotated

from msgspec import UNSET, Meta

from weft import events
from weft.clock import Clock
from weft.ids import PeerId, RunId
from weft.net.node import Node
from weft.wire import Record

KEPT = 64  # commits: enough for what not every round has, such as evaluation
SLEPT_S = 30.0  # that a process stood still: a busy machine does for less
BURST = 8  # times what rounds usually move: a state for a newcomer, or a measurement of a line, and no round
MAX_ASKED = 8  # members
ASK_S = 5.0
LEAST_ROUNDS, LEAST_S = 3, 60.0  # either is enough to tell a pace
MAX_COUNT = 1 << 53
MAX_S = 1e9

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class PaceRequest(Record, frozen=True, kw_only=True, tag="PaceRequest"):
    """A call, of anybody that is admitted: what do rounds take you?"""

    run: RunId


class PaceAnswer(Record, frozen=True, kw_only=True, tag="PaceAnswer"):
    """Of the last rounds, in the mean; all zero where there were none."""

    num_rounds: _Count
    num_members: _Count  # of the run, or of the stage that its sender holds
    round_s: Annotated[float, Meta(ge=0, le=MAX_S)]  # from one commit to the next
    round_nbytes: _Count  # that its sender moved meanwhile, both ways


class RoundPace:
    """A sink that measures one peer's rounds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._commits: deque[tuple[float, int]] = deque(maxlen=KEPT)  # when, and bytes moved up to then
        self._moved_nbytes = 0
        self._stage, self._num_members = 0, 0  # of these commits

    def write(self, entry: events.Entry) -> None:
        match entry.event:
            case events.RoundCommitted():
                self._take(entry.event)
            case events.LoopStalled(stall_s=stall_s) if stall_s < SLEPT_S:
                pass
            case (
                events.LoopStalled()
                | events.Paused()
                | events.Resumed()
                | events.MajorityLost()
                | events.BranchOpened()
                | events.StageLeft()
            ):
                self._commits.clear()

    def close(self) -> None:
        pass

    def _take(self, commit: events.RoundCommitted) -> None:
        self._moved_nbytes += commit.sent_nbytes + commit.received_nbytes
        stage = 0 if commit.stage is UNSET else commit.stage
        if self._commits and stage > self._stage:
            return
        num_members = len(commit.contributors) + len(commit.left_out) + commit.num_through
        if (stage, num_members) != (self._stage, self._num_members):
            self._commits.clear()
            self._stage, self._num_members = stage, num_members
        self._commits.append((self._clock.now(), self._moved_nbytes))

    def answer(self) -> PaceAnswer:
        num_rounds = len(self._commits) - 1
        if num_rounds < 1:
            return PaceAnswer(num_rounds=0, num_members=0, round_s=0.0, round_nbytes=0)
        moved = [after - before for (_, before), (_, after) in pairwise(self._commits)]
        usual = median(moved)
        return PaceAnswer(
            num_rounds=num_rounds,
            num_members=self._num_members,
            round_s=min((self._commits[-1][0] - self._commits[0][0]) / num_rounds, MAX_S),
            round_nbytes=round(fmean(each for each in moved if each <= BURST * usual)),
        )


class PaceTeller:
    """Answers whoever asks `node` for the pace of this peer's rounds."""

    def __init__(self, pace: RoundPace, node: Node) -> None:
        self._pace = pace
        node.serve(PaceRequest, self._answer)

    async def _answer(self, _peer: PeerId, _request: PaceRequest) -> PaceAnswer:
        return self._pace.answer()


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What members have measured.

    Args:
        num_told: members that told.
        num_members: that the rounds were among, as most of these say: of the run, or of their stage.
        round_nbytes: that one of them moved in a round, both ways.
    """

    num_told: int
    num_members: int
    round_s: float
    round_nbytes: int


async def measured(node: Node, peers: Sequence[PeerId]) -> Rounds | None:
    """Ask members what rounds take them; return the medians, or None where none has seen enough of them.

    Failure:
    - a member does not answer, is older, or has just begun: the others' figures count.
    - a member lies: half of those asked are needed for a figure that is far off.
    """
    request = PaceRequest(run=node.run)
    asked = [node.ask(peer, request, PaceAnswer, deadline_s=ASK_S) for peer in peers[:MAX_ASKED]]
    return together([answer for answer in await asyncio.gather(*asked) if answer is not None])


def together(answers: Sequence[PaceAnswer]) -> Rounds | None:
    """Return what members' answers come to: of those who exchange, where any does; None: none tells enough."""
    told = [each for each in answers if _is_enough(each)]
    told = [each for each in told if each.num_members > 1] or told
    if not told:
        return None
    return Rounds(
        num_told=len(told),
        num_members=round(median(each.num_members for each in told)),
        round_s=median(each.round_s for each in told),
        round_nbytes=round(median(each.round_nbytes for each in told)),
    )


def _is_enough(answer: PaceAnswer) -> bool:
    if not (answer.num_rounds and math.isfinite(answer.round_s) and answer.round_s > 0):
        return False
    return answer.num_rounds >= LEAST_ROUNDS or answer.num_rounds * answer.round_s >= LEAST_S
