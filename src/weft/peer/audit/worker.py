"""What a worker shows of its training steps to those who were drawn to audit them.

    AuditRequest ──►  the ticket says which steps     made again from the last state before them that is on the disk: on
      ◄── AuditAnswer                                 the way, the state before them is kept, and the one after
    AuditSealed ──►   the auditor has done them, and sealed what it came to: all are told (`sealing`)
      ◄── AuditOpened                                 what this peer came to; of one step in exact numbers it signs what
                                                      that was made of
    OperationsRequest ──►                             who has come to something else asks for the operations of that
      ◄── OperationsAnswer                            (`operations`)

Failure:
- this machine does not come to its own states again, as a device that adds up in another order each time: an event says
  so. What it shows then is not what it named, and it counts as unanswered.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, UnsetType
from torch import Tensor

from weft.cost.audits import MAX_SHOWN, MAX_SHOWN_NBYTES
from weft.data.rows import Batch, written
from weft.errors import CheckpointError, WeftError, WireError
from weft.events import Notice
from weft.ids import Digest, PeerId
from weft.keys import verify
from weft.net.messages import MAX_REASON_CHARS
from weft.peer.audit.heads import Heads
from weft.peer.audit.proofs.operations import Listing, free_here, listing_of
from weft.peer.audit.sealing import Sealing
from weft.peer.audit.steps import LOCAL, Away, repeat, state_of
from weft.peer.audit.trace import Told, Trace
from weft.peer.context import Context
from weft.peer.messages import (
    AuditAnswer,
    AuditOpened,
    AuditRequest,
    AuditSealed,
    NamedState,
    OperationsAnswer,
    OperationsRequest,
)
from weft.peer.state.replica import Replica
from weft.store.chunks import chunks, state_index
from weft.sync.merge.method import OUTER
from weft.sync.records.acts import Finding
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import works_in
from weft.sync.records.work import Link, MadeStep, link, link_from, num_links, state_before
from weft.tasks import Tasks, to_the_end
from weft.training.trainer import Trainer
from weft.verify.draw import Draw, drawn
from weft.verify.evidence.steps import GRADIENT
from weft.verify.seals import Sealed
from weft.verify.suspicion import TIMES
from weft.wire import Buffer, Signed, claimed, digest_of, encode, seal, unseal

MAX_FAILED = 64
MAX_ASKED = 2  # places in one work that an auditor is shown by one signer's tickets: started again, it may hear another
MAX_WAITING = 8  # audits that wait for this machine to make the steps again
SHOWN_S = 20.0  # what nobody has asked for so long may make room


class Blobs:
    """What can be fetched, by digest."""

    def __init__(self) -> None:
        self.held = dict[Digest, Buffer]()

    def show(self, vectors: Mapping[str, Tensor]) -> Digest:
        """Let vectors be fetched, and the list of their chunks; return its digest."""
        index = state_index(vectors)
        for each in index.vectors:
            self.held.update(zip(map(Digest, each.chunks), chunks(vectors[each.name]), strict=True))
        return self.list(index)

    def list(self, index: StateIndex) -> Digest:
        name = digest_of(index)
        self.held[name] = encode(index)
        return name


@dataclass
class _Shown:
    """What one audit may fetch."""

    answer: AuditAnswer
    after: NamedState
    made: Signed | UnsetType
    blobs: dict[Digest, Buffer] = field(repr=False)
    listing: Listing | None = None
    used_at: float = 0.0
    is_opened: bool = False

    @property
    def nbytes(self) -> int:
        return sum(memoryview(blob).nbytes for blob in self.blobs.values())


@dataclass(frozen=True)
class _Passed:
    """What some steps of a segment come to.

    Args:
        gradient: of the step, if it is one, and its `norm`.
        words: of its samples.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gradient: Tensor | None
    norm: float
    words: Tensor | None


