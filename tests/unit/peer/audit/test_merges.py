"""What another shows of what an owner has said: taken for that owner's word, or not."""

from typing import Any

import msgspec
import pytest

from unit.peer.snapshots import manifest
from unit.verify.evidence.forge import ME, OTHER, mixed
from weft.ids import Round
from weft.peer.audit.merges import Heard, is_word_of
from weft.sync.records.messages import PartResult, Pass
from weft.wire import digest, digest_of, seal

PART = mixed()
NOTE = PART.note(PART.right)
ROUND = msgspec.structs.replace(
    manifest(PART.head.round + 1),
    branch=PART.head.branch,
    previous=digest_of(PART.head),
    parts=(
        PartResult(owner=OTHER.peer, result=digest(b"another's")),
        PartResult(owner=ME.peer, result=digest(PART.right)),
    ),
)
KNOWN = Heard(manifest=ROUND, plan=PART.plan, parts=())


def test_an_owners_word_is_taken_whoever_shows_it() -> None:
    assert is_word_of(seal(ME, NOTE), KNOWN, 1)
    assert not is_word_of(seal(OTHER, NOTE), KNOWN, 1)
    assert not is_word_of(seal(ME, NOTE), KNOWN, 0)
    assert not is_word_of(msgspec.structs.replace(seal(ME, NOTE), signature=bytes(64)), KNOWN, 1)
    assert not is_word_of(seal(ME, PART.plan), KNOWN, 1)


@pytest.mark.parametrize(
    "other",
    [
        PART.note(b"another result"),
        PART.note(PART.right, plan=digest(b"another")),
        PART.note(PART.right, head=digest(b"another")),
        PART.note(PART.right, part=0),
        msgspec.structs.replace(NOTE, round=Round(NOTE.round + 1)),
        msgspec.structs.replace(NOTE, branch="00" * 32),
        msgspec.structs.replace(NOTE, message=Pass()),
    ],
)
def test_what_it_has_said_of_something_else_is_not(other: Any) -> None:
    assert not is_word_of(seal(ME, other), KNOWN, 1)
