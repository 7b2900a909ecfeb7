"""What goes with a micro-batch where members of a stage audit each other (`weft.verify.passages`), of one peer.

    signed       what this peer has computed for a sender, in a stage that it holds
    why_not      why it does not accept what comes back from whom it has sent something
    tell         what it has accepted, to the other members of that stage
    keep         what its own passages were made of: whoever looks fetches that from here, or from its neighbours

Parameters change between two rounds. `leave` says that they are about to, and `enter` that they have: what was computed
partly by these and partly by those is given up.

Failure:
- a member that signs nothing, or something else than it was sent: another gets the micro-batch, and an event says so.
- a member of the next stage that this peer has not heard of yet: another gets the micro-batch, and nobody is to blame.
- there is no room for what passages were made of: the oldest is forgotten, and nobody looks at it any more.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from weft.errors import CallFailed, WireError
from weft.events import Emit, PassageRefused
from weft.ids import Digest, PeerId, RunId
from weft.keys import verify
from weft.pipeline.link import Parcel, StageLink, parcel
from weft.pipeline.messages import Backward, Forward, PassageTold
from weft.verify.passages import MAX_PASSAGE_NBYTES, Asked, Passage, is_joined, why_refused
from weft.wire import Signed, digest, seal, unseal

KEPT_NBYTES = 256 << 20  # of a stage; who was drawn fetches at once
MAX_SEEN = 4096  # peers that have held a stage
UNKNOWN = "nobody here knows the member of the next stage yet"
AT_ONCE = 4  # passages of others whose bytes are held here to be looked at


@dataclass(frozen=True)
class Made:
    """What a member has made of a micro-batch.

    Args:
        given: activations that came; None: tokens alone.
        output: activations that went on; None: from the last stage.
        member: of the next stage, whose gradient came back.
        returned: that gradient. gradient: of what had come.
    """

    given: Parcel | None
    output: Parcel | None
    member: PeerId
    returned: Parcel | None
    gradient: Parcel | None
    loss: float


class Witness:
    """
    Args:
        runs: of all stages, in order.
        members: who holds a stage.
    """

    def __init__(
        self, link: StageLink, runs: Sequence[RunId], members: Callable[[int], Collection[PeerId]], emit: Emit
    ) -> None:
        self._link = link
        self._runs = runs
        self._members = members
        self._emit = emit
        self._heads: dict[int, Digest] = {}
        self._entered = asyncio.Event()  # another each time
        self._kept: dict[int, deque[Parcel]] = {}
        self._seen: dict[int, set[PeerId]] = {}  # who has held a stage
        link.on_stage_note(PassageTold)

    # --- the parameters of a stage ---

    def enter(self, stage: int, head: Digest) -> None:
        """Take it up that this peer has a stage's parameters after a manifest."""
        if self._heads.get(stage) != head:
            self.forget(stage)
        self._heads[stage] = head
        self._entered.set()
        self._entered = asyncio.Event()

    def leave(self, stage: int) -> None:
        """Take it up that these change."""
        self._heads.pop(stage, None)

    async def head(self, stage: int) -> Digest:
        """Return the manifest after which the parameters of a stage are, once that is known."""
        while stage not in self._heads:
            await self._entered.wait()
        return self._heads[stage]

    # --- what this peer computes ---

    def signed(self, request: Forward, sender: PeerId, head: Digest, made: Made) -> Signed:
        """Return this peer's word on a micro-batch, and keep what it was made of.

        Args:
            head: that it had as it began.

        Raises:
            CallFailed: its parameters have changed meanwhile.
        """
        stage = request.stage
        if self._heads.get(stage) != head:
            raise CallFailed(f"the parameters of stage {stage} have changed meanwhile")
        tokens = parcel(request.tokens)
        passage = Passage(
            run=self._runs[stage],
            head=head,
            stage=stage,
            origin=request.origin,
            number=request.number,
            attempt=request.attempt,
            round=request.round,
            step=request.step,
            num_samples=request.num_samples,
            sender=sender,
            tokens=tokens.digest,
            given=request.activations or UNSET,
            output=_name(made.output),
            member=UNSET if made.output is None else made.member,
            returned=_name(made.returned),
            gradient=_name(made.gradient),
            loss=made.loss,
        )
        self.keep(stage, tokens, made.given, made.gradient)  # the rest it keeps as who has sent that on
        return seal(self._link.signer, passage)

    def keep(self, stage: int, *parcels: Parcel | None) -> None:
        """Let others fetch these until the parameters of a stage are others, or there is no room."""
        kept = self._kept.setdefault(stage, deque())
        for each in parcels:
            if each is not None:
                self._link.give(each)
                kept.append(each)
        total = sum(memoryview(each.data).nbytes for each in kept)
        while kept and total > KEPT_NBYTES:
            oldest = kept.popleft()
            total -= memoryview(oldest.data).nbytes
            self._link.take_back(oldest.digest)

    def forget(self, stage: int) -> None:
        for each in self._kept.pop(stage, ()):
            self._link.take_back(each.digest)

    # --- what others compute for it ---

    def why_not(self, peer: PeerId, request: Forward, note: Backward) -> str | None:
        """Return why what comes back from a member cannot be accepted; None: it can."""
        stage = request.stage
        asked = Asked(
            run=self._runs[stage],
            stage=stage,
            origin=PeerId(request.origin),
            number=request.number,
            attempt=request.attempt,
            round=request.round,
            step=request.step,
            num_samples=request.num_samples,
            sender=self._link.me,
            tokens=digest(request.tokens),
            given=request.activations,
            gradient=note.gradient,
            loss=note.loss,
        )
        is_last = stage == len(self._runs) - 1
        try:
            passage = read_passage(note.passage, peer)
            if (why := why_refused(passage, asked, is_last=is_last)) is not None or is_last:
                return why
            author = PeerId(passage.member or "")
            after = read_passage(note.after, author)
        except WireError as error:
            return str(error)
        if after.run != self._runs[stage + 1] or not is_joined(passage, peer, after, author):
            return "the member of the next stage has signed something else"
        return None if self._has_held(author, stage + 1) else UNKNOWN

    def _has_held(self, peer: PeerId, stage: int) -> bool:
        """Return whether a peer holds a stage, or has, since this process began: it may be gone since it signed."""
        seen = self._seen.setdefault(stage, set())
        if len(seen) > MAX_SEEN:
            seen.clear()
        seen |= {self._link.me, *self._members(stage)}
        return peer in seen

    def refuse(self, peer: PeerId, stage: int, reason: str) -> None:
        """Say that what a member sends back is not accepted, where it is to blame."""
        if reason != UNKNOWN:
            self._emit(PassageRefused(stage=stage, member=peer, reason=reason))

    async def tell(self, passage: Signed, request: Forward, sent: Parcel | None, back: Parcel | None) -> None:
        """Tell the other members of a stage what one of them has computed, and keep what was sent to it, and back."""
        here = max(request.stage - 1, 0)  # the stage that this peer holds
        self.keep(here, parcel(request.tokens), sent, back)
        told = PassageTold(stage=request.stage, passage=passage)
        for each in sorted(self._members(request.stage)):
            if each != passage.signer:
                await self._link.post(each, told)


def _name(parcel: Parcel | None) -> Digest | UnsetType:
    return UNSET if parcel is None else parcel.digest


def read_passage(signed: object, author: PeerId) -> Passage:
    """
    Raises:
        WireError: that peer has not signed it.
    """
    if not isinstance(signed, Signed):
        raise WireError("it has signed nothing")
    if signed.signer != author or len(signed.body) > MAX_PASSAGE_NBYTES:
        raise WireError("another has signed it")
    passage: Passage = unseal(signed, Passage, verify)
    return passage
