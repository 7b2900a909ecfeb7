"""What options mean that several commands share.

--until 07:00, 2h30m, 90min, 2026-12-01, 2026-12-01T07:00, 20rounds, 5Mtokens    when a peer leaves by itself
--up 20mbit, --per-day 50GB    quantities; what may mean bytes per second (20MB/s, 20MBps) is no rate
--length 2h, 5Mtokens, 10passes    how long to train on a text
--data FILES                   start from the folder the command is run in
--numbers int8                 how a model's weights are held where it answers

A command takes the fields of a dataclass as options of its own:

@spread
def train(context: typer.Context, stay: Stay) -> None: ...        # weft train --until 07:00
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import reading
from weft.errors import ConfigError, DataError, TicketError
from weft.events import CountedThrough, Emit, Entry, Notice, PeerStarted, RoundCommitted, StepDone
from weft.ids import PeerId, several

if TYPE_CHECKING:
    import torch
    import typer

    from weft.data.corpus import JsonlSource, ParquetSource, TextSource
    from weft.data.documents import Document
    from weft.engine.numbers import Kind

TICKET_VARIABLE = "WEFT_TICKET"
NOT_SEEN = f'"-" reads it from standard input, @FILE from a file; left out, weft takes {TICKET_VARIABLE}.'
"""How a ticket comes to a command: whoever may list a machine's processes sees what is typed."""
ASKED = f'"-" reads it from standard input, @FILE from a file; left out, weft takes {TICKET_VARIABLE}, or asks.'
"""The same of a command that needs a ticket."""

_WHILE = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)(?:m|min))?(?:(\d+)s)?", re.IGNORECASE)
_MAX_BLANK = 16  # lines before a ticket
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)\s*(rounds?|tokens?)", re.IGNORECASE)
_IN_THOUSANDS = re.compile(r"[1-9]\d{0,2}\.\d{3}")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_MOMENTS = "Allowed: a time (07:00), a duration (2h, 90min), a date (2026-12-01 or 2026-12-01T07:00)"
_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


class Numbers(StrEnum):
    auto = "auto"
    int8 = "int8"
    exact = "exact"
    w8a16 = "w8a16"
    bf16 = "bf16"
    fp32 = "fp32"


def kind_on(device: "torch.device", numbers: Numbers) -> "Kind":
    """Return how the weights of a whole model are held on a device.

    Raises:
        ConfigError: it does not multiply such numbers rightly.
    """
    from weft.engine.load import kind_alone, required

    match numbers:
        case Numbers.auto:
            return kind_alone(device)
        case Numbers.int8:
            return required("int8", device)
        case Numbers.exact:
            return required("exact", device)
        case Numbers.w8a16:
            return required("w8a16", device)
        case Numbers.bf16:
            return "bf16"
        case Numbers.fp32:
            return "fp32"


@dataclass(frozen=True, kw_only=True)
class Until:
    """One of these; the others are None."""

    wall: float | None = None  # seconds since 1970
    rounds: int | None = None  # that count this peer
    tokens: int | None = None  # that it trains on


def until(text: str | None, now: float, timezone: tzinfo | None = None, *, contributes: bool = True) -> Until:
    """Return what `--until` means at the wall time `now`.

    Args:
        contributes: whether this peer does, so that it may leave after a share.

    Raises:
        ConfigError: nothing, a share of who contributes none, or a time that has passed.
    """
    if text is None:
        return Until()
    given = text.strip()
    here = datetime.fromtimestamp(now, timezone)
    if count := _COUNT.fullmatch(given):
        if not contributes:
            raise ConfigError(f"--until {text[:40]}: an anchor contributes no rounds or tokens. {_MOMENTS}.")
        number = _whole("--until", text, count)
        if number < 1:
            raise ConfigError(f"--until {text[:40]}: it must be more than 0.")
        return Until(rounds=number) if count[3].lower().startswith("round") else Until(tokens=number)
    share = ", or what to contribute (20rounds, 5Mtokens)" if contributes else ""
    return Until(wall=_later("--until", text, here, share).timestamp())


