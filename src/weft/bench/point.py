"""Plays one point of a bench and says what came of it: losses, bytes, time.

    point --play--> events of all peers --> one line

Its peers are production peers on a virtual clock, but that none writes samples, and what one evaluates the others do
not.
"""

import importlib.metadata
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from jaxtyping import Float32
from torch import Tensor

from weft.bench.log import COMPLETE, DIVERGED, BenchLine
from weft.bench.plan import Point
from weft.clock import cpu_s
from weft.codec.config import NonzeroConfig
from weft.cost import training as cost
from weft.data.batch import Batches
from weft.events import Entry, Evaluated, RoundCommitted, StepDone
from weft.ids import Digest
from weft.log import read_lines
from weft.model.flat import layout
from weft.pipeline.placement import num_first
from weft.run.config import RunConfig
from weft.run.staged import StagedConfig
from weft.sim.cost import Silent
from weft.sim.play import Played, history, play
from weft.sim.scenario import Kind, Scenario
from weft.store.chunks import raw
from weft.sync.merge.method import Scope, build_basis
from weft.sync.merge.reduce import codec_in, reply_codec_in
from weft.sync.records.tuning import tuned_method
from weft.sync.round.neighbours import mixing_of
from weft.training.learner import Measured, nothing
from weft.wire import digest

LAST = 10  # the training loss is that of the last so-many-th of the inner steps


@dataclass(frozen=True)
class Task:
    """A point to be played.

    Args:
        config: what its peers share.
        base: the folder that paths in the run file start from.
    """

    name: str
    point: Point
    config: RunConfig
    kinds: tuple[Kind, ...]
    base: Path


def measure(task: Task) -> BenchLine:
    """Play a point to its end.

    Raises:
        WeftError: the run cannot be made.
    """
    began, lines = cpu_s(), list[bytes]()
    scenario = Scenario(run="", kind=task.kinds, seed=task.point.seed)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        played = play(scenario, task.point.run_file, task.base, Path(folder), lines.append, partial(_Once, {}))
    return line_of(task, played, list(read_lines(lines, task.name)), cpu_s() - began)


def line_of(task: Task, played: Played, entries: Sequence[Entry], cpu_s: float) -> BenchLine:
    """Return what a play came to.

    Args:
        entries: what all its peers said, in order.
    """
    run, num_peers = task.config, len(played.machines)
    commits = [entry for entry in entries if isinstance(entry.event, RoundCommitted)]
    sent = _by_peer(commits, lambda event: event.sent_nbytes)
    received = _by_peer(commits, lambda event: event.received_nbytes)
    num_stages = run.stages if isinstance(run, StagedConfig) else 1
    steps = played.committed_tokens / (num_first(num_peers, num_stages) * run.tokens_per_step)
    spans = layout(run.model)
    num = spans.num_parameters
    last = next((entry.event for entry in reversed(entries) if isinstance(entry.event, Evaluated)), None)
    evaluated = last if (outcome := outcome_of(played)) == COMPLETE else None
    return BenchLine(
        digest=task.name,
        row=task.point.row,
        grid=msgspec.json.encode(task.point.values).decode(),
        seed=task.point.seed,
        peers=num_peers,
        outcome=outcome,
        rounds=played.num_rounds,
        steps=steps,
        committed_tokens=played.committed_tokens,
        trained_tokens=sum(machine.trained for machine in played.machines),
        parameters=num,
        train_loss=None if evaluated is None else _train_loss(entries, num_peers),
        heldout_loss=None if evaluated is None else evaluated.loss,
        nats_per_byte=None if evaluated is None else evaluated.nats_per_byte,
        sent_mean=sum(sent) / num_peers,
        sent_max=max(sent, default=0),
        received_mean=sum(received) / num_peers,
        received_max=max(received, default=0),
        bits=8 * sum(sent) / (num_peers * num * steps) if steps else None,
        payload_bits=8 * _payload_nbytes(run, played) / (num_peers * num * steps)
        if steps and num_stages == 1 and NonzeroConfig not in {type(run.method.codec), type(run.method.reply)}
        else None,
        ratio_bf16=_of_ring(sent, num, steps, 2),
        ratio_fp32=_of_ring(sent, num, steps, 4),
        virtual_s=commits[-1].at - entries[0].at if commits else 0.0,
        cpu_s=cpu_s,
        software=software(),
    )


def outcome_of(played: Played) -> str:
    """Return how a play ended, in a word or with the reason."""
    if played.broken:
        return f"broken: {played.broken[0]}"
    if any(machine.has_diverged for machine in played.machines):
        return DIVERGED
    reasons = {machine.end for machine in played.machines} - {COMPLETE}
    return f"failed: {min(reasons)}" if reasons else COMPLETE


def software() -> str:
    return f"weft {importlib.metadata.version('weft')}, torch {importlib.metadata.version('torch')}"


def _by_peer(commits: Iterable[Entry], nbytes: Callable[[Any], int]) -> list[int]:
    found: dict[str, int] = {}
    for entry in commits:
        found[entry.peer] = found.get(entry.peer, 0) + nbytes(entry.event)
    return list(found.values())


def _payload_nbytes(run: RunConfig, played: Played) -> float:
    """Return what payloads and results of all rounds come to, sent by all peers together, with equal parts."""
    spans, num_peers, total, method = layout(run.model), len(played.machines), 0.0, run.method
    basis = build_basis(method.basis, tuple(span.shape for span in spans))
    scope = Scope(basis.num_sent(spans.num_parameters), method.fragments)
    for manifest in history(played.manifests):
        num_counted, round = len(manifest.contributions), manifest.round
        if manifest.is_gossip:
            num_taken = sum(map(len, mixing_of(method, num_counted, run.run, round)))
            total += num_taken * codec_in(method, round).nbytes(method.num_gossiped(spans.num_parameters))
        else:
            num, of_all = scope.num_sent(round), method.of_mean()
            payload, result = codec_in(of_all, round).nbytes(num), reply_codec_in(of_all, round).nbytes(num)
            reduced = num_counted * payload / num_peers + result
            total += (num_peers - 1) * (num_counted * payload if method.is_merged_by_all else reduced)
        if manifest.tuned is not None:
            method = tuned_method(method, manifest.tuned)
    return total


def _train_loss(entries: Sequence[Entry], num_peers: int) -> float:
    by_peer: dict[str, list[float]] = {}
    for entry in entries:
        if isinstance(entry.event, StepDone):
            by_peer.setdefault(entry.peer, []).append(entry.event.loss)
    assert len(by_peer) == num_peers
    return mean(loss for losses in by_peer.values() for loss in losses[-max(1, len(losses) // LAST) :])


def _of_ring(sent: Sequence[int], num: int, steps: float, value_nbytes: int) -> float | None:
    """Return what the mean peer sent, as a share of what each would in a ring all-reduce of all gradients."""
    num_peers = max(len(sent), 1)
    ring = cost.ring_ddp_traffic(num, num_peers, value_nbytes=value_nbytes).sent_nbytes * steps
    return sum(sent) / num_peers / ring if ring else None


class _Once(Silent):
    """Evaluates each vector once for all peers of a process.

    Args:
        evaluated: what was found, by digest of the vector.
    """

    def __init__(self, evaluated: dict[Digest, Measured], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._evaluated = evaluated

    def evaluate(
        self, vector: Float32[Tensor, " num"], batches: Batches, num_windows: int, between: Callable[[], None] = nothing
    ) -> Measured:
        key = digest(raw(vector))
        if key not in self._evaluated:
            self._evaluated[key] = super().evaluate(vector, batches, num_windows, between)
        return self._evaluated[key]
