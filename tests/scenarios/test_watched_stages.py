"""Whoever watches a run with stages over one link hears the peers of all, and checks what each stage decided."""

import asyncio
from pathlib import Path

import pytest

from scenarios.companies import SECRET, House, Machine
from scenarios.test_gather import STAGES, make_run_file, staged
from weft.clock import VirtualClock
from weft.dashboard.history import History
from weft.dashboard.run import about_of
from weft.events import VERSION, Entry, Event, Notice, RoundCommitted, RoundProven, StagesSeen
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import SCHEME
from weft.observe.observer import Observer
from weft.observe.telemetry import Bulletins, Relaying
from weft.run.genesis import seal
from weft.store.home import Home

ROUNDS, MANY = 200, 8
BEGUN_S, WATCHED_S = 1.0, 14.0
VISITOR = Identity.from_seed(bytes([200] * 32))


def noted(house: House, name: str, wait_for: int | None = None) -> tuple[Machine, Bulletins]:
    """Start a machine whose events are noted for whoever asks."""
    machine = house.start(name, wait_for=wait_for)
    bulletins = Bulletins(machine.identity, staged(house).run, house.clock)
    emit = machine.emit

    def note(event: Event) -> None:
        emit(event)
        bulletins.write(Entry(v=VERSION, at=house.clock.wall(), peer=machine.id, event=event))

    machine.emit = note  # type: ignore[method-assign]
    return machine, bulletins


async def watched(house: House, machine: Machine, entries: list[Entry]) -> None:
    """Hear a run over a link to one machine, until cancelled."""
    run = staged(house)
    passport = Passport(
        identity=VISITOR, run=run.run, name="visitor", admission=ByTicket(secret=SECRET), instance=bytes(8)
    )
    transport = house.network.transport(VISITOR.peer)
    node = Node(passport, [transport], house.clock, lambda _event: None, offload=inline)
    node.remember(machine.id, [SCHEME + machine.id], machine.name)
    await node.start()
    try:
        await node.connect(machine.id)
        stages = [run.of_stage(stage).run for stage in range(run.stages)]
        await Observer(node, run.run, house.clock, entries.append, stages).watch()
    finally:
        await node.aclose()


@pytest.mark.full
def test_one_link_shows_all_stages_and_what_each_decided_is_checked(tmp_path: Path) -> None:
    clock, entries = VirtualClock(), list[Entry]()
    sealed = seal(make_run_file(tmp_path, ROUNDS), tmp_path, Home(tmp_path / "home"), lambda _event: None)
    house = House(sealed, Home(tmp_path / "home"), clock, train_s=0.05)

    async def whole() -> set[str]:
        try:
            machines = [noted(house, "a", wait_for=3), *(noted(house, name) for name in "bc")]
            await asyncio.sleep(BEGUN_S)
            for machine, bulletins in machines:
                Relaying(bulletins, machine.company.kit.node, clock)
            watching = asyncio.ensure_future(watched(house, machines[2][0], entries))
            await asyncio.sleep(WATCHED_S)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            return {machine.id for machine, _ in machines}
        finally:
            await house.end()

    peers = clock.run(whole())
    commits = [(entry.peer, entry.event) for entry in entries if isinstance(entry.event, RoundCommitted)]
    assert {peer for peer, _ in commits} == peers
    assert {event.stage for _, event in commits} == set(range(STAGES))
    assert any(isinstance(entry.event, StagesSeen) and len(entry.event.names) == 3 for entry in entries)
    assert [entry.event for entry in entries if isinstance(entry.event, Notice) and entry.peer == VISITOR.peer] == []
    manifests = {(event.stage, event.round): event.manifest for _, event in commits}
    proven = [entry.event for entry in entries if isinstance(entry.event, RoundProven)]
    for stage in range(STAGES):
        own = [event for event in proven if event.stage == stage]
        assert len(own) > MANY // 2
        assert all(
            manifests[stage, event.round] == event.manifest for event in own if (stage, event.round) in manifests
        )

    history = History(about_of(sealed.config))
    for entry in entries:
        history.take(entry)
    tree = history.whole()
    rounds = [row[1] for row in tree["rounds"]]
    assert len(rounds) == len(set(rounds))
    assert max(rounds) > MANY
    assert any(all(len(stage) == 1 for stage in row[2]) for row in tree["stages"])
    assert {row[4] for row in tree["proofs"]} == set(range(STAGES))
