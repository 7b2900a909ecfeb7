"""Evidence of what an auditor has found, where there is any: then nobody has to vote (`weft.verify.evidence`).

What it comes to is checked here as all others check it. Where it proves nothing (the run's codec has no blocks, the
model is too large, or this machine was wrong) a majority judges.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from weft.ids import Digest
from weft.peer.audit.heads import Head
from weft.peer.messages import NamedState
from weft.store.chunks import state_index
from weft.sync.governance import Void, read_lie
from weft.sync.records.acts import MAX_CONTRADICTION_NBYTES, Warrant
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import Collect, RoundNote
from weft.sync.records.work import MadeStep, Work
from weft.verify.evidence.merges import prove_merge
from weft.verify.evidence.records import Falsehood, Ground, ShownState
from weft.verify.evidence.shown import Unproven
from weft.verify.evidence.steps import GRADIENT, prove_step
from weft.wire import Buffer, Signed, claimed, encode


def proof(letters: Sequence[Signed], prove: Callable[[], Falsehood]) -> Warrant | None:
    """Return what shows that these letters, of one member, say what is not so; None: nothing does.

    Args:
        prove: raises Unproven where there is nothing.
    """
    try:
        warrant = Warrant(letters=tuple(letters), shown=encode(prove()))
        if warrant.nbytes > MAX_CONTRADICTION_NBYTES:
            return None
        read_lie(warrant)
    except (Unproven, Void):
        return None
    return warrant


def ground(head: Head) -> Ground:
    return Ground(manifest=head.manifest, charter=head.charter)


def shown_state(named: NamedState, index: StateIndex) -> ShownState:
    return ShownState(index=encode(index), path=named.path)


def of_step(
    letters: tuple[Signed, Signed],
    head: Head,
    states: tuple[ShownState, ShownState],
    vectors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    gradient: Tensor,
) -> Warrant | None:
    """Return what shows that the optimizer did not make a step.

    Args:
        letters: the work, and what its worker signed of the step.
        head: that its segment begins at.
        states: before the step and after it, and their `vectors`.
    """
    work, made = claimed(letters[0], Work), claimed(letters[1], MadeStep)
    before, after = ({name: vector.numpy() for name, vector in each.items()} for each in vectors)
    index = encode(state_index({GRADIENT: gradient}))
    return proof(
        letters, lambda: prove_step(work, made, ground(head), states, index, (before, after), gradient.numpy())
    )


def of_merge(
    letter: Signed, head: Head, plan: Collect, num: int, result: Buffer, right: Buffer, brought: Mapping[Digest, Buffer]
) -> Warrant | None:
    """Return what shows that an owner has merged something else than was brought.

    Args:
        letter: what it has said.
        head: the manifest before the round.
        num: elements of the part.
        right: what the part should be.
        brought: to the part.
    """
    note = claimed(letter, RoundNote)
    return proof([letter], lambda: prove_merge(note, ground(head), plan, num, result, right, brought))
