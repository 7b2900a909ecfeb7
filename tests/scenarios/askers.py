"""Who asks the members of a run for texts, on a network in memory."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager

from weft.clock import Clock
from weft.engine.text import Text, Wanted
from weft.ids import PeerId
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import SCHEME, MemoryNetwork
from weft.pipeline.link import StageLink
from weft.run.config import RunConfig
from weft.sim.world import SECRET
from weft.stages.asking import meeting
from weft.texts.asking.entry import Entry
from weft.texts.beside.serving import cut_of
from weft.texts.member import listen


@asynccontextmanager
async def asker(
    network: MemoryNetwork, clock: Clock, run: RunConfig, known: Iterable[tuple[PeerId, str]]
) -> AsyncIterator[Entry]:
    """Be linked to a run as one that only asks.

    Args:
        known: keys and names of members.
    """
    identity = Identity.from_seed(hashlib.sha256(b"asker").digest())
    passport = Passport(identity=identity, run=run.run, name="asker", admission=ByTicket(secret=SECRET))
    node = Node(passport, [network.transport(identity.peer)], clock, lambda _event: None)
    for peer, name in known:
        node.remember(peer, [SCHEME + peer], name)
    await node.start()
    link, cut = StageLink(node), cut_of(run)
    listen(link)
    entry = Entry(
        link,
        num_stages=cut.stages,
        vocab_size=run.model.vocab_size,
        context=run.model.max_seq_len,
        row_nbytes=cut.codec.nbytes(run.model.width),
        clock=clock,
        emit=lambda _event: None,
    )
    try:
        async with meeting(node, run, clock, entry.paths.serves), aclosing(entry):
            yield entry
    finally:
        await node.aclose()


async def until_drawn(entry: Entry) -> None:
    """Wait until all stages have a member that draws text."""
    while entry.paths.empty:  # noqa: ASYNC110  # told every two seconds
        await asyncio.sleep(0.1)


async def begun(entry: Entry, wanted: Wanted) -> tuple[Text, list[int], int]:
    """Return a text once its first token is here, that token, and the round whose weights it is drawn with."""
    text = entry.begin(wanted)
    tokens = [(await anext(text)).token]
    return text, tokens, round_of(entry)


def round_of(entry: Entry) -> int:
    """Return the round whose weights the only text is drawn with."""
    (under,) = entry._under_way.values()
    assert under._reserved is not None
    return under._reserved.round
