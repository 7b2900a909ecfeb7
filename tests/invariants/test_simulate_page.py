"""docs/simulate.md under test: its tables have every field of a scenario, a kind and each fault, and no other."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from weft.sim.byzantine import LOST_S
from weft.sim.scenario import Corrupt, Drop, Fault, FaultBase, Kind, Lie, PeerFault, Scenario
from weft.sim.serving.scenario import Churn, Server, ServingScenario, Texts

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"


def table(page: str, first_cell: str) -> list[list[str]]:
    """Return the rows of the table whose head begins with `first_cell`."""
    start = page.index(f"| {first_cell} |")
    lines = page[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def own_fields(kind: type[msgspec.Struct]) -> set[str]:
    return set(kind.__struct_fields__) - set(FaultBase.__struct_fields__) - set(PeerFault.__struct_fields__)


@pytest.mark.parametrize(
    ("first_cell", "kind"),
    [
        ("field", Scenario),
        ("field of a kind", Kind),
        ("field of the file", ServingScenario),
        ("field of texts", Texts),
        ("field of a serving kind", Server),
        ("field of churn", Churn),
    ],
)
def test_the_page_has_every_field(first_cell: str, kind: type[msgspec.Struct]) -> None:
    named = {name.strip("[]") for row in table(PAGE.read_text(), first_cell) for name in re.findall(r"[a-z_]+", row[0])}
    missing = set(kind.__struct_fields__) ^ named
    assert missing <= {"name", "count"}  # those stand in the text above the table
    assert all(f"`{name}`" in PAGE.read_text() for name in missing)


def test_the_page_has_every_fault_with_its_fields() -> None:
    rows = {quoted(row[0])[0]: set(quoted(row[1])) - {"peer"} for row in table(PAGE.read_text(), "`type`")}
    assert rows == {kind.__struct_config__.tag: own_fields(kind) for kind in get_args(Fault)}


def test_the_page_says_how_long_a_lost_payload_stays_lost() -> None:
    (row,) = [row for row in table(PAGE.read_text(), "`type`") if quoted(row[0]) == ["drop"]]
    assert f"are lost for all, for {LOST_S:g} s" in row[2]


@pytest.mark.parametrize("kind", [Drop, Corrupt, Lie])
def test_the_page_has_every_word_that_a_fault_may_name(kind: type[msgspec.Struct]) -> None:
    (row,) = [row for row in table(PAGE.read_text(), "`type`") if quoted(row[0]) == [kind.__struct_config__.tag]]
    field = next(each for each in msgspec.structs.fields(kind) if each.name in ("what", "about"))
    assert set(get_args(field.type)) <= set(quoted(row[2]))
