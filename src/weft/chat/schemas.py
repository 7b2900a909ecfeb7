"""Whether JSON fits a JSON Schema, where both are text of strangers: of a file, and of a model.

    why_none(schema)        what is wrong with it; empty: nothing
    fits(schema, said)      of text that a model drew

No schema is fetched from anywhere, and a pattern takes no longer than the text is long. A schema that refers to parts
of itself may be short and take years: that one is asked in a process of its own, for `SECONDS`.
"""

import json
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema_rs

from weft.errors import ConfigError

SECONDS = 5.0
MEMORY_NBYTES = 1 << 30
# Without these words, each part of a schema is looked at once for each part of what is said.
_REFERS = re.compile(r'"(\$ref|\$dynamicRef|\$recursiveRef|unevaluated\w+)"')
_RUN = """
import json, sys
told = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (told["memory"], told["memory"]))
except (ImportError, ValueError, OSError):
    pass  # Windows has none, others may have less
sys.path.insert(0, told["path"])
import jsonschema_rs
try:
    patterns = jsonschema_rs.RegexOptions()
    asks = jsonschema_rs.validator_for(told["schema"], offline=True, pattern_options=patterns)
    said = told["said"]
    print(json.dumps({"why": "", "fits": said is not None and asks.is_valid(json.loads(said))}))
except jsonschema_rs.ValidationError as error:
    print(json.dumps({"why": error.message}))
except (ValueError, RecursionError):
    print(json.dumps({"why": "", "fits": False}))
"""
_TOO_LONG = f"it takes longer than {SECONDS:.0f} s to read, or more than {MEMORY_NBYTES >> 30} GiB"


def why_none(schema: str) -> str:
    """Return why a text is no JSON Schema that can be asked; empty: it is one.

    Raises:
        ConfigError: this machine cannot ask it.
    """
    try:
        if _refers(schema):
            found = _apart(schema, None)
            why = "" if found is None else str(found["why"])
            return _TOO_LONG if found is None else f"it is no JSON Schema: {why}" if why else ""
        _made(schema)
    except jsonschema_rs.ValidationError as error:
        return f"it is no JSON Schema: {error.message}"
    except (ValueError, RecursionError) as error:
        return f"it is no JSON: {error}"
    return ""


def fits(schema: str, said: str) -> bool:
    """Return whether a text is JSON that fits; what takes too long does not.

    Raises:
        ConfigError: this machine cannot ask.
    """
    try:
        value = json.loads(said)
        if not _refers(schema):
            return _made(schema).is_valid(value)
    except (ValueError, RecursionError):
        return False
    found = _apart(schema, said)
    return found is not None and found.get("fits") is True


@lru_cache(64)
def _refers(schema: str) -> bool:
    """Return whether a schema refers to parts of itself, however it spells that."""
    return _REFERS.search(json.dumps(json.loads(schema))) is not None


@lru_cache(64)
def _made(schema: str) -> jsonschema_rs.Validator:
    patterns = jsonschema_rs.RegexOptions()  # which knows no backtracking
    return jsonschema_rs.validator_for(schema, offline=True, pattern_options=patterns)


def _apart(schema: str, said: str | None) -> dict[str, Any] | None:
    """Return what another process says of a schema, and of a text; None: it took more than it may."""
    folder = str(Path(jsonschema_rs.__file__).parents[1])
    told = {"path": folder, "schema": schema, "said": said, "memory": MEMORY_NBYTES}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _RUN],
            input=json.dumps(told),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.stdout:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    if done.returncode < 0 or "MemoryError" in done.stderr or "memory allocation" in done.stderr:
        return None
    raise ConfigError(f"a schema is asked in a process of its own, and here that fails: {done.stderr.strip()[-300:]}")
