"""A peer of one run: trains, takes part in rounds, keeps and gives the state, comes and goes.

    peer = Peer(run, place)
    outcome = await peer.found(wait_for=4)     # the run's maker
    outcome = await peer.join()                # everybody else

The main loop is short: train the leased samples, encode what they changed, announce it, make the outer step that the
members agree on, and go on. What a manifest did not count stays in the carry and goes into the next round. Everything
else happens beside it: requests for state and chain, branches, evaluation.

Failure:
- this peer missed rounds: it replays the results it finds, or fetches the whole state, and asks to be a member again.
- the majority is lost: after `orphan_after` those that remain open a branch.
- it is told to stop: it says goodbye, saves, and returns.

It does not know transports, nor how anything is shown.
"""

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft import __version__
from weft.clock import Clock
from weft.data import ShardStore, Tokenizer
from weft.data.batch import Batches
from weft.data.store import DataIndex
from weft.errors import DiskFull, WeftError
from weft.events import (
    CheckpointFailed,
    CheckpointSaved,
    Emit,
    Event,
    Notice,
    PeerStarted,
    PeerStopped,
    RoundCommitted,
    RoundMissed,
)
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.keys import Identity
from weft.model.config import num_parameters
from weft.net.heartbeat import Membership
from weft.net.membership import Gone, Left, Recovered, Suspected
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.net.tasks import Tasks
from weft.peer.branches import Branches
from weft.peer.chain import Chain, branch_name, genesis, open_branch
from weft.peer.checkpoint import Snapshot, save
from weft.peer.compute import Compute
from weft.peer.config import GENESIS, PeerConfig, RunConfig
from weft.peer.contribution import Carry
from weft.peer.donor import Donor
from weft.peer.evaluation import Evaluator
from weft.peer.fetch import ask_state, fetch_state
from weft.peer.home import PeerFolder
from weft.peer.messages import Chain as ChainAnswer
from weft.peer.messages import ChainRequest, Decision, Joining, Letter, RunBegin
from weft.peer.replica import Replica
from weft.peer.rounds import Rounds
from weft.peer.state import replica_digest
from weft.peer.trainer import Trainer, Work
from weft.sync.messages import Manifest, next_base
from weft.sync.method import Method
from weft.wire import digest_of

JOINING_S = 1.0  # between two requests to be counted in
JOINING_EXPIRES_S = 5.0  # who has not asked for so long is not counted in
LAG_S = 1.0  # without a decision for so long, look whether others are further
CALL_S = 10.0
MAX_EARLY = 256  # letters kept while this peer still fetches the state


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


