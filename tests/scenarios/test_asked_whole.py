"""Members of a run without stages draw text for whoever asks, each with the whole model, and train as they would."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

import msgspec
import pytest
import torch

from scenarios.askers import asker, begun, round_of, until_drawn
from scenarios.swarm import BATCH, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.chat.grammar import Forms, FormWanted
from weft.chat.vocabulary import Vocabulary
from weft.engine.draw import Drawing
from weft.engine.text import Wanted
from weft.events import Notice
from weft.ids import BranchId
from weft.inference.sample import Sampling, generate
from weft.model.flat import assemble
from weft.rng import stream
from weft.run.machine import PeerConfig
from weft.sim.world import Member
from weft.sync.method.presets import DPsgdConfig
from weft.tasks import Inline
from weft.texts import section
from weft.texts.asking.entry import Entry
from weft.texts.asking.no_path import NoPath
from weft.texts.beside import share, versions
from weft.texts.beside.serving import Serving
from weft.texts.beside.share import Beside
from weft.texts.member import Member as TextMember
from weft.texts.section import Section

PROMPT = (3, 1, 4, 1, 5)
NUM = 8
STEP_S = 0.2  # of a text
DRAWS = PeerConfig(device="cpu", micro_batch=BATCH, serve_nbytes=1 << 20)
Copies = dict[int, torch.Tensor]  # of the model after a round


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Serve weights as they are trained, in steps that take a moment; return what was offered."""
    found: Copies = {}
    settled = Serving.settled

    async def noted(self: Serving, piece: int, round: int, outer: torch.Tensor) -> None:
        found[round] = outer.detach().clone()
        await settled(self, piece, round, outer)

    monkeypatch.setattr(Serving, "settled", noted)
    monkeypatch.setattr(versions, "APART_S", 0.0)
    monkeypatch.setattr(versions, "SOON_S", 0.0)
    monkeypatch.setattr(section, "kind_for", lambda _device: "fp32")
    monkeypatch.setattr(share, "Inline", partial(Inline, STEP_S))
    return found


def asking(swarm: Swarm, members: list[Member]) -> AbstractAsyncContextManager[Entry]:
    return asker(swarm.network, swarm.clock, swarm.run_config, [(each.id, each.name) for each in members])


def of_model(swarm: Swarm, vector: torch.Tensor) -> list[int]:
    model = assemble(swarm.run_config.model, vector.clone())
    return list(generate(model, list(PROMPT), Sampling(max_new_tokens=NUM, temperature=0.0), stream(0, "unused")))


