"""Real members that may open few files, and somebody with a ticket who opens all the streams that many keys can."""

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slow.shell import COMMIT_S, LOCAL, START_S, Shell
from weft.clock import SystemClock
from weft.errors import NetError, PeerError
from weft.events import CheckpointSaved, RoundCommitted
from weft.keys import Identity
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.ticket import Ticket, read
from weft.net.transport.base import Stream
from weft.net.transport.tls import TlsConfig, TlsTransport

pytestmark = pytest.mark.slow

NUM_KEYS, NUM_STREAMS = 30, 16
ATTACK_S, RELEASED_S = 20.0, 2.0


class Crowd:
    """Many keys of one person, each with a link to a member and as many silent streams as it can open."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._nodes: list[Node] = []
        self._streams: list[Stream] = []

    async def come(self) -> int:
        """Return how many streams could be opened."""
        (contact, *_) = self._ticket.contacts
        for _ in range(NUM_KEYS):
            identity = Identity.generate()
            passport = Passport(
                identity=identity, run=self._ticket.run, name="crowd", admission=self._ticket.admission()
            )
            transport = TlsTransport(identity, TlsConfig(host="127.0.0.1"))
            node = Node(passport, [transport], SystemClock(), lambda _event: None)
            self._nodes.append(node)
            await node.start()
            node.remember(contact.peer, contact.addresses)
            with suppress(NetError, PeerError):
                await node.connect(contact.peer)
                for _ in range(NUM_STREAMS):
                    self._streams.append(await transport.dial(contact.peer, contact.addresses[0], "bulk"))
        return len(self._streams)

    async def go(self) -> None:
        for node in self._nodes:
            await node.aclose()


@pytest.mark.parametrize("files", [64, 256, 1024])
async def test_streams_of_many_keys_take_no_member_along(
    files: int, shells: Callable[..., Shell], run_file: Path
) -> None:
    anna, bert = shells("anna"), shells("bert")
    anna.run("train", str(run_file), "--wait-for", "1", "--set", "orphan_after_s=2.0", *LOCAL)
    assert anna.process is not None
    resource.prlimit(anna.process.pid, resource.RLIMIT_NOFILE, (files, files))
    ticket = anna.ticket()
    anna.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    process, clock = psutil.Process(anna.process.pid), SystemClock()
    before = process.num_fds()
    crowd = Crowd(read(ticket))
    num_opened = await crowd.come()
    assert num_opened > NUM_STREAMS
    began = clock.wall()
    await asyncio.sleep(ATTACK_S)
    assert process.num_fds() < files - 8  # a checkpoint, its folder and its log always find one
    commits = [entry for entry in anna.entries() if isinstance(entry.event, RoundCommitted) and entry.at > began]
    assert len(commits) > 1, anna.said.read_text()
    anna.wait(lambda entry: isinstance(entry.event, CheckpointSaved), within_s=COMMIT_S)
    if files >= 256:
        bert.run("join", "-", "--yes", *LOCAL, given=ticket)
        bert.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
        bert.end()
    await crowd.go()
    await asyncio.sleep(RELEASED_S)
    assert process.num_fds() <= before + 8
    assert anna.process.poll() is None
    assert "Traceback" not in anna.said.read_text()
