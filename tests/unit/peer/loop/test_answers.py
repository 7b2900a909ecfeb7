"""Who draws for whom: batches go to who is there, and nobody waits long for who brings nothing."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from charters import charter
from unit.training.test_rewarded import likes_digits, made, write_model
from weft.clock import SystemClock
from weft.errors import CallFailed, DeadlineExceeded, PayloadError
from weft.events import Event, Notice
from weft.ids import BranchId, PeerId, RunId
from weft.peer.chain import genesis, open_branch
from weft.peer.loop import answers
from weft.peer.loop.answers import Draws, Helpers, num_at_once, packed, unpacked
from weft.peer.messages import MAX_PLACES, DrawAnswers, DrawsAnswers
from weft.run.config import RunConfig
from weft.tasks import Inline, Tasks
from weft.training.answers import Outdated
from weft.wire import digest_of

ME, FAST, SLOW = (PeerId(letter * 64) for letter in "abc")
RUN = RunId("ab" * 32)
HEAD = open_branch(genesis(RUN, ME, charter(1)), [ME], ME, BranchId(RUN))
SIZE, SAMPLES = 2, 8
LEASED = np.arange(100, 112)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    base = tmp_path_factory.mktemp("run")
    write_model(base / "model", likes_digits())
    (base / "tasks.jsonl").write_text("".join(f'{{"question": "say {n}", "answer": "1"}}\n' for n in range(40)))
    return made(base).config


class Node:
    """Calls peers that are functions."""

    def __init__(self, peers: dict[PeerId, Callable[[DrawAnswers], Any]]) -> None:
        self.peers, self.posted = peers, list[Any]()
        self.asked: list[tuple[PeerId, tuple[int, ...]]] = []
        self.handlers: dict[type, Any] = {}

    def on_note(self, kind: type, handler: Any) -> None:
        self.handlers[kind] = handler

    serve = on_note

    def on_link(self, callback: Any) -> None:
        self.link = callback

    def is_linked(self, peer: PeerId) -> bool:
        return peer in self.peers

    def post(self, peer: PeerId, note: Any) -> None:
        self.posted.append((peer, note))

    async def call(self, peer: PeerId, asked: DrawAnswers, _kind: type, deadline_s: float) -> Any:
        assert deadline_s == answers.CALL_S
        self.asked.append((peer, asked.places))
        return await self.peers[peer](asked)


class Trainer:
    def __init__(self) -> None:
        self.edition, self.forgers, self.brought = 1, dict[PeerId, str](), dict[int, Any]()
        self.num_rests = 0

    def bring(self, brought: dict[int, Any]) -> None:
        self.brought |= brought

    def answers(self, places: Any, edition: int) -> list[Any]:
        if edition != self.edition:
            raise Outdated("other parameters")
        return [((int(place),),) * SAMPLES for place in places]

    def rest(self) -> None:
        self.num_rests += 1


def drawn(asked: DrawAnswers) -> Any:
    return packed([((place,),) * SAMPLES for place in asked.places])


async def at_once(asked: DrawAnswers) -> Any:
    return drawn(asked)


async def never(_asked: DrawAnswers) -> Any:
    await asyncio.Event().wait()


async def late(_asked: DrawAnswers) -> Any:
    raise DeadlineExceeded("too late")


async def too_few(asked: DrawAnswers) -> Any:
    return packed([((place,),) * (SAMPLES - 1) for place in asked.places])


class Play:
    def __init__(self, run: RunConfig, peers: dict[PeerId, Callable[[DrawAnswers], Any]]) -> None:
        self.node, self.trainer, self.told = Node(peers), Trainer(), list[Event]()
        self.is_over = False
        context: Any = SimpleNamespace(node=self.node, emit=self.told.append, clock=SystemClock(), compute=Inline())
        replica: Any = SimpleNamespace(run=run, config=run, head=HEAD)
        self.tasks = Tasks(lambda error: None)
        trainer: Any = self.trainer
        self.helpers = Helpers(context, trainer, replica, self.tasks, lambda: self.is_over)
        self.draws = Draws(context, trainer, replica, lambda: self.is_over)

    async def hear(self, *peers: PeerId, head: str = digest_of(HEAD)) -> None:
        for peer in peers:
            await self.node.handlers[DrawsAnswers](peer, DrawsAnswers(head=head))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def ask(self, *places: int, head: str = digest_of(HEAD)) -> Any:
        return self.node.handlers[DrawAnswers](FAST, DrawAnswers(head=head, places=places))


async def test_batches_are_drawn_from_the_last_one_on_and_each_once(run: RunConfig) -> None:
    play = Play(run, {FAST: at_once, SLOW: at_once})
    await play.hear(FAST)
    play.helpers.begin(HEAD, LEASED, SIZE)
    await play.hear(SLOW)
    await play.settle()
    asked = [places for _, places in play.node.asked]
    assert asked[0] == (110, 111)
    assert sorted(place for places in asked for place in places) == LEASED.tolist()
    assert {peer for peer, _ in play.node.asked} == {FAST, SLOW}
    assert sorted(play.trainer.brought) == LEASED.tolist()
    assert {each.edition for each in play.trainer.brought.values()} == {1}
    await play.helpers.ready(LEASED[:SIZE])
    await play.tasks.aclose()


async def test_what_nobody_has_taken_this_peer_draws_itself_without_a_wait(run: RunConfig) -> None:
    play = Play(run, {FAST: never})
    play.helpers.begin(HEAD, LEASED, SIZE)
    await asyncio.wait_for(play.helpers.ready(LEASED[:SIZE]), 0.2)
    await play.hear(FAST)
    await play.settle()
    assert [places for _, places in play.node.asked] == [(110, 111)]
    play.helpers.end()
    await play.tasks.aclose()


@pytest.mark.parametrize("broken", [late, too_few])
async def test_who_brings_nothing_is_asked_once_a_round_and_in_the_end_never(
    run: RunConfig, broken: Callable[[DrawAnswers], Any]
) -> None:
    play = Play(run, {FAST: broken})
    for number in range(answers.MAX_FAILED + 2):
        head = open_branch(genesis(RUN, ME, charter(1)), [ME], ME, BranchId(f"{number:064x}"))
        await play.hear(FAST, head=digest_of(head))
        play.helpers.begin(head, LEASED, SIZE)
        await play.settle()
        await asyncio.wait_for(play.helpers.ready(LEASED), 0.2)
    assert len(play.node.asked) == answers.MAX_FAILED
    assert play.trainer.brought == {}
    assert all(isinstance(event, Notice) for event in play.told)
    await play.tasks.aclose()


async def test_nobody_waits_long_for_who_never_answers(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PATIENCE_S", 0.1)
    monkeypatch.setattr(answers, "LOOK_S", 0.02)
    play = Play(run, {FAST: never})
    await play.hear(FAST)
    play.helpers.begin(HEAD, LEASED, SIZE)
    await play.settle()
    await asyncio.wait_for(play.helpers.ready(LEASED[-SIZE:]), 2.0)
    monkeypatch.setattr(answers, "PATIENCE_S", 100.0)
    waiting = asyncio.ensure_future(play.helpers.ready(LEASED[-SIZE:]))
    await asyncio.sleep(0.05)
    play.is_over = True  # it is told to stop
    await asyncio.wait_for(waiting, 1.0)
    await play.tasks.aclose()


async def test_who_is_elsewhere_forges_or_is_gone_is_not_asked(run: RunConfig) -> None:
    play = Play(run, {FAST: at_once, SLOW: at_once})
    await play.hear(FAST, head="0" * 64)
    await play.hear(SLOW)
    play.trainer.forgers[SLOW] = "a token"
    play.helpers.begin(HEAD, LEASED, SIZE)
    await play.settle()
    assert play.node.asked == []
    await play.hear(FAST)
    await play.settle()
    assert {peer for peer, _ in play.node.asked} == {FAST}
    play.node.link(FAST, False, "gone")
    assert FAST not in play.helpers._at
    await play.tasks.aclose()


async def test_who_draws_tells_once_a_round_and_answers_for_its_parameters_alone(run: RunConfig) -> None:
    play = Play(run, {FAST: at_once})
    with pytest.raises(CallFailed, match="another round"):
        await play.ask(1, 2)
    play.draws.tell()
    play.draws.tell()
    assert [note.head for _, note in play.node.posted] == [digest_of(HEAD)]
    assert unpacked(await play.ask(1, 2), 2, SAMPLES) == [((1,),) * SAMPLES, ((2,),) * SAMPLES]
    play.trainer.edition = 2  # a round is over, and it has not come to the next turn
    with pytest.raises(CallFailed, match="other parameters"):
        await play.ask(1, 2)
    play.draws.tell()
    assert len(play.node.posted) == 2
    with pytest.raises(CallFailed, match="another round"):
        await play.ask(1, 2, head="0" * 64)
    for places in ((), (1, 1), tuple(range(MAX_PLACES))):
        if 0 < len(set(places)) == len(places) <= num_at_once(run):
            continue
        with pytest.raises(CallFailed, match=r"one batch|fit into a message"):
            await play.ask(*places)
    play.is_over = True
    with pytest.raises(CallFailed, match="rests"):
        await play.ask(1, 2)
    assert play.trainer.num_rests == 1


def test_answers_come_back_as_they_were_packed_and_others_are_refused() -> None:
    groups = [((1, 2, 3), (4,)), ((), (5, 6))]
    sent = packed(groups)
    assert unpacked(sent, 2, 2) == groups
    with pytest.raises(PayloadError, match="4 answers came, and 6 are due"):
        unpacked(sent, 3, 2)
    with pytest.raises(PayloadError):
        unpacked(type(sent)(lengths=(3, 1, 0, 3), tokens=sent.tokens), 2, 2)
