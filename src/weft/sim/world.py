"""Production peers of one run in one process, on a virtual clock: machines, their lives and their links.

A `Member` is a machine: a key and a folder. Each start of it is another process, a `Life`, with the same key and
folder. Everything in it is production code but the transport, the clock and the threads: `Peer` with its node,
membership, rounds, trainer and checkpoints. What a dead process still says is not heard.

Two plays of one scenario do the same in the same order.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from weft import rng
from weft.clock import Clock, VirtualClock
from weft.errors import CheckpointError, Unreachable
from weft.events import VERSION, Emit, Entry, Event, RoundCommitted, StepDone
from weft.ids import Digest, PeerId, Tokens
from weft.keys import Identity
from weft.launch.guard import DayCount
from weft.launch.peer import beside_texts, context_of
from weft.launch.session import Options, Session
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.membership.gossip import ClaimReader
from weft.net.node import Node
from weft.net.ticket import MAX_CONTACTS
from weft.net.transport.memory import SCHEME, MemoryNetwork
from weft.observe.telemetry import Bulletins, Relaying
from weft.peer.context import Data, MakeTrainer
from weft.peer.peer import Outcome, Peer
from weft.peer.state.checkpoint import load
from weft.run.frozen import Frozen, frozen_of
from weft.run.genesis import Sealed, initial
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.sim.byzantine import CrookedNode
from weft.sim.cost import CostSection, CostTied, CostTrainer, Owing, PacedSection
from weft.sim.scenario import Fault, Lined, Way
from weft.stages.launch import kit_of, live
from weft.stages.peer import StagesPeer
from weft.stages.step.pipeline import Kit
from weft.store.home import Home
from weft.sync.records.messages import Manifest
from weft.tasks import Compute, Inline
from weft.training.learner import Learner
from weft.training.rewarded import trainer_of


class OwingClock:
    """A machine's clock: while something is computed, with the time that it takes and that has not passed yet.

    Args:
        owed_s: returns that time.
    """

    def __init__(self, clock: Clock, owed_s: Callable[[], float]) -> None:
        self._clock = clock
        self._owed_s = owed_s

    def now(self) -> float:
        return self._clock.now() + self._owed_s()

    def wall(self) -> float:
        return self._clock.wall()


class StagedLife:
    """One process of a run with stages: the peer that production has, and how it fared."""

    def __init__(self, kit: Kit) -> None:
        self._peer = StagesPeer(kit)
        self._heads: dict[int, Manifest] = {}  # of what it has held

    async def live(self, wait_for: int | None) -> Outcome:
        """Take part to the end: begin once so many peers are here, or (None) join."""
        return await live(self._peer, wait_for)

    def stop(self, reason: str) -> None:
        self._peer.stop(reason)

    def head(self, stage: int) -> Manifest | None:
        """Return the last manifest of a stage that this process has taken up."""
        member = self._peer.members.get(stage)
        if member is not None and member.peer.head is not None:
            self._heads[stage] = member.peer.head
        return self._heads.get(stage)

    @property
    def carried_tokens(self) -> Tokens:
        """Return what it has trained in its stages and no manifest has counted."""
        return Tokens(sum(member.peer.carried_tokens for member in self._peer.members.values()))

    @property
    def replicas(self) -> dict[int, Digest]:
        """Return the digests of what it held at the end, by stage."""
        return {stage: outcome.replica for stage, outcome in sorted(self._peer.outcomes.items())}


MBIT = 1e6


def set_line(network: MemoryNetwork, peer: PeerId, now: Lined) -> None:
    """Give a machine its line to the network."""
    network.set_line(
        peer,
        up_bps=None if now.up_mbit is None else now.up_mbit * MBIT,
        down_bps=None if now.down_mbit is None else now.down_mbit * MBIT,
        delay_s=now.delay_ms / 1000,
        jitter_s=now.jitter_ms / 1000,
        loss=now.loss,
    )


T = TypeVar("T")
E = TypeVar("E", bound=Event)

RESOLUTION_S = 1e-6  # of virtual time: sums of floats are no more exact
SECRET = bytes(16)  # of the tickets: nobody else is on this network


class Life:
    """One process of a member: from its start to its end or death."""

    def __init__(self, member: "Member", number: int, bulletins: Bulletins) -> None:
        self.member = member
        self.number = number
        self.bulletins = bulletins
        self.is_dead = False
        self.is_frozen = False
        self.has_ended = asyncio.Event()  # by itself, or because it was killed
        self.peer: Peer = None  # type: ignore[assignment]
        self.staged: StagedLife | None = None  # in place of the peer, where the model is cut
        self.task: asyncio.Task[Outcome] = None  # type: ignore[assignment]
        self.events: list[tuple[float, Event]] = []

    def begin(self, living: Coroutine[Any, Any, Outcome]) -> None:
        self.task = asyncio.get_running_loop().create_task(living, context=self.member.world.clock.context_of(self))
        self.task.add_done_callback(lambda _task: self.has_ended.set())

    def take_part(self, part: "Peer | StagedLife") -> None:
        if isinstance(part, Peer):
            self.peer = part
        else:
            self.staged = part

    @property
    def is_running(self) -> bool:
        return not self.is_dead and not self.task.done()

    def kill(self) -> None:
        """End as kill -9 does."""
        if not self.is_dead:
            self.is_dead = True
            self.member.world.network.kill(self.member.id)
            self.task.cancel()
            self.has_ended.set()

    async def freeze(self, lasts_s: float) -> None:
        """Stand still for so long, as between SIGSTOP and SIGCONT."""
        if self.is_frozen or not self.is_running:
            return
        self.is_frozen = True
        clock = self.member.world.clock
        clock.freeze(self)
        began = clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(lasts_s):
                await self.has_ended.wait()
        self.member.stood_still(clock.now() - began)
        if not self.is_dead:  # who is dead does not wake up
            self.wake()

    def wake(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            self.member.world.clock.thaw(self)

    @property
    def outcome(self) -> Outcome:
        return self.task.result()

    def stop(self, reason: str) -> None:
        """Let it say goodbye, save and end, soon."""
        (self.staged or self.peer).stop(reason)

    def head(self, stage: int | None = None) -> Manifest | None:
        """Return the manifest that it has taken up last; of a stage, where the model is cut."""
        if self.staged is not None:
            return self.staged.head(stage or 0)
        return None if self.peer is None else self.peer.head

    @property
    def carried_tokens(self) -> Tokens | None:
        """Return what it has trained and no manifest has counted; None: it has not begun."""
        part = self.staged or self.peer
        return None if part is None else part.carried_tokens

    def emit(self, event: Event) -> None:
        if not self.is_dead:
            clock = self.member.world.clock
            self.events.append((clock.now(), event))
            self.bulletins.write(Entry(v=VERSION, at=clock.wall(), peer=self.member.id, event=event))
            self.member.world.hear(self, event)

    def seen(self, kind: type[E], since: float = 0.0) -> list[E]:
        return [event for at, event in self.events if isinstance(event, kind) and at >= since]

    def times(self, kind: type[Event], since: float = 0.0) -> list[float]:
        return [at for at, event in self.events if isinstance(event, kind) and at >= since]

    @property
    def committed(self) -> list[RoundCommitted]:
        return self.seen(RoundCommitted)

    @property
    def trained_tokens(self) -> int:
        return sum(event.num_tokens for event in self.seen(StepDone))


class Member:
    """One machine: a key, a folder, and its lives."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.identity = Identity.from_seed(hashlib.sha256(f"{world.seed} {name}".encode()).digest())
        self.id = self.identity.peer
        self.folder = world.home.folder(world.sealed.config.run, self.id)
        self.lives: list[Life] = []
        self.is_founder = False
        self.tokens_per_s = 10_000.0  # of training
        self.frozen_s = 0.0  # how long its processes stood still, in all
        self.in_force: Sequence[Fault] = ()  # what befalls it at the moment
        self.make_trainer: MakeTrainer | None = None  # None: as all others
        self.made: dict[
            int, frozenset[Way]
        ] = {}  # how its steps were made that are not as it says, by where their batches begin

    def stood_still(self, lasted_s: float) -> None:
        self.frozen_s += lasted_s

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def peer(self) -> Peer:
        return self.life.peer


