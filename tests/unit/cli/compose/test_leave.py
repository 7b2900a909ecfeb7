"""`weft compose leave`: who leaves a mixture takes its networks along, and the control that is of its weights."""

import json
from pathlib import Path

import pytest

from unit.cli.compose.made import FLOPS, write_all
from unit.cli.small import TEXT, Weft
from weft.compose.composed import Merged, read_composed
from weft.compose.descent import Descent
from weft.compose.experts.mixtral import read_mixture
from weft.compose.experts.mixture import without
from weft.compose.member import read_member

QUICK = "--steps", "2", "--batch-size", "2", "--seq-len", "16"


@pytest.fixture
def text(weft: Weft, home: Path, tmp_path: Path) -> Path:
    """Return the text that a mixture of three, called one, was made with."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text("class A:\n    pass\n" * 60)
    write_all(home, ["a", "b", "c"])
    assert weft("compose", "merge", "a", "b", "c", "--data", tmp_path / "text.txt", "--name", "one", *QUICK).code == 0
    return tmp_path / "text.txt"


def read(home: Path, name: str) -> Merged:
    found = read_composed(home / "composed" / name)
    assert isinstance(found, Merged)
    return found


def test_who_was_not_the_best_takes_no_control_along(weft: Weft, home: Path, text: Path) -> None:
    before, one = read(home, "one"), home / "composed" / "one"
    leaver = next(name for name in before.members if name != before.best)
    line = ("compose", "leave", "one", leaver, "--name", "rest")
    for option, value in (("--data", text), ("--lr", "0.1"), ("--seed", "3"), ("--device", "cpu")):
        answer = weft(*line, option, value)
        assert answer.code == 2
        assert f"{option} has no effect: {before.best} was the best member and stays" in answer.err
    answer = weft(*line)
    folder = home / "composed" / "rest"
    assert (answer.code, answer.out) == (0, f"{folder}\n"), answer.err
    assert "merge the others anew" in answer.err
    told = read(home, "rest")
    assert told.members == tuple(name for name in "abc" if name != leaver)
    assert (told.best, told.left_flops, told.top) == (before.best, FLOPS, 2)
    assert not (folder / leaver).exists()
    config, vector = read_mixture(folder / "mixture")
    wanted, numbers = without(*read_mixture(one / "mixture"), before.members.index(leaver))
    assert config == wanted
    assert vector.equal(numbers)
    assert read_member(folder / "continued") == read_member(one / "continued")
    said = weft("compose", "evaluate", "rest", "--data", text.parent / "other.txt", "--no-monolith", "--json")
    found = json.loads(said.out)
    assert list(found["controls"]) == ["best single", "ensemble", "continued", "monolith"]
    assert found["flops"] == 3 * FLOPS + told.flops  # its share of what is a mean is there still
    assert found["controls"]["ensemble"]["flops"] == 2 * FLOPS


def test_where_the_best_leaves_another_is_trained_on(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(home, "one")
    line = ("compose", "leave", "one", before.best)
    assert "Give --data" in weft(*line, "--name", "rest").err
    assert "made with other text" in weft(*line, "--name", "rest", "--data", text.parent / "other.txt").err
    assert not (home / "composed" / "rest").exists()
    assert weft(*line, "--name", "rest", "--data", text).code == 0
    folder, told = home / "composed" / "rest", read(home, "rest")
    assert told.best in told.members
    last = read_member(folder / "continued").origins[-1]
    assert (last.how, last.of, last.flops) == ("continued", (read_member(folder / told.best).weights,), before.flops)
    assert last.tokens == read_member(home / "composed" / "one" / "continued").origins[-1].tokens
    # what was stopped goes on
    monkeypatch.setattr("weft.compose.shelf.SAVE_S", 0.0)
    step, made = Descent.step, list[float]()

    def stopped(self: Descent) -> float:
        if len(made) == 1:
            made.append(0.0)
            raise KeyboardInterrupt
        made.append(step(self))
        return made[-1]

    monkeypatch.setattr(Descent, "step", stopped)
    codes = [weft(*line, "--name", "pieces", "--data", text).code for _ in range(2)]
    assert codes[0] != 0
    assert codes[1] == 0
    weights = [read_member(home / "composed" / name / "continued").weights for name in ("rest", "pieces")]
    assert weights[0] == weights[1]


def test_what_nobody_can_leave_is_refused(weft: Weft, home: Path, text: Path) -> None:
    assert "d is no member of one: a, b, c" in weft("compose", "leave", "one", "d", "--name", "x").err
    leaver = next(name for name in "abc" if name != read(home, "one").best)
    assert weft("compose", "leave", "one", leaver, "--name", "two").code == 0
    rest = read(home, "two")
    assert "Serve that: weft serve" in weft("compose", "leave", "two", rest.members[0], "--name", "x").err
    weft("compose", "mix", "a", "b", "--data", text, "--name", "mixed", "--seq-len", "16")
    assert "weft compose mix b" in weft("compose", "leave", "mixed", "a", "--name", "x").err
    weft("compose", "align", "a", "b", "--data", text, "--name", "both", *QUICK)
    assert "weft compose align b" in weft("compose", "leave", "both", "a", "--name", "x").err
