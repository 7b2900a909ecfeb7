"""Newcomers on lines that take time: where the state comes from, what survives an interruption, whom it slows down.

A state has two vectors of 1.8 million numbers, 14 chunks. A lease takes a minute, unless a scenario is about rounds
that are shorter, so that nothing but the state is on the lines.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from scenarios.swarm import LEASE_TOKENS, Life, Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.events import BranchOpened, Notice, RoundCommitted, StateJoined, Working
from weft.ids import PeerId
from weft.net.multi_source import SILENT_S, Blob
from weft.peer.join import state_transfer
from weft.run.config import ShapedModel
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.records.index import CHUNK_NBYTES
from weft.sync.records.messages import Accept, Collect, Holding, Merged, Propose, Ready
from weft.tasks import Inline

T = TypeVar("T")

SMALL = ShapedModel(num_layers=2, num_heads=4, width=256, ffn_width=768)
LARGER = ShapedModel(num_layers=2, num_heads=4, width=512, ffn_width=1536)
NUM_CHUNKS = 14
MBIT = 1e6
LONG_S = 60.0


class Paced(Inline):
    """Inner steps take virtual time by their tokens, and nothing else takes any: a peer is there at once."""

    def __init__(self, lease_s: float) -> None:
        super().__init__()
        self._token_s = lease_s / LEASE_TOKENS

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        await asyncio.sleep(num_tokens * self._token_s)
        return work()


def lay(*members: Member, up: float, down: float | None = None) -> None:
    """Give members a line of so many Mbit/s."""
    for member in members:
        down_bps = None if down is None else down * MBIT
        member.world.network.set_line(member.id, up_bps=up * MBIT, down_bps=down_bps)


class Transfers:
    """The chunks of states that were fetched, by whom and from whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[PeerId, Blob]] = []
        self.kept: list[Blob] = []
        self.on_kept: Callable[[int], None] = lambda num: None
        pull = state_transfer.pull

        async def watched(node: Any, blobs: Any, holders: Any, keep: Any, *rest: Any) -> Any:
            fetch = node.fetch

            async def counted(holder: PeerId, wanted: Any, into: Any, **options: Any) -> None:
                if len(into) > CHUNK_NBYTES // 2 or any(wanted == blob.digest for blob in blobs):
                    self.begun.append((holder, Blob(digest=wanted, nbytes=len(into))))
                await fetch(holder, wanted, into, **options)

            async def kept(blob: Blob, data: Any) -> None:
                await keep(blob, data)
                self.kept.append(blob)
                self.on_kept(len(self.kept))

            node.fetch = counted
            try:
                return await pull(node, blobs, holders, kept, *rest)
            finally:
                node.fetch = fetch

        monkeypatch.setattr(state_transfer, "pull", watched)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    return Transfers(monkeypatch)


def small(make_swarm: MakeSwarm, **options: Any) -> Swarm:
    return make_swarm(**({"model": SMALL, "method": DiLoCoConfig(every=2), "num_rounds": 6} | options))


async def after_a_round(swarm: Swarm, names: str, lease_s: float = LONG_S) -> list[Member]:
    """Start members, and return them a little after their first round."""
    members = await swarm.start(names, compute=Paced(lease_s))
    await asyncio.gather(*(swarm.round(member, 1) for member in members))
    await asyncio.sleep(1.0)
    return members


def join(swarm: Swarm, name: str = "n", lease_s: float = LONG_S) -> Member:
    newcomer = swarm.member(name)
    swarm.launch(newcomer, compute=Paced(lease_s))
    return newcomer


def joining_s(make_swarm: MakeSwarm, names: str, mbit: float) -> float:
    """Return how long the state takes to come from members on lines of so many Mbit/s up."""
    swarm, took_s = small(make_swarm), list[float]()

    async def scenario() -> None:
        members = await after_a_round(swarm, names)
        lay(*members, up=mbit)
        joined = await swarm.when(join(swarm), StateJoined)
        assert set(joined.donors) == {member.id for member in members}
        took_s.append(joined.duration_s)

    swarm.run(scenario)
    return took_s[0]


