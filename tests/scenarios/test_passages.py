"""Whole peers of runs with stages that audit each other: who computes something else is struck out, and nobody else."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scenarios.companies import House, Machine, losses
from scenarios.test_companies import crew, done, play, rounds, sealed
from weft.codec.config import Int8Config
from weft.events import AccuserDoubted, ActEnacted, Event, Notice, PassageAudited, PassageDoubted, PassageRefused
from weft.ids import PeerId
from weft.pipeline.device import Given, Passed
from weft.run.staged import StagedConfig
from weft.run.trust import AuditedTrust, MembersTrust
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


Kind = type[SectionTrainer]


class Cheat(SectionTrainer):
    """Computes something else of each micro-batch, or of each `every`th."""

    on: Change | None = None
    back: Change | None = None
    every = 1
    num = 0

    def forward(self, given: Given) -> Passed:
        passed = super().forward(given)
        self.num += 1
        if given.is_measured or self.num % self.every:
            return passed
        return MadeUp(passed, given, type(self).on, type(self).back)  # type: ignore[return-value]


def cheating(on: Change | None = None, back: Change | None = None, every: int = 1) -> Kind:
    return type(
        "Cheat",
        (Cheat,),
        {"on": staticmethod(on) if on else None, "back": staticmethod(back) if back else None, "every": every},
    )


def company(house: House, stage: int, kind: Kind, num: int = 3) -> list[Machine]:
    """Start `num` members of each stage; the first that takes `stage` is of a kind of its own."""
    taken: list[SectionTrainer] = []

    def make(run: StagedConfig, *rest: Any) -> SectionTrainer:
        if run.stage != stage or taken:
            return SectionTrainer(run, *rest)
        taken.append(kind(run, *rest))
        return taken[0]

    names = [f"m{number}" for number in range(num * STAGES)]
    return [house.start(name, wait_for=len(names) if name == "m0" else None, make_section=make) for name in names]


def apart(machines: list[Machine], kind: Kind = Cheat) -> tuple[Machine, list[Machine]]:
    """Return who is of a kind of its own, and all others."""
    (found,) = (
        machine for machine in machines if any(isinstance(each.trainer, kind) for each in machine.held.values())
    )
    return found, [machine for machine in machines if machine is not found]


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


QUICK, FULL = "noise goes on", ("zeros go back", "one of four")


async def until_struck_out(machines: list[Machine]) -> None:
    while len({event.subject for event in seen(machines, ActEnacted)}) < 1:  # type: ignore[attr-defined]  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == QUICK else pytest.mark.full if name in FULL else pytest.mark.slow)
        for name in CHEATS
    ],
)
def test_who_passes_something_else_on_or_back_is_struck_out_by_the_others_of_its_stage(
    tmp_path: Path, name: str
) -> None:
    stage, kind = CHEATS[name]

    async def work(house: House) -> None:
        await until_struck_out(company(house, stage, kind))

    house = play(sealed(tmp_path, num_steps=200, trust=OFTEN), tmp_path, work)
    cheat, others = apart(house.machines)
    acts = {(event.kind, event.subject, event.stage) for event in seen(others, ActEnacted)}  # type: ignore[attr-defined]
    assert acts == {("strike out", cheat.id, stage)}
    assert {event.member for event in seen(others, PassageDoubted)} == {cheat.id}  # type: ignore[attr-defined]


@pytest.mark.full
def test_what_is_learnt_is_the_same_whether_others_look_or_not(tmp_path: Path) -> None:
    found = []
    for trust in (OFTEN, MembersTrust()):
        root = tmp_path / trust.__struct_config__.tag
        root.mkdir()

        async def work(house: House) -> None:
            await done(crew(house, 9))

        house = play(sealed(root, num_steps=8, trust=trust), root, work)
        found.append(next(told for machine in house.machines if (told := losses(machine))))
    assert len(found[0]) >= 3
    assert found[0] == pytest.approx(found[1], rel=2e-3)


@pytest.mark.full
def test_of_honest_members_nobody_is_doubted_whoever_dies_and_comes_back(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        machines = crew(house, 9)
        await rounds(machines[0], 4)
        for machine in machines[3:6]:
            machine.kill()
        await asyncio.sleep(3.0)
        again = [house.start(machine.name) for machine in machines[3:6]]
        await done([*machines, *again])

    house = play(sealed(tmp_path, num_steps=30, trust=OFTEN), tmp_path, work)
    assert any(machine.seen(PassageAudited) for machine in house.machines[9:]), "who came back looks, too"
    told = [each for machine in house.machines for each in machine.seen(PassageAudited)]
    assert len(told) > 50
    assert {event.distance for event in told} == {0.0}  # type: ignore[attr-defined]
    assert not seen(house.machines, PassageDoubted) + seen(house.machines, PassageRefused)
    assert not seen(house.machines, ActEnacted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whenever_whoever_is_killed_and_comes_back_no_honest_member_is_doubted(tmp_path: Path, seed: int) -> None:
    luck = np.random.default_rng(seed)

    async def work(house: House) -> None:
        machines = crew(house, 9)
        await rounds(machines[0], 4)
        for _ in range(6):
            await asyncio.sleep(float(luck.uniform(0.1, 4.0)))
            alive = [each for each in machines[1:] if not each.is_dead and not each.task.done()]
            if not alive:
                break
            killed = alive[int(luck.integers(len(alive)))]
            killed.kill()
            await asyncio.sleep(float(luck.uniform(0.1, 12.0)))
            machines.append(house.start(killed.name))
        await done(machines)

    run = sealed(tmp_path, num_steps=120, trust=OFTEN, rebalance_s=10.0, activations=Int8Config(block=32))
    house = play(run, tmp_path, work)
    assert not seen(house.machines, PassageDoubted) + seen(house.machines, AccuserDoubted)
    assert not seen(house.machines, ActEnacted) + seen(house.machines, PassageRefused)
    assert len(seen(house.machines, PassageAudited)) > 100


async def holds(machines: list[Machine], kind: Kind) -> Member:
    """Return the part in its stage of who is of a kind of its own, once it has it."""
    while True:
        for machine in machines:
            members = [] if machine.company is None else list(machine.company.members.values())
            for member in members:
                if isinstance(member.trainer, kind):
                    return member
        await asyncio.sleep(0.01)


@pytest.mark.full
def test_who_shows_nothing_hides_nothing_for_its_neighbours_have_it_too(tmp_path: Path) -> None:
    kind = cheating(on=noise)

    async def work(house: House) -> None:
        machines = company(house, 1, kind)
        witness = (await holds(machines, kind))._pipeline.witness
        assert witness is not None
        witness.keep = lambda *_: None  # type: ignore[method-assign, assignment]
        await until_struck_out(machines)

    house = play(sealed(tmp_path, num_steps=200, trust=OFTEN), tmp_path, work)
    cheat, others = apart(house.machines)
    assert {event.subject for event in seen(others, ActEnacted)} == {cheat.id}  # type: ignore[attr-defined]


class Accuser(SectionTrainer):
    """Computes what is right."""


@pytest.mark.full
def test_who_accuses_others_of_what_is_right_is_heard_three_times(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        machines = company(house, 1, Accuser)
        lookout = (await holds(machines, Accuser))._lookout
        assert lookout is not None

        async def nothing_is_right(_key: object) -> None:
            return None

        lookout._distance = nothing_is_right  # type: ignore[method-assign, assignment]
        await done(machines)

    house = play(sealed(tmp_path, num_steps=8, trust=OFTEN), tmp_path, work)
    accuser, others = apart(house.machines, Accuser)
    assert not seen(house.machines, ActEnacted)
    assert {event.accuser for event in seen(others, AccuserDoubted)} == {accuser.id}  # type: ignore[attr-defined]
    assert max(len(each.seen(AccuserDoubted)) for each in others) == 3


@pytest.mark.full
def test_of_two_members_one_finds_a_difference_and_nobody_is_struck_out(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        await done(company(house, 1, cheating(on=noise), num=2))

    house = play(sealed(tmp_path, num_steps=6, trust=OFTEN), tmp_path, work)
    cheat, others = apart(house.machines)
    assert {event.member for event in seen(others, PassageDoubted)} == {cheat.id}  # type: ignore[attr-defined]
    assert not seen(house.machines, ActEnacted)
    texts = [event.text for each in house.machines for event in each.seen(Notice)]  # type: ignore[attr-defined]
    assert "stage 2 has 2 members: of fewer than 3 none can be struck out, whatever it does" in texts


@pytest.mark.full
def test_at_a_tenth_and_in_eight_bits_who_sends_zeros_back_is_found_too(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        await until_struck_out(company(house, 2, cheating(back=zeros)))

    run = sealed(tmp_path, num_steps=400, trust=AuditedTrust(quarantine=0), activations=Int8Config(block=32))
    cheat, others = apart(play(run, tmp_path, work).machines)
    assert {event.subject for event in seen(others, ActEnacted)} == {cheat.id}  # type: ignore[attr-defined]
