"""`weft bench methods` from a plan to its report."""

from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from unit.bench.test_log import LINE
from unit.bench.test_point import tasks
from unit.cli.small import Weft
from unit.sim.plans import PLAN, write
from weft.bench import point as bench_point
from weft.bench.log import BenchLine, BenchLog, held
from weft.bench.point import Task
from weft.cli.plan.bench import side_by_side
from weft.errors import DataError

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


def test_a_point_that_failed_is_named_and_played_again(weft: Weft, tmp_path: Path) -> None:
    plan, out = write(tmp_path), tmp_path / "out"
    arguments = ("bench", "methods", plan, "--out", out, "--only", "ddp", "--no-plot")
    assert weft(*arguments).code == 0
    log = out / "points.csv"
    log.write_text(log.read_text().replace(",complete,", ",failed: no room,"))
    before = log.read_bytes()
    again = weft(*arguments)
    assert (again.code, again.out[:9]) == (0, "[1/1] ddp")
    assert log.read_bytes().startswith(before)
    assert [line.outcome for line in BenchLog(log).lines.values()] == ["complete"]


def test_a_plan_whose_points_fail_ends_with_a_code_of_its_own(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = write(tmp_path), tmp_path / "out"

    def measure(task: Task) -> BenchLine:
        outcome = "failed: it never came"
        return msgspec.structs.replace(LINE, digest=task.name, row=task.point.row, grid="{}", outcome=outcome)

    monkeypatch.setattr(bench_point, "measure", measure)
    arguments = ("bench", "methods", plan, "--out", out, "--only", "ddp", "--no-plot")
    for _ in range(2):
        answer = weft(*arguments)
        assert (answer.code, answer.out[:5]) == (45, "[1/1]")
        said = " ".join(answer.err.split())
        assert "not played to the end: 1 of 1 point. The first is of row ddp, {}, seed 0: failed: it n" in said
        assert "The same command plays them again" in said
        assert "fault in weft" not in said
    assert "0 of 3 runs were played, 1 failed" in (out / "report.md").read_text()
    assert weft("bench", "methods", plan, "--out", out, "--no-plot", "--report").code == 0


def test_two_benches_do_not_write_to_one_folder(weft: Weft, tmp_path: Path) -> None:
    plan, out = write(tmp_path), tmp_path / "out"
    out.mkdir()
    with held(out / "points.csv"):
        answer = weft("bench", "methods", plan, "--out", out, "--no-plot")
        assert weft("bench", "methods", plan, "--out", out, "--no-plot", "--report").code == 0
    assert (answer.code, answer.out) == (2, "")
    assert "another bench plays and writes there" in " ".join(answer.err.split())


@pytest.mark.parametrize("taken", ["out", "out/points.csv", "out/report.md"])
def test_a_folder_that_takes_nothing_is_refused_before_anything_is_played(
    weft: Weft, tmp_path: Path, taken: str
) -> None:
    plan, out = write(tmp_path), tmp_path / "out"
    if taken == "out":
        out.write_text("a file")
    else:
        (tmp_path / taken).mkdir(parents=True)
    answer = weft("bench", "methods", plan, "--out", out, "--no-plot")
    assert (answer.code, answer.out) == (2, "")
    assert "cannot be written" in " ".join(answer.err.split())


def test_what_runs_beside_a_point_that_cannot_be_played_is_kept(tmp_path: Path) -> None:
    begun: list[str] = []

    def begin(task: Task) -> Future[BenchLine]:
        future = Future[BenchLine]()
        if begun:
            future.set_result(LINE)
        else:
            future.set_exception(DataError("no text"))
        begun.append(task.name)
        return future

    found: list[BenchLine] = []
    all_tasks = tasks(write(tmp_path))
    with pytest.raises(DataError, match="no text"):
        found.extend(side_by_side(begin, all_tasks, 2))
    assert found == [LINE]
    assert begun == [task.name for task in all_tasks[:2]]
    assert list(side_by_side(begin, all_tasks, 2)) == [LINE] * 3


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
        (PLAN + OTHER, "row broken: 4 training steps are not a whole number of rounds of 3"),
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
    monkeypatch.setattr("weft.bench.plot.find_spec", lambda _name: None)
    answer = weft("bench", "methods", write(tmp_path))
    assert answer.code == 2
    said = " ".join(answer.err.split())
    assert "In a clone: pip install -e '.[plot]', with the pip beside this weft; elsewhere: pip install 'weft" in said


@pytest.mark.full
def test_a_run_with_stages_is_compared_like_any_other(weft: Weft, tmp_path: Path) -> None:
    plan, out = write(tmp_path), tmp_path / "out"
    run = tmp_path / "run.toml"
    run.write_text("stages = 2\n" + run.read_text().replace("num_layers = 1", "num_layers = 2\nis_tied = false"))
    answer = weft("bench", "methods", plan, "--out", out, "--no-plot")
    assert (answer.code, answer.err) == (0, "")
    for line in BenchLog(out / "points.csv").lines.values():
        assert (line.outcome, line.steps, line.peers) == ("complete", 4, 2)
        assert line.committed_tokens == 4 * 2 * 16  # of the one member of the first stage
        assert line.heldout_loss is not None
        assert line.sent_mean > 4 * 2 * 16 * 16 * 2  # activations of each token, two bytes a number
