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
import itertools
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from scenarios import rules
from scenarios.ledger import Ledger, Step
from weft.clock import Clock
from weft.codec.config import Fp32Config
from weft.data.assign import _BEYOND
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import Event, Notice, RoundCommitted
from weft.ids import Digest, PeerId
from weft.keys import verify
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork
from weft.peer.messages import Decision, Letter
from weft.peer.peer import Outcome
from weft.peer.state.legacies import MAX_KEPT_NBYTES, KeptBranches
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.genesis import seal
from weft.sim.cost import StepwiseCostTrainer
from weft.sim.world import Life, Member, World
from weft.store.chunks import replica_digest
from weft.store.home import Home
from weft.sync.governance import history
from weft.sync.method.presets import FedAvgConfig, MethodConfig
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records.ancestry import History, Stretch
from weft.sync.records.messages import GroupRecord, Manifest, RoundNote
from weft.tasks import Compute, Inline
from weft.training.steps import Mean
from weft.training.trainer import Trainer
from weft.wire import decode, digest_of, unseal

E = TypeVar("E", bound=Event)

SEQ_LEN = 16
BATCH = 2
EVERY = 2  # inner steps of a round
LEASE_TOKENS = EVERY * BATCH * SEQ_LEN  # that one member trains in one round
TRAIN_S = 1.0  # virtual seconds of one call of training
LIMIT_S = 3600.0  # virtual: a scenario that takes longer hangs
MODEL = ShapedModel(num_layers=1, num_heads=2, width=32, ffn_width=48)
FEDAVG = FedAvgConfig(every=EVERY, codec=Fp32Config())

Before = Callable[["Life", PeerId, Any], bool]  # (sender, to, message) -> whether it may leave


class WatchedNode(Node):
    """A node whose posts a scenario sees first, opened: it may act on one, or lose it."""

    life: Life
    swarm: "Swarm"

    def post(self, peer: PeerId, record: msgspec.Struct) -> bool:
        message: Any = record
        if isinstance(record, Letter):
            message = unseal(record.signed, RoundNote, verify).message
        elif isinstance(record, Decision):
            message = record.certificate
        for before in list(self.swarm.watchers):
            if not before(self.life, peer, message):
                return True  # lost on the way
        return super().post(peer, record)


class Walker(StepwiseCostTrainer):
    """Trains as cheaply as a simulation does, but reads its samples, batch by batch, as a trainer that learns does."""

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        self._batches.at(positions)
        return super()._fill(positions)

    def _descend(self, norm: float, rate: float) -> float:  # cheap steps
        self._vector.mul_(1 - self._change)
        return norm


