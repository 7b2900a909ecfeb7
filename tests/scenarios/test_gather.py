"""Out of stages comes a model again: at the end of a run, for a visitor, and after a stage lost its only member."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
from benchmarks.rig.flat import join
from torch import Tensor

from scenarios.companies import SECRET, House, Machine
from scenarios.swarm import write_corpus
from weft.clock import VirtualClock
from weft.codec.config import Fp32Config
from weft.data.corpus import CorpusConfig, TextSource
from weft.errors import PeerError, TooLarge
from weft.events import CheckpointSaved, Event, Notice, RoundCommitted, StageEmpty, StageHeld
from weft.ids import Digest, PeerId
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import SCHEME
from weft.peer.state.checkpoint import load_model, read_contents
from weft.pipeline.config import PipelineConfig
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.genesis import seal
from weft.run.staged import StagedConfig
from weft.stages.gather.gather import Gather, Gathered, Means
from weft.stages.gather.visit import Visitor, from_here
from weft.stages.reader import StageReader
from weft.store.home import Home
from weft.sync.method.presets import DdpConfig
from weft.sync.method.schedule import ConstantConfig
from weft.tasks import Inline, Tasks
from weft.wire import digest_of

T = TypeVar("T")
SEQ_LEN, BATCH, STAGES = 16, 4, 3
LONG_S = 400.0
VISITOR = Identity.from_seed(bytes(32))


def make_run_file(root: Path, num_rounds: int) -> RunFile:
    return RunFile(
        name="gather",
        stages=STAGES,
        peers=1,
        model=ShapedModel(num_layers=3, num_heads=2, width=16, ffn_width=32, is_tied=False),
        data=CorpusConfig(source=TextSource(paths=(str(write_corpus(root)),))),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=num_rounds * BATCH * SEQ_LEN,
            schedule=ConstantConfig(lr=1e-2),
            evaluate_every=0,
            evaluate_windows=4,
        ),
        method=DdpConfig(),
        pipeline=PipelineConfig(micro_batch=2, activations=Fp32Config()),
    )


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., T]:
    """Play one script to its end; return what it returns."""

    def played(script: Callable[[House], Awaitable[T]], *, num_rounds: int = 8, every_s: float = 0.0) -> T:
        clock, home = VirtualClock(), Home(tmp_path / "home")
        sealed = seal(make_run_file(tmp_path, num_rounds), tmp_path, home, lambda _event: None)

        async def whole() -> T:
            house = House(sealed, home, clock, train_s=0.1, every_s=every_s)
            try:
                async with asyncio.timeout(LONG_S):
                    return await script(house)
            finally:
                await house.end()

        return clock.run(whole())

    return played


def staged(house: House) -> StagedConfig:
    assert isinstance(house.sealed.config, StagedConfig)
    return house.sealed.config


def sections_of(machines: list[Machine]) -> dict[int, Tensor]:
    """Return the newest outer parameters of each stage, of whoever holds it now."""
    return {
        stage: member.peer.replica.outer for machine in machines for stage, member in machine.company.members.items()
    }


def states_of(machine: Machine) -> dict[Digest, Tensor]:
    """Return a dictionary that is filled with what this machine's stages are after each of their rounds."""
    found: dict[Digest, Tensor] = {}
    emit = machine.emit

    def noted(event: Event) -> None:
        emit(event)
        if isinstance(event, RoundCommitted):
            for member in machine.company.members.values():
                if member.peer.head is not None:
                    found[digest_of(member.peer.head)] = member.peer.replica.outer.clone()

    machine.emit = noted  # type: ignore[method-assign]
    return found


# --- the end of a run ---


@pytest.mark.parametrize("num_peers", [1, 2, 3, 5])
def test_who_began_the_run_ends_with_the_model_that_the_sections_make(
    play: Callable[..., object], num_peers: int
) -> None:
    held: dict[int, Tensor] = {}

    async def script(house: House) -> list[Machine]:
        maker = house.start("a", wait_for=num_peers, gathers=True)
        machines = [maker, *(house.start(name) for name in "bcde"[: num_peers - 1])]
        while len(held) < STAGES:
            await asyncio.sleep(0.1)
            held.update(sections_of(machines))
        await asyncio.gather(*(each.task for each in machines))
        return machines

    maker, *_ = machines = play(script)  # type: ignore[misc]
    assert maker.gathered is not None
    assert {each.outcomes[stage].reason for each in machines for stage in each.outcomes} == {"complete"}
    run, _, vector = load_model(maker.gathered.checkpoint)
    assert torch.equal(vector, join(run.model, [held[stage] for stage in range(STAGES)]))
    assert not torch.equal(vector, torch.zeros_like(vector))
    contents = read_contents(maker.gathered.checkpoint)
    assert contents.run == maker.company.run.run
    assert contents.head is not None
    assert contents.head.committed_tokens >= 8 * BATCH * SEQ_LEN
    section_nbytes = {stage: 4 * held[stage].numel() for stage in held}
    assert maker.gathered.fetched_nbytes == sum(
        nbytes for stage, nbytes in section_nbytes.items() if stage not in maker.outcomes
    )
    assert not [each for each in maker.seen(Notice) if "of different rounds" in each.text]  # type: ignore[attr-defined]


