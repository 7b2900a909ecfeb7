"""Whether an event that another peer tells can have happened: numbers in bounds, names that are names.

Whether it did happen nobody here knows. Views may then count, divide and draw without asking again.
"""

import math
import re
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from weft.events import Event
from weft.ids import BranchId, Digest, PeerId, RunId

MAX_COUNT = 1 << 53
MAX_QUANTITY = 1e15
_NAMES = (PeerId, Digest, RunId, BranchId)
_NAME = re.compile(r"[0-9a-f]{64}")


def is_plausible(event: Event) -> bool:
    return all(_is(getattr(event, name), hint) for name, hint in _hints(type(event)).items())


@cache
def _hints(kind: type[Event]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is(value: Any, hint: Any) -> bool:
    if hint in _NAMES:
        return isinstance(value, str) and _NAME.fullmatch(value) is not None
    if get_origin(hint) in (Union, UnionType):
        return any(_is(value, each) for each in get_args(hint))
    if isinstance(value, tuple):
        return all(_is(each, get_args(hint)[0]) for each in value)
    if isinstance(value, dict):
        of_key, of_value = get_args(hint)
        return all(_is(key, of_key) and _is(each, of_value) for key, each in value.items())
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return 0 <= value <= MAX_COUNT
    if isinstance(value, float):
        return math.isnan(value) or abs(value) <= MAX_QUANTITY
    return True
