"""What a process that was killed had trained and not saved, by the end of its log.

    StepDone ──► made ──PayloadOffered──► offered ──RoundCommitted that counts it──► kept
                  ▲                          │
                  └──── RoundCommitted that does not ────┘          CheckpointSaved keeps all

Pure but for `last_entries`.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from weft import events
from weft.errors import ConfigError
from weft.ids import Round
from weft.log import read_lines

TAIL_NBYTES = 1 << 20  # of a log: some thousand steps


class Unsaved(msgspec.Struct, frozen=True, kw_only=True):
    made: int  # tokens, that no round was offered
    offered: int  # tokens, to a round whose end it did not see
    round: Round | None  # the last one that it saw


def of_killed(entries: Iterable[events.Entry]) -> Unsaved | None:
    """Return what the last process in a log had not saved.

    Args:
        entries: the end of one peer's log, in order.

    Returns:
        None: it has said how it ended, there was none, or it held stages, whose steps several make together.
    """
    made, offered, round, is_open, through = 0, 0, None, False, None
    for entry in entries:
        event = entry.event
        if event.stage is not msgspec.UNSET:
            return None
        match event:
            case events.PeerStarted():
                made, offered, is_open = 0, 0, True
            case events.PeerStopped():
                is_open = False
            case events.StepDone(num_tokens=num):
                made, is_open = made + num, True
            case events.PayloadOffered():
                made, offered = 0, offered + made
            case events.CountedThrough():
                through = event.round
            case events.RoundCommitted():
                is_counted = entry.peer in event.contributors or through == event.round
                made, offered, round = made if is_counted else made + offered, 0, event.round
            case events.CheckpointSaved():
                made, offered = 0, 0
            case events.WorkDropped(tokens=num):
                made = max(0, made - num)
    return Unsaved(made=made, offered=offered, round=round) if is_open else None


def told(unsaved: Unsaved) -> str:
    """Return what a person should know of it."""
    since = "" if unsaved.round is None else f" after round {unsaved.round}"
    begins = "this peer was killed, or failed, last time"
    if not unsaved.made and not unsaved.offered:
        return f"{begins}: nothing that it had trained is lost"
    lost = f"{unsaved.made:,} tokens that it had trained{since} were not saved and are lost"
    if not unsaved.offered:
        return f"{begins}: {lost}"
    sent = f"{unsaved.offered:,} tokens that it had sent{since} count if the others had them by then"
    return f"{begins}: {lost}, and {sent}" if unsaved.made else f"{begins}: {sent}"


def last_entries(log: Path) -> list[events.Entry]:
    """Return the last entries of a log; none where it is not there, or a line is no event."""
    with suppress(OSError, ConfigError), log.open("rb") as file:
        start = max(0, file.seek(0, 2) - TAIL_NBYTES)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)
        return list(read_lines(lines[1:] if start else lines, str(log)))
    return []
