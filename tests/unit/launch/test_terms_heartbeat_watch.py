"""What a peer hears of a run before it joins: who trains, and how fast. Who only reads the terms is silent."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tickets import signed_ticket
from unit.peer.crew import Crew
from weft.clock import VirtualClock
from weft.events import RoundCommitted
from weft.ids import BranchId, Digest, PeerId, Round
from weft.launch.corpus import Corpus
from weft.launch.peer import join
from weft.launch.session import Options
from weft.launch.terms import CALLED_S, HEARD_S, NOBODY, HeartbeatWatch, Pace, Terms
from weft.net.messages import Contact, Heartbeat
from weft.net.ticket import read
from weft.run.machine import PeerConfig
from weft.store.home import Home

ANNA, BERT, CARL = (PeerId(letter * 64) for letter in "abc")


class Node:
    """As much of a node as is asked: links, and who takes heartbeats."""

    def __init__(self, *peers: PeerId) -> None:
        self.peers = peers
        self.handler: Callable[[PeerId, Heartbeat], Any] | None = None

    def on_note(self, kind: type, handler: Callable[[PeerId, Heartbeat], Any]) -> None:
        assert kind is Heartbeat
        self.handler = handler

    def ignore(self, kind: type) -> None:
        assert kind is Heartbeat
        self.handler = None


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


def heard(node: Node, *said: tuple[float, PeerId, Heartbeat]) -> tuple[Pace, float]:
    """Return what is heard, and after how long, where each of `said` comes at its time."""
    clock = VirtualClock()

    async def main() -> tuple[Pace, float]:
        async def say(at: float, peer: PeerId, heartbeat: Heartbeat) -> None:
            await asyncio.sleep(at)
            if node.handler is not None:
                await node.handler(peer, heartbeat)

        async with HeartbeatWatch(node, clock) as watch:  # type: ignore[arg-type]
            saying = [asyncio.ensure_future(say(*each)) for each in said]
            found = await watch.pace(), clock.now()
        assert node.handler is None
        await asyncio.gather(*saying)
        return found

    return clock.run(main())


def test_the_fastest_members_pace_counts_and_all_who_send_heartbeats() -> None:
    said = ((0.1, ANNA, beat(900.0)), (0.3, BERT, beat(2000.0)), (0.5, CARL, beat()))
    pace, after_s = heard(Node(ANNA), *said)
    assert (pace, after_s) == (Pace(num_members=3, num_linked=1, tokens_per_s=2000.0), CALLED_S)
    assert pace.steps_s(4000) == 2.0


def test_a_linked_peer_that_sends_no_heartbeat_is_not_counted() -> None:
    """It reads the terms, too, or is about to leave."""
    pace, after_s = heard(Node(ANNA, BERT), (0.1, ANNA, beat(900.0)))
    assert (pace.num_members, pace.num_linked, after_s) == (1, 2, HEARD_S)


def test_nothing_is_waited_for_where_the_run_has_not_begun_and_all_have_spoken() -> None:
    pace, after_s = heard(Node(ANNA), (0.1, ANNA, beat(has_begun=False)))
    assert (pace.num_members, pace.steps_s(1), after_s) == (1, None, 0.1)
    assert heard(Node()) == (NOBODY, 0.0)
    assert heard(Node(ANNA)) == (replace(NOBODY, num_linked=1), HEARD_S)


@pytest.mark.parametrize("said", [float("inf"), 1e308])
def test_a_pace_that_nobody_has_breaks_nothing(said: float) -> None:
    pace, _ = heard(Node(ANNA), (0.1, ANNA, beat(said)))
    assert pace.steps_s(1) is None or pace.steps_s(1) == pytest.approx(0.0)


@pytest.mark.full
async def test_whom_only_a_ticket_names_is_in_nobodys_figures(tmp_path: Path) -> None:
    """It was linked when the ticket was made: to read the terms, and no, thanks."""
    crew, shown = Crew(tmp_path, num_peers=1, num_rounds=1_000_000), list[Terms]()

    def decline(terms: Terms) -> bool:
        shown.append(terms)
        return False

    async with crew.deadline():
        a = crew.found("a")
        await a.until(RoundCommitted)
        place, ticket = a.peer.context, read(a.ticket)
        declined = Contact(peer=CARL, name="carl", addresses=("tls://127.0.0.1:1",))
        text = signed_ticket(place.identity, ticket.run, (*ticket.contacts, declined), ticket.secret)
        settings = PeerConfig(name="b", device="cpu", threads=1, transports=("tls",), tls=place.settings.tls)
        options = Options(home=Home(tmp_path / "b"), key=None, settings=settings)
        for _ in range(2):  # the second time as one that comes again
            assert await join(Corpus(agree_to=decline), text, options, on_started=lambda *_: None) is None
    assert [terms.num_peers for terms in shown] == [2, 2]
    assert all(terms.tokens_per_s > 0 for terms in shown)
