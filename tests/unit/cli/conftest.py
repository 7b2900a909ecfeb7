"""The command line in this process: what it prints, its exit code, and a small model to use it on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

from unit.cli.small import RUN, TEXT, Answer, Kept, Weft, saved
from weft.cli.main import run

BUILT = dict[tuple[object, ...], Any]()


@pytest.fixture(autouse=True, scope="module")
def _built_once() -> Iterator[None]:
    """Read the options of each verb off its function once, as a process of weft does, and not once a test."""
    build = typer.main.get_command_from_info

    def build_once(command_info: Any, **how: Any) -> Any:
        if "<locals>" in command_info.callback.__qualname__:  # it is another function each time
            return build(command_info, **how)
        key = command_info.callback, command_info.name, command_info.cls, command_info.epilog, *how.values()
        if key not in BUILT:
            BUILT[key] = build(command_info, **how)
        return BUILT[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command_from_info", build_once)
        yield


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def weft(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Weft:
    """Run one command in a home of its own."""
    monkeypatch.setenv("WEFT_HOME", str(home))
    torch.set_num_threads(1)

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([*map(str, arguments)])
        said = capsys.readouterr()
        return Answer(code, said.out, said.err)

    return call


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step that is timed be made once, and be said to take half a second."""
    for place in ("plan.speed_here", "doctor.fit"):
        monkeypatch.setattr(f"weft.cli.{place}.usual_s", lambda step, **_how: step() or 0.5)
    monkeypatch.setattr("weft.cli.plan.speed_here.is_disturbed", lambda *_: False)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A run file with its corpus beside it."""
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def kept(run_path: Path, home: Path) -> Kept:
    """A checkpoint in the home: a run's initial weights."""
    return saved(run_path, home)
