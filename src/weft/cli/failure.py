"""What a person reads when a command fails: one paragraph on standard error, and an exit code.

an error of weft's own           its message; the exit code of its class
Ctrl-C                           nothing more; 130, as shells have it
nobody reads the answer          nothing more; 141, as shells have it
wrong usage                      what is wrong, and which help to read; 2
too many files open, anywhere    how many may be, and how to raise that; 11
no room on a disk, from anywhere 41, as DiskFull
a file the system refuses        11, as DataError: which file, and why
out of memory, from anywhere     42, as OutOfMemory
anything else                    where the traceback was written; 1
"""

import difflib
import errno
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from weft.cli.streams import Unwritten
from weft.cli.terminal import terminal_width, wrapped
from weft.errors import DataError, DiskFull, OutOfMemory, WeftError
from weft.wire import printable

_INTERRUPTED = 130  # 128 + SIGINT
_UNEXPECTED = 1
_WRONG_USAGE = 2
MAX_OWNERS = 3  # verbs that have an option, which are named
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOLCK)


def explain(error: BaseException, home: Path) -> int:
    """Say on standard error why a command ended, and return the exit code."""
    known = _known(error)
    if _is_out_of_files(error):
        say(
            f"too many files are open{_most_files()}. Let it open more, with `ulimit -n 1024` in the same shell, then "
            "start again; what was saved before is intact."
        )
        return DataError.exit_code if known is None else known.exit_code
    if known is not None:
        say(str(known))
        return known.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _INTERRUPTED
    if isinstance(error, Unwritten):
        if error.has_reader:
            say(str(error))
        return error.code
    refused = _refused_file(error)
    if refused is not None and refused.errno in (errno.ENOSPC, errno.EDQUOT):
        say(f"no room left on the disk: {refused}. Free some, then start again; what was saved before is intact.")
        return DiskFull.exit_code
    if refused is not None:
        say(
            f"the system does not let weft use {refused.filename or 'a file'}: {refused.strerror}. Check the disk and "
            "who owns the folder, or choose another home with --home; what was saved before is intact."
        )
        return DataError.exit_code
    if _is_out_of_memory(error):
        say(
            f"out of memory: {str(error).splitlines()[0] if str(error) else 'none was left'}. Close other programs, or "
            "choose a smaller model, batch or context; `weft doctor` says what this machine holds."
        )
        return OutOfMemory.exit_code
    kept = _keep(error, home)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    say(f"this is a fault in weft itself, not in what you typed: {what}. The traceback is in {kept}; please report it.")
    return _UNEXPECTED


def explain_usage(error: BaseException) -> int:
    """Say what is wrong with a command line, and return the exit code; a verb that was given nothing shows its help."""
    message: str = getattr(error, "format_message", error.__str__)()
    if message.startswith("Usage:"):
        print(message, file=sys.stderr)  # noqa: T201
        return _WRONG_USAGE
    context = getattr(error, "ctx", None)
    verb = "weft" if context is None else context.command_path
    message = _plain(message.replace("Value error, ", "")).rstrip(".")
    if message.startswith("Missing argument") and (told := getattr(getattr(error, "param", None), "help", None)):
        message = f"{message}: {told[0].lower()}{told[1:]}".rstrip(".")
    option = getattr(error, "option_name", None)
    if context is not None and isinstance(option, str):
        message = _no_such_option(option, context)
    say(f"{message}{'' if message.endswith('?') else '.'} `{verb} --help` shows what is allowed.")
    return _WRONG_USAGE


_PLAIN = {
    "Input should be a valid integer, unable to parse string as an integer": "it must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "it must be a number",
    "Input should be less than or equal to": "it must be at most",
    "Input should be greater than or equal to": "it must be at least",
    "Input should be a valid": "it must be a",
    "Input should be": "it must be",
}


def _plain(message: str) -> str:
    """Return the words of the library that reads options as a person says them."""
    for words, plainly in _PLAIN.items():
        message = message.replace(words, plainly)
    return message


def _no_such_option(option: str, context: Any) -> str:
    """Return that a verb has no such option, and which verbs have it; else which of its own is much like it."""
    verb, root = context.command_path, context.find_root()
    said = f"`{verb}` has no option {printable(option)}"
    if context is not root and option in _options_of(root.command):
        return f"{said}; it stands before the verb: weft {option} ... {verb.removeprefix('weft ')}"
    own = sorted(_options_of(context.command))
    if longer := next((each for each in own if each.endswith(f"-{option.strip('-')}")), None):
        return f"{said}. Did you mean {longer}?"
    owners = [f"`{name}`" for name, command in _verbs(root.command, "weft") if option in _options_of(command)]
    if owners:
        more = f" and {len(owners) - MAX_OWNERS} more" if len(owners) > MAX_OWNERS else ""
        many = f"{', '.join(owners[:MAX_OWNERS])}{more} have" if len(owners) > 1 else f"{owners[0]} has"
        return f"{said}; {many} it"
    near = difflib.get_close_matches(option, own, n=1)
    return f"{said}. Did you mean {near[0]}?" if near else said


def _verbs(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for verb, each in getattr(command, "commands", {}).items():
        yield f"{name} {verb}", each
        yield from _verbs(each, f"{name} {verb}")


def _options_of(command: Any) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("-")}


def say(message: str) -> None:
    """Print one paragraph on standard error, wrapped between words where it is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    width = terminal_width() if console.is_terminal else None
    lines = wrapped(f"weft: {printable(' '.join(message.split()))}", width).removeprefix("weft: ")
    console.print(Text.assemble(("weft: ", "bold red"), lines), soft_wrap=True)


def _known(error: BaseException) -> WeftError | None:
    """Return the error of weft's own that `error` is, or the first one a group of tasks holds."""
    if isinstance(error, WeftError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _known(inner)) is not None), None)
    return None


def _refused_file(error: BaseException) -> OSError | None:
    """Return the error of a file or a disk that `error` is, or the first one a group of tasks holds."""
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _OF_DISKS):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _refused_file(inner)) is not None), None)
    return None


def _is_out_of_files(error: BaseException | None) -> bool:
    """Return whether it was raised, however it was put into words since, because no more files may be opened."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_out_of_files, error.exceptions))
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _most_files() -> str:
    if sys.platform == "win32":
        return ""
    import resource

    return f": this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} at once"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if "torch" not in sys.modules:  # torch says it in words of its own
        return False
    from weft.training.device import is_out_of_memory

    return is_out_of_memory(error)


def _keep(error: BaseException, home: Path) -> str:
    text = "".join(traceback.format_exception(error))
    try:
        folder = home / "errors"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(dir=folder, prefix="error-", suffix=".txt")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        sys.stderr.write(text)
        return "the lines above"
    return path
