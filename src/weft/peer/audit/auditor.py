"""An auditor's part: it draws, asks, does the steps again, and says what came of it.

    decided    a ticket of its own signature draws what it audits (`weft.verify.draw`)
    asked      the state before the steps, checked against the work's trace; where they are the first of a segment,
               what that began with; and always the state that the payload was made of
    done       the same steps on this machine
    sealed     the digest of what it came to, and of a number that it keeps: before it is shown the worker's
    opened     what the worker came to: equal, or as near as two honest machines are, or not

    found      equal | differs | unanswered

Failure:
- the worker does not answer within `ANSWER_ROUNDS` rounds, or shows what it has not named: unanswered.
- this machine cannot do the steps (no memory, paused): it says nothing.
- what a segment began at is not known here, as of rounds before this peer came: that part is believed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from msgspec import UNSET
from torch import Tensor

from weft import rng
from weft.errors import DataError, NetError, NotFinite, OutOfMemory, PeerError, Refused, WireError
from weft.ids import Digest, PeerId, Round
from weft.ledger.tree import is_leaf
from weft.peer.audit.heads import Head, Heads
from weft.peer.audit.steps import ERROR, LOCAL, repeat
from weft.peer.context import Context
from weft.peer.group.records import lease_of
from weft.peer.messages import AuditAnswer, AuditOpened, AuditRequest, AuditSealed, NamedState
from weft.peer.round.driver import RoundDriver
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import StateClient
from weft.run.amend import amended
from weft.run.trust import AuditedTrust
from weft.store.chunks import state_index
from weft.store.index import MAX_INDEX_NBYTES, StateIndex, VectorIndex
from weft.sync.merge.method import OUTER, Method
from weft.sync.merge.reduce import cut, encode_payload
from weft.sync.records.acts import Finding, Outcome
from weft.sync.records.messages import Manifest, payload_of
from weft.sync.records.work import Link, Work, link, link_from, num_links, num_states, state_before
from weft.tasks import Tasks
from weft.training.trainer import Trainer
from weft.verify.draw import Draw, drawn
from weft.verify.judge import threshold
from weft.wire import Buffer, Record, Signed, decode, digest, digest_of, seal

ANSWER_ROUNDS = 4
MAX_BEGUN = 1024  # audits that are remembered
ASK_AGAIN_S = 1.0
CALL_S = 20.0
SALT_NBYTES = 32

A = TypeVar("A", bound=Record)
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What an audit has found."""

    outcome: Outcome
    why: str = ""
    distance: float = 0.0  # between both states, where steps were done again: relative to what they changed


@dataclass(frozen=True)
class Audit:
    """One that is under way."""

    round: Round  # whose manifest counts it
    name: Digest
    work: Work
    link: Link
    ticket: Signed  # its own draw, or another's verdict
    until: Round  # then it is not answered


class NotShown(Exception):
    """The worker does not show what it named, or not yet."""


class Unknown(Exception):
    """What the steps began at is not known here."""


class Differs(Exception):
    """It has named something that is not so."""


