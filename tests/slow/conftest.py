"""What the tests of real processes share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slow.browser import launched
from slow.shell import RUN, Shell


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Callable[..., Shell]]:
    opened: list[Shell] = []

    def shell(name: str, home: Path | None = None) -> Shell:
        opened.append(Shell(tmp_path / name, home))
        return opened[-1]

    yield shell
    for each in opened:
        each.end()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(20_000)))
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found
