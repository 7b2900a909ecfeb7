"""Members of stages draw text for whoever asks while they train, with weights of one round, whoever dies."""

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch

from scenarios.askers import asker, begun, round_of, until_drawn
from scenarios.companies import House, Machine
from scenarios.test_companies import crew, done, play, sealed, whole
from weft.engine.draw import Drawing, Drawn
from weft.engine.step import Weights
from weft.engine.text import Wanted
from weft.events import RoundCommitted
from weft.inference.sample import Sampling, generate
from weft.model.config import num_parameters
from weft.model.flat import assemble, layout
from weft.model.transformer import Transformer
from weft.rng import stream
from weft.run.staged import StagedConfig
from weft.stages.holdings import MOVES
from weft.texts import section
from weft.texts.asking.entry import Entry
from weft.texts.asking.no_path import NoPath
from weft.texts.beside import serving, versions
from weft.texts.beside.serving import Serving

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
    monkeypatch.setattr(versions, "APART_S", 0.0)
    monkeypatch.setattr(versions, "SOON_S", 0.0)
    monkeypatch.setattr(section, "kind_for", lambda _device: "fp32")
    return found


def asking(house: House, machines: list[Machine]) -> AbstractAsyncContextManager[Entry]:
    return asker(house.network, house.clock, house.sealed.config, [(each.id, each.name) for each in machines])


def whole_of(run: StagedConfig, copies: Copies, round: int) -> Transformer:
    """Return the whole model of a round."""
    vector = torch.empty(num_parameters(run.model))
    at = {span.name: span for span in layout(run.model)}
    for piece in range(run.num_pieces):
        for span in layout(run.model, run.pieces[piece]):
            vector[at[span.name].offset : at[span.name].stop] = copies[piece, round][span.offset : span.stop]
    return assemble(run.model, vector)


def of_whole(run: StagedConfig, copies: Copies, round: int) -> list[int]:
    """Return the text that the whole model of a round gives."""
    sampling = Sampling(max_new_tokens=NUM, temperature=0.0)
    return list(generate(whole_of(run, copies, round), list(PROMPT), sampling, stream(0, "unused")))