class Peer:
    def __init__(self, run: RunConfig, place: Place) -> None:
        self.run = run
        self.place = place
        self.peer = place.node.peer
        self._method = Method(run.method, run.train.optimizer)
        self._replica = Replica(run, self._method, place.initial)
        self._batches = Batches(place.shards, place.index, "train", run.train.seq_len, run.seed)
        self._trainer = Trainer(run, place.settings, self._batches, self._emit_from_thread, place.clock)
        self._carry = Carry(self._method, self._trainer, self._replica)
        self._membership = Membership(place.node, place.clock, place.emit, self._heartbeat)
        self._membership.on_change(self._on_member)
        self._donor = Donor(place.node, self._replica, self._get_chain, place.compute, place.clock)
        self._evaluator = Evaluator(run, place, self._trainer, self._replica)
        self._rounds: Rounds | None = None
        self._stopping = asyncio.Event()
        self._stop_reason = ""
        self._joining: dict[PeerId, tuple[str, float]] = {}
        self._opening: asyncio.Queue[Manifest] = asyncio.Queue()
        self._state = "starting"
        self._work: Work | None = None
        self._num_done = 0  # steps of the present lease that are made
        self._saved_at = place.clock.now()
        self._traffic_before = (0, 0)
        self._expected: tuple[PeerId, ...] = ()  # members of the round to be decided
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        self._early: list[tuple[PeerId, Letter | Decision]] = []  # heard before this peer knew the head
        place.node.on_note(Letter, self._on_letter)
        place.node.on_note(Decision, self._on_decision)
        place.node.on_note(Joining, self._on_joining)
        place.node.on_note(RunBegin, self._on_opening)

    # --- life ---

    async def found(self, *, wait_for: int = 1, snapshot: Snapshot | None = None) -> Outcome:
        """Begin the run once `wait_for` peers (this one included) are here, or go on where `snapshot` stands."""
        await self._start(snapshot)
        try:
            head = self._replica.head
            if head is None:
                self._state = "waiting for peers"
                head = await self._gather(wait_for)
            elif await self._find_others():
                return await self._take_part(await self._enter())
            else:
                head = self._go_on_alone(head)
            return await self._take_part(head)
        finally:
            await self._close()

    async def join(self, *, snapshot: Snapshot | None = None) -> Outcome:
        """Take part in a run that others keep."""
        await self._start(snapshot)
        try:
            return await self._take_part(await self._enter())
        finally:
            await self._close()

    def stop(self, reason: str) -> None:
        """Say goodbye, save and return from `found` or `join`, soon."""
        self._stop_reason = self._stop_reason or reason
        self._stopping.set()

    # --- the main loop ---

    async def _take_part(self, head: Manifest) -> Outcome:
        rounds = self._rounds = self._make_rounds(head)
        branches = Branches(self.run, self.place.node, rounds, self.place.clock, self.place.emit, self._enter_branch)
        self._tasks.spawn(branches.watch())
        self._tasks.spawn(self._watch_lag())
        self._expected = head.members
        rounds.begin()
        await self._read_early(rounds)
        while not self._stopping.is_set() and not self._is_complete():
            if not rounds.is_member:
                await self._be_counted_in(rounds)
                continue
            await self._train(rounds)
            await self._settle_all(rounds)
            if self._stopping.is_set() or self._is_complete() or not rounds.is_member:
                continue
            await self._offer(rounds)
            self._state = "syncing"
            await self._settle_next(rounds)
        return await self._finish(rounds)

    async def _train(self, rounds: Rounds) -> None:
        """Make the inner steps that are left of this peer's lease, unless its carry is already late for a round."""
        positions = self._leased()[self._num_done * self.run.train.batch_size :]
        if not len(positions):
            return
        self._state = "training"
        tokens, members = rounds.chain.head.committed_tokens, len(rounds.chain.head.members)
        if self._carry.sends_gradient:
            gradient, work = await self.place.compute.train(lambda: self._trainer.gradient(positions, tokens, members))
            self._carry.add_gradient(gradient, work.num_tokens)
        else:
            work = await self.place.compute.train(
                lambda: self._trainer.train(positions, tokens, members, self._stopping.is_set)
            )
            self._carry.add_steps(work.num_tokens)
        self._work = work
        self._num_done += work.num_steps

    async def _offer(self, rounds: Rounds) -> None:
        parts = rounds.parts
        payload = await self.place.compute.serve(lambda: self._carry.encode(parts))
        if rounds.parts == parts and rounds.is_member:
            self._carry.offered = rounds.announce(self._carry.tokens, payload)

    async def _settle_all(self, rounds: Rounds) -> None:
        while not rounds.decided.empty():
            await self._settle(rounds, rounds.decided.get_nowait())

    async def _settle_next(self, rounds: Rounds) -> None:
        """Wait for the next decision, or for the order to stop, and make the outer step."""
        began = self.place.clock.now()
        deciding = asyncio.ensure_future(rounds.decided.get())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((deciding, stopping), return_when=asyncio.FIRST_COMPLETED)
            if deciding.done():
                await self._settle(rounds, deciding.result(), began)
        finally:
            for waiting in (deciding, stopping):
                waiting.cancel()
        await self._settle_all(rounds)

    async def _settle(self, rounds: Rounds, manifest: Manifest, began: float | None = None) -> None:
        """Make the outer step of a decided round; what it did not count stays in the carry."""
        mine = next((each for each in manifest.contributions if each.peer == self.peer), None)
        is_counted = mine is not None and mine.parts == self._carry.offered
        results = await rounds.results(manifest) if manifest.contributions else ()
        await self.place.compute.serve(
            lambda: self._carry.settle(lambda: self._replica.apply(manifest, results), is_counted)
        )
        self._carry.offered = None
        self._num_done = 0
        if manifest.contributions:
            self._tell_commit(manifest, began)
            if not is_counted:
                reason = "it was not ready in time" if mine is None else "another payload of it was counted"
                self.place.emit(RoundMissed(round=manifest.round, carried_tokens=self._carry.tokens, reason=reason))
            if manifest.leader == self.peer and not self._is_complete():
                await self._evaluator.maybe(manifest)
        every_s = self.place.settings.checkpoint_every_s
        if every_s and self.place.clock.now() - self._saved_at >= every_s:
            await self._save()

    # --- coming in ---

    async def _gather(self, wait_for: int) -> Manifest:
        """Wait until enough peers hold the initial state, and make the run's first manifest."""
        while len(self._askers(GENESIS)) + 1 < wait_for:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._stopping.wait()
                    break
        members = [self.peer, *self._askers(GENESIS)]
        base = genesis(self.run.run, self.peer, self.run.quota)
        opening = open_branch(base, members, self.peer, base.branch, self.run.quota)
        self._replica.head = opening
        for member in members:
            self.place.node.post(member, RunBegin(opening=opening))
        return opening

    async def _enter(self) -> Manifest:
        """Return the head to go on from: the run's first manifest, or that of a state fetched from a member."""
        self._state = "joining"
        while True:
            donor, offer = await ask_state(self.place.node, self._linked())
            if offer.head is not None:
                break
            for peer in self._linked():
                self.place.node.post(peer, Joining(branch=self.run.run, manifest=GENESIS))  # type: ignore[arg-type]
            with suppress(TimeoutError):
                async with asyncio.timeout(JOINING_S):
                    opening = await self._opening.get()
                    if self.peer in opening.members:
                        self._replica.head = opening
                        return opening
        vectors = {name: vector.clone() for name, vector in self._replica.vectors().items()}
        head = await fetch_state(self.place.node, donor, offer, vectors, self.place.clock, self.place.emit)

        def take_over() -> None:
            self._replica.load(head, vectors)
            self._carry.tokens = Tokens(0)
            self._trainer.set_local(self._replica.outer)

        await self.place.compute.serve(take_over)
        return head

    async def _be_counted_in(self, rounds: Rounds) -> None:
        """Follow the chain from outside and ask every member to count this peer in."""
        self._state = "joining"
        head = rounds.chain.head
        for peer in self._linked():
            self.place.node.post(peer, Joining(branch=head.branch, manifest=digest_of(head)))
        await asyncio.sleep(JOINING_S / 2)
        if not await self._catch_up(rounds):
            rounds.restart(await self._enter())
        await self._settle_all(rounds)

    async def _catch_up(self, rounds: Rounds) -> bool:
        """Follow what was decided without this peer; return False where too much was to replay it."""
        base = rounds.chain.base
        answers = 0
        for peer in self._linked():
            request = ChainRequest(branch=base.branch, after=rounds.chain.head.round)
            try:
                answer = await self.place.node.call(peer, request, ChainAnswer, deadline_s=CALL_S)
            except WeftError:
                continue
            if answer.certificates is None:
                continue
            answers += 1
            if any(rounds.follow(certificate) for certificate in answer.certificates):
                return True
        return answers > 0 or not self._linked()

    async def _watch_lag(self) -> None:
        """A member that missed a decision finds it in another's chain."""
        while True:
            await asyncio.sleep(LAG_S)
            rounds = self._rounds
            if rounds is None or not rounds.is_member:
                continue
            head = rounds.chain.head
            beats = [self._membership.heartbeat_of(peer) for peer in self._membership.alive()]
            if any(beat is not None and beat.branch == head.branch and beat.round > head.round + 1 for beat in beats):
                await self._catch_up(rounds)

    async def _find_others(self) -> bool:
        """Return whether anybody of the run answers at a remembered address."""
        known = [peer for peer in self.place.node.known_addresses() if peer != self.peer]
        if not known:
            return False
        with suppress(WeftError):
            await self.place.node.connect_any(known)
        return bool(self._linked())

    def _go_on_alone(self, head: Manifest) -> Manifest:
        """Return the head where nobody answers: the same where this peer was alone, else a branch of its own."""
        if head.members == (self.peer,):
            return head
        base = next_base(head, self.run.quota)
        opening = open_branch(base, [self.peer], self.peer, branch_name(base, [self.peer], self.peer), self.run.quota)
        self.place.emit(Notice(text="no other member answers: going on alone, as a branch of its own"))
        self._replica.head = opening
        return opening

    # --- what others say ---

    async def _on_letter(self, peer: PeerId, letter: Letter) -> None:
        if self._rounds is not None:
            self._rounds.on_letter(peer, letter)
        else:
            self._early = [*self._early, (peer, letter)][-MAX_EARLY:]

    async def _on_decision(self, peer: PeerId, decision: Decision) -> None:
        if self._rounds is not None:
            self._rounds.on_decision(decision)
        else:
            self._early = [*self._early, (peer, decision)][-MAX_EARLY:]

    async def _read_early(self, rounds: Rounds) -> None:
        early, self._early = self._early, []
        for peer, said in early:
            if isinstance(said, Letter):
                rounds.on_letter(peer, said)
            else:
                rounds.on_decision(said)

    async def _on_joining(self, peer: PeerId, joining: Joining) -> None:
        self._joining[peer] = (joining.manifest, self.place.clock.now())
        if self._rounds is not None and joining.branch == self._rounds.chain.head.branch:
            self._rounds.notice(peer, "joining")

    async def _on_opening(self, peer: PeerId, begin: RunBegin) -> None:
        if begin.opening.previous == GENESIS and self._rounds is None and begin.opening.leader == peer:
            self._opening.put_nowait(begin.opening)

    def _on_member(self, change: object) -> None:
        if self._rounds is None:
            return
        match change:
            case Suspected(peer=peer):
                self._rounds.notice(peer, "suspected")
            case Gone(peer=peer) | Left(peer=peer):
                self._rounds.notice(peer, "gone")
            case Recovered(peer=peer):
                self._rounds.notice(peer, "alive")

    def _enter_branch(self, opening: Manifest) -> None:
        if self._rounds is not None:
            self._rounds.restart(opening)
            self._rounds.decided.put_nowait(opening)

    # --- the end ---

    def _is_complete(self) -> bool:
        head = self._replica.head
        return head is not None and head.committed_tokens >= self.run.train.tokens

    async def _finish(self, rounds: Rounds) -> Outcome:
        is_complete = self._is_complete()
        reason = "complete" if is_complete else self._stop_reason
        self._state = "finishing" if is_complete else "leaving"
        await self._evaluator.finish(is_complete)
        if not is_complete and len(rounds.chain.head.members) > 1:
            rounds.leave()
        await self._membership.say_goodbye(reason)
        await self._save()
        self.place.emit(PeerStopped(reason=reason))
        head = rounds.chain.head
        sent, received = self._traffic()
        return Outcome(
            reason=reason,
            run=self.run,
            peer=self.peer,
            round=head.round,
            committed_tokens=head.committed_tokens,
            replica=replica_digest(self._replica.outer, self._replica.state),
            loss=self._evaluator.loss,
            nats_per_byte=self._evaluator.nats_per_byte,
            sample=self._evaluator.text,
            sent_nbytes=sent,
            received_nbytes=received,
            checkpoint=self.place.folder.checkpoint,
        )

    async def _save(self) -> None:
        """Write a checkpoint; a full disk is an event, and the one before stays."""
        try:
            saved = await self.place.compute.serve(lambda: save(self.place.folder.checkpoint, self._snapshot()))
        except DiskFull as error:
            self.place.emit(CheckpointFailed(path=str(self.place.folder.checkpoint), reason=str(error)))
        else:
            head = self._replica.head
            self.place.emit(
                CheckpointSaved(
                    path=str(self.place.folder.checkpoint),
                    round=Round(0) if head is None else head.round,
                    digest=digest_of(saved.replicated),
                    nbytes=saved.replicated.nbytes + saved.private.nbytes,
                )
            )
        self._saved_at = self.place.clock.now()

    def _snapshot(self) -> Snapshot:
        private = self._trainer.private_state()
        vectors = {name: vector for name, vector in private.items() if vector.is_floating_point()}
        counters = {name: int(vector.item()) for name, vector in private.items() if not vector.is_floating_point()}
        if not self._carry.sends_gradient:
            vectors["local"] = self._trainer.local()
        return Snapshot(
            config=self.run,
            tokenizer=self.place.tokenizer.to_bytes(),
            head=self._replica.head,
            replicated=self._replica.vectors(),
            private=vectors,
            counters={**counters, "uncounted_tokens": self._carry.tokens, "num_done": self._num_done},
        )

    def _restore(self, snapshot: Snapshot) -> None:
        """Go on exactly where the snapshot was taken."""
        self._replica.load(snapshot.head, snapshot.replicated)
        vectors, counters = dict(snapshot.private), dict(snapshot.counters)
        self._trainer.set_local(vectors.pop("local", self._replica.outer))
        self._carry.tokens = Tokens(counters.pop("uncounted_tokens"))
        self._num_done = counters.pop("num_done")
        state = {name: torch.tensor([number], dtype=torch.int64) for name, number in counters.items()}
        self._trainer.load_private_state({**vectors, **state})

    # --- small things ---

    async def _start(self, snapshot: Snapshot | None) -> None:
        place = self.place
        place.emit(
            PeerStarted(
                run=self.run.run,
                name=place.node.passport.name,
                software=f"weft {__version__}",
                device=place.settings.device,
                num_parameters=num_parameters(self.run.model),
            )
        )
        await place.compute.train(lambda: self._trainer.start(self._replica.outer))
        if snapshot is not None:
            await place.compute.train(lambda: self._restore(snapshot))
        await self._membership.start()

    async def _close(self) -> None:
        await self._tasks.aclose()
        if self._rounds is not None:
            await self._rounds.aclose()
        await self._membership.aclose()

    def _make_rounds(self, head: Manifest) -> Rounds:
        place = self.place
        chain = Chain(head, self.run.quota)
        rounds = Rounds(
            place.node,
            place.identity,
            chain,
            self._method,
            self._replica.outer.numel(),
            compute=place.compute,
            clock=place.clock,
            emit=place.emit,
            durable_path=place.folder.durable,
        )
        now = place.clock.now()
        for peer, (_, asked_at) in self._joining.items():
            if now - asked_at < JOINING_EXPIRES_S:
                rounds.notice(peer, "joining")
        return rounds

    def _get_chain(self) -> Chain | None:
        return None if self._rounds is None else self._rounds.chain

    def _leased(self) -> NDArray[np.int64]:
        head = self._replica.head
        leases = () if head is None else head.leases
        mine = [lease.positions() for lease in leases if lease.peer == self.peer]
        return np.concatenate(mine) if mine else np.empty(0, dtype=np.int64)

    def _linked(self) -> list[PeerId]:
        return sorted(self.place.node.peers)

    def _askers(self, manifest: Digest) -> list[PeerId]:
        now = self.place.clock.now()
        return [peer for peer, (held, at) in self._joining.items() if held == manifest and now - at < JOINING_EXPIRES_S]

    def _traffic(self) -> tuple[int, int]:
        meters = self.place.node.traffic.values()
        return sum(meter.sent_nbytes for meter in meters), sum(meter.received_nbytes for meter in meters)

    def _tell_commit(self, manifest: Manifest, began: float | None) -> None:
        sent, received = self._traffic()
        contributors = tuple(each.peer for each in manifest.contributions)
        present = set(contributors)
        self.place.emit(
            RoundCommitted(
                branch=manifest.branch,
                round=manifest.round,
                attempt=manifest.attempt,
                manifest=digest_of(manifest),
                contributors=contributors,
                left_out={
                    lease: "not ready in time, or its payload could not be had"
                    for lease in self._expected
                    if lease not in present
                },
                tokens=Tokens(sum(each.tokens for each in manifest.contributions)),
                committed_tokens=manifest.committed_tokens,
                sent_nbytes=sent - self._traffic_before[0],
                received_nbytes=received - self._traffic_before[1],
                duration_s=0.0 if began is None else self.place.clock.now() - began,
                work_s=0.0 if self._work is None else self._work.duration_s,
            )
        )
        self._traffic_before = (sent, received)
        self._expected = manifest.members

    def _heartbeat(self) -> Heartbeat:
        head = self._replica.head if self._rounds is None else self._rounds.chain.head
        work = self._work
        return Heartbeat(
            name=self.place.node.passport.name,
            branch=BranchId(self.run.run) if head is None else head.branch,
            round=Round(0) if head is None else head.round,
            manifest=None if head is None else digest_of(head),
            state=self._state,
            loss=None if work is None or math.isnan(work.mean_loss) else work.mean_loss,
            tokens_per_s=0.0 if work is None or not work.duration_s else work.num_tokens / work.duration_s,
        )

    def _emit_from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self.place.emit, event)