class Worker:
    """Of one peer."""

    def __init__(
        self,
        context: Context,
        trainer: Trainer,
        replica: Replica,
        trace: Trace,
        heads: Heads,
        sealing: Sealing,
        tasks: Tasks,
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._replica = replica
        self._trace = trace
        self._heads = heads
        self._sealing = sealing
        self._tasks = tasks
        self._shown: dict[tuple[Digest, int], _Shown] = {}  # by the work's name and the link, oldest first
        self._making: dict[tuple[Digest, int], asyncio.Task[None]] = {}
        # States that each auditor was shown of a work, by what itself has drawn or another doubts.
        self._asked: dict[tuple[Digest, PeerId, str, PeerId], set[int]] = {}
        self._failed: dict[tuple[Digest, int], str] = {}  # what cannot be shown, and why
        context.node.serve_blobs(self._lookup, is_patient=True)
        context.node.serve(AuditRequest, self._on_request)
        context.node.serve(AuditSealed, self._on_sealed)
        context.node.serve(OperationsRequest, self._on_operations)

    async def _on_request(self, peer: PeerId, request: AuditRequest) -> AuditAnswer:
        found = self._shown_to(peer, request.work, request.ticket)
        return AuditAnswer(is_ready=False, reason=found) if isinstance(found, str) else found.answer

    async def _on_sealed(self, peer: PeerId, request: AuditSealed) -> AuditOpened:
        found = self._shown_to(peer, request.work, request.ticket)
        if isinstance(found, str):
            return AuditOpened(after=None)
        if not self._is_sealed(peer, request, found):
            return AuditOpened(after=None)
        self._sealing.pass_on(request.letter)
        found.is_opened = True
        return AuditOpened(after=found.after, made=found.made)

    async def _on_operations(self, peer: PeerId, request: OperationsRequest) -> OperationsAnswer:
        found = self._shown_to(peer, request.work, request.ticket)
        if isinstance(found, str) or not found.is_opened:
            reason = found if isinstance(found, str) else "what it came to is opened first"
            return OperationsAnswer(is_ready=False, is_under_way=True, reason=reason)
        if (listing := found.listing) is None:
            return OperationsAnswer(is_ready=False, reason="the operations of that step cannot be told apart")
        if (answer := listing.answer(request.number)) is not None:
            return answer
        if not listing.is_at_it:
            listing.is_at_it = True
            self._tasks.spawn(self._list(listing, request.number))
        return OperationsAnswer(is_ready=False, is_under_way=True, reason="it is at these operations")

    async def _list(self, listing: Listing, number: int | UnsetType) -> None:
        identity = self._context.identity
        try:
            async with self._context.learner_lock:
                await to_the_end(self._context.compute.train(lambda: listing.make(number, identity)))
        finally:
            listing.is_at_it = False

    def _is_sealed(self, peer: PeerId, request: AuditSealed, found: _Shown) -> bool:
        """Return whether an auditor has sealed what it came to by these very steps."""
        assert found.answer.before is not None
        place = self._replica.run.run, request.work, found.answer.before.path.index
        try:
            sealed = unseal(request.letter, Sealed, verify)
        except WireError:
            return False
        return request.letter.signer == peer and (sealed.run, sealed.work, sealed.before) == place

    def _shown_to(self, peer: PeerId, work: Digest, ticket: Signed) -> _Shown | str:
        """Return what an auditor may see, or why it does not yet, or does not at all."""
        due = self._due(peer, work, ticket)
        if isinstance(due, str):
            return due
        told, link = due
        asked = self._asked.setdefault((told.name, peer, ticket.kind, ticket.signer), set())
        if link.before not in asked and len(asked) >= MAX_ASKED:
            return "it has shown this auditor enough of that work"
        asked.add(link.before)
        key = told.name, link.before
        if (shown := self._shown.get(key)) is not None:
            shown.used_at = self._context.clock.now()
            return shown
        if key in self._failed:
            return self._failed[key][:MAX_REASON_CHARS]
        if self._trainer.is_parked:
            return "it is paused"
        if key not in self._making and (len(self._making) >= MAX_WAITING or not self._has_room()):
            return "it shows others what it did"
        if key not in self._making:
            self._making[key] = self._tasks.spawn(self._make(told, link))
        return "it is at these training steps"

    def _due(self, peer: PeerId, work: Digest, ticket: Signed) -> tuple[Told, Link] | str:
        """Return what an auditor was drawn to see, or why it is shown nothing."""
        told = self._trace.known(work)
        if told is None:
            return "it knows no such work, or not any more, or does not know yet that a round has counted it"
        if ticket.kind == Finding.__name__:
            return self._doubted(peer, told, ticket)
        try:
            draw = unseal(ticket, Draw, verify)
        except WireError as error:
            return f"the ticket is none: {error}"
        found = self._heads.known(draw.manifest)
        audits = self._replica.charter.audits
        if ticket.signer != peer or found is None or not audits:
            return "the ticket is of another, or of a round that it does not know"
        manifest = found.manifest
        if (draw.run, draw.branch, draw.round) != (manifest.run, manifest.branch, manifest.round):
            return "the ticket says two things"
        names = [name for _, name in works_in(manifest)]
        judges = self._heads.judges(draw.manifest, self._context.node.peer)
        segments, every = told.work.segments, audits.trace_every
        rate = TIMES * audits.rate  # it may suspect this peer, for reasons of its own
        if any(each.work == work for each in manifest.held or ()):  # all look at what waits
            rate = len(judges) - 1.0
        number = drawn(ticket.signature, work, rate, len(judges), num_links(segments, every))
        if work not in names or peer not in judges or number is None:
            return "the ticket draws nobody for this work"
        return told, link(segments, every, number)

    def _doubted(self, peer: PeerId, told: Told, ticket: Signed) -> tuple[Told, Link] | str:
        """Return what another member has found a fault with: then all may look."""
        try:
            verdict = unseal(ticket, Finding, verify)
        except WireError as error:
            return f"the ticket is no verdict: {error}"
        head, audits = self._replica.head, self._replica.charter.audits
        members = () if head is None else head.members
        has_voted = self._heads.has_voted(ticket.signer)  # it may be struck out by now, and others still look
        if not audits or peer not in members or not has_voted or verdict.work != told.name:
            return "the verdict is of nobody who votes, or on another work"
        doubted = link_from(told.work.segments, audits.trace_every, verdict.before)
        if doubted is None or verdict.outcome == "equal":
            return "the verdict is on no steps of it"
        return told, doubted

    # --- the steps ---

    async def _make(self, told: Told, link: Link) -> None:
        key = told.name, link.before
        try:
            async with self._context.learner_lock:
                shown = await to_the_end(self._context.compute.train(lambda: self._found(told, link)))
        except Away:
            return
        except WeftError as error:
            self._fail(key, f"this peer cannot show an auditor what it did: {error}")
            return
        finally:
            del self._making[key]
        if not self._is_mine(told, shown):
            text = "this machine does not come to its own training steps again: what it shows to auditors is of no use"
            self._fail(key, f"{text}. Set device = cpu, or leave runs that audit")
            return
        shown.used_at = self._context.clock.now()
        self._shown[key] = shown

    def _has_room(self) -> bool:
        """Return whether one more audit may be shown what it asks for, once those are over that nobody reads."""
        now = self._context.clock.now()
        for key, shown in list(self._shown.items()):
            if self._is_full() and (shown.is_opened or now - shown.used_at > SHOWN_S):
                del self._shown[key]
        return not self._is_full()

    def _is_full(self) -> bool:
        num, largest = (
            len(self._shown) + len(self._making),
            max((each.nbytes for each in self._shown.values()), default=0),
        )
        return num >= MAX_SHOWN and num * largest >= MAX_SHOWN_NBYTES

    def _fail(self, key: tuple[Digest, int], text: str) -> None:
        self._failed[key] = text
        for forgotten in list(self._failed)[:-MAX_FAILED]:
            del self._failed[forgotten]
        self._context.emit(Notice(text=text))

    def _is_mine(self, told: Told, shown: _Shown) -> bool:
        answer = shown.answer
        named = (answer.before, answer.last, shown.after, *answer.begins, *answer.ends)
        return all(each is not None and told.state(each.path.index) == each.state for each in named)

    def _found(self, told: Told, link: Link) -> _Shown:
        blobs, segments, every = Blobs(), told.work.segments, self._trace.trace_every
        passed = self._passed(told, link.segment, link.first, link.first + link.num_steps)
        begins, ends = list[NamedState](), list[NamedState]()
        for number, piece in enumerate(told.pieces):
            kept = piece.start.read(self._trace.folder)
            blobs.show({OUTER: kept.pop(OUTER, kept[LOCAL])})
            begins.append(told.named(blobs.list(state_index(kept)), state_before(segments, every, number)))
            if number + 1 < len(told.pieces):
                steps = piece.segment.num_steps
                ended = self._passed(told, number, steps, steps).after if steps else kept
                blobs.show({LOCAL: ended[LOCAL]})
                at = state_before(segments, every, number + 1) - 1
                ends.append(told.named(blobs.list(state_index(ended)), at))
        end, followed = told.end.read(self._trace.folder), None
        for name in end:
            blobs.show({name: end[name]})
        if (before_it := self._trace.known(Digest(told.work.follows or ""))) is not None:
            followed = before_it.named(blobs.list(before_it.last), before_it.num_states - 1)
        answer = AuditAnswer(
            is_ready=True,
            before=told.named(blobs.show(passed.before), link.before),
            last=told.named(blobs.list(told.last), told.num_states - 1),
            begins=tuple(begins),
            ends=tuple(ends),
            followed=followed,
        )
        after = told.named(blobs.show(passed.after), link.before + 1)
        made = self._signed(told, link, passed, blobs)
        return _Shown(answer, after, made, blobs.held, self._listing(told, link, passed, made, blobs))

    def _signed(self, told: Told, link: Link, passed: "_Passed", blobs: Blobs) -> Signed | UnsetType:
        """Return what this peer signs of a step, whose gradient can be fetched from then on; unset: it is none such."""
        if passed.gradient is None or link.num_steps != 1:
            return UNSET
        gradient = blobs.show({GRADIENT: passed.gradient})
        run, work = self._replica.run.run, told.name
        made = MadeStep(run=run, work=work, before=link.before, gradient=gradient, norm=passed.norm)
        return seal(self._context.identity, made)

    def _listing(
        self, told: Told, link: Link, passed: "_Passed", made: Signed | UnsetType, blobs: Blobs
    ) -> Listing | None:
        """Return what this peer may be asked of the operations of a step; None: nothing."""
        head = self._heads.known(Digest(told.pieces[link.segment].segment.head))
        if made is UNSET or passed.words is None or head is None:
            return None
        free = partial(free_here, self._context, self._trainer)
        parameters, signed = passed.before[LOCAL], claimed(made, MadeStep)
        return listing_of(head.charter, parameters, passed.words, signed, blobs.held, free)

    def _passed(self, told: Told, number: int, first: int, stop: int) -> "_Passed":
        """Return the states after `first` and after `stop` steps of a segment, and the last gradient."""
        piece = told.pieces[number]
        head = self._heads.known(Digest(piece.segment.head))
        if head is None:
            raise CheckpointError("the round that its segment began at is no longer known here.")
        outer, (made, kept) = piece.outer(self._trace.folder), piece.nearest(self._trace.folder, first)
        states, slopes, words = {made: kept}, list[tuple[Tensor, float]](), list[Tensor]()
        num_made, audits = made, self._replica.charter.audits
        is_signed = first + 1 == stop and audits is not UNSET and audits.exact is not UNSET

        def note(num_steps: int) -> None:
            nonlocal num_made
            num_made = num_steps
            if num_steps in (first, stop):
                states[num_steps] = {name: vector.clone() for name, vector in state_of(self._trainer).items()}

        def take(gradient: Tensor, norm: float) -> None:
            if is_signed and num_made == first:
                slopes.append((gradient.clone(), norm))

        def look(batch: Batch) -> None:
            if is_signed and num_made == first:
                words.append(written(batch))

        run, before = self._replica.run, piece.num_before
        if stop > made:
            repeat(self._trainer, run, head, piece.segment, kept, outer, before, made, stop - made, note, take, look)
        gradient, norm = slopes[-1] if slopes else (None, 0.0)
        return _Passed(states[first], states[stop], gradient, norm, words[-1] if words else None)

    def sweep(self) -> None:
        """Let go of what nobody can ask for any more."""
        for key in [key for key in self._shown if self._trace.known(key[0]) is None]:
            del self._shown[key]
        for place in [place for place in self._asked if self._trace.known(place[0]) is None]:
            del self._asked[place]

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        for shown in self._shown.values():
            if wanted in shown.blobs:
                shown.used_at = self._context.clock.now()
                return shown.blobs[wanted]
        return None
