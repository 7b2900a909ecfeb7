"""A run's n peers in one process, one after another: what it learns, without what it costs to talk.

    for each round: lease -> Trainer.train -> Method.contribution -> codec -> Merger -> codec -> Method.apply

Leases, schedule, inner and outer optimizer, codecs and merge are production code, called in the order in which a peer
calls them where every member is counted in every round. So the outer parameters have the same bits as those of real
peers on this machine, which `benchmarks/reports/shakespeare.md` checks. It does not know rounds, sockets or time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.clock import SystemClock
from weft.config import from_tree, load_tree, replace_field
from weft.data.assign import leases
from weft.data.batch import Batches
from weft.ids import Digest, PeerId, Round
from weft.model.flat import layout
from weft.run.config import RunConfig, RunFile
from weft.run.genesis import initial, seal
from weft.run.machine import PeerConfig
from weft.store.chunks import replica_digest
from weft.store.home import Home
from weft.sync.merge.method import OUTER, Method, Scope
from weft.sync.merge.outer import State, StepContext
from weft.sync.merge.reduce import Merger, Replies, coding_in, decode_parts, encode_payload, reply_codec_in
from weft.sync.method.schedule import lr
from weft.sync.records.parts import cut
from weft.training.learner import Work
from weft.training.trainer import Trainer
from weft.wire import Buffer

SETTINGS = PeerConfig(device="cpu", precision="fp32", threads=1)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What n peers come to."""

    num_peers: int
    num_rounds: int
    committed_tokens: int
    train_loss: float  # mean over the last round's steps, nats per token
    loss: float  # of the outer parameters on held-out text, nats per token
    nats_per_byte: float
    heldout_tokens: int  # that `loss` is the mean over
    replica: Digest
    payload_nbytes: float  # that a peer sends in a round, and receives: of payloads and results, with equal parts
    outer: Tensor
    cpu_s: float  # of this process, evaluation included


def read_run_file(path: Path, overrides: dict[str, object]) -> RunFile:
    """Return the run file at `path` with fields, named with dots, set otherwise."""
    tree = load_tree(path)
    for dotted, value in overrides.items():
        replace_field(tree, dotted, value)
    return from_tree(tree, RunFile, where=str(path))


Forge = Callable[[int, list[Tensor]], None]  # changes, in a round, what members have trained


def simulate(
    run_file: RunFile,
    base: Path,
    home: Home,
    on_round: Callable[[int, float], None] = lambda _number, _loss: None,
    forge: Forge = lambda _number, _deltas: None,
) -> Simulated:
    """Train the run with `run_file.peers` peers, all of them counted in every round.

    Args:
        base: the folder that paths in the run file start from.
        home: where shards are kept; a second run on the same corpus finds them there.
        on_round: told each round's number and the peers' mean training loss.
        forge: what some members bring in place of what they have trained.
    """
    began = time.process_time()
    torch.set_num_threads(1)
    run = seal(run_file, base, home, lambda _event: None).config
    outer = initial(run, home)
    assert outer is not None  # it was sealed here
    swarm = _Swarm(run, home, outer, run_file.peers, forge)
    tokens, number, loss = 0, 0, float("nan")
    while tokens < run.train.tokens:
        number += 1
        done, loss = swarm.round(number, tokens)
        tokens += done
        on_round(number, loss)
    heldout = Batches(home.shards, run.data, "heldout", run.train.seq_len, run.seed)
    heldout_loss, num_heldout, *_ = swarm.trainers[0].evaluate(outer, heldout, run.train.evaluate_windows)
    return Simulated(
        num_peers=run_file.peers,
        num_rounds=number,
        committed_tokens=tokens,
        train_loss=loss,
        loss=heldout_loss,
        nats_per_byte=run.data.nats_per_byte(heldout_loss),
        heldout_tokens=num_heldout,
        replica=replica_digest(outer, swarm.state),
        payload_nbytes=swarm.sent_nbytes / number / run_file.peers,
        outer=outer,
        cpu_s=time.process_time() - began,
    )


