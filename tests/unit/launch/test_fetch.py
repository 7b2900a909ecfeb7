"""Shards from several members at once, of which one goes away or holds little."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from unit.peer import tiny
from weft.clock import SystemClock
from weft.data.store import DataIndex, ShardInfo
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError, PeerError
from weft.events import DataReady, Event
from weft.ids import Digest, PeerId, RunId
from weft.keys import Identity
from weft.launch.fetch import fetch_files, read_came_with
from weft.model.came_with import CameWith
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import SCHEME, MemoryNetwork
from weft.run.outline import data_ready
from weft.store.home import Home
from weft.wire import Buffer, digest, encode

NUM_SHARDS = 24
SHARDS = {digest(data): data for data in (np.full(50_000, n, dtype="<u2").tobytes() for n in range(NUM_SHARDS))}
INDEX = DataIndex(
    dtype="uint16",
    train=tuple(ShardInfo(digest=name, num_tokens=50_000, nbytes=100_000) for name in SHARDS),
    heldout=(),
    train_text_nbytes=1,
    heldout_text_nbytes=0,
    tokenizer=ByteTokenizer().digest,
    vocab_size=257,
)


class Members:
    """Holders of the data, and somebody who has none of it."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.served: dict[PeerId, list[Digest]] = {}
        self.on_served: Callable[[int], None] = lambda num: None
        self.holders: list[PeerId] = []
        self.blobs = {INDEX.tokenizer: ByteTokenizer().to_bytes()}
        self.newcomer: Node = None  # type: ignore[assignment]

    @asynccontextmanager
    async def meet(self, held: list[set[Digest]]) -> AsyncIterator["Members"]:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(self._node()) for _ in range(len(held) + 1)]
            *holders, self.newcomer = nodes
            for node, names in zip(holders, held, strict=True):
                node.serve_blobs(self._shelf(node.peer, names), is_patient=True)
                self.newcomer.remember(node.peer, [SCHEME + node.peer])
                await self.newcomer.connect(node.peer)
                self.holders.append(node.peer)
            yield self

    def _node(self) -> Node:
        identity = Identity.generate()
        passport = Passport(
            identity=identity, run=RunId("cc" * 32), name="a", admission=ByTicket(secret=bytes(16)), instance=bytes(8)
        )
        return Node(passport, [self.network.transport(identity.peer)], SystemClock(), lambda event: None)

    def _shelf(self, peer: PeerId, names: set[Digest]) -> "Callable[[PeerId, Digest], Buffer | None]":
        def lookup(_peer: PeerId, wanted: Digest) -> Buffer | None:
            if wanted in self.blobs:
                return self.blobs[wanted]
            if wanted not in names:
                return None
            self.served.setdefault(peer, []).append(wanted)
            self.on_served(sum(map(len, self.served.values())))
            return SHARDS[wanted]

        return lookup


@pytest.fixture
def members() -> Members:
    return Members(MemoryNetwork())


async def fetch(members: Members, folder: Path) -> list[Event]:
    events: list[Event] = []
    run = msgspec.structs.replace(tiny.run_config(), data=INDEX)
    await fetch_files(members.newcomer, members.holders, run, Home(folder), SystemClock(), events.append)
    return events


async def test_shards_come_from_all_members_and_none_twice(members: Members, tmp_path: Path) -> None:
    async with members.meet([set(SHARDS), set(SHARDS)]):
        events = await fetch(members, tmp_path)
    served = [name for names in members.served.values() for name in names]
    assert sorted(served) == sorted(SHARDS)
    assert len(members.served) == 2
    assert [event.fetched_nbytes for event in events if isinstance(event, DataReady)] == [NUM_SHARDS * 100_000]
    assert Home(tmp_path).shards.missing(INDEX) == ()


def test_a_shard_that_is_named_twice_is_one() -> None:
    twice = msgspec.structs.replace(INDEX, heldout=INDEX.train[:2])
    ready = data_ready(twice, fetched_nbytes=7)
    assert (ready.num_shards, ready.fetched_nbytes) == (NUM_SHARDS, 7)
    assert (ready.train_tokens, ready.heldout_tokens) == (NUM_SHARDS * 50_000, 100_000)


async def test_a_member_that_dies_costs_the_shards_under_way(members: Members, tmp_path: Path) -> None:
    async with members.meet([set(SHARDS), set(SHARDS)]):
        members.on_served = lambda num: members.network.kill(members.holders[0]) if num == 8 else None
        await fetch(members, tmp_path)
    assert Home(tmp_path).shards.missing(INDEX) == ()
    assert sum(map(len, members.served.values())) <= NUM_SHARDS + 2


@pytest.mark.parametrize("knows_by", ["link", "address"])
async def test_who_let_a_newcomer_in_may_be_gone_a_moment_later(
    members: Members, tmp_path: Path, knows_by: str
) -> None:
    async with members.meet([set(SHARDS), set(SHARDS)]):
        first, other = members.holders
        members.holders = [first]  # whom it asks; the other one it has heard of since
        if knows_by == "address":
            members.newcomer.drop(other, "a test")
        members.network.kill(first)
        await fetch(members, tmp_path)
    assert Home(tmp_path).shards.missing(INDEX) == ()


async def test_what_one_member_lacks_another_has(members: Members, tmp_path: Path) -> None:
    first = set(list(SHARDS)[:2])
    async with members.meet([set(SHARDS) - first, set(SHARDS) - set(list(SHARDS)[2:4])]):
        await fetch(members, tmp_path)
    assert Home(tmp_path).shards.missing(INDEX) == ()


async def test_what_has_come_stays_where_nobody_delivers_the_rest(members: Members, tmp_path: Path) -> None:
    some = set(list(SHARDS)[:20])
    async with members.meet([some]):
        with pytest.raises(PeerError, match="nobody is left"):
            await fetch(members, tmp_path)
    assert {info.digest for info in Home(tmp_path).shards.missing(INDEX)} == set(SHARDS) - some


async def test_what_came_with_the_model_comes_too(members: Members, tmp_path: Path) -> None:
    blob = encode(CameWith(files={"LICENSE": b"warp"}))
    run = msgspec.structs.replace(tiny.run_config(), data=INDEX, came_with=digest(blob))
    members.blobs[digest(blob)] = blob
    async with members.meet([set(SHARDS)]):
        await fetch_files(members.newcomer, members.holders, run, Home(tmp_path), SystemClock(), lambda event: None)
    assert read_came_with(run, Home(tmp_path)) == blob


async def test_a_run_with_which_code_came_is_refused(members: Members, tmp_path: Path) -> None:
    blob = encode(CameWith(files={"LICENSE": b"warp"})).replace(b"LICENSE", b"code.py")
    run = msgspec.structs.replace(tiny.run_config(), data=INDEX, came_with=digest(blob))
    members.blobs[digest(blob)] = blob
    async with members.meet([set(SHARDS)]):
        with pytest.raises(ConfigError, match=r"cannot be joined.*'code.py' is not one of the files.*Tell its maker"):
            await fetch_files(members.newcomer, members.holders, run, Home(tmp_path), SystemClock(), lambda event: None)
    assert Home(tmp_path).blobs.open(digest(blob)) is None
