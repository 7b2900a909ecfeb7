"""What of an event may be told to whoever watches a run.

of rounds, members, training     as it is: members tell each other
addresses, paths                 left empty
words for people                 without what looks like an address, a path or a ticket
of this machine's listener       nothing
"""

import re
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from weft import events
from weft.wire import printable

E = TypeVar("E", bound=events.Event)

# Who knocks at this machine, and where.
PRIVATE = (events.TransportUp, events.ConnectionDropped, events.AdmissionRefused)
MAX_TEXT = 400  # characters of one field; a text that a model wrote is as long as its run asked for
HIDDEN = "(hidden)"

_EMPTY: dict[type[events.Event], dict[str, Any]] = {
    events.LinkUp: {"address": "", "tried": ()},
    events.CheckpointSaved: {"path": ""},
    events.CheckpointFailed: {"path": ""},
}
_PLACE = re.compile(
    r"""
      \bweft[0-9]{1,4}[a-z2-7]{16,}                          # a ticket
    | \b[a-z][a-z0-9+.-]*://\S*[^\s,;.)]                     # a URL
    | \b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b(?::[0-9]+)?          # IPv4
    | \[?(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}\b(?:\]:[0-9]+)?  # IPv6, and times of day
    | \b[\w-]+(?:\.[\w-]+)*:[0-9]{2,5}\b                     # a host and its port
    | (?<![\w.)])(?:~|\.{1,2})?/[\w.~-]+(?:/[\w.~-]*)*       # a path
    | \b[a-z]:\\[^\s'"]*[^\s'",;.)]                          # a path of Windows
    """,
    re.VERBOSE | re.IGNORECASE,
)


def public(event: E) -> E | None:
    """Return an event as watchers may have it; None: they may not."""
    if isinstance(event, PRIVATE):
        return None
    changes = dict(_EMPTY.get(type(event), {}))
    for name in _texts(type(event)):
        if name not in changes:
            changes[name] = _without_places(getattr(event, name))
    return msgspec.structs.replace(event, **changes) if changes else event


def public_entry(entry: events.Entry) -> events.Entry | None:
    """Return an entry as watchers may have it; None: they may not."""
    event = public(entry.event)
    return None if event is None else msgspec.structs.replace(entry, event=event)


def scrubbed(text: str) -> str:
    """Return words for people without what looks like an address, a path or a ticket; cut where they are long."""
    return printable(_PLACE.sub(HIDDEN, text), keep="\n\t")[:MAX_TEXT]


def _without_places(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, tuple):
        return tuple(map(_without_places, value))
    if isinstance(value, dict):
        return {key: _without_places(each) for key, each in value.items()}
    return value


@cache
def _texts(kind: type[events.Event]) -> tuple[str, ...]:
    """Return the fields that hold words: not names of peers, rounds or digests, and not what a model wrote."""
    if kind is events.Sampled:
        return ()
    return tuple(name for name, hint in get_type_hints(kind).items() if _has_words(hint))


def _has_words(hint: Any) -> bool:
    return hint is str or any(map(_has_words, getattr(hint, "__args__", ())))
