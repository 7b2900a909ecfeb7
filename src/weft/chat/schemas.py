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

import jsonschema_rs

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
except ImportError:
    pass  # of Windows
sys.path.insert(0, told["path"])
import jsonschema_rs
patterns = jsonschema_rs.RegexOptions()
print(jsonschema_rs.validator_for(told["schema"], offline=True, pattern_options=patterns).is_valid(told["said"]))
"""


def why_none(schema: str) -> str:
    """Return why a text is no JSON Schema that can be asked; empty: it is one."""
    try:
        _made(schema)
    except jsonschema_rs.ValidationError as error:
        return f"it is no JSON Schema: {error.message}"
    except (ValueError, RecursionError) as error:
        return f"it is no JSON: {error}"
    return ""


def fits(schema: str, said: str) -> bool:
    """Return whether a text is JSON that fits; what takes too long does not."""
    try:
        value, (made, refers) = json.loads(said), _made(schema)
        if not refers:
            return made.is_valid(value)
    except (ValueError, RecursionError):
        return False
    return _fits_apart(schema, value)


@lru_cache(64)
def _made(schema: str) -> tuple[jsonschema_rs.Validator, bool]:
    """Return what asks a schema, and whether it refers to parts of itself."""
    patterns = jsonschema_rs.RegexOptions()  # which knows no backtracking
    made = jsonschema_rs.validator_for(schema, offline=True, pattern_options=patterns)
    return made, _REFERS.search(json.dumps(json.loads(schema))) is not None  # in one way of spelling


def _fits_apart(schema: str, value: object) -> bool:
    folder = str(Path(jsonschema_rs.__file__).parents[1])
    told = {"path": folder, "schema": schema, "said": value, "memory": MEMORY_NBYTES}
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
        return False
    return done.stdout.strip() == "True"
