"""What a device must do before its first step, it does before anybody waits for this peer."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from scenarios.swarm import BATCH, SEQ_LEN, Life, Member, Swarm
from scenarios.test_acts import BOTH, act
from scenarios.test_faults import MakeSwarm, one_replica
from weft.events import MemberJoined, MemberLeft, RoundCommitted, StepDone, WarmedUp
from weft.ids import PeerId
from weft.model.transformer import Transformer
from weft.net.messages import Heartbeat
from weft.peer.loop.lifecycle import SLOW_S
from weft.peer.messages import Joining
from weft.sync.records.acts import Amend
from weft.tasks import Inline

COMPILE_S = 30.0  # for each shape
NUM_ROUNDS = 50
USUAL_S = 6.0  # a round of these peers takes less
SOON_S = 3.0  # a goodbye takes less


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of batches that models compute, in order."""
    shapes: list[tuple[int, ...]] = []
    plain = Transformer.forward

    def forward(model: Transformer, tokens: Tensor, *args: Any, **more: Any) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return plain(model, tokens, *args, **more)

    monkeypatch.setattr(Transformer, "forward", forward)
    return shapes


class Compiling(Inline):
    """A device that takes minutes over whatever has a shape that it has not met."""

    def __init__(self, met: list[tuple[int, ...]]) -> None:
        super().__init__(1.0)
        self._met = met
        self._known: set[tuple[int, ...]] = set()

    async def train(self, work: Any, num_tokens: int = 0) -> Any:
        async with self._training:
            await asyncio.sleep(self._train_s)
            begin = len(self._met)
            done = work()  # inline: nobody else computes meanwhile
            new = {shape for shape in self._met[begin:] if shape[0] > 1} - self._known  # a sample is read by ones
            self._known |= new
            await asyncio.sleep(len(new) * COMPILE_S)
        return done

    def forget(self) -> None:
        """The device was left: what it had compiled is gone."""
        self._known.clear()


class Posts:
    """When each process first told others that it is there, and that it wants to be counted in."""

    def __init__(self, swarm: Swarm) -> None:
        self.first: dict[tuple[str, type], float] = {}
        self._swarm = swarm
        swarm.watchers.append(self._note)

    def _note(self, life: Life, _to: PeerId, message: Any) -> bool:
        self.first.setdefault((life.member.name, type(message)), self._swarm.clock.now())
        return True


def slowest_s(member: Member, since: float) -> float:
    """Return the longest time between two commits."""
    times = member.life.times(RoundCommitted, since)
    return max(after - before for before, after in pairwise(times))


