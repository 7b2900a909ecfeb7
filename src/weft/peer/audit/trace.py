"""How this peer came to what it carries: its training states, each named when it is there, and what is needed to come
to them again.

    begin       a lease is taken up, or what is carried was moved to other outer parameters: another segment
    (steps)     every `trace_every` of them the state is named
    work        what is announced with a payload: signed, and the same again as long as the payload is
    settle      a round is decided: what it counted is kept for audits, and the next work follows on it

    traces/     segment-7.safetensors    parameters and optimizer, as a segment began; later ones: outer parameters, too
                end-8.safetensors        parameters as a payload was made of them; what codecs had left before

An optimizer goes on from work to work, so a work names the one before. Where this peer cannot show how its optimizer
came about (it was started again, or gave up what it carried), it begins with a new one, which anybody can check.

Failure:
- the disk does not take a file: this peer cannot answer audits. `DataError` or `DiskFull` ends it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from torch import Tensor, zeros_like

from weft.events import Emit, Notice, WorkDropped
from weft.ids import Digest, PeerId, Round, Tokens
from weft.ledger.tree import Tree
from weft.peer.audit.steps import ERROR, LOCAL, memory_of, state_of
from weft.peer.context import Context
from weft.peer.messages import NamedState
from weft.peer.state.carry import Carry
from weft.peer.state.checkpoint import read_vectors, write_vectors
from weft.peer.state.replica import Replica
from weft.store.chunks import state_index
from weft.store.index import StateIndex
from weft.sync.merge.method import OUTER
from weft.sync.records.messages import Counted, Manifest
from weft.sync.records.work import MAX_SEGMENTS, Segment, Work
from weft.training.trainer import Trainer
from weft.wire import Signed, digest_of, seal

KEPT_ROUNDS = 8  # for which what audits may ask is kept
UNTOLD = "this peer cannot show how they came about: it was started again, or began at another state"
TOO_LONG = f"they were in none of {MAX_SEGMENTS} rounds, and how they came about grows too long to be told"


@dataclass(frozen=True)
class Kept:
    """Vectors on disk."""

    path: Path
    index: StateIndex

    def read(self) -> dict[str, Tensor]:
        """
        Raises:
            CheckpointError: they are not there any more, or others are.
        """
        return dict(read_vectors(self.path, self.index))


@dataclass
class Piece:
    """A segment, and the state that it begins with."""

    segment: Segment
    start: Kept
    tokens_per_step: int


@dataclass(frozen=True)
class Told:
    """A work that was announced, and all that audits of it may ask for."""

    work: Work
    signed: Signed
    pieces: tuple[Piece, ...]
    names: tuple[Digest, ...]  # of all states, in order
    end: Kept
    last: StateIndex  # of the last state
    num_before: tuple[int, ...]  # steps that the optimizer has made before each segment
    files: tuple[Path, ...] = field(repr=False)

    @property
    def name(self) -> Digest:
        return digest_of(self.signed)

    @property
    def tree(self) -> Tree:
        return Tree(bytes.fromhex(name) for name in self.names)

    def named(self, state: Digest, number: int) -> NamedState:
        return NamedState(state=state, path=self.tree.path(number))


class Trace:
    """Of one peer. Its methods run where its trainer does, or while that waits for a round.

    Args:
        emit: may be called from any thread.
    """

    def __init__(self, context: Context, trainer: Trainer, replica: Replica, carry: Carry, emit: Emit) -> None:
        self._context = context
        self._emit = emit
        self._trainer = trainer
        self._replica = replica
        self._carry = carry
        self._folder = context.folder.traces
        self._serials = count()
        self._pieces: list[Piece] = []
        self._names: list[Digest] = []
        self._has_end = True  # the last state is named
        self._told: Told | None = None  # what was announced last
        self._counted: Told | None = None
        self._kept: dict[Digest, tuple[Round, Told]] = {}  # by its name: works, and when they were counted
        for path in sorted(self._folder.glob("*.safetensors")):
            path.unlink(missing_ok=True)  # of a process before this one
        trainer.on_step = self._stepped

    @property
    def trace_every(self) -> int:
        audits = self._replica.charter.audits
        return audits.trace_every if audits else 1

    @property
    def _tokens(self) -> int:
        return sum(piece.segment.num_steps * piece.tokens_per_step for piece in self._pieces)

    # --- training ---

    def begin(self, head: Manifest, holder: PeerId) -> None:
        """Take up a lease that was given after `head`, this peer's state; the steps that follow are on it."""
        name = digest_of(head)
        if self._pieces and self._pieces[-1].segment.head == name:
            return
        if self._carry.tokens != self._tokens:
            self._drop(UNTOLD)
        elif len(self._pieces) >= MAX_SEGMENTS:
            self._drop(TOO_LONG)
        if not self._pieces:
            self._follow()
        self._close()
        state = state_of(self._trainer)
        index = state_index(state)
        if self._pieces:
            state[OUTER] = self._replica.outer
        start = self._keep("segment", state)
        segment = Segment(head=name, round=head.round, holder=holder, num_steps=0)
        self._pieces.append(Piece(segment, start, self._replica.config.settings.tokens_per_step))
        self._names.append(digest_of(index))
        self._has_end = True

    def _stepped(self, num_steps: int) -> None:
        if not self._pieces:
            return
        piece = self._pieces[-1]
        piece.segment = _with_steps(piece.segment, num_steps)
        self._has_end = num_steps % self.trace_every == 0
        if self._has_end:
            self._names.append(digest_of(state_index(state_of(self._trainer))))

    def _close(self) -> None:
        """Name the state that the last segment ends with."""
        if not self._has_end:
            self._names.append(digest_of(state_index(state_of(self._trainer))))
            self._has_end = True

    def _follow(self) -> None:
        """Go on with the optimizer of the work that was counted last, or with a new one."""
        memory = memory_of(self._trainer)
        if self._counted is not None and state_index(memory) == _without(self._counted.last, LOCAL):
            return
        self._counted = None
        self._carry.forget_error()
        if int(self._trainer.private_state()["num_steps"]):
            self._emit(Notice(text="its optimizer begins anew, so that others can do its training steps again"))
        fresh = {name: zeros_like(value) for name, value in self._trainer.private_state().items()}
        self._trainer.load_private_state(fresh)

    def _drop(self, reason: str) -> None:
        if self._carry.tokens:
            self._emit(WorkDropped(tokens=Tokens(self._carry.tokens), reason=reason))
        self._carry.start_over()
        self._pieces, self._names, self._has_end, self._counted = [], [], True, None

    # --- rounds ---

    def work(self, head: Manifest, payload: Digest) -> Signed | None:
        """Return how this peer came to what it carries, of which it has made `payload` for the round after `head`;
        None: it brings nothing, for it has just dropped what it carried."""
        told = None if self._told is None else self._told.work
        if self._told is not None and told is not None and (told.branch, told.payload) == (head.branch, payload):
            return self._told.signed
        if not self._pieces or self._carry.tokens != self._tokens:
            self._drop(UNTOLD)
            return None
        if self._pieces[-1].segment.head != digest_of(head):
            self.begin(head, self._context.node.peer)
            if not self._pieces[0].segment.num_steps:
                return None
        self._close()
        self._told = self._tell(head, payload)
        return self._told.signed

    def _tell(self, head: Manifest, payload: Digest) -> Told:
        counted, before = self._counted, self._num_before()
        local, error = self._trainer.local(), self._carry.error
        end = self._keep("end", {LOCAL: local} if error is None else {LOCAL: local, ERROR: error})
        tree = Tree(bytes.fromhex(name) for name in self._names)
        left = self._carry.left
        work = Work(
            run=self._replica.run.run,
            branch=head.branch,
            round=Round(head.round + 1),
            peer=self._context.node.peer,
            segments=tuple(piece.segment for piece in self._pieces),
            follows=None if counted is None else counted.name,
            num_before=before[0],
            trace=tree.root(),
            payload=payload,
            tokens=self._carry.tokens,
            error=None if error is None else digest_of(state_index({ERROR: error})),
            left=None if left is None else digest_of(state_index({ERROR: left})),
        )
        pieces = tuple(replace(piece) for piece in self._pieces)
        return Told(
            work=work,
            signed=seal(self._context.identity, work),
            pieces=pieces,
            names=tuple(self._names),
            end=end,
            last=state_index(state_of(self._trainer)),
            num_before=before,
            files=(end.path, *(piece.start.path for piece in pieces)),
        )

    def _num_before(self) -> tuple[int, ...]:
        found, num = list[int](), self._trainer.num_steps
        for piece in reversed(self._pieces):
            num -= piece.segment.num_steps
            found.append(num)
        return tuple(reversed(found))

    def settle(self, manifest: Manifest, counted: Counted | None) -> None:
        """Take up what a round has counted of this peer; None: nothing."""
        told = self._told
        if counted is not None:
            if told is not None and counted.work == told.name:
                self._counted = told
                self._kept[told.name] = manifest.round, told
            else:
                self._counted = None
            self._told, self._pieces, self._names, self._has_end = None, [], [], True
        for name, (round, _told) in list(self._kept.items()):
            if round + KEPT_ROUNDS < manifest.round:
                del self._kept[name]
        self._sweep()

    def known(self, work: Digest) -> Told | None:
        """Return what was announced under this name, as far as audits may ask for it."""
        found = self._kept.get(work)
        return None if found is None else found[1]

    # --- small things ---

    def _keep(self, kind: str, vectors: dict[str, Tensor]) -> Kept:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{kind}-{next(self._serials)}.safetensors"
        return Kept(path, write_vectors(path, vectors))

    def _sweep(self) -> None:
        """Remove the files that nothing needs any more."""
        needed = set(self._needed())
        for path in self._folder.glob("*.safetensors"):
            if path not in needed:
                path.unlink(missing_ok=True)

    def _needed(self) -> Iterator[Path]:
        yield from (piece.start.path for piece in self._pieces)
        told = [each for _, each in self._kept.values()]
        for each in (*told, self._told, self._counted):
            if each is not None:
                yield from each.files


def _without(index: StateIndex, name: str) -> StateIndex:
    return StateIndex(vectors=tuple(vector for vector in index.vectors if vector.name != name))


def _with_steps(segment: Segment, num_steps: int) -> Segment:
    return Segment(head=segment.head, round=segment.round, holder=segment.holder, num_steps=num_steps)
