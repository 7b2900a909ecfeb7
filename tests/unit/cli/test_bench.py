"""`weft bench methods` from a plan to its report."""

from pathlib import Path

import pytest

from unit.cli.small import Weft
from unit.sim.plans import PLAN, write
from weft.sim.bench_log import BenchLog

OTHER = '[[row]]\nname = "broken"\nmethod = { type = "fedavg", every = 3 }\n'


def test_points_are_played_once_and_a_killed_bench_goes_on(weft: Weft, tmp_path: Path) -> None:
    plan, out = write(tmp_path), tmp_path / "out"
    answer = weft("bench", "methods", plan, "--out", out, "--only", "diloco", "--no-plot")
    assert (answer.code, answer.err) == (0, "")
    assert [line[:5] for line in answer.out.splitlines()] == ["[1/2]", "[2/2]", "writt"]
    log = out / "points.csv"
    lines = log.read_bytes()
    log.write_bytes(lines[:-20])  # killed in the middle of its last line
    resumed = weft("bench", "methods", plan, "--out", out, "--no-plot")
    assert resumed.code == 0
    assert [line.split(" {")[0] for line in resumed.out.splitlines()[:-1]] == ["[1/2] ddp", "[2/2] diloco"]
    assert log.read_bytes().startswith(lines[: lines[:-1].rindex(b"\n") + 1])
    assert len(BenchLog(log).lines) == 3
    again = weft("bench", "methods", plan, "--out", out, "--no-plot")
    assert again.out.splitlines() == [f"written: {out / 'report.md'}"]
    assert "3 of 3 runs were played" in (out / "report.md").read_text()


def test_a_report_is_written_of_what_is_there_and_drawn(weft: Weft, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    plan, out = write(tmp_path), tmp_path / "out"
    assert weft("bench", "methods", plan, "--out", out, "--only", "ddp", "--no-plot").code == 0
    answer = weft("bench", "methods", plan, "--out", out, "--report")
    assert answer.code == 0
    assert answer.out.startswith("written: ")
    assert "1 of 3 runs were played" in (out / "report.md").read_text()
    assert (out / "loss_against_bytes_4.svg").read_text().startswith("<?xml")


@pytest.mark.slow  # two processes load torch
def test_points_are_played_several_at_a_time_to_the_same_losses(weft: Weft, tmp_path: Path) -> None:
    plan, found = write(tmp_path), []
    for jobs in (1, 2):
        out = tmp_path / f"out-{jobs}"
        assert weft("bench", "methods", plan, "--out", out, "--jobs", jobs, "--no-plot").code == 0
        found.append({name: line.heldout_loss for name, line in BenchLog(out / "points.csv").lines.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (PLAN.replace("run.toml", "none.toml"), "none.toml: no such file"),
        (PLAN.replace('"ddp" }', '"ddpp" }'), 'row ddp: method.type is "ddpp". Did you mean "ddp"?'),
        (PLAN + OTHER, "row broken: 4 inner steps are no whole rounds of 3"),
        (PLAN.replace("[[row]]", "[[raw]]"), 'has no field "raw"'),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_anything_is_played(
    weft: Weft, tmp_path: Path, plan: str, words: str
) -> None:
    answer = weft("bench", "methods", write(tmp_path, plan), "--out", tmp_path / "out", "--no-plot")
    assert answer.code == 2
    assert words in " ".join(answer.err.split())
    assert not (tmp_path / "out").exists()


def test_a_row_that_is_not_in_the_plan_is_named(weft: Weft, tmp_path: Path) -> None:
    answer = weft("bench", "methods", write(tmp_path), "--only", "demo", "--no-plot")
    assert answer.code == 2
    assert "--only demo: the plan has no such row. Rows: ddp, diloco." in answer.err


def test_an_option_that_is_wrong_is_named(weft: Weft, tmp_path: Path) -> None:
    answer = weft("bench", "methods", write(tmp_path), "--no-plot", "--set", "train.seq_len=x")
    assert answer.code == 2
    assert "--set train.seq_len=x" in answer.err


def test_text_that_is_not_there_is_said_before_anything_is_played(weft: Weft, tmp_path: Path) -> None:
    answer = weft("bench", "methods", write(tmp_path), "--no-plot", "--set", "data.source.paths=['none.txt']")
    assert answer.code == 11
    assert "none.txt" in answer.err


def test_without_what_draws_it_says_what_to_install(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.sim.bench_plot.find_spec", lambda _name: None)
    answer = weft("bench", "methods", write(tmp_path))
    assert answer.code == 2
    assert "pip install 'weft[plot]'" in answer.err