def test_a_full_disk_leaves_the_sections_where_they_are(
    play: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))

    async def script(house: House) -> list[Machine]:
        machines = [house.start("a", wait_for=2, gathers=True), house.start("b")]
        await asyncio.gather(*(each.task for each in machines))
        return machines

    maker, other = play(script)  # type: ignore[misc]
    assert maker.gathered is None
    assert [each for each in maker.seen(Notice) if "could not put the whole model together" in each.text]  # type: ignore[attr-defined]
    assert not (maker.company.kit.folder.checkpoint).exists()
    assert maker.company.kit.folder.stages == [0, 2]
    assert other.outcomes[1].reason == "complete"


def test_sections_of_one_home_are_put_together_without_anybody(play: Callable[..., object]) -> None:
    async def script(house: House) -> tuple[list[Machine], Gathered]:
        machines = [house.start("a", wait_for=3), house.start("b"), house.start("c")]
        await asyncio.gather(*(each.task for each in machines))
        into = house.home.root / "whole"
        return machines, await from_here(staged(house).run, house.home, into, machines[0].emit)

    machines, gathered = play(script)  # type: ignore[misc]
    parts = {
        stage: load_model(each.company.kit.folder.stage(stage).checkpoint)[2]
        for each in machines
        for stage in each.outcomes
    }
    run, _, vector = load_model(gathered.checkpoint)
    assert torch.equal(vector, join(run.model, [parts[stage] for stage in range(STAGES)]))
    assert gathered.fetched_nbytes == 0


# --- a visitor ---


async def visit(house: House, machines: list[Machine], into: Path) -> Gathered:
    """Gather as somebody who is no peer of the run."""
    run, compute = staged(house), Inline()
    passport = Passport(
        identity=VISITOR, run=run.run, name="visitor", admission=ByTicket(secret=SECRET), instance=bytes(8)
    )
    node = Node(passport, [house.network.transport(VISITOR.peer)], house.clock, lambda _event: None)
    node.remember(machines[0].id, [SCHEME + machines[0].id], machines[0].name)
    await node.start()
    tasks = Tasks()
    try:
        await node.connect(machines[0].id)
        visitor = Visitor(node, run, house.clock)
        tasks.spawn(visitor.watch())
        await visitor.met()
        windows = {
            stage: StageReader(node, run.of_stage(stage), 0, compute, house.clock) for stage in range(run.num_pieces)
        }
        means = Means(
            tokenizer=house.sealed.tokenizer.to_bytes(),
            came_with=house.sealed.came_with,
            scratch=into.parent / "scratch",
            compute=compute,
            clock=house.clock,
            emit=machines[0].emit,
        )
        return await Gather(run, means, windows, lambda _stage: (), visitor.members).gather(into)
    finally:
        await tasks.aclose()
        await node.aclose()


@pytest.mark.slow
def test_a_visitor_takes_away_one_moment_of_a_run_that_goes_on(play: Callable[..., object], tmp_path: Path) -> None:
    into = tmp_path / "away"
    states: list[Mapping[Digest, Tensor]] = []

    async def script(house: House) -> tuple[list[Machine], Gathered, int]:
        machines = [house.start("a", wait_for=3), house.start("b"), house.start("c")]
        states.extend(map(states_of, machines))
        await asyncio.sleep(8.0)
        gathered = await visit(house, machines, into)
        seen = len(machines[0].seen(RoundCommitted))
        await asyncio.gather(*(each.task for each in machines))
        return machines, gathered, seen

    machines, gathered, seen = play(script, num_rounds=20)  # type: ignore[misc]
    assert 0 < gathered.rounds[0] <= seen < 20
    assert len(machines[0].seen(RoundCommitted)) == 20  # it held up nobody
    run, _, vector = load_model(into)
    each_round = [
        {event.round: event.manifest for event in machine.seen(RoundCommitted)}  # type: ignore[attr-defined]
        for machine in machines
    ]
    of_stage = {next(iter(machine.outcomes)): number for number, machine in enumerate(machines)}
    parts = [states[of_stage[stage]][each_round[of_stage[stage]][gathered.rounds[stage]]] for stage in range(STAGES)]
    assert torch.equal(vector, join(run.model, parts))
    assert not [each for each in machines[0].seen(Notice) if "of different rounds" in each.text]  # type: ignore[attr-defined]