@pytest.mark.full
def test_two_donors_are_nearly_twice_as_fast_as_one_and_four_as_two(make_swarm: MakeSwarm) -> None:
    one, two, four = (joining_s(make_swarm, names, 10) for names in ("a", "ab", "abcd"))
    assert one == pytest.approx(NUM_CHUNKS * CHUNK_NBYTES * 8 / 10e6, rel=0.06)
    assert one / two > 1.8
    assert two / four > 1.5  # 14 chunks in four shares: two members deliver a third more than the others


def test_a_newcomer_says_how_far_the_state_has_come(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm)

    async def scenario() -> None:
        members = await after_a_round(swarm, "ab")
        lay(*members, up=10)
        newcomer = join(swarm)
        joined = await swarm.when(newcomer, StateJoined)
        told = newcomer.life.seen(Working)
        *under_way, last = [event for event in told if event.what == "fetching the state"]
        assert under_way
        assert under_way[-1].rate == pytest.approx(20e6 / 8, rel=0.1)
        assert [event.done for event in under_way] == sorted(event.done for event in under_way)
        assert (last.done, last.total, last.is_over) == (joined.nbytes, joined.nbytes, True)

    swarm.run(scenario)


def test_a_newcomer_whose_line_is_the_bottleneck_uses_all_of_it(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm)

    async def scenario() -> None:
        members = await after_a_round(swarm, "abcd")
        lay(*members, up=20)
        lay(swarm.member("n"), up=20, down=20)
        joined = await swarm.when(join(swarm), StateJoined)
        assert joined.duration_s < 1.1 * 8 * joined.nbytes / 20e6 + 0.5

    swarm.run(scenario)


@pytest.mark.parametrize("is_cut", [False, True], ids=["killed", "cut off"])
def test_one_of_two_donors_dies_and_only_what_it_had_under_way_comes_again(
    make_swarm: MakeSwarm, transfers: Transfers, is_cut: bool
) -> None:
    swarm = small(make_swarm)

    async def scenario() -> None:
        a, b = await after_a_round(swarm, "ab")
        lay(a, b, up=10)
        newcomer = swarm.member("n")

        def die(num: int) -> None:
            if num == 5:
                if is_cut:
                    swarm.cut([b], [a, newcomer])
                else:
                    swarm.kill(b)

        transfers.on_kept = die
        join(swarm)
        began = swarm.clock.now()
        joined = await swarm.when(newcomer, StateJoined)
        assert joined.fetched_nbytes == joined.nbytes
        again = len(transfers.begun) - len(transfers.kept)
        assert 1 <= again <= 2  # two of each of two donors are on their way at a time
        assert len(transfers.kept) == len({blob.digest for blob in transfers.kept}) == NUM_CHUNKS
        chunk_s = CHUNK_NBYTES * 8 / 10e6
        whole_s = 5 / 2 * chunk_s + (NUM_CHUNKS - 5 + again) * chunk_s
        assert swarm.clock.now() - began < whole_s + (SILENT_S if is_cut else 0) + 3

    swarm.run(scenario)


