"""What this peer's counted works began and ended with, shown to whoever keeps or checks them.

    WorkRequest ──►   a round has counted the work, and what it began with is on this disk
      ◄── WorkAnswer  the first and the last state of each lease, as they were signed; lists and chunks can be fetched

That is what every auditor of the work is shown before it makes a step, and no more: nothing is computed for it. Chunks
are read where they are asked for.

A peer whose run is complete stays for a moment while somebody who keeps its works has not got the last of them.
"""

from dataclasses import dataclass, field

from weft.ids import Digest, PeerId, Round
from weft.peer.audit.steps import LOCAL
from weft.peer.audit.trace import Told, Trace, without
from weft.peer.context import Context
from weft.peer.messages import NamedState, WorkAnswer, WorkRequest
from weft.peer.state.checkpoint import Place, places
from weft.sync.merge.method import OUTER
from weft.sync.records.work import state_after, state_before
from weft.wire import Buffer, digest_of, encode

MAX_SHOWN = 32  # works at a time; each is a list of places
MAX_ASKING = 64  # peers that are remembered
UNKNOWN = "it knows no such work, or not any more, or does not know yet that a round has counted it"


@dataclass
class _Shown:
    """What can be fetched of one work."""

    answer: WorkAnswer
    lists: dict[Digest, Buffer] = field(repr=False)
    chunks: dict[Digest, Place] = field(repr=False)


@dataclass
class _Asking:
    """Somebody who keeps all that this peer has done.

    Args:
        since: the first round of whose works it has asked.
        done: works that it has, or gave up.
    """

    since: Round
    done: set[Digest] = field(default_factory=set)


class Starts:
    """Of one peer."""

    def __init__(self, context: Context, trace: Trace) -> None:
        self._node = context.node
        self._trace = trace
        self._shown: dict[Digest, _Shown] = {}  # by the work's name, asked for last at the end
        self._asking: dict[PeerId, _Asking] = {}
        context.node.serve(WorkRequest, self._on_request)
        context.node.serve_blobs(self._lookup, is_patient=True)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody who is linked keeps what this peer has done, and has not got all of it."""
        works = {told.name: told.counted or Round(0) for told in self._trace.counted}
        waiting = [asking for peer, asking in self._asking.items() if self._node.is_linked(peer)]
        return any(at >= asking.since and name not in asking.done for asking in waiting for name, at in works.items())

    async def _on_request(self, peer: PeerId, request: WorkRequest) -> WorkAnswer:
        told = self._trace.known(Digest(request.work))
        if request.keeps_all:
            self._note(peer, told, is_done=request.is_done)
        if told is None or told.counted is None:
            return WorkAnswer(is_here=False, reason=UNKNOWN)
        if request.is_done:
            return WorkAnswer(is_here=True)
        shown = self._shown.pop(told.name, None) or _Shown(self._answer(told), *self._found(told))
        self._shown[told.name] = shown
        for gone in [name for name in self._shown if self._trace.known(name) is None] or list(self._shown)[:-MAX_SHOWN]:
            del self._shown[gone]
        return shown.answer

    def _note(self, peer: PeerId, told: Told | None, *, is_done: bool) -> None:
        """Note that somebody keeps all; what it asks for may not be counted here yet."""
        counted = self._trace.counted
        next_one = Round(1 + max((each.counted or 0 for each in counted), default=-1))
        asking = self._asking.pop(peer, None) or _Asking(next_one)
        self._asking[peer] = asking
        if told is not None and told.counted is not None:
            asking.since = min(asking.since, told.counted)
        if told is not None and is_done:
            asking.done = {each.name for each in counted if each.name in asking.done} | {told.name}
        for forgotten in list(self._asking)[:-MAX_ASKING]:
            del self._asking[forgotten]

    def _answer(self, told: Told) -> WorkAnswer:
        segments, every, tree = told.work.segments, self._trace.trace_every, told.tree
        begins = [state_before(segments, every, number) for number in range(len(segments))]
        ends = [state_after(segments, every, number) for number in range(len(segments))]
        return WorkAnswer(
            is_here=True,
            begins=tuple(NamedState(state=told.state(at), path=tree.path(at)) for at in begins),
            ends=tuple(NamedState(state=told.state(at), path=tree.path(at)) for at in ends),
        )

    def _found(self, told: Told) -> tuple[dict[Digest, Buffer], dict[Digest, Place]]:
        lists, chunks = dict[Digest, Buffer](), dict[Digest, Place]()
        indexes = [without(piece.start.index, OUTER) for piece in told.pieces]
        error = without(told.end.index, LOCAL)
        for index in (*indexes, told.last, *([error] if error.vectors else [])):
            lists[digest_of(index)] = encode(index)
        for piece, index in zip(told.pieces, indexes, strict=True):
            here = places(self._trace.folder / piece.start.file, piece.start.index)
            for vector in index.vectors:
                chunks |= here[vector.name]
        here = places(self._trace.folder / told.end.file, told.end.index)
        for name in (LOCAL, *(vector.name for vector in error.vectors)):
            chunks |= here[name]
        return lists, chunks

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        for shown in self._shown.values():
            if (listed := shown.lists.get(wanted)) is not None:
                return listed
            if (place := shown.chunks.get(wanted)) is not None and (data := place.read()) is not None:
                return data
        return None
