"""Whole peers of runs with stages that audit each other: who computes something else is struck out, and nobody else."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from scenarios.companies import House, Machine
from scenarios.test_companies import crew, done, play, rounds, sealed
from weft.codec.config import Int8Config
from weft.events import (
    AccuserDoubted,
    ActEnacted,
    Event,
    Notice,
    PassageAudited,
    PassageDoubted,
    PassageRefused,
    StageHeld,
)
from weft.ids import PeerId
from weft.pipeline.device import Given, Passed
from weft.run.trust import AuditedTrust
from weft.stages.step.member import Member
from weft.training.section import SectionTrainer
from weft.wire import Buffer

Change = Callable[[Buffer, Buffer | None], bytes]  # of what is made, and of what came

OFTEN = AuditedTrust(audit_rate=1.0, quarantine=0)
STAGES = 3


def zeros(made: Buffer, _came: Buffer | None) -> bytes:
    return bytes(memoryview(made).nbytes)


def noise(made: Buffer, _came: Buffer | None) -> bytes:
    right = np.frombuffer(made, "<f4")
    return (right.std() * np.random.default_rng(len(right)).standard_normal(len(right))).astype("<f4").tobytes()


def what_came(made: Buffer, came: Buffer | None) -> bytes:
    return bytes(came) if came is not None and memoryview(came).nbytes == memoryview(made).nbytes else zeros(made, came)


@dataclass
class MadeUp:
    """What a cheat makes of a micro-batch.

    Args:
        on, back: changes what goes on, and what goes back; None: nothing is changed.
    """

    passed: Passed
    given: Given
    on: Change | None
    back: Change | None
    loss: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.loss, self.output, self.count = self.passed.loss, self.passed.output, self.passed.count
        came = None if self.given.activations is None else self.given.activations.data
        if self.on is not None and self.output is not None and not callable(self.output):
            self.output = self.on(self.output, came)

    def backward(self, gradient: Buffer | None, member: PeerId | None = None) -> Buffer | None:
        found = self.passed.backward(gradient, member)
        return found if found is None or self.back is None else self.back(found, gradient)


def cheating(on: Change | None = None, back: Change | None = None, every: int = 1) -> Callable[..., SectionTrainer]:
    """Return what computes something else of each micro-batch, or of each `every`th."""

    class Cheat(SectionTrainer):
        num = 0

        def forward(self, given: Given) -> Passed:
            passed = super().forward(given)
            Cheat.num += 1
            is_honest = given.is_measured or Cheat.num % every
            return passed if is_honest else MadeUp(passed, given, on, back)  # type: ignore[return-value]

    return Cheat


def company(
    house: House, stage: int, make: Callable[..., SectionTrainer], num: int = 3
) -> tuple[Machine, list[Machine]]:
    """Start `num` members of each stage; return the last one of `stage`, which cheats, and all others."""
    names = [f"m{number}" for number in range(num * STAGES)]
    cheat = names[STAGES * (num - 1) + stage]
    machines = [
        house.start(
            name, wait_for=len(names) if name == "m0" else None, make_section=make if name == cheat else SectionTrainer
        )
        for name in names
    ]
    return next(each for each in machines if each.name == cheat), [each for each in machines if each.name != cheat]


def seen(machines: list[Machine], kind: type[Event]) -> list[Event]:
    return [event for machine in machines for event in machine.seen(kind)]


CHEATS = {
    "zeros go on": (1, cheating(on=zeros)),
    "noise goes on": (0, cheating(on=noise)),
    "no work": (1, cheating(on=what_came, back=what_came)),
    "zeros go back": (2, cheating(back=zeros)),
    "noise goes back": (1, cheating(back=noise)),
    "one of four": (1, cheating(on=noise, every=4)),
}


@pytest.mark.parametrize("name", CHEATS)
def test_who_passes_something_else_on_or_back_is_struck_out_by_the_others_of_its_stage(
    tmp_path: Path, name: str
) -> None:
    stage, make = CHEATS[name]
    found: list[Machine] = []

    async def work(house: House) -> None:
        cheat, others = company(house, stage, make)
        found.append(cheat)
        while not seen(others, ActEnacted):  # noqa: ASYNC110  # a virtual clock
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)

    house = play(sealed(tmp_path, num_steps=200, trust=OFTEN), tmp_path, work)
    cheat, others = found[0], [each for each in house.machines if each is not found[0]]
    assert [event.stage for event in cheat.seen(StageHeld)] == [stage]  # type: ignore[attr-defined]
    acts = {(event.kind, event.subject, event.stage) for event in seen(others, ActEnacted)}  # type: ignore[attr-defined]
    assert acts == {("strike out", cheat.id, stage)}
    assert {event.member for event in seen(others, PassageDoubted)} == {cheat.id}  # type: ignore[attr-defined]


def test_of_honest_members_nobody_is_doubted_whoever_dies_and_comes_back(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        machines = crew(house, 9)
        await rounds(machines[0], 4)
        for machine in machines[3:6]:
            machine.kill()
        await asyncio.sleep(20.0)
        again = [house.start(machine.name) for machine in machines[3:6]]
        await done([*machines, *again])

    house = play(sealed(tmp_path, num_steps=40, trust=OFTEN), tmp_path, work)
    told = [each for machine in house.machines for each in machine.seen(PassageAudited)]
    assert len(told) > 50
    assert {event.distance for event in told} == {0.0}  # type: ignore[attr-defined]
    assert not seen(house.machines, PassageDoubted) + seen(house.machines, PassageRefused)
    assert not seen(house.machines, ActEnacted)


async def holds(machine: Machine) -> Member:
    """Return what a machine has of its stage, once it has."""
    while machine.company is None or not machine.company.members:  # noqa: ASYNC110  # a virtual clock
        await asyncio.sleep(0.01)
    return next(iter(machine.company.members.values()))


def test_who_shows_nothing_hides_nothing_for_its_neighbours_have_it_too(tmp_path: Path) -> None:
    found: list[Machine] = []

    async def work(house: House) -> None:
        cheat, others = company(house, 1, cheating(on=noise))
        found.append(cheat)
        await holds(cheat)
        witness = cheat.company._pipeline.witness
        assert witness is not None
        witness.keep = lambda *_: None  # type: ignore[method-assign, assignment]
        while not seen(others, ActEnacted):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    house = play(sealed(tmp_path, num_steps=200, trust=OFTEN), tmp_path, work)
    struck = {event.subject for event in seen(house.machines, ActEnacted)}  # type: ignore[attr-defined]
    assert struck == {found[0].id}


def test_who_accuses_others_of_what_is_right_is_heard_three_times(tmp_path: Path) -> None:
    accusers: list[Machine] = []

    async def work(house: House) -> None:
        accuser, others = company(house, 1, SectionTrainer)
        accusers.append(accuser)
        lookout = (await holds(accuser))._lookout
        assert lookout is not None

        async def nothing_is_right(_key: object) -> None:
            return None

        lookout._distance = nothing_is_right  # type: ignore[method-assign, assignment]
        await done([accuser, *others])

    house = play(sealed(tmp_path, num_steps=30, trust=OFTEN), tmp_path, work)
    assert not seen(house.machines, ActEnacted)
    doubted = [event for each in house.machines for event in each.seen(AccuserDoubted)]
    assert {event.accuser for event in doubted} == {accusers[0].id}  # type: ignore[attr-defined]
    by_member = [len(each.seen(AccuserDoubted)) for each in house.machines]
    assert max(by_member) == 3


def test_of_two_members_one_finds_a_difference_and_nobody_is_struck_out(tmp_path: Path) -> None:
    found: list[Machine] = []

    async def work(house: House) -> None:
        cheat, others = company(house, 1, cheating(on=noise), num=2)
        found.append(cheat)
        await done([cheat, *others])

    house = play(sealed(tmp_path, num_steps=10, trust=OFTEN), tmp_path, work)
    others = [each for each in house.machines if each is not found[0]]
    assert {event.member for event in seen(others, PassageDoubted)} == {found[0].id}  # type: ignore[attr-defined]
    assert not seen(house.machines, ActEnacted)
    texts = [event.text for each in house.machines for event in each.seen(Notice)]  # type: ignore[attr-defined]
    assert "stage 2 has 2 members: of fewer than 3 none can be struck out, whatever it does" in texts


@pytest.mark.full
def test_at_a_tenth_and_in_eight_bits_who_passes_on_noise_is_found_too(tmp_path: Path) -> None:
    trust, found = AuditedTrust(quarantine=0), list[Machine]()

    async def work(house: House) -> None:
        cheat, others = company(house, 2, cheating(back=zeros))
        found.append(cheat)
        while not seen(others, ActEnacted):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    run = sealed(tmp_path, num_steps=400, trust=trust, activations=Int8Config(block=32))
    house = play(run, tmp_path, work)
    struck = {event.subject for event in seen(house.machines, ActEnacted)}  # type: ignore[attr-defined]
    assert struck == {found[0].id}
