"""Methods that every member merges for itself: payloads go to all, and results to nobody."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from scenarios.comings import assert_it_came, replace_in_mid_round
from scenarios.swarm import EVERY, Swarm
from scenarios.test_faults import one_replica
from weft.codec import Bf16Config, Fp32Config, Int8Config, TopKConfig
from weft.errors import PeerError
from weft.events import PayloadRejected, RoundCommitted
from weft.ids import Digest, PeerId, Round
from weft.net.node import Node
from weft.sync.choices import Choices, InnerConfig, NesterovConfig, SgdConfig
from weft.sync.machine import MergeDone, MergeFailed
from weft.sync.messages import Collect
from weft.sync.traffic import round_traffic
from weft.wire import digest

MakeSwarm = Callable[..., Swarm]
Fetched = tuple[PeerId, PeerId, Digest, int]  # who fetched of whom which blob, and its bytes

DELTA = Choices(every=EVERY, send="delta", apply=NesterovConfig(), codec=Int8Config(), merged_by="all")
METHODS = {
    "delta": DELTA,
    "gradient": Choices(every=1, send="gradient", apply=InnerConfig(), codec=Bf16Config(), merged_by="all"),
    "sparse": msgspec.structs.replace(
        DELTA, apply=SgdConfig(), codec=TopKConfig(), feedback=0.95, merge="senders_mean", basis="tiles"
    ),
    "streaming": msgspec.structs.replace(DELTA, fragments=2, overlap=1, mix=0.5),
    "async": msgspec.structs.replace(DELTA, wait="ready"),
}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Fetched]:
    """All blobs that anybody fetched."""
    found: list[Fetched] = []
    fetch = Node.fetch

    async def noted(node: Node, peer: PeerId, wanted: Digest, into: Any) -> None:
        await fetch(node, peer, wanted, into)
        found.append((node.peer, peer, wanted, memoryview(into).nbytes))

    monkeypatch.setattr(Node, "fetch", noted)
    return found


def results(swarm: Swarm) -> set[Digest]:
    """Return the digests of all merged parts."""
    return {part.result for manifest in swarm.chains.values() for part in manifest.parts if manifest.contributions}


@pytest.mark.parametrize("name", METHODS)
def test_each_takes_every_payload_once_and_no_result(make_swarm: MakeSwarm, fetched: list[Fetched], name: str) -> None:
    swarm = make_swarm(method=METHODS[name], num_rounds=6)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()
    assert results(swarm)
    assert not results(swarm) & {wanted for _, _, wanted, _ in fetched}
    assert len(fetched) == len(set(fetched))
    if METHODS[name].fragments == 1 and METHODS[name].basis == "flat":
        num_brought = sum(len(manifest.contributions) for manifest in swarm.chains.values())
        expected = round_traffic(METHODS[name], (), swarm.run_config.num_parameters, 4).sent_nbytes
        assert sum(nbytes for *_, nbytes in fetched) == num_brought * expected


@pytest.mark.parametrize("name", METHODS)
def test_one_dies_in_the_middle_of_a_round_and_another_joins(make_swarm: MakeSwarm, name: str) -> None:
    swarm = make_swarm(method=METHODS[name], num_rounds=9)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        e = swarm.member("e")
        replace_in_mid_round(swarm, b, e)
        await swarm.round(a, 4)
        one_replica(await swarm.done(*(each for each in members if each is not b), e))
        assert_it_came(e, a)
        assert not any(each.life.seen(PayloadRejected) for each in (*members, e))

    swarm.run(scenario)
    swarm.check()


def test_it_comes_to_the_same_parameters_as_parts_that_owners_merge(make_swarm: MakeSwarm) -> None:
    found = []
    for merged_by in ("owners", "all"):
        swarm = make_swarm(
            method=msgspec.structs.replace(DELTA, merged_by=merged_by, reply_codec=Fp32Config()), num_rounds=6
        )

        async def scenario(swarm: Swarm = swarm) -> None:
            members = await swarm.start("abc")
            one_replica(await swarm.done(*members))
            found.append(members[0].peer._replica.outer.clone())

        swarm.run(scenario)
    assert torch.equal(*found)


def test_an_owner_that_names_another_mean_is_found_out_by_all(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=DELTA, num_rounds=8)

    async def scenario() -> None:
        *honest, liar = await swarm.start("abcd")
        await swarm.round(liar, 2)
        rounds = liar.peer._rounds
        assert rounds is not None
        merge = rounds.merging.merge

        async def lie(plan: Collect, part: int, here: range, round: Round) -> MergeDone | MergeFailed:
            other = torch.full((len(here),), 0.5).numpy().tobytes()
            await merge(plan, part, here, round)
            await rounds.parts.keep(round, digest(other), other)
            return MergeDone(plan=plan, part=part, result=digest(other))

        rounds.merging.merge = lie  # type: ignore[method-assign]
        one_replica(await swarm.done(*honest))
        for member in honest:
            rejected = member.life.seen(PayloadRejected)
            assert {event.member for event in rejected} == {liar.id}
            assert "not the mean" in rejected[0].reason

    swarm.run(scenario)


def test_what_cannot_be_had_of_its_bringer_comes_from_another(
    make_swarm: MakeSwarm, fetched: list[Fetched], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=DELTA, num_rounds=8)
    fetch = Node.fetch

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")

        async def one_way(node: Node, peer: PeerId, wanted: Digest, into: Any) -> None:
            if (node.peer, peer) == (b.id, a.id):
                raise PeerError("nothing comes through")
            await fetch(node, peer, wanted, into)

        monkeypatch.setattr(Node, "fetch", one_way)
        await swarm.round(b, 2)
        event = await swarm.when(b, RoundCommitted, lambda event: event.round == 5)
        assert event.contributors == tuple(sorted(each.id for each in members))
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()
    assert not results(swarm) & {wanted for _, _, wanted, _ in fetched}
