"""Who asks the members of a run for text, and takes no other part in it. A whole model is one stage.

async with asking(ticket_text, options) as asked:
    asked.entry.begin(Wanted(...))         # as of an engine
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass

from weft.clock import Clock
from weft.data.tokenizer import Tokenizer, from_bytes
from weft.errors import ConfigError
from weft.launch.fetch import read_came_with
from weft.launch.session import Options, open_for, session
from weft.model.came_with import CameWith, decode
from weft.net.messages import Contact
from weft.net.node import Node
from weft.net.ticket import read
from weft.pipeline.link import StageLink
from weft.run.config import RunConfig
from weft.run.staged import StagedConfig
from weft.stages.gather.visit import introduced, visiting
from weft.stages.messages import StageNews
from weft.texts.beside.serving import cut_of
from weft.texts.entry import Entry
from weft.texts.member import listen

MAX_LINKS = 32  # of a whole model's members: each is as good as another
LOOKING = StageNews(held=(), kept=(), is_trainer=False)  # nobody stays for it at the run's end


@dataclass(frozen=True)
class Asked:
    entry: Entry
    run: RunConfig
    tokenizer: Tokenizer
    came_with: CameWith


@asynccontextmanager
async def asking(ticket_text: str, options: Options, max_context: int = 0) -> AsyncIterator[Asked]:
    """Link to the members of the run that a ticket names.

    Args:
        max_context: tokens of prompt and answer; 0: as many as the model reads.

    Raises:
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered, or let this peer in.
        ConfigError: its members train in loops of their own, or its model reads less.
        WireError: what came with the model is nothing that weft wrote.
    """
    ticket = read(ticket_text)
    identity = open_for(options, ticket.run, is_maker=False)
    async with session(options, ticket.run, identity, ticket.admission()) as s:
        await s.start()
        run, blob = await introduced(s, ticket)
        if max_context > run.model.max_seq_len:
            raise ConfigError(f"--max-context {max_context}: the model reads {run.model.max_seq_len} tokens at most.")
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
        async with meeting(s.node, run, s.clock), aclosing(entry):
            yield Asked(entry, run, from_bytes(blob), decode(read_came_with(run, options.home)))


def meeting(node: Node, run: RunConfig, clock: Clock) -> AbstractAsyncContextManager[object]:
    """Be linked to members of all stages meanwhile."""
    if isinstance(run, StagedConfig):
        return visiting(node, run, clock, LOOKING)

    def meet(contact: Contact) -> None:
        if len(node.peers) < MAX_LINKS:
            node.keep(contact.peer)

    node.on_contact(meet)
    for peer in list(node.known_addresses())[:MAX_LINKS]:
        node.keep(peer)
    return nullcontext()
