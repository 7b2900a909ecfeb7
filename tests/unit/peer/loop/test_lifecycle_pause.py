"""What waits for a pause to change misses none, also of before it began to wait."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weft.clock import SystemClock
from weft.peer.loop.lifecycle import Pause
from weft.tasks import Inline

ENDS_S = 10


async def test_a_change_since_one_last_looked_is_not_waited_for() -> None:
    nothing: Any = None  # it is not armed: no device is left
    place: Any = SimpleNamespace(compute=Inline(), clock=SystemClock(), emit=lambda _event: None)
    pause = Pause(place, nothing, nothing, lambda _error: None)
    looked = pause.num_changes
    pause.want("a test")
    pause.want_no_more("a test")
    async with asyncio.timeout(ENDS_S):
        await pause.change(looked)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await pause.change(pause.num_changes)
    waiting = asyncio.ensure_future(pause.change())
    await asyncio.sleep(0)
    pause.want("another")
    async with asyncio.timeout(ENDS_S):
        await waiting