@pytest.mark.full
def test_a_newcomer_that_compiles_for_minutes_delays_no_round(
    make_swarm: MakeSwarm, met: list[tuple[int, ...]]
) -> None:
    swarm = make_swarm(learns=True, num_rounds=32)
    posts = Posts(swarm)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 3)
        began, d = swarm.clock.now(), swarm.member("d")
        swarm.launch(d, compute=Compiling(met))
        await swarm.when(a, RoundCommitted, lambda event: d.id in event.contributors)
        assert swarm.clock.now() - began > COMPILE_S
        assert posts.first["d", Heartbeat] - began > COMPILE_S
        assert posts.first["d", Joining] - began > COMPILE_S
        one_replica(await swarm.done(a, b, c, d))
        assert slowest_s(a, began) < USUAL_S

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_a_newcomer_compiles_anew_for_amended_samples_before_it_is_counted_in(
    make_swarm: MakeSwarm, met: list[tuple[int, ...]]
) -> None:
    swarm = make_swarm(learns=True, num_rounds=NUM_ROUNDS, stewards=BOTH)
    posts = Posts(swarm)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 2)
        await act(swarm, a, Amend(reason="", seq_len=SEQ_LEN // 2, batch_size=2 * BATCH))
        began, d = swarm.clock.now(), swarm.member("d")
        swarm.launch(d, compute=Compiling(met))
        await swarm.when(a, RoundCommitted, lambda event: d.id in event.contributors)
        assert len(d.life.seen(WarmedUp)) == 2
        assert posts.first["d", Joining] - began > 2 * COMPILE_S
        one_replica(await swarm.done(a, b, c, d))
        assert slowest_s(a, began) < USUAL_S

    swarm.run(scenario)
    swarm.check()


def test_a_run_begins_once_its_maker_has_compiled(make_swarm: MakeSwarm, met: list[tuple[int, ...]]) -> None:
    swarm = make_swarm(learns=True, num_rounds=6)

    async def scenario() -> None:
        a, b = swarm.member("a"), swarm.member("b")
        a.is_founder = True
        swarm.launch(a, wait_for=2, compute=Compiling(met))
        swarm.launch(b)
        one_replica(await swarm.done(a, b))
        assert a.life.times(WarmedUp)[0] < a.life.times(RoundCommitted)[0] - COMPILE_S
        assert slowest_s(a, 0.0) < USUAL_S

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_who_resumes_and_compiles_for_minutes_delays_no_round(
    make_swarm: MakeSwarm, met: list[tuple[int, ...]]
) -> None:
    swarm = make_swarm(learns=True, num_rounds=NUM_ROUNDS)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        d, device = swarm.member("d"), Compiling(met)
        swarm.launch(d, compute=device)
        await swarm.when(a, RoundCommitted, lambda event: d.id in event.contributors)
        d.peer.pausing.want("asked to")
        await d.peer.pausing.settled()
        device.forget()
        await swarm.round(a, a.life.committed[-1].round + 3)
        began = swarm.clock.now()
        d.peer.pausing.want_no_more("asked to")
        await d.peer.pausing.settled()
        assert not d.peer._trainer.is_parked
        assert swarm.clock.now() - began < COMPILE_S  # who asked is told at once
        await swarm.when(a, RoundCommitted, lambda event: d.id in event.contributors and swarm.clock.now() > began)
        assert d.life.times(StepDone, began)[0] - began > COMPILE_S
        assert swarm.clock.now() - began < COMPILE_S * 3
        one_replica(await swarm.done(a, b, c, d))
        assert slowest_s(a, began) < USUAL_S

    swarm.run(scenario)
    swarm.check()


def test_who_is_stopped_while_it_compiles_does_not_wait_for_that(
    make_swarm: MakeSwarm, met: list[tuple[int, ...]]
) -> None:
    swarm = make_swarm(learns=True, num_rounds=NUM_ROUNDS)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(a, 2)
        c = swarm.member("c")
        life = swarm.launch(c, compute=Compiling(met))
        await asyncio.sleep(COMPILE_S / 2)
        assert life.peer.is_at_rest
        began = swarm.clock.now()
        life.peer.stop("asked to")
        assert (await life.task).reason == "asked to"
        assert swarm.clock.now() - began < SOON_S
        assert not c.folder.has_checkpoint
        for each in (a, b):
            each.life.peer.stop("the test is over")
        await swarm.done(a, b)

    swarm.run(scenario)


@pytest.mark.full
def test_who_is_stopped_in_a_long_step_says_goodbye_before_its_end(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=24)
    step_s = 20.0

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(a, 2)
        c = swarm.member("c")
        life = swarm.launch(c, train_s=step_s)
        await swarm.when(a, MemberJoined, lambda event: event.member == c.id)
        await asyncio.sleep(step_s / 2)
        began = swarm.clock.now()
        life.peer.stop("asked to")
        await swarm.when(a, MemberLeft, lambda event: event.member == c.id)
        assert swarm.clock.now() - began < SLOW_S + SOON_S
        assert not life.peer.is_at_rest
        assert (await life.task).reason == "asked to"
        assert life.peer.is_at_rest
        assert c.folder.has_checkpoint
        one_replica(await swarm.done(a, b))

    swarm.run(scenario)
    swarm.check()
