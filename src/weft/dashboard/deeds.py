"""What is decided about a run, in words: acts of stewards, votes of members, and what an amendment changes."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from weft.ids import several

# What is done by one, and what is asked for; `{subject}` is the key or the run that it is about.
_DEEDS = {
    "remove": ("removes {subject}", "remove {subject}"),
    "ban": ("bans {subject}", "ban {subject}"),
    "pardon": ("lets {subject} in again", "let {subject} in again"),
    "no answer": ("gets no answer from {subject}", "note that {subject} gave no answer"),
    "vote out": ("votes {subject} out", "vote {subject} out"),
    "rewind": ("has the run go back", "have the run go back"),
    "amend": ("changes the run's settings", "change the run's settings"),
    "succeed": ("says that run {subject} goes on in place of this one", "let run {subject} go on in place of this one"),
}
_MAX_NBYTES = 1000  # of what is told of one setting: whoever tells of an act may tell anything


def done(kind: str, subject: str, changes: Mapping[str, str], *, by_one: bool) -> str:
    """Return what was decided, behind who did: removes bert; changes the run's settings: 6,000,000 tokens in all.

    Args:
        by_one: one steward did; else several members together.
    """
    if kind not in _DEEDS:
        return f": {kind} {subject}".rstrip()
    words = _DEEDS[kind][0 if by_one else 1].format(subject=subject)
    return f" {words}{': ' if changes else ''}{', '.join(map(_changed, changes, changes.values()))}"


def wanted(kind: str, subject: str) -> str:
    """Return what is asked for, behind "asks to"."""
    return _DEEDS[kind][1].format(subject=subject) if kind in _DEEDS else f"{kind} {subject}".rstrip()


def _changed(name: str, told: str) -> str:
    """Return a changed setting in words; as it is told, where that says nothing."""
    try:
        value: Any = msgspec.json.decode(told) if len(told) <= _MAX_NBYTES else None
        words = _SETTINGS[name](value)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
        return f"{name} = {told}"
    return words


def _count(text: str) -> Callable[[Any], str]:
    def say(value: Any) -> str:
        if type(value) is not int:
            raise TypeError(value)
        return text.format(several(value, "training step" if "round" in text else "token"))

    return say


def _schedule(value: Any) -> str:
    said = f"learning rate at most {float(value['lr']):g}"
    total = value.get("total_tokens")
    return said if total is None else f"{said}, planned for {int(total):,} tokens"


def _named(text: str) -> Callable[[Any], str]:
    return lambda value: text.format(value["type"], **{"numbers": _numbers(value)})


def _numbers(value: Mapping[str, Any]) -> str:
    numbers = ", ".join(f"{name} {number:g}" for name, number in value.items() if name != "type")
    return f" ({numbers})" if numbers else ""


_SETTINGS: dict[str, Callable[[Any], str]] = {
    "round": lambda value: f"to the parameters after round {int(value)}",
    "tokens": _count("{} in all"),
    "seq_len": _count("samples of {}"),
    "batch_size": lambda value: f"{several(int(value), 'sample')} a training step",
    "every": _count("{} a round"),
    "schedule": _schedule,
    "codec": _named("updates sent in {}"),
    "reply_codec": _named("results sent in {}"),
    "apply": _named("results applied by {}{numbers}"),
}
