"""`weft compose loop`: a member that was trained on what it wrote itself, from the command line."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from unit.cli.compose.made import FLOPS, write
from unit.cli.small import TEXT, Weft
from weft.compose.descent import Descent
from weft.compose.member import read_member
from weft.compose.stacks.latents import EntropyConfig, LatentConfig, LatentDescent, reads_itself
from weft.model.weights import read_folder, write_json

QUICK = "--steps", "4", "--batch-size", "2", "--seq-len", "16"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize(("kind", "latents"), [("same", "same"), ("prev", "previous")])
def test_a_member_that_read_what_it_wrote_says_so(weft: Weft, home: Path, text: Path, kind: str, latents: str) -> None:
    before = write(home, "python", 1)
    answer = weft("compose", "loop", "python", "--data", text, "--kind", kind, "--name", "looped", *QUICK)
    folder = home / "members" / "looped"
    assert (answer.code, answer.out) == (0, f"{folder}\n"), answer.err
    made = read_member(folder)
    assert made.latents == latents
    assert (made.space, made.parent) == (before.space, before.parent)
    last = made.origins[-1]
    assert (last.how, last.of, last.tokens) == ("continued", (before.weights,), 4 * 2 * 16)
    assert made.flops > FLOPS
    assert not read_folder(folder)[1].equal(read_folder(home / "members" / "python")[1])
    assert "where it reads what it wrote" in answer.err
    assert "exists" in weft("compose", "loop", "python", "--data", text, "--name", "looped", *QUICK).err
    # what is trained of it later still reads that
    write(home, "english", 0)
    assert weft("compose", "align", "english", "looped", "--data", text, "--name", "both", *QUICK).code == 0
    assert read_member(home / "composed" / "both" / "stack.1").latents == latents


def test_a_loop_that_was_stopped_goes_on_to_the_same_bits(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "python", 1)
    line = ("compose", "loop", "python", "--data", text, *QUICK)
    assert weft(*line, "--name", "whole").code == 0
    monkeypatch.setattr("weft.compose.shelf.SAVE_S", 0.0)
    step, made = Descent.step, list[float]()

    def stopped(self: Descent) -> float:
        if len(made) == 2:
            made.append(0.0)
            raise KeyboardInterrupt
        made.append(step(self))
        return made[-1]

    monkeypatch.setattr(Descent, "step", stopped)
    assert weft(*line, "--name", "pieces").code != 0
    other = weft(*line, "--name", "pieces", "--entropy", "1")
    assert "another work that was begun under this name" in other.err
    assert weft(*line, "--name", "pieces").code == 0
    assert len(made) == 5  # two steps were not made again
    one, two = (read_folder(home / "members" / name)[1] for name in ("whole", "pieces"))
    assert one.equal(two)
    assert not list((home / "composed").glob(".*.begun"))


def test_only_unsure_positions_are_replaced_if_asked_for(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "python", 1)
    configs, begin = list[LatentConfig](), LatentDescent.__init__

    def noted(self: LatentDescent, config: LatentConfig, *given: object) -> None:
        configs.append(config)
        begin(self, config, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(LatentDescent, "__init__", noted)
    line = ("compose", "loop", "python", "--data", text, "--name", "unsure", *QUICK, "--entropy")
    answer = weft(*line, "1")
    assert answer.code == 0
    assert [each.select for each in configs] == [EntropyConfig(threshold=1.0)]
    assert "where it reads what it wrote" in answer.err


def test_a_member_that_is_nowhere_so_unsure_is_not_trained(weft: Weft, home: Path, text: Path) -> None:
    write(home, "python", 1)
    answer = weft("compose", "loop", "python", "--data", text, "--name", "unsure", "--entropy", "32", *QUICK)
    assert answer.code == 2
    assert "nowhere in text that is held out is python as unsure as that" in answer.err
    assert not (home / "members" / "unsure").exists()


def test_what_is_told_at_the_end_may_be_stopped_and_nothing_is_trained_again(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "python", 1)
    line = ("compose", "loop", "python", "--data", text, "--name", "looped", *QUICK)
    told = []

    def stopped(*given: Any) -> tuple[float, float]:
        told.append(given)
        if len(told) == 2:
            raise KeyboardInterrupt
        return reads_itself(*given)

    monkeypatch.setattr("weft.compose.stacks.latents.reads_itself", stopped)
    assert weft(*line).code != 0
    assert not (home / "members" / "looped").exists()
    monkeypatch.setattr(Descent, "step", lambda _self: pytest.fail("trained again"))
    answer = weft(*line)
    assert answer.code == 0
    assert "where it reads what it wrote" in answer.err


def test_what_was_begun_under_a_name_is_removed_by_it(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, "python", 1)
    line = ("compose", "loop", "python", "--data", text, "--name", "looped", *QUICK)
    monkeypatch.setattr("weft.compose.shelf.SAVE_S", 0.0)

    def stopped(*_given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("weft.compose.shelf.Shelf.put", stopped)
        assert weft(*line).code != 0
    assert list((home / "composed").glob(".looped.begun/*"))
    assert weft("compose", "remove", "looped").err == "what was begun under the name looped is forgotten\n"
    assert not list((home / "composed").glob(".looped.begun"))
    assert "'looped' is no member of this home" in weft("compose", "remove", "looped").err


def test_a_member_in_no_space_has_nothing_to_read(weft: Weft, home: Path, text: Path) -> None:
    made = write(home, "python", 1)
    write_json(home / "members" / "python" / "member.json", structs.replace(made, space=None))
    answer = weft("compose", "loop", "python", "--data", text, "--name", "looped", *QUICK)
    assert answer.code == 2
    assert "embedding and a head of its own" in answer.err
    assert "is no member" in weft("compose", "loop", "nosuch", "--data", text, "--name", "looped", *QUICK).err
