"""docs/run_file.md under test: it has every field that a run file or a machine's settings may have, and no other.

What a field may hold and its default are worked out from the structs; a description that a field carries stands in its
row word for word. A row that is wrong or missing is named as it should be.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from weft.config import UNBOUNDED, Config, from_tree
from weft.run.config import RunFile
from weft.run.machine import PeerConfig

PAGE = Path(__file__).parents[2] / "docs" / "run_file.md"


def bare(kind: inspect.Type) -> inspect.Type:
    return bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def members(kind: inspect.Type) -> list[inspect.Type]:
    here = bare(kind)
    return [bare(each) for each in here.types] if isinstance(here, inspect.UnionType) else [here]


def described(kind: inspect.Type) -> str:
    """Return the description a field carries, wherever in its type."""
    if isinstance(kind, inspect.Metadata):
        own = str((kind.extra_json_schema or {}).get("description", ""))
        return own or described(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next(filter(None, map(described, kind.types)), "")
    return ""


def is_unbounded(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.Metadata) and (kind.extra or {}).items() >= UNBOUNDED.items()


def shown(value: Any) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


def bounds(least: Any, above: Any, most: Any, below: Any) -> str:
    """Return the range in words, large powers of two as such."""

    def number(value: float) -> str:
        whole = int(value)
        for plus in (0, 1):
            if value == whole and whole + plus >= 1 << 16 and (whole + plus).bit_count() == 1:
                return f"2^{(whole + plus).bit_length() - 1}" + ("" if not plus else " - 1")
        return f"{value:g}" if value < 1e6 else f"{whole:,}"

    words = [("at least", least), ("above", above), ("at most", most), ("below", below)]
    return "".join(f", {word} {number(value)}" for word, value in words if value is not None)


def allowed(kind: inspect.Type) -> str:
    """Return in words what a field of this type may hold."""
    found = [one_allowed(each) for each in members(kind) if not isinstance(each, inspect.NoneType)]
    return " or ".join(dict.fromkeys(found)) + (", or inf" if is_unbounded(kind) else "")


def one_allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() as number:
            return "whole number" + bounds(number.ge, number.gt, number.le, number.lt)
        case inspect.FloatType() as number:
            return "number" + bounds(number.ge, number.gt, number.le, number.lt)
        case inspect.StrType() as text:
            return "text" if text.max_length is None else f"text, at most {text.max_length} characters"
        case inspect.LiteralType(values=values):
            return " or ".join(map(shown, values))
        case inspect.StructType():
            return "table"
        case inspect.TupleType(item_types=each):
            return "pairs of " + " and ".join(map(allowed, each))
        case inspect.CollectionType() as many:
            return f"list of {allowed(many.item_type)}"
    raise AssertionError(f"no words for {kind}")


def default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default is None or field.default is msgspec.NODEFAULT:  # which is UNSET's
        return "left out"
    if isinstance(field.default, Config):
        tag, name = field.default.__struct_config__.tag, field.default.__struct_config__.tag_field
        return "the table's defaults" if tag is None else f'`{name} = "{tag}"`'
    return shown(field.default)


Row = tuple[str, str, str, str]  # field, what it may hold, default, the description it carries


def rows(struct: inspect.StructType, *, is_only: bool) -> list[Row]:
    """Return the rows of one table; its tag may be left out where no other table could stand there."""
    tag = [(f"`{struct.tag_field}`", shown(struct.tag), "left out" if is_only else "required", "")]
    fields = [
        (f"`{each.encode_name}`", allowed(each.type), default(each), described(each.type)) for each in struct.fields
    ]
    return [*(tag if struct.tag is not None else []), *fields]


def tables(kind: type[Config], place: str = "") -> Iterator[tuple[str, list[Row]]]:
    """Yield (heading, rows) of every table of a file, outer ones first, each kind of table once."""
    seen: set[type] = set()
    waiting: list[tuple[str, inspect.Type]] = [(place, inspect.type_info(kind))]
    while waiting:
        place, here = waiting.pop(0)
        structs = [each for each in members(here) if isinstance(each, inspect.StructType)]
        for struct in structs:
            if struct.cls not in seen:
                seen.add(struct.cls)
                tag = f' {struct.tag_field} = "{struct.tag}"' if struct.tag is not None else ""
                yield (f"`[{place}]{tag}`" if place else kind.__name__), rows(struct, is_only=len(structs) == 1)
                waiting += [(f"{place}.{each.encode_name}".strip("."), each.type) for each in struct.fields]


def expected() -> list[tuple[str, list[Row]]]:
    return [*tables(RunFile), *tables(PeerConfig)]


def written(page: str) -> dict[str, list[Row]]:
    """Return the tables of the page by the heading above each."""
    found = {}
    for heading, body in re.findall(r"^#+ (.+)\n\n((?:(?!#).*\n)*)", page, re.MULTILINE):
        lines = [line for line in body.splitlines() if line.startswith("| `")]
        if lines:
            cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
            found[heading.partition(": ")[2] or heading] = [(c[0], c[1], c[2], " | ".join(c[3:])) for c in cells]
    return found


def faults(there: Sequence[Row], wanted: Sequence[Row]) -> list[str]:
    found = [f"{row} is no row of it" for row in there if row[:3] not in [each[:3] for each in wanted]]
    for row in wanted:
        meanings = [each[3] for each in there if each[:3] == row[:3]]
        if len(meanings) != 1:
            found.append(f"needs one row {row[:3]}")
        elif len(meanings[0].split()) < 2 or row[3] not in meanings[0]:
            found.append(f"{row[0]} should say: {row[3] or 'what it means'}")
    return found


@pytest.mark.parametrize(("heading", "wanted"), expected(), ids=[heading for heading, _ in expected()])
def test_every_field_is_on_the_page_with_what_it_may_hold_and_its_default(heading: str, wanted: list[Row]) -> None:
    assert faults(written(PAGE.read_text(encoding="utf-8")).get(heading, []), wanted) == []


def test_the_page_has_no_table_of_what_is_gone() -> None:
    assert set(written(PAGE.read_text(encoding="utf-8"))) - {heading for heading, _ in expected()} == set()


def test_the_example_of_a_machine_file_is_one() -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert from_tree(tomllib.loads(example), PeerConfig, where="the example").tls.port == 4433


def test_a_field_that_changed_is_found() -> None:
    wanted = [("`port`", "whole number", "`0`", "port to listen on")]
    assert faults([("`port`", "whole number", "`0`", "TCP port to listen on")], wanted) == []
    for row in (
        ("`ports`", "whole number", "`0`", "port to listen on"),
        ("`port`", "text", "`0`", "port to listen on"),
        ("`port`", "whole number", "`1`", "port to listen on"),
        ("`port`", "whole number", "`0`", "port to dial"),
    ):
        assert faults([row], wanted)
    assert faults([], wanted)
