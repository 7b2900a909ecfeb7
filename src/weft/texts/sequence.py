"""What a member of a stage has of a text, and what it makes of what it is told: pure.

    opened     a new attempt is made: how much of the text is here? Nothing moves until it is resumed
    resumed    keep so much of it, and send on again what came out from that place on
    taken      rows: tokens, or what the stage before made of them
    guessed    tokens are taken before they are told, by the first stage's member
    computed   rows went through the layers: what came out is in the log, and goes on

Four rules keep a text whole, whatever is lost, late, or said twice (tests/model):

    (1) rows say where they attach: a place, and the chain of tokens there. Where that is not what is here, they are
        dropped; where more is here, that is cut off first, unless it is the same
    (2) what was computed is not computed again: it is sent on from the log
    (3) attempts only grow, and what is said in an older one is dropped
    (4) who is told nothing for `IDLE_S` forgets

Since of all stages' answers to one attempt none can change before they are resumed, whoever asked knows what each has
and what to say to it.
"""

from typing import NamedTuple

from weft.texts.chain import Chain

IDLE_S = 60.0
MAX_EARLY = 64  # rows that come before their attempt is resumed: of one path, notes on two links overtake each other


class Rows(NamedTuple):
    """Tokens of a text that follow each other.

    Args:
        start: the place of the first.
        chain: before the first, and after each.
    """

    attempt: int
    start: int
    chain: tuple[bytes, ...]

    @property
    def num(self) -> int:
        return len(self.chain) - 1

    @property
    def stop(self) -> int:
        return self.start + self.num


class Marks(NamedTuple):
    """Where a text is compared: places, ascending, and the chain there."""

    places: tuple[int, ...]
    chain: tuple[bytes, ...]


class Sequence(NamedTuple):
    """
    Args:
        chain: of the tokens that were taken.
        num_computed: of those taken.
        log_from: what came out is in the log from this place on.
        send_from: what comes out from this place on goes to the next stage.
        early: rows of this attempt that came before it was resumed, in their order.
        told_s: when something was last said about it.
    """

    chain: Chain
    num_computed: int = 0
    log_from: int = 0
    attempt: int = -1
    is_resumed: bool = False
    send_from: int = 0
    early: tuple[Rows, ...] = ()
    told_s: float = 0.0

    @property
    def num_taken(self) -> int:
        return len(self.chain) - 1


class Held(NamedTuple):
    """How much of a text is here: so many of its tokens, and what came out of those from a place on."""

    num: int
    log_from: int


class Moved(NamedTuple):
    """What came of something that was said.

    Args:
        taken: rows to be computed, in order; where one begins before the end, what was taken behind that is void.
        sent: what of the log goes to the next stage: from a place to a place.
    """

    sequence: Sequence
    taken: tuple[Rows, ...] = ()
    sent: tuple[int, int] | None = None


def begun(marks: Marks, num_known: int) -> Sequence:
    """Return a new sequence.

    Args:
        num_known: tokens whose keys and values are here of another text: whole pages, at one of the marks' places.
    """
    known = {place: each for place, each in zip(marks.places, marks.chain, strict=True) if place <= num_known}
    chain = tuple(known.get(place) for place in range(num_known + 1))
    return Sequence(chain, num_computed=num_known, log_from=num_known)


def opened(sequence: Sequence, attempt: int, marks: Marks, now: float) -> tuple[Sequence, Held | None]:
    """A new attempt is made with this member in its path; return how much of the text is here, None where the
    attempt is none any more."""
    if is_older(attempt, sequence):
        return sequence, None
    if attempt > sequence.attempt:
        sequence = sequence._replace(attempt=attempt, is_resumed=False, early=())
    num = num_agreed(sequence.chain, marks)
    return sequence._replace(told_s=now), Held(num, min(sequence.log_from, num))


