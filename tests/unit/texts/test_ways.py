"""The ways that a text's tokens may go between who asks and the stages: how many trips each takes, and who outlives a
member."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from itertools import pairwise

import pytest
from benchmarks._text_star import Chain, Client, Star

from unit.engine.test_step import CONFIG, text_of
from unit.texts.stages import RUN, STEP_S, Served, of_the_whole, wanted
from weft.engine.draw import Drawn
from weft.errors import CallFailed
from weft.ids import PeerId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.pipeline.link import StageLink
from weft.texts import outbox
from weft.texts.member import listen

TRIP_S = 0.005
PROMPT = text_of(20, 1)


async def client_of(served: Served, kind: type[Client], **options: bool) -> Client:
    """Return one more that asks, on a node of its own that is linked to all."""
    identity = Identity.from_seed(bytes([200]) * 32)
    passport = Passport(identity=identity, run=RUN, name="client", admission=Anyone())
    node = Node(passport, [served.network.transport(identity.peer)], served.clock, lambda _event: None, offload=inline)
    link = StageLink(node)
    listen(link)
    client = kind(link, num_stages=len(served.sizes), row_nbytes=served.codec.nbytes(CONFIG.width), **options)
    await node.start()
    for other in served.nodes:
        node.remember(other, [f"memory://{other}"])
        await node.connect(other)
    served.nodes[node.peer] = node
    return client


async def drawn_at(served: Served, text: AsyncIterator[Drawn]) -> tuple[list[int], list[float]]:
    """Return a text's tokens, and the times between them."""
    tokens, at = list[int](), list[float]()
    async for drawn in text:
        tokens.append(drawn.token)
        at.append(served.clock.now())
    return tokens, [b - a for a, b in pairwise(at)]


def test_a_ring_takes_a_trip_for_each_stage_a_chain_one_more_and_a_star_two_for_each() -> None:
    asked = wanted(PROMPT, 6)
    (expected,) = of_the_whole(asked)
    found = dict[str, list[float]]()
    served = Served((1, 1, 1), has_guesses=False)

    async def ring() -> None:
        tokens, found["ring"] = await drawn_at(served, served.entry.begin(asked))
        assert tokens == expected

    served.run(ring)
    for kind in (Chain, Star):
        served = Served((1, 1, 1), has_guesses=False)

        async def other(served: Served = served, kind: type[Client] = kind) -> None:
            client = await client_of(served, kind)
            tokens, found[kind.__name__] = await drawn_at(served, client.begin(asked))
            assert tokens == expected

        served.run(other)
    for name, num_trips in (("ring", 3), ("Chain", 4), ("Star", 6)):
        assert found[name] == pytest.approx([num_trips * TRIP_S + 3 * STEP_S] * 5, abs=1e-4)


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_star_outlives_a_member_where_its_session_begins_where_the_text_is(is_mended: bool) -> None:
    asked = wanted(PROMPT, 12)
    (expected,) = of_the_whole(asked)
    served = Served((1, 2, 1), has_guesses=False)

    async def play() -> None:
        client = await client_of(served, Star, is_mended=is_mended)
        text = client.begin(asked)
        found = [(await anext(text)).token for _ in range(5)]
        (under,) = client._texts.values()
        dying: PeerId = under.sessions[1].peer
        served.kill_peer(dying)
        fails = pytest.raises(CallFailed, match="a session at 0 is asked for 24: AssertionError")
        with nullcontext() if is_mended else fails:
            found += [drawn.token async for drawn in text]
        assert found == (expected if is_mended else expected[:5])
        await asyncio.sleep(0.1)
        assert sum(each.num_texts for each in served.members if served.peer(each) != dying) == 0

    served.run(play)


def test_a_star_fetches_what_is_too_long_for_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_INLINE_NBYTES", 1 << 10)
    asked = wanted(PROMPT, 3)
    (expected,) = of_the_whole(asked)
    served = Served((1, 1, 1), has_guesses=False)

    async def play() -> None:
        client = await client_of(served, Star)
        assert (await drawn_at(served, client.begin(asked)))[0] == expected

    served.run(play)