class Swarm(World):
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
        model: ShapedModel = MODEL,
        has_even_leases: bool = True,
        learns: bool = False,
        **run: Any,
    ) -> None:
        """
        Args:
            learns: members make inner steps; otherwise they do what takes a fraction of their time (`Walker`).
        """
        torch.set_num_threads(1)
        self.root = root
        fields: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "batch_size": BATCH,
            "tokens": num_rounds * num_peers * BATCH * SEQ_LEN * getattr(method, "every", 1),
            "schedule": ConstantConfig(lr=1e-2),
            "evaluate_every": 0,
            "evaluate_windows": 4,
        }
        run_file = RunFile(
            name="scenario",
            has_even_leases=has_even_leases,
            seed=seed,
            model=model,
            data=CorpusConfig(source=TextSource(paths=(str(write_corpus(root)),))),
            train=TrainConfig(**(fields | (train or {}))),
            method=method,
            **run,
        )
        home = Home(root / "home")
        super().__init__(seal(run_file, root, home, lambda event: None), home, MemoryNetwork(delay_s=delay_s), seed)
        self.run_config = self.sealed.config
        self.make_trainer = Trainer if learns else Walker
        self.on_event = self._note
        self.limit_s = LIMIT_S
        self.watchers: list[Before] = []
        self.positions: dict[Life, list[int]] = {}  # samples read for training, in order
        self.on_batch: dict[Life, Callable[[Life], None]] = {}  # called when a batch is read
        self.chains: dict[rules.Place, Manifest] = {}  # every manifest that any member applied
        self.heads: dict[rules.Place, Manifest] = {}  # every manifest that any member trained after
        self.states: dict[Digest, Digest] = {}  # manifest -> replicated state after it
        self.ledger = Ledger()
        self._log: list[str] = []
        self._errors: list[str] = []

    # --- running ---

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run a scenario to its end, end what still lives, and fail on any error that nobody handled."""

        async def whole() -> None:
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: self._errors.append(f"{context['message']}: {context.get('exception')!r}")
            )
            try:
                async with asyncio.timeout(self.limit_s):
                    await scenario()
            finally:
                await self.end()

        self.clock.run(whole())
        assert self._errors == []

    @property
    def log(self) -> str:
        return "\n".join(self._log)

    def _note(self, life: Life, event: Event) -> None:
        text = msgspec.json.encode(event).decode().replace(str(self.root), "")
        self._log.append(f"{self.clock.now():.6f} {life.member.name}{life.number} {text}")
        if isinstance(event, Notice) and event.text.startswith("handler of"):
            self._errors.append(f"{life.member.name}: {event.text}")
        if isinstance(event, RoundCommitted):
            self._check_replica(life, event)

    def _check_replica(self, life: Life, event: RoundCommitted) -> None:
        """R1: whoever makes the outer step of a manifest holds the same bits after it."""
        replica = life.peer.replica
        assert replica.head is not None
        assert digest_of(replica.head) == event.manifest
        state = replica_digest(replica.outer, replica.state)
        assert self.states.setdefault(event.manifest, state) == state, f"replicas differ after round {event.round}"
        known = self.chains.setdefault((event.branch, event.round), replica.head)
        assert known == replica.head, f"two manifests for round {event.round}"

    @property
    def records(self) -> dict[Digest, GroupRecord]:
        """Return every record of a group that any process has heard of."""
        return {name: record for life in self.lives for name, record in life.peer._records._kept.items()}

    # --- what must hold after any scenario ---

    def check(self, *, has_branches: bool = False) -> None:
        """R2 and R3, of all that was committed, whoever was killed.

        Args:
            has_branches: the run was split, and each side leased the same samples.
        """
        self._check_samples(has_branches=has_branches)
        counted = self.ledger.counted(self.chains.values(), self.records)
        self.ledger.check(counted)
        self._check_once(counted)
        self._check_branches()
        rules.everybody_is_named([event for life in self.lives for event in life.committed], self.chains)

    def _check_samples(self, *, has_branches: bool) -> None:
        """No sample is trained on more often than it was leased. Where no round is waited for, one may lease what is
        trained on after the next."""
        heads = self.heads | (self.chains if self.run_config.method.wait == "ready" else {})
        trained = Counter(position for life in self.lives if not life.is_dead for position in self.positions[life])
        leased = Counter(
            position for head in heads.values() for lease in head.leases for position in lease.positions().tolist()
        )
        ahead = Counter({position: num for position, num in trained.items() if position >= _BEYOND})
        assert max(ahead.values(), default=1) == 1, "two trained on one sample ahead of all leases"
        assert has_branches or trained - ahead <= leased, "a sample was trained on more often than it was leased"

    def _check_once(self, counted: Mapping[Step, list[rules.Place]]) -> None:
        """In the history that goes on, with what it took in of branches, no step is counted twice; and who was there to
        the end carries none that is counted."""
        kept = self.kept()
        for step, places in counted.items():
            assert sum(rules.is_in(kept, place) for place in places) <= 1, f"{step} is counted twice: {places}"
        for book in self.ledger.books:
            if has_completed(book.life):
                own = history_of(book.life)
                for step in book.carried:
                    places = counted.get(step, [])
                    assert not any(rules.is_in(own, place) for place in places), f"{step} is counted and carried"

    def _check_branches(self) -> None:
        """Who went over from a branch has said so, and what that had counted is counted elsewhere, kept to be brought,
        or was said to be lost."""
        brought = [stretch for manifest in self.chains.values() for stretch in rules.brought(manifest)]
        for member in self.members.values():
            at_hand = [*brought, *kept_on_disk(member)]
            lives = ([event for _, event in life.events] for life in member.lives)
            for place in rules.promised(lives, self.kept()):
                is_there = any(rules.is_of(stretch, place) for stretch in at_hand)
                # Who was killed before it could save what it went over to is back where it came from.
                assert is_there or rules.is_in(history_of(member.life), place), f"{member.name} lost {place}"

    def kept(self) -> History:
        """Return the history of the process that went furthest, of those that ended by themselves."""
        ended = [life for life in self.lives if not life.is_dead and life.task.exception() is None]
        return history_of(max(ended, key=lambda life: life.outcome.committed_tokens))

    # --- members ---

    async def start(self, names: Iterable[str], wait_for: int | None = None, **options: Any) -> list[Member]:
        """Start members that the run begins with, the first of them its founder."""
        names = list(names)
        members = [self.member(name) for name in names]
        members[0].is_founder = True
        for member in members:
            self.launch(member, wait_for=len(names) if wait_for is None else wait_for, **options)
        return members

    def launch(  # type: ignore[override]
        self,
        member: Member,
        *,
        train_s: float = TRAIN_S,
        compute: Compute | None = None,
        on_batch: Callable[[Life], None] = lambda life: None,
        **options: Any,
    ) -> Life:
        """Start a process of `member`.

        Args:
            train_s: virtual seconds that a call of training takes.
            on_batch: called when a batch is read, before it is trained on.
        """
        life = super().launch(member, compute=compute or Inline(train_s), **options)
        self.positions[life], self.on_batch[life] = [], on_batch
        return life

    def kill(self, member: Member) -> None:
        """End the member's process as kill -9 does."""
        member.life.kill()

    async def freeze(self, member: Member, lasts_s: float) -> None:
        """Let the member's process stand still for so long, as between SIGSTOP and SIGCONT."""
        await member.life.freeze(lasts_s)

    def cut(self, one: Iterable[Member], other: Iterable[Member]) -> None:
        for a, b in itertools.product(one, other):
            self.network.partition(a.id, b.id)

    def heal(self, one: Iterable[Member], other: Iterable[Member]) -> None:
        for a, b in itertools.product(one, other):
            self.network.heal(a.id, b.id)

    async def done(self, *members: Member) -> list[Outcome]:
        return list(await asyncio.gather(*(member.life.task for member in members)))

    def cut_power(self, member: Member) -> None:
        """End the member's process as a power cut does: what it wrote and did not flush is gone as well."""
        self.kill(member)
        shutil.rmtree(member.folder.journal)

    def make_node(self, life: Life, passport: Passport, clock: Clock) -> Node:
        transport = self.network.transport(life.member.id)
        node = WatchedNode(passport, [transport], clock, life.emit, offload=inline)
        node.life, node.swarm = life, self
        return node

    def on_made(self, life: Life) -> None:
        self.ledger.open(life, self.positions[life])
        batches = life.peer._trainer._batches
        read = batches.at

        def at(positions: Any) -> Any:
            self.positions[life] += [int(position) for position in positions]
            if (head := life.peer.head) is not None:
                self.heads[head.branch, head.round] = head
            self.on_batch[life](life)
            return read(positions)

        batches.at = at  # type: ignore[method-assign]


def kept_on_disk(member: Member) -> list[Stretch]:
    """Return what a machine still keeps of branches that it has left."""
    path = member.folder.forks / "kept.bin"
    if not path.exists():
        return []
    kept = decode(path.read_bytes(), KeptBranches, max_nbytes=MAX_KEPT_NBYTES)
    return [stretch for each in kept.legacies for stretch in each.legacy.stretches]


def has_completed(life: Life) -> bool:
    return not life.is_dead and life.task.exception() is None and life.outcome.reason == "complete"


def history_of(life: Life) -> History:
    """Return what the state of a process is made of in the end."""
    replica = life.peer.replica
    assert replica.head is not None
    return history(replica.head, replica.charter)


def write_corpus(root: Path) -> Path:
    """Write a text of a few dozen kilobytes, of words that a model can learn something of."""
    sentence = "the warp holds and the weft goes over and under until thread on thread makes one cloth"
    words = sentence.split()
    text = " ".join(words[(index * index + index // 7) % len(words)] for index in range(8000))
    path = root / "corpus.txt"
    root.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text[start : start + 70] for start in range(0, len(text), 70)))
    return path