@pytest.mark.full
def test_who_is_killed_while_it_joins_fetches_only_what_is_missing(make_swarm: MakeSwarm, transfers: Transfers) -> None:
    """Its home keeps what has come; the members keep their pin."""
    swarm = small(make_swarm)

    async def scenario() -> None:
        members = await after_a_round(swarm, "abc")
        lay(*members, up=10)
        newcomer = join(swarm)
        is_far = asyncio.Event()
        transfers.on_kept = lambda num: is_far.set() if num == 8 else None
        await is_far.wait()
        swarm.kill(newcomer)
        await asyncio.sleep(2.0)
        assert (newcomer.folder.arriving / "chunks.bin").exists()
        join(swarm)
        joined = await swarm.when(newcomer, StateJoined)
        assert joined.round == 1
        assert joined.fetched_nbytes <= joined.nbytes - 8 * CHUNK_NBYTES + CHUNK_NBYTES
        assert len(transfers.kept) == NUM_CHUNKS
        assert not newcomer.folder.arriving.exists()
        one_replica(await swarm.done(*members, newcomer))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_a_lost_connection_costs_the_chunks_under_way_though_a_round_is_committed_meanwhile(
    make_swarm: MakeSwarm, transfers: Transfers
) -> None:
    """The one member that gives is away for a while; the pinned state is gone on with, and the round replayed."""
    swarm = small(make_swarm)

    async def scenario() -> None:
        a, b = await after_a_round(swarm, "ab", lease_s=20.0)
        newcomer = swarm.member("n")
        swarm.cut([b], [newcomer])
        lay(a, b, up=5)
        is_far = asyncio.Event()
        transfers.on_kept = lambda num: is_far.set() if num == 6 else None
        join(swarm, lease_s=20.0)
        await is_far.wait()
        swarm.cut([a], [newcomer])
        await swarm.round(a, 2)
        swarm.heal([a], [newcomer])
        joined = await swarm.when(newcomer, StateJoined)
        assert joined.round == 1
        assert len(transfers.kept) == NUM_CHUNKS
        assert len(transfers.begun) - len(transfers.kept) <= 4
        swarm.heal([b], [newcomer])
        one_replica(await swarm.done(a, b, newcomer))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_where_the_run_has_gone_far_ahead_a_newer_state_is_less_to_fetch(
    make_swarm: MakeSwarm, transfers: Transfers
) -> None:
    """What had come is dropped: to replay all rounds since would take more bytes."""
    swarm = small(make_swarm, num_rounds=20)

    async def scenario() -> None:
        members = await after_a_round(swarm, "ab", lease_s=5.0)
        lay(*members, up=5)
        newcomer = join(swarm)
        is_far = asyncio.Event()
        transfers.on_kept = lambda num: is_far.set() if num == 2 else None
        await is_far.wait()
        swarm.kill(newcomer)
        lay(*members, up=1000)
        await swarm.round(members[0], 12)
        join(swarm)
        joined = await swarm.when(newcomer, StateJoined)
        assert joined.round >= 12
        assert joined.fetched_nbytes > 0.9 * joined.nbytes
        assert not newcomer.folder.arriving.exists()

    swarm.run(scenario)


@pytest.mark.slow
def test_rounds_are_a_third_slower_while_somebody_joins_and_that_not_for_long(make_swarm: MakeSwarm) -> None:
    """Two thirds of each round its members exchange, so a newcomer that took what it can get would double that.

    With a quarter of four lines it fills its own all the same, and is in sync within 1.2 times what its line needs.
    """

    swarm = make_swarm(model=LARGER, method=DiLoCoConfig(every=2), num_rounds=20)

    async def scenario() -> None:
        a, *_ = members = await swarm.start("abcd", compute=Paced(5.0))
        lay(*members, swarm.member("n"), up=10, down=10)
        await swarm.round(a, 2)
        newcomer, began = join(swarm, lease_s=5.0), swarm.clock.now()
        joined = await swarm.when(newcomer, StateJoined)
        await swarm.when(newcomer, RoundCommitted, lambda _event: newcomer.peer.head == a.peer.head)
        head = a.peer.head
        assert head is not None
        num_rounds, result_nbytes = head.round - joined.round, newcomer.peer.replica.result_nbytes
        assert num_rounds >= 2
        assert swarm.clock.now() - began < 1.2 * 8 * (joined.fetched_nbytes + num_rounds * result_nbytes) / 10e6
        _, alone, *beside = (event.duration_s for event in a.life.committed)
        assert len(beside) >= 2
        assert 1.1 * alone < max(beside) < 1.4 * alone

    swarm.run(scenario)


class Phase:
    """A moment of a round: the first message of a kind."""

    def __init__(self, swarm: Swarm, kind: type[Any]) -> None:
        self.came = asyncio.Event()

        def watch(_life: Life, _to: PeerId, message: Any) -> bool:
            if isinstance(message, kind):
                self.came.set()
            return True

        swarm.watchers.append(watch)


@pytest.mark.parametrize(
    "phase",
    [
        None,
        Collect,
        Propose,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Ready, Merged, Holding, Accept)),
    ],
)
def test_a_newcomer_may_come_in_every_phase_of_a_round(make_swarm: MakeSwarm, phase: type[Any] | None) -> None:
    """While inner steps are made (None), and at the first message of each kind; nobody waits for it."""
    swarm = make_swarm(method=DiLoCoConfig(every=2), num_rounds=8)

    async def scenario() -> None:
        members = await after_a_round(swarm, "abc", lease_s=5.0)
        lay(*members, up=1)
        if phase is not None:
            await Phase(swarm, phase).came.wait()
        newcomer = join(swarm, lease_s=5.0)
        await swarm.when(newcomer, RoundCommitted, lambda event: newcomer.id in event.contributors)
        outcomes = await swarm.done(*members, newcomer)
        one_replica(outcomes)
        assert all(member.life.committed[-1].left_out == {} for member in members)

    swarm.run(scenario)
    swarm.check()


