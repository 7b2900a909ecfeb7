"""The package as a whole: one version, one licence, every dependency pinned, used, and decided on a page."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import weft

HOUSE = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((HOUSE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]
DEVELOPMENT = [Requirement(line) for line in PROJECT["optional-dependencies"]["dev"]]


def pins() -> dict[str, Version]:
    lines = [
        line
        for line in (HOUSE / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line[:1] not in ("", "#")
    ]
    found = {}
    for line in lines:
        name, version = line.split("==")
        assert canonicalize_name(name) not in found, f"{name} is pinned twice"
        found[canonicalize_name(name)] = Version(version)
    return found


@cache
def imported() -> set[str]:
    """Return the top-level names that the source imports anywhere."""
    names = set()
    for path in (HOUSE / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "import_module"
            ):
                names |= {str(arg.value).split(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    return names


@pytest.mark.parametrize("requirement", RUNTIME + DEVELOPMENT, ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_what_is_asked(requirement: Requirement) -> None:
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_are_exact_and_public() -> None:
    assert all(version.local is None for version in pins().values())  # "2.13.0+cpu" exists on one index only


@pytest.mark.parametrize("requirement", RUNTIME, ids=lambda requirement: requirement.name)
def test_every_dependency_is_used(requirement: Requirement) -> None:
    assert requirement.name.replace("-", "_").lower() in imported()


@pytest.mark.parametrize("requirement", RUNTIME, ids=lambda requirement: requirement.name)
def test_every_dependency_was_decided_on_a_page(requirement: Requirement) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (HOUSE / "docs" / "adr").glob("*-dependency-*.md")]
    version = pins()[canonicalize_name(requirement.name)]
    row = re.compile(rf"^\| {re.escape(requirement.name)} \| {re.escape(str(version))}\b", re.MULTILINE | re.IGNORECASE)
    assert any(row.search(page) for page in pages), f"no page of docs/adr has a row for {requirement.name} {version}"


def test_extras_are_those_that_pages_and_messages_name() -> None:
    files = [HOUSE / "README.md", *(HOUSE / "docs").glob("*.md"), *(HOUSE / "src").rglob("*.py")]
    named = {name for file in files for name in re.findall(r"weft\[([a-z-]+)\]", file.read_text(encoding="utf-8"))}
    ours = {"dev", "bench", "page"}  # for who works on weft
    elsewhere = {"lightning"}  # of an example, which says so itself
    assert named == PROJECT["optional-dependencies"].keys() - ours - elsewhere


def test_one_version_everywhere() -> None:
    citation = (HOUSE / "CITATION.cff").read_text(encoding="utf-8")
    assert PROJECT["version"] == weft.__version__
    assert f'version: "{weft.__version__}"' in citation


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (HOUSE / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert text.lstrip().startswith("Apache License\n                           Version 2.0, January 2004")
    assert all(f"   {number}. " in text for number in range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_has_an_unreleased_part() -> None:
    assert "## [Unreleased]\n" in (HOUSE / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_package_is_typed() -> None:
    assert (HOUSE / "src" / "weft" / "py.typed").exists()
