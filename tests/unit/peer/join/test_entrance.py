"""Who asks to be counted in is remembered as long as that counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

from weft.clock import VirtualClock
from weft.ids import BranchId, Digest, PeerId
from weft.peer.join.entrance import JOINING_EXPIRES_S, Entrance
from weft.peer.messages import Joining

KEYS = [PeerId(f"{number:064x}") for number in range(4)]


def test_who_asked_to_be_counted_in_long_ago_is_forgotten() -> None:
    clock = VirtualClock()
    entrance: Any = object.__new__(Entrance)  # what stands around it is of no concern here
    entrance._context, entrance._asking = SimpleNamespace(clock=clock), {}
    entrance._participation = SimpleNamespace(rounds=None)
    joining = Joining(branch=BranchId("ab" * 32), manifest=Digest("cd" * 32))

    async def main() -> None:
        entrance._asked = asyncio.Event()
        for peer in KEYS[:3]:
            await entrance._on_joining(peer, joining)
        assert entrance.askers() == KEYS[:3]
        await asyncio.sleep(JOINING_EXPIRES_S)
        await entrance._on_joining(KEYS[3], joining)
        assert list(entrance._asking) == [KEYS[3]]

    clock.run(main())
