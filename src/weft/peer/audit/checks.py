"""What a worker shows of an audited work, checked before any of its steps is made again.

    claim      so many steps of these leases are so many tokens, and no round has counted the leases before
    begins     the first state is the run's, with the optimizer of the work before; each segment begins where the one
               before has ended, moved along with the outer parameters
    payload    it is made of the last state

Every state is one that the work has named (`looking.is_named`). Where anybody can be shown that it is not so, that is
found with it (`proving`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.errors import CheckpointError, NetError, NotFinite, PeerError, Refused, WireError
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.heads import Head, Heads
from weft.peer.audit.kept import Kept, room
from weft.peer.audit.looking import is_named
from weft.peer.audit.proofs.proving import ground, proof, shown_state
from weft.peer.audit.reach import is_possible, is_within, rates
from weft.peer.audit.steps import ERROR, LOCAL, method_at, named_error, payload_of_end, shape_of
from weft.peer.audit.trace import Trace
from weft.peer.context import Context
from weft.peer.messages import AuditAnswer, NamedState
from weft.peer.round.works import Works
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import StateClient
from weft.store.chunks import state_index
from weft.sync.merge.method import OUTER
from weft.sync.records.acts import Warrant
from weft.sync.records.index import CHUNK_NBYTES, MAX_INDEX_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import parts_in, payload_of
from weft.sync.records.work import Link, Work, num_states, state_before
from weft.training.device import first_line
from weft.training.trainer import Trainer
from weft.verify.evidence.records import Falsehood, ShownState
from weft.verify.evidence.works import false_by_words, false_claim, prove_claim, prove_move, prove_payload, prove_start
from weft.wire import Buffer, Signed, decode, digest, digest_of

T = TypeVar("T")

LOOK_S = 1.0  # between two looks at whether the time is over in which a worker delivers
UNLEFT = "its optimizer holds what no gradients leave"
TOO_FAR = "its parameters are further from where they began than training steps lead"
LISTED_NBYTES, CHUNK_LISTED_NBYTES = 64 << 10, 70  # of a list: names, and what is not so; of each chunk


def never() -> bool:
    return False


@dataclass(frozen=True)
class Audit:
    """One that is under way.

    Args:
        until: returns whether all time is over in which its worker may deliver what it has named.
    """

    round: Round  # whose manifest counts it
    name: Digest
    work: Work
    link: Link
    ticket: Signed  # its own draw, or another's verdict
    accuser: PeerId | None = None  # who says that the steps differ
    until: Callable[[], bool] = field(default=never, repr=False)

    @property
    def peer(self) -> PeerId:
        """Return whose work it is."""
        return PeerId(self.work.peer)

    @property
    def num_before(self) -> int:
        """Return how many steps the optimizer has made before these."""
        return self.num_before_segment + self.link.first

    @property
    def num_before_segment(self) -> int:
        before = self.work.segments[: self.link.segment]
        return self.work.num_before + sum(segment.num_steps for segment in before)

    @property
    def is_new(self) -> bool:
        """Whether the first of the steps is the first of an optimizer."""
        return not self.num_before


@dataclass(frozen=True)
class Begun:
    """A segment of a work, and what it began at.

    Args:
        heads: of all segments.
        outer: the run's parameters then.
    """

    number: int
    heads: Sequence[Head]
    outer: Tensor


class NotShown(Exception):
    """The worker does not show what it named, or not yet."""


class Unknown(Exception):
    """What the steps began at is not known here."""


class Differs(Exception):
    """It has named something that is not so.

    Args:
        proof: as of `Found`.
    """

    def __init__(self, why: str, proof: Warrant | None = None) -> None:
        super().__init__(why)
        self.proof = proof


class Checks:
    """Of one auditor."""

    def __init__(
        self, context: Context, trainer: Trainer, replica: Replica, works: Works, heads: Heads, kept: Kept, trace: Trace
    ) -> None:
        self._context = context
        self._trace = trace
        self._replica = replica
        self._works = works
        self._heads = heads
        self._kept = kept
        self._client = StateClient(context.node, context.compute, context.clock)
        self.shape = shape_of(trainer)  # of each state

    @property
    def trace_every(self) -> int:
        audits = self._replica.charter.audits
        assert audits
        return audits.trace_every

    # --- claims ---

    def heads_of(self, work: Work) -> list[Head]:
        """Return what the segments of a work begin at.

        Raises:
            Differs: there has not been one of these rounds.
            Unknown: it is not known here.
        """
        found, oldest = list[Head](), self._heads.oldest
        for segment in work.segments:
            head = self._heads.known(Digest(segment.head))
            if head is None and oldest is not None and oldest <= segment.round:
                raise Differs("it names a round that there has not been")
            if head is None:
                raise Unknown
            found.append(head)
        return found

    def claim(self, audit: Audit) -> None:
        """Check that what is claimed is as much as so many steps of these leases take.

        Raises:
            Differs, Unknown: it is not, or it cannot be told here.
        """
        work = audit.work
        stood = [(head.manifest, head.charter) for head in self.heads_of(work)]
        if (what := false_claim(work, stood)) is not None:
            raise Differs(what, self._proof(audit, lambda: prove_claim(work, stood)))
        newest = self._replica.head
        counting = None if newest is None else self._heads.at(newest, audit.round)
        counted = None if counting is None else self._heads.last_counted(audit.peer, digest_of(counting.manifest))
        if counted is not None and work.segments[0].round < counted:
            raise Differs("it trained on samples that a round had counted already")

    # --- states ---

    async def begins(self, audit: Audit, answer: AuditAnswer, heads: Sequence[Head]) -> None:
        """Check what the first state of each segment follows from."""
        work, every = audit.work, self.trace_every
        if len(answer.begins) != len(heads) or len(answer.ends) != len(heads) - 1:
            raise NotShown("it does not show how its segments begin and end")
        for number, (head, named) in enumerate(zip(heads, answer.begins, strict=True)):
            at = state_before(work.segments, every, number)
            begin = await self.index(audit, named, at, work)
            if number == 0:
                if begin.vector(LOCAL).chunks != head.outer.chunks:
                    raise Differs("it did not begin at the run's parameters")
                await self._check_optimizer(audit, answer, shown_state(named, begin), begin.without(LOCAL))
                continue
            ended = await self.index(audit, answer.ends[number - 1], at - 1, work)
            if ended.without(LOCAL) != begin.without(LOCAL):
                before, after = shown_state(answer.ends[number - 1], ended), shown_state(named, begin)
                prove = partial(prove_move, work, ground(heads[0]), number, before, after)
                raise Differs("its optimizer is another after a round", self._proof(audit, prove))
            moved = await self._moved(audit, ended, heads[number - 1], head)
            named_so = await self._context.compute.serve(partial(state_index, {LOCAL: moved}))
            if named_so.vector(LOCAL).chunks != begin.vector(LOCAL).chunks:
                raise Differs("it did not keep what it had when it was moved to other parameters")

    async def _moved(self, audit: Audit, ended: StateIndex, head: Head, after: Head) -> Tensor:
        """Return what a segment's last parameters are after the next round: as far from the outer ones as before."""
        local = (await self.pulled(audit, ended, {LOCAL}))[LOCAL]
        outer, moved = await self.outer(audit, head), await self.outer(audit, after)
        delta = method_at(self._replica.run, head).delta
        return await self._context.compute.serve(lambda: moved.sub_(delta(outer, local)))

    async def _check_optimizer(
        self, audit: Audit, answer: AuditAnswer, first: ShownState, memory: tuple[VectorIndex, ...]
    ) -> None:
        """Check that the first optimizer is that of the work before, or a new one.

        Args:
            first: the first state; memory: its optimizer.
        """
        work = audit.work
        if work.follows is None:
            zeros = {each.name: torch.zeros(each.num) for each in memory}
            fresh = await self._context.compute.serve(lambda: state_index(zeros))
            said = false_by_words(work, None)
            if fresh.vectors != memory or said is not None:
                prove = partial(prove_start, work, None, first if said is None else None)
                raise Differs(said or "it says that its optimizer is new, and it is not", self._proof(audit, prove))
            return
        follows = Digest(work.follows)
        before_it = self._works.known(follows) or await self._works.fetch(follows, [PeerId(work.peer)])
        if before_it is None or answer.followed is None:
            raise NotShown("it does not show the work that its optimizer goes on from")
        letter = self._works.signed(follows)
        if (said := false_by_words(work, before_it)) is not None:
            raise Differs(said, self._proof(audit, partial(prove_start, work, letter), letter))
        counted_in, oldest = self._heads.counted_in(follows), self._heads.oldest
        if counted_in is None and oldest is not None and before_it.round > oldest:
            raise Differs("its optimizer goes on from work that no round has counted")
        at = num_states(before_it.segments, self.trace_every) - 1
        ended = await self.index(audit, answer.followed, at, before_it)
        if ended.without(LOCAL) != memory:
            prove = partial(prove_start, work, letter, first, shown_state(answer.followed, ended))
            raise Differs("its optimizer does not go on from the work that it names", self._proof(audit, prove, letter))

    async def payload(self, audit: Audit, answer: AuditAnswer, last: StateIndex, begun: Begun) -> str | None:
        """Check that the payload was made of the last state; return why no training leads there, if none does.

        Args:
            begun: the last segment.
        """
        work, error, outer, head = audit.work, None, begun.outer, begun.heads[-1]
        local = (await self.pulled(audit, last, {LOCAL}))[LOCAL]
        if work.error is not None:
            index = await self.listed(audit, Digest(work.error), 2 * outer.numel())
            if index.shape.keys() != {ERROR} or index.shape[ERROR] > 2 * outer.numel():
                raise Differs("what its codec had left before is no such thing")
            error = (await self.pulled(audit, index))[ERROR]
        why = await self._too_far(audit, answer, begun, local, work.segments[-1].num_steps)
        try:
            parts, left = await self._context.compute.serve(lambda: self._encoded(work, head, outer, local, error))
        except (NotFinite, RuntimeError, ValueError) as failure:  # of its numbers, or of how many there are
            raise Differs(f"no payload can be made of its last state: {first_line(failure)}") from None
        if payload_of(map(digest, parts)) != work.payload:
            found = await self._proof_of_payload(audit, answer, head, (outer, local), parts)
            raise Differs("its payload is not what its training steps came to", found)
        if left != work.left:
            raise Differs("what its codec left is not what it says")
        return why

    def _encoded(
        self, work: Work, head: Head, outer: Tensor, local: Tensor, error: Tensor | None
    ) -> tuple[tuple[Buffer, ...], Digest | None]:
        run, scope = self._replica.run, self._replica.scope
        encoded, left = payload_of_end(run, head, scope, Round(work.round), outer, local, error)
        return encoded, named_error(left)

    async def drawn_from(self, audit: Audit, answer: AuditAnswer, begun: Begun) -> tuple[dict[str, Tensor], str | None]:
        """Return the state that the steps begin with, and why no training leads to it, if none does.

        Args:
            begun: their segment.
        """
        run = self._replica.run
        index = await self.index(audit, answer.before, audit.link.before, audit.work)
        state = await self.pulled(audit, index)
        held = {name: vector.numpy() for name, vector in state.items()}
        possible = await self._context.compute.serve(
            lambda: is_possible(run.optimizer, run.clip, audit.num_before, held)
        )
        if not possible:
            return state, UNLEFT
        return state, await self._too_far(audit, answer, begun, state[LOCAL], audit.link.first)

    async def _too_far(
        self, audit: Audit, answer: AuditAnswer, begun: Begun, local: Tensor, num_steps: int
    ) -> str | None:
        """Return why parameters are none that so many steps of a segment lead to; None: they may be."""
        work, number, run, head = audit.work, begun.number, self._replica.run, begun.heads[begun.number]
        if len(self.shape) == 1:
            return None  # without an optimizer that keeps anything, nothing tells how long its steps are
        start = begun.outer
        if number:
            at = state_before(work.segments, self.trace_every, number) - 1
            ended = await self.index(audit, answer.ends[number - 1], at, work)
            start = await self._moved(audit, ended, begun.heads[number - 1], head)
        num_before = work.num_before + sum(segment.num_steps for segment in work.segments[:number])
        holder = PeerId(work.segments[number].holder)

        def is_near() -> bool:
            made = list(rates(head.manifest, head.charter, holder, num_steps))
            return is_within(run.optimizer, run.clip, made, num_before, start.numpy(), local.numpy())

        return None if await self._context.compute.serve(is_near) else TOO_FAR

    # --- what is fetched of the worker ---

    async def index(self, audit: Audit, named: NamedState | None, number: int, work: Work) -> StateIndex:
        """Return the list of a state that the worker shows, which is the one of this number that the work has named."""
        if named is None:
            raise NotShown("it does not show a state that it has named")
        if not is_named(Digest(work.trace), work.segments, self.trace_every, number, named):
            raise NotShown("it shows a state that it has not named")
        index = await self.listed(audit, Digest(named.state))
        if index.shape != self.shape:
            raise Differs("what it has named is no state of this model")
        return index

    async def listed(self, audit: Audit, name: Digest, num: int | None = None) -> StateIndex:
        """Return what a worker has named by a digest.

        Args:
            num: of how many numbers it is, at most; None: of as many as a state has.
        """
        num = sum(self.shape.values()) if num is None else num
        most = LISTED_NBYTES + CHUNK_LISTED_NBYTES * -(-4 * num // CHUNK_NBYTES)
        data = await in_time(audit, self._context.node.fetch_small(audit.peer, name, most))
        try:
            return decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)  # type: ignore[no-any-return]
        except WireError as error:
            raise Differs(f"what it has named is no state: {error}") from None

    async def pulled(self, audit: Audit, index: StateIndex, names: set[str] | None = None) -> dict[str, Tensor]:
        """Return vectors of an index, all fetched of the worker."""
        wanted = [each for each in index.vectors if names is None or each.name in names]
        vectors = {each.name: torch.empty(each.num) for each in wanted}

        def put(name: str, start: int, data: Buffer) -> None:
            piece = torch.frombuffer(bytearray(data), dtype=torch.float32)
            vectors[name][start : start + len(piece)] = piece

        await in_time(audit, self._client.pull(index, [audit.peer], put, names))
        return vectors

    async def outer(self, audit: Audit, head: Head) -> Tensor:
        """Return the run's parameters after a manifest: of this peer's own lease that began there, or as the worker
        shows them."""
        if (piece := self._trace.began_at(head)) is not None:
            with suppress(CheckpointError):  # it is there no more
                return await self._context.compute.serve(partial(piece.outer, self._trace.folder))
        return (await self.pulled(audit, StateIndex(vectors=(head.outer,))))[OUTER]

    # --- evidence ---

    async def _proof_of_payload(
        self, audit: Audit, answer: AuditAnswer, head: Head, vectors: tuple[Tensor, Tensor], right: Sequence[Buffer]
    ) -> Warrant | None:
        """Return what shows that a payload was not made of the last state, if it was not.

        Args:
            vectors: the parameters that the work began with, and those that it ended with.
            right: the parts of the payload that was to be made of them.
        """
        work, parts = audit.work, parts_in(self._kept.listed(Digest(audit.work.payload)) or b"")
        if len(parts) != len(right) or not answer.begins or answer.last is None:
            return None
        try:
            payload = [await self._part(audit, each, own) for each, own in zip(parts, right, strict=True)]
            named = answer.begins[0], answer.last
            first, last = [shown_state(each, await self.listed(audit, Digest(each.state))) for each in named]
        except (Differs, NotShown, PeerError, NetError, Refused):
            return None
        before, after = (each.numpy() for each in vectors)
        return await self._context.compute.serve(
            lambda: self._proof(
                audit, lambda: prove_payload(work, ground(head), (first, last), (before, after), payload, right)
            )
        )

    async def _part(self, audit: Audit, wanted: Digest, own: Buffer) -> Buffer:
        """Return a part of the work's payload, which is no longer than this machine's own."""
        num, node = memoryview(own).nbytes, self._context.node
        return await in_time(audit, node.fetch_within(audit.peer, wanted, num, room)) if num else b""

    def _proof(self, audit: Audit, prove: Callable[[], Falsehood], *more: Signed | None) -> Warrant | None:
        """Return what shows that a work is false.

        Args:
            more: letters that it takes beside the work.
        """
        letters = [letter for letter in (self._works.signed(audit.name), *more) if letter is not None]
        return proof(letters, prove) if len(letters) == 1 + len(more) else None


async def in_time(audit: Audit, fetch: Coroutine[Any, Any, T]) -> T:
    """Return what is fetched of a worker.

    Raises:
        NotShown: it has delivered for as long as it may: a byte now and then is no answer.
    """
    task = asyncio.ensure_future(fetch)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            if not task.done() and audit.until():
                raise NotShown("it has not delivered in time what it has named")
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
