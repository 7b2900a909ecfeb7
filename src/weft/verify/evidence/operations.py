"""A gradient that is not that of a step's samples: one number of one operation, made again from what it reads.

    signed     the Work, which names the state before the step; the MadeStep, which names what all operations came to
    ground     the manifest that gave the lease, and the charter after it: the model, and which samples the step is of
    operation  the first that came to something else than an auditor's: what it reads is the same on both sides
    number     of what it came to, and the few numbers that it is made of, each shown by its digest

What the operations are is the part of `weft.verify.evidence.program`. Whatever a worker makes up, one of them is false:
those at the beginning read the run's own words and the state before, and the last are the gradient and its length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from msgspec import UNSET
from numpy.typing import DTypeLike, NDArray

from weft.data.store import DataIndex
from weft.ids import Digest, PeerId
from weft.ledger.opening import Slice, open_slice
from weft.ledger.tree import Path, Tree, is_leaf
from weft.model.config import ModelConfig, has_base, num_parameters
from weft.sync.method.choices import Choices
from weft.sync.records.charter import Charter, GradientTerms
from weft.sync.records.index import CHUNK_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import Manifest
from weft.sync.records.work import Link, MadeStep, Work
from weft.verify.evidence.leased import Sampled
from weft.verify.evidence.program.evaluate import GRADIENT, OUTPUT, as_words
from weft.verify.evidence.program.evaluate import listed as listed_output
from weft.verify.evidence.program.grids import Array
from weft.verify.evidence.program.operation import Operation, Parameters
from weft.verify.evidence.program.samples import Words
from weft.verify.evidence.program.step import MAX_OPERATIONS, Program, num_operations, program
from weft.verify.evidence.records import FalseList, FalseOperation, Ground, ShownOutput, ShownState
from weft.verify.evidence.shown import Book, Unproven, numbers_slice, place_of
from weft.verify.evidence.steps import link_of
from weft.verify.evidence.works import LOCAL, index_in, listed, stands_on
from weft.wire import Buffer, digest, digest_of, encode

MAX_PARAMETERS = 1 << 30  # more fit no list of chunks that may be shown
MAX_CHANNELS = 1 << 12  # of a head
SPAN = CHUNK_NBYTES // 4  # words that a slice shows at most: none of them lies in two chunks

Shards = Callable[[Digest], Buffer | None]  # of the run's data


def program_of(charter: Charter) -> Program:
    """Return the operations of a training step.

    Raises:
        Unproven: the gradient of this run's steps is made of something else, or of too much.
    """
    terms, settings = _terms(charter), charter.settings
    return program_for(terms.model, settings.method, settings.batch_size, settings.seq_len, terms.micro_batch)


def program_for(model: ModelConfig, method: Choices, samples: int, tokens: int, micro_batch: int) -> Program:
    """As `program_of`, of steps of so many samples.

    Args:
        tokens: of a sample.
        micro_batch: samples that are computed at a time.

    Raises:
        Unproven: as `program_of`.
    """
    micro_batch = min(micro_batch, samples)
    if method.proximal or has_base(model):
        raise Unproven("the gradient is made of more than operations are written down for")
    num = num_operations(model, -(-samples // micro_batch))
    if max(num_parameters(model) / MAX_PARAMETERS, model.channels_per_head / MAX_CHANNELS, num / MAX_OPERATIONS) > 1:
        raise Unproven("the training step is too large to be shown apart")
    return program(model, samples, tokens, micro_batch)


def _terms(charter: Charter) -> GradientTerms:
    audits = charter.audits
    if audits is UNSET or audits.exact is UNSET or audits.exact.gradient is UNSET:
        raise Unproven("in this run a gradient cannot be shown apart")
    return audits.exact.gradient


# --- lists ---


def check_list(work: Work, made: MadeStep, shown: FalseList) -> str:
    """Return in which way what a worker lists of a step's operations contradicts what it signed, or itself.

    Args:
        made: of this very work.

    Raises:
        Unproven: it does not.
    """
    _, _, charter = _standing(work, made, shown.ground)
    found, number = program_of(charter), shown.path.index
    if not _is_listed(made, Digest(shown.leaf), shown.path):
        raise Unproven("an operation is shown that was not signed")
    if shown.path.count != len(found.operations):
        return "it lists other operations than a training step is of"
    if number == found.gradient and shown.leaf != made.gradient:
        return "the gradient that it lists is not the one that its training step went along"
    if number == len(found.operations) - 1 and shown.leaf != length_name(found, made.norm):
        return "the length that it lists is not the one that its gradient was shortened by"
    is_index = shown.index is not UNSET and digest(shown.index) == shown.leaf
    if shown.index is not UNSET and is_index and index_in(shown.index).shape != shape_of(found, number):
        return f"it lists another shape than an operation of its step has ({found.operations[number].name})"
    raise Unproven("it lists what belongs there")


def length_name(found: Program, length: float) -> Digest:
    """Return what the last operation is called, where a gradient is so long."""
    return digest_of(listed_output(found, len(found.operations) - 1, np.array([length])))


def prove_list(
    work: Work, made: MadeStep, ground: Ground, names: Sequence[Digest], number: int, index: bytes | None = None
) -> FalseList:
    """Return what shows that a list of operations cannot be so.

    Args:
        names: the list.
        number: of the operation at which it is false.
        index: what it names there, if that is what is false.
    """
    path = tree_of(names).path(number)
    shown = FalseList(ground=ground, leaf=names[number], path=path, index=UNSET if index is None else index)
    check_list(work, made, shown)
    return shown


def contradiction(found: Program, made: MadeStep, names: Sequence[Digest]) -> int | None:
    """Return the number of an operation at which a list contradicts what was signed of the step; None: nowhere."""
    if len(names) != len(found.operations):
        return 0 if names else None
    if names[found.gradient] != made.gradient:
        return found.gradient
    return None if names[-1] == length_name(found, made.norm) else len(names) - 1


def tree_of(names: Sequence[Digest]) -> Tree:
    """Return the tree over the names of what operations came to."""
    return Tree(bytes.fromhex(name) for name in names)


# --- operations ---


def check_operation(work: Work, made: MadeStep, shown: FalseOperation) -> str:
    """Return that an operation of a step came to something else than what it is made of.

    Args:
        made: of this very work.

    Raises:
        Unproven: it did not, or it may not have.
    """
    link, manifest, charter = _standing(work, made, shown.ground)
    found, book = program_of(charter), Book()
    operation, output = _output(made, found, shown.output)
    if shown.at >= operation.kind.num:
        raise Unproven("the operation comes to no such number")
    if isinstance(operation.kind, Words):
        data = None if shown.data is UNSET else shown.data
        reader: _OfData | _OfOperands = _OfData(book, shown.read, _samples(work, link, manifest, charter, data))
    else:
        state = None if shown.before is UNSET else listed(work, shown.before, link.before)
        reader = _OfOperands(book, shown.read, _sources(made, found, operation, state, shown.operands))
    right = operation.one(shown.at, reader.read)
    reader.close()
    has = _OfOperands(book, (shown.has,), [_Source(output, 0, operation.kind.num, operation.kind.dtype)])
    said = has.read(0, shown.at, 1)
    has.close()
    book.close()
    if np.isnan(right).any() or right.tobytes() == said.tobytes():
        raise Unproven("the number is what the operation comes to")
    return f"its gradient is not that of its samples ({operation.name})"


def prove_operation(
    work: Work,
    made: MadeStep,
    ground: Ground,
    before: ShownState,
    parameters: NDArray[np.float32],
    names: Sequence[Digest],
    number: int,
    theirs: NDArray[np.float32],
    outputs: Mapping[int, Array],
    data: DataIndex,
    shards: Shards,
) -> FalseOperation:
    """Return what shows that an operation came to something else than what it is made of.

    Args:
        before: the state before the step, and its `parameters`.
        names: of what the worker's operations came to.
        number: of the operation, the first that differs.
        theirs: what it came to, in words.
        outputs: what it should have come to, and all operations that it reads.
    """
    found, (link, manifest, charter) = program_of(ground.charter), _standing(work, made, ground)
    operation, right = found.operations[number], as_words(outputs[number])
    differs = right.view(np.uint32) != theirs.view(np.uint32)
    if right.shape != theirs.shape or not differs.any():
        raise Unproven("the operation came to what it should")
    at, tree = int(differs.argmax()) * operation.kind.num // operation.num_words, tree_of(names)
    if is_words := isinstance(operation.kind, Words):
        taking = _Taking([], _samples(work, link, manifest, charter, data), shards)
    else:
        taking = _Taking(_operands(operation, parameters, outputs), None, shards)
    operation.one(at, taking.read)
    sources = {operation.operands[each] for each in taking.read_of}
    shown = FalseOperation(
        ground=ground,
        output=ShownOutput(index=encode(listed_output(found, number, theirs)), path=tree.path(number)),
        at=at,
        has=_slices(theirs, at * operation.num_words // operation.kind.num, _width(operation.kind.dtype))[0],
        operands=tuple(
            ShownOutput(index=encode(listed_output(found, each, outputs[each])), path=tree.path(each))
            for each in sorted(each for each in sources if isinstance(each, int))
        ),
        read=tuple(taking.shown),
        before=before if any(isinstance(each, Parameters) for each in sources) else UNSET,
        data=data if is_words else UNSET,
    )
    check_operation(work, made, shown)
    return shown


def read_by(found: Program, number: int) -> list[int]:
    """Return the operations that an operation reads, and itself."""
    return [*(each for each in found.operations[number].operands if isinstance(each, int)), number]


def shape_of(found: Program, number: int) -> dict[str, int]:
    """Return the shape of the list of what an operation comes to."""
    return {GRADIENT if number == found.gradient else OUTPUT: found.operations[number].num_words}


# --- what an operation reads ---


@dataclass(frozen=True)
class _Source:
    """
    Args:
        start: its first word.
        num: numbers that it has.
    """

    vector: VectorIndex
    start: int
    num: int
    dtype: DTypeLike


class _Slices:
    """What is shown, one slice after the other."""

    def __init__(self, book: Book, shown: Sequence[Slice]) -> None:
        self.book = book
        self._shown = iter(shown)

    def next(self) -> Slice:
        """
        Raises:
            Unproven: there is none any more.
        """
        found = next(self._shown, None)
        if found is None:
            raise Unproven("less is shown than the operation reads")
        return found

    def close(self) -> None:
        """
        Raises:
            Unproven: there are some left.
        """
        if next(self._shown, None) is not None:
            raise Unproven("more is shown than the operation reads")


class _OfData(_Slices):
    """Reads words of the run's data as they are shown, and notes of which shard they have to be."""

    def __init__(self, book: Book, shown: Sequence[Slice], sampled: Sampled) -> None:
        super().__init__(book, shown)
        self._sampled = sampled

    def read(self, _operand: int, start: int, _num: int) -> Array:
        info, span = self._sampled.place(start)
        return _word(self.book.slice(info.digest, info.nbytes, span, self.next()))


