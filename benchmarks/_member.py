"""A member of a run that trains nothing: it only averages a vector with the others, round after round.

    member = Member(identity, [transport], num, choices, folder)
    await member.start()
    await member.meet({peer: addresses, ...})      # the others
    await member.average(vector, out)

    async with swarm(4, num, choices, "tls") as members: ...    # all in one process

Node, membership, chain, rounds, codec, merge and threads are those of a training peer, and what they do in a round is
what `weft.peer.peer` has them do: encode, announce, wait for the commit, fetch the results, decode.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor

from weft.clock import Clock, SystemClock
from weft.codec.config import CodecConfig, TopKConfig
from weft.events import Emit, Event
from weft.ids import PeerId, RunId, Tokens
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.net.transport.base import Transport
from weft.net.transport.memory import MemoryNetwork
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.messages import Decision, Letter
from weft.peer.round.driver import RoundDriver
from weft.run.machine import PeerConfig
from weft.store.home import PeerFolder
from weft.store.journal import Journal
from weft.sync.merge.method import Method, Scope
from weft.sync.merge.reduce import codec_in, decode_parts, encode_parts, named, reply_codec_in
from weft.sync.method.choices import AdamWConfig, Choices, SgdConfig
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records.acts import MAX_TOKENS
from weft.sync.records.charter import Charter, Settings
from weft.sync.records.messages import Manifest
from weft.tasks import Compute, Threads

RUN = RunId("be" * 32)
SEQ_LEN = 8
MEET_S = 30.0


def averaging(codec: CodecConfig) -> Choices:
    """Return a method that averages vectors sent with `codec`; what that loses, members do not bring again."""
    feedback = 0.95 if isinstance(codec, TopKConfig) else None  # a run would be refused without
    return Choices(
        every=1, send="delta", apply=SgdConfig(lr=1.0), codec=codec, feedback=feedback, reply_feedback=feedback
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """As much of `weft.peer.context.Context` as rounds stand on."""

    node: Node
    identity: Identity
    folder: PeerFolder
    settings: PeerConfig
    clock: Clock
    compute: Compute
    emit: Emit
    journal: Journal
    initial: Tensor


class Member:
    """One member.

    Args:
        num: elements of the vector.
        folder: where what must survive a crash is written.
    """

    def __init__(
        self, identity: Identity, transports: Sequence[Transport], num: int, choices: Choices, folder: Path
    ) -> None:
        self.peer = identity.peer
        self.events: list[Event] = []
        clock, admission = SystemClock(), ByTicket(secret=bytes(16))
        passport = Passport(identity=identity, run=RUN, name=f"member-{identity.peer[:4]}", admission=admission)
        self.node = Node(passport, transports, clock, self.events.append)
        self._num = num
        self._method = Method(choices, AdamWConfig())
        self._compute = Threads()
        self._failure: Exception | None = None
        self._place = _Place(
            node=self.node,
            identity=identity,
            folder=PeerFolder(folder),
            settings=PeerConfig(checkpoint_every_s=0.0),
            clock=clock,
            compute=self._compute,
            emit=self.events.append,
            journal=Journal(PeerFolder(folder).journal, is_on=False),
            initial=torch.empty(0),
        )
        self._membership = Membership(self.node, clock, self.events.append, self._heartbeat)
        self._rounds: RoundDriver | None = None
        self.node.on_note(Letter, self._on_note)
        self.node.on_note(Decision, self._on_note)

    async def start(self) -> tuple[str, ...]:
        """Listen; return the addresses."""
        return await self.node.start()

    async def meet(self, others: Mapping[PeerId, Sequence[str]]) -> None:
        """Link up with all the others, and begin the first round with them. All must be listening."""
        members = sorted([self.peer, *others])
        settings = Settings(
            tokens=MAX_TOKENS, seq_len=SEQ_LEN, batch_size=1, schedule=ConstantConfig(), method=self._method.choices
        )
        charter = Charter(stewards=(), serials=(), settings=settings, max_seq_len=SEQ_LEN)
        base = genesis(RUN, members[0], charter)
        chain = Chain(open_branch(base, members, members[0], base.branch), charter)
        self._rounds = RoundDriver(self._place, chain, Scope(self._num), self._fail)  # type: ignore[arg-type]
        for peer, addresses in others.items():
            self.node.remember(peer, addresses)
        await self._membership.start()
        async with asyncio.timeout(MEET_S):
            while not all(self.node.is_linked(peer) for peer in others):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        self._rounds.begin()

    async def average(self, vector: Tensor, out: Tensor) -> Manifest:
        """Put into `out` the mean of all members' vectors; return what the round counted."""
        assert self._rounds is not None
        rounds, ranges = self._rounds, self._rounds.ranges
        codec = codec_in(self._method.choices, 0)
        payload = await self._compute.serve(lambda: tuple(map(named, encode_parts(codec, vector, ranges))))
        rounds.announce(Tokens(1), payload)
        decided = await rounds.decided.get()
        if decided is None or self._failure is not None:
            raise RuntimeError(f"a round was lost: {self._failure}")
        results = await rounds.parts.results(decided.manifest)
        await self._compute.serve(lambda: decode_parts(reply_codec_in(self._method.choices, 0), results, ranges, out))
        return decided.manifest

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""
        meters = self.node.traffic.values()
        return sum(meter.sent_nbytes for meter in meters), sum(meter.received_nbytes for meter in meters)

    async def aclose(self) -> None:
        if self._rounds is not None:
            await self._rounds.aclose()
        await self._membership.aclose()
        await self.node.aclose()
        await self._compute.aclose()

    def _fail(self, error: Exception) -> None:
        self._failure = error

    def _heartbeat(self) -> Heartbeat:
        head = None if self._rounds is None else self._rounds.chain.head
        return Heartbeat(
            name=self.node.passport.name,
            branch=RUN,  # type: ignore[arg-type]
            round=head.round if head else 0,  # type: ignore[arg-type]
            manifest=head.previous if head else None,
            state="training",
            loss=3.14159,
            tokens_per_s=1234.5,
        )

    async def _on_note(self, peer: PeerId, said: Letter | Decision) -> None:
        assert self._rounds is not None
        self._rounds.hear(peer, said)


@asynccontextmanager
async def swarm(
    num_members: int, num: int, choices: Choices, transport: Literal["tls", "memory"]
) -> AsyncIterator[list[Member]]:
    """Give members that live in this process and have met, in ascending order."""
    network = MemoryNetwork()

    def way(identity: Identity) -> Transport:
        if transport == "tls":
            return TlsTransport(identity, TlsConfig(host="127.0.0.1"))
        return network.transport(identity.peer)

    identities = sorted((Identity.generate() for _ in range(num_members)), key=lambda identity: identity.peer)
    with TemporaryDirectory(prefix="weft-bench-") as folder:
        members = []
        for identity in identities:
            (place := Path(folder) / identity.peer).mkdir()
            members.append(Member(identity, [way(identity)], num, choices, place))
        try:
            addresses = {member.peer: await member.start() for member in members}
            others = [{peer: where for peer, where in addresses.items() if peer != member.peer} for member in members]
            await asyncio.gather(*(member.meet(them) for member, them in zip(members, others, strict=True)))
            yield members
        finally:
            await asyncio.gather(*(member.aclose() for member in members))
