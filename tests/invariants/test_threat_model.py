"""The threat model names a test for each attack on serving and on training, and the tests are there."""

import ast
import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
PAGE = HOUSE / "docs" / "threat_model.md"
SERVING, TRAINING = "### Attacks on serving, and their tests", "### Attacks on training, and their tests"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(heading: str) -> dict[str, str]:
    """Return the cell of each attack that names its tests."""
    section = re.split(r"\n##+ ", PAGE.read_text(encoding="utf-8").partition(heading)[2])[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if re.match(r"\| \d", line)]
    return {each[0].strip(): each[3].strip() for each in cells}


def missing(cell: str) -> list[str]:
    """Return the tests that a cell names and that are not there."""
    found = []
    for file, name in NAMED.findall(cell):
        path = HOUSE / file
        there = (
            {each.name for each in ast.walk(ast.parse(path.read_text())) if hasattr(each, "name")}
            if path.exists()
            else set()
        )
        if name not in there:
            found.append(f"{file}::{name}")
    return found


@pytest.mark.parametrize(
    ("heading", "num", "without"),
    [(SERVING, 13, {"12"}), (TRAINING, 36, {"8"})],  # what weft does not have, and what nothing keeps away
    ids=["serving", "training"],
)
def test_each_attack_names_tests_that_are_there(heading: str, num: int, without: set[str]) -> None:
    cells = rows(heading)
    assert list(cells) == [str(number) for number in range(1, num + 1)]
    for number, cell in cells.items():
        assert missing(cell) == []
        assert bool(NAMED.findall(cell)) != (number in without)
        assert NAMED.sub("", cell).strip(" ,") == ("none" if number in without else ""), "every test is named in full"


def test_a_test_that_is_not_there_is_found() -> None:
    assert missing("`tests/invariants/test_threat_model.py::test_nobody_wrote`")
    assert missing("`tests/nowhere.py::test_a_test_that_is_not_there_is_found`")
    assert not missing("`tests/invariants/test_threat_model.py::test_a_test_that_is_not_there_is_found`")
