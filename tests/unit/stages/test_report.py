"""What a peer's stages tell: which stage it is of, no byte twice, and how long steps and the device took."""

import asyncio

import msgspec

from unit.dashboard.test_history import A, commit, step
from weft.clock import VirtualClock
from weft.events import Event, Notice, RoundCommitted, StepDone
from weft.stages.report import StageReports
from weft.tasks import Inline


class Meter:
    """Stands for a node: what it has moved so far."""

    moved = (0, 0)


class Told:
    def __init__(self) -> None:
        self.clock, self.meter, self.events = VirtualClock(), Meter(), list[Event]()
        self.reports = StageReports(self.meter, self.clock, self.events.append)  # type: ignore[arg-type]


def test_each_event_says_whose_it_is() -> None:
    told = Told()
    for stage in (0, 2):
        emit, _ = told.reports.of(stage, Inline(), 1)
        emit(Notice(text="here"))
    assert [event.stage for event in told.events] == [0, 2]
    assert Notice(text="here").stage is msgspec.UNSET


def test_bytes_of_a_peer_with_two_stages_are_counted_once() -> None:
    told = Told()
    one, other = (told.reports.of(stage, Inline(), 1)[0] for stage in (0, 1))
    for emit, moved in ((one, (10, 1)), (other, (15, 2)), (one, (40, 2))):
        told.meter.moved = moved
        emit(commit(1, 100, A))
    commits = [event for event in told.events if isinstance(event, RoundCommitted)]
    assert [(each.sent_nbytes, each.received_nbytes) for each in commits] == [(10, 1), (5, 1), (25, 0)]


def test_a_step_takes_from_the_one_before_and_work_is_what_the_device_did() -> None:
    told = Told()

    def work() -> str:
        told.clock.advance(3.0)
        return "done"

    async def scenario() -> None:
        emit, compute = told.reports.of(1, Inline(), 1)
        told.clock.advance(2.0)
        emit(step(1.0))
        assert await compute.train(work) == "done"
        told.clock.advance(1.0)
        emit(step(1.0))
        emit(commit(1, 100, A))
        emit(commit(2, 200, A))

    asyncio.run(scenario())
    assert [event.duration_s for event in told.events if isinstance(event, StepDone)] == [2.0, 4.0]
    assert [event.work_s for event in told.events if isinstance(event, RoundCommitted)] == [3.0, 0.0]
