"""A work that contradicts itself, or the rounds that it names.

    claim      segments follow the rounds that they name; the steps fit into leases that the peer could have, and take
               as many tokens as it claims
    start      the first state has the optimizer of the last state of the work that it follows, or a new one: zeros
    move       between two segments the optimizer stays as it is
    payload    blocks of it are the codec's of the first parameters less the last

Each `prove` returns what is shown, or raises `Unproven` where that is nothing. A work whose parameters began elsewhere
than the run's is not among them: what the run's are is known by votes alone.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from weft.errors import WireError
from weft.ids import Digest, PeerId
from weft.ledger.tree import is_leaf
from weft.sync.records.charter import Charter
from weft.sync.records.index import CHUNK_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import Manifest, payload_of
from weft.sync.records.parts import cut
from weft.sync.records.work import Segment, Work, num_states, state_before
from weft.verify.evidence.blocks import Known, encoded, first_other, known, place, spans
from weft.verify.evidence.blocks import nbytes as encoded_nbytes
from weft.verify.evidence.records import FalseClaim, FalseMove, FalsePayload, FalseStart, Ground, ShownState
from weft.verify.evidence.shown import Book, Unproven, numbers_window, window
from weft.wire import Buffer, Signed, claimed, decode, digest, digest_of

LOCAL = "local"  # the parameters, among the vectors of a state


def stands_on(ground: Ground, head: Digest) -> tuple[Manifest, Charter]:
    """Return a manifest of this name, and what holds after it.

    Raises:
        Unproven: the ground is another.
    """
    if digest_of(ground.manifest) != head or digest_of(ground.charter) != ground.manifest.charter:
        raise Unproven("what it stands on is shown to be something else than was signed")
    return ground.manifest, ground.charter


def listed(work: Work, shown: ShownState, number: int | None = None) -> StateIndex:
    """Return the list of a state that a work names.

    Args:
        number: of the state; None: the last.

    Raises:
        Unproven: it names another there, or what it names is no list.
    """
    wanted = shown.path.count - 1 if number is None else number
    if shown.path.index != wanted or not is_leaf(Digest(work.trace), bytes.fromhex(digest(shown.index)), shown.path):
        raise Unproven("a state is shown that the work has not named there")
    return index_in(shown.index)


def index_in(data: bytes) -> StateIndex:
    """
    Raises:
        Unproven: it is no list.
    """
    try:
        index: StateIndex = decode(data, StateIndex)
    except WireError as error:
        raise Unproven(str(error)) from None
    return index


# --- claims ---


def false_claim(work: Work, stood: Sequence[tuple[Manifest, Charter]]) -> str | None:
    """Return in which way a work claims what rounds do not bear out; None: it may be so.

    Args:
        stood: what each segment begins at, in order: the manifest, and what holds after it.
    """
    tokens, before = 0, None
    for segment, (manifest, charter) in zip(work.segments, stood, strict=True):
        if manifest.round != segment.round or before not in (None, manifest.previous):
            return "its segments do not follow each other from round to round"
        mine, held = _num_leased(manifest, PeerId(work.peer)), _num_leased(manifest, PeerId(segment.holder))
        if segment.num_steps and segment.holder != work.peer and mine:
            return "it trained on what was leased to another"
        if segment.num_steps * charter.settings.batch_size > held:
            return "it made more training steps than there were samples in the lease that it names"
        tokens += segment.num_steps * charter.settings.tokens_per_step
        before = digest_of(manifest)
    return None if tokens == work.tokens else "it claims other tokens than its training steps take"


def check_claim(work: Work, shown: FalseClaim) -> str:
    """Return in which way a work claims what is not so.

    Raises:
        Unproven: it may be so.
    """
    if len(shown.grounds) != len(work.segments):
        raise Unproven("the rounds of all segments are to be shown")
    segments = zip(work.segments, shown.grounds, strict=True)
    what = false_claim(work, [stands_on(ground, Digest(segment.head)) for segment, ground in segments])
    if what is None:
        raise Unproven("it claims what its training steps take")
    return what


def prove_claim(work: Work, grounds: Sequence[tuple[Manifest, Charter]]) -> FalseClaim:
    shown = FalseClaim(grounds=tuple(Ground(manifest=manifest, charter=charter) for manifest, charter in grounds))
    check_claim(work, shown)
    return shown


def _num_leased(manifest: Manifest, peer: PeerId) -> int:
    return sum(lease.num_windows for lease in manifest.leases if lease.peer == peer)


# --- optimizers ---


def check_start(work: Work, followed: Signed | None, shown: FalseStart) -> str:
    """Return in which way a work began with an optimizer that it should not have.

    Args:
        followed: the work that it follows, whose signature holds.

    Raises:
        Unproven: it may be so.
    """
    if (what := _false_by_words(work, followed)) is not None:
        if (shown.first, shown.last) != (None, None):
            raise Unproven("more is shown than it takes")
        return what
    if shown.first is None or (shown.last is None) != (followed is None):
        raise Unproven("other states are shown than it takes")
    first = listed(work, shown.first, 0)
    if followed is None or shown.last is None:
        if first.without(LOCAL) == _new(first):
            raise Unproven("its optimizer is new")
        return "it says that its optimizer is new, and it is not"
    if first.without(LOCAL) == listed(claimed(followed, Work), shown.last).without(LOCAL):
        raise Unproven("its optimizer goes on from the work that it names")
    return "its optimizer does not go on from the work that it names"


def _false_by_words(work: Work, followed: Signed | None) -> str | None:
    """Return in which way works say of an optimizer what cannot be; None: that takes their states.

    Raises:
        Unproven: the work that it follows is another.
    """
    if (None if followed is None else digest_of(followed)) != work.follows:
        raise Unproven("the work that it follows is not the one that is shown")
    return false_by_words(work, None if followed is None else claimed(followed, Work))


def false_by_words(work: Work, before: Work | None) -> str | None:
    """Return in which way a work says of its first optimizer what cannot be; None: it takes states to tell.

    Args:
        before: the work that it says it goes on from; None: it says that its optimizer is new.
    """
    if before is None:
        is_new = not work.num_before and work.error is None
        return None if is_new else "it says that its optimizer is new, and that it is not"
    if (before.peer, before.run) != (work.peer, work.run):
        return "its optimizer goes on from work that was not its own"
    goes_on = work.num_before == before.num_before + before.num_steps and work.error == before.left
    return None if goes_on else "it does not go on from the work that it names"


def prove_start(
    work: Work, followed: Signed | None, first: ShownState | None = None, last: ShownState | None = None
) -> FalseStart:
    shown = FalseStart(first=first, last=last)
    check_start(work, followed, shown)
    return shown


def check_move(work: Work, shown: FalseMove) -> str:
    """Return that an optimizer is another one after a round.

    Raises:
        Unproven: it is not.
    """
    _, charter = stands_on(shown.ground, Digest(work.segments[0].head))
    if charter.audits is UNSET or shown.segment >= len(work.segments):
        raise Unproven("there is no such segment")
    every = charter.audits.trace_every
    at = state_before(work.segments, every, shown.segment)
    _require_all_named(work.segments, every, shown.begun)
    if listed(work, shown.ended, at - 1).without(LOCAL) == listed(work, shown.begun, at).without(LOCAL):
        raise Unproven("its optimizer stayed as it was")
    return "its optimizer is another after a round"


def prove_move(work: Work, ground: Ground, segment: int, ended: ShownState, begun: ShownState) -> FalseMove:
    shown = FalseMove(ground=ground, segment=segment, ended=ended, begun=begun)
    check_move(work, shown)
    return shown


def _require_all_named(segments: Sequence[Segment], trace_every: int, shown: ShownState) -> None:
    if shown.path.count != num_states(segments, trace_every):
        raise Unproven("it names another number of states than its training steps come to")


def _new(index: StateIndex) -> tuple[VectorIndex, ...]:
    """Return the optimizer's vectors as they are in a new one."""
    return tuple(VectorIndex(name=each.name, num=each.num, chunks=_zeros(each.nbytes)) for each in index.without(LOCAL))


