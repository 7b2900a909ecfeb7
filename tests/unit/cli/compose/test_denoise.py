"""`weft compose denoise | below`: members that see all of a text, and where they cannot stand."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from unit.cli.compose.made import FLOPS, write, write_all
from unit.cli.small import TEXT, Weft
from weft.compose.composed import Stacked, read_composed
from weft.compose.descent import Descent
from weft.compose.member import MEMBER, read_member
from weft.model.weights import read_folder, write_json

QUICK = "--steps", "3", "--batch-size", "2", "--seq-len", "16"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def denoiser(home: Path, name: str = "filler") -> None:
    made = write(home, name, 5)
    write_json(home / "members" / name / MEMBER, replace(made, latents="denoise"))


@pytest.mark.parametrize("masks", ["spans", "bert"])
def test_a_member_that_was_taught_to_denoise_says_so(weft: Weft, home: Path, text: Path, masks: str) -> None:
    before = write(home, "python", 1)
    answer = weft("compose", "denoise", "python", "--data", text, "--name", "filler", "--masks", masks, *QUICK)
    folder = home / "members" / "filler"
    assert (answer.code, answer.out) == (0, f"{folder}\n"), answer.err
    made = read_member(folder)
    assert (made.latents, made.space, made.parent) == ("denoise", before.space, before.parent)
    assert (made.origins[-1].of, made.origins[-1].tokens) == ((before.weights,), 3 * 2 * 16)
    assert made.flops > FLOPS
    assert not read_folder(folder)[1].equal(read_folder(home / "members" / "python")[1])
    assert "what is masked, seen from both sides" in answer.err
    again = weft("compose", "denoise", "filler", "--data", text, "--name", "filler2", *QUICK)
    assert again.code == 0
    assert read_member(home / "members" / "filler2").latents == "denoise"
    assert "exists" in weft("compose", "denoise", "python", "--data", text, "--name", "filler", *QUICK).err


def test_losses_that_were_not_told_to_the_end_are_told_by_the_same_line(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "python", 1)
    line = ("compose", "denoise", "python", "--data", text, "--name", "filler", *QUICK)

    def stopped(*_given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("weft.compose.denoising.Denoising.told", stopped)
        assert weft(*line).code != 0
    assert not (home / "members" / "filler").exists()
    monkeypatch.setattr(Descent, "step", lambda _self: pytest.fail("trained again"))
    assert "what is masked, seen from both sides" in weft(*line).err


def test_it_is_told_below_a_causal_member_by_tokens_so_far_alone(weft: Weft, home: Path, text: Path) -> None:
    write(home, "english", 1)
    denoiser(home)
    line = ("compose", "below", "filler", "english", "--data", text, "--seq-len", "16", "--samples", "4")
    found = json.loads(weft(*line, "--json").out)
    assert list(found) == ["stack", "masked", "top", "denoiser", "ensemble"]
    people = weft(*line)
    assert "filler > english, by tokens so far that all see each other" in people.out
    for losses in found.values():
        assert f"{losses:.3f} nats a token" in people.out
    assert len(people.out.splitlines()) == 5
    assert "compose align filler english" in people.err


def test_what_is_trained_with_it_is_causal_and_denoises_no_more(weft: Weft, home: Path, text: Path) -> None:
    write(home, "english", 1)
    denoiser(home)
    line = ("compose", "align", "filler", "english", "--data", text, "--name", "both", "--how", "joint", *QUICK)
    answer = weft(*line)
    assert answer.code == 0, answer.err
    assert "filler has seen all of a text. Here, in whatever is trained, no place sees a later one" in answer.err
    folder = home / "composed" / "both"
    told = read_composed(folder)
    assert isinstance(told, Stacked)
    assert read_member(folder / "filler").latents == "denoise"
    assert {read_member(folder / each).latents for each in told.stack.members} == {"none"}
    assert read_member(folder / "continued").latents == "none"


@pytest.mark.parametrize(
    "line",
    [
        ["compose", "align", "english", "filler", "--data", "TEXT", "--name", "new"],
        ["compose", "plan", "english", "filler"],
        ["compose", "select", "filler", "english", "--data", "TEXT"],
        ["compose", "mix", "filler", "english", "--data", "TEXT", "--name", "new"],
        ["compose", "merge", "filler", "english", "--data", "TEXT", "--name", "new"],
        ["compose", "loop", "filler", "--data", "TEXT", "--name", "new"],
        ["compose", "think", "filler", "--data", "TEXT", "--name", "new"],
        ["compose", "below", "filler2", "filler", "--data", "TEXT"],
        ["eval", "filler", "--data", "TEXT"],
        ["generate", "filler", "a"],
        ["serve", "filler", "--port", "0"],
    ],
    ids=" ".join,
)
def test_where_a_next_token_is_wanted_it_is_refused(weft: Weft, home: Path, text: Path, line: list[str]) -> None:
    write_all(home, ["english"])
    denoiser(home)
    denoiser(home, "filler2")
    answer = weft(*[str(text) if each == "TEXT" else each for each in line])
    assert answer.code == 2, answer.err
    assert "filler sees all of a text and tells what is masked in it: it writes no next token" in answer.err


def test_a_causal_member_is_not_told_as_one_that_sees_all(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    answer = weft("compose", "below", "python", "english", "--data", text)
    assert answer.code == 2
    assert "python does not see all of a text" in answer.err
