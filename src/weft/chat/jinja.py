"""The program that renders one chat template, in a process of its own: run by its path, without weft.

minijinja's fuel counts instructions, and bytes that are put together. It does not count what the reader of a source
calls itself for, lists in lists, what Python makes of an argument, or a string's `format`: a template of a line may
take all memory, never end, or break the process that it runs in. Here it breaks this one, which has `memory` bytes.

    lines in    {"path", "memory", "max_nbytes", "seconds", "sources": {name: text}}
                {"name", "fuel", "seconds", "wall_s"} and then its context, again and again
    lines out   {} once it runs; then, of the sources, {} or {"why"}
                {"text"}, {"is_long"}, {"is_spent"} or {"why"}, each time
"""

import datetime
import json
import re
import signal
import sys
from typing import Any

MAX_INDENT = 16  # of JSON that a template writes


class Refusal(Exception):
    """What a template asks for is not given."""


def raise_exception(message: object = "") -> None:
    raise Refusal(str(message))


def to_json(value: object, indent: object = None, **settings: Any) -> str:
    """Return JSON as transformers writes it."""
    width = len(indent) if isinstance(indent, str) else 0 if indent is None else indent
    if not isinstance(width, int) or width > MAX_INDENT:
        raise Refusal(f"tojson takes an indent of at most {MAX_INDENT}, not {str(indent)[:20]}")
    given = {"ensure_ascii": False, **settings}
    known = {name: given[name] for name in ("ensure_ascii", "separators", "sort_keys") if given.get(name) is not None}
    if isinstance(known.get("separators"), list):
        known["separators"] = tuple(known["separators"])
    return json.dumps(value, indent=indent, **known)  # type: ignore[arg-type]


def environment(sources: dict[str, str]) -> Any:
    import minijinja  # only here there is a path that leads to it

    env = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda _name: False,
        filters={"tojson": to_json},
        globals={"raise_exception": raise_exception},
        debug=False,
    )
    for name, text in sources.items():
        env.add_template(name, text)
    return env


def rendered(env: Any, given: dict[str, Any], context: dict[str, Any], max_nbytes: int) -> dict[str, Any]:
    def strftime_now(form: str) -> str:
        return datetime.datetime.fromtimestamp(given["wall_s"]).strftime(form)

    try:
        env.fuel = given["fuel"]
        text = env.render_template(given["name"], **(context | {"strftime_now": strftime_now}))
    except Exception as error:  # whatever a stranger's template makes of what it is given
        return {"is_spent": True} if _is_spent(error) else {"why": said(error)}
    return {"is_long": True} if len(text.encode()) > max_nbytes else {"text": text}


def _is_spent(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (type(error).__name__ == "TemplateError" and "out of fuel" in str(error))


def said(error: Exception) -> str:
    """Return what a template's fault is, on one line."""
    detail, message = getattr(error, "detail", None), getattr(error, "message", None)
    told = detail if isinstance(detail, str) and detail else message or str(error) or type(error).__name__
    return re.sub(r"\s+", " ", told)[:300].strip().rstrip(".")


def hold(memory: int) -> None:
    """Take no more than so many bytes, as far as this system can hold a process to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked ends this
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # Windows has none, others may have less


def watch(seconds: float) -> None:
    """End this process, whatever it is at, after so many seconds; 0: never. Windows cannot: there who asks ends it."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    def tell(answer: dict[str, Any]) -> None:
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        watch(0)

    told = json.loads(sys.stdin.buffer.readline())
    hold(told["memory"])
    sys.path.insert(0, told["path"])
    environment({})
    tell({})
    watch(told["seconds"])
    try:
        env = environment(told["sources"])
    except Exception as error:  # a source that is no Jinja
        line = getattr(error, "line", None)
        tell({"why": said(error) if line is None else f"line {line}: {said(error)}"})
        return
    tell({})
    for line in sys.stdin.buffer:
        given = json.loads(line)
        watch(given["seconds"])
        tell(rendered(env, given, json.loads(sys.stdin.buffer.readline()), told["max_nbytes"]))


if __name__ == "__main__":
    main()
