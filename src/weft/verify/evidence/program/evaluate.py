"""All operations of a training step, one after the other, and what names what they came to.

    for number, output in evaluate(program, parameters, words): ...
    names = named(program, parameters, words)       the digest of each output's list of chunks
    held_nbytes(program)                            how much it holds at a time
    room_nbytes(program)                            how much is to be free for it

What is needed later is kept, and nothing else. Of what is as wide as tokens by tokens most is made a second time when
the way back comes to it: else all layers would hold theirs at once.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.ids import Digest
from weft.sync.records.index import CHUNK_NBYTES, StateIndex, VectorIndex
from weft.verify.evidence.program.grids import Array
from weft.verify.evidence.program.operation import Parameters
from weft.verify.evidence.program.samples import Words
from weft.verify.evidence.program.step import Program
from weft.wire import digest, digest_of

OUTPUT, GRADIENT = "output", "gradient"  # the one vector of a list
_NOTHING = np.empty(0, np.float32)
ON_THE_WAY = 2.0  # times what is held: single operations take more on their way
_SOON = 16  # operations: what is wide and not read within so many is made again


def evaluate(
    program: Program, parameters: NDArray[np.float32], words: Array, num: int | None = None
) -> Iterator[tuple[int, Array]]:
    """Yield what operations come to, flat, with their numbers, in order. It is to be read before the next.

    Args:
        parameters: before the step.
        words: of the step's samples, [samples, tokens + 1].
        num: of operations; None: all.
    """
    step = _Step(program, parameters, words)
    for number in range(len(program.operations) if num is None else num):
        yield number, step.next(number)


def held_nbytes(program: Program) -> int:
    """Return the bytes of what operations come to that are held at a time, at most; not what one takes on its way."""
    step = _Sizes(program, np.empty(0, np.float32), np.empty(0, np.uint32))
    for number in range(len(program.operations)):
        step.next(number)
    return step.most_nbytes


def room_nbytes(program: Program) -> int:
    """Return the bytes that are to be free where a step is made operation by operation."""
    return round(ON_THE_WAY * held_nbytes(program))


class _Step:
    """
    Attributes:
        most_nbytes: of what was held at a time, so far.
    """

    def __init__(self, program: Program, parameters: NDArray[np.float32], words: Array) -> None:
        self._operations = program.operations
        self._parameters = parameters
        self._words = np.ascontiguousarray(words.reshape(-1).astype(np.uint32))
        self._held = dict[int, Array]()
        self.most_nbytes = self._nbytes = 0
        self._readers = dict[int, list[int]]()  # of each output, latest first
        for number in reversed(range(len(program.operations))):
            for each in program.operations[number].operands:
                if isinstance(each, int):
                    self._readers.setdefault(each, []).append(number)

    def next(self, number: int) -> Array:
        for each in self._operations[number].operands:
            if isinstance(each, int):
                self._hold(each)
        found = self._hold(number)
        for each in (number, *self._operations[number].operands):
            if isinstance(each, int):
                self._let_go(each, number)
        return found

    def _hold(self, number: int) -> Array:
        if number not in self._held:
            found = self._held[number] = self._value(number)
            self._nbytes += found.nbytes
            self.most_nbytes = max(self.most_nbytes, self._nbytes)
        return self._held[number]

    def _let_go(self, each: int, number: int) -> None:
        readers = self._readers.get(each, [])
        while readers and readers[-1] <= number:
            readers.pop()
        if not readers or (self._operations[each].kind.is_wide and readers[-1] > number + _SOON):
            self._nbytes -= self._held.pop(each, _NOTHING).nbytes

    def _value(self, number: int) -> Array:
        if (found := self._held.get(number)) is not None:
            return found
        operation = self._operations[number]
        operands = (
            [self._words]
            if isinstance(operation.kind, Words)
            else [
                self._parameters[each.start : each.start + each.num]
                if isinstance(each, Parameters)
                else self._value(each)
                for each in operation.operands
            ]
        )
        with np.errstate(all="ignore"):  # of numbers that no honest peer has
            return operation.kind.whole(operands)


class _Sizes(_Step):
    """Of arrays that take no memory."""

    def _value(self, number: int) -> Array:
        kind = self._operations[number].kind
        found: Array = np.broadcast_to(np.zeros(1, kind.dtype), kind.num)
        return found


def named(program: Program, parameters: NDArray[np.float32], words: Array) -> list[Digest]:
    """Return the digest of the list of what each operation comes to; as of `evaluate`."""
    return [digest_of(listed(program, *each)) for each in evaluate(program, parameters, words)]


def listed(program: Program, number: int, output: Array) -> StateIndex:
    """Return the list of chunks of what an operation comes to, in words of four bytes."""
    data = as_words(output)
    span = CHUNK_NBYTES // 4
    chunks = tuple(digest(data[start : start + span].data.cast("B")) for start in range(0, len(data), span))
    name = GRADIENT if number == program.gradient else OUTPUT
    return StateIndex(vectors=(VectorIndex(name=name, num=len(data), chunks=chunks),))


def as_words(output: Array) -> NDArray[np.float32]:
    """Return numbers as words of four bytes, which are named like fp32."""
    found: NDArray[np.float32] = np.ascontiguousarray(output).view(np.float32)
    return found


def taken(program: Program, parameters: NDArray[np.float32], words: Array, wanted: Sequence[int]) -> dict[int, Array]:
    """Return what some operations come to; as of `evaluate`."""
    found = dict[int, Array]()
    for number, output in evaluate(program, parameters, words, max(wanted) + 1):
        if number in wanted:
            found[number] = output
    return found
