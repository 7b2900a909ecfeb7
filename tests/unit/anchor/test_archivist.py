"""What an anchor that keeps all asks of whom, and whom it waits for."""

import asyncio
from types import SimpleNamespace
from typing import Any

from weft.anchor.archivist import Archivist
from weft.clock import VirtualClock
from weft.ids import Digest, PeerId
from weft.wire import digest

HONEST, SLOW = (PeerId(digit * 64) for digit in "12")


def test_who_delivers_for_ever_holds_up_nobody_elses_works() -> None:
    clock, taken = VirtualClock(), list[Digest]()
    archive = SimpleNamespace(stretch=None, head=None)
    archivist: Any = Archivist(
        SimpleNamespace(),  # type: ignore[arg-type]
        archive,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        clock,
        lambda _event: None,
        has_ends=False,
    )

    async def take(pending: Any) -> None:
        if pending.wanted.peer == SLOW:
            await asyncio.sleep(1e9)
        taken.append(pending.wanted.name)
        del archivist._pending[pending.wanted.name]

    def counts(peer: PeerId, number: int) -> Digest:
        name = digest(f"{peer} {number}".encode())
        archivist._pending[name] = SimpleNamespace(wanted=SimpleNamespace(peer=peer, name=name), kept="signed")
        return name

    async def play() -> None:
        archivist._take = take
        gathering = asyncio.ensure_future(archivist.gather())
        wanted = []
        for number in range(4):
            counts(SLOW, number)
            wanted.append(counts(HONEST, number))
            await asyncio.sleep(5.0)
        assert taken == wanted
        assert archivist.num_pending == 4
        gathering.cancel()
        await asyncio.wait([gathering])
        assert not len(archivist._tasks)

    clock.run(play())