@pytest.mark.full
def test_a_text_is_of_one_rounds_model_and_goes_on_though_who_draws_it_is_killed(
    make_swarm: MakeSwarm, copies: Copies
) -> None:
    swarm = make_swarm(num_rounds=20, num_peers=3, learns=True)
    found: list[tuple[int, list[int]]] = []

    async def scenario() -> None:
        members = await swarm.start("abc", settings=DRAWS)
        async with asking(swarm, members) as entry:
            await until_drawn(entry)
            for number in range(3):
                text, tokens, round = await begun(entry, Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
                if number == 1:
                    (under,) = entry._under_way.values()
                    swarm.kill(next(each for each in members if each.id == under.peers[0]))
                tokens += [drawn.token async for drawn in text]
                assert text.ended == "length"
                found.append((round, tokens))
                await asyncio.sleep(2)
        alive = [each for each in members if each.life.is_running]
        assert len(alive) == 2
        one_replica(await swarm.done(*alive))

    swarm.run(scenario)
    swarm.check()
    assert len({round for round, _ in found}) > 1
    for round, tokens in found:
        assert tokens == of_model(swarm, copies[round])


@pytest.mark.full
def test_an_answer_of_a_form_is_of_that_form_though_who_draws_it_is_killed(
    make_swarm: MakeSwarm, copies: Copies
) -> None:
    swarm = make_swarm(num_rounds=20, num_peers=3, learns=True)
    vocabulary = Vocabulary(swarm.sealed.tokenizer)
    form = Forms(vocabulary, swarm.run_config.model.vocab_size).made(FormWanted(schema={"enum": ["red", "green"]}))
    answers = list[str]()

    async def scenario() -> None:
        members = await swarm.start("abc", settings=DRAWS)
        async with asking(swarm, members) as entry:
            await until_drawn(entry)
            for number in range(2):
                text, tokens, _ = await begun(entry, Wanted("key", PROMPT, NUM, constraint=form.copy()))
                if number == 1:
                    (under,) = entry._under_way.values()
                    swarm.kill(next(each for each in members if each.id == under.peers[0]))
                tokens += [drawn.token async for drawn in text]
                assert text.ended == "stop"
                answers.append(b"".join(map(vocabulary.piece, tokens)).decode())
        one_replica(await swarm.done(*(each for each in members if each.life.is_running)))

    swarm.run(scenario)
    swarm.check()
    assert {json.loads(answer) for answer in answers} <= {"red", "green"}


@pytest.mark.full
def test_new_weights_keep_a_text_waiting_for_no_more_than_a_step(
    make_swarm: MakeSwarm, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(num_rounds=200, num_peers=1)
    gaps, swaps, rounds = list[tuple[float, float]](), list[float](), set[int]()
    renew = TextMember.renew

    def noted(self: TextMember, round: int, section: Section) -> None:
        swaps.append(swarm.clock.now())
        renew(self, round, section)

    monkeypatch.setattr(TextMember, "renew", noted)

    async def scenario() -> None:
        (a,) = await swarm.start("a", settings=msgspec.structs.replace(DRAWS, serve_share=1.0))
        async with asking(swarm, [a]) as entry:
            await until_drawn(entry)
            while len(swaps) < 20:
                text = entry.begin(Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
                await anext(text)
                rounds.add(round_of(entry))
                at = swarm.clock.now()
                async for _ in text:
                    gaps.append((at, swarm.clock.now()))
                    at = swarm.clock.now()
        swarm.kill(a)

    swarm.run(scenario)
    beside = [end - begin for begin, end in gaps if any(begin <= at <= end for at in swaps)]
    assert len(beside) >= 5
    assert len(rounds) >= 5
    assert max(beside) <= 2 * STEP_S + 0.05


@pytest.mark.full
def test_rounds_with_texts_beside_are_those_without_to_the_bit(make_swarm: MakeSwarm, copies: Copies) -> None:
    found, num_texts = [], 0
    for settings in (PeerConfig(device="cpu", micro_batch=BATCH), DRAWS):
        swarm = make_swarm(num_rounds=20, num_peers=2, learns=True)

        async def scenario(settings: PeerConfig = settings, swarm: Swarm = swarm) -> None:
            nonlocal num_texts
            a, b = await swarm.start("ab", settings=settings)
            async with asking(swarm, [a, b]) as entry:
                while settings.serve_nbytes and not a.life.task.done():
                    await asyncio.sleep(0.5)
                    if not entry.paths.empty:
                        text = entry.begin(Wanted("key", PROMPT, NUM, Drawing(temperature=0.8)))
                        with suppress(NoPath):  # the run has ended
                            num_texts += len([drawn async for drawn in text]) == NUM
            outcomes = await swarm.done(a, b)
            one_replica(outcomes)
            found.append(outcomes[0].replica)

        swarm.run(scenario)
    assert num_texts >= 5
    assert found[0] == found[1]


@pytest.mark.full
def test_a_member_that_comes_back_draws_at_once_with_what_it_kept(make_swarm: MakeSwarm, copies: Copies) -> None:
    swarm = make_swarm(num_rounds=400, num_peers=1)
    saving = PeerConfig(device="cpu", micro_batch=BATCH, serve_nbytes=1 << 20, checkpoint_every_s=1e-3)

    async def scenario() -> None:
        (a,) = await swarm.start("a", settings=saving)
        await swarm.round(a, 5)
        swarm.kill(a)
        back = swarm.launch(a, settings=saving, train_s=60.0)  # of what warms up, and of each round
        async with asking(swarm, [a]) as entry:
            await until_drawn(entry)
            text, tokens, round = await begun(entry, Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
            tokens += [drawn.token async for drawn in text]
        assert back.committed == []
        assert round >= 4
        assert tokens == of_model(swarm, copies[round])
        swarm.kill(a)

    swarm.run(scenario)


@pytest.mark.full
def test_of_weights_that_have_learnt_nothing_no_text_is_drawn(make_swarm: MakeSwarm, copies: Copies) -> None:
    swarm = make_swarm(num_rounds=4, num_peers=1)

    async def scenario() -> None:
        (a,) = await swarm.start("a", settings=DRAWS, train_s=20.0)
        async with asking(swarm, [a]) as entry:
            while 0 not in copies:  # noqa: ASYNC110  # it has warmed up, and shows what it begins with
                await asyncio.sleep(0.1)
            await asyncio.sleep(8)
            assert a.life.committed == []
            assert entry.paths.empty == [0]
            await swarm.round(a, 1)
            await until_drawn(entry)
            text = entry.begin(Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
            assert len([each async for each in text]) == NUM
        swarm.kill(a)

    swarm.run(scenario)


@pytest.mark.full
def test_where_members_exchange_with_neighbours_only_means_are_shown(make_swarm: MakeSwarm, copies: Copies) -> None:
    swarm = make_swarm(method=DPsgdConfig(every=2, mean_every=5), num_rounds=12, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab", settings=DRAWS)
        one_replica(await swarm.done(a, b))

    swarm.run(scenario)
    means = {number for (_, number), manifest in swarm.chains.items() if manifest.has_result}
    assert 0 < len(means) < 12
    assert set(copies) - {0} == means


@pytest.mark.full
def test_on_another_branch_texts_begin_anew(make_swarm: MakeSwarm, copies: Copies) -> None:
    swarm = make_swarm(num_rounds=30, num_peers=1)

    async def scenario() -> None:
        (a,) = await swarm.start("a", settings=DRAWS)
        await swarm.round(a, 5)
        a.peer._shown = BranchId("another")
        since = swarm.clock.now()
        await swarm.done(a)
        again = [each.text for each in a.life.seen(Notice, since) if each.text.startswith("this peer draws text")]
        assert len(again) == 1

    swarm.run(scenario)


@pytest.mark.full
@pytest.mark.parametrize("where", ["copied", "made"])
def test_where_there_is_no_memory_for_weights_training_goes_on_and_it_is_said(
    make_swarm: MakeSwarm, copies: Copies, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def fails(_beside: Beside, _work: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Beside, where, fails)
    swarm = make_swarm(num_rounds=6, num_peers=1)

    async def scenario() -> None:
        (a,) = await swarm.start("a", settings=DRAWS)
        one_replica(await swarm.done(a))

    swarm.run(scenario)
    said = [each.text for each in swarm.lives[0].seen(Notice)]
    assert any(
        "no text is drawn with the weights after round 1: OutOfMemoryError: out of memory" in each for each in said
    )
    assert any(each.endswith("Lower serve_nbytes.") for each in said)


@pytest.mark.full
def test_who_gives_nothing_to_texts_is_never_asked_and_it_is_said_why(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=20, num_peers=1)

    async def scenario() -> None:
        (a,) = await swarm.start("a")
        async with asking(swarm, [a]) as entry:
            await swarm.round(a, 3)
            text = entry.begin(Wanted("key", PROMPT, NUM, Drawing(temperature=0.0)))
            with pytest.raises(NoPath, match=r"No member .* draws text\. serve_nbytes in a member's machine file"):
                await anext(text)
        swarm.kill(a)

    swarm.run(scenario)
