"""A member for the command line to meet: it listens in a thread of its own, on a real socket of this machine."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unit.peer.crew import Crew, Member
from weft.peer.peer import Peer

LISTENS_S = 60  # only ends a test that would hang
STEP_S = 0.05  # of training: rounds without a pause would leave little of the processor to what a test asks


def slowly(peer: Peer) -> None:
    """Let each call of training take a moment."""
    trainer = peer._trainer
    train, never = trainer.train, threading.Event()

    def train_slowly(*given: Any) -> Any:
        never.wait(STEP_S)
        return train(*given)

    trainer.train = train_slowly  # type: ignore[method-assign]


@contextmanager
def founder(folder: Path, *, wait_for: int = 2, num_peers: int = 2, **run: Any) -> Iterator[Member]:
    """Found a run that begins once `wait_for` peers are there; stop it, if it has not ended by itself, at the end."""
    folder.mkdir()
    listens, members = threading.Event(), list[Member]()

    async def main() -> None:
        crew = Crew(folder, num_peers=num_peers, **run)
        async with crew.deadline():
            members.append(crew.found("founder", wait_for=wait_for, prepare=slowly))
            started = asyncio.ensure_future(members[0].started.wait())
            await asyncio.wait((members[0].task, started), return_when=asyncio.FIRST_COMPLETED)
            listens.set()
            await members[0].task

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="founder")
    thread.start()
    try:
        assert listens.wait(LISTENS_S)
        yield members[0]
    finally:
        if members and members[0].started.is_set():
            loop = members[0].task.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(members[0].peer.stop, "the test is over")
        thread.join(LISTENS_S)
        assert not thread.is_alive()
