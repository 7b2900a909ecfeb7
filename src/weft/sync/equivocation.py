"""Equivocation: two notes that one member signed for one place, and no honest member signs both. They are evidence:

    Accept(2, x)         Accept(2, y)       two manifests accepted in one attempt; to propose is to accept, too
    Accept(1, x)         Promise(2, none)   denies what it had accepted, whichever came first
    Promise(3, (1, x))   Promise(5, none)   likewise
    Goodbye(2, none)     Promise(3, ...)    goes on after its last word
    Collect(1, 0, p)     Collect(1, 0, q)   two plans of one revision

All of that an honest member has on its disk before it says so, and is bound by after a crash. What it says without
writing it down proves nothing: who was killed and comes back trains other bytes (`Ready`), merges another plan
(`Merged`, `Holding`, `Stuck`), and as the first leader plans once more. That is why a `Collect` of attempt 0 is no word
that binds; to lead a later attempt, a member needs promises that it has not after a restart.

A key that two machines use, or a folder put back from a copy, lets an honest peer equivocate: its disk has not kept
what it was given. Signatures are checked elsewhere.
"""

from dataclasses import dataclass

from weft.ids import Attempt, Digest
from weft.sync.records import messages
from weft.wire import digest_of


@dataclass(frozen=True)
class _Word:
    """What a note says of its author's votes in the round."""

    promised: Attempt  # at least; in a last word, at most
    accepted: tuple[Attempt, Digest] | None = None  # an attempt, and what was accepted in it
    nothing_before: int = -1  # from what it accepted last up to there it has accepted nothing
    is_last: bool = False


def binds(message: messages.AnyRoundMessage) -> bool:
    """Return whether a message is one that may contradict another."""
    return _word(message) is not None or (isinstance(message, messages.Collect) and message.attempt > 0)


def equivocation(one: messages.RoundNote, other: messages.RoundNote) -> str | None:
    """Return in which way two notes of one signer cannot both be honest, or None."""
    if (one.branch, one.round) != (other.branch, other.round):
        return None
    if isinstance(one.message, messages.Collect) and isinstance(other.message, messages.Collect):
        return _in_plans(one.message, other.message)
    first, second = _word(one.message), _word(other.message)
    if first is None or second is None:
        return None
    return _in_votes(first, second) or _in_votes(second, first)


def _in_plans(one: messages.Collect, other: messages.Collect) -> str | None:
    is_one_place = (one.attempt, one.revision) == (other.attempt, other.revision)
    if not is_one_place or one.attempt == 0 or one == other:
        return None
    return f"it made two plans of one revision in attempt {one.attempt}"


def _in_votes(one: _Word, other: _Word) -> str | None:
    if one.is_last and other.promised > one.promised:
        return "it went on after its last word"
    if one.accepted is None:
        return None
    attempt, manifest = one.accepted
    if other.accepted is not None and other.accepted[0] == attempt and other.accepted[1] != manifest:
        return f"it accepted two manifests in attempt {attempt}"
    last = -1 if other.accepted is None else other.accepted[0]
    return f"it denied what it accepted in attempt {attempt}" if last < attempt < other.nothing_before else None


def _word(message: messages.AnyRoundMessage) -> _Word | None:
    match message:
        case messages.Prepare(attempt=attempt):
            return _Word(promised=attempt)
        case messages.Promise(attempt=attempt, accepted=vote):
            return _Word(promised=attempt, accepted=_named(vote), nothing_before=attempt)
        case messages.Propose(attempt=attempt, manifest=manifest):
            return _Word(promised=attempt, accepted=(attempt, digest_of(manifest)))
        case messages.Accept(attempt=attempt, manifest=name):
            return _Word(promised=attempt, accepted=(attempt, name))
        case messages.Goodbye(promised=attempt, accepted=vote):
            return _Word(promised=attempt, accepted=_named(vote), nothing_before=messages.MAX_COUNT + 1, is_last=True)
        case _:
            return None


def _named(vote: messages.Vote | None) -> tuple[Attempt, Digest] | None:
    return None if vote is None else (vote.attempt, digest_of(vote.manifest))
