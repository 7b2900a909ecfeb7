"""Whole peers train to the end: one replica, every token counted once, the same log every time."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from scenarios.swarm import BATCH, EVERY, LEASE_TOKENS, SEQ_LEN, Life, Swarm
from weft.codec.config import Fp32Config
from weft.data.batch import Batches
from weft.events import CheckpointSaved, MajorityLost, Notice, RoundCommitted, RoundMissed, StateJoined
from weft.run.genesis import initial
from weft.run.machine import PeerConfig
from weft.store.chunks import replica_digest
from weft.sync.merge.mean import merge
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, FedAvgConfig, MethodConfig, PulseConfig, SparseLoCoConfig
from weft.sync.method.schedule import CosineConfig
from weft.sync.records.parts import cut
from weft.training.trainer import Trainer

MakeSwarm = Callable[..., Swarm]
METHODS: dict[str, MethodConfig] = {
    "ddp": DdpConfig(),
    "fedavg": FedAvgConfig(every=EVERY),
    "diloco": DiLoCoConfig(every=EVERY),
    "sparseloco": SparseLoCoConfig(every=EVERY),
    "pulse": PulseConfig(every=EVERY),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_four_peers_train_to_the_end_with_one_replica(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(learns=True, method=method, num_rounds=4)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        outcomes = await swarm.done(*members)
        assert {outcome.reason for outcome in outcomes} == {"complete"}
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert {outcome.round for outcome in outcomes} == {4}
        assert {outcome.committed_tokens for outcome in outcomes} == {swarm.run_config.train.tokens}
        assert len({outcome.loss for outcome in outcomes}) == 1
        for member in members:
            assert len(member.life.committed) == 4
            assert member.life.seen(MajorityLost) == []
            assert all(len(event.contributors) == 4 for event in member.life.committed)

    swarm.run(scenario)
    assert len(swarm.states) == 4
    swarm.check()


def test_more_members_than_the_vector_has_blocks_leave_some_parts_empty(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(learns=True, num_rounds=2, num_peers=7)

    async def scenario() -> None:
        members = await swarm.start("abcdefg")
        vector = initial(swarm.run_config, swarm.home)
        assert vector is not None
        assert range(0) in cut(vector.numel(), [1] * 7)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert all(len(event.contributors) == 7 for event in members[0].life.committed)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_scenario_has_one_log_byte_for_byte(make_swarm: MakeSwarm) -> None:
    logs = []
    for _ in range(2):
        swarm = make_swarm(learns=True, num_rounds=6, num_peers=3)

        async def scenario(swarm: Swarm = swarm) -> None:
            a, b, c = await swarm.start("abc")
            await swarm.round(a, 2)
            swarm.launch(swarm.member("d"))
            await swarm.round(c, 3)
            swarm.kill(b)
            await swarm.done(a, c, swarm.member("d"))

        swarm.run(scenario)
        logs.append(swarm.log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10_000


def test_one_peer_is_plain_training(make_swarm: MakeSwarm) -> None:
    """fedavg with H inner steps and rate 1, alone: outer - (outer - local), and nothing else."""
    schedule = CosineConfig(lr=1e-2, total_tokens=4 * LEASE_TOKENS, warmup_tokens=LEASE_TOKENS)
    swarm = make_swarm(learns=True, num_rounds=4, num_peers=1, train={"schedule": schedule})

    async def scenario() -> None:
        (a,) = await swarm.start("a")
        (outcome,) = await swarm.done(a)
        assert outcome.replica == replica_digest(by_hand(swarm), {})

    swarm.run(scenario)
    swarm.check()


def by_hand(swarm: Swarm) -> torch.Tensor:
    run, outer = swarm.run_config, initial(swarm.run_config, swarm.home)
    assert outer is not None
    trainer = _trainer(swarm)
    trainer.start(outer)
    for number in range(run.train.tokens // LEASE_TOKENS):
        lease = torch.arange(number * EVERY * BATCH, (number + 1) * EVERY * BATCH).numpy()
        trainer.train(lease, number * LEASE_TOKENS, 1)
        outer.sub_(outer - trainer.local())
        trainer.set_local(outer)
    return outer


def _trainer(swarm: Swarm) -> Trainer:
    run = swarm.run_config
    batches = Batches(swarm.sealed.store, swarm.sealed.index, "train", run.train.seq_len, run.seed)
    return Trainer(run, PeerConfig(device="cpu", micro_batch=BATCH), batches, lambda event: None, swarm.clock)


def test_gradients_averaged_over_three_peers_are_one_step_of_sgd(make_swarm: MakeSwarm) -> None:
    method = Choices(every=1, send="gradient", apply=SgdConfig(lr=0.5), codec=Fp32Config())
    swarm = make_swarm(learns=True, method=method, num_rounds=3, num_peers=3, train={"clip": 1e9})

    async def scenario() -> None:
        outcomes = await swarm.done(*await swarm.start("abc"))
        outer = initial(swarm.run_config, swarm.home)
        assert outer is not None
        trainer = _trainer(swarm)
        trainer.start(outer)
        for number in range(3):
            leases = [torch.arange(BATCH).numpy() + BATCH * (3 * number + turn) for turn in range(3)]
            gradients = [trainer.gradient(lease, 0, 3)[0].clone() for lease in leases]
            outer.sub_(0.5 * merge((BATCH * SEQ_LEN, gradient) for gradient in gradients))
        assert {outcome.replica for outcome in outcomes} == {replica_digest(outer, {})}

    swarm.run(scenario)


def test_late_joiner_receives_the_state_and_stops_nobody(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(learns=True, num_rounds=8)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 2)
        d = swarm.member("d")
        swarm.launch(d)
        joined = await swarm.when(d, StateJoined)
        assert joined.round >= 2
        outcomes = await swarm.done(a, b, c, d)
        assert len({outcome.replica for outcome in outcomes}) == 1
        first = min(round for (_, round), manifest in swarm.chains.items() if d.id in manifest.joined)
        assert first <= joined.round + 2
        for event in a.life.committed:
            assert (d.id in event.contributors) == (event.round > first + 1)
            assert event.duration_s < 1
        (missed,) = d.life.seen(RoundMissed)
        assert missed.round == first + 1
        assert missed.carried_tokens == LEASE_TOKENS
        assert "just joined" in missed.reason

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_goodbye_lets_the_others_commit_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(learns=True, num_rounds=8)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 3)
        await asyncio.sleep(0.3)
        at = swarm.clock.now()
        b.peer.stop("asked to")
        (left,) = await swarm.done(b)
        assert (left.reason, swarm.clock.now() - at < 4) == ("asked to", True)
        assert b.life.seen(CheckpointSaved)[-1].round == left.round
        event = await swarm.when(a, RoundCommitted)
        assert swarm.clock.now() - at < 3
        outcomes = await swarm.done(a, c, d)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert event.left_out.get(b.id, "it said goodbye") == "it said goodbye"
        assert b.id not in swarm.chains[event.branch, event.round].members

    swarm.run(scenario)
    swarm.check()


@pytest.mark.parametrize("leaver", [0, 1])
def test_goodbye_between_two_lets_the_other_go_on_alone_within_one_round(make_swarm: MakeSwarm, leaver: int) -> None:
    swarm = make_swarm(learns=True, num_rounds=6, num_peers=2)

    async def scenario() -> None:
        members = await swarm.start("ab")
        stays, leaves = members[1 - leaver], members[leaver]
        await swarm.round(stays, 2)
        at = swarm.clock.now()
        leaves.peer.stop("asked to")
        await swarm.when(stays, RoundCommitted)
        assert swarm.clock.now() - at < 3
        await swarm.done(*members)
        assert stays.life.seen(MajorityLost) == []

    swarm.run(scenario)
    swarm.check()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_run_stopped_in_the_middle_of_a_lease_resumes_exactly(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    every = getattr(method, "every", 1)
    tokens = 4 * every * BATCH * SEQ_LEN
    replicas = []
    for is_stopped in (False, True):
        schedule = CosineConfig(lr=1e-2, total_tokens=tokens, warmup_tokens=tokens // 4)
        swarm = make_swarm(learns=True, method=method, num_rounds=4, num_peers=1, train={"schedule": schedule})

        async def scenario(swarm: Swarm = swarm, is_stopped: bool = is_stopped) -> None:
            (a,) = await swarm.start("a", on_batch=stop_at_the_third if is_stopped else ignore)
            if is_stopped:
                (stopped,) = await swarm.done(a)
                assert stopped.reason == "in the middle"
                assert 0 < stopped.committed_tokens < tokens
                swarm.launch(a)
            (outcome,) = await swarm.done(a)
            assert outcome.reason == "complete"
            assert a.life.seen(Notice) == []
            replicas.append(outcome.replica)

        swarm.run(scenario)
        swarm.check()
    assert replicas[0] == replicas[1]


def ignore(life: Life) -> None:
    pass


def stop_at_the_third(life: Life) -> None:
    if len(life.member.world.positions[life]) == 3 * BATCH:
        life.peer.stop("in the middle")
