"""A run that goes on as another one: who took part, who comes back, and who has an old ticket, learns where."""

from pathlib import Path

import pytest

from unit.launch.test_peer import forged
from unit.peer.crew import Crew, Member
from weft.errors import TicketMismatch
from weft.events import ActEnacted, RoundCommitted
from weft.ids import RunId
from weft.keys import Identity
from weft.launch import peer as launch
from weft.launch.terms import terms
from weft.net.ticket import read
from weft.run.config import RunConfig
from weft.store.home import Home
from weft.sync.records.acts import Act, Amend, AnyDeed, Succeed
from weft.wire import seal

STEWARD = Identity.from_seed(bytes([1] * 32))
OLD, NEW = RunId("01" * 32), RunId("5e" * 32)


async def decide(member: Member, deed: AnyDeed) -> None:
    await member.until(RoundCommitted)
    rounds = member.peer.rounds
    assert rounds is not None
    assert rounds.acts.take(seal(STEWARD, Act(run=member.peer.run.run, serial=1, deed=deed))) is None
    await member.until(ActEnacted)


async def test_who_took_part_in_a_run_that_has_ended_reads_where_it_goes_on(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2, num_rounds=10_000, stewards=(STEWARD.peer,))
    home = Home(tmp_path / "b")
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        b = crew.join("b", home=home)
        await decide(a, Succeed(run=NEW, is_at_once=True, reason="", ticket="weft1new"))
        outcomes = await crew.done(a, b)
        assert {outcome.successor.run for outcome in outcomes if outcome.successor} == {NEW}
        with pytest.raises(TicketMismatch, match=r"goes on as run 5e5e5e5e\. .* weft join weft1new"):
            await crew.join("b", a.ticket, home=home).task
        with pytest.raises(TicketMismatch, match="goes on as run 5e5e5e5e"):
            await crew.found("a", home=a.home).task


async def test_a_member_of_the_successor_answers_an_old_ticket(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2, predecessor=OLD)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        assert read(a.ticket).run != OLD
        with pytest.raises(TicketMismatch, match=f"goes on here as run {a.peer.run.run[:8]}"):
            await crew.join("b", forged(a.ticket, run=OLD)).task


async def test_who_joins_an_amended_run_is_shown_what_it_costs_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, num_peers=2, num_rounds=10_000, stewards=(STEWARD.peer,))
    asked: list[RunConfig] = []
    monkeypatch.setattr(launch, "terms", lambda run, *rest: asked.append(run) or terms(run, *rest))
    async with crew.deadline():
        a = crew.found("a")
        await decide(a, Amend(reason="", every=7))
        b = crew.join("b")
        await b.until(RoundCommitted, lambda event: b.id in event.contributors)
        assert b.peer.run == a.peer.run, "the genesis is the same"
        assert b.peer.replica.config.method.every == 7
    assert [run.method.every for run in asked] == [7]
