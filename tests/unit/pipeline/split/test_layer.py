"""A layer by a team over a network is the layer undivided, in every family."""

import pytest
import torch

from unit.pipeline.split.crew import TEAM, Crew, Found, by_heads, by_segments, link, passport, summed
from unit.pipeline.split.layer import FAMILIES, Case, case
from unit.pipeline.split.reference import contiguous, distance
from weft.clock import SystemClock
from weft.net.node import Node
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.pipeline.link import StageLink
from weft.pipeline.split.cut import zigzag
from weft.pipeline.split.exchange import Exchange, Exchanges
from weft.tasks import Threads

CLOSE = 1e-5
SPEEDS = [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, 1.0, 1.0)]


def assert_heads(given: Case, found: list[Found]) -> None:
    for y, dx, _ in found:
        assert torch.equal(y, found[0][0])  # whoever adds finds the same bits
        assert torch.equal(dx, found[0][1])
    assert_layer(given, found[0][0], found[0][1], found)


def assert_segments(given: Case, found: list[Found]) -> None:
    assert_layer(given, sum(each[0] for each in found), sum(each[1] for each in found), found)  # type: ignore[arg-type]


def assert_layer(given: Case, y: torch.Tensor, dx: torch.Tensor, found: list[Found]) -> None:
    assert distance(y, given.y) < CLOSE
    assert distance(dx, given.dx) < CLOSE
    gradients = summed([each for _, _, each in found])
    assert gradients.keys() == given.gradients.keys()
    assert max(distance(each, given.gradients[name]) for name, each in gradients.items()) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_a_team_by_heads_computes_the_layer_and_all_have_the_same_bits(family: str, speeds: tuple[float, ...]) -> None:
    given, crew = case(family), Crew(len(speeds))

    async def play() -> None:
        assert_heads(given, await by_heads(given, crew.exchange, crew.compute, speeds))

    crew.run(play)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
@pytest.mark.parametrize("cut", [zigzag, contiguous])
def test_a_team_by_segments_computes_the_layer(family: str, speeds: tuple[float, ...], cut: type) -> None:
    given, crew = case(family), Crew(len(speeds))

    async def play() -> None:
        segments = cut(given.x.shape[1], speeds)
        assert_segments(given, await by_segments(given, crew.exchange, crew.compute, segments))

    crew.run(play)


def test_eight_peers_are_a_team() -> None:
    given, crew = case("mha"), Crew(8)

    async def play() -> None:
        assert_heads(given, await by_heads(given, crew.exchange, crew.compute, (1.0,) * 8))
        segments = zigzag(given.x.shape[1], (1.0,) * 8)
        assert_segments(given, await by_segments(given, crew.exchange, crew.compute, segments))

    crew.run(play)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_team_over_tls_computes_the_layer(family: str) -> None:
    given, compute, clock = case(family), Threads(), SystemClock()
    nodes = []
    for number in range(2):
        each = passport(number)
        transport = TlsTransport(each.identity, TlsConfig(host="127.0.0.1"))
        nodes.append(Node(each, [transport], clock, lambda _: None))
    exchanges = [Exchanges(StageLink(node)) for node in nodes]
    try:
        addresses = [await node.start() for node in nodes]
        nodes[1].remember(nodes[0].peer, addresses[0])
        nodes[0].remember(nodes[1].peer, addresses[1])
        await link(nodes)
        peers = [node.peer for node in nodes]
        assert_heads(given, await by_heads(given, lambda n: Exchange(exchanges[n], TEAM, peers), compute, (3.0, 1.0)))
        segments = zigzag(given.x.shape[1], (1.0, 2.0))
        assert_segments(
            given, await by_segments(given, lambda n: Exchange(exchanges[n], TEAM, peers), compute, segments)
        )
    finally:
        for node in nodes:
            await node.aclose()
        await compute.aclose()
