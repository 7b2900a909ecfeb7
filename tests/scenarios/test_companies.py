"""Whole peers of runs with stages, on a virtual clock: what they learn, who dies, comes and moves."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from scenarios.companies import House, Machine, losses
from scenarios.swarm import write_corpus
from weft.clock import VirtualClock
from weft.codec.config import Fp32Config
from weft.data.batch import Batches
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import BranchOpened, Notice, RoundCommitted, StageEmpty, StageHeld, StageLeft, StateJoined
from weft.ids import Digest, PeerId
from weft.model.config import num_parameters
from weft.model.flat import assemble, layout
from weft.peer.join.state_transfer import StateServer
from weft.pipeline.config import PipelineConfig
from weft.pipeline.messages import Forward, IsTaken, Passing
from weft.pipeline.routing import Router
from weft.pipeline.worker import Worker
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.genesis import Sealed, seal
from weft.run.staged import StagedConfig
from weft.run.trust import MembersTrust, RecordedTrust, TrustConfig
from weft.stages.placement import ALONE, ALONE_S
from weft.stages.step.barrier import Barrier
from weft.stages.step.conductor import Conductor
from weft.store.home import Home
from weft.store.proving import prove
from weft.store.rounds import RoundsFile
from weft.sync.method.presets import DdpConfig, DeMoConfig, DiLoCoConfig, MethodConfig, PowerSgdConfig, SparseLoCoConfig
from weft.sync.method.schedule import ConstantConfig
from weft.sync.proof import shown
from weft.sync.records.messages import Manifest

SEQ_LEN, BATCH = 16, 4
LONG_S = 400.0
DDP = DdpConfig(codec=Fp32Config())
MEMBERS = MembersTrust()


def sealed(
    root: Path,
    method: MethodConfig = DDP,
    num_steps: int = 6,
    batch: int = BATCH,
    *,
    is_tied: bool = False,
    clip: float = 1.0,
    lr: float = 1e-2,
    text: Path | None = None,
    trust: TrustConfig = MEMBERS,
    **pipeline: Any,
) -> Sealed:
    run_file = RunFile(
        name="companies",
        stages=3,
        peers=1,
        model=ShapedModel(num_layers=3, num_heads=2, width=16, ffn_width=128, is_tied=is_tied),
        data=CorpusConfig(source=TextSource(paths=(str(text or write_corpus(root)),))),
        pipeline=PipelineConfig(**{"micro_batch": 2, "activations": Fp32Config()} | pipeline),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=batch,
            tokens=num_steps * 2 * BATCH * SEQ_LEN,
            schedule=ConstantConfig(lr=lr),
            clip=clip,
            evaluate_every=2,
            evaluate_windows=8,
        ),
        method=method,
        trust=trust,
    )
    return seal(run_file, root, Home(root / "home"), lambda _event: None)


def play(run: Sealed, root: Path, work: Callable[[House], Awaitable[None]], **house_of: float) -> House:
    clock = VirtualClock()
    house = House(run, Home(root / "home"), clock, **house_of)

    async def main() -> None:
        try:
            async with asyncio.timeout(LONG_S):
                await work(house)
        finally:
            await house.end()

    clock.run(main())
    return house


def crew(house: House, num: int) -> list[Machine]:
    return [house.start("m0", wait_for=num), *(house.start(f"m{number}") for number in range(1, num))]


async def done(machines: list[Machine]) -> None:
    await asyncio.gather(*(machine.task for machine in machines if not machine.is_dead))


def rounds_of(machine: Machine) -> list[int]:
    return [event.round for event in machine.seen(RoundCommitted)]  # type: ignore[attr-defined]


def whole(machines: list[Machine], run: Sealed) -> torch.Tensor:
    """Return the vector of the model that they hold together."""
    assert isinstance(run.config, StagedConfig)
    vector = torch.empty(num_parameters(run.config.model))
    at = {span.name: span for span in layout(run.config.model)}
    for stage, member in [found for each in machines for found in each.held.items()]:
        for span in layout(run.config.model, run.config.pieces[stage]):
            there = at[span.name]
            vector[there.offset : there.stop] = member.peer.replica.outer[span.offset : span.stop]
    return vector


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 6])
def test_as_many_samples_a_step_teach_the_same_whoever_holds_which_stage(tmp_path: Path, num: int) -> None:
    found = []
    for folder, peers, batch in (("three", 3, 2 * BATCH), ("others", num, BATCH if num == 6 else 2 * BATCH)):
        root = tmp_path / folder
        root.mkdir()

        async def work(house: House, peers: int = peers) -> None:
            await done(crew(house, peers))

        found.append(losses(play(sealed(root, batch=batch), root, work).machines[0]))
    assert len(found[0]) >= 3
    assert found[0] == pytest.approx(found[1], rel=2e-3)


@pytest.mark.full
def test_what_is_measured_through_the_stages_is_the_loss_of_the_model_that_they_hold(tmp_path: Path) -> None:
    run = sealed(tmp_path, num_steps=4)

    async def work(house: House) -> None:
        await done(crew(house, 3))

    house = play(run, tmp_path, work)
    module = assemble(run.config.model, whole(house.machines, run))
    heldout = Batches(run.store, run.index, "heldout", SEQ_LEN, run.config.seed)
    batches = list(heldout.heldout_batches(8, 8))
    with torch.no_grad():
        expected = sum(float(module.loss(*batch)) * batch.tokens.numel() for batch in batches)
    expected /= sum(batch.tokens.numel() for batch in batches)
    assert losses(house.machines[0])[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [DeMoConfig(), PowerSgdConfig(), DiLoCoConfig(every=3), SparseLoCoConfig(every=3)])
def test_any_method_that_all_take_part_in_goes_with_stages(tmp_path: Path, method: MethodConfig) -> None:
    async def work(house: House) -> None:
        await done(crew(house, 6))

    house = play(sealed(tmp_path, method), tmp_path, work)
    told = [machine.outcomes for machine in house.machines]
    assert [outcome.reason for each in told for outcome in each.values()] == ["complete"] * 6
    replicas = {stage: {each[stage].replica for each in told if stage in each} for stage in range(3)}
    assert {stage: len(found) for stage, found in replicas.items()} == {0: 1, 1: 1, 2: 1}, "members of a stage agree"


@pytest.mark.full
def test_each_stage_records_its_own_rounds(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        await done(crew(house, 6))

    house = play(sealed(tmp_path, DDP, trust=RecordedTrust()), tmp_path, work, every_s=5.0)
    for machine in house.machines:
        for member in machine.held.values():
            peer = member.peer
            file, head = RoundsFile(peer.context.folder.rounds), peer.head
            assert head is not None
            assert file.is_whole(peer.run.run, head)
            counted = [each for each in file.manifests() if machine.id in {one.peer for one in each.contributions}]
            assert len({each.entry for each in counted}) == len(counted) > 1
            proof = prove(file, peer.run.run, counted[0].round, machine.id)
            assert shown(proof).tokens.keys() == {machine.id}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_member_that_dies_and_one_that_comes_leave_what_is_learnt_as_it_is(tmp_path: Path, stage: int) -> None:
    run = sealed(tmp_path, num_steps=60, lr=3e-3)
    late: list[Machine] = []

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0 if stage else 1], 8)
        killed = next(each for each in machines[1 if stage else 0 :] if stage in each.company.members)
        killed.kill()
        await asyncio.sleep(1.0)
        late.append(house.start("late"))
        await done(machines + late)

    house = play(run, tmp_path, work)
    assert [event.stage for event in late[0].seen(StageHeld)] == [stage], "it goes where somebody is missing"
    alive = next(each for each in house.machines if not each.is_dead and losses(each))
    (tmp_path / "calm").mkdir()

    async def calm(house: House) -> None:
        await done(crew(house, 3))

    without = play(sealed(tmp_path / "calm", num_steps=60, batch=2 * BATCH, lr=3e-3), tmp_path / "calm", calm)
    expected = losses(without.machines[0])[-1]
    if stage:
        assert losses(alive)[-1] == pytest.approx(expected, rel=0.02)
    else:  # while one alone leads the stages, steps have half the samples: it makes more of them
        assert 0.7 * expected < losses(alive)[-1] < 1.02 * expected


@pytest.mark.full
def test_who_comes_back_goes_where_no_round_ends_without_its_vote(tmp_path: Path) -> None:
    """Newcomers have made its stage as strong as others, but count in no majority; another stage is weaker."""
    back: list[Machine] = []

    async def work(house: House) -> None:
        machines = crew(house, 9)
        await rounds(machines[0], 4)
        of = [[each for each in machines[1:] if stage in each.company.members] for stage in range(3)]
        for killed in of[2][:2]:
            killed.kill()
        machines += [house.start("n0"), house.start("n1")]
        await asyncio.sleep(10.0)
        of[0][0].kill()
        await asyncio.sleep(10.0)
        assert all(2 in each.company.members for each in machines[9:])
        back.append(house.start(of[2][0].name))
        await done(machines + back)

    house = play(sealed(tmp_path, num_steps=40), tmp_path, work)
    (held,) = back[0].seen(StageHeld)
    assert (held.stage, held.reason) == (2, "no round of it ends without this peer")  # type: ignore[attr-defined]
    assert not [event for machine in house.machines for event in machine.seen(BranchOpened)]


@pytest.mark.slow
def test_the_peer_that_gains_most_moves_to_the_weakest_stage_and_goes_on_there(tmp_path: Path) -> None:
    run = sealed(tmp_path, num_steps=400, rebalance_s=10.0)

    async def work(house: House) -> None:
        machines = crew(house, 7)  # three of the first stage, two of the others
        await rounds(machines[0], 8)
        for machine in [each for each in machines if 2 in each.company.members]:
            machine.kill()
            break
        await done(machines)

    house = play(run, tmp_path, work)
    moved = [each for each in house.machines if len(each.seen(StageHeld)) > 1]
    assert len(moved) == 1
    assert [event.stage for event in moved[0].seen(StageHeld)] == [0, 2]
    assert moved[0].seen(StageLeft)[0].reason == "goes to another stage"
    assert moved[0].outcomes[2].reason == "complete"


async def rounds(machine: Machine, num: int) -> None:
    while len(machine.seen(RoundCommitted)) < num:  # noqa: ASYNC110  # a virtual clock: this takes no time
        await asyncio.sleep(0.05)


def test_one_left_alone_waits_for_who_has_the_other_stages_and_begins_none_anew(tmp_path: Path) -> None:
    run, left = sealed(tmp_path, num_steps=40), list[Machine]()

    async def work(house: House) -> None:
        machines = crew(house, 3)
        await rounds(machines[0], 4)
        for machine in machines[1:]:
            machine.kill()
        await asyncio.sleep(60.0)
        left.append(machines[0])
        assert not machines[0].task.done()

    play(run, tmp_path, work)
    assert len(left[0].seen(StageHeld)) == 1
    assert left[0].seen(StageEmpty), "it says what is missing"


@pytest.mark.full
@pytest.mark.parametrize("name", ["m0", "m1", "m2"])
def test_one_that_comes_back_alone_to_what_is_complete_says_so_and_ends(tmp_path: Path, name: str) -> None:
    run, back = sealed(tmp_path), list[Machine]()

    async def work(house: House) -> None:
        await done(crew(house, 3))
        back.append(house.start(name))
        async with asyncio.timeout(2 * ALONE_S):
            await back[0].task

    play(run, tmp_path, work)
    assert [notice.text for notice in back[0].seen(Notice)] == [ALONE]  # type: ignore[attr-defined]
    assert not back[0].seen(StageHeld)
    assert not back[0].seen(StageEmpty)


@pytest.mark.full
def test_those_who_come_back_together_to_what_is_complete_can_put_it_together_and_end(tmp_path: Path) -> None:
    run, back = sealed(tmp_path), list[Machine]()

    async def work(house: House) -> None:
        await done(crew(house, 3))
        back.append(house.start("m0", gathers=True))
        await asyncio.sleep(10.0)
        back.extend(house.start(name) for name in ("m1", "m2"))
        await done(back)

    play(run, tmp_path, work)
    assert [[event.stage for event in each.seen(StageHeld)] for each in back] == [[0], [1], [2]]  # type: ignore[attr-defined]
    assert not any(each.seen(StageEmpty) or each.seen(RoundCommitted) for each in back)
    assert back[0].gathered is not None
    assert len(back[0].gathered.rounds) == 3


@pytest.mark.full
def test_peers_that_compute_again_on_the_way_back_learn_bit_for_bit_what_others_do(tmp_path: Path) -> None:
    found = []
    for has_recompute in (False, True):
        root = tmp_path / str(has_recompute)
        root.mkdir()

        async def work(house: House) -> None:
            await done(crew(house, 3))

        found.append(losses(play(sealed(root), root, work, has_recompute=has_recompute).machines[0]))
    assert found[0] == found[1] != []


@pytest.mark.full
@pytest.mark.parametrize("order", ["012", *(pytest.param(each, marks=pytest.mark.slow) for each in ("210", "120"))])
@pytest.mark.parametrize("apart_s", [pytest.param(0.0, marks=pytest.mark.slow), 3.0])
def test_a_run_goes_on_whose_only_members_of_each_stage_have_all_paused(
    tmp_path: Path, order: str, apart_s: float
) -> None:
    async def work(house: House) -> None:
        machines = crew(house, 3)
        await rounds(machines[0], 8)
        by_stage = sorted(machines, key=lambda each: next(iter(each.held)))
        for number in order:
            by_stage[int(number)].company.pausing.want("on request")
            await asyncio.sleep(apart_s)
        await asyncio.sleep(30.0)
        paused = [len(each.seen(RoundCommitted)) for each in machines]
        await asyncio.sleep(10.0)
        assert [len(each.seen(RoundCommitted)) for each in machines] == paused
        for number in order:
            by_stage[int(number)].company.pausing.want_no_more("on request")
            await asyncio.sleep(apart_s)
        await done(machines)

    house = play(sealed(tmp_path, num_steps=12), tmp_path, work, train_s=0.05)
    assert min(len(each.seen(RoundCommitted)) for each in house.machines) > 20


def let_all_go_to(patch: pytest.MonkeyPatch, chosen: list[Machine]) -> None:
    """Let all micro-batches of a stage go to some members of it, while they live; who they are may be said later."""
    reserve = Router.reserve

    def goes_to_them(self: Router, num: int, now: float, left: Collection[PeerId], most_s: float) -> Any:
        here = {each.id for each in chosen if not each.is_dead} & set(self.peers)
        return reserve(self, num, now, set(self.peers) - here if here else left, most_s)

    patch.setattr(Router, "reserve", goes_to_them)


def victim_that_brings(victims: list[Machine], conductor: Conductor, payload: Digest | None) -> Machine | None:
    """Return the victim that a conductor is of, where it lives, has been in some rounds, and announces a payload."""
    found = next((each for each in victims if each.id == conductor._part.channel.peer and not each.is_dead), None)
    is_due = found is not None and payload is not None and len(found.seen(RoundCommitted)) > 10
    return found if is_due else None


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_member_that_comes_back_hears_how_far_the_others_are_though_they_all_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """It was killed with all work of a round, before it told of any, and was linked again before it could listen. The
    other member of its stage has nothing, and would know first what it has."""
    announcing, settled = Conductor.announcing, Worker.settled
    victims, heard, hear = list[Machine](), set[PeerId](), Barrier._on_passing

    async def or_dies(self: Conductor, payload: Digest | None) -> None:
        if (machine := victim_that_brings(victims, self, payload)) is not None:
            machine.kill()
            await asyncio.sleep(1.0)
        await announcing(self, payload)

    async def late(self: Worker) -> None:
        if victims and victims[0].is_dead:
            await asyncio.sleep(60.0)
        await settled(self)

    async def deaf(self: Barrier, peer: PeerId, note: Passing) -> None:
        """Miss what is said as a link comes up."""
        if peer in heard:
            await hear(self, peer, note)
        heard.add(peer)

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 8)
        victims.append(next(each for each in machines[1:] if stage in each.company.members))
        while not victims[0].is_dead:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
        monkeypatch.setattr(Barrier, "_on_passing", deaf)
        await asyncio.sleep(4.0)
        machines.append(house.start(victims[0].name))
        await asyncio.sleep(12.0)
        victims.clear()
        await done(machines)

    let_all_go_to(monkeypatch, victims)
    monkeypatch.setattr(Conductor, "announcing", or_dies)
    monkeypatch.setattr(Worker, "settled", late)
    house = play(sealed(tmp_path, num_steps=18), tmp_path, work, train_s=0.05)
    assert min(len(each.seen(RoundCommitted)) for each in house.machines if not each.is_dead) > 5


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "is_back"),
    [(1, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, False), (2, False), (1, True)))],
)
def test_a_member_with_nothing_to_bring_waits_for_no_word_of_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, is_back: bool
) -> None:
    """It waits to hear what the other member of its stage has, which has all, and is killed before it tells."""
    announcing, nobody_brings = Conductor.announcing, Conductor._nobody_brings
    victims, waiting = list[Machine](), set[PeerId]()

    async def and_is_seen(self: Conductor, head: Manifest, is_over: Callable[[], bool]) -> bool:
        waiting.add(self._part.channel.peer)
        try:
            return await nobody_brings(self, head, is_over)
        finally:
            waiting.discard(self._part.channel.peer)

    async def or_dies(self: Conductor, payload: Digest | None) -> None:
        if (machine := victim_that_brings(victims, self, payload)) is not None:
            while not waiting & set(self._part.channel.peers):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.1)
            machine.kill()
            await asyncio.sleep(1.0)
        await announcing(self, payload)

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 8)
        victims.append(next(each for each in machines[1:] if stage in each.company.members))
        while not victims[0].is_dead:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.1)
        if is_back:
            machines.append(house.start(victims[0].name))
        await done(machines)

    let_all_go_to(monkeypatch, victims)
    monkeypatch.setattr(Conductor, "_nobody_brings", and_is_seen)
    monkeypatch.setattr(Conductor, "announcing", or_dies)
    house = play(sealed(tmp_path, num_steps=20), tmp_path, work, train_s=0.05)
    assert victims[0].is_dead
    assert min(len(each.seen(RoundCommitted)) for each in house.machines[:6] if not each.is_dead) > 16


@pytest.mark.full
def test_a_member_of_the_first_stage_that_is_rounds_behind_begins_nothing_more_of_a_round_long_gone_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back by a state that was pinned before it was killed, where it is a member still. Where rounds are short
    the others give each of its micro-batches up, and it would try again and again."""
    on_forward, donors = Worker.on_forward, list[Machine]()

    def pinned(self: StateServer, _wanted: Digest, _present: Digest) -> Any:
        return next(filter(self._is_replayable, self._pins), None)

    async def is_of_now(self: Worker, peer: PeerId, request: Forward) -> IsTaken:
        is_old = self._stage > 0 and request.round + 1 < self._current._at.round
        return IsTaken(is_taken=False) if is_old else await on_forward(self, peer, request)

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 8)
        first = {each.id: each for each in machines if 0 in each.company.members}
        some_rounds = next(iter(first.values())).held[0].peer.rounds
        assert some_rounds is not None
        donor = first.pop(some_rounds.chain.base.keeper)  # it goes on alone
        donors.append(donor)
        (victim,) = first.values()
        await donor.held[0].peer.pin()
        victim.kill()
        await asyncio.sleep(15.0)
        house.start(victim.name)
        await asyncio.sleep(15.0)

    monkeypatch.setattr(StateServer, "_at_hand", pinned)
    monkeypatch.setattr(Worker, "on_forward", is_of_now)
    house = play(sealed(tmp_path, num_steps=1000), tmp_path, work, train_s=0.05)
    at = {type(event): at for at, event in reversed(house.machines[-1].events)}  # the first of each kind
    assert at[RoundCommitted] < at[StateJoined] + 5.0
    assert rounds_of(house.machines[-1])[0] < 12, "its state was old"
    assert rounds_of(house.machines[-1])[-1] >= rounds_of(donors[0])[-1] - 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "apart_s"),
    [
        (0, None),
        (2, 6.0),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in product(range(3), (None, 0.5, 6.0))
            if each not in ((0, None), (2, 6.0))
        ),
    ],
)
def test_a_round_goes_on_whose_only_work_went_with_a_member_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, apart_s: float | None
) -> None:
    announcing = Conductor.announcing
    victims: list[Machine] = []

    async def and_dies(self: Conductor, payload: Digest | None) -> None:
        """Be killed once the others have heard that there is a payload, and before they have any of it."""
        await announcing(self, payload)
        if (machine := victim_that_brings(victims, self, payload)) is not None:
            await asyncio.sleep(0.05)
            machine.kill()
            await asyncio.sleep(1.0)

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 8)
        victims.append(next(each for each in machines[1:] if stage in each.company.members))
        while not victims[0].is_dead:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.1)
        if apart_s is not None:
            await asyncio.sleep(apart_s)
            machines.append(house.start(victims[0].name))
        await done(machines)

    let_all_go_to(monkeypatch, victims)
    monkeypatch.setattr(Conductor, "announcing", and_dies)
    house = play(sealed(tmp_path, num_steps=20), tmp_path, work, train_s=0.05)
    assert min(len(each.seen(RoundCommitted)) for each in house.machines[:6] if not each.is_dead) > 16
    assert min(len(each.seen(RoundCommitted)) for each in house.machines if not each.is_dead) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_killed_at_whatever_moment_comes_back_and_trains_along(tmp_path: Path, seed: int) -> None:
    luck = Random(seed)
    lasts = list[float]()

    async def work(house: House) -> None:
        machines = {each.name: each for each in crew(house, 6)}
        await rounds(machines["m0"], 8)
        for _ in range(8):
            name = luck.choice(sorted(machines.keys() - {"m0"}))
            await asyncio.sleep(luck.uniform(0.1, luck.choice((0.5, 2.0, 5.0, 25.0))))
            machines[name].kill()
            await asyncio.sleep(luck.uniform(0.0, luck.choice((0.1, 0.5, 2.0, 15.0))))
            machines[name], began = house.start(name), house.clock.now()
            await rounds(machines[name], 3)
            lasts.append(house.clock.now() - began)

    play(sealed(tmp_path, num_steps=100_000), tmp_path, work, train_s=0.02, every_s=5.0)
    assert len(lasts) == 8
    assert max(lasts) < 30.0
