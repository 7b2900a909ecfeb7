"""docs/bench.md under test: its tables have every field of a plan and a row, and every column, and no other."""

import re
from pathlib import Path

import msgspec
import pytest

from weft.bench.log import BenchLine
from weft.bench.plan import MAX_POINTS, TUNED, Bench, BenchRow
from weft.config import load

HOUSE = Path(__file__).parents[2]
PAGE = (HOUSE / "docs" / "bench.md").read_text(encoding="utf-8")


def first_cells(page: str, head: str) -> set[str]:
    """Return the names in the first cells of the table whose head begins with `head`."""
    lines = page[page.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    return {name for line in lines for name in re.findall(r"`\[*(\w+)\]*`", line.split(" | ")[0])}


@pytest.mark.parametrize(
    ("head", "kind"), [("field", Bench), ("field of a row", BenchRow), ("column of points.csv", BenchLine)]
)
def test_the_page_has_every_field_and_no_other(head: str, kind: type[msgspec.Struct]) -> None:
    assert first_cells(PAGE, head) == set(kind.__struct_fields__)


def test_the_page_says_what_a_row_may_change_and_how_many_points_it_may_have() -> None:
    assert all(f"`{field}`" in PAGE for field in TUNED)
    assert f"more than {MAX_POINTS} points" in PAGE


def test_the_commands_name_a_plan_its_rows_and_a_text_in_the_folder_of_the_clone() -> None:
    commands = re.findall(r"^weft bench methods (\S+)(.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for plan, rest in commands:
        bench: Bench = load(HOUSE / plan, Bench)
        assert set(re.findall(r"--only (\S+)", rest)) <= {row.name for row in bench.row}
        for path in re.findall(r'paths=.\["(.*)"\]', rest):
            assert ((HOUSE / plan).parent / path).resolve() == HOUSE / "input.txt"


def test_a_field_that_is_missing_is_found() -> None:
    assert first_cells(PAGE.replace("| `warmup` |", "| warmup |"), "field") != set(Bench.__struct_fields__)
