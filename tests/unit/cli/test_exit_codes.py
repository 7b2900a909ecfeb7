"""The page about exit codes says what the code does."""

import re
from pathlib import Path

from unit.test_errors import KINDS

PAGE = (Path(__file__).parents[3] / "docs" / "exit_codes.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| (\w*) ?\| (.+) \|$", re.MULTILINE)

# What a person may get wrong or run into, and what is promised of each: a code of its own.
CASES = {
    "malformed or truncated ticket": "TicketError",
    "ticket of another run or version": "TicketMismatch",
    "name of no run that is here": "NoSuchRun",
    "refused admission": "Refused",
    "genesis mismatch": "GenesisMismatch",
    "port in use": "PortInUse",
    "nobody reachable": "Unreachable",
    "unknown or ill-typed key in TOML": "ConfigError",
    "missing, empty or too small data": "DataError",
    "tokenizer of another vocabulary": "TokenizerMismatch",
    "corrupt checkpoint": "CheckpointError",
    "disk full while saving": "DiskFull",
    "out of memory": "OutOfMemory",
    "loss not finite": "NotFinite",
}


def rows(page: str) -> list[tuple[int, str]]:
    return [(int(code), name) for code, name, _ in ROW.findall(page)]


def test_the_page_has_every_error_with_its_code() -> None:
    found = rows(PAGE)
    assert {(code, name) for code, name in found if name} == {(kind.exit_code, kind.__name__) for kind in KINDS}
    assert [code for code, _ in found] == sorted({code for code, _ in found})


def test_every_case_that_is_promised_has_a_code_of_its_own() -> None:
    codes = {name: code for code, name in rows(PAGE)}
    assert len({codes[name] for name in CASES.values()}) == len(CASES)


def test_a_code_that_is_not_true_would_be_found() -> None:
    assert rows("| 15 | TicketError | x |\n| 0 | | y |") == [(15, "TicketError"), (0, "")]
    assert rows(PAGE.replace("| 15 |", "| 18 |")) != rows(PAGE)
