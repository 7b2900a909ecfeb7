"""`weft eval --tasks`: what a model answers rightly, before and after it was trained, and in a report."""

import json
from pathlib import Path

import pytest

from unit.cli.small import Weft
from unit.cli.test_tuned import LOCAL, folder

__all__ = ["folder"]


def rows(answer: str, num: int = 12) -> list[dict[str, object]]:
    drawn = [{"question": f"say {n}", "answer": answer, "match": "contains", "kind": "said"} for n in range(num)]
    chosen = [
        {"question": f"say {n}", "choices": [f"no {n}", f"ok {n}"], "answer": f"{answer} {n}", "kind": "chosen"}
        for n in range(num)
    ]
    return [*drawn, *chosen]


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cells(out: str) -> dict[str, list[str]]:
    """Return the numbers of a printed table by its first column."""
    return {line.split("  ")[0].strip(): [each for each in line.split() if each.isdigit()] for line in out.splitlines()}


@pytest.mark.full
def test_before_and_after_stand_side_by_side_and_in_the_report(weft: Weft, folder: Path) -> None:
    write(folder / "tasks.jsonl", rows("no"))  # which the model at first thinks less likely than ok
    write(folder / "chats.jsonl", [{"prompt": f"say {n}", "completion": f"no {n}"} for n in range(60)])
    run = (folder / "chat.toml").read_text().replace("adapter =", "# adapter =").replace("6144", "24576")
    (folder / "chat.toml").write_text(run)
    assert weft("train", "chat.toml", *LOCAL).code == 0
    asks = ("--tasks", "tasks.jsonl", "--max-tokens", "8", "--device", "cpu")
    found = weft("eval", "last", *asks, "--before", "--answers", "said.jsonl")
    assert found.code == 0, found.err
    first, head, *_ = found.out.splitlines()
    assert first == "24 tasks, put by the model's chat template"
    assert head.split()[:3] == ["tasks", "number", "before"]
    shares = cells(found.out)
    for kind in ("said", "chosen"):
        number, before, after = shares[kind]
        assert number == "12"
        assert int(before) < 20 < 90 < int(after), found.out
    assert "chosen, by bytes" in shares
    said = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
    assert len(said) == 24
    assert [each["said"] for each in said[12:]].count("no 3") == 1
    assert "is there already" in weft("eval", "last", "--tasks", "tasks.jsonl", "--answers", "said.jsonl").err
    assert weft("report", "last", "--out", "report.md").code == 0
    page = (folder / "report.md").read_text()
    assert "tasks.jsonl: how many were answered rightly" in page
    assert "before" in page


def test_a_folder_is_asked_as_well(weft: Weft, folder: Path) -> None:
    write(folder / "tasks.jsonl", rows("ok", num=2))
    found = weft("eval", "model", "--tasks", "tasks.jsonl", "--plain", "--max-tokens", "5", "--device", "cpu")
    assert found.code == 0, found.err
    assert found.out.startswith("4 tasks, put as they are; an answer is the line that follows\n")
    assert found.out.splitlines()[1].split() == ["tasks", "number", "now"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tasks", "nothing.jsonl"), "nothing.jsonl"),
        (("--tasks", "empty.jsonl"), "there is no task"),
        (("--tasks", "long.jsonl"), "long.jsonl, line 1: it has"),
        (("--tasks", "tasks.jsonl", "--before"), "is no run of weft"),
        (("--tasks", "tasks.jsonl", "--windows", "3"), "asks questions, and measures no loss"),
        (("--plain",), "there are no --tasks"),
    ],
)
def test_what_cannot_be_asked_is_refused(weft: Weft, folder: Path, options: tuple[str, ...], said: str) -> None:
    write(folder / "tasks.jsonl", rows("ok", num=1))
    write(folder / "long.jsonl", [{"question": "long " * 100, "answer": "x"}])
    (folder / "empty.jsonl").write_text("\n")
    answer = weft("eval", "model", *options, "--device", "cpu")
    assert answer.code != 0
    assert said in " ".join(answer.err.split())
