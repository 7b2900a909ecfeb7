"""TOML to frozen msgspec structs and back, with errors a person can act on.

A component's config is a `Config` struct beside its code, its fields annotated with the allowed range
(`Annotated[int, msgspec.Meta(ge=1, description="...")]`). msgspec checks a file; where it finds a fault, the
types are walked again beside the file to say which file, which field, what was found and what is allowed.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w
from msgspec import inspect

from weft import reading
from weft.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)

_MAX_SHOWN = 80  # characters of a wrong value that are worth reading
_INT64 = 1 << 63  # TOML's integers, and what the canonical bytes of a config can hold


# In a field's `Meta(extra=...)`: infinity is a value that means something there.
UNBOUNDED = {"is_unbounded": True}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every component's settings."""


def load(path: Path, kind: type[C]) -> C:
    """Read the TOML file at `path` into a `kind`.

    Raises:
        ConfigError: missing, not TOML, or a field that is unknown, ill-typed or out of range.
    """
    return from_tree(load_tree(path), kind, where=str(path))


def load_tree(path: Path) -> dict[str, Any]:
    """Read the TOML file at `path`, not yet checked against any config.

    Raises:
        ConfigError: missing, unreadable or not TOML.
    """
    try:
        return reading.toml_of(path.read_bytes())
    except FileNotFoundError:
        whence = "" if path.is_absolute() else f" Relative paths start from {Path.cwd()}."
        raise ConfigError(f"{path}: no such file.{whence}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}. A TOML file is needed.") from error
    except ValueError as error:
        kind = reading.what_else(path.read_bytes()[: reading.HEAD_NBYTES])
        raise ConfigError(
            f"{path} is {kind}." if kind else f"{path}: not valid TOML: {error}.{_advice(path, error)}"
        ) from None


def _advice(path: Path, error: ValueError) -> str:
    """Return what to do about TOML that cannot be read; empty: its words say that."""
    if path.suffix.lower() != ".toml":
        return " A TOML file is needed here, such as a run file; text of your own is for `weft train`."
    return " A quote is not closed in that line." if r"Illegal character '\n'" in str(error) else ""


def from_tree(tree: dict[str, Any], kind: type[C], *, where: str) -> C:
    """Turn parsed TOML into a `kind`; `where` names its origin in errors.

    Raises:
        ConfigError: a field is unknown, missing, ill-typed, out of range, or not finite where it is not `UNBOUNDED`.
    """
    for place, number in _numbers(tree, ""):
        if number == math.inf and place in set(_unbounded(inspect.type_info(kind), "")):
            continue
        if not math.isfinite(number) or not -_INT64 <= number < _INT64:
            raise ConfigError(f"{where}: {place} is {number}. Allowed: a finite number of at most 64 bits.")
    try:
        return msgspec.convert(_whole(tree), kind)
    except msgspec.ValidationError as error:
        fault = _fault(tree, inspect.type_info(kind), "")
        raise ConfigError(f"{where}: {fault or _rule_between_fields(str(error))}") from None


def _whole(value: Any) -> Any:
    """Return parsed TOML with whole numbers as such, however they are spelled: 1e6 is 1,000,000."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def dump(config: msgspec.Struct) -> str:
    """Return `config` as TOML text that `load` reads back equal."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def alike(kind: type[msgspec.Struct], source: object) -> dict[str, Any]:
    """Return the fields of a `kind` that `source` has by the same names."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}


def replace_field(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `section.field` in parsed TOML: how a command-line `--set section.field=value` beats the file.

    Raises:
        ConfigError: `section` is a plain value in the file, or the name leads deeper than any settings.
    """
    *sections, field = dotted.split(".")
    if len(sections) > reading.MAX_DEPTH:
        raise ConfigError(f"--set {dotted[:_MAX_SHOWN]}...: names {len(sections)} sections, one inside the other.")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {dotted}: {section} is a value, not a section that holds {field}.")
    tree[field] = value


def leave_out(tree: dict[str, Any], dotted: str) -> dict[str, Any]:
    """Return parsed TOML without `section.field`, and without tables that are left empty."""
    section, _, inner = dotted.partition(".")
    found = dict(tree)
    if not inner:
        found.pop(section, None)
    elif isinstance(held := found.get(section), dict):
        found[section] = leave_out(held, inner)
        if not found[section]:
            del found[section]
    return found


