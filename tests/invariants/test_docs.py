"""Documentation under test: links lead somewhere, words mean one thing, commands and trees are those of the house."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from weft.cli.home import Place
from weft.cli.main import make_app

HOUSE = Path(__file__).parents[2]
PAGES = sorted([*HOUSE.glob("*.md"), *HOUSE.glob("docs/**/*.md"), *HOUSE.glob("recipes/**/*.md")])
GLOSSARY = HOUSE / "docs" / "glossary.md"
DECISIONS = sorted((HOUSE / "docs" / "adr").glob("*.md"))
# Those that tell how the source is now; decisions and experiments tell how it was.
GUIDES = [
    *(HOUSE / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted(HOUSE.glob("docs/*.md")) if path.name != "log.md"),
]
MAX_DECISION_LINES = 60  # one page


def prose(page: str) -> str:
    """Return a page without its fenced blocks: what stands in them is quoted, not said."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def links(page: str) -> Iterator[str]:
    """Yield the targets of a page's links that lead to this house."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: str) -> set[str]:
    """Return what a link may name after "#": each heading in lower case, its words joined with hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    broken = []
    for target in links(path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        is_found = there.exists() and (not anchor or anchor in anchors(there.read_text(encoding="utf-8")))
        if not is_found or not there.is_relative_to(HOUSE):
            broken.append(target)
    return broken


def missing_files(page: str) -> list[str]:
    """Return the Python files that a page names and that lie neither below src/weft nor at the root of the house."""
    named = re.findall(r"(?<![\w/.-])(?:\.\./)?((?:[\w.-]+/)*\w+\.py)\b", prose(page))
    return [name for name in named if not (HOUSE / "src" / "weft" / name).exists() and not (HOUSE / name).exists()]


def defined_words(page: str) -> list[str]:
    """Return the glossary's entries, in order: "- **word**: meaning"."""
    return re.findall(r"^- \*\*([^*]+)\*\*: ", page, re.MULTILINE)


def tree_names(page: str) -> list[str]:
    """Return the paths that the README's tree draws: "src/weft/" at the margin, what lies in a folder further in."""
    block = re.search(r"^```text\n(src/weft/\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    names: list[str] = []
    above: list[tuple[int, str]] = []  # the folders that a line may lie in: how far they are indented, and their paths
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        above = [(further, path) for further, path in above if further < indent]
        parent = above[-1][1] if above else ""
        here = [f"{parent}{part}" for part in line.strip().split("  ")[0].split()]
        names += here
        above.append((indent, here[-1]))
    return names


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_every_file_that_a_page_names_exists(path: Path) -> None:
    assert missing_files(path.read_text(encoding="utf-8")) == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, stack = set(), [HOUSE / "README.md"]
    while stack:
        page = stack.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        stack += [(page.parent / link.partition("#")[0]).resolve() for link in links(page.read_text(encoding="utf-8"))]
        if any(parent.name == "adr" for parent in page.parents):
            stack += DECISIONS  # one leads to all: they lie side by side
    assert {page.relative_to(HOUSE).as_posix() for page in set(PAGES) - seen} == set()


# --- the glossary ---


def test_every_word_is_defined_once() -> None:
    words = [word.lower() for word in defined_words(GLOSSARY.read_text(encoding="utf-8"))]
    assert sorted(words) == sorted(set(words))


def test_every_bold_word_of_the_glossary_is_an_entry() -> None:
    page = GLOSSARY.read_text(encoding="utf-8")
    assert re.findall(r"\*\*([^*]+)\*\*", page) == defined_words(page)


def test_the_glossary_has_the_words_of_the_house() -> None:
    words = set(defined_words(GLOSSARY.read_text(encoding="utf-8")))
    assert {
        "run",
        "peer",
        "member",
        "inner step",
        "round",
        "outer step",
        "manifest",
        "codec",
        "payload",
        "carry",
    } <= words


def test_every_definition_says_something() -> None:
    entries = re.findall(r"^- \*\*([^*]+)\*\*: (.+(?:\n  .+)*)", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) == len(defined_words(GLOSSARY.read_text(encoding="utf-8")))
    assert [word for word, meaning in entries if len(meaning.split()) < 4] == []


# --- decisions ---


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_parts_on_one_page(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page.startswith(f"# {int(path.name[:4])}. ")
    assert re.search(r"^Date: \d{4}-\d\d-\d\d\. Status: (accepted|superseded by \[.+\]\(.+\))\.$", page, re.MULTILINE)
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["The question", "Decision", "What follows"]
    assert len(page.splitlines()) <= MAX_DECISION_LINES


# --- the README ---


def test_the_tree_in_the_readme_is_the_tree() -> None:
    names = tree_names((HOUSE / "README.md").read_text(encoding="utf-8"))
    missing = [name for name in names if not (HOUSE / name).exists() and not (HOUSE / f"{name}.py").exists()]
    assert missing == []


def test_every_room_is_in_the_tree_of_the_readme() -> None:
    drawn = {
        name.rstrip("/").removesuffix(".py") for name in tree_names((HOUSE / "README.md").read_text(encoding="utf-8"))
    }
    top = HOUSE / "src" / "weft"
    rooms = [path for path in top.iterdir() if not path.name.startswith(("_", "py.typed"))]
    rooms += [path.parent for path in top.rglob("__init__.py") if path.parent != top]
    there = {path.relative_to(HOUSE).as_posix().removesuffix(".py") for path in rooms}
    assert there - drawn == set()


def commands(page: str) -> list[str]:
    """Return what a page tells people to type: lines of its shell blocks, and code within a line."""
    shell = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [*"".join(shell).splitlines(), *re.findall(r"`([^`\n]+)`", prose(page))]


def named_after(program: str, page: str) -> set[str]:
    """Return the first argument of every command that runs `program`."""
    found = [re.match(rf"{program} ([a-z]+)\b", command) for command in commands(page)]
    return {match[1] for match in found if match}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_every_command_on_a_page_exists(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (HOUSE / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    verbs = set(typer.main.get_group(make_app(Place())).commands)
    assert named_after("make", page) - targets == set()
    assert named_after("weft", page) - verbs == set()


# --- these tests can fail ---


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = HOUSE / "docs" / "sample.md"
    text = "[a](glossary.md) [b](absent.md) [c](glossary.md#who) [d](glossary.md#whom) [e](https://example.org)"
    assert list(links(text)) == ["glossary.md", "absent.md", "glossary.md#who", "glossary.md#whom"]
    sample = tmp_path / "sample.md"
    sample.write_text("[b](absent.md)")
    assert broken_links(sample) == ["absent.md"]
    assert not page.exists()


def test_a_file_that_is_gone_is_found() -> None:
    page = "`peer/peer.py` [a](../src/weft/wire.py) `peer/gone.py`, `src/weft/gone.py`; errors.py\n```\nown.py\n```\n"
    assert missing_files(page) == ["peer/gone.py", "src/weft/gone.py"]


def test_a_word_defined_twice_is_found() -> None:
    assert defined_words("- **run**: one\n- **peer**: two\n- **run**: three\n**bold** in text") == [
        "run",
        "peer",
        "run",
    ]


def test_what_stands_in_a_fence_is_no_link() -> None:
    assert list(links("```\n[a](absent.md)\n```\n")) == []


def test_a_tree_is_read() -> None:
    sample = (
        "```text\nsrc/weft/\n  errors wire  the floor\n  net/    bytes\n    blobs/  by digest\n  a/ b/  both\n"
        "tests/   mirror\n```\n"
    )
    below = ["errors", "wire", "net/", "net/blobs/", "a/", "b/"]
    assert tree_names(sample) == ["src/weft/", *(f"src/weft/{name}" for name in below), "tests/"]


def test_commands_are_found_and_prose_is_not() -> None:
    said = "make one step with `make test` and `weft join T`\n"
    page = f"{said}```sh\nmake demo  # all\nweft fly\n```\n```text\nmake x\n```\n"
    assert named_after("make", page) == {"test", "demo"}
    assert named_after("weft", page) == {"join", "fly"}