@pytest.mark.full
@pytest.mark.parametrize("is_tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_text_is_of_one_round_while_training_goes_on_and_somebody_dies(
    tmp_path: Path, copies: Copies, is_tied: bool
) -> None:
    run = sealed(tmp_path, num_steps=18, is_tied=is_tied)
    assert isinstance(run.config, StagedConfig)
    config = run.config
    found: list[tuple[int, list[int]]] = []

    async def work(house: House) -> None:
        machines = crew(house, 6)
        async with asking(house, machines) as entry:
            await until_drawn(entry)
            for number in range(3):
                text, tokens, round = await begun(entry, Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
                if number == 1:
                    (under,) = entry._under_way.values()
                    next(each for each in machines if each.id == under.peers[1]).kill()
                tokens += [drawn.token async for drawn in text]
                assert text.ended == "length"
                found.append((round, tokens))
                await asyncio.sleep(2)
        await done(machines)
        assert max(len(each.seen(RoundCommitted)) for each in machines) >= 12

    play(run, tmp_path, work, train_s=0.05, serve_nbytes=1 << 20)
    assert len({round for round, _ in found}) > 1
    for round, tokens in found:
        assert tokens == of_whole(config, copies, round)


class Counted(Weights):
    """Counts those of one section that are there at a time."""

    there: ClassVar[WeakSet["Counted"]] = WeakSet()
    most: ClassVar[int] = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.there.add(self)
        alike = [each for each in self.there if each.section == self.section]
        Counted.most = max(Counted.most, len(alike))


@pytest.mark.slow
def test_over_twenty_swaps_logits_are_those_of_one_rounds_model_and_two_versions_are_held(
    tmp_path: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sealed(tmp_path, num_steps=120)
    assert isinstance(run.config, StagedConfig)
    found: dict[int, Drawn] = {}
    Counted.most = 0
    monkeypatch.setattr(serving, "Weights", Counted)

    async def work(house: House) -> None:
        machines = crew(house, 3)
        async with asking(house, machines) as entry:
            while len(found) < 20:
                if entry.paths.empty:
                    await asyncio.sleep(0.1)
                    continue
                text = entry.begin(Wanted("key", PROMPT, 2, Drawing(temperature=0.0, num_likeliest=20)))
                drawn = await anext(text)
                round = round_of(entry)
                found.setdefault(round, drawn)
                assert len([each async for each in text]) == 1
                await asyncio.sleep(0.05)
        for machine in machines:
            machine.kill()  # enough was seen

    play(run, tmp_path, work, train_s=0.05, serve_nbytes=1 << 20)
    assert Counted.most == 2  # one machine has each section
    assert sorted(found) == list(found)
    for round, drawn in found.items():
        with torch.no_grad():
            logits = whole_of(run.config, copies, round)(torch.tensor([PROMPT]))[0, -1]
        expected = torch.log_softmax(logits.double(), -1)
        assert drawn.token == int(expected.argmax())
        for token, logprob in drawn.likeliest:
            assert logprob == pytest.approx(float(expected[token]), abs=1e-5)


@pytest.mark.full
def test_rounds_with_texts_beside_are_those_without_to_the_bit(tmp_path: Path, copies: Copies) -> None:
    found = []
    num_texts = 0
    for nbytes in (0, 1 << 20):
        root = tmp_path / str(nbytes)
        root.mkdir()
        run = sealed(root, num_steps=10)

        async def work(house: House, nbytes: int = nbytes) -> None:
            nonlocal num_texts
            machines = crew(house, 3)
            async with asking(house, machines) as entry:
                while nbytes and not machines[0].task.done():
                    await asyncio.sleep(0.5)
                    if not entry.paths.empty:
                        text = entry.begin(Wanted("key", PROMPT, NUM, Drawing(temperature=0.8)))
                        with suppress(NoPath):  # the run has ended
                            num_texts += len([drawn async for drawn in text]) == NUM
            await done(machines)

        house = play(run, root, work, train_s=0.05, serve_nbytes=nbytes)
        committed = [len(each.seen(RoundCommitted)) for each in house.machines]
        found.append((committed, whole(house.machines, run)))
    assert num_texts >= 5
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.full
@pytest.mark.parametrize(
    "how", ["moves", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pauses", "leaves"))]
)
def test_a_text_and_training_go_on_where_a_member_of_its_path_pauses_leaves_or_moves(
    tmp_path: Path, copies: Copies, how: str
) -> None:
    run = sealed(tmp_path, num_steps=18)
    assert isinstance(run.config, StagedConfig)
    found: list[tuple[int, list[int]]] = []

    async def work(house: House) -> None:
        machines = crew(house, 6)
        async with asking(house, machines) as entry:
            await until_drawn(entry)
            text, tokens, round = await begun(entry, Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
            (under,) = entry._under_way.values()
            company = next(each for each in machines if each.id == under.peers[1]).company
            match how:
                case "pauses":
                    company.pausing.want("on request")
                case "leaves":
                    company.stop("has to go")
                case _:
                    company.members[1].stop(MOVES)
                    company.holdings.hold(2, "it is needed there")
            tokens += [drawn.token async for drawn in text]
            assert text.ended == "length"
            found.append((round, tokens))
            await asyncio.sleep(5)
            company.pausing.want_no_more("on request")
        await done(machines)
        assert max(len(each.seen(RoundCommitted)) for each in machines) >= 14

    play(run, tmp_path, work, train_s=0.05, serve_nbytes=1 << 20)
    ((round, tokens),) = found
    assert tokens == of_whole(run.config, copies, round)


@pytest.mark.full
def test_who_gives_nothing_to_texts_is_never_asked(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        machines = crew(house, 3)
        async with asking(house, machines) as entry:
            await asyncio.sleep(5)
            assert entry.paths.empty == [0, 1, 2]
        await done(machines)

    play(sealed(tmp_path), tmp_path, work)
