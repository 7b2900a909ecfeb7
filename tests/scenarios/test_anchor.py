"""An anchor on the virtual clock: it follows from outside, and a run outlives all who trained it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scenarios.swarm import EVERY, Swarm
from scenarios.test_join import LARGER, LONG_S, Paced, lay
from weft import wire
from weft.anchor import anchor as anchor_module
from weft.anchor.anchor import Anchor, AnchorContext
from weft.anchor.archive import Archive
from weft.anchor.disk import Anchored
from weft.codec.config import Fp32Config
from weft.events import BranchOpened, Event, MemberSuspected, PeerStopped, RoundCommitted, StateJoined
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.multi_source import small_from
from weft.net.node import Node
from weft.net.transport.memory import SCHEME
from weft.peer.join import state_transfer
from weft.run.machine import PeerConfig
from weft.run.outline import public, read_outline
from weft.sim.world import SECRET, Member
from weft.store import home as home_module
from weft.store.home import Home
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.records.index import CHUNK_NBYTES
from weft.sync.records.messages import Manifest
from weft.tasks import Inline
from weft.wire import digest_of

Make = Callable[..., Swarm]
DILOCO = DiLoCoConfig(every=EVERY, codec=Fp32Config())


class Kept:
    """An anchor of a swarm's run: its machine, and its present process."""

    def __init__(self, swarm: Swarm, root: Path, *, has_archive: bool = False) -> None:
        self.swarm = swarm
        self.root = root
        self.has_archive = has_archive
        self.home = swarm.home  # with data and tokenizer: no member of a swarm serves them
        self.identity = Identity.from_seed(bytes(31) + b"a")
        self.events: list[Event] = []
        self.anchor: Anchor
        self.task: asyncio.Task[str]
        self.compute: Inline = Inline()
        self._num_starts = 0

    async def start(self, *members: Member) -> None:
        config = self.swarm.run_config
        outline = read_outline(wire.encode(config), config.run)
        instance = bytes([self._num_starts]) * 8
        self._num_starts += 1
        passport = Passport(
            identity=self.identity, run=config.run, name="anchor", admission=ByTicket(secret=SECRET), instance=instance
        )
        transport = self.swarm.network.transport(self.identity.peer)
        self.node = node = Node(passport, [transport], self.swarm.clock, self.events.append, offload=inline)
        for member in members:
            node.remember(member.id, [SCHEME + member.id], member.name)
        await node.start()
        kept = Anchored(self.root / "anchored")
        kept.load()
        node.serve_blobs(public(outline, config.run, self.home))
        context = AnchorContext(
            node=node, home=self.home, kept=kept, compute=self.compute, clock=self.swarm.clock, emit=self.events.append,
            max_parameters=10**7, archive=self._archive() if self.has_archive else None,
        )  # fmt: skip
        self.kept = kept
        self.anchor = Anchor(outline, context)
        self.task = asyncio.ensure_future(self.anchor.keep())

    def _archive(self) -> Archive:
        archive = Archive(self.root / "archive")
        archive.load(self.swarm.run_config.run)
        return archive

    @property
    def head(self) -> Manifest | None:
        return self.anchor.head

    async def reach(self, round: int) -> None:
        async with asyncio.timeout(120):
            while self.head is None or self.head.round < round:  # noqa: ASYNC110  # it has no event to wait for
                await asyncio.sleep(0.1)

    async def be_level_with(self, *members: Member) -> None:
        """Wait until it and all of these have made the same last outer step."""
        async with asyncio.timeout(120):
            while not self._is_level_with(members):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def _is_level_with(self, members: Sequence[Member]) -> bool:
        last = {member.life.committed[-1].manifest for member in members}
        return self.head is not None and last == {digest_of(self.head)}

    async def end(self) -> None:
        self.anchor.stop("the scenario ends")
        await asyncio.gather(self.task, return_exceptions=True)
        await self.node.aclose()
        self.kept.close()

    async def crash(self) -> None:
        self.swarm.network.kill(self.identity.peer)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.node.aclose()
        self.kept.close()

    def as_member(self) -> Member:
        """Return what those who start later are told of it, as a ticket would."""
        member = self.swarm.member("anchor")
        member.identity, member.id = self.identity, self.identity.peer
        return member


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **options: Swarm(tmp_path / "swarm", **options)


@asynccontextmanager
async def anchored(swarm: Swarm, root: Path, *members: Member) -> Any:
    anchor = Kept(swarm, root)
    await anchor.start(*members)
    try:
        yield anchor
    finally:
        await anchor.end()


def knows(swarm: Swarm, anchor: Kept) -> None:
    """Let whoever starts from now on know the anchor's address."""
    member = anchor.as_member()
    member.lives.append(_Elsewhere())  # type: ignore[arg-type]