class _OfOperands(_Slices):
    """Reads operands as they are shown, and notes whose numbers they have to be."""

    def __init__(self, book: Book, shown: Sequence[Slice], sources: Sequence[_Source | None]) -> None:
        """
        Args:
            sources: of each operand; None: it is not shown.
        """
        super().__init__(book, shown)
        self._sources = sources

    def read(self, operand: int, start: int, num: int) -> Array:
        """
        Raises:
            Unproven: something else is shown.
        """
        source = self._sources[operand]
        if source is None or not 0 <= start < start + num <= source.num:
            raise Unproven("an operation reads what is not shown")
        width = _width(source.dtype)
        spans = _spans(source.start + start * width, num * width)
        data = b"".join(self._words(source.vector, span) for span in spans)
        return np.frombuffer(data, np.dtype(source.dtype).newbyteorder("<")).astype(source.dtype, copy=False)

    def _words(self, vector: VectorIndex, span: range) -> bytes:
        number, place, nbytes = place_of(vector, span)
        return self.book.slice(Digest(vector.chunks[number]), nbytes, place, self.next())


@dataclass
class _Taking:
    """Reads what there is, and notes what shows it.

    Args:
        sources: numbers, the words in which they lie, and the first of them there.
    """

    sources: Sequence[tuple[Array, NDArray[np.float32], int]]
    sampled: Sampled | None
    shards: Shards
    shown: list[Slice] = field(default_factory=list)
    read_of: set[int] = field(default_factory=set)

    def read(self, operand: int, start: int, num: int) -> Array:
        if self.sampled is not None:
            info, span = self.sampled.place(start)
            if (data := self.shards(info.digest)) is None:
                raise Unproven("the run's data are not here")
            self.shown.append(open_slice(data, span))
            return _word(bytes(memoryview(data)[span.start : span.stop]))
        numbers, words, first = self.sources[operand]
        width = _width(numbers.dtype)
        self.read_of.add(operand)
        self.shown += _slices(words, first + start * width, num * width)
        return numbers[start : start + num]


