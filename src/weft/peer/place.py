"""What a peer stands on, and what it leaves: the records at its two ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from weft.clock import Clock
from weft.data import DataIndex, ShardStore, Tokenizer
from weft.data.batch import Batches
from weft.events import Emit
from weft.ids import Digest, PeerId, Round, Tokens
from weft.keys import Identity
from weft.net.claims import ClaimReader
from weft.net.node import Node
from weft.peer.compute import Compute
from weft.peer.config import RunConfig
from weft.peer.home import PeerFolder
from weft.peer.journal import Journal
from weft.peer.machine import PeerConfig
from weft.peer.trainer import Trainer
from weft.sync.acts import Succeed

MakeTrainer = Callable[[RunConfig, PeerConfig, Batches, Emit, Clock], Trainer]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a peer stands on: everything with effects, made by `launch` or by a scenario."""

    node: Node
    identity: Identity
    folder: PeerFolder
    settings: PeerConfig
    tokenizer: Tokenizer
    shards: ShardStore  # where the training data lies: the run's, or this machine's own in a private run
    index: DataIndex  # of that data
    initial: Tensor  # becomes the outer parameters
    clock: Clock
    compute: Compute
    emit: Emit
    make_trainer: MakeTrainer = Trainer
    reader: ClaimReader | None = None  # of claims of membership, where several peers of one process share it
    journal: Journal = field(init=False)  # one: what a checkpoint frees, who merges fills again

    def __post_init__(self) -> None:
        journal = Journal(self.folder.journal, is_on=self.settings.checkpoint_every_s > 0)
        object.__setattr__(self, "journal", journal)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    reason: str  # "complete" or why it stopped
    run: RunConfig
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
