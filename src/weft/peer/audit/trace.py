"""How this peer came to what it carries: its training states, each named when it is there, and what is needed to come
to them again.

    begin       a lease is taken up, or what is carried was moved to other outer parameters: another segment
    (steps)     every `trace_every` of them the state is named
    work        what is announced with a payload: signed, and the same again as long as the payload is
    settle      a round is decided: what it counted is kept for audits, and the next work follows on it

    traces/     segment-7.safetensors    parameters and optimizer, as a segment began; later ones: outer parameters, too
                between-8.safetensors    the same after some of its steps (`between`)
                end-9.safetensors        parameters as a payload was made of them; what codecs had left before
                told-9.bin               the work that goes with it
                open.bin                 how far the next work was, as a checkpoint was written

An optimizer goes on from work to work, so a work names the one before. Where this peer cannot show how its optimizer
came about (it was killed in the middle of a lease, or gave up what it carried), it begins with a new one, which anybody
can check.

Failure:
- the disk does not take a file: this peer cannot answer audits. `DataError` or `DiskFull` ends it.
- it does not take a state inside a lease: this peer keeps none any more, and an event says so.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor, zeros_like

from weft.cost.audits import LEASE_ROUNDS
from weft.data.store import write_atomically
from weft.errors import CheckpointError, DataError, DiskFull, WireError
from weft.events import Emit, Notice, WorkDropped
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.ledger.tree import HASH_NBYTES, Tree
from weft.net.messages import HexDigest
from weft.peer.audit import between
from weft.peer.audit.between import Between, KeptVectors, Spacing
from weft.peer.audit.heads import Head
from weft.peer.audit.steps import ERROR, LOCAL, memory_of, named_error, state_of
from weft.peer.context import Context
from weft.peer.group.records import lease_of
from weft.peer.messages import NamedState
from weft.peer.state.carry import Carry
from weft.peer.state.checkpoint import write_vectors
from weft.peer.state.replica import Replica
from weft.store.chunks import state_index
from weft.store.home import RecordFile
from weft.sync.merge.method import OUTER
from weft.sync.records.index import StateIndex, VectorIndex
from weft.sync.records.messages import Counted, Manifest
from weft.sync.records.work import MAX_SEGMENTS, Segment, Work
from weft.training.trainer import Trainer
from weft.wire import Record, Signed, claimed, decode, digest, digest_of, encode, seal

MAX_NBYTES = 64 << 20  # of a list of states: 32 bytes each, and what names the chunks of a few
KEPT_ROUNDS, KEPT_S = LEASE_ROUNDS, 150.0  # both over: for which what audits may ask is kept, one and then everybody's
UNTOLD = "this peer cannot show how they came about: it was started again, or began at another state"
ELSEWHERE = "the run has split, and the others do not know what they followed on"
TOO_LONG = f"they were in none of {MAX_SEGMENTS} rounds, and how they came about grows too long to be told"


class Piece(Record, frozen=True, kw_only=True):
    """A segment, and the state that it begins with."""

    segment: Segment
    start: KeptVectors
    tokens_per_step: int
    num_before: int  # steps that the optimizer has made before it
    between: tuple[Between, ...] = ()  # states after some of its steps, in order

    def outer(self, folder: Path) -> Tensor:
        """Return the outer parameters that it began at.

        Raises:
            CheckpointError: as `KeptVectors.read`.
        """
        name = self.outer_index.name
        return self.start.read(folder, name)[name]

    @property
    def outer_index(self) -> VectorIndex:
        """The outer parameters that it began at, as they lie in the file."""
        return self.start.index.vector(OUTER if OUTER in self.start.index.shape else LOCAL)

    def nearest(self, folder: Path, num_steps: int) -> tuple[int, dict[str, Tensor]]:
        """Return the last state that is kept before or after so many steps, and how many it is after.

        Raises:
            CheckpointError: as `KeptVectors.read`, of the first.
        """
        for each in reversed(self.between):
            if each.num_steps <= num_steps:
                with suppress(CheckpointError):  # it is kept for some rounds only
                    return each.num_steps, each.kept.read(folder)
        return 0, {name: vector for name, vector in self.start.read(folder).items() if name != OUTER}


class Told(Record, frozen=True, kw_only=True):
    """A work that was announced, and all that audits of it may ask for."""

    signed: Signed
    pieces: tuple[Piece, ...]
    names: bytes  # of all states, in order
    end: KeptVectors  # what the payload was made of
    last: StateIndex  # of the last state
    counted: Round | None = None  # in which round; None: in none that is known here

    @property
    def name(self) -> Digest:
        return digest_of(self.signed)

    @property
    def work(self) -> Work:
        return claimed(self.signed, Work)

    @property
    def tree(self) -> Tree:
        return tree_of(self.names)

    @property
    def num_states(self) -> int:
        return len(self.names) // HASH_NBYTES

    def state(self, number: int) -> Digest:
        return Digest(self.names[HASH_NBYTES * number : HASH_NBYTES * (number + 1)].hex())

    def named(self, state: Digest, number: int) -> NamedState:
        return NamedState(state=state, path=self.tree.path(number))

    @property
    def files(self) -> set[str]:
        """Return what audits need, beside what saves them steps."""
        return {self.end.file, *(piece.start.file for piece in self.pieces)}

    @property
    def files_between(self) -> set[str]:
        return _between(self.pieces)


class Open(Record, frozen=True, kw_only=True):
    """What is told of the work that goes on, and what it goes on from."""

    pieces: tuple[Piece, ...] = ()
    names: bytes = b""
    has_end: bool = True  # the last state is named
    follows: HexDigest | None = None  # the work that was counted last, if its optimizer goes on
    branch: BranchId | None = None  # of the last segment, or of what it follows
    is_cut: bool = False  # it has gone on for more rounds than can be told
    memory: HexDigest | None = None  # the optimizer, when this was saved

    @property
    def num_tokens(self) -> int:
        return sum(piece.segment.num_steps * piece.tokens_per_step for piece in self.pieces)


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
        self.folder = context.folder.traces
        self._open_file: RecordFile[Open] = RecordFile(self.folder / "open.bin", Open, MAX_NBYTES, Open())
        self._serial = 0
        self._open: Open | None = None  # None: not looked yet what an earlier process left
        self._told: Told | None = None  # what was announced last, and no round has counted
        self._kept: dict[Digest, Told] = {}  # by its name
        self._kept_at: dict[Digest, float] = {}  # since when
        self._spacing = Spacing(context.clock)
        self._num_leased = 0  # steps of the lease
        self._has_room = True  # for states inside of it
        for path in self.folder.glob("*-*.*"):
            if (number := path.stem.rpartition("-")[2]).isdecimal():
                self._serial = max(self._serial, int(number) + 1)
        for path in sorted(self.folder.glob("told-*.bin")):
            with suppress(OSError, WireError):
                told = decode(path.read_bytes(), Told, max_nbytes=MAX_NBYTES)
                self._kept[told.name] = told
        trainer.on_step = self._stepped

    @property
    def trace_every(self) -> int:
        audits = self._replica.charter.audits
        return audits.trace_every if audits else 1

    # --- training ---

    def begin(self, head: Manifest, holder: PeerId) -> None:
        """Take up a lease that was given after `head`, this peer's state; the steps that follow are on it."""
        now, size = self._now(), self._replica.config.settings.batch_size
        self._num_leased = len(lease_of(head.leases, holder)) // size
        self._spacing.begin()
        if now.pieces and not (now.is_cut or self._carry.tokens != now.num_tokens):
            last = now.pieces[-1].segment
            if last.head == digest_of(head):
                if not last.num_steps:  # what is carried was moved here when the round was decided
                    self._open = replace(now, pieces=(*now.pieces[:-1], _held_by(now.pieces[-1], holder)))
                return
        if now.pieces or self._carry.tokens:
            self._drop(TOO_LONG if now.is_cut else UNTOLD)
        self._follow()
        self._append(head, holder)

    def _append(self, head: Manifest, holder: PeerId) -> None:
        """Begin another segment, with the state that there is."""
        now, state = self._now(), state_of(self._trainer)
        start = self._keep_state("segment", {**state, OUTER: self._replica.outer} if now.pieces else state)
        piece = Piece(
            segment=Segment(head=digest_of(head), round=head.round, holder=holder, num_steps=0),
            start=start,
            tokens_per_step=self._replica.config.settings.tokens_per_step,
            num_before=self._trainer.num_steps,
        )
        self._open = replace(now, pieces=(*now.pieces, piece), branch=head.branch)
        self._name(digest_of(without(start.index, OUTER)))

    def _stepped(self, num_steps: int) -> None:
        if self._open is None or not self._open.pieces:
            return
        self._spacing.end()
        *before, last = self._open.pieces
        piece = replace(last, segment=replace(last.segment, num_steps=num_steps))
        self._open = replace(self._open, pieces=(*before, piece), has_end=False)
        if num_steps % self.trace_every == 0:
            if self._is_due(piece):
                self._keep_between(piece)
            self.close()
        self._spacing.begin()

    def _is_due(self, piece: Piece) -> bool:
        """Return whether the state that there is, after some steps of a piece, is to be kept."""
        num_steps, audits = piece.segment.num_steps, self._replica.charter.audits
        if not audits or not self._has_room or num_steps >= self._num_leased:
            return False
        since = num_steps - (piece.between[-1].num_steps if piece.between else 0)
        return self._spacing.is_due(since, self._num_leased, audits.rate, audits.trace_every)

    def _keep_between(self, piece: Piece) -> None:
        now = self._now()
        try:
            kept = self._keep_state("between", state_of(self._trainer), is_synced=False)
        except (DiskFull, DataError) as error:
            self._has_room = False
            self._emit(Notice(text=f"audited, this peer will make up to a whole lease again: {error}"))
            return
        piece = replace(piece, between=(*piece.between, Between(num_steps=piece.segment.num_steps, kept=kept)))
        self._open = replace(now, pieces=(*now.pieces[:-1], piece))
        self._name(digest_of(kept.index))

    def close(self) -> None:
        """Name the state that there is, if it has no name yet: the last of a segment, before it is moved."""
        if self._open is not None and not self._open.has_end:
            self._name(digest_of(state_index(state_of(self._trainer))))

    def _name(self, state: Digest) -> None:
        now = self._now()
        self._open = replace(now, names=now.names + bytes.fromhex(state), has_end=True)

    def _now(self) -> Open:
        """Return what goes on: at first what an earlier process left, if this one has restored what belongs to it."""
        if self._open is None:
            found, self._open = self._open_file.read(), Open()
            is_same = found.memory is not None and found.memory == self._memory_name()
            if is_same and found.num_tokens == self._carry.tokens:
                self._open = found
        return self._open

    def save(self) -> None:
        """Let a process after this one go on, where a checkpoint has just been written.

        Raises:
            DiskFull, CheckpointError: it cannot be written.
        """
        if self._open is None:
            return
        try:
            self._open_file.keep(replace(self._open, memory=self._memory_name()))
        except DiskFull:
            raise
        except DataError as error:
            raise CheckpointError(str(error)) from error

    def _memory_name(self) -> Digest:
        """Return what tells an optimizer in the middle of a work from others."""
        count = self._trainer.num_steps
        return digest(f"{count} {digest_of(state_index(memory_of(self._trainer)))}".encode())

    def _follow(self) -> None:
        """Go on with the optimizer of the work that was counted last, or with a new one."""
        counted = self._kept.get(Digest(self._now().follows or ""))
        if counted is not None and state_index(memory_of(self._trainer)) == without(counted.last, LOCAL):
            return
        self._open = Open()
        self._carry.forget_error()
        if self._trainer.num_steps:
            self._emit(Notice(text="its optimizer begins anew, so that others can do its training steps again"))
        fresh = {name: zeros_like(value) for name, value in self._trainer.private_state().items()}
        self._trainer.load_private_state(fresh)

    def _drop(self, reason: str) -> None:
        if self._carry.tokens:
            self._emit(WorkDropped(tokens=Tokens(self._carry.tokens), reason=reason))
        self._carry.start_over()
        self._open = Open()

    # --- rounds ---

    def work(self, head: Manifest, payload: Digest) -> Signed | None:
        """Return how this peer came to what it carries, of which it has made `payload` for the round after `head`;
        None: it brings nothing, for it has just dropped what it carried.

        Raises:
            DiskFull, DataError: what audits may ask for cannot be written.
        """
        if self._told is not None:
            told = self._told.work
            if (told.branch, told.payload, told.tokens) == (head.branch, payload, self._carry.tokens):
                return self._told.signed
        now = self._now()
        is_here = bool(now.pieces) and now.pieces[-1].segment.head == digest_of(head)
        if not is_here or now.is_cut or self._carry.tokens != now.num_tokens:
            self._drop(TOO_LONG if now.is_cut else UNTOLD)
            return None
        self.close()
        self._told = self._tell(self._now(), head, payload)
        return self._told.signed

    def _tell(self, now: Open, head: Manifest, payload: Digest) -> Told:
        error = self._carry.error
        local = {LOCAL: self._trainer.local()}
        work = Work(
            run=self._replica.run.run,
            branch=head.branch,
            round=Round(head.round + 1),
            peer=self._context.node.peer,
            segments=tuple(piece.segment for piece in now.pieces),
            follows=now.follows,
            num_before=now.pieces[0].num_before,
            trace=tree_of(now.names).root(),
            payload=payload,
            tokens=self._carry.tokens,
            error=named_error(error),
            left=named_error(self._carry.left),
        )
        told = Told(
            signed=seal(self._context.identity, work),
            pieces=now.pieces,
            names=now.names,
            end=self._keep("end", local if error is None else {**local, ERROR: error}),
            last=state_index(state_of(self._trainer)),
        )
        self._write(told)
        return told

    def settle(self, manifest: Manifest, counted: Counted | None, is_offered: bool) -> None:
        """Take up what a round, whose outer step is made, has counted of this peer; None: nothing.

        Args:
            is_offered: this process had offered something to it.

        Raises:
            DiskFull, DataError: it cannot be written.
        """
        now = self._now()
        if counted is not None:
            told, self._told = self._told, None
            is_mine = told is not None and counted.work == told.name and is_offered
            self._open = Open(follows=told.name if told is not None and is_mine else None, branch=manifest.branch)
            if told is not None and is_mine:
                self._write(replace(told, counted=manifest.round))
        elif now.branch not in (None, manifest.branch):
            self._drop(ELSEWHERE)  # who is on the other branch knows nothing of what it followed on
        elif now.pieces and not now.num_tokens:
            self._open = Open(follows=now.follows, branch=now.branch)
        elif now.pieces:
            if self._told is None:
                self._carry.forget_encoded()
            if len(now.pieces) < MAX_SEGMENTS:
                self._append(manifest, self._context.node.peer)
            else:
                self._open = replace(now, is_cut=True)
        now_s = self._context.clock.now()
        recent = set[Digest]()  # of which states inside a lease are kept
        for name, each in list(self._kept.items()):
            num_rounds = manifest.round - (each.counted or each.work.round)
            num_s = now_s - self._kept_at.setdefault(name, now_s)
            if num_rounds > KEPT_ROUNDS and num_s > KEPT_S:
                del self._kept[name], self._kept_at[name]
            elif num_rounds <= between.KEPT_ROUNDS or num_s <= between.KEPT_S:
                recent.add(name)
        self._sweep(recent)

    def known(self, work: Digest) -> Told | None:
        """Return what was announced under this name, as far as audits may ask for it."""
        return self._kept.get(work)

    def began_at(self, head: Head) -> Piece | None:
        """Return a segment that began at the parameters after a manifest, as far as it is kept; None: none is."""
        pieces = [piece for told in list(self._kept.values()) for piece in told.pieces]
        pieces += [] if self._open is None else self._open.pieces
        name, outer = digest_of(head.manifest), head.outer.chunks
        return next((each for each in pieces if each.segment.head == name and each.outer_index.chunks == outer), None)

    @property
    def counted(self) -> tuple[Told, ...]:
        """Return what was announced and rounds have counted, as far as audits may ask for it."""
        return tuple(told for told in list(self._kept.values()) if told.counted is not None)

    @property
    def works(self) -> tuple[Signed, ...]:
        """Return all works of which audits may ask."""
        return tuple(told.signed for told in self._kept.values())

    # --- the folder ---

    def _keep_state(self, kind: str, vectors: dict[str, Tensor], *, is_synced: bool = True) -> KeptVectors:
        began = self._context.clock.now()
        kept = self._keep(kind, vectors, is_synced=is_synced)
        self._spacing.wrote(self._context.clock.now() - began)
        return kept

    def _keep(self, kind: str, vectors: dict[str, Tensor], *, is_synced: bool = True) -> KeptVectors:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = f"{kind}-{self._serial}.safetensors"
        self._serial += 1
        return KeptVectors(file=file, index=write_vectors(self.folder / file, vectors, is_synced=is_synced))

    def _write(self, told: Told) -> None:
        write_atomically(self.folder / _file_of(told), [encode(told)])
        self._kept[told.name] = told
        self._kept_at.setdefault(told.name, self._context.clock.now())

    def _sweep(self, recent: Collection[Digest]) -> None:
        """Remove the files that nothing needs any more.

        Args:
            recent: works of which states inside a lease are kept.
        """
        pieces = () if self._open is None else self._open.pieces
        needed = {piece.start.file for piece in pieces} | _between(pieces)
        needed.update(*(told.files for told in self._kept.values()))
        needed.update(*(self._kept[name].files_between for name in recent))
        needed |= {_file_of(told) for told in self._kept.values()}
        for path in self.folder.glob("*-*.*"):
            if path.name not in needed:
                path.unlink(missing_ok=True)


def _between(pieces: Iterable[Piece]) -> set[str]:
    """Return the files of states inside leases."""
    return {each.kept.file for piece in pieces for each in piece.between}


def _held_by(piece: Piece, holder: PeerId) -> Piece:
    return replace(piece, segment=replace(piece.segment, holder=holder))


def tree_of(names: bytes) -> Tree:
    """Return the tree over the digests of states."""
    return Tree(names[start : start + HASH_NBYTES] for start in range(0, len(names), HASH_NBYTES))


def _file_of(told: Told) -> str:
    """Return the name of the file of what was told: of its payload's."""
    return f"told-{told.end.file.partition('-')[2].partition('.')[0]}.bin"


def without(index: StateIndex, name: str) -> StateIndex:
    return StateIndex(vectors=index.without(name))