def _operands(
    operation: Operation, parameters: NDArray[np.float32], outputs: Mapping[int, Array]
) -> list[tuple[Array, NDArray[np.float32], int]]:
    found = list[tuple[Array, NDArray[np.float32], int]]()
    for each in operation.operands:
        if isinstance(each, Parameters):
            found.append((parameters[each.start : each.start + each.num], parameters, each.start))
        else:
            found.append((outputs[each], as_words(outputs[each]), 0))
    return found


def _sources(
    made: MadeStep, found: Program, operation: Operation, state: StateIndex | None, shown: Sequence[ShownOutput]
) -> list[_Source | None]:
    """Return where operands lie; None: it is not shown.

    Args:
        state: before the step; None: it is not shown.
        shown: what operations before it came to.

    Raises:
        Unproven: something else is shown.
    """
    vectors = {each.path.index: _output(made, found, each)[1] for each in shown}
    if len(vectors) != len(shown) or not vectors.keys() <= set(operation.operands):
        raise Unproven("other operations are shown than are read")
    if state is not None and state.shape.get(LOCAL) != found.num_parameters:
        raise Unproven("the state is none of this model")
    local = None if state is None else state.vector(LOCAL)
    sources = list[_Source | None]()
    for operand in operation.operands:
        if isinstance(operand, Parameters):
            sources.append(None if local is None else _Source(local, operand.start, operand.num, np.float32))
        else:
            vector, kind = vectors.get(operand), found.operations[operand].kind
            sources.append(None if vector is None else _Source(vector, 0, kind.num, kind.dtype))
    return sources