def _zeros(nbytes: int) -> tuple[Digest, ...]:
    num, rest = divmod(nbytes, CHUNK_NBYTES)
    whole = (digest(bytes(CHUNK_NBYTES)),) * num
    return (*whole, digest(bytes(rest))) if rest else whole


# --- payloads ---


def check_payload(work: Work, shown: FalsePayload) -> str:
    """Return that a block of a payload is not what the states came to.

    Raises:
        Unproven: it is, or it may be.
    """
    manifest, charter = stands_on(shown.ground, Digest(work.segments[0].head))
    codec = _payload_codec(work, charter)
    first, last = listed(work, shown.first, 0), listed(work, shown.last)
    _require_all_named(work.segments, charter.audits.trace_every if charter.audits else 1, shown.last)
    before, after = _parameters(first), _parameters(last)
    if payload_of(map(Digest, shown.parts)) != work.payload or before.num != after.num:
        raise Unproven("the parts are not those of its payload")
    ranges = cut(before.num, manifest.uplinks)
    if len(ranges) != len(shown.parts) or shown.part >= len(ranges):
        raise Unproven("the payload has no such part")
    part = ranges[shown.part]
    here = place(codec, len(part), shown.block)
    there = range(part.start + here.start, part.start + here.stop)
    book = Book()
    delta = book.numbers(before, there, shown.before) - book.numbers(after, there, shown.after)
    num_sent = encoded_nbytes(codec, len(part))
    asked = spans(codec, len(part), here)
    if len(asked) != len(shown.sent):
        raise Unproven("the block is not shown as its codec has it")
    sent = tuple(
        book.read(Digest(shown.parts[shown.part]), num_sent, span, each)
        for span, each in zip(asked, shown.sent, strict=True)
    )
    book.close()
    if not np.isfinite(delta).all() or encoded(codec, delta) == sent:
        raise Unproven("the block is what its states came to")
    return "its payload is not what its training steps came to"


