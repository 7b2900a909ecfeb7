"""What a newcomer is told that a day moves, against what it moves then."""

import asyncio
from pathlib import Path

import pytest

from scenarios.swarm import Life
from scenarios.test_faults import MakeSwarm
from weft.codec.config import Int8Config
from weft.events import VERSION, Entry, RoundCommitted
from weft.launch.terms import Heard, terms
from weft.net.messages import Contact
from weft.net.ticket import Ticket
from weft.observe.pace import PaceAnswer, RoundPace, together
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.sync.method.presets import DiLoCoConfig

SETTLED_S = 40.0  # of rounds that are measured, and of those that follow


def told_by(life: Life) -> PaceAnswer:
    """Return what the peer of a life tells, which a process of its own has measured."""
    now = [0.0]

    class Then:
        def now(self) -> float:
            return now[0]

        def wall(self) -> float:
            return now[0]

    pace = RoundPace(Then())
    for at, event in life.events:
        now[0] = at
        pace.write(Entry(v=VERSION, at=at, peer=life.member.id, event=event))
    return pace.answer()


def moved_a_day(life: Life, since: float, until: float) -> float:
    commits = [(at, event) for at, event in life.events if isinstance(event, RoundCommitted) and since <= at <= until]
    nbytes = sum(event.sent_nbytes + event.received_nbytes for _, event in commits[1:])
    return nbytes * 86_400 / (commits[-1][0] - commits[0][0])


@pytest.mark.full
def test_a_third_machine_moves_as_much_a_day_as_it_was_told(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    """A model so small that heartbeats, letters and votes are most of it."""
    swarm = make_swarm(method=DiLoCoConfig(every=2, codec=Int8Config()), num_rounds=1_000_000)

    found: list[float] = []

    async def scenario() -> None:
        members = await swarm.start("ab")
        await asyncio.sleep(SETTLED_S)
        rounds = together([told_by(member.life) for member in members])
        contact = Contact(peer=members[0].id, name="a", addresses=("tls://127.0.0.1:1",))
        ticket = Ticket(run=swarm.run_config.run, issuer=members[0].id, contacts=(contact,))
        heard = Heard(num_members=2, num_linked=2, rounds=rounds)
        shown = terms(swarm.run_config, ticket, Home(tmp_path / "c"), PeerConfig(device="cpu", threads=1), heard)
        assert shown.day_nbytes is not None
        c = swarm.member("c")
        swarm.launch(c)
        await swarm.when(c, RoundCommitted, lambda event: c.id in event.contributors)
        await asyncio.sleep(5.0)  # others' last words with the newcomer
        since = swarm.clock.now()
        await asyncio.sleep(SETTLED_S)
        found.extend((shown.day_nbytes, moved_a_day(c.life, since, swarm.clock.now())))
        for member in (*members, c):
            member.life.stop("enough")
        await swarm.done(*members, c)

    swarm.run(scenario)
    said, moved = found
    assert said == pytest.approx(moved, rel=0.25)
