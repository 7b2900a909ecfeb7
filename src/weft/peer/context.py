"""What a peer stands on, and what it leaves: the records at its two ends."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from weft.clock import Clock
from weft.data.batch import Batches
from weft.data.corpus import Split
from weft.data.store import DataIndex, ShardStore
from weft.data.tokenizer import Tokenizer
from weft.events import Emit, Preferred
from weft.ids import Digest, PeerId, Round, Tokens
from weft.keys import Identity
from weft.net.membership.gossip import ClaimReader
from weft.net.node import Node
from weft.peer.companion import Companion
from weft.run.config import Genesis, RunConfig
from weft.run.frozen import LoadFrozen
from weft.run.machine import PeerConfig
from weft.store.home import PeerFolder
from weft.store.journal import Journal
from weft.store.pool import Pool
from weft.sync.records.acts import Succeed
from weft.tasks import Compute
from weft.texts.beside.serving import Serving
from weft.training.learner import Learner


class Trainers(Protocol):
    """Who makes a peer's inner steps: this process, or several."""

    has_model: bool  # whether this process has all of the model

    def check_fits(self, run: RunConfig, settings: PeerConfig) -> None:
        """Refuse a run that this machine cannot train.

        Raises:
            ConfigError: it is of a kind that is not trained so, there is no such device, or no room for texts is left
                of what they may take; TooLarge: it does not fit.
        """
        ...

    def memory(self, folder: PeerFolder) -> Pool:
        """Return memory for what is large and is not held for long: states, results."""
        ...

    def held(self, vector: Tensor, folder: PeerFolder) -> Tensor:
        """Return the outer parameters where they are kept."""
        ...

    def learner(
        self, run: RunConfig, settings: PeerConfig, batches: Batches, emit: Emit, clock: Clock, frozen: LoadFrozen
    ) -> Learner: ...


MakeTrainer = Callable[[RunConfig, PeerConfig, Batches, Emit, Clock, LoadFrozen], Learner]  # as `learner` above


@dataclass(frozen=True)
class Data:
    """What a peer trains on."""

    tokenizer: Tokenizer
    store: ShardStore  # where it lies: the run's, or this machine's own in a private run
    index: DataIndex
    came_with: bytes = b""  # the blob of what came with the model; empty: nothing did

    def batches(self, run: RunConfig, split: Split) -> Batches:
        """Return the windows of `run` as it began.

        Raises:
            DataError: shards are missing, or there is not one window.
        """
        return Batches(self.store, self.index, split, run.train.seq_len, run.seed)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a peer stands on: everything with effects, made by `launch` or by a scenario."""

    node: Node
    identity: Identity
    folder: PeerFolder
    settings: PeerConfig
    data: Data | None  # None: members train in loops of their own
    initial: Tensor  # becomes the outer parameters
    clock: Clock
    compute: Compute
    emit: Emit
    make_learner: Callable[[Emit], Learner]  # told what to tell of steps
    memory: Pool = field(default_factory=lambda: Pool(0))  # for what is read, fetched or handed out, not for long
    reader: ClaimReader | None = None  # of claims of membership, where several peers of one process share it
    companion: Companion | None = None  # None: this peer trains a whole model
    texts: Serving | None = None  # draws texts of the whole model; None: this peer draws none, or only of stages
    learner_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # while it is another's, or is read and moved
    journal: Journal = field(init=False)  # one: what a checkpoint frees, who merges fills again

    def __post_init__(self) -> None:
        journal = Journal(self.folder.journal, is_on=self.settings.checkpoint_every_s > 0, memory=self.memory)
        object.__setattr__(self, "journal", journal)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    reason: str  # "complete" or why it stopped
    run: Genesis
    peer: PeerId
    round: Round
    committed_tokens: Tokens
    replica: Digest
    loss: float | None  # nats per token on held-out text, of the outer parameters
    nats_per_byte: float | None
    sample: str | None
    sent_nbytes: int
    received_nbytes: int
    checkpoint: Path
    successor: Succeed | None = None  # the run that goes on where this one ends
    evaluated_at: Round | None = None  # the round that loss and nats_per_byte are of
    preferred: Preferred | None = None  # of pairs of answers, after that round
    reward: float | None = None  # of answers to tasks