def prove_payload(
    work: Work,
    ground: Ground,
    states: tuple[ShownState, ShownState],
    parameters: tuple[NDArray[np.float32], NDArray[np.float32]],
    payload: Sequence[Buffer],
    right: Sequence[Buffer],
) -> FalsePayload:
    """Return what shows that a payload is not what the states came to.

    Args:
        states: the first and the last, and the `parameters` of both.
        payload: its parts.
        right: those that the states come to.
    """
    codec = _payload_codec(work, ground.charter)
    before, after = parameters
    ranges = cut(len(before), ground.manifest.uplinks)
    if not len(ranges) == len(payload) == len(right):
        raise Unproven("the payload has another number of parts")
    for number, part in enumerate(ranges):
        block = first_other(codec, len(part), payload[number], right[number])
        if block is None:
            continue
        at = place(codec, len(part), block)
        there = range(part.start + at.start, part.start + at.stop)
        shown = FalsePayload(
            ground=ground,
            first=states[0],
            last=states[1],
            parts=tuple(map(digest, payload)),
            part=number,
            block=block,
            before=numbers_window(before, there),
            after=numbers_window(after, there),
            sent=tuple(window(payload[number], span) for span in spans(codec, len(part), at)),
        )
        check_payload(work, shown)
        return shown
    raise Unproven("the payload is what its states came to")


def _payload_codec(work: Work, charter: Charter) -> Known:
    """
    Raises:
        Unproven: more than two states says what its payload is.
    """
    method = charter.settings.method
    is_plain = method.send == "delta" and method.basis == "flat" and method.feedback is None
    if len(work.segments) != 1 or not is_plain or method.is_streaming or work.error is not None:
        raise Unproven("its payload follows from more than its first and last state")
    return known(method.codec)


def _parameters(index: StateIndex) -> VectorIndex:
    if LOCAL not in index.shape:
        raise Unproven("a state without parameters")
    return index.vector(LOCAL)
