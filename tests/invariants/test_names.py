"""Names under test: a module, file or function of weft's that a comment, a docstring or a page names is there.

`pipeline.sender`      a room and a module of it; a module, and what it defines or uses
weft.store.journal     the same from the top
net/link/rpc.py        a file, from src/weft, from the root of the house, or beside whoever names it
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import weft.lazy

HOUSE = Path(__file__).parents[2]
SOURCE = HOUSE / "src" / "weft"
FOLDERS = ("src", "tests", "benchmarks", "examples")
GUIDES = [
    *(HOUSE / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in sorted(HOUSE.glob("docs/*.md")) if page.name != "log.md"),  # which tells how the source was
]
FILE = re.compile(r"(?<![\w/.:<{-])((?:[\w-]+/)+\w+\.py)\b")
ABSOLUTE = re.compile(r"\bweft((?:\.\w+)+)")
QUOTED = re.compile(r"`(?!weft\.)([a-z_]+(?:\.\w+)+)(?:\([^`]*\))?`")  # no call of an object's: those have no module
FILE_ENDINGS = {"py", "toml", "json", "jsonl", "md", "bin", "v1", "txt"}
TABLES = {"train", "peer", "run", "method", "pipeline"}  # of a run file: on a page `train.tokens` is a field
# What only looks like a name of weft's: what torch has under a word that a module has, too.
OBJECTS = {"model.state_dict", "optimizer.zero_grad", "vector.mul_", "section.field"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def words_of(path: Path) -> frozenset[str]:
    """Return the names that a file defines, or uses as an attribute."""
    words = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                words.add(name)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                words.add(name)
    return frozenset(words)


def is_there(name: str) -> bool:
    """Whether a dotted name, from the top of weft, is a module, or what a module has."""
    parts = name.split(".")
    module = next(".".join(parts[:num]) for num in range(len(parts), -1, -1) if ".".join(parts[:num]) in modules())
    rest = parts[len(module.split(".")) if module else 0 :]
    return not rest or rest[0] in words_of(modules()[module]) or (not module and rest[0] in weft.lazy._PLACES)


def stale(text: str, path: Path) -> list[str]:
    """Return the names in a text of a file that are nowhere."""
    found = [
        name
        for name in FILE.findall(text)
        if not any((top / name).exists() for top in (SOURCE, HOUSE, HOUSE / "tests", path.parent))
    ]
    found += [
        f"weft{name}"
        for name in ABSOLUTE.findall(text)
        if name.rpartition(".")[2] not in FILE_ENDINGS and not is_there(name[1:])
    ]
    for name in QUOTED.findall(text):
        first, _, rest = name.partition(".")
        tops = [module for module in modules() if module == first or module.endswith(f".{first}")]
        is_field = path.suffix == ".md" and first in TABLES
        is_ours = tops and not is_field and name not in OBJECTS and name.rpartition(".")[2] not in FILE_ENDINGS
        if is_ours and not any(is_there(f"{top}.{rest}") for top in tops):
            found.append(name)
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a program on lines of its own, and not what those are made of."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, name, ()):
            yield node
            yield from statements(node)


def said(path: Path) -> str:
    """Return what a file says to whoever reads it: comments and docstrings of a program, all of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    docstrings = [
        node.value.value
        for node in statements(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return "\n".join([*re.findall(r"(?:^|\s)# .*", text), *docstrings])


PROGRAMS = sorted(path for folder in FOLDERS for path in (HOUSE / folder).rglob("*.py") if path != Path(__file__))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_every_name_on_a_page_is_there(path: Path) -> None:
    assert stale(said(path), path) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_name_in_a_comment_or_docstring_is_there(folder: str) -> None:
    found = [
        f"{path.relative_to(HOUSE).as_posix()}: {name}"
        for path in PROGRAMS
        if path.is_relative_to(HOUSE / folder)
        for name in stale(said(path), path)
    ]
    assert found == []


# --- these tests can fail ---


@pytest.mark.parametrize(
    "name", ["peer/gone.py", "weft.peer.gone", "weft.gone", "`net.gone`", "`sender.Gone`", "`weft.store.gone`"]
)
def test_a_name_that_is_gone_is_found(name: str) -> None:
    assert stale(f"see {name} for it", HOUSE / "README.md") == [name.strip("`")]


@pytest.mark.parametrize(
    "name",
    [
        *("net/link/rpc.py", "src/weft/wire.py", "tests/conftest.py", "weft.Sync", "weft.store.journal", "weft.keys"),
        *("`pipeline.sender`", "`sender.Origin`", "`weft.store.journal.Votes`", "`train.tokens`", "`state.bin`"),
    ],
)
def test_a_name_that_is_there_is_left_alone(name: str) -> None:
    assert stale(f"see {name} for it", HOUSE / "README.md") == []
