"""What members of a stage have found of what another computed: when it strikes that one out.

Each has computed again some micro-batch of its own choice, or the same: they need not agree on which. What they accuse
a member of, that member has signed itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

from weft.errors import WireError
from weft.ids import PeerId, Round, short
from weft.keys import verify
from weft.sync.records.acts import MAX_LETTER_NBYTES, FalsePassage
from weft.sync.records.charter import Body, Charter
from weft.verify.passages import MAX_PASSAGE_NBYTES, Passage
from weft.wire import Signed, claimed, unseal

JUDGED_FOR = 40  # rounds, after which what was found counts no more


class Convicted(NamedTuple):
    peer: PeerId
    round: Round  # the first in which something was found


def read_false_passage(letter: Signed) -> tuple[FalsePassage, Passage]:
    """Return what is signed, and what the accused has signed, once both signatures hold.

    Raises:
        WireError: one does not, or they are not of one thing.
    """
    if len(letter.body) > MAX_LETTER_NBYTES:
        raise WireError(f"{len(letter.body)} bytes are more than the {MAX_LETTER_NBYTES} that a letter may have")
    found: FalsePassage = unseal(letter, FalsePassage, verify)
    if len(found.passage.body) > MAX_PASSAGE_NBYTES or found.passage.signer != found.peer:
        raise WireError("what is found to be false was not signed by who is accused")
    passage: Passage = unseal(found.passage, Passage, verify)
    if passage.run != found.run:
        raise WireError("what is found to be false is of another run")
    return found, passage


def why_void(charter: Charter, body: Body, letter: Signed) -> str | None:
    """Return why what a member has found counts for nothing in a round; None: it counts."""
    if not charter.passages:
        return "nobody computes again in this run what others have computed"
    try:
        found, _ = read_false_passage(letter)
    except WireError as error:
        return str(error)
    if found.run != body.run:
        return f"it is of run {short(found.run)}, this is run {short(body.run)}"
    if letter.signer == found.peer or not {letter.signer, found.peer} <= set(body.electorate):
        return "only other members judge what a member computes"
    if not body.round - JUDGED_FOR <= found.round <= body.round:
        return "it is of a round long ago, or of one that is still to come"
    if charter.is_dealt_with(PeerId(found.peer), found.round):
        return f"{short(found.peer)} was banned already for that"
    return None


def accused_in(letters: Sequence[Signed]) -> PeerId | None:
    """Return of whom the letters are, as they read; None: of several, or of nobody."""
    try:
        named = {claimed(letter, FalsePassage).peer for letter in letters}
    except WireError:
        return None
    return PeerId(named.pop()) if len(named) == 1 else None


def convicted(charter: Charter, body: Body, letters: Sequence[Signed]) -> Convicted | str:
    """Return whom these strike out; or why they strike out nobody."""
    peer, voters = accused_in(letters), [letter.signer for letter in letters]
    if peer is None or voters != sorted(set(voters)):
        return "they are not of one member, or one has signed two"
    for letter in letters:
        if (why := why_void(charter, body, letter)) is not None:
            return why
    if 2 * len(voters) <= len(body.electorate):
        return f"{len(voters)} of {len(body.electorate)} members are not a majority"
    return Convicted(peer, min(claimed(letter, FalsePassage).round for letter in letters))
