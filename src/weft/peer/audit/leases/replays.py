"""Counted training steps made again by who was not drawn, from what their peer shows of how its leases began.

    begin       the first state of a lease, as it was signed; where it is not here, what the work before ended with
    follows     it is the run's parameters with the optimizer of the work before, or a new one; later leases begin where
                the one before has ended, moved along with the outer parameters
    steps       all of the lease, on this machine
    end         the state that was signed: equal bits; or, where machines round differently, as near as honest ones are;
                or as near as steps that rounding leads far apart lead on this machine alone
    root        of a work that is made again from its first state on: the signed root over all states
    payload     what is made of the end, and what its codec leaves

The same checks as an auditor's (`weft.peer.audit.auditor`), of leases in the place of single steps, for what is kept of
a state is how a lease began. In bf16 a lease of many steps ends so far apart on honest machines that little is seen.

What is shown is signed: the digest of each state has a path to the signed root. So what does not fit to it is no fault
of who signed (`DataError`), and what does, and is not so, is (`differs`).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.errors import CheckpointError, DataError, NotFinite, WireError
from weft.ids import Digest, PeerId, Round, short
from weft.ledger.tree import Tree
from weft.peer.audit.heads import Head
from weft.peer.audit.steps import (
    ERROR,
    LOCAL,
    distance,
    held_of,
    led_apart,
    method_at,
    named_error,
    payload_of_end,
    repeat,
    shape_of,
    some_roundings_off,
    state_of,
    why_beyond,
    widened_by,
)
from weft.peer.messages import NamedState
from weft.run.config import RunConfig
from weft.store.chunks import raw, state_index
from weft.sync.merge.method import Scope
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex
from weft.sync.records.messages import payload_of
from weft.sync.records.work import Work, is_state, num_states, state_after, state_before
from weft.training.device import first_line
from weft.training.learner import nothing
from weft.training.trainer import Trainer
from weft.verify.evidence.works import false_by_words, false_claim
from weft.verify.judge import NUM_ROUNDINGS, Numerics
from weft.wire import Buffer, decode, digest, digest_of

Outcome = Literal["equal", "near", "differs", "unknown"]
NOT_KEPT = "what its lease began with is not here"
State = dict[str, Tensor]


@dataclass(frozen=True)
class Replayed:
    """What came of one lease of a work.

    Args:
        segment: its number in the work.
        outcome: equal bits; or as near as honest machines are; or not. Unknown: it cannot be told here.
        distance: of the parameters, relative to what the steps changed.
        held: how far they may lie apart; 0: the bits are equal, or nothing was compared.
    """

    segment: int
    num_steps: int
    outcome: Outcome
    why: str = ""
    distance: float = 0.0
    held: float = 0.0


@dataclass(frozen=True)
class Ended:
    """The bits that a work ended with, as this machine came to them, and what its codec left."""

    state: State
    left: Float32[Tensor, " num_kept"] | None


@dataclass(frozen=True)
class Before:
    """The work that another goes on from.

    Args:
        last: the list of the state that it ended with; None: that is not here.
        ended: the same as numbers, where this machine has made its steps again; None: it has not.
    """

    work: Work
    last: StateIndex | None = None
    ended: Ended | None = None


@dataclass(frozen=True)
class Shown:
    """What a peer shows of a work: paths to what it has signed."""

    begins: tuple[NamedState, ...]
    ends: tuple[NamedState, ...]


@dataclass(frozen=True)
class Case:
    """A counted work, and what it stands on.

    Args:
        heads: that its segments begin at.
        outers: the parameters then.
        shown: None: nothing is here; then all of its leases are made, from where the work before has ended.
        before: the work that it goes on from; None: it is not known here.
    """

    work: Work
    heads: Sequence[Head]
    outers: Sequence[Float32[Tensor, " num"]]
    shown: Shown | None = None
    before: Before | None = None

    @property
    def last(self) -> int:
        """The number of the last segment."""
        return len(self.work.segments) - 1

    @property
    def trace_every(self) -> int:
        return _every(self.heads[-1])

    @property
    def is_derived(self) -> bool:
        """Whether what it began with can be had without its peer."""
        return self.work.follows is None or (self.before is not None and self.before.ended is not None)

    def is_new(self, number: int) -> bool:
        """Return whether the first step of a segment is the first of an optimizer."""
        return not number and not self.work.num_before

    def of(self, number: int, outcome: Outcome, why: str = "", distance: float = 0.0) -> Replayed:
        """Return what came of a segment."""
        return Replayed(number, self.work.segments[number].num_steps, outcome, why, distance)


class NotHere(DataError):
    """It has not been kept."""


class _Differs(Exception):
    """What was signed is not so."""


@dataclass(frozen=True)
class _Made:
    """A lease that was made again."""

    begin: State
    end: State
    names: list[Digest]  # of all states of it, the first among them


class Replays:
    """
    Args:
        trainer: on its device. It is lent, and as before then.
        blob: returns the bytes of a digest, checked; `NotHere`: they were not kept, `DataError`: they are altered.
        between: called after each training step; what it raises ends the replay.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunConfig,
        numerics: Numerics,
        blob: Callable[[Digest], Buffer],
        between: Callable[[], None] = nothing,
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._numerics = numerics
        self._blob = blob
        self._between = between
        self._shape = shape_of(trainer)

    def check(self, case: Case, wanted: Collection[int]) -> tuple[list[Replayed], Ended | None]:
        """Return what came of leases of a work, and what it ended with, where this machine came to the same bits.

        Args:
            wanted: numbers of segments.

        Raises:
            DataError: what is here is altered, or not whole.
            OutOfMemory: as `Trainer.train`.
        """
        try:
            _require(false_claim(case.work, [(head.manifest, head.charter) for head in case.heads]))
            if case.shown is None:
                return self._from_before(case, wanted)
            return self._from_shown(case, case.shown, wanted)
        except _Differs as error:
            return [case.of(each, "differs", str(error)) for each in wanted], None

    # --- from what is shown ---

    def _from_shown(self, case: Case, shown: Shown, wanted: Collection[int]) -> tuple[list[Replayed], Ended | None]:
        work, every, found, names = case.work, case.trace_every, list[Replayed](), list[Digest]()
        begins = [
            self._named(case, each, at, every) for each, at in zip(shown.begins, _firsts(work, every), strict=True)
        ]
        before: tuple[int, _Made] | None = None  # the segment that was made just now
        for number in sorted(wanted):
            try:
                if number == 0:
                    self._check_first(case, begins[0])
                begin = self._begin(case, number, begins[number])
                if before is not None and before[0] == number - 1:
                    self._check_moved(case, shown, number, before[1], found[-1])
                made = self._made(case, number, begin)
                names, before = names + made.names, (number, made)
                found.append(self._compared(case, shown, begins, number, made))
            except _Differs as error:
                before = None
                found.append(case.of(number, "differs", str(error)))
        is_same = all(each.outcome == "equal" for each in found)
        if is_same and len(names) == num_states(work.segments, every) and _root(names) != work.trace:
            why = "it has named other states on the way than these training steps come to"
            return [case.of(each.segment, "differs", why) for each in found], None
        if before is None or before[0] != case.last or found[-1].outcome == "differs":
            return found, None
        end = before[1].end if is_same else self._end(shown)
        return self._with_payload(case, found, end, is_same=is_same)

    def _with_payload(
        self, case: Case, found: list[Replayed], end: State | None, *, is_same: bool
    ) -> tuple[list[Replayed], Ended | None]:
        """Check what was made of a work's last state."""
        if end is None:
            return found, None
        try:
            left = self._encoded(case, end[LOCAL])
        except _Differs as failure:
            return [*found[:-1], case.of(case.last, "differs", str(failure))], None
        return found, Ended(end, left) if is_same else None

    def _begin(self, case: Case, number: int, index: StateIndex) -> State:
        """Return what a segment begins with; the parameters of the first are the run's."""
        if number or not case.heads[0].outer.chunks:
            return self.vectors(index)
        names = {vector.name for vector in index.vectors} - {LOCAL}
        return {**self.vectors(index, names), LOCAL: case.outers[0]}

    def _named(self, case: Case, shown: NamedState, number: int, every: int) -> StateIndex:
        self._require_signed(case, shown, number, every)
        index = self._index(Digest(shown.state))
        if index.shape != self._shape:
            raise _Differs("what it has named is no state of this model")
        return index

    def _require_signed(self, case: Case, shown: NamedState, number: int, every: int) -> None:
        work = case.work
        if not is_state(Digest(work.trace), work.segments, every, number, Digest(shown.state), shown.path):
            raise DataError(f"a state of the work of {short(PeerId(work.peer))} is altered: it is none that was signed")

    def _check_first(self, case: Case, begin: StateIndex) -> None:
        """Check what the first state follows from."""
        work, outer, before = case.work, case.heads[0].outer, case.before
        if outer.chunks and begin.vector(LOCAL).chunks != outer.chunks:
            raise _Differs("it did not begin at the run's parameters")
        memory = begin.without(LOCAL)
        if work.follows is None:
            _require(false_by_words(work, None))
            if state_index({each.name: torch.zeros(each.num) for each in memory}).vectors != memory:
                raise _Differs("it says that its optimizer is new, and it is not")
        elif before is not None:
            _require(false_by_words(work, before.work))
            if before.last is not None and before.last.without(LOCAL) != memory:
                raise _Differs("its optimizer does not go on from the work that it names")

    def _check_moved(self, case: Case, shown: Shown, number: int, last: _Made, found: Replayed) -> None:
        """Check that a segment begins where the one before, which was made just now, has ended.

        Args:
            found: of the one before. Where this machine came to other bits, it was compared with this very begin.
        """
        if last.names[-1] == shown.ends[number - 1].state:
            is_kept = digest_of(state_index(self._moved(case, number, last.end))) == shown.begins[number].state
        else:
            is_kept = found.outcome == "near"
        if not is_kept:
            raise _Differs("it did not keep what it had when it was moved to other parameters")

    def _compared(self, case: Case, shown: Shown, begins: Sequence[StateIndex], number: int, made: _Made) -> Replayed:
        """Return how near the end of a lease is to the one that was signed."""
        segment, every = case.work.segments[number], case.trace_every
        self._require_signed(case, shown.ends[number], state_after(case.work.segments, every, number), every)
        if made.names[-1] == shown.ends[number].state:
            return case.of(number, "equal")
        if self._numerics == "exact":
            raise _Differs("it came to another state by these training steps")
        if number < case.last:
            mine, theirs = self._moved(case, number + 1, made.end), self.vectors(begins[number + 1])
        else:
            mine, found = made.end, self._end(shown)
            if found is None:
                return case.of(number, "unknown", "what it ended with is not here to compare")
            theirs = found
        apart = {name: distance(made.begin[name], mine[name], theirs[name]) for name in theirs}
        num_steps = max(segment.num_steps, 1)
        held = held_of(self._numerics, num_steps, apart, is_new=case.is_new(number))
        if self._numerics == "fp32" and why_beyond(apart, held) is not None:
            held = widened_by(held, num_steps, self._rounded(case, number, made, mine))
        if (why := why_beyond(apart, held)) is not None:
            return replace(case.of(number, "differs", why, max(apart.values())), held=held[LOCAL])
        return replace(case.of(number, "near", distance=apart[LOCAL]), held=held[LOCAL])

    def _rounded(self, case: Case, number: int, made: _Made, mine: State) -> list[dict[str, float]]:
        """Return how far rounding alone leads in a lease, by vector, each time that its steps are made once more.

        Args:
            mine: what the lease came to, at the parameters where it is compared.
        """
        if not (num_steps := case.work.segments[number].num_steps):
            return []
        found = list[dict[str, float]]()
        for draw in range(NUM_ROUNDINGS):
            begin = some_roundings_off(made.begin, draw)
            with suppress(_Differs):
                end = self._repeated(case, number, begin, lambda _num: self._between())
                found.append(led_apart(num_steps, (made.begin, made.end), (begin, end), mine))
        return found

    # --- from the work before ---

    def _from_before(self, case: Case, wanted: Collection[int]) -> tuple[list[Replayed], Ended | None]:
        work, numbers = case.work, sorted(wanted) or [case.last]
        if not case.is_derived:
            return [case.of(each, "unknown", NOT_KEPT) for each in numbers], None
        before, memory = case.before, {name: torch.zeros(num) for name, num in self._shape.items()}
        if work.follows is None or before is None or before.ended is None:
            _require(false_by_words(work, None))
        else:
            _require(false_by_words(work, before.work))
            memory = before.ended.state
        state, names = {**memory, LOCAL: case.outers[0]}, list[Digest]()
        for number in range(len(work.segments)):
            made = self._made(case, number, self._moved(case, number, state) if number else state)
            state, names = made.end, names + made.names
        if _root(names) != work.trace:
            if self._numerics != "exact":
                return [case.of(each, "unknown", NOT_KEPT) for each in numbers], None
            raise _Differs("it came to other states by these training steps")
        return self._with_payload(case, [case.of(each, "equal") for each in numbers], state, is_same=True)

    # --- steps ---

    def _made(self, case: Case, number: int, begin: State) -> _Made:
        every, segment, names = case.trace_every, case.work.segments[number], [digest_of(state_index(begin))]
        if not segment.num_steps:
            return _Made(begin, begin, names)

        def note(num_steps: int) -> None:
            self._between()
            if num_steps % every == 0 or num_steps == segment.num_steps:
                names.append(digest_of(state_index(state_of(self._trainer))))

        return _Made(begin, self._repeated(case, number, begin, note), names)

    def _repeated(self, case: Case, number: int, begin: State, on_step: Callable[[int], None]) -> State:
        """Return the state after all steps of a segment."""
        work, head, outer = case.work, case.heads[number], case.outers[number]
        segment, before = work.segments[number], sum(each.num_steps for each in work.segments[:number])
        given = head, segment, begin, outer, work.num_before + before, 0, segment.num_steps
        try:
            return repeat(self._trainer, self._run, *given, on_step=on_step)
        except (CheckpointError, DataError) as error:
            raise _Differs(str(error)) from None
        except NotFinite as error:
            raise _Differs(f"its state is none to go on from: {error}") from None

    def _moved(self, case: Case, number: int, end: State) -> State:
        """Return the last state of the segment before one, at the outer parameters that the one begins at."""
        delta = method_at(self._run, case.heads[number - 1]).delta(case.outers[number - 1], end[LOCAL])
        return {**end, LOCAL: case.outers[number].clone().sub_(delta)}

    def _encoded(self, case: Case, local: Tensor) -> Tensor | None:
        """Return what a codec leaves of the payload of a work, which is the one that was signed."""
        work, head, outer = case.work, case.heads[-1], case.outers[-1]
        scope, error = Scope(outer.numel(), self._run.method.fragments), self._error(case)
        try:
            encoded, left = payload_of_end(self._run, head, scope, Round(work.round), outer, local, error)
        except (NotFinite, RuntimeError, ValueError) as failure:  # of its numbers, or of how many there are
            raise _Differs(f"no payload can be made of its last state: {first_line(failure)}") from None
        if payload_of(map(digest, encoded)) != work.payload:
            raise _Differs("its payload is not what its training steps came to")
        if named_error(left) != work.left:
            raise _Differs("what its codec left is not what it says")
        return left

    # --- what is here ---

    def _index(self, name: Digest) -> StateIndex:
        try:
            return decode(self._blob(name), StateIndex, max_nbytes=MAX_INDEX_NBYTES)  # type: ignore[no-any-return]
        except WireError as error:
            raise _Differs(f"what it has named is no state: {error}") from None

    def vectors(self, index: StateIndex, names: Collection[str] | None = None) -> State:
        """Return vectors of a state that is here.

        Args:
            names: of them; None: all.

        Raises:
            DataError: they are not here, or altered.
        """
        found = State()
        for vector in index.vectors:
            if names is None or vector.name in names:
                found[vector.name] = torch.empty(vector.num)
                here, start = raw(found[vector.name]), 0
                for chunk in vector.chunks:
                    data = self._blob(Digest(chunk))
                    if len(data) > len(here) - start:
                        raise _Differs("what it has named is no state of this model")
                    here[start : start + len(data)] = memoryview(data)
                    start += len(data)
                if start != len(here):
                    raise _Differs("what it has named is no state of this model")
        return found

    def _end(self, shown: Shown) -> State | None:
        """Return the parameters that a work ended with, if they are here."""
        index = self._index(Digest(shown.ends[-1].state))
        if index.shape != self._shape:
            raise _Differs("what it has named is no state of this model")
        try:
            return self.vectors(index, {LOCAL})
        except NotHere:
            return None

    def _error(self, case: Case) -> Tensor | None:
        """Return what codecs had left before a work."""
        if case.work.error is None:
            return None
        if case.shown is None:
            return None if case.before is None or case.before.ended is None else case.before.ended.left
        index = self._index(Digest(case.work.error))
        if index.shape.keys() != {ERROR} or index.shape[ERROR] > 2 * case.outers[0].numel():
            raise _Differs("what its codec had left before is no such thing")
        return self.vectors(index)[ERROR]


def _require(fault: str | None) -> None:
    if fault is not None:
        raise _Differs(fault)


def _every(head: Head) -> int:
    audits = head.charter.audits
    return audits.trace_every if audits else 1


def _firsts(work: Work, every: int) -> list[int]:
    """Return the numbers of the first states of all segments."""
    return [state_before(work.segments, every, number) for number in range(len(work.segments))]


def _root(names: Sequence[Digest]) -> Digest:
    return Tree(map(bytes.fromhex, names)).root()
