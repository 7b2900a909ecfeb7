"""Every verb with a network runs on a loop that watches sockets, whatever the platform's own one is."""

import asyncio
from collections.abc import Iterator

import pytest

from weft.cli.doctor import ticket as findings_ticket
from weft.cli.process import run_loop
from weft.run.machine import PeerConfig


class OtherLoop(asyncio.SelectorEventLoop):
    """Stands for a platform's loop that cannot watch sockets."""


class OtherPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return OtherLoop()


@pytest.fixture(autouse=True)
def other_platform() -> Iterator[None]:
    asyncio.set_event_loop_policy(OtherPolicy())
    yield
    asyncio.set_event_loop_policy(None)


async def loop_type(*_: object) -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_a_verb_runs_on_a_loop_that_watches_sockets():
    assert run_loop(loop_type()) is asyncio.SelectorEventLoop


def test_a_ticket_is_examined_on_such_a_loop(monkeypatch):
    monkeypatch.setattr(findings_ticket, "_examine", loop_type)
    assert findings_ticket.examine_ticket(None, PeerConfig(), has_torch=True) is asyncio.SelectorEventLoop
