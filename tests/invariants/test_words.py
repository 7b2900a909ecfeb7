"""What no file of the house may say: paths of one machine, hosts of others, promises without a reason."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "docs", "recipes", "examples", "benchmarks", ".ci")
TEXT = {".py", ".md", ".toml", ".txt", ".cff", ".yml", ".yaml", ".sh", ".js", ".css", ".html", ""}

MACHINE_PATH = re.compile(r"(?<![\w.~$/-])/(?:work|root|home|Users|opt|mnt)/[\w.-]")  # tests may make one up
TEMPORARY_PATH = re.compile(r"(?<![\w.~$/-])/tmp\b")
REGISTRY = re.compile(r"pypi\.org|pythonhosted\.org|huggingface\.co|anaconda\.org|crates\.io|npmjs\.com", re.IGNORECASE)
PROMISE = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# TODO(where): why, in a few words.
REASONED = re.compile(r"\bTODO\([\w./#-]+\): (?:\S+ ){3,}\S+")


def house_files() -> Iterator[Path]:
    tops = [path for path in HOUSE.iterdir() if path.is_file()]
    inside = [path for folder in FOLDERS for path in (HOUSE / folder).rglob("*") if path.is_file()]
    for path in sorted(tops + inside):
        if path.suffix in TEXT and "__pycache__" not in path.parts and path.name not in (".git", ".coverage"):
            yield path


def found_in(pattern: re.Pattern[str], text: str) -> list[str]:
    return [
        f"line {number}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def complaints(pattern: re.Pattern[str], *, below: str = "") -> list[str]:
    found = []
    for path in house_files():
        name = path.relative_to(HOUSE).as_posix()
        if name.startswith(below) and path != Path(__file__):
            found += [f"{name} {where}" for where in found_in(pattern, path.read_text(encoding="utf-8"))]
    return found


def unreasoned(text: str) -> list[str]:
    return [line for line in text.splitlines() if PROMISE.search(line) and not REASONED.search(line)]


def test_no_file_names_a_path_of_one_machine() -> None:
    assert [found for found in complaints(MACHINE_PATH) if not found.startswith("tests/")] == []


def test_no_source_names_a_temporary_path() -> None:
    assert complaints(TEMPORARY_PATH, below="src/") == []


def test_no_file_names_the_host_of_a_registry() -> None:
    assert complaints(REGISTRY) == []


def test_no_promise_stands_without_its_place_and_reason() -> None:
    found = [
        f"{path.relative_to(HOUSE)}: {line.strip()}"
        for path in house_files()
        if path != Path(__file__)
        for line in unreasoned(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_files_of_the_house_are_found() -> None:
    names = {path.relative_to(HOUSE).as_posix() for path in house_files()}
    assert {"README.md", "Makefile", "pyproject.toml", "src/weft/wire.py", "docs/glossary.md", ".ci/run"} <= names


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (MACHINE_PATH, 'data = Path("/work/corpus")'),
        (MACHINE_PATH, "see /root/notes"),
        (MACHINE_PATH, "cd /home/somebody"),
        (TEMPORARY_PATH, 'open("/tmp/x")'),
        (TEMPORARY_PATH, "'/tmp'"),
        (REGISTRY, "https://PyPI.org/simple"),
    ],
)
def test_what_is_forbidden_is_found(pattern: re.Pattern[str], line: str) -> None:
    assert found_in(pattern, f"first\n{line}") == [f"line 2: {line}"]


@pytest.mark.parametrize("line", ["docs/work/x", "network/opt/x", "https://example.org/home/x", "a/tmp/b", "$HOME/tmp"])
def test_what_only_looks_alike_is_left_alone(line: str) -> None:
    assert not MACHINE_PATH.search(line)
    assert not TEMPORARY_PATH.search(line)


def test_a_promise_needs_place_and_reason() -> None:
    assert unreasoned("# TODO: later") == ["# TODO: later"]
    assert unreasoned("# FIXME this is slow") == ["# FIXME this is slow"]
    assert unreasoned("# TODO(rpc): bound") == ["# TODO(rpc): bound"]
    assert unreasoned("# TODO(net/link/rpc.py): bound the queue once relays are measured") == []
