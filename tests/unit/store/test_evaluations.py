"""What is kept of tasks is read again, replaced by newer figures, and not written over where it cannot be read."""

from pathlib import Path

from weft.store.evaluations import Evaluation, Result, keep_evaluation, read_evaluations


def found(round: int | None, right: int, digest: str = "a") -> Evaluation:
    return Evaluation(
        tasks="t.jsonl", digest=digest, round=round, results=(Result(kind="", num=10, right=right, right_by_length=3),)
    )


def test_newer_figures_take_the_place_of_older_ones(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path) == []
    for each in (found(None, 1), found(3, 2), found(3, 2, "b"), found(3, 5)):
        assert keep_evaluation(tmp_path, each)
    assert read_evaluations(tmp_path) == [found(None, 1), found(3, 2, "b"), found(3, 5)]


def test_what_cannot_be_read_stays(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text("[{")
    assert read_evaluations(tmp_path) == []
    assert not keep_evaluation(tmp_path, found(3, 5))
    assert (tmp_path / "tasks.json").read_text() == "[{"
    assert not keep_evaluation(tmp_path / "tasks.json", found(3, 5))
