"""Methods that every member merges for itself: payloads go to all, and results to nobody."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from scenarios.comings import assert_it_came, replace_in_mid_round
from scenarios.conftest import Fetched
from scenarios.swarm import EVERY, Life, Member, Swarm
from scenarios.test_faults import one_replica
from weft.codec.config import Bf16Config, Fp32Config, Int8Config, RandomKConfig, TopKConfig
from weft.errors import PeerError
from weft.events import PayloadRejected, RoundCommitted
from weft.ids import Digest, PeerId, Round
from weft.net.node import Node
from weft.peer.round.inbox import Heard
from weft.sync.costs import round_traffic
from weft.sync.merge.reduce import EncodedPart, named
from weft.sync.method.choices import Choices, InnerConfig, NesterovConfig, SgdConfig
from weft.sync.records.messages import Certificate, Collect, Holding, Manifest, Merged
from weft.sync.round.machine import MergeDone, MergeFailed, Received, is_leading, results_of
from weft.wire import Buffer, digest

MakeSwarm = Callable[..., Swarm]

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


def results(swarm: Swarm) -> set[Digest]:
    """Return the digests of all merged parts."""
    return {part.result for manifest in swarm.chains.values() for part in manifest.parts if manifest.contributions}


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["streaming", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "streaming")]
)
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
            found.append(members[0].peer.replica.outer.clone())

        swarm.run(scenario)
    assert torch.equal(*found)


def lie_about(swarm: Swarm, liar: Member, *, as_leader: bool = False) -> set[Digest]:
    """Let a member name and serve another result than it merged, always or where it leads; return what it names."""
    rounds = liar.peer.rounds
    assert rounds is not None
    merge, lies = rounds.merger.merge, set[Digest]()

    async def lie(plan: Collect, part: int, here: range, round: Round) -> MergeDone | MergeFailed:
        if as_leader and (rounds._state is None or not is_leading(rounds._state)):
            return await merge(plan, part, here, round)
        other = torch.full((len(here),), 0.5).numpy().tobytes()
        lies.add(digest(other))
        await rounds.parts.keep(round, digest(other), other)
        return MergeDone(plan=plan, part=part, result=digest(other))

    rounds.merger.merge = lie  # type: ignore[method-assign]
    return lies


def accused(members: Sequence[Member]) -> set[PeerId]:
    return {event.member for member in members for event in member.life.seen(PayloadRejected)}


@pytest.mark.full
@pytest.mark.parametrize("spoils", [False, True], ids=["of payloads", "of what is no payload"])
def test_an_owner_that_names_another_mean_is_found_out_by_all(make_swarm: MakeSwarm, spoils: bool) -> None:
    """Also one that lets nobody find its mean, by what it brings itself to the part that it owns."""
    swarm = make_swarm(method=msgspec.structs.replace(DELTA, codec=Fp32Config()), num_rounds=8)

    async def scenario() -> None:
        *honest, liar = await swarm.start("abcd")
        await swarm.round(liar, 2)
        lies, parts = lie_about(swarm, liar), liar.peer.rounds.parts  # type: ignore[union-attr]
        offer = parts.offer

        def spoilt(payload: Sequence[EncodedPart]) -> tuple[Digest, ...]:
            mine = swarm_index(liar)
            nothing = named(b"\xff" * len(payload[mine].encoded))  # no number
            return offer([nothing if part == mine else each for part, each in enumerate(payload)])

        if spoils:
            parts.offer = spoilt  # type: ignore[method-assign]
        one_replica(await swarm.done(*honest))
        assert lies
        assert not lies & results(swarm)
        for member in honest:
            assert accused([member]) == {liar.id}

    swarm.run(scenario)


def swarm_index(member: Member) -> int:
    """Return which part a member owns."""
    base = member.peer.rounds.chain.base  # type: ignore[union-attr]
    return base.electorate.index(member.id)


@pytest.mark.full
def test_who_hears_of_means_only_as_their_round_is_decided_accuses_nobody(make_swarm: MakeSwarm) -> None:
    """They are of what the round counted, as that round encodes it, not of what the next one brings."""
    method = msgspec.structs.replace(DELTA, codec=RandomKConfig(values="fp32"), feedback=1.0)
    swarm = make_swarm(method=method, num_rounds=8)
    num_late = 0

    async def scenario() -> None:
        _, b, *_ = members = await swarm.start("abcd")
        await swarm.round(b, 2)
        rounds = b.peer.rounds
        assert rounds is not None
        inbox, hear, decide, results = rounds.inbox, rounds.inbox._hear, rounds._decide, rounds.parts.results
        held: list[Heard] = []

        def hold(heard: Heard) -> None:
            if isinstance(heard.message, Merged) and heard.sender != b.id:
                held.append(heard)
            else:
                hear(heard)

        def decided(certificate: Certificate) -> None:
            nonlocal num_late
            num_late += len(held)
            while held:
                hear(held.pop(0))
            decide(certificate)

        async def slowly(manifest: Manifest) -> tuple[Buffer, ...]:
            await asyncio.sleep(0.1)
            return await results(manifest)

        async def never(*_: object) -> bool:
            return False

        inbox._hear, rounds._decide = hold, decided  # type: ignore[method-assign]
        rounds.parts.results = slowly  # type: ignore[method-assign]
        rounds._validity.weigh = never  # type: ignore[method-assign]  # nor of what is proposed
        await swarm.round(b, 5)
        inbox._hear = hear  # type: ignore[method-assign]
        one_replica(await swarm.done(*members))
        assert num_late
        assert not accused(members)

    swarm.run(scenario)
    swarm.check()


def test_a_leader_that_lets_nobody_hear_what_it_names_gets_no_vote_for_it(make_swarm: MakeSwarm) -> None:
    """It keeps what it merged to itself until it proposes, and pretends that the others hold it."""
    swarm = make_swarm(method=DELTA, num_rounds=10)

    def silently(life: Life, _to: PeerId, message: object) -> bool:
        state = life.peer.rounds._state if life.peer.rounds else None
        return not (life.member.name == "d" and isinstance(message, Merged) and state is not None and is_leading(state))

    async def scenario() -> None:
        *honest, liar = await swarm.start("abcd")
        await swarm.round(liar, 2)
        swarm.watchers.append(silently)
        rounds, lies = liar.peer.rounds, lie_about(swarm, liar, as_leader=True)
        assert rounds is not None

        async def pretend() -> None:
            while True:
                await asyncio.sleep(0.05)
                state = rounds._state
                if state is None or state.plan is None or state.proposal is not None or not is_leading(state):
                    continue
                if len(state.results) == state.base.num_parts == len(state.held):
                    plan = state.plan
                    held = Holding(attempt=plan.attempt, revision=plan.revision, results=results_of(state))
                    for member in honest:
                        if rounds._state is not None and rounds._state.proposal is None:
                            rounds._member.feed(Received(sender=member.id, message=held))

        pretending = asyncio.ensure_future(pretend())
        await swarm.round(honest[0], 8)
        pretending.cancel()
        assert lies
        assert not lies & results(swarm)
        assert accused(honest) == {liar.id}

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
