"""When a text that a model drew answers a task.

    exact       it is the answer, but for white space around it, and a full stop after it
    contains    the answer stands in it
    number      the last number in it is the answer's
    json        it is JSON of the same value
    schema      it is JSON that fits the answer, a JSON Schema (`schemas`)
    tests       its Python code passes the answer, which is code with assertions (`sandbox`)

Text of a file and text of a model meet here: what could take long, or do harm, is asked in a process of its own.
"""

import ast
import json
import re
from typing import Literal, get_args

from weft.chat import sandbox, schemas

Match = Literal["exact", "contains", "number", "json", "schema", "tests"]
MATCHES: tuple[Match, ...] = get_args(Match)
_NUMBER = re.compile(r"(?<![\d.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?![\d])")
_FENCE = "```"


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
            return bool(found and wanted) and _value(found[-1]) == _value(wanted[-1])
        case "json":
            try:
                return _json(said) == _json(answer)
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


def _json(text: str) -> str:
    """Return a JSON value in one form: true is not 1, and 1.0 is."""
    return json.dumps(json.loads(text, parse_int=float), sort_keys=True)


def _value(number: str) -> float:
    return float(number.replace(",", ""))
