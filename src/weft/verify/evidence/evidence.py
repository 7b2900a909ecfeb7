"""What shows that a member's signed word is false: whose it is, which round it is of, and what it comes to.

    lie = read(letters, shown)         or Unproven, which says why it is nothing

Everybody who has it comes to the same, in some milliseconds and without anything else: no network, no data of the run,
no training step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from weft.errors import WireError
from weft.ids import BranchId, Digest, PeerId, Round, RunId
from weft.keys import verify
from weft.sync.records.acts import MAX_CONTRADICTION_NBYTES
from weft.sync.records.messages import RoundNote
from weft.sync.records.work import MadeStep, Work
from weft.verify.evidence.merges import check_merge
from weft.verify.evidence.operations import check_list, check_operation
from weft.verify.evidence.records import (
    AnyFalse,
    FalseClaim,
    FalseList,
    FalseMerge,
    FalseMove,
    FalseOperation,
    FalsePayload,
    FalseStart,
    FalseStep,
)
from weft.verify.evidence.shown import Unproven
from weft.verify.evidence.steps import check_step
from weft.verify.evidence.works import check_claim, check_move, check_payload, check_start
from weft.wire import Signed, Verify, decode, digest_of, unseal


@dataclass(frozen=True)
class Lie:
    """
    Args:
        run: None: it is of a branch, which names its run.
        work: the signed work that is false; None: it is none.
        part: that was merged otherwise; None: likewise.
    """

    peer: PeerId
    run: RunId | None
    branch: BranchId
    round: Round
    what: str
    work: Digest | None = None
    part: int | None = None


def read(letters: Sequence[Signed], shown: bytes, verify: Verify = verify) -> Lie:
    """Return what is shown to be false of what one member has signed.

    Args:
        shown: one of `records.AnyFalse`, canonical.

    Raises:
        Unproven: nothing is.
    """
    if len(shown) + sum(len(letter.body) for letter in letters) > MAX_CONTRADICTION_NBYTES:
        raise Unproven(f"what proves a lie may have at most {MAX_CONTRADICTION_NBYTES} bytes")
    if len({letter.signer for letter in letters}) != 1:
        raise Unproven("it is not signed by one member alone")
    try:
        false: AnyFalse = decode(shown, AnyFalse)
        with np.errstate(all="ignore"):  # of numbers that no honest peer has
            return _read(letters, false, verify)
    except WireError as error:
        raise Unproven(str(error)) from None
    except Unproven:
        raise
    except (ArithmeticError, LookupError, ValueError) as error:  # of a ground that its signer has made up
        raise Unproven(f"what is shown does not fit together: {error}") from None


def _read(letters: Sequence[Signed], false: AnyFalse, verify: Verify) -> Lie:
    match false:
        case FalseMerge():
            (note,) = _signed(letters, (RoundNote,), verify)
            what, manifest = check_merge(note, false), false.ground.manifest
            return Lie(letters[0].signer, manifest.run, note.branch, note.round, what, part=note.message.part)
        case FalseStart() if len(letters) == 2:
            work, _ = _signed(letters, (Work, Work), verify)
            what = check_start(work, letters[1], false)
        case FalseStart():
            (work,) = _signed(letters, (Work,), verify)
            what = check_start(work, None, false)
        case FalseStep() | FalseList() | FalseOperation():
            work, made = _signed(letters, (Work, MadeStep), verify)
            if (made.work, made.run) != (digest_of(letters[0]), work.run):
                raise Unproven("the training step is of another work")
            what = _of_step(work, made, false)
        case FalseClaim():
            (work,) = _signed(letters, (Work,), verify)
            what = check_claim(work, false)
        case FalseMove():
            (work,) = _signed(letters, (Work,), verify)
            what = check_move(work, false)
        case FalsePayload():
            (work,) = _signed(letters, (Work,), verify)
            what = check_payload(work, false)
        case _:
            assert_never(false)
    if work.peer != letters[0].signer:
        raise Unproven("the work is another's")
    return Lie(work.peer, work.run, work.branch, work.round, what, work=digest_of(letters[0]))


def _of_step(work: Work, made: MadeStep, false: FalseStep | FalseList | FalseOperation) -> str:
    match false:
        case FalseStep():
            return check_step(work, made, false)
        case FalseList():
            return check_list(work, made, false)
        case FalseOperation():
            return check_operation(work, made, false)


def _signed(letters: Sequence[Signed], kinds: tuple[type[Any], ...], verify: Verify) -> list[Any]:
    """
    Raises:
        Unproven: other letters are needed.
        WireError: a signature does not hold.
    """
    if len(letters) != len(kinds):
        raise Unproven("it takes other letters to prove that")
    return [unseal(letter, kind, verify) for letter, kind in zip(letters, kinds, strict=True)]