class _Elsewhere:
    """Stands for a process that is no peer of the swarm."""

    is_running = False
    is_dead = True


def run(swarm: Swarm, scenario: Callable[[], Awaitable[None]]) -> None:
    swarm.run(scenario)


def settings(save_every_s: float) -> PeerConfig:
    return PeerConfig(device="cpu", micro_batch=2, checkpoint_every_s=save_every_s)


@pytest.mark.parametrize("since", [2, 1000])
def test_an_anchor_follows_from_outside_and_nobody_waits_for_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since: int
) -> None:
    monkeypatch.setattr(anchor_module, "MAX_SINCE", since)  # how often it fetches the state anew
    monkeypatch.setattr(state_transfer, "FRESH_S", 0.5)
    swarm = make(method=DILOCO, num_rounds=10, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        async with anchored(swarm, tmp_path / "anchor", a, b, c) as anchor:
            await swarm.done(a, b, c)
            await anchor.reach(10)
            assert anchor.head is not None
            assert anchor.identity.peer not in anchor.head.members
            assert digest_of(anchor.head) == a.life.committed[-1].manifest
            states = [event for event in anchor.events if isinstance(event, StateJoined)]
            assert len(states) >= 2 if since == 2 else len(states) == 1
            rounds = len(list((tmp_path / "anchor" / "anchored").glob("round-*.bin")))
            assert rounds == anchor.kept.num_since <= since + 16
            waits = [
                after - before
                for before, after in zip(a.life.times(RoundCommitted), a.life.times(RoundCommitted)[1:], strict=False)
            ]
            assert max(waits) < 1.5

    run(swarm, scenario)
    swarm.check()


def test_an_anchor_that_can_follow_no_more_ends_and_says_why(make: Make, tmp_path: Path) -> None:
    swarm = make(method=DILOCO, num_rounds=6, num_peers=2)

    def broken(_coming: Any) -> None:
        raise PermissionError("its folder was taken away")

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        async with anchored(swarm, tmp_path / "anchor", a, b) as anchor:
            anchor.kept.make_room = broken
            async with asyncio.timeout(60):
                with pytest.raises(PermissionError, match="taken away"):
                    await anchor.task
            assert anchor.events[-1] == PeerStopped(reason="PermissionError")
            await swarm.done(a, b)

    run(swarm, scenario)


@pytest.mark.full
def test_the_run_goes_on_with_a_newcomer_after_every_trainer_was_killed(make: Make, tmp_path: Path) -> None:
    swarm = make(method=DILOCO, num_rounds=12, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        async with anchored(swarm, tmp_path / "anchor", a, b, c) as anchor:
            await swarm.round(a, 4)
            await anchor.reach(4)
            for member in (a, b, c):
                swarm.kill(member)
            await asyncio.sleep(30)
            reached = anchor.head
            knows(swarm, anchor)
            new = swarm.member("new")
            swarm.launch(new)
            opened = await swarm.when(new, BranchOpened)
            assert opened.members == (new.id,)
            assert reached is not None
            await swarm.round(new, opened.round + 1)
            first = next(event for event in new.life.committed if event.branch == opened.branch)
            assert first.committed_tokens > reached.committed_tokens  # it goes on from there, not from the start
            assert opened.round == reached.round + 1
            # The anchor goes over to where the run goes on, and the others come back to it.
            await anchor.reach(opened.round + 2)
            for member in (a, b, c):
                swarm.launch(member)
            await swarm.done(a, b, c, new)
            assert len({member.life.outcome.replica for member in (a, b, c, new)}) == 1

    run(swarm, scenario)


@pytest.mark.parametrize("save_every_s", [pytest.param(0.0, marks=pytest.mark.slow), 3.0])
def test_all_that_were_killed_meet_at_the_newest_round_that_one_has(
    make: Make, tmp_path: Path, save_every_s: float
) -> None:
    swarm = make(method=DILOCO, num_rounds=14, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc", settings=settings(save_every_s))
        async with anchored(swarm, tmp_path / "anchor", a, b, c) as anchor:
            await swarm.round(a, 7)
            await anchor.be_level_with(a, b, c)
            killed_at = swarm.clock.now()
            for member in (a, b, c):
                swarm.kill(member)
            # Without a checkpoint after the run began only the anchor has what was committed.
            await asyncio.sleep(20)
            reached = anchor.head
            assert reached is not None
            knows(swarm, anchor)
            for member in (a, b, c):
                swarm.launch(member)
            await swarm.done(a, b, c)
            nexts = [
                next(event for event in member.life.committed if event.round == reached.round + 1)
                for member in (a, b, c)
            ]
            assert len({event.manifest for event in nexts}) == 1
            assert nexts[0].committed_tokens > reached.committed_tokens
            assert not [event for member in (a, b, c) for event in member.life.seen(BranchOpened)]
            assert {event.branch for event in nexts} == {reached.branch}
            assert len({member.life.outcome.replica for member in (a, b, c)}) == 1
            assert swarm.clock.now() - killed_at < 120

    run(swarm, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("is_one_killed", [False, True], ids=["all live", "one is killed"])
def test_several_donors_deliver_the_state_at_once(make: Make, tmp_path: Path, is_one_killed: bool) -> None:
    swarm = make(method=DILOCO, num_rounds=3, num_peers=3, model=LARGER)
    up_mbit = 8

    async def scenario() -> None:
        a, b, c = await swarm.start("abc", compute=Paced(LONG_S))
        await swarm.round(a, 1)
        lay(a, b, c, up=up_mbit)
        async with anchored(swarm, tmp_path / "anchor", a, b, c) as anchor:
            began = swarm.clock.now()
            if is_one_killed:
                await asyncio.sleep(5.0)
                assert anchor.node.traffic[b.id].received_nbytes > CHUNK_NBYTES
                swarm.kill(b)
            await anchor.reach(1)
            took_s = swarm.clock.now() - began
        joined = next(event for event in anchor.events if isinstance(event, StateJoined))
        assert joined.fetched_nbytes == joined.nbytes
        assert set(joined.donors) >= {a.id, c.id}
        assert is_one_killed or set(joined.donors) == {a.id, b.id, c.id}
        from_one_s = 8 * joined.nbytes / (up_mbit * 1e6)
        assert took_s < (0.75 if is_one_killed else 0.5) * from_one_s

    run(swarm, scenario)


def test_an_anchor_that_crashed_has_what_it_kept(make: Make, tmp_path: Path) -> None:
    swarm = make(method=DILOCO, num_rounds=10, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        anchor = Kept(swarm, tmp_path / "anchor")
        await anchor.start(a, b)
        await swarm.round(a, 5)
        await anchor.reach(5)
        before = anchor.head
        await anchor.crash()
        await anchor.start()  # it knows no address, and still has everything
        assert anchor.head == before
        await anchor.end()
        await swarm.done(a, b)

    run(swarm, scenario)
    swarm.check()


class Beside(Inline):
    """Says whether it computes at the moment: on threads, that is beside the event loop."""

    is_on = False

    async def serve(self, work: Callable[[], Any]) -> Any:
        self.is_on = True
        try:
            return work()
        finally:
            self.is_on = False


def test_an_anchor_writes_beside_its_event_loop(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = make(method=DILOCO, num_rounds=4, num_peers=2)
    root, compute = tmp_path / "anchor", Beside()
    written: dict[str, bool] = {}

    def watch(module: Any) -> None:
        write = module.write_atomically

        def note(path: Path, *args: Any, **options: Any) -> None:
            if path.is_relative_to(root):
                name = str(path.parent.relative_to(root)) if len(path.name) == 64 else path.name
                written[name] = written.get(name, True) and compute.is_on
            write(path, *args, **options)

        monkeypatch.setattr(module, "write_atomically", note)

    async def here(_node: Any, _peers: Any, digest: Any, most: int) -> bytes:
        data = swarm.home.blobs.read(digest, most)  # no member of a swarm serves the tokenizer
        return data if data is not None else await small_from(_node, _peers, digest, most)

    monkeypatch.setattr(anchor_module, "small_from", here)
    watch(home_module)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        anchor = Kept(swarm, root)
        anchor.compute, anchor.home = compute, Home(root / "home")
        anchor.home.shards = swarm.home.shards
        await anchor.start(a, b)
        await swarm.done(a, b)
        await anchor.reach(4)
        await anchor.end()

    run(swarm, scenario)
    rounds = {name for name in written if name.startswith("round-")}
    assert rounds
    assert {"state.bin", "anchored/blobs", "home/blobs", *rounds} == set(written)
    assert all(written.values()), written


def test_a_killed_anchor_is_seen_to_be_gone_and_changes_nothing(make: Make, tmp_path: Path) -> None:
    swarm = make(method=DILOCO, num_rounds=12, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        anchor = Kept(swarm, tmp_path / "anchor")
        await anchor.start(a, b)
        await swarm.round(a, 3)
        await anchor.crash()
        await swarm.when(a, MemberSuspected)
        await swarm.done(a, b)
        assert all(event.left_out == {} for event in a.life.committed)

    run(swarm, scenario)
    swarm.check()
