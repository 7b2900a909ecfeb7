"""Codecs, outer steps and judges from outside the package: what a run may name of them, and what this process knows.

    learn("acme.mantissa", Mantissa)       this process knows it now, and the text of the file that it is from
    ExtensionConfig(name, source, bits=4)  what a run says of it: name, digest of that text, settings
    make(config) ──► Mantissa(bits=4)      on every member, of its own copy of the same text
    learn_from(path)                       a file of this machine's owner, which lets this process know some

Members compute alike, so all need the same code, and none gets it from another: a run names it, and who does not have
it, or has another text under that name, is refused. Nothing that a peer sent is imported or run; its settings, numbers
and words, are handed to code that this process chose to know.

What is known is kept for the whole process, as modules are. Entries are named by their content: several peers in one
process cannot disagree about one.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec

from weft.config import Config
from weft.errors import ConfigError
from weft.ids import Digest, short
from weft.wire import digest, printable

MAX_SETTINGS = 32

Value = bool | int | float | str
_Name = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z][a-z0-9_.-]*\Z")]
# No path and no address: it is handed to code, and a stranger may have written it.
_Word = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9_-]*\Z")]
_Setting = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z][a-z0-9_]*\Z")]
_Value = bool | int | float | _Word


class ExtensionConfig(Config, frozen=True, kw_only=True, tag_field="type"):
    """What is needed to make one: on all members the same."""

    name: _Name
    source: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z", description="digest of the text it is made by")]
    settings: Annotated[
        tuple[tuple[_Setting, _Value], ...],
        msgspec.Meta(max_length=MAX_SETTINGS, description="names and values, ascending by name"),
    ] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.settings]
        if names != sorted(set(names)):
            raise ConfigError(f"{self.name}: settings: each is named once, in ascending order.")


@dataclass(frozen=True)
class Known:
    """One that this process knows."""

    name: str
    source: Digest
    make: Callable[..., Any]


_KNOWN: dict[tuple[str, str], Known] = {}
_NONE = (
    "this process has none of that name. Get its file from somebody whom you trust, and read it; then weft train and "
    "weft join take it with --code FILE, and a program calls weft.extend first."
)


def learn(name: str, make: Callable[..., Any]) -> Known:
    """Let this process know what `make` makes, under `name`.

    Args:
        name: lower-case letters, digits, dots and dashes; best with that of who makes it, as in "acme.mantissa".
        make: a class, or a function, of a module that has a file. The digest is of the whole file's text.

    Raises:
        ConfigError: no such name, or the text cannot be found or is not UTF-8.
    """
    if not _fits(name, _Name):
        allowed = 'lower-case letters, digits, dots, dashes and underscores, 64 at most, a letter first: "acme.bits12"'
        raise ConfigError(f"an extension's name is {name!r:.80}. Allowed: {allowed}.")
    try:
        text = Path(inspect.getsourcefile(make) or "").read_text(encoding="utf-8")  # line ends are one on all systems
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: the file of {make!r} is not UTF-8, as members need it: {error}.") from None
    except (OSError, TypeError) as error:
        raise ConfigError(f"{name}: {make!r} comes from no file, so others cannot have its text: {error}.") from None
    known = Known(name, digest(text.encode()), make)
    _KNOWN.pop((name, known.source), None)  # so that it is the last
    _KNOWN[name, known.source] = known
    return known


def learn_from(path: Path, text: str | None = None) -> list[Known]:
    """Run a file of Python, as its owner told this process to, and return what it has let this process know.

    Args:
        text: what it says, where that was read before.

    Raises:
        ConfigError: it cannot be read, it fails, or it lets nothing be known of its own text.
    """
    if text is None:
        text = text_of(path)
    before, name = set(_KNOWN), f"weft_code_{digest(str(path.resolve()).encode())[:16]}"
    loader = _Read(path, text)
    module = module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module  # classes look there for the module that they are of
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path}: it fails: {type(error).__name__}: {error}. Mend it.") from error
    source = digest(text.encode())
    found = [known for key, known in _KNOWN.items() if key not in before or known.source == source]
    if not found:
        raise ConfigError(f"{path}: it has run, and has not called weft.extend, so nothing is known by it. See there.")
    return found


class _Read(ExecutionLoader):
    """Of a file that was read: what is run is that text, whatever the file or its bytecode says by now."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def get_filename(self, _fullname: str) -> str:
        return str(self._path)

    def get_source(self, _fullname: str) -> str:
        return self._text.removeprefix("\ufeff")


def text_of(path: Path) -> str:
    """Return the text of a file of Python, whose digest names what it lets a process know; line ends are one on all
    systems.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{path}: no such file. Name one that calls weft.extend.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is not UTF-8, as members need it: {error}.") from None
    except ValueError:
        raise ConfigError(f"{str(path)!r}: no name of a file. Name one that calls weft.extend.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None


def knows(config: ExtensionConfig) -> bool:
    """Return whether this process has what `config` names."""
    return (config.name, config.source) in _KNOWN


def source_of(name: str) -> Digest:
    """Return the digest of the text that makes what this process learnt last under a name.

    Raises:
        ConfigError: it knows none.
    """
    sources = [source for known, source in _KNOWN if known == name]
    if not sources:
        raise ConfigError(f"the extension {printable(name)!r} is not known: {_NONE}")
    return Digest(sources[-1])


def make(config: ExtensionConfig) -> Any:
    """Return what `config` names, made with its settings.

    Raises:
        ConfigError: this process does not know it, or it refuses the settings.
    """
    known = _KNOWN.get((config.name, config.source))
    if known is None:
        raise ConfigError(f"the run computes with {_described(config)}, and {_instead(config)}")
    try:
        return known.make(**dict(config.settings))
    except Exception as error:  # of whatever kind: settings are anybody's
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{config.name}: it cannot be made with {dict(config.settings)}: {said}.") from error


def settings_of(name: str, values: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """Return `values`, settings of the extension `name`, as a config has them.

    Raises:
        ConfigError: names the first that no member would take.
    """
    if len(values) > MAX_SETTINGS:
        raise ConfigError(f"{name}: it is made with {len(values)} settings. Allowed: {MAX_SETTINGS} at most.")
    for setting, value in values.items():
        if not _fits(setting, _Setting):
            allowed = "lower-case letters, digits and underscores, 64 at most, a letter first"
            raise ConfigError(f"{name}: a setting's name is {setting!r:.80}. Allowed: {allowed}.")
        is_number = isinstance(value, int | float) and abs(value) < (1 << 63)
        if not (_fits(value, _Word) if isinstance(value, str) else is_number):
            allowed = "a number that is finite and of at most 64 bits, a truth, or a word of at most 64 letters, digits"
            raise ConfigError(f"{name}: its setting {setting} is {value!r:.80}. Allowed: {allowed}, - and _.")
    return tuple(sorted(values.items()))


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _described(config: ExtensionConfig) -> str:
    return f"the extension {printable(config.name)!r} (text {short(Digest(config.source))})"


def _instead(config: ExtensionConfig) -> str:
    others = [source for name, source in _KNOWN if name == config.name]
    if others:
        return f"its text here is {short(Digest(others[-1]))}: install the version that the run's maker has."
    return _NONE