def _whole(option: str, text: str, count: re.Match[str]) -> int:
    """Return how many a count of whole things is.

    Raises:
        ConfigError: a full stop stands before just three digits, as much of Europe writes thousands.
    """
    if not count[2] and _IN_THOUSANDS.fullmatch(count[1]):
        whole, _, more = count[1].partition(".")
        raise ConfigError(
            f"{option} {text[:40]}: that may be {int(whole + more):,} or {float(count[1]):g}. Write {whole}{more}"
            f"{count[3]} or {whole}{count[3]}."
        )
    return int(float(count[1]) * _SIZES[count[2].lower()])


def later(option: str, text: str, now: float) -> datetime:
    """Return what a person means by 07:00, 30d or 2026-12-01, which is after the wall time `now`.

    Raises:
        ConfigError: no moment, or one that has passed; names `option`.
    """
    return _later(option, text, datetime.fromtimestamp(now).astimezone())


def _later(option: str, text: str, here: datetime, more: str = "") -> datetime:
    at = _moment(text.strip(), here)
    if at is None:
        raise ConfigError(f"{option} {text[:40]}: weft reads no time in that. {_MOMENTS}{more}.")
    if at <= here:
        raise ConfigError(f"{option} {text[:40]}: that time has passed; it is now {here:%Y-%m-%d %H:%M}.")
    return at


def _moment(given: str, here: datetime) -> datetime | None:
    if face := _CLOCK.fullmatch(given):
        at = here.replace(hour=int(face[1]), minute=int(face[2]), second=0, microsecond=0)
        return at if at > here else at + timedelta(days=1)
    if (span := _WHILE.fullmatch(given)) and any(span.groups()):
        days, hours, minutes, seconds = (int(part or 0) for part in span.groups())
        return here + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        return None
    return at.replace(tzinfo=here.tzinfo) if at.tzinfo is None else at.astimezone(here.tzinfo)


@dataclass
class Contributed:
    """A sink that counts what this peer contributes, and says when it is enough."""

    until: Until
    stop: Callable[[str], None] | None = None  # of the peer, once there is one
    emit: Emit | None = None
    _rounds: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _peer: PeerId | None = field(default=None, init=False)

    def started(self, stop: Callable[[str], None], emit: Emit) -> None:
        self.stop, self.emit = stop, emit

    def write(self, entry: Entry) -> None:
        match entry.event:
            case PeerStarted():
                self._peer = entry.peer
                if self.emit is not None and (aim := self._aim()):
                    self.emit(Notice(text=f"this peer leaves after {aim}"))
            case RoundCommitted(contributors=contributors):
                self._rounds += self._peer in contributors
            case CountedThrough():  # this peer has no vote, and is counted with its aggregator
                self._rounds += 1
            case StepDone(num_tokens=num_tokens):
                self._tokens += num_tokens
            case _:
                return
        is_enough = (self.until.rounds is not None and self._rounds >= self.until.rounds) or (
            self.until.tokens is not None and self._tokens >= self.until.tokens
        )
        if is_enough and self.stop is not None:
            self.stop(f"it has contributed {self._aim()}")

    def close(self) -> None:
        pass

    def _aim(self) -> str:
        if self.until.rounds is not None:
            return several(self.until.rounds, "round")
        return "" if self.until.tokens is None else several(self.until.tokens, "token")


def ticket_text(given: str) -> str:
    """Return the ticket that a command is given: "-" reads it from standard input, "@FILE" from a file.

    Raises:
        TicketError: nothing is there.
    """
    from weft.net.ticket import MAX_CHARS

    if given.startswith("@"):
        return _ticket_in(Path(given[1:]).expanduser(), 4 * MAX_CHARS)
    if given != "-":
        return given
    if sys.stdin.isatty():
        print("Paste the ticket here, then press Enter:", file=sys.stderr, flush=True)  # noqa: T201
    lines = lines_of_input(MAX_CHARS + 1)
    if not sys.stdin.isatty():  # what was copied may begin with empty lines; who types sees them
        lines = filter(str.strip, islice(lines, _MAX_BLANK))
    line = next(lines, "")
    if not line.strip():
        raise TicketError("standard input is empty or closed; weft expected a ticket from there.")
    return line