def _output(made: MadeStep, found: Program, shown: ShownOutput) -> tuple[Operation, VectorIndex]:
    """Return an operation, and the list of what it came to.

    Raises:
        Unproven: it is not the one that was signed.
    """
    number = shown.path.index
    if shown.path.count != len(found.operations) or not _is_listed(made, digest(shown.index), shown.path):
        raise Unproven("what an operation came to is shown otherwise than it was signed")
    index = index_in(shown.index)
    if index.shape != shape_of(found, number):
        raise Unproven("what an operation came to has another shape")
    return found.operations[number], index.vectors[0]


def _is_listed(made: MadeStep, leaf: Digest, path: Path) -> bool:
    return made.operations is not UNSET and is_leaf(Digest(made.operations), bytes.fromhex(leaf), path)


def _samples(work: Work, link: Link, manifest: Manifest, charter: Charter, data: DataIndex | None) -> Sampled:
    """
    Raises:
        Unproven: the data are not the run's.
    """
    terms, settings, holder = _terms(charter), charter.settings, work.segments[link.segment].holder
    if data is None or digest_of(data) != terms.data:
        raise Unproven("the data are not the run's")
    first = link.first * settings.batch_size
    return Sampled(tuple(manifest.leases), PeerId(holder), first, settings.seq_len, data, terms.seed)


def _standing(work: Work, made: MadeStep, ground: Ground) -> tuple[Link, Manifest, Charter]:
    link = link_of(work, made, ground)
    manifest, charter = stands_on(ground, Digest(work.segments[link.segment].head))
    return link, manifest, charter


def _word(data: bytes) -> Array:
    return np.array([int.from_bytes(data, "little")], np.uint32)


def _width(dtype: DTypeLike) -> int:
    """Return how many words a number has."""
    return np.dtype(dtype).itemsize // 4


def _spans(start: int, num: int) -> list[range]:
    """Return words, as slices show them."""
    borders = [start, *range((start // SPAN + 1) * SPAN, start + num, SPAN), start + num]
    return [range(*each) for each in pairwise(borders)]


def _slices(words: NDArray[np.float32], start: int, num: int) -> list[Slice]:
    return [numbers_slice(words, span) for span in _spans(start, num)]
