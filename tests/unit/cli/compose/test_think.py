"""`weft compose think`: a member that was taught to think in latents, from the command line."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from unit.cli.compose.made import FLOPS, WORDS, write
from unit.cli.small import Weft
from weft.compose.descent import Descent
from weft.compose.member import read_member
from weft.compose.thinking import length, texts_of
from weft.model.weights import read_folder, write_json

ROWS = [
    {"question": f"{a}+{b}+1", "steps": [f"{a}+{b}={a + b}", f"{a + b}+1={a + b + 1}"], "answer": str(a + b + 1)}
    for a in range(3)
    for b in range(2)
]
QUICK = "--epochs", "1", "--stages", "2", "--batch-size", "2", "--latents", "1"


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_a_member_that_was_taught_to_think_says_so_beside_its_controls(weft: Weft, home: Path, problems: Path) -> None:
    before = write(home, "python", 1)
    answer = weft("compose", "think", "python", "--data", problems, "--name", "thinker", *QUICK)
    folder = home / "members" / "thinker"
    assert (answer.code, answer.out) == (0, f"{folder}\n"), answer.err
    made = read_member(folder)
    assert (made.latents, made.space, made.parent) == ("previous", before.space, before.parent)
    last = made.origins[-1]
    texts = texts_of([str(problems)], Path(), WORDS)
    assert (last.how, last.of) == ("continued", (before.weights,))
    assert len(texts) == 6
    assert last.tokens == told_tokens(texts)
    assert made.flops > FLOPS
    assert not read_folder(folder)[1].equal(read_folder(home / "members" / "python")[1])
    for words in (
        "2 answers to questions that nobody trained on",
        "with its thoughts",
        "the same, its thoughts left out",
        "trained alike with a pause for each",
        "trained alike with nothing in their place",
        "times the computing",
    ):
        assert words in answer.err
    assert "exists" in weft("compose", "think", "python", "--data", problems, "--name", "thinker", *QUICK).err
    assert not list((home / "composed").glob(".*.begun"))


def told_tokens(texts: list) -> int:  # type: ignore[type-arg]
    from weft.compose.stacks.thoughts import Curriculum

    curriculum = Curriculum(latents_per_step=1, num_stages=2, epochs_per_stage=1)
    trained = [each for at, each in enumerate(texts) if (at + 1) % 3]
    return sum(length(curriculum, each, stage) for each in trained for stage in range(4))


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(
    weft: Weft, home: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "python", 1)
    line = ("compose", "think", "python", "--data", problems, *QUICK)
    assert weft(*line, "--name", "whole").code == 0
    monkeypatch.setattr("weft.compose.shelf.SAVE_S", 0.0)
    step, made = Descent.step, list[float]()

    def stopped(self: Descent) -> float:
        if len(made) == 5:  # of the third stage, in the middle
            made.append(0.0)
            raise KeyboardInterrupt
        made.append(step(self))
        return made[-1]

    monkeypatch.setattr(Descent, "step", stopped)
    assert weft(*line, "--name", "pieces").code != 0
    assert "another work that was begun under this name" in weft(*line, "--name", "pieces", "--seed", "3").err
    assert weft(*line, "--name", "pieces").code == 0
    assert len(made) == 1 + 3 * 4 * 2  # no step was made again
    one, two = (read_folder(home / "members" / name)[1] for name in ("whole", "pieces"))
    assert one.equal(two)


def test_answers_that_were_not_told_to_the_end_are_told_by_the_same_line(
    weft: Weft, home: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "python", 1)
    line = ("compose", "think", "python", "--data", problems, *QUICK, "--name", "thinker")

    def stopped(*_given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("weft.compose.thinking.answered", stopped)
        assert weft(*line).code != 0
    assert not (home / "members" / "thinker").exists()
    monkeypatch.setattr(Descent, "step", lambda _self: pytest.fail("trained again"))
    answer = weft(*line)
    assert answer.code == 0
    assert "trained alike with a pause for each" in answer.err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "1+1", "answer": "2"}, "no question with steps and an answer"),
        ({"question": "1+1", "steps": "1", "answer": "2"}, "no question with steps and an answer"),
        ({"question": "1+1", "steps": [], "answer": ""}, "no question with steps and an answer"),
        ({"question": "1+1", "steps": [], "answer": "2"}, "1 text to train on and to be asked. Give 4 or more"),
        ({"question": "1+1" * 30, "steps": [], "answer": "2"}, "1 text longer than the 64 tokens"),
    ],
)
def test_what_nobody_can_be_taught_by_is_refused(
    weft: Weft, home: Path, tmp_path: Path, row: dict[str, object], words: str
) -> None:
    write(home, "python", 1)
    file = tmp_path / "wrong.jsonl"
    file.write_text(json.dumps(row) + "\n")
    answer = weft("compose", "think", "python", "--data", file, "--name", "thinker", *QUICK)
    assert answer.code != 0
    assert words in answer.err


def test_what_is_too_long_is_left_out_and_said(weft: Weft, home: Path, problems: Path) -> None:
    made = write(home, "python", 1)
    with problems.open("a") as file:
        file.write(json.dumps(ROWS[0] | {"question": "1+1" * 30}) + "\n")
    line = ("compose", "think", "python", "--data", problems, *QUICK, "--name")
    assert "left out 1 text longer than the 64 tokens that the member reads" in weft(*line, "thinker").err
    write_json(home / "members" / "python" / "member.json", structs.replace(made, space=None))
    assert "embedding and a head of its own" in weft(*line, "other").err


def test_no_question_that_is_asked_at_the_end_is_trained_on(weft: Weft, home: Path, tmp_path: Path) -> None:
    write(home, "python", 1)
    file = tmp_path / "twice.jsonl"
    line = ("compose", "think", "python", "--data", file, *QUICK, "--name", "thinker")
    file.write_text("".join(json.dumps(ROWS[at]) + "\n" for at in (0, 1, 2, 1, 2, 3)))  # every third is asked
    answer = weft(*line)
    assert answer.code == 0
    assert "not trained on, since their questions are asked at the end: 1 other text" in answer.err
    texts = texts_of([str(file)], Path(), WORDS)
    laid = told_tokens([texts[at] for at in (0, 1, 2, 3)])  # the third is the one that is left out there
    assert read_member(home / "members" / "thinker").origins[-1].tokens == laid
    file.write_text(4 * (json.dumps(ROWS[0]) + "\n"))
    again = weft(*line[:-1], "other")
    assert again.code == 2
    assert "all texts have the questions that are asked at the end" in again.err
