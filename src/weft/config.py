"""TOML to frozen msgspec structs and back, with errors a person can act on.

A component's config is a `Config` struct beside its code, its fields annotated with the allowed range
(`Annotated[int, msgspec.Meta(ge=1, description="...")]`). An error names the file, the field, the value
found and what is allowed. This file knows no room's config.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import tomli_w

from weft.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every component's settings."""


def load(path: Path, kind: type[C]) -> C:
    """Read the TOML file at `path` into a `kind`.

    Raises:
        ConfigError: missing, not TOML, or a field that is unknown, ill-typed or out of range.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `weft train --help` shows how to start one from a recipe.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None
    return from_tree(tree, kind, where=str(path))


def from_tree(tree: dict[str, Any], kind: type[C], *, where: str) -> C:
    """Turn parsed TOML into a `kind`; `where` names its origin in errors.

    Raises:
        ConfigError: a field is unknown, missing, ill-typed or out of range.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), tree, kind, where)) from None


def dump(config: msgspec.Struct) -> str:
    """Return `config` as TOML text that `load` reads back equal."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def replace_field(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `section.field` in parsed TOML: how a command-line `--set section.field=value` beats the file."""
    *sections, field = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {dotted}: {section} is a value, not a section.")
    tree[field] = value


def _explain(message: str, tree: dict[str, Any], kind: type, where: str) -> str:
    match = re.search(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", message, re.DOTALL)
    assert match is not None  # the pattern matches every string
    what, dotted = match["what"], (match["path"] or "").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        field = f"{dotted}.{unknown[1]}".lstrip(".")
        return f"{where}: {field}: unknown. Allowed here: {', '.join(_fields_at(kind, dotted, tree)) or 'nothing'}."
    found = _value_at(tree, dotted)
    shown = "" if found is _ABSENT or isinstance(found, dict) else f" Found {found!r}."
    return f"{where}: {dotted or 'top level'}: {what}.{shown}"


_ABSENT = object()


def _value_at(tree: Any, dotted: str) -> Any:
    for name in re.findall(r"[^.\[\]]+", dotted):
        if isinstance(tree, dict) and name in tree:
            tree = tree[name]
        elif isinstance(tree, list) and name.isdigit() and int(name) < len(tree):
            tree = tree[int(name)]
        else:
            return _ABSENT
    return tree


def _fields_at(kind: Any, dotted: str, tree: Any) -> list[str]:
    """Return the field names of the struct that `dotted` leads to, following the tag where it is a union."""
    here = _structs(kind)
    for name in filter(None, dotted.split(".")):
        tree = tree.get(name, {}) if isinstance(tree, dict) else {}
        here = [inner for struct in here if name in get_type_hints(struct) for inner in _structs(get_type_hints(struct)[name])]
        if len(here) > 1 and isinstance(tree, dict):
            tagged = [s for s in here if tree.get(s.__struct_config__.tag_field) == s.__struct_config__.tag]
            here = tagged or here
    return sorted({name for struct in here for name in struct.__struct_encode_fields__})


def _structs(kind: Any) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for arg in get_args(kind) for struct in _structs(arg)]


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, list):
        return [_without_none(value) for value in tree]
    return tree
