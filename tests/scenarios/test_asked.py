"""Members of stages draw text for whoever asks while they train, with weights of one round, whoever dies."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch

from scenarios.companies import SECRET, House, Machine
from scenarios.test_companies import crew, done, play, sealed
from weft.engine.draw import Drawing
from weft.engine.engine import Wanted
from weft.events import RoundCommitted
from weft.inference.sample import Sampling, generate
from weft.keys import Identity
from weft.model.config import num_parameters
from weft.model.flat import assemble, layout
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import SCHEME
from weft.pipeline.link import StageLink
from weft.rng import stream
from weft.run.staged import StagedConfig
from weft.stages.asking import LOOKING
from weft.stages.gather.visit import visiting
from weft.stages.step import serving
from weft.stages.step.serving import Serving, codec_of
from weft.texts.entry import Entry
from weft.texts.member import listen

Copies = dict[tuple[int, int], torch.Tensor]  # of a piece after a round
PROMPT = (3, 1, 4, 1, 5)
NUM = 8


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Serve weights as they are trained, of each second round; return what was served."""
    found: Copies = {}
    settled = Serving.settled

    async def noted(self: Serving, piece: int, round: int, outer: torch.Tensor) -> None:
        found[piece, round] = outer.detach().clone()
        await settled(self, piece, round, outer)

    monkeypatch.setattr(Serving, "settled", noted)
    monkeypatch.setattr(serving, "EVERY", 2)
    monkeypatch.setattr(serving, "kind_for", lambda _device: "fp32")
    return found


@asynccontextmanager
async def asking(house: House, machines: list[Machine]) -> AsyncIterator[Entry]:
    """Be linked to a run as one that only asks."""
    run = house.sealed.config
    assert isinstance(run, StagedConfig)
    identity = Identity.from_seed(hashlib.sha256(b"asker").digest())
    passport = Passport(identity=identity, run=run.run, name="asker", admission=ByTicket(secret=SECRET))
    node = Node(passport, [house.network.transport(identity.peer)], house.clock, lambda _event: None)
    for each in machines:
        node.remember(each.id, [SCHEME + each.id], each.name)
    await node.start()
    link = StageLink(node)
    listen(link)
    entry = Entry(
        link,
        num_stages=run.stages,
        vocab_size=run.model.vocab_size,
        context=run.model.max_seq_len,
        row_nbytes=codec_of(run).nbytes(run.model.width),
        clock=house.clock,
        emit=lambda _event: None,
    )
    try:
        async with visiting(node, run, house.clock, LOOKING), aclosing(entry):
            yield entry
    finally:
        await node.aclose()


def of_whole(run: StagedConfig, copies: Copies, round: int) -> list[int]:
    """Return the text that the whole model of a round gives."""
    vector = torch.empty(num_parameters(run.model))
    at = {span.name: span for span in layout(run.model)}
    for piece in range(run.num_pieces):
        for span in layout(run.model, run.pieces[piece]):
            vector[at[span.name].offset : at[span.name].stop] = copies[piece, round][span.offset : span.stop]
    sampling = Sampling(max_new_tokens=NUM, temperature=0.0)
    return list(generate(assemble(run.model, vector), list(PROMPT), sampling, stream(0, "unused")))


@pytest.mark.full
@pytest.mark.parametrize("is_tied", [False, True])
def test_text_is_of_one_round_while_training_goes_on_and_somebody_dies(
    tmp_path: Path, copies: Copies, is_tied: bool
) -> None:
    run = sealed(tmp_path, num_steps=40, is_tied=is_tied)
    assert isinstance(run.config, StagedConfig)
    config = run.config
    found: list[tuple[int, list[int]]] = []

    async def work(house: House) -> None:
        machines = crew(house, 6)
        async with asking(house, machines) as entry:
            while entry.paths.empty:  # noqa: ASYNC110  # told every two seconds
                await asyncio.sleep(0.1)
            for number in range(3):
                text = entry.begin(Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
                tokens = [(await anext(text)).token]
                (under,) = entry._under_way.values()
                assert under._reserved is not None
                round = under._reserved.round
                if number == 1:
                    next(each for each in machines if each.id == under.peers[1]).kill()
                tokens += [drawn.token async for drawn in text]
                assert text.ended == "length"
                found.append((round, tokens))
                await asyncio.sleep(2)
        await done(machines)
        assert max(len(each.seen(RoundCommitted)) for each in machines) >= 20

    play(run, tmp_path, work, train_s=0.05, serve_nbytes=1 << 20)
    assert len({round for round, _ in found}) > 1
    for round, tokens in found:
        assert tokens == of_whole(config, copies, round)


@pytest.mark.full
def test_who_gives_nothing_to_texts_is_never_asked(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        machines = crew(house, 3)
        async with asking(house, machines) as entry:
            await asyncio.sleep(5)
            assert entry.paths.empty == [0, 1, 2]
        await done(machines)

    play(sealed(tmp_path), tmp_path, work)