class Paced:
    """Where a process of a simulated machine computes: each call of training takes the virtual seconds its tokens take,
    and those in which the machine stands still."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._training = asyncio.Lock()  # as on one thread: what comes later waits
        self._owed = 0.0

    def owe(self, num_tokens: float) -> None:
        """Let what is being computed take the time of so many tokens more."""
        self._owed += num_tokens

    @property
    def owed_s(self) -> float:
        return self._owed / self._member.tokens_per_s

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        async with self._training:
            await self._pass(num_tokens / self._member.tokens_per_s)
            try:
                found = work()
            finally:
                owed_s, self._owed = self.owed_s, 0.0
            await self._pass(owed_s)
            return found

    async def _pass(self, left_s: float) -> None:
        loop = asyncio.get_running_loop()
        while left_s > RESOLUTION_S:
            began, frozen_s = loop.time(), self._member.frozen_s
            await asyncio.sleep(left_s)
            left_s -= loop.time() - began - (self._member.frozen_s - frozen_s)

    async def serve(self, work: Callable[[], T]) -> T:
        return work()

    async def aclose(self) -> None:
        pass


class World:
    """The machines of a run, and what joins them.

    Args:
        home: where all of them keep what they keep.
        seed: of their keys.
    """

    def __init__(self, sealed: Sealed, home: Home, network: MemoryNetwork, seed: int) -> None:
        self.sealed = sealed
        self.home = home
        self.network = network
        self.seed = seed
        self.make_trainer: MakeTrainer = trainer_of
        self.reader: ClaimReader | None = None  # of all peers, where there are too many to check each claim so often
        self.clock = VirtualClock()
        self.members: dict[str, Member] = {}
        self.lives: list[Life] = []
        self.on_event: Callable[[Life, Event], None] = lambda _life, _event: None  # told of each
        is_whole = not isinstance(sealed.config, StagedConfig)
        self._initial = initial(sealed.config, home) if is_whole else None
        here = sealed.config, home, sealed.tokenizer, sealed.came_with
        self._frozen = frozen_of(*here) if is_whole else Frozen()  # of all machines
        self._waiting: list[tuple[Callable[[Life, Event], bool], asyncio.Future[Event]]] = []

    def hear(self, life: Life, event: Event) -> None:
        self.on_event(life, event)
        for is_wanted, future in list(self._waiting):
            if not future.done() and is_wanted(life, event):
                future.set_result(event)

    def member(self, name: str) -> Member:
        return self.members.setdefault(name, Member(self, name))

    def known_to(self, member: Member) -> list[Member]:
        """Return whom a process of `member` knows when it starts: all who came before, or of many the first and others
        by chance, together no more than a ticket names."""
        others = [other for other in self.members.values() if other is not member and other.lives]
        if len(others) <= MAX_MEMBERS:
            return others
        luck = rng.stream(self.seed, "ticket", member.name)
        return [others[0], *(others[int(luck.integers(1, len(others)))] for _ in range(MAX_CONTACTS - 1))]

    def make_node(self, life: Life, passport: Passport, clock: Clock) -> Node:
        """Return the node of a process that begins."""
        member = life.member
        transport = self.network.transport(member.id)
        luck = rng.stream(self.seed, "crooked", member.name, life.number)
        return CrookedNode(passport, transport, clock, life.emit, lambda: member.in_force, luck)

    def launch(
        self,
        member: Member,
        *,
        wait_for: int = 1,
        compute: Compute | None = None,
        settings: PeerConfig | None = None,
        clock: Clock | None = None,
    ) -> Life:
        """Start a process of `member`, which goes on from its checkpoint: a founder's the run, others' join.

        Args:
            wait_for: peers with which a founder begins.
            clock: where the machine's own differs from the world's.
        """
        life = Life(member, len(member.lives), Bulletins(member.identity, self.sealed.config.run, clock or self.clock))
        member.lives.append(life)
        self.lives.append(life)
        settings = settings or PeerConfig(device="cpu", micro_batch=self.sealed.config.train.batch_size)
        living = self._live(life, wait_for, compute or Inline(), settings, clock or self.clock)
        life.begin(living)
        return life

    async def _live(self, life: Life, wait_for: int, compute: Compute, settings: PeerConfig, clock: Clock) -> Outcome:
        member, run = life.member, self.sealed.config
        passport = Passport(
            identity=member.identity,
            run=run.run,
            name=member.name,
            admission=ByTicket(secret=SECRET),
            instance=hashlib.sha256(f"{member.name} {life.number}".encode()).digest()[:8],
        )
        node = self.make_node(life, passport, clock)
        others = self.known_to(member)
        for other in others:
            node.remember(other.id, [SCHEME + other.id], other.name)
        Relaying(life.bulletins, node, clock)
        s = Session(
            options=Options(home=self.home, key=None, settings=settings),
            identity=member.identity,
            folder=member.folder,
            node=node,
            emit=life.emit,
            clock=clock,
            compute=compute,
            day=DayCount(member.folder.moved, settings.caps, clock),
        )
        await node.start()
        try:
            data = Data(self.sealed.tokenizer, self.sealed.store, self.sealed.index, self.sealed.came_with)
            if isinstance(run, StagedConfig):
                staged = self._staged(life, run, s, data)
                life.take_part(staged)
                return await staged.live(wait_for if member.is_founder else None)
            assert self._initial is not None

            s, texts = beside_texts(s, run, data.tokenizer)

            def make_learner(emit: Emit) -> Learner:
                batches = data.batches(run, "train")
                make = member.make_trainer or self.make_trainer
                return make(run, s.options.settings, batches, emit, clock, lambda: self._frozen)

            context = context_of(s, data, self._initial.clone(), make_learner, reader=self.reader, texts=texts)
            life.take_part(Peer(run, context))
            self.on_made(life)
            try:
                snapshot = load(member.folder.checkpoint)
            except CheckpointError:
                snapshot = None
            if member.is_founder:
                return await life.peer.found(wait_for=wait_for, snapshot=snapshot)
            with suppress(*([] if snapshot is None else [Unreachable])):  # who has a state can go on alone
                await node.connect_any([other.id for other in others])
            return await life.peer.join(snapshot=snapshot)
        finally:
            await node.aclose()

    def _staged(self, life: Life, run: StagedConfig, s: Session, data: Data) -> StagedLife:
        paced = s.compute if isinstance(s.compute, Paced) else Paced(life.member)
        s = replace(s, clock=OwingClock(s.clock, lambda: paced.owed_s), compute=paced)
        kit, owing = kit_of(s, run, data), Owing(paced.owe, f"{life.member.name} {life.number}")
        if self.make_trainer is CostTrainer:  # sections only take their time, and nothing is learnt
            return StagedLife(replace(kit, make_section=partial(CostSection, owing), make_tied=CostTied))
        return StagedLife(replace(kit, make_section=partial(PacedSection, owing)))

    def on_made(self, life: Life) -> None:
        """Called when a life's peer is made and has not begun."""

    async def end(self) -> None:
        """Kill what still lives."""
        for life in self.lives:
            if life.is_running:
                life.kill()
        for life in self.lives:
            life.wake()  # so that its tasks end
        await asyncio.gather(*(life.task for life in self.lives), return_exceptions=True)

    # --- waiting ---

    async def when(self, who: Member | None, kind: type[E], is_wanted: Callable[[E], bool] | None = None) -> E:
        """Wait for the next such event of a member (None: of any)."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

        def matches(life: Life, event: Event) -> bool:
            is_it = (who is None or life.member is who) and isinstance(event, kind)
            return is_it and (is_wanted is None or is_wanted(event))  # type: ignore[arg-type]

        entry = (matches, future)
        self._waiting.append(entry)
        try:
            return await future  # type: ignore[return-value]
        finally:
            self._waiting.remove(entry)

    async def round(self, who: Member, round: int) -> RoundCommitted:
        """Wait until `who` has made the outer step of `round` or a later one."""
        done = [event for event in who.life.committed if event.round >= round]
        return done[0] if done else await self.when(who, RoundCommitted, lambda event: event.round >= round)
