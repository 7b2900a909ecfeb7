"""Whoever watches a run hears all its members in their own words over one link, and rounds take no longer for it."""

import asyncio
from pathlib import Path

import pytest

from scenarios.swarm import Swarm
from scenarios.visits import visit
from weft.events import Entry, Event, Notice, RoundCommitted, RoundProven, StepDone
from weft.observe.observer import Observer
from weft.observe.telemetry import WINDOW_S

ROUNDS = 10
MOST_LONGER = 1.01


@pytest.fixture(autouse=True)
def _small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 4)


def played(swarm: Swarm, *, is_watched: bool) -> tuple[float, list[Entry]]:
    """Return how long four members take, in virtual seconds, and what one heard who is linked to one of them."""
    entries: list[Entry] = []
    took_s: list[float] = []

    async def watch() -> None:
        async with visit(swarm, swarm.member("a")) as node:
            await Observer(node, swarm.run_config.run, swarm.clock, entries.append).watch()

    async def scenario() -> None:
        members = await swarm.start("abcd")
        began = swarm.clock.now()
        watching = asyncio.ensure_future(watch()) if is_watched else None
        await asyncio.gather(*(swarm.round(member, ROUNDS) for member in members))
        took_s.append(swarm.clock.now() - began)
        await asyncio.sleep(2 * WINDOW_S)
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await swarm.done(*members)

    swarm.run(scenario)
    return took_s[0], entries


@pytest.mark.full
def test_one_link_shows_every_member_in_its_own_words_and_rounds_take_as_long(tmp_path: Path) -> None:
    alone_s, _ = played(Swarm(tmp_path / "alone", num_rounds=ROUNDS, num_peers=4), is_watched=False)
    swarm = Swarm(tmp_path / "watched", num_rounds=ROUNDS, num_peers=4)
    watched_s, entries = played(swarm, is_watched=True)
    said: dict[str, set[type[Event]]] = {}
    for entry in entries:
        said.setdefault(entry.peer, set()).add(type(entry.event))
    for name in "abcd":
        assert {StepDone, RoundCommitted} <= said[swarm.member(name).id]
    commits = [entry for entry in entries if isinstance(entry.event, RoundCommitted)]
    assert {entry.event.round for entry in commits} >= set(range(1, ROUNDS))
    assert [entry.event for entry in entries if isinstance(entry.event, Notice)] == []
    proven = [entry.event for entry in entries if isinstance(entry.event, RoundProven)]
    told = {entry.event.round: entry.event.manifest for entry in commits if isinstance(entry.event, RoundCommitted)}
    assert [event.round for event in proven] == list(range(proven[0].round, proven[-1].round + 1))
    assert proven[0].round <= 3
    assert proven[-1].round >= ROUNDS
    assert all(told[event.round] == event.manifest for event in proven if event.round in told)
    assert all(2 * event.num_signed >= event.num_electors == 4 for event in proven)
    assert alone_s <= watched_s <= MOST_LONGER * alone_s