def test_who_comes_while_the_tie_breaker_of_two_is_dead_goes_over_to_the_branch_of_the_other(
    make_swarm: MakeSwarm,
) -> None:
    """The newcomer never hears the dead one: it does not stand by it, and the other does not wait for the newcomer."""
    swarm = make_swarm(method=DiLoCoConfig(every=2), num_rounds=30)
    over_at: list[float] = []

    async def scenario() -> None:
        keeper, other = await after_a_round(swarm, "ab", lease_s=4.0)
        swarm.kill(keeper)
        newcomer = join(swarm, lease_s=4.0)
        await swarm.when(other, BranchOpened)
        opened_at = swarm.clock.now()
        await swarm.when(newcomer, RoundCommitted, lambda event: newcomer.id in event.contributors)
        over_at.append(swarm.clock.now() - opened_at)
        longest_s = max(event.duration_s for event in other.life.seen(RoundCommitted))
        assert longest_s < 10.0, "the round in which it is counted in is one as any other"

    swarm.run(scenario)
    assert over_at[0] < 15.0


@pytest.mark.parametrize("is_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_who_offers_another_state_than_the_others_is_outvoted_and_told_of(
    make_swarm: MakeSwarm, is_first: bool
) -> None:
    """Also where it was the first to be asked, because the links to the others came up later."""
    swarm = small(make_swarm)

    async def scenario() -> None:
        members = await after_a_round(swarm, "abc")
        lay(*members, up=10)
        liar = members[1]
        liar.peer.replica.outer[:] += 1.0
        others = [member for member in members if member is not liar]
        if is_first:
            swarm.cut([swarm.member("n")], others)
            asyncio.get_running_loop().call_later(3.0, swarm.heal, [swarm.member("n")], others)
        newcomer = join(swarm)
        joined = await swarm.when(newcomer, StateJoined)
        assert liar.id not in joined.donors
        assert any("disagree" in event.text for event in newcomer.life.seen(Notice))
        liar.peer.replica.outer[:] -= 1.0

    swarm.run(scenario)


@pytest.mark.slow
def test_what_was_committed_meanwhile_is_replayed_a_little_at_a_time(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of no more rounds than fit are fetched ahead of the outer steps, each once, and from several members."""
    monkeypatch.setattr("weft.peer.join.entrance.AHEAD_NBYTES", 2 * 1_800_000)
    swarm = small(make_swarm, num_rounds=12)
    fetched: list[tuple[PeerId, str]] = []

    async def scenario() -> None:
        members = await after_a_round(swarm, "abc", lease_s=4.0)
        lay(swarm.member("n"), up=20, down=8)
        newcomer = join(swarm, lease_s=4.0)
        joined = await swarm.when(newcomer, StateJoined)
        parts, waiting = newcomer.peer.rounds.parts if newcomer.peer.rounds else None, [0]
        assert parts is None
        await swarm.when(newcomer, RoundCommitted)
        rounds = newcomer.peer.rounds
        assert rounds is not None
        fetch = rounds.parts._fetch

        async def counted(holder: PeerId, wanted: Any, nbytes: int, limit_s: float) -> Any:
            fetched.append((holder, wanted))
            waiting.append(rounds.decided.qsize())
            return await fetch(holder, wanted, nbytes, limit_s)

        rounds.parts._fetch = counted  # type: ignore[method-assign]
        await swarm.when(newcomer, RoundCommitted, lambda event: newcomer.id in event.contributors)
        assert members[0].life.committed[-1].round - joined.round > 3
        assert max(waiting) <= 3
        assert len(fetched) == len(set(fetched))
        assert len({holder for holder, _ in fetched}) == 3
        one_replica(await swarm.done(*members, newcomer))

    swarm.run(scenario)
    swarm.check()
