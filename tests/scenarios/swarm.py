"""Whole peers of one run on a virtual clock, and the faults a scenario scripts.

    async def scenario():
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(b, 3)
        swarm.kill(b)
        await swarm.done(a, c, d)

    swarm.run(scenario)

Everything is production code but the transport, the clock and the threads: `Peer` with its node, membership, rounds,
trainer and checkpoints, on a model of some ten thousand parameters. A member is a machine; each start of it is another
process (a `Life`) with the same key and folder. What a dead process still says is not heard.

Two runs of one scenario give the same log, byte for byte: `Swarm.log`.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from weft.clock import VirtualClock
from weft.codec import Fp32Config
from weft.data import CorpusConfig, TextSource
from weft.errors import CheckpointError
from weft.events import Event, Notice, RoundCommitted, StepDone
from weft.ids import Digest, PeerId, Round
from weft.keys import Identity, verify
from weft.net.admission import ByTicket
from weft.net.blobs import inline
from weft.net.handshake import Passport
from weft.net.memory import SCHEME, MemoryNetwork
from weft.net.node import Node
from weft.peer.checkpoint import load
from weft.peer.compute import Inline
from weft.peer.config import PeerConfig, RunFile, ShapedModel, TrainConfig
from weft.peer.home import Home
from weft.peer.messages import Decision, Letter
from weft.peer.peer import Outcome, Peer, Place
from weft.peer.seal import initial, seal
from weft.peer.state import replica_digest
from weft.sync.messages import Manifest, RoundNote
from weft.sync.method import FedAvgConfig, MethodConfig
from weft.sync.schedule import ConstantConfig
from weft.wire import digest_of, unseal

E = TypeVar("E", bound=Event)

SEQ_LEN = 16
BATCH = 2
EVERY = 2  # inner steps of a round
LEASE_TOKENS = EVERY * BATCH * SEQ_LEN  # that one member trains in one round
TRAIN_S = 1.0  # virtual seconds of one call of training
LIMIT_S = 3600.0  # virtual: a scenario that takes longer hangs
MODEL = ShapedModel(num_layers=1, num_heads=2, width=32, ffn_width=48)
FEDAVG = FedAvgConfig(every=EVERY, codec=Fp32Config())
SECRET = bytes(16)

Before = Callable[["Life", PeerId, Any], bool]  # (sender, to, message) -> whether it may leave


class Life:
    """One process of a member: from its start to its end or death."""

    def __init__(self, member: "Member", number: int) -> None:
        self.member = member
        self.number = number
        self.is_dead = False
        self.peer: Peer = None  # type: ignore[assignment]
        self.task: asyncio.Task[Outcome] = None  # type: ignore[assignment]
        self.events: list[tuple[float, Event]] = []
        self.positions: list[int] = []  # samples read for training, in order
        self.on_batch: Callable[[Life], None] = lambda life: None

    def emit(self, event: Event) -> None:
        if not self.is_dead:
            self.events.append((self.member.swarm.clock.now(), event))
            self.member.swarm.note(self, event)

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

    @property
    def outcome(self) -> Outcome:
        return self.task.result()


class Member:
    """One machine: a key, a folder, and its lives."""

    def __init__(self, swarm: "Swarm", name: str) -> None:
        self.swarm = swarm
        self.name = name
        self.identity = Identity.from_seed(hashlib.sha256(f"{swarm.seed} {name}".encode()).digest())
        self.id = self.identity.peer
        self.folder = swarm.home.folder(swarm.run_config.run, self.id)
        self.lives: list[Life] = []
        self.is_founder = False

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def peer(self) -> Peer:
        return self.life.peer


class WatchedNode(Node):
    """A node whose posts a scenario sees first, opened: it may act on one, or lose it."""

    life: Life

    def post(self, peer: PeerId, record: msgspec.Struct) -> bool:
        message: Any = record
        if isinstance(record, Letter):
            message = unseal(record.signed, RoundNote, verify).message
        elif isinstance(record, Decision):
            message = record.certificate
        for before in list(self.life.member.swarm.watchers):
            if not before(self.life, peer, message):
                return True  # lost on the way
        return super().post(peer, record)


class Swarm:
    def __init__(
        self,
        root: Path,
        *,
        method: MethodConfig = FEDAVG,
        num_rounds: int = 8,
        num_peers: int = 4,
        seed: int = 1,
        delay_s: float = 0.02,
        train: dict[str, Any] | None = None,
        **run: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.root = root
        self.seed = seed
        self.clock = VirtualClock()
        self.network = MemoryNetwork(delay_s=delay_s)
        self.home = Home(root / "home")
        fields: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "batch_size": BATCH,
            "tokens": num_rounds * num_peers * BATCH * SEQ_LEN * getattr(method, "every", 1),
            "schedule": ConstantConfig(lr=1e-2),
            "evaluate_every": 0,
            "evaluate_windows": 4,
        }
        self.run_file = RunFile(
            name="scenario",
            seed=seed,
            model=MODEL,
            data=CorpusConfig(source=TextSource(paths=(str(_corpus(root)),))),
            train=TrainConfig(**(fields | (train or {}))),
            method=method,
            **run,
        )
        self.sealed = seal(self.run_file, root, self.home, lambda event: None)
        self.run_config = self.sealed.config
        self.members: dict[str, Member] = {}
        self.lives: list[Life] = []
        self.watchers: list[Before] = []
        self.chains: dict[tuple[str, Round], Manifest] = {}  # every manifest that any member applied
        self.states: dict[Digest, Digest] = {}  # manifest -> replicated state after it
        self._log: list[str] = []
        self._waiting: list[tuple[Callable[[Life, Event], bool], asyncio.Future[Event]]] = []
        self._errors: list[str] = []

    # --- running ---

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run a scenario to its end, end what still lives, and fail on any error that nobody handled."""

        async def whole() -> None:
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: self._errors.append(f"{context['message']}: {context.get('exception')!r}")
            )
            try:
                async with asyncio.timeout(LIMIT_S):
                    await scenario()
            finally:
                running = [life for life in self.lives if not life.task.done()]
                for life in running:
                    self.kill(life.member)
                await asyncio.gather(*(life.task for life in self.lives), return_exceptions=True)

        self.clock.run(whole())
        assert self._errors == []

    @property
    def log(self) -> str:
        return "\n".join(self._log)

    def note(self, life: Life, event: Event) -> None:
        """Take up what a life says."""
        text = msgspec.json.encode(event).decode().replace(str(self.root), "")
        self._log.append(f"{self.clock.now():.6f} {life.member.name}{life.number} {text}")
        if isinstance(event, Notice) and event.text.startswith("handler of"):
            self._errors.append(f"{life.member.name}: {event.text}")
        if isinstance(event, RoundCommitted):
            self._check_replica(life, event)
        for is_wanted, future in list(self._waiting):
            if not future.done() and is_wanted(life, event):
                future.set_result(event)

    def _check_replica(self, life: Life, event: RoundCommitted) -> None:
        """R1: whoever makes the outer step of a manifest holds the same bits after it."""
        replica = life.peer._replica
        assert replica.head is not None
        assert digest_of(replica.head) == event.manifest
        state = replica_digest(replica.outer, replica.state)
        assert self.states.setdefault(event.manifest, state) == state, f"replicas differ after round {event.round}"
        known = self.chains.setdefault((event.branch, event.round), replica.head)
        assert known == replica.head, f"two manifests for round {event.round}"

    # --- what must hold after any scenario ---

    def check(self) -> None:
        """R2 and R3, of all that was committed and of every process that was not killed.

        Every token trained is counted once or still carried, no sample is trained on twice, and each commit names
        everybody of its electorate as counted or left out.
        """
        trained = [position for life in self.lives if not life.is_dead for position in life.positions]
        assert len(trained) == len(set(trained)), "a sample was trained on twice"
        counted: dict[PeerId, int] = {}
        for manifest in self.chains.values():
            for each in manifest.contributions:
                counted[each.peer] = counted.get(each.peer, 0) + each.tokens
        for member in self.members.values():
            trained_tokens = sum(life.trained_tokens for life in member.lives)
            assert counted.get(member.id, 0) <= trained_tokens, f"work of {member.name} was counted twice"
            if len(member.lives) == 1 and not member.life.is_dead:
                uncounted = member.life.trained_tokens - counted.get(member.id, 0)
                carried = member.peer._carry.tokens
                # Who leaves may not hear that its last offer was counted; its checkpoint is checked when it returns.
                possible = {carried} if member.life.outcome.reason == "complete" else {0, carried}
                assert uncounted in possible, f"{member.name} trained {uncounted} more than was counted"
        for life in self.lives:
            for event in life.committed:
                manifest = self.chains[event.branch, event.round]
                before = self.chains.get((event.branch, Round(event.round - 1)))
                assert {each.peer for each in manifest.contributions} == set(event.contributors)
                if before is not None:
                    assert set(before.members) == set(event.contributors) | event.left_out.keys()
                assert all(event.left_out.values())
                assert not event.left_out.keys() & set(event.contributors)

    # --- members ---

    async def start(self, names: Iterable[str], wait_for: int | None = None, **options: Any) -> list[Member]:
        """Start members that the run begins with, the first of them its founder."""
        names = list(names)
        members = [self.member(name) for name in names]
        members[0].is_founder = True
        for member in members:
            self.launch(member, wait_for=len(names) if wait_for is None else wait_for, **options)
        return members

    def member(self, name: str) -> Member:
        return self.members.setdefault(name, Member(self, name))

    def launch(
        self,
        member: Member,
        *,
        wait_for: int = 1,
        train_s: float = TRAIN_S,
        compute: Inline | None = None,
        settings: PeerConfig | None = None,
        on_batch: Callable[[Life], None] = lambda life: None,
    ) -> Life:
        """Start a process of `member`, which goes on from its checkpoint: a founder's the run, others' join.

        Args:
            wait_for: a founder's.
            train_s: virtual seconds that a call of training takes.
            on_batch: called when a batch is read, before it is trained on.
        """
        life = Life(member, len(member.lives))
        member.lives.append(life)
        self.lives.append(life)
        life.on_batch = on_batch
        place = Inline(train_s) if compute is None else compute
        life.task = asyncio.get_running_loop().create_task(self._live(life, wait_for, place, settings))
        return life

    async def _live(
        self,
        life: Life,
        wait_for: int,
        compute: Inline,
        settings: PeerConfig | None,
    ) -> Outcome:
        member = life.member
        passport = Passport(
            identity=member.identity,
            run=self.run_config.run,
            name=member.name,
            admission=ByTicket(secret=SECRET),
            instance=hashlib.sha256(f"{member.name} {life.number}".encode()).digest()[:8],
        )
        node = WatchedNode(passport, [self.network.transport(member.id)], self.clock, life.emit, offload=inline)
        node.life = life
        others = [other for other in self.members.values() if other is not member and other.lives]
        for other in others:
            node.remember(other.id, [SCHEME + other.id], other.name)
        await node.start()
        try:
            vector = initial(self.run_config, self.home)
            assert vector is not None
            place = Place(
                node=node,
                identity=member.identity,
                folder=member.folder,
                settings=settings or PeerConfig(device="cpu", micro_batch=BATCH),
                tokenizer=self.sealed.tokenizer,
                shards=self.sealed.store,
                index=self.sealed.index,
                initial=vector,
                clock=self.clock,
                compute=compute,
                emit=life.emit,
            )
            life.peer = Peer(self.run_config, place)
            _note_samples(life)
            try:
                snapshot = load(member.folder.checkpoint)
            except CheckpointError:
                snapshot = None
            if member.is_founder:
                return await life.peer.found(wait_for=wait_for, snapshot=snapshot)
            await node.connect_any([other.id for other in others])
            return await life.peer.join(snapshot=snapshot)
        finally:
            await node.aclose()

    # --- faults ---

    def kill(self, member: Member) -> None:
        """End the member's process as kill -9 does."""
        life = member.life
        if not life.is_dead:
            life.is_dead = True
            self.network.kill(member.id)
            life.task.cancel()

    def cut(self, one: Iterable[Member], other: Iterable[Member]) -> None:
        for a in one:
            for b in other:
                self.network.partition(a.id, b.id)

    def heal(self, one: Iterable[Member], other: Iterable[Member]) -> None:
        for a in one:
            for b in other:
                self.network.heal(a.id, b.id)

    # --- waiting ---

    async def when(self, who: Member | None, kind: type[E], is_wanted: Callable[[E], bool] = lambda event: True) -> E:
        """Wait for the next such event of a member (None: of any)."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

        def matches(life: Life, event: Event) -> bool:
            return (who is None or life.member is who) and isinstance(event, kind) and is_wanted(event)

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

    async def done(self, *members: Member) -> list[Outcome]:
        return list(await asyncio.gather(*(member.life.task for member in members)))


def _note_samples(life: Life) -> None:
    batches = life.peer._trainer._batches
    read = batches.at

    def at(positions: Any) -> Any:
        life.positions += [int(position) for position in positions]
        life.on_batch(life)
        return read(positions)

    batches.at = at  # type: ignore[method-assign]


def _corpus(root: Path) -> Path:
    """Write a text of a few dozen kilobytes, of words that a model can learn something of."""
    sentence = "the warp holds and the weft goes over and under until thread on thread makes one cloth"
    words = sentence.split()
    text = " ".join(words[(index * index + index // 7) % len(words)] for index in range(8000))
    path = root / "corpus.txt"
    root.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text[start : start + 70] for start in range(0, len(text), 70)))
    return path
