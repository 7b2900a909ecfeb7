"""What a peer hears of a run before it joins: who trains, and how fast. Who only reads the terms is silent."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tickets import signed_ticket
from unit.peer.crew import Crew
from weft.clock import VirtualClock
from weft.events import RoundCommitted
from weft.ids import BranchId, Digest, PeerId, Round, RunId
from weft.launch.corpus import Corpus
from weft.launch.peer import join
from weft.launch.session import Options
from weft.launch.terms import CALLED_S, HEARD_S, NOBODY, Heard, MemberWatch, Terms
from weft.net.messages import Contact, Heartbeat
from weft.net.ticket import read
from weft.observe.pace import PaceAnswer, PaceRequest, Rounds
from weft.run.machine import PeerConfig
from weft.stages.messages import Held, StageNews
from weft.store.home import Home

ANNA, BERT, CARL = (PeerId(letter * 64) for letter in "abc")


Said = Heartbeat | StageNews


class Node:
    """As much of a node as is asked: links, who takes notes, and what members answer."""

    run = RunId("f" * 64)

    def __init__(self, *peers: PeerId, answer: PaceAnswer | None = None) -> None:
        self.peers = peers
        self.answer = answer
        self.asked: list[PeerId] = []
        self.handlers: dict[type, Callable[[PeerId, Any], Any]] = {}

    def on_note(self, kind: type, handler: Callable[[PeerId, Any], Any]) -> None:
        self.handlers[kind] = handler

    def ignore(self, kind: type) -> None:
        del self.handlers[kind]

    async def ask(self, peer: PeerId, request: PaceRequest, _kind: type, *, deadline_s: float) -> PaceAnswer | None:
        assert request.run == self.run
        assert deadline_s > 0
        self.asked.append(peer)
        return self.answer


def beat(tokens_per_s: float = 0.0, *, has_begun: bool = True) -> Heartbeat:
    return Heartbeat(
        name="x",
        branch=BranchId("b" * 64),
        round=Round(1),
        manifest=Digest("d" * 64) if has_begun else None,
        state="training",
        loss=None,
        tokens_per_s=tokens_per_s,
    )


def replace_tokens(said: Heartbeat, tokens: int) -> Heartbeat:
    return msgspec.structs.replace(said, committed_tokens=tokens)


def news(*stages: int, is_trainer: bool = True) -> StageNews:
    held = tuple(Held(stage=stage, since=1, state="ready", round=1, rate=1.0, num_waiting=0) for stage in stages)
    return StageNews(held=held, kept=(), is_trainer=is_trainer)


def heard(node: Node, *said: tuple[float, PeerId, Said]) -> tuple[Heard, float]:
    """Return what is heard, and after how long, where each of `said` comes at its time."""
    clock = VirtualClock()

    async def main() -> tuple[Heard, float]:
        async def say(at: float, peer: PeerId, note: Said) -> None:
            await asyncio.sleep(at)
            if (handler := node.handlers.get(type(note))) is not None:
                await handler(peer, note)

        async with MemberWatch(node, clock) as watch:  # type: ignore[arg-type]
            saying = [asyncio.ensure_future(say(*each)) for each in said]
            found = await watch.heard(), clock.now()
        assert not node.handlers
        await asyncio.gather(*saying)
        return found

    return clock.run(main())


def test_all_who_send_heartbeats_count_and_tell_their_speed() -> None:
    said = ((0.1, ANNA, beat(900.0)), (0.3, BERT, beat(2000.0)), (0.5, CARL, beat()))
    found, after_s = heard(Node(ANNA), *said)
    names = dict.fromkeys((ANNA, BERT, CARL), "x")
    assert (found, after_s) == (Heard(num_members=3, num_linked=1, speeds=(900.0, 2000.0), names=names), CALLED_S)


def test_how_far_the_run_is_comes_from_the_member_that_is_furthest() -> None:
    behind, ahead = (replace_tokens(beat(), tokens) for tokens in (100, 900))
    found, _ = heard(Node(ANNA, BERT), (0.1, ANNA, ahead), (0.2, BERT, behind))
    assert found.committed_tokens == 900
    found, _ = heard(Node(ANNA), (0.1, ANNA, msgspec.structs.replace(news(0), is_complete=True)))
    assert found.is_complete


def test_a_linked_peer_that_sends_no_heartbeat_is_not_counted() -> None:
    """It reads the terms, too, or is about to leave."""
    found, after_s = heard(Node(ANNA, BERT), (0.1, ANNA, beat(900.0)))
    assert (found.num_members, found.num_linked, after_s) == (1, 2, HEARD_S)


def test_nothing_is_waited_for_where_the_run_has_not_begun_and_all_have_spoken() -> None:
    found, after_s = heard(Node(ANNA), (0.1, ANNA, beat(has_begun=False)))
    assert (found.num_members, found.speeds, after_s) == (1, (), 0.1)
    found, after_s = heard(Node(ANNA), (0.1, ANNA, news()))
    assert (found.num_members, after_s) == (1, 0.1)
    assert heard(Node()) == (NOBODY, 0.0)
    assert heard(Node(ANNA)) == (replace(NOBODY, num_linked=1), HEARD_S)


def test_in_a_run_with_stages_who_tells_of_them_takes_part_and_who_watches_does_not() -> None:
    said = ((0.1, ANNA, news(0, 1)), (0.2, BERT, news(is_trainer=False)))
    found, after_s = heard(Node(ANNA, BERT), *said)
    assert (found.num_members, found.news, after_s) == (1, {ANNA: news(0, 1)}, CALLED_S)


def test_members_are_asked_what_rounds_take_them_and_others_are_not() -> None:
    node = Node(ANNA, CARL, answer=PaceAnswer(num_rounds=9, num_members=2, round_s=2.5, round_nbytes=7000))
    found, _ = heard(node, (0.1, ANNA, beat(900.0)), (0.2, BERT, beat()))
    assert node.asked == [ANNA]  # Bert is not linked, and Carl takes no part
    assert found.rounds == Rounds(num_told=1, num_members=2, round_s=2.5, round_nbytes=7000)


@pytest.mark.parametrize("said", [float("inf"), 0.0])
def test_a_speed_that_nobody_has_is_left_out(said: float) -> None:
    found, _ = heard(Node(ANNA), (0.1, ANNA, beat(said)))
    assert found.speeds == ()


@pytest.mark.full
async def test_whom_only_a_ticket_names_is_in_nobodys_figures(tmp_path: Path) -> None:
    """It was linked when the ticket was made: to read the terms, and no, thanks."""
    crew, shown = Crew(tmp_path, num_peers=1, num_rounds=1_000_000), list[Terms]()

    def decline(terms: Terms) -> bool:
        shown.append(terms)
        return False

    async with crew.deadline():
        a = crew.found("a")
        await a.until(RoundCommitted, lambda event: event.round >= 5)
        place, ticket = a.peer.context, read(a.ticket)
        declined = Contact(peer=CARL, name="carl", addresses=("tls://127.0.0.1:1",))
        text = signed_ticket(place.identity, ticket.run, (*ticket.contacts, declined), ticket.secret)
        settings = PeerConfig(name="b", device="cpu", threads=1, transports=("tls",), tls=place.settings.tls)
        options = Options(home=Home(tmp_path / "b"), key=None, settings=settings)
        for _ in range(2):  # the second time as one that comes again
            assert await join(Corpus(agree_to=decline), text, options, on_started=lambda *_: None) is None
    assert [terms.num_peers for terms in shown] == [2, 2]
    assert all(terms.rounds is not None and terms.rounds.num_members == 1 for terms in shown)  # measured, and alone
    assert all(terms.day_nbytes is None for terms in shown)