class Auditor:
    """Of one peer.

    Args:
        on_found: told what came of each audit.
    """

    def __init__(
        self,
        context: Context,
        trainer: Trainer,
        replica: Replica,
        rounds: RoundDriver,
        heads: Heads,
        tasks: Tasks,
        on_found: Callable[[Audit, Found], None],
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._replica = replica
        self._rounds = rounds
        self._heads = heads
        self._tasks = tasks
        self._on_found = on_found
        self._client = StateClient(context.node, context.compute, context.clock)
        self._begun: dict[tuple[Digest, int], None] = {}  # works and states before steps: each is looked at once
        self._one = asyncio.Lock()  # one after the other: each takes a state's memory

    def follow(self, manifest: Manifest) -> None:
        """Draw what this peer audits of a round that is decided, and whose outer step is made."""
        me, name, audits = self._context.node.peer, digest_of(manifest), self._replica.charter.audits
        electorate = self._heads.electorate(name)
        if not audits or me not in electorate:
            return
        draw = Draw(run=manifest.run, branch=manifest.branch, round=manifest.round, manifest=name)
        ticket = seal(self._context.identity, draw)
        for each in manifest.contributions:
            if each.work is UNSET or each.peer == me:
                continue
            work = self._rounds.works.known(Digest(each.work))
            if work is None:
                continue
            num = num_links(work.segments, audits.trace_every)
            number = drawn(ticket.signature, Digest(each.work), audits.rate, len(electorate), num)
            if number is not None:
                drawn_link = link(work.segments, audits.trace_every, number)
                self._begin(manifest.round, Digest(each.work), work, drawn_link, ticket)

    def look_again(self, letter: Signed, verdict: Finding) -> bool:
        """Audit what another has found a fault with; return whether it can be done here."""
        audits, work = self._replica.charter.audits, self._rounds.works.known(Digest(verdict.work))
        if not audits or work is None or work.peer != verdict.peer:
            return False
        doubted = link_from(work.segments, audits.trace_every, verdict.before)
        if doubted is None or self._heads.counted_in(Digest(verdict.work)) != verdict.round:
            return False
        self._begin(verdict.round, Digest(verdict.work), work, doubted, letter)
        return True

    def _begin(self, round: Round, name: Digest, work: Work, link: Link, ticket: Signed) -> None:
        if (name, link.before) in self._begun:
            return
        self._begun[name, link.before] = None
        for forgotten in list(self._begun)[:-MAX_BEGUN]:
            del self._begun[forgotten]
        until = Round(self._rounds.chain.head.round + ANSWER_ROUNDS)
        self._tasks.spawn(self._run(Audit(round, name, work, link, ticket, until)))

    async def look(self, audit: Audit) -> Found | None:
        """Do an audit; None: it cannot be done here."""
        peer, reason = PeerId(audit.work.peer), ""
        while self._rounds.chain.head.round < audit.until and peer in self._rounds.chain.base.electorate:
            try:
                return await self._look(audit)
            except Differs as error:
                return Found("differs", str(error))
            except (Unknown, OutOfMemory):
                return None
            except (NotShown, PeerError, NetError, Refused) as error:
                reason = str(error)
            await asyncio.sleep(ASK_AGAIN_S)
        return Found("unanswered", reason) if peer in self._rounds.chain.base.electorate else None

    async def _run(self, audit: Audit) -> None:
        if not self._trainer.is_parked and (found := await self.look(audit)) is not None:
            self._on_found(audit, found)

    # --- step by step ---

    async def _look(self, audit: Audit) -> Found:
        self._check_claim(audit.work)
        answer = await self._asked(audit)
        assert answer.before is not None
        assert answer.last is not None
        work, link = audit.work, audit.link
        count = num_states(work.segments, self._trace_every)
        before = await self._index(audit, answer.before, link.before, count, work)
        last = await self._index(audit, answer.last, count - 1, count, work)
        head = self._heads.known(Digest(work.segments[link.segment].head))
        if head is None:
            raise Unknown
        holder = PeerId(work.segments[link.segment].holder)
        if holder != work.peer and len(lease_of(head.manifest.leases, PeerId(work.peer))):
            raise Differs("it trained on what was leased to another")
        async with self._one:
            if link.first == 0:
                await self._check_begin(audit, answer, before, head)
            await self._check_payload(audit, last)
            state, mine = await self._repeated(audit, before, head)
        return await self._compared(audit, state, mine, count)

    async def _repeated(
        self, audit: Audit, before: StateIndex, head: Head
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the state before the steps, and the one that this machine comes to."""
        work, link = audit.work, audit.link
        state, outer = await self._pulled(audit, before), None
        if self._replica.config.method.proximal:
            outer = (await self._pulled(audit, _alone(head.outer)))[OUTER]
        num_before = work.num_before + sum(segment.num_steps for segment in work.segments[: link.segment])
        segment, run = work.segments[link.segment], self._replica.run
        try:
            mine = await self._context.compute.train(
                lambda: repeat(self._trainer, run, head, segment, state, outer, num_before, link.first, link.num_steps)
            )
        except DataError as error:
            raise Differs(str(error)) from None
        except NotFinite as error:
            raise Differs(f"its state is none to go on from: {error}") from None
        return state, mine

    async def _compared(self, audit: Audit, before: dict[str, Tensor], mine: dict[str, Tensor], count: int) -> Found:
        name, salt = digest_of(state_index(mine)), rng.fresh_secret(SALT_NBYTES)
        sealed = digest(salt + bytes.fromhex(name) + bytes.fromhex(self._context.node.peer))
        request = AuditSealed(work=audit.name, ticket=audit.ticket, seal=sealed)

        def opened(answer: AuditOpened) -> NamedState | str:
            return answer.after or "it does not show what it came to"

        after = await self._until(audit, request, AuditOpened, opened)
        index = await self._index(audit, after, audit.link.before + 1, count, audit.work)
        if after.state == name:
            return Found("equal")
        theirs = (await self._pulled(audit, index, {LOCAL}))[LOCAL]
        moved = float((mine[LOCAL] - before[LOCAL]).double().norm())
        apart = float((theirs - mine[LOCAL]).double().norm())
        distance = apart / moved if moved else float("inf") if apart else 0.0
        trust = self._replica.run.trust
        assert isinstance(trust, AuditedTrust)
        if distance <= threshold(trust.numerics, audit.link.num_steps):
            return Found("equal", distance=distance)
        return Found("differs", "it came to another state by these training steps", distance)

    def _check_claim(self, work: Work) -> None:
        """Check that so many steps are as many tokens as are claimed."""
        heads = [self._heads.known(Digest(segment.head)) for segment in work.segments]
        known = [head.charter.settings.tokens_per_step for head in heads if head is not None]
        if len(known) == len(work.segments):
            steps = [segment.num_steps for segment in work.segments]
            if sum(num * each for num, each in zip(steps, known, strict=True)) != work.tokens:
                raise Differs("it claims other tokens than its training steps take")

    async def _check_begin(self, audit: Audit, answer: AuditAnswer, before: StateIndex, head: Head) -> None:
        """Check what the first state of a segment follows from."""
        work, number = audit.work, audit.link.segment
        local = _vector(before, LOCAL)
        memory = [vector for vector in before.vectors if vector.name != LOCAL]
        if number == 0:
            if local.chunks != head.outer.chunks:
                raise Differs("it did not begin at the run's parameters")
            if work.follows is None:
                fresh = state_index({each.name: torch.zeros(each.num) for each in memory})
                if list(fresh.vectors) != memory or work.num_before or work.error is not None:
                    raise Differs("it says that its optimizer is new, and it is not")
                return
            await self._check_followed(audit, answer, memory)
            return
        if answer.previous is None:
            raise NotShown("it does not show what it had before it was moved to other parameters")
        at = state_before(work.segments, self._trace_every, number) - 1
        count = num_states(work.segments, self._trace_every)
        previous = await self._index(audit, answer.previous, at, count, work)
        if [vector for vector in previous.vectors if vector.name != LOCAL] != memory:
            raise Differs("its optimizer is another after a round")
        came_from = self._heads.known(Digest(work.segments[number - 1].head))
        if came_from is None:
            return
        ended = (await self._pulled(audit, previous, {LOCAL}))[LOCAL]
        outer = (await self._pulled(audit, _alone(came_from.outer)))[OUTER]
        moved = (await self._pulled(audit, _alone(head.outer)))[OUTER]
        moved.sub_(self._replica.method.delta(outer, ended))
        if _vector(state_index({LOCAL: moved}), LOCAL).chunks != local.chunks:
            raise Differs("it did not keep what it had when it was moved to other parameters")

    async def _check_followed(self, audit: Audit, answer: AuditAnswer, memory: Sequence[VectorIndex]) -> None:
        work, follows = audit.work, Digest(audit.work.follows or "")
        before_it = self._rounds.works.known(follows) or await self._rounds.works.fetch(follows, [PeerId(work.peer)])
        if before_it is None or answer.followed is None:
            raise NotShown("it does not show the work that its optimizer goes on from")
        counted_in, oldest = self._heads.counted_in(follows), self._heads.oldest
        if before_it.peer != work.peer or before_it.run != work.run:
            raise Differs("its optimizer goes on from work that was not its own")
        if counted_in is None and oldest is not None and before_it.round > oldest:
            raise Differs("its optimizer goes on from work that no round has counted")
        if counted_in is not None and work.segments[0].round < counted_in:
            raise Differs("it trained on samples that a round had counted already")
        count = num_states(before_it.segments, self._trace_every)
        ended = await self._index(audit, answer.followed, count - 1, count, before_it)
        if [vector for vector in ended.vectors if vector.name != LOCAL] != list(memory):
            raise Differs("its optimizer does not go on from the work that it names")
        if work.num_before != before_it.num_before + before_it.num_steps or work.error != before_it.left:
            raise Differs("it does not go on from the work that it names")

    async def _check_payload(self, audit: Audit, last: StateIndex) -> None:
        """Check that the payload was made of the last state."""
        work = audit.work
        head = self._heads.known(Digest(work.segments[-1].head))
        if head is None:
            return
        local = (await self._pulled(audit, last, {LOCAL}))[LOCAL]
        outer = (await self._pulled(audit, _alone(head.outer)))[OUTER]
        error = None
        if work.error is not None:
            index = await self._listed(audit, Digest(work.error))
            error = (await self._pulled(audit, index))[ERROR]
        payload, left = await self._context.compute.serve(lambda: self._encoded(work, head, outer, local, error))
        if payload != work.payload:
            raise Differs("its payload is not what its training steps came to")
        if left != work.left:
            raise Differs("what its codec left is not what it says")

    def _encoded(
        self, work: Work, head: Head, outer: Tensor, local: Tensor, error: Tensor | None
    ) -> tuple[Digest, Digest | None]:
        config, scope, run = amended(self._replica.run, head.charter), self._replica.scope, self._replica.run
        method = Method(config.method, config.optimizer, run.vector.tensors)
        ranges = cut(scope.num_sent(Round(work.round)), head.manifest.uplinks)
        delta = method.delta(outer, local)
        encoded, left = encode_payload(method, scope, {OUTER: outer}, delta, error, ranges, work.round)
        name = payload_of(digest(part) for part in encoded)
        return name, None if left is None else digest_of(state_index({ERROR: left}))

    # --- what the worker shows ---

    @property
    def _trace_every(self) -> int:
        audits = self._replica.charter.audits
        assert audits
        return audits.trace_every

    async def _asked(self, audit: Audit) -> AuditAnswer:
        request = AuditRequest(work=audit.name, ticket=audit.ticket)

        def ready(answer: AuditAnswer) -> AuditAnswer | str:
            return answer if answer.is_ready else answer.reason

        answer = await self._until(audit, request, AuditAnswer, ready)
        if answer.before is None or answer.last is None:
            raise NotShown("it shows no state")
        return answer

    async def _until(self, audit: Audit, request: Record, kind: type[A], read: Callable[[A], T | str]) -> T:
        """Return what the worker answers, asked again until it does or its rounds are over.

        Raises:
            NotShown: it does not.
        """
        peer, reason = PeerId(audit.work.peer), "it does not answer"
        while self._rounds.chain.head.round < audit.until and peer in self._rounds.chain.base.electorate:
            try:
                found = read(await self._context.node.call(peer, request, kind, deadline_s=CALL_S))
            except (PeerError, NetError, Refused) as error:
                found = str(error)
            if not isinstance(found, str):
                return found
            reason = found
            await asyncio.sleep(ASK_AGAIN_S)
        raise NotShown(reason)

    async def _index(self, audit: Audit, named: NamedState, number: int, count: int, work: Work) -> StateIndex:
        path = named.path
        is_it = (path.index, path.count) == (number, count)
        if not is_it or not is_leaf(Digest(work.trace), bytes.fromhex(named.state), path):
            raise NotShown("it shows a state that it has not named")
        return await self._listed(audit, Digest(named.state))

    async def _listed(self, audit: Audit, name: Digest) -> StateIndex:
        data = await self._context.node.fetch_small(PeerId(audit.work.peer), name, MAX_INDEX_NBYTES)
        try:
            return decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)  # type: ignore[no-any-return]
        except WireError as error:
            raise Differs(f"what it has named is no state: {error}") from None

    async def _pulled(self, audit: Audit, index: StateIndex, names: set[str] | None = None) -> dict[str, Tensor]:
        """Return vectors of an index, all fetched of the worker."""
        num = self._replica.outer.numel()
        wanted = [each for each in index.vectors if names is None or each.name in names]
        if any(each.num > 2 * num for each in wanted):
            raise Differs("a state of it is larger than any of this model")
        vectors = {each.name: torch.empty(each.num) for each in wanted}

        def put(name: str, start: int, data: Buffer) -> None:
            piece = torch.frombuffer(bytearray(data), dtype=torch.float32)
            vectors[name][start : start + len(piece)] = piece

        await self._client.pull(index, [PeerId(audit.work.peer)], put, names)
        return vectors


def _vector(index: StateIndex, name: str) -> VectorIndex:
    found = next((vector for vector in index.vectors if vector.name == name), None)
    if found is None:
        raise Differs(f"a state of it has no {name} parameters")
    return found


def _alone(vector: VectorIndex) -> StateIndex:
    return StateIndex(vectors=(vector,))
