"""The operations of a step in exact numbers, once an auditor has come to something else: is the gradient its samples'?

    OperationsRequest ──►  which operations                 the worker makes the step again, operation by operation, and
      ◄── OperationsAnswer                                  signs the root over what each came to
    list ──►               compared with this machine's     the first that differs read the same on both sides
    OperationsRequest ──►  what that one came to            made a third time, and fetched
      ◄── OperationsAnswer
    evidence               one number of it, and the few that it is made of (`weft.verify.evidence.operations`)

Nothing of this is done where nobody has found a fault.

Failure:
- the worker signs no list, or does not show what it lists: a majority judges, as of all steps.
- its list is not one that comes to its gradient: it signs none. It may have trained on something else than samples of
  the run, or this machine computes otherwise than others.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from weft.data.store import DataIndex
from weft.errors import DataError, NetError, PeerError, Refused, WireError
from weft.ids import Digest, PeerId
from weft.keys import verify
from weft.ledger.tree import HASH_NBYTES
from weft.peer.audit.heads import Head
from weft.peer.audit.outcome import ASK_AGAIN_S, Patience
from weft.peer.audit.proofs.proving import ground, proof
from weft.peer.context import Context
from weft.peer.messages import OperationsAnswer, OperationsRequest
from weft.sync.records.acts import Warrant
from weft.sync.records.charter import Charter
from weft.sync.records.index import StateIndex
from weft.sync.records.work import MadeStep, Work
from weft.tasks import to_the_end
from weft.training.device import free_nbytes
from weft.training.trainer import Trainer
from weft.verify.evidence.operations import (
    contradiction,
    program_of,
    prove_list,
    prove_operation,
    read_by,
    shape_of,
    tree_of,
)
from weft.verify.evidence.program.evaluate import as_words, listed, named, room_nbytes, taken
from weft.verify.evidence.program.grids import Array
from weft.verify.evidence.program.step import MAX_OPERATIONS, Program
from weft.verify.evidence.records import FalseOperation, ShownState
from weft.verify.evidence.shown import Unproven
from weft.wire import Buffer, Signed, Signer, claimed, digest, encode, seal, unseal

T = TypeVar("T")

MAX_LISTED = 2 * MAX_OPERATIONS  # operations: a list that is too long is false, and can be shown to be
MAX_OUTPUTS = 2  # of one step that a worker makes again: auditors that are right ask for the same
CALL_S = 20.0


@dataclass
class Listing:
    """What a worker may be asked of the operations of one step.

    Args:
        parameters: before it.
        words: of the samples that it was made of.
        made: what was signed of it.
        blobs: what can be fetched.
        free: returns the bytes of main memory that may still be taken.
    """

    program: Program
    parameters: NDArray[np.float32]
    words: Array
    made: MadeStep
    blobs: dict[Digest, Buffer] = field(repr=False)
    free: Callable[[], int]
    names: list[Digest] | None = None
    signed: Signed | UnsetType = UNSET
    blob: Digest | UnsetType = UNSET
    outputs: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    refused: str = ""
    is_at_it: bool = False

    def answer(self, number: int | UnsetType) -> OperationsAnswer | None:
        """Return what is shown; None: `make` it first.

        Args:
            number: of the operation; unset: all of them are to be listed.
        """
        if self.refused:
            return OperationsAnswer(is_ready=False, reason=self.refused)
        if number is UNSET or self.names is None:
            is_ready = self.names is not None
            return OperationsAnswer(is_ready=True, made=self.signed, listed=self.blob) if is_ready else None
        if number >= len(self.names) or (number not in self.asked and len(self.asked) >= MAX_OUTPUTS):
            return OperationsAnswer(is_ready=False, reason="it has shown enough of that step")
        self.asked.add(number)
        return OperationsAnswer(is_ready=True) if number in self.outputs else None

    def make(self, number: int | UnsetType, signer: Signer) -> None:
        """Make the step again, for what is asked."""
        try:
            require_room(self.program, self.free())
            self._make(number, signer)
        except MemoryError:
            self.refused = "there is no memory here for the operations of a step"

    def _make(self, number: int | UnsetType, signer: Signer) -> None:
        if number is UNSET or self.names is None:
            self._list(signer)
        else:
            (output,) = taken(self.program, self.parameters, self.words, [number]).values()
            index, words = listed(self.program, number, output), as_words(output)
            self.blobs[self.names[number]] = encode(index)
            span = index.chunk_nbytes // 4
            for place, chunk in enumerate(index.vectors[0].chunks):
                self.blobs[Digest(chunk)] = words[place * span : (place + 1) * span].data.cast("B")
            self.outputs.add(number)

    def _list(self, signer: Signer) -> None:
        names = named(self.program, self.parameters, self.words)
        if contradiction(self.program, self.made, names) is not None:
            self.refused = "its gradient is not what the operations of a step come to on this machine"
            return
        data = b"".join(map(bytes.fromhex, names))
        self.signed = seal(signer, replace(self.made, operations=tree_of(names).root()))
        self.blob = digest(data)
        self.blobs[self.blob] = data
        self.names = names


def free_here(context: Context, trainer: Trainer) -> int:
    """Return the bytes of main memory that this peer may still take."""
    return free_nbytes(context.settings.caps, trainer.device)["cpu"]


def require_room(program: Program, free_nbytes: int) -> None:
    """
    Raises:
        MemoryError: a step that is made operation by operation takes more than may be taken.
    """
    if room_nbytes(program) > free_nbytes:
        raise MemoryError


def listing_of(
    charter: Charter,
    parameters: Tensor,
    words: Tensor,
    made: MadeStep,
    blobs: dict[Digest, Buffer],
    free: Callable[[], int],
) -> Listing | None:
    """Return what a worker may be asked of a step, as of `Listing`; None: nothing, for it cannot be told apart."""
    try:
        program = program_of(charter)
    except Unproven:
        return None
    if words.shape != (program.samples, program.tokens + 1):
        return None
    return Listing(program, parameters.numpy(), words.numpy().astype(np.uint32), made, blobs, free)


@dataclass(frozen=True)
class Doubted:
    """A step of which an auditor has come to something else.

    Args:
        letter: the signed work, and the `ticket` by which it is audited.
        made: what the worker signed of the step.
        head: that its segment begins at.
        before: the state before it, and its `parameters`.
        words: of the samples that it should be of.
    """

    letter: Signed
    ticket: Signed
    name: Digest
    made: MadeStep
    head: Head
    before: ShownState
    parameters: Tensor
    words: Tensor

    @property
    def work(self) -> Work:
        return claimed(self.letter, Work)

    @property
    def worker(self) -> PeerId:
        return PeerId(self.work.peer)


class Gradients:
    """An auditor's part.

    Args:
        fetch_list: returns a list of chunks of so many numbers, at most, that the worker has.
        pull: returns the vectors of one, fetched of it.
    """

    def __init__(
        self,
        context: Context,
        trainer: Trainer,
        data: DataIndex,
        fetch_list: Callable[[Digest, int], Awaitable[StateIndex]],
        pull: Callable[[StateIndex], Awaitable[dict[str, Tensor]]],
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._data = data
        self._fetch_list = fetch_list
        self._pull = pull

    async def proof(self, doubted: Doubted, patience: Patience) -> Warrant | None:
        """Return what shows that a gradient is not that of its samples; None: nothing does, or it is not shown.

        Args:
            patience: how long the worker may take.
        """
        try:
            program = program_of(doubted.head.charter)
            require_room(program, free_here(self._context, self._trainer))
            letter, names = await self._listed(doubted, patience)
            return await self._found(doubted, patience, program, letter, names)
        except (Unproven, WireError, PeerError, NetError, Refused, DataError, MemoryError):
            return None  # a majority judges

    async def _found(
        self, doubted: Doubted, patience: Patience, program: Program, letter: Signed, names: list[Digest]
    ) -> Warrant | None:
        work, made, stands = doubted.work, claimed(letter, MadeStep), ground(doubted.head)
        letters = (doubted.letter, letter)
        if (number := contradiction(program, made, names)) is not None:
            return proof(letters, lambda: prove_list(work, made, stands, names, number))
        parameters, words = doubted.parameters.numpy(), doubted.words.numpy()
        own = await self._made(lambda: named(program, parameters, words))
        first = next((at for at, each in enumerate(own) if each != names[at]), None)
        if first is None:
            return None
        await self._asked(doubted, patience, first)
        shape = shape_of(program, first)
        index = await self._fetch_list(names[first], sum(shape.values()))
        if index.shape != shape:
            return proof(letters, lambda: prove_list(work, made, stands, names, first, encode(index)))
        (theirs,) = (await self._pull(index)).values()
        outputs = await self._made(lambda: taken(program, parameters, words, read_by(program, first)))

        def prove() -> FalseOperation:
            given = doubted.before, parameters, names, first, theirs.numpy(), outputs, self._data, self._trainer.shard
            return prove_operation(work, made, stands, *given)

        return await self._made(lambda: proof(letters, prove))

    async def _made(self, work: Callable[[], T]) -> T:
        """Do what takes as long as training steps do."""
        async with self._context.learner_lock:
            return await to_the_end(self._context.compute.train(work))

    async def _listed(self, doubted: Doubted, patience: Patience) -> tuple[Signed, list[Digest]]:
        """Return what the worker has signed of the operations, and their list.

        Raises:
            Unproven: it signs none, or something else.
        """
        answer = await self._asked(doubted, patience, UNSET)
        if answer.made is UNSET or answer.listed is UNSET:
            raise Unproven("it lists no operations")
        made = unseal(answer.made, MadeStep, verify)
        data = await self._context.node.fetch_small(doubted.worker, Digest(answer.listed), HASH_NBYTES * MAX_LISTED)
        names = [Digest(data[at : at + HASH_NBYTES].hex()) for at in range(0, len(data), HASH_NBYTES)]
        is_same = replace(made, operations=UNSET) == replace(doubted.made, operations=UNSET)
        if not is_same or answer.made.signer != doubted.worker or tree_of(names).root() != made.operations:
            raise Unproven("it lists the operations of something else")
        return answer.made, names

    async def _asked(self, doubted: Doubted, patience: Patience, number: int | UnsetType) -> OperationsAnswer:
        """
        Raises:
            Unproven: it does not show that, or not in time.
        """
        request = OperationsRequest(work=doubted.name, ticket=doubted.ticket, number=number)
        while True:
            answer = await self._context.node.call(doubted.worker, request, OperationsAnswer, deadline_s=CALL_S)
            if answer.is_ready:
                return answer
            if not answer.is_under_way or patience.is_over:
                raise Unproven(answer.reason)
            await asyncio.sleep(ASK_AGAIN_S)
