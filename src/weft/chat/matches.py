"""When a text that a model drew answers a task.

    exact       it is the answer, but for white space around it, and a full stop after it
    contains    the answer stands in it
    number      the last number in it is the answer's, to the last digit; 1e5 is 100000
    json        it is JSON of the same value, numbers to the last digit
    schema      it is JSON that fits the answer, a JSON Schema (`schemas`)
    tests       its Python code passes the answer, which is code with assertions (`sandbox`)

Text of a file and text of a model meet here: what could take long, or do harm, is asked in a process of its own. Peers
judge alike: numbers are compared as they are written and never computed with, so no rounding, and no exponent, matters.
"""

import ast
import json
import re
from typing import Any, Literal, NamedTuple, get_args
from unicodedata import decimal

from weft.chat import sandbox, schemas

Match = Literal["exact", "contains", "number", "json", "schema", "tests"]
MATCHES: tuple[Match, ...] = get_args(Match)
_NUMBER = re.compile(r"(?<![\d.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?!\d)(?:[eE][-+]?\d+(?!\.?\d))?")
_LITERAL = re.compile(r"([-+]?)(\d*)(?:\.(\d*))?(?:[eE]([-+]?)0*(\d+))?")
_MAX_EXPONENT_DIGITS = 18
_MAX_DEPTH = 100  # of JSON: Python's own reader takes ten times as much, and each version another depth
_FENCE = "```"


class Number(NamedTuple):
    """A number in one form: 1200, 1,200.0 and 1.2e3 are one.

    Args:
        digits: without zeros at either end; empty: it is zero, or no number of digits.
        exponent: the power of ten that the last of them stands for.
        name: of what has no digits: NaN, Infinity.
    """

    is_negative: bool
    digits: str
    exponent: int = 0
    name: str = ""


def matches(match: Match, said: str, answer: str) -> bool:
    """Return whether a text is right.

    Raises:
        ConfigError: it is code, or needs a process of its own, and this machine runs none.
    """
    said = said.strip()
    match match:
        case "exact":
            return said.removesuffix(".") == answer.strip().removesuffix(".")
        case "contains":
            return answer.strip() in said
        case "number":
            found, wanted = _NUMBER.findall(said), _NUMBER.findall(answer)
            try:
                return bool(found and wanted and _number(found[-1]) == _number(wanted[-1]))
            except ValueError:
                return False
        case "json":
            try:
                return bool(_json(said) == _json(answer))
            except (ValueError, RecursionError):
                return False
        case "schema":
            return schemas.fits(answer, said)
        case "tests":
            return sandbox.passes(code_in(said), answer)


def why_never(match: Match, answer: str) -> str:
    """Return why nothing can match such an answer; empty: something can, as far as can be seen."""
    if not answer.strip():
        return "it is empty"
    match match:
        case "number" | "json":
            return "" if matches(match, answer, answer) else "it is none"
        case "schema":
            return schemas.why_none(answer)
        case "tests":
            try:
                ast.parse(answer)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                return f"it is no Python: {error}"
    return ""


def code_in(said: str) -> str:
    """Return the code of an answer: what its last fences (three backticks) hold, or all of it."""
    parts = said.split(_FENCE)  # what stands in fences is every second one
    found = [each.partition("\n") for each in parts[1::2]]
    return next((code for _, line, code in reversed(found) if line), said)


def _json(text: str) -> Any:
    """Return a JSON value that equals others of the same value: true is not 1, and 1.0 is.

    Raises:
        ValueError: it is none, or nested too deep.
    """
    value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_named)
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [each for node in level for each in _parts(node)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {_MAX_DEPTH}")


def _parts(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def _number(written: str) -> Number:
    """
    Raises:
        ValueError: its exponent is beyond all bounds.
    """
    found = _LITERAL.fullmatch("".join(str(decimal(each, each)) for each in written.replace(",", "")))
    assert found is not None, "the pattern above, or JSON's, found it"
    sign, whole, part, exponent_sign, exponent = (each or "" for each in found.groups())
    if len(exponent) > _MAX_EXPONENT_DIGITS:
        raise ValueError("its exponent is too large")
    digits = (whole + part).lstrip("0")
    if not (short := digits.rstrip("0")):
        return Number(is_negative=False, digits="")
    power = int(f"{exponent_sign}{exponent or 0}") - len(part) + len(digits) - len(short)
    return Number(sign == "-", short, power)


def _named(name: str) -> Number:
    """Return what Python's JSON has beside numbers of digits."""
    return Number(name.startswith("-"), "", 0, name)