def resumed(sequence: Sequence, attempt: int, keep: int, send_from: int, now: float) -> Moved:
    """The attempt goes on: of what is here the first `keep` tokens count."""
    if attempt != sequence.attempt or sequence.is_resumed or keep > sequence.num_taken:
        return Moved(sequence)
    early = sequence.early
    sequence = _cut(sequence, keep)._replace(is_resumed=True, send_from=send_from, early=(), told_s=now)
    first = max(send_from, sequence.log_from)
    sent = (first, sequence.num_computed) if first < sequence.num_computed else None
    moved = Moved(sequence, (), sent)
    for rows in early:
        more = taken(moved.sequence, rows, now)
        moved = Moved(more.sequence, moved.taken + more.taken, sent)
    return moved


def taken(sequence: Sequence, rows: Rows, now: float) -> Moved:
    """Rows have come."""
    if is_older(rows.attempt, sequence) or rows.attempt > sequence.attempt:
        return Moved(sequence)
    if not sequence.is_resumed:
        is_new = rows not in sequence.early and len(sequence.early) < MAX_EARLY
        return Moved(sequence._replace(early=(*sequence.early, rows) if is_new else sequence.early, told_s=now))
    if not attaches(sequence.chain, rows):
        return Moved(sequence)
    sequence = sequence._replace(told_s=now)
    if rows.stop <= sequence.num_taken and sequence.chain[rows.stop] == rows.chain[-1]:
        return Moved(sequence)
    sequence = _cut(sequence, rows.start)
    return Moved(sequence._replace(chain=sequence.chain + rows.chain[1:]), (rows,))


def guessed(sequence: Sequence, chain: tuple[bytes, ...], now: float) -> Moved:
    """Tokens may follow those that are here: they are taken as if they had been told. By (1) others come in their place
    if they are wrong.

    Args:
        chain: after each.
    """
    last = sequence.chain[-1]
    if not sequence.is_resumed or last is None or not chain:
        return Moved(sequence)
    return taken(sequence, Rows(sequence.attempt, sequence.num_taken, (last, *chain)), now)


def computed(sequence: Sequence, start: int, chain: tuple[bytes, ...]) -> Moved:
    """A step is over that rows were in; those that were cut off meanwhile count for nothing.

    Args:
        chain: after each of them, as they were taken.
    """
    if start != sequence.num_computed:
        return Moved(sequence)
    here = sequence.chain[start + 1 :]
    num = next((num for num, (a, b) in enumerate(zip(chain, here, strict=False)) if a != b), min(len(chain), len(here)))
    sequence = sequence._replace(num_computed=start + num)
    first = max(start, sequence.send_from)
    is_sent = sequence.is_resumed and first < sequence.num_computed
    return Moved(sequence, (), (first, sequence.num_computed) if is_sent else None)


def closed(sequence: Sequence, attempt: int) -> Sequence | None:
    """Nobody wants the text any more, or not from this member; None: it is forgotten."""
    return sequence if is_older(attempt, sequence) else None


def forgot_log(sequence: Sequence, until: int) -> Sequence:
    """There was no room for what came out before a place."""
    return sequence._replace(log_from=max(sequence.log_from, until))


def is_idle(sequence: Sequence, now: float) -> bool:
    return now - sequence.told_s >= IDLE_S


# --- the rules ---


def is_older(attempt: int, sequence: Sequence) -> bool:
    return attempt < sequence.attempt


def attaches(chain: Chain, rows: Rows) -> bool:
    """Return whether rows follow on what is here, or on a part of it."""
    return rows.start < len(chain) and chain[rows.start] == rows.chain[0]


def num_agreed(chain: Chain, marks: Marks) -> int:
    """Return how many tokens are here that whoever asks has, too: as many as the last mark says that agrees."""
    found = 0
    for place, each in zip(marks.places, marks.chain, strict=True):
        if place < len(chain) and chain[place] == each:
            found = place
    return found


def _cut(sequence: Sequence, num: int) -> Sequence:
    return sequence._replace(
        chain=sequence.chain[: num + 1],
        num_computed=min(sequence.num_computed, num),
        log_from=min(sequence.log_from, num),
    )