def leaves(tree: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested tables with its dotted name."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, _join(place, name))
        else:
            yield _join(place, name), value


def said(config: msgspec.Struct, place: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields, within tables too, that are other than their defaults."""
    for field in msgspec.structs.fields(config):
        value, name = getattr(config, field.name), _join(place, field.encode_name)
        if not field.required and value == _default(field):
            continue
        if not isinstance(value, msgspec.Struct):
            yield name
            continue
        if value.__struct_config__.tag_field is not None:
            yield f"{name}.{value.__struct_config__.tag_field}"
        yield from said(value, name)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def idle(given: Iterable[str], without_effect: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the fields given that have no effect, dotted, by the reason why.

    Args:
        without_effect: fields and sections, dotted, each with the reason.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(given):
        for field, reason in without_effect.items():
            if is_in(name, field):
                found.setdefault(reason, []).append(name)
                break
    return found


def told_idle(where: str, given: Iterable[str], without_effect: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each reason, as of `idle`; `where` names the origin of the fields."""
    for reason, names in idle(given, without_effect).items():
        yield f"{where}: these have no effect here, since {reason}: {', '.join(names)}"


def is_in(dotted: str, section: str) -> bool:
    return dotted == section or dotted.startswith(f"{section}.")


# --- finding the fault ---


def fault_of(tree: dict[str, Any], kind: type[msgspec.Struct]) -> str | None:
    """Return one sentence about the first field of parsed TOML that no `kind` may hold; rules between fields aside."""
    return _fault(tree, inspect.type_info(kind), "")


def _fault(value: Any, kind: inspect.Type, place: str) -> str | None:
    """Return one sentence about the first thing in `value` that no `kind` may hold, or None."""
    bare = _bare(kind)
    if isinstance(value, dict):
        structs = [t for t in map(_bare, _members(bare)) if isinstance(t, inspect.StructType)]
        if structs:
            return _fault_in_table(value, structs, place)
        if isinstance(bare, inspect.DictType):
            return _first(_fault(inner, bare.value_type, _join(place, key)) for key, inner in value.items())
    if isinstance(value, list):
        for member in map(_bare, _members(bare)):
            if isinstance(member, inspect.CollectionType):
                items = [(item, member.item_type) for item in value]
            elif isinstance(member, inspect.TupleType) and len(member.item_types) == len(value):
                items = list(zip(value, member.item_types, strict=True))
            else:
                continue
            inner = _first(_fault(item, kind, f"{place}[{n}]") for n, (item, kind) in enumerate(items))
            return inner or _unless_allowed(value, kind, place)
    return _unless_allowed(value, kind, place)


def _fault_in_table(table: dict[str, Any], structs: Sequence[inspect.StructType], place: str) -> str | None:
    here = f"[{place}]" if place else "the file's top level"
    tags = {struct.tag: struct for struct in structs}
    tag_field = structs[0].tag_field
    if tag_field is not None:
        if tag_field not in table:
            return f'{here} needs the field "{tag_field}", which is missing. Allowed: {_choice(sorted(tags, key=str))}.'
        if table[tag_field] not in list(tags):  # a list: what was found may not be hashable
            meant = _meant(str(table[tag_field]), [str(tag) for tag in tags])
            found = f"{_join(place, tag_field)} is {_shown(table[tag_field])}"
            return f"{found}. {meant}Allowed: {_choice(sorted(tags, key=str))}."
    struct = tags[table[tag_field]] if tag_field is not None else structs[0]
    fields = {field.encode_name: field for field in struct.fields}
    names = [*([tag_field] if tag_field else []), *fields]
    for name in table:
        if name not in names:
            allowed = ", ".join(sorted(names)) or "nothing"
            return (
                f'{here} has no field "{name}". {_inside(name, fields) or _meant(name, names)}Allowed here: {allowed}.'
            )
    for name, field in fields.items():
        if field.required and name not in table:
            return f'{here} needs the field "{name}", which is missing. Allowed: {_allowed(field.type)}.'
    present = (name for name in fields if name in table)
    return _first(_fault(table[name], fields[name].type, _join(place, name)) for name in present)


def _inside(name: str, fields: Mapping[str, inspect.Field]) -> str:
    """Return in which of the tables that are `fields` a field of that name stands; empty: in none."""
    for table, field in fields.items():
        structs = [each for each in map(_bare, _members(_bare(field.type))) if isinstance(each, inspect.StructType)]
        if any(name == inner.encode_name for struct in structs for inner in struct.fields):
            return f"It belongs under [{table}]. "
    return ""


def _unless_allowed(value: Any, kind: inspect.Type, place: str) -> str | None:
    """Compare one value with what its type admits, in the reading of msgspec itself."""
    if _admits(value, kind):
        return None
    literals = [v for t in map(_bare, _members(_bare(kind))) if isinstance(t, inspect.LiteralType) for v in t.values]
    meant = _meant(str(value), [str(literal) for literal in literals])
    return f"{place or 'the file'} is {_shown(value)}. {meant}Allowed: {_allowed(kind)}."


def _admits(value: Any, kind: inspect.Type) -> bool:
    match _bare(kind):
        case inspect.UnionType(types=types):
            return any(_admits(value, member) for member in types)
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType() as number:
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return is_whole and not isinstance(value, bool) and _in_range(value, number)
        case inspect.FloatType() as number:
            return isinstance(value, int | float) and not isinstance(value, bool) and _in_range(value, number)
        case inspect.StrType() as text:
            return (
                isinstance(value, str)
                and (text.min_length or 0) <= len(value) <= (len(value) if text.max_length is None else text.max_length)
                and (text.pattern is None or re.search(text.pattern, value) is not None)
            )
        case inspect.LiteralType(values=values):
            return not isinstance(value, list | dict) and value in values
        case inspect.CollectionType() as many:
            return isinstance(value, list) and (many.min_length or 0) <= len(value) <= (
                len(value) if many.max_length is None else many.max_length
            )
        case inspect.TupleType(item_types=items):
            return isinstance(value, list) and len(value) == len(items)
        case inspect.StructType() | inspect.DictType():
            return isinstance(value, dict)
        case inspect.NoneType():
            return value is None
    return True  # a type no config uses: msgspec's own words are passed on


def _in_range(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
        and (kind.multiple_of is None or value % kind.multiple_of == 0)
    )


# --- saying it ---


def _allowed(kind: inspect.Type) -> str:
    """Return what a field of this type may hold, in words, with the field's own description."""
    described = kind.extra_json_schema or {} if isinstance(kind, inspect.Metadata) else {}
    about = f" ({described['description']})" if "description" in described else ""
    match _bare(kind):
        case inspect.UnionType(types=types):
            words = " or ".join(dict.fromkeys(_allowed(t) for t in types if not isinstance(t, inspect.NoneType)))
            is_optional = any(isinstance(t, inspect.NoneType) for t in types)
            return f"{words}, or leave it out{about}" if is_optional else f"{words}{about}"
        case inspect.BoolType():
            return f"true or false{about}"
        case inspect.IntType() as number:
            return f"a whole number{_range(number)}{about}"
        case inspect.FloatType() as number:
            return f"a number{_range(number)}{about}"
        case inspect.StrType() as text:
            bounds = [] if text.min_length is None else [f"at least {text.min_length} characters"]
            bounds += [] if text.max_length is None else [f"at most {text.max_length} characters"]
            bounds += [] if text.pattern is None else [f"matching {text.pattern}"]
            return f"{', '.join(['text in quotes', *bounds])}{about}"
        case inspect.LiteralType(values=values):
            return f"{_choice(values)}{about}"
        case inspect.CollectionType() as many:
            bounds = [] if many.min_length is None else [f"at least {many.min_length}"]
            bounds += [] if many.max_length is None else [f"at most {many.max_length}"]
            return f"{', '.join(['a list [...]', *bounds])}, each {_allowed(many.item_type)}{about}"
        case inspect.TupleType(item_types=items):
            return f"a list [...] of {len(items)}: {', '.join(map(_allowed, items))}{about}"
        case inspect.StructType() | inspect.DictType():
            return f"a table{about}"
    return f"another type{about}"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = [("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt)]
    bounds.append(("a multiple of", kind.multiple_of))
    return "".join(f", {word} {bound}" for word, bound in bounds if bound is not None)


def _choice(values: Sequence[Any]) -> str:
    return " or ".join(_shown(value) for value in values)


def _meant(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f'Did you mean "{near[0]}"? ' if near else ""


def _shown(value: Any) -> str:
    """Return `value` as it would stand in the file, cut to a readable length."""
    if isinstance(value, dict):
        return "a table"
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _rule_between_fields(message: str) -> str:
    """Turn msgspec's "what - at `$.section`" into "section: what.", which names the section once."""
    what, _, path = message.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    if place and what.startswith(f"{place}."):
        place = ""
    what = what.removeprefix(f"{place.rpartition('.')[2]}: ")
    return f"{place + ': ' if place else ''}{what.rstrip('.')}."


# --- walking ---


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _numbers(tree: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers(value, _join(place, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _numbers(value, f"{place}[{number}]")
    elif isinstance(tree, int | float):
        yield place, tree


def _unbounded(kind: inspect.Type, place: str) -> Iterator[str]:
    """Yield the fields, as a file names them, that may be infinite."""
    if isinstance(kind, inspect.Metadata) and (kind.extra or {}).items() >= UNBOUNDED.items():
        yield place
    for member in map(_bare, _members(_bare(kind))):
        if isinstance(member, inspect.StructType):
            for field in member.fields:
                yield from _unbounded(field.type, _join(place, field.encode_name))


def _first(faults: Iterator[str | None]) -> str | None:
    return next((fault for fault in faults if fault is not None), None)


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, list):
        return [_without_none(value) for value in tree]
    return tree