def test_a_stage_that_nobody_holds_is_named(
    play: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.stages.gather.gather.AGAIN_S", 0.1)
    monkeypatch.setattr("weft.stages.gather.visit.MEET_S", 3.0)

    async def script(house: House) -> str:
        machines = [house.start("a", wait_for=3), house.start("b"), house.start("c")]
        await asyncio.sleep(3.0)
        victim = next(each for each in machines if 1 in each.company.members)
        others = [each for each in machines if each is not victim]
        victim.kill()
        with pytest.raises(PeerError) as found:
            await visit(house, others, tmp_path / "away")
        return str(found.value)

    assert "holds stage 2" in play(script, num_rounds=2000)  # type: ignore[operator]


# --- a stage that loses its only member ---


@pytest.mark.full
@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_that_loses_its_only_member_goes_on_from_the_copy_that_another_kept(
    play: Callable[..., object], lost: int
) -> None:
    async def script(house: House) -> tuple[list[Machine], Machine, int]:
        machines = [house.start("a", wait_for=3), house.start("b"), house.start("c")]
        await asyncio.sleep(12.0)
        victim = next(each for each in machines if lost in each.company.members)
        head = victim.company.members[lost].peer.head
        assert head is not None
        victim.kill()
        left = [each for each in machines if each is not victim]
        await asyncio.gather(*(each.task for each in left))
        return left, victim, int(head.round)

    left, victim, reached = play(script, num_rounds=24, every_s=3.0)  # type: ignore[misc]
    empty = [event for each in left for event in each.seen(StageEmpty) if event.stage == lost]  # type: ignore[attr-defined]
    keeper = next(each for each in left if any(event.stage == lost for event in each.seen(StageHeld)))  # type: ignore[attr-defined]
    assert empty
    assert {event.restored_by for event in empty} == {keeper.id}
    assert reached - 5 <= empty[0].round <= reached  # rounds take a second, and it was kept every three
    assert {outcome.reason for each in left for outcome in each.outcomes.values()} == {"complete"}
    final = next(each.outcomes[0] for each in left if 0 in each.outcomes)
    assert final.committed_tokens >= 24 * BATCH * SEQ_LEN
    assert victim.id != keeper.id


@pytest.mark.full
def test_who_has_no_room_for_an_empty_stage_says_so_and_keeps_its_own(
    play: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(house: House) -> list[Machine]:
        machines = [house.start("a", wait_for=3), house.start("b"), house.start("c")]
        await asyncio.sleep(12.0)

        def full(run: StagedConfig, *_: object) -> int:
            raise TooLarge(f"section {run.stage} does not fit")

        monkeypatch.setattr("weft.stages.step.member.fitting", full)
        victim = next(each for each in machines if 1 in each.company.members)
        victim.kill()
        await asyncio.sleep(60.0)
        return [each for each in machines if each is not victim]

    left = play(script, num_rounds=2000, every_s=3.0)
    told = [each.text for machine in left for each in machine.seen(Notice)]  # type: ignore[attr-defined]
    assert [text for text in told if "this peer cannot take stage 2: section 1 does not fit" in text]
    assert all(len(machine.held) == 1 for machine in left)  # type: ignore[attr-defined]


@pytest.mark.full
def test_who_alone_holds_a_stage_hands_it_over_before_it_goes(play: Callable[..., object]) -> None:
    async def script(house: House) -> tuple[list[Machine], Machine, int]:
        machines = [house.start("a", wait_for=3), house.start("b"), house.start("c")]
        await asyncio.sleep(5.0)
        goes = next(each for each in machines if 1 in each.company.members)
        goes.company.stop("its person stopped it")
        await goes.task
        left = [each for each in machines if each is not goes]
        await asyncio.gather(*(each.task for each in left))
        return left, goes, int(goes.outcomes[1].round)

    left, goes, reached = play(script, num_rounds=24, every_s=60.0)  # type: ignore[misc]  # no interval has gone by
    assert reached > 1
    assert [event for event in goes.seen(Notice) if "nobody else holds stage 2" in event.text]  # type: ignore[attr-defined]
    empty = [event for each in left for event in each.seen(StageEmpty) if event.stage == 1]  # type: ignore[attr-defined]
    assert {event.round for event in empty} == {reached}, "nothing is lost"
    assert {outcome.reason for each in left for outcome in each.outcomes.values()} == {"complete"}


def test_a_backup_fetches_one_section_in_an_interval(play: Callable[..., object]) -> None:
    async def script(house: House) -> list[Machine]:
        machines = [house.start("a", wait_for=3), house.start("b"), house.start("c")]
        await asyncio.sleep(12.5)
        return machines

    machines = play(script, num_rounds=4000, every_s=4.0)
    kept: dict[PeerId, list[int]] = {}
    for machine in machines:  # type: ignore[attr-defined]
        own = {event.stage for event in machine.seen(StageHeld)}
        for event in machine.seen(CheckpointSaved):
            stage = int(Path(event.path).parent.name.removeprefix("stage-"))
            if stage not in own:
                kept.setdefault(machine.id, []).append(stage)
    assert {stage for stages in kept.values() for stage in stages} == {0, 1, 2}
    assert all(len(stages) <= 3 for stages in kept.values())  # three intervals have gone by