def ticket_or_none(given: str | None) -> str | None:
    """Return the ticket that a command is given, or else the one in the environment; None: neither."""
    return ticket_text(os.environ.get(TICKET_VARIABLE) or "") or None if given is None else ticket_text(given)


def ticket_of(given: str | None) -> str:
    """Return the ticket that a command is given, or else the one in the environment, or else what a person pastes.

    Raises:
        TicketError: there is none, and no terminal to ask; says where it may come from.
    """
    found = ticket_or_none(given)
    if found is None and sys.stdin.isatty():
        found = ticket_text("-")
    if found is None:
        raise TicketError(
            'weft needs a ticket. Give "-" and write it to standard input, or @FILE if it is in a file, or set '
            f"{TICKET_VARIABLE} to it."
        )
    return found


def _ticket_in(path: Path, max_nbytes: int) -> str:
    try:
        with path.open("rb") as file:
            text = reading.text_of(file.read(max_nbytes)).strip()
    except OSError as error:
        raise TicketError(f"cannot read the ticket in {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError:
        text = "?"
    if not text:
        raise TicketError(f"{path} is empty; weft expected a ticket in it.")
    return text


def lines_of_input(max_chars: int) -> Iterator[str]:
    """Yield the lines of standard input without a byte order mark, whatever wrote them there."""
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:
        yield from iter(lambda: sys.stdin.readline(max_chars), "")
        return
    encoding = ""
    while line := raw.readline(4 * max_chars):
        num_skipped = 0
        if not encoding:
            encoding, num_skipped = reading.encoding_of(line)
        if encoding == "utf-16-le" and line.endswith(b"\n"):
            line += raw.read(1)  # the other half of the line's end
        yield line[num_skipped:].decode(encoding, errors="replace")[:max_chars]


def text_of_input(what: str, max_nbytes: int) -> str:
    """Return all that stands in standard input, whatever wrote it there.

    Args:
        what: is expected from there, in words.

    Raises:
        ConfigError: nothing is there; DataError: it is no text, or longer than it may be.
    """
    raw = getattr(sys.stdin, "buffer", None)
    data = sys.stdin.read().encode() if raw is None else raw.read(max_nbytes + 1)
    if len(data) > max_nbytes:
        raise DataError(f"standard input is more than {max_nbytes:,} bytes, which is too much for {what}.")
    try:
        text = reading.text_of(data)
    except UnicodeDecodeError:
        raise DataError(f"standard input is no text; weft expected {what} from there.") from None
    if not text.strip():
        raise ConfigError(f"standard input is empty or closed; weft expected {what} from there.")
    return text


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long to train: one of these; the others are None."""

    seconds: float | None = None
    tokens: int | None = None
    passes: float | None = None  # over the text


_PASSES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:x|pass(?:es)?)", re.IGNORECASE)


def length(option: str, text: str) -> Length:
    """Return what a person means by 2h, 30min, 5Mtokens or 10passes.

    Raises:
        ConfigError: none of them, or nothing; names `option`.
    """
    given, found = text.strip(), Length()
    if match := _PASSES.fullmatch(given):
        found = Length(passes=float(match[1]))
    elif match := _COUNT.fullmatch(given):
        if match[3].lower().startswith("token"):
            found = Length(tokens=_whole(option, text, match))
    elif not given.endswith("M") and (span := _WHILE.fullmatch(given.replace(" ", ""))):  # 5M: tokens, perhaps
        days, hours, minutes, seconds = (int(part or 0) for part in span.groups())
        found = Length(seconds=timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds())
    if not any((found.seconds, found.tokens, found.passes)):
        raise ConfigError(
            f"{option} {text[:40]}: that is no length. Allowed: a while (2h, 30min), tokens (5Mtokens) or passes over "
            "the text (10passes)."
        )
    return found


Command = Callable[..., None]


def spread(command: Command) -> Command:
    """Return `command` with each field of its dataclass parameters as an option of its own, in order."""
    own = inspect.signature(command).parameters.values()
    kinds = ((each.name, each.annotation) for each in own)
    groups = {name: kind for name, kind in kinds if isinstance(kind, type) and is_dataclass(kind)}

    @wraps(command)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    shown = [each for one in own for each in (_options(groups[one.name]) if one.name in groups else [_by_name(one)])]
    with_options.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return with_options


def _options(group: type[Any]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(group)
    ]


def _by_name(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def given(context: "typer.Context") -> dict[str, str]:
    """Return how each option that was typed is spelled, by the name of its parameter: not those that have defaults."""
    typed = {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    return {str(each.name): max(each.opts, key=len) for each in context.command.params if each.name in typed}


_QUANTITY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(?:e\+?(\d{1,2}))?\s*([a-z/]*)", re.IGNORECASE)
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPELLINGS = ("bit", "bit/s", "bitps", "bps")
_RATES = {unit.replace("bit", each): size for unit, size in _BITS.items() for each in _SPELLINGS}
_LEAST_BARE_BPS = 1e5  # no line is slower, and as megabits nobody has as many: 20 is meant as 20mbit, perhaps
_LEAST_BARE_NBYTES = 10**6  # nobody limits anything to less: 8 is meant as 8GB, perhaps
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BYTES |= {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}


def rate_bps(option: str, text: str | None) -> float | None:
    """Return a rate in bits per second: 20mbit, 1.5 gbit/s, 800kbps, or a plain number that is no small one.

    Raises:
        ConfigError: it is none; names `option`.
    """
    if text is None:
        return None
    match = _match(text, _RATES)
    found = 0.0 if match is None or match[3].endswith("Bps") else _value(match, _RATES)
    if match is None or found <= 0:
        raise ConfigError(
            f"{option} {text[:80]}: Allowed: a rate above 0, such as 20mbit; units are {', '.join(_BITS)}."
        )
    if not match[3] and found < _LEAST_BARE_BPS:
        raise ConfigError(
            f"{option} {text[:80]}: a number without a unit is bits per second, which would be next to nothing. Write "
            f"{found:g}mbit if you mean megabits; units are {', '.join(_BITS)}."
        )
    return found


def nbytes(option: str, text: str | None) -> int | None:
    """Return a number of bytes: 50GB, 512 MiB, or a plain number that is no small one.

    Raises:
        ConfigError: it is none; names `option`.
    """
    if text is None:
        return None
    match = _match(text, _BYTES)
    if match is None:
        raise ConfigError(
            f"{option} {text[:80]}: that is no amount. Allowed: a number of bytes, such as 50GB; units are "
            f"{', '.join(_BYTES)}."
        )
    found = int(_value(match, _BYTES))
    if not match[3] and 0 < found < _LEAST_BARE_NBYTES:
        raise ConfigError(
            f"{option} {text[:80]}: a number without a unit is bytes, which would be next to nothing. Write {found}GB "
            f"if you mean gigabytes; units are {', '.join(_BYTES)}."
        )
    return found


def _match(text: str, units: Mapping[str, float]) -> re.Match[str] | None:
    match = _QUANTITY.fullmatch(text.strip())
    return None if match is None or (match[3] and match[3].lower() not in units) else match


def _value(match: re.Match[str], units: Mapping[str, float]) -> float:
    return float(match[1]) * 10.0 ** int(match[2] or 0) * units.get(match[3].lower(), 1.0)


def own_source(paths: Sequence[str]) -> "TextSource | JsonlSource | ParquetSource":
    """Return how what --data names is read: as text, JSON lines or tables, by the files' names.

    Raises:
        DataError: nothing there, or a mixture.
    """
    from glob import has_magic

    from weft.data.corpus import source_of

    for path in paths:
        if not Path(path).exists() and not has_magic(path):
            raise DataError(f"--data {path}: no such file or folder in {Path.cwd()}.")
    return source_of(paths, Path.cwd())


def own_nbytes(paths: Sequence[str]) -> int | None:
    """Return about how much text --data names; None where that cannot be told."""
    from weft.data.corpus import text_nbytes

    try:
        return text_nbytes(own_source(paths), Path.cwd())
    except DataError:
        return None  # whoever reads it says why


def own_documents(paths: Sequence[str]) -> "Iterator[Document]":
    """Yield the documents that --data names.

    Raises:
        DataError: nothing there, unreadable, or malformed.
    """
    from weft.data.corpus import documents

    return documents(own_source(paths), Path.cwd())