class _Swarm:
    """n trainers and the one state they all would hold."""

    def __init__(self, run: RunConfig, home: Home, outer: Tensor, num_peers: int, forge: Forge) -> None:
        self.run = run
        self._forge = forge
        self.outer = outer
        self.method = Method(run.method, run.train.optimizer, tuple(span.shape for span in layout(run.model)))
        self.state: State = self.method.init(outer.numel())
        self.trainers = [_trainer(run, home, outer) for _ in range(num_peers)]
        self._quotas = {PeerId(f"{peer:064x}"): run.quota for peer in range(num_peers)}
        self._cursor = 0
        self._merged = torch.empty_like(outer)
        self._errors: dict[Trainer, Tensor] = {}
        self.sent_nbytes = 0.0  # by all
        self._replies = [Replies(Scope(outer.numel())) for _ in range(num_peers)]

    def round(self, number: int, tokens: int) -> tuple[int, float]:
        """Train, average and step; return the tokens trained on and their mean loss."""
        granted, self._cursor = leases(self._cursor, self._quotas)
        parts = cut(self.outer.numel(), [1] * len(self.trainers))
        choices = self.method.choices
        mergers = [Merger(len(part), coding_in(choices, number)) for part in parts]
        done, losses = 0, 0.0
        deltas, works = list[Tensor](), list[Work]()
        for trainer, lease in zip(self.trainers, granted, strict=True):
            if self.run.method.send == "gradient":
                trained, work = trainer.gradient(lease.positions(), tokens, len(self.trainers))
            else:
                work = trainer.train(lease.positions(), tokens, len(self.trainers))
                trained = trainer.local()
            deltas.append(self.method.delta(self.outer, trained).clone())
            works.append(work)
        self._forge(number, deltas)
        known, scope = {OUTER: self.outer, **self.state}, Scope(self.outer.numel())
        for trainer, delta, work in zip(self.trainers, deltas, works, strict=True):
            kept = self._errors.get(trainer)
            payload, left = encode_payload(self.method, scope, known, delta, kept, parts, number)
            if left is not None:
                self._errors[trainer] = left
            self.sent_nbytes += sum(map(_nbytes, payload)) * (1 - 1 / len(parts))
            for merger, encoded in zip(mergers, payload, strict=True):
                merger.add(work.num_tokens, encoded)
            done += work.num_tokens
            losses += work.mean_loss * work.num_tokens
        results = []
        for reply, merger, part in zip(self._replies, mergers, parts, strict=True):
            merged = reply.encode(merger.merged(), part, Round(number), choices)
            reply.settle(Round(number), [merged.digest])
            results.append(merged.encoded)
            self.sent_nbytes += _nbytes(merged.encoded) * (len(parts) - 1)
        decode_parts(reply_codec_in(choices, number), results, parts, self._merged)
        self.method.apply(self.outer, self.state, self._merged, self._context(number, tokens + done))
        for trainer in self.trainers:
            trainer.set_local(self.outer)
        return done, losses / done

    def _context(self, number: int, committed_tokens: int) -> StepContext:
        """As `peer.replica` makes it."""
        train = self.run.train
        return StepContext(
            number=number,
            lr=lr(train.schedule, committed_tokens),
            num_decayed=layout(self.run.model).num_decayed,
            max_norm=train.clip if self.run.method.send == "gradient" else None,
        )


def _nbytes(data: Buffer) -> int:
    return memoryview(data).nbytes


def _trainer(run: RunConfig, home: Home, outer: Tensor) -> Trainer:
    batches = Batches(home.shards, run.data, "train", run.train.seq_len, run.seed)
    trainer = Trainer(run, SETTINGS, batches, lambda _event: None, SystemClock())
    trainer.start(outer)
    return trainer
