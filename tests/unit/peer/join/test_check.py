"""A newcomer's look at leases of others: whom it waits for, and how long."""

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from weft.clock import VirtualClock
from weft.events import Event, Notice, WorkAudited
from weft.ids import PeerId, Round
from weft.peer.join.check import PATIENCE_S, EntryCheck
from weft.run.trust import AuditedTrust
from weft.wire import digest

ME, HONEST, STALLS = (PeerId(digit * 64) for digit in "123")


def test_who_shows_its_work_for_ever_keeps_nobody_from_joining() -> None:
    clock, events = VirtualClock(), list[Event]()
    replica = SimpleNamespace(outer=torch.zeros(8), run=SimpleNamespace(trust=AuditedTrust()))
    node = SimpleNamespace(peer=ME, peers=(HONEST, STALLS))
    context: Any = SimpleNamespace(node=node, settings=SimpleNamespace(check=3), clock=clock, emit=events.append)
    check: Any = EntryCheck(context, None, replica, None, lambda: False)  # type: ignore[arg-type]

    async def begun(drawn: Any) -> Any:
        if drawn.peer == STALLS:
            await asyncio.sleep(1e9)
        return drawn

    async def replayed(_drawn: Any, _begun: Any) -> Any:
        return SimpleNamespace(outcome="equal", distance=0.0, num_steps=4, held=1.0, why="")

    async def drawn(_head: Any) -> list[Any]:
        by = SimpleNamespace(round=Round(3))
        return [SimpleNamespace(peer=peer, name=digest(peer.encode()), by=by) for peer in (HONEST, STALLS, HONEST)]

    check._begun, check._replayed, check._drawn = begun, replayed, drawn
    clock.run(check.run(SimpleNamespace(round=3, members=(HONEST, STALLS))))
    assert clock.now() < 2 * PATIENCE_S
    assert [type(event) for event in events] == [WorkAudited, Notice]
