"""Who asks the members of a run for text, and takes no other part in it. A whole model is one stage.

async with asking(ticket_text, options) as asked:
    asked.entry.begin(Wanted(...))         # as of an engine
    await asked.ended                      # where this machine may move no more today

Of a run with stages all members are linked, as they are to each other. Of one without, those that draw text: others are
let go of again, and more are tried until `MOST_DRAWING` are there.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import msgspec

from weft.clock import Clock
from weft.data.tokenizer import Tokenizer, from_bytes
from weft.errors import ConfigError
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.launch.fetch import read_came_with
from weft.launch.session import Options, open_for
from weft.launch.visit import aside
from weft.model.came_with import CameWith, decode
from weft.net.node import Node
from weft.net.ticket import read
from weft.pipeline.link import StageLink
from weft.run.config import RunConfig
from weft.run.staged import StagedConfig
from weft.stages.gather.visit import introduced, visiting
from weft.stages.messages import StageNews
from weft.tasks import Tasks
from weft.texts.asking.entry import Entry
from weft.texts.beside.serving import cut_of
from weft.texts.member import NEWS_S, listen

LOOKING = StageNews(held=(), kept=(), is_trainer=False)  # nobody stays for it at the run's end
MOST_DRAWING = 16  # members with the whole model that are linked: each is as good as another
TRIED = 8  # others that are linked meanwhile, to find out whether they draw
SILENT_S = 4 * NEWS_S  # after which a linked member draws none: those that do say so every two seconds


@dataclass(frozen=True)
class Asked:
    ended: asyncio.Future[str]  # why it can ask no more
    entry: Entry
    run: RunConfig
    tokenizer: Tokenizer
    came_with: CameWith


@asynccontextmanager
async def asking(ticket_text: str, options: Options, max_context: int = 0) -> AsyncIterator[Asked]:
    """Link to the members of the run that a ticket names.

    The home keeps what is fetched, and nothing else of this: a peer may be training with its key, or be about to. So
    that is used only where no secret admits, because the run may admit by key.

    Args:
        max_context: tokens of prompt and answer; 0: as many as the model reads.

    Raises:
        ConfigError: nothing is left of the bytes that this machine may move today.
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered, or let this peer in.
        ConfigError: its members train in loops of their own, or its model reads less.
        WireError: what came with the model is nothing that weft wrote.
    """
    ticket = read(ticket_text)

    def checked(run: RunConfig) -> RunConfig:
        if max_context > run.model.max_seq_len:
            raise ConfigError(f"--max-context {max_context}: the model reads {run.model.max_seq_len} tokens at most.")
        return run

    identity = _identity(options, ticket.run, has_secret=ticket.secret is not None)
    guarded, moved = Asking(), options.home.moved_asking(ticket.run)
    caps = msgspec.structs.replace(options.settings.caps, memory_nbytes=None, hours=())  # of who takes part in a run
    asks = replace(options, moved=moved, settings=msgspec.structs.replace(options.settings, caps=caps))
    async with aside(ticket, identity, lambda home: replace(asks, home=home)) as s, s.guarded(guarded):
        await s.start()
        run, blob = await introduced(replace(s, options=options), ticket, checked)
        link, cut = StageLink(s.node), cut_of(run)
        listen(link)
        entry = Entry(
            link,
            num_stages=cut.stages,
            vocab_size=run.model.vocab_size,
            context=max_context or run.model.max_seq_len,
            row_nbytes=cut.codec.nbytes(run.model.width),
            clock=s.clock,
            emit=s.emit,
        )
        async with meeting(s.node, run, s.clock, entry.paths.serves), aclosing(entry):
            yield Asked(guarded.ended, entry, run, from_bytes(blob), decode(read_came_with(run, options.home)))


class Asking:
    """What a guard looks after here."""

    pausing = None

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stop(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def _identity(options: Options, run: RunId, *, has_secret: bool) -> Identity:
    if options.key is None and has_secret:
        return Identity.generate()
    return open_for(options, run, is_maker=False)


def meeting(
    node: Node, run: RunConfig, clock: Clock, draws: Callable[[PeerId], bool]
) -> AbstractAsyncContextManager[object]:
    """Be linked meanwhile to members of all stages, or, of a whole model, to some that draw text."""
    return visiting(node, run, clock, LOOKING) if isinstance(run, StagedConfig) else _meeting_whole(node, clock, draws)


@asynccontextmanager
async def _meeting_whole(node: Node, clock: Clock, draws: Callable[[PeerId], bool]) -> AsyncIterator[None]:
    async with aclosing(Tasks()) as tasks:
        tasks.spawn(_look_on(node, clock, draws))
        yield


async def _look_on(node: Node, clock: Clock, draws: Callable[[PeerId], bool]) -> None:
    kept_at: dict[PeerId, float] = {}
    tried_at: dict[PeerId, float] = {}
    while True:
        now = clock.now()
        dropped, kept = turns(node.known_addresses(), kept_at, tried_at, draws, now)
        for peer in dropped:
            del kept_at[peer]
            node.release(peer)
            node.drop(peer, "it draws no text, and others may")
        for peer in kept:
            kept_at[peer] = tried_at[peer] = now
            node.keep(peer)
        await asyncio.sleep(NEWS_S)


def turns(
    known: Collection[PeerId],
    kept_at: Mapping[PeerId, float],
    tried_at: Mapping[PeerId, float],
    draws: Callable[[PeerId], bool],
    now: float,
) -> tuple[list[PeerId], list[PeerId]]:
    """Return whose links are let go of, and to whom links are kept up from now on: pure.

    Nobody is let go of unless somebody else is tried in its place.

    Args:
        known: all whose addresses are known.
        kept_at: those to whom links are kept up, with when that began.
        tried_at: when each was last tried.
        draws: whether it says that it draws text.
    """
    rest = sorted((peer for peer in kept_at if not draws(peer)), key=kept_at.__getitem__)
    if len(kept_at) - len(rest) >= MOST_DRAWING:
        return [], []
    others = sorted((peer for peer in known if peer not in kept_at), key=lambda peer: tried_at.get(peer, -math.inf))
    silent = [peer for peer in rest if now - kept_at[peer] >= SILENT_S]
    room = max(0, TRIED - len(rest))
    kept = others[: room + len(silent)]
    return silent[: max(0, len(kept) - room)], kept
