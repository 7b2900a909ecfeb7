"""`weft compose plan | align | select | evaluate | export`: stacks from the command line, never without controls."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.nn.functional import cross_entropy

from unit.cli.compose.made import CONFIG, FLOPS, PARENT, WORDS, space, write, write_all
from unit.cli.small import TEXT, Weft
from weft.cli.compose.parts import MOST_CHOSEN, halves, samples
from weft.cli.model.trained import open_trained
from weft.compose import descent as stacks_descent
from weft.compose.composed import Stacked, read_composed, read_stack
from weft.compose.descent import Descent, DescentConfig
from weft.compose.making import ways_of
from weft.compose.member import MEMBER, Origin, read_member
from weft.compose.shelf import Shelf
from weft.compose.stacks.align import AlignConfig, OnewayConfig, StitchConfig
from weft.compose.stacks.body import fresh
from weft.compose.stacks.sauce import SauceConfig
from weft.compose.stacks.stack import Stack, whole
from weft.dashboard import figures
from weft.data.rows import Batch
from weft.model.flat import assemble
from weft.model.weights import read_folder, write_json

QUICK = "--steps", "3", "--batch-size", "2", "--seq-len", "16"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text("".join(f"class C{n}:\n    y = {n}\n" for n in range(60)))
    return tmp_path / "text.txt"


def read(folder: Path) -> Stacked:
    found = read_composed(folder)
    assert isinstance(found, Stacked)
    return found


def stack_of(folder: Path, told: Stacked, home: Path) -> Stack:
    def model(place: Path) -> tuple[object, torch.Tensor]:
        trained = open_trained(str(place), home)
        return trained.config, trained.vector

    return read_stack(folder, told.stack, model)  # type: ignore[arg-type]


def test_a_stack_is_written_with_its_controls_and_told_beside_them(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    answer = weft("compose", "align", "english", "python", "--data", text, "--name", "both", *QUICK)
    folder = home / "composed" / "both"
    assert (answer.code, answer.out) == (0, f"{folder}\n")
    told = read(folder)
    assert told.members == ("english", "python")
    assert told.stack.members == ("english", "stack.1")  # one-way: who reads is trained
    assert told.identity.members == ("english", "identity.1")
    assert read_member(folder / "stack.1").origins[-1].how == "one-way"
    assert read_member(folder / "identity.1").origins[-1].how == "identity"
    assert read_member(folder / "continued").origins[-1].flops == told.flops
    assert not (home / "composed" / ".both.begun").exists()
    assert weft("compose", "list").out.splitlines()[-1] == "both: stack of english, python"

    wanted = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt")
    assert wanted.code == 2
    assert "--monolith MEMBER" in wanted.err
    write(home, "large", 7)
    said = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt", "--monolith", "large", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert list(found["controls"]) == ["best single", "ensemble", "identity", "continued", "monolith"]
    assert found["flops"] == 2 * FLOPS + told.flops
    assert found["controls"]["ensemble"]["flops"] == 2 * FLOPS
    assert found["controls"]["identity"]["flops"] == FLOPS + told.flops
    alone = {each["name"]: each["loss"] for each in found["members"]}
    assert found["controls"]["best single"]["loss"] == alone[told.best]
    assert found["adds"][0] == pytest.approx(found["loss"] - found["exits"][0]["loss"], abs=1e-6)
    assert found["exits"][0]["loss"] == pytest.approx(alone["english"], abs=1e-6)
    people = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt", "--no-monolith").out
    assert "one model, trained whole" in people
    assert "none was trained" in people
    share = FLOPS / (2 * FLOPS + told.flops)
    less = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt", "--monolith", "large").out
    assert f"it took {share:.2g} of the computing" in less
    assert "  after english" in less
    assert f"{'both: english > python':42} {found['loss']:7.3f}" in people
    assert weft("compose", "remove", "both").code == 0
    assert not folder.exists()


def test_losses_are_those_of_the_stack_that_was_trained(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    weft("compose", "align", "english", "python", "--data", text, "--name", "both", "--how", "joint", *QUICK)
    folder = home / "composed" / "both"
    stack = stack_of(folder, read(folder), home)
    ids = torch.from_numpy(WORDS.encode((text.parent / "other.txt").read_text()).astype("int64"))
    num = (len(ids) - 1) // 16
    batch = Batch(ids[: 16 * num].view(num, 16), ids[1 : 16 * num + 1].view(num, 16))
    report = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt", "--no-monolith", "--json")
    assert json.loads(report.out)["loss"] == pytest.approx(float(stack.losses(batch).mean()), abs=1e-6)
    # a stack that hands over as it is is one decoder
    assert weft("compose", "export", "both", text.parent / "one").code == 0
    config, vector = read_folder(text.parent / "one")
    wanted, numbers = whole(stack)
    assert (config.num_layers, config.width) == (2, wanted.width)
    assert vector.equal(numbers)


def test_what_is_no_decoder_is_not_exported(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    weft("compose", "align", "english", "python", "--data", text, "--name", "both", "--how", "stitch", *QUICK)
    answer = weft("compose", "export", "both", text.parent / "one")
    assert answer.code == 2
    assert 'only handovers of type "pre"' in answer.err
    told = read(home / "composed" / "both")
    assert told.stack.members == ("english", "python")  # the map alone was trained
    assert told.stack.seams[0].handover.__struct_config__.tag == "affine"
    stack = stack_of(home / "composed" / "both", told, home)
    assert stack.maps[0] is not None
    assert not stack.maps[0][:-1].equal(torch.eye(16))


def test_a_stack_that_was_stopped_goes_on_to_the_same_bits(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(home, ["english", "python"])
    how = "--how", "one-way", "--how", "sauce", "--how", "joint"
    line = ("compose", "align", "english", "python", "--data", text, *how, "--handover", "post", *QUICK)
    assert weft(*line, "--name", "whole").code == 0
    monkeypatch.setattr("weft.compose.shelf.SAVE_S", 0.0)
    step, made = Descent.step, []

    def stopped(self: Descent) -> float:
        if len(made) in (4, 11, 20):
            made.append(0.0)
            raise KeyboardInterrupt
        made.append(step(self))
        return made[-1]

    monkeypatch.setattr(Descent, "step", stopped)
    codes = [weft(*line, "--name", "pieces").code for _ in range(4)]
    assert codes[-1] == 0
    assert 0 not in codes[:-1]
    one, other = home / "composed" / "whole", home / "composed" / "pieces"
    assert read(one).folders == read(other).folders
    for name in read(one).folders:
        assert read_folder(one / name)[1].equal(read_folder(other / name)[1]), name
    assert read_member(one / "stack.0").weights == read_member(other / "stack.0").weights


def test_a_work_that_was_begun_is_not_taken_for_another(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(home, ["english", "python"])
    monkeypatch.setattr("weft.compose.shelf.SAVE_S", 0.0)
    keep = Shelf.keep

    def kept(self: Shelf, *given: object) -> None:
        keep(self, *given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Shelf, "keep", kept)
    line = ("compose", "align", "english", "python", "--data", text, "--name", "both", *QUICK)
    assert weft(*line).code != 0
    answer = weft(*line, "--lr", "0.01")
    assert answer.code == 2
    assert "another work that was begun under this name" in answer.err
    (home / "composed" / ".both.begun" / "stack.0.state.safetensors").write_bytes(b"torn")
    assert "cannot be read" in weft(*line).err


def test_the_plan_says_what_is_moved_and_what_controls_take(weft: Weft, home: Path) -> None:
    write_all(home, ["english", "python"])
    answer = weft("compose", "plan", "english", "python", "--how", "one-way", "--how", "joint", *QUICK)
    assert answer.code == 0
    assert "english > python, one-way, then joint: 2 trainings of 3 steps" in answer.out
    assert f"fetched    {figures.nbytes(4 * fresh(CONFIG, 0).numel())}, the others' weights" in answer.out
    assert "num_layers = 2" in answer.out
    write(home, "unknown", 5, flops=0)
    assert "is not known" in weft("compose", "plan", "english", "unknown", *QUICK).out


def test_pairs_and_stacks_are_told(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["a", "b", "c"])
    answer = weft("compose", "select", "a", "b", "c", "--data", text, "--depth", "3", "--seq-len", "16", "--json")
    found = json.loads(answer.out)
    assert len(found["pairs"]) == 9
    assert sorted(len(each["members"]) for each in found["stacks"]) == [1, 2, 3]
    people = weft("compose", "select", "a", "b", "c", "--data", text, "--depth", "3", "--seq-len", "16").out
    assert f"{found['alone']['a']:.3f} nats a token" in people
    best = found["stacks"][0]
    assert f"{' > '.join(best['members'])}: {best['test']:.3f} on other text" in people
    both = next(each for each in found["stacks"] if len(each["members"]) == 2)
    assert f"asked together, alike: {both['ensemble']:.3f}" in people
    _, test = halves(samples(WORDS, [str(text)], 16, MOST_CHOSEN)[0], torch.device("cpu"))
    likely = torch.stack([-losses_by_token(home, name, test) for name in both["members"]])
    assert both["ensemble"] == pytest.approx(float(-likely.exp().mean(0).log().mean()), abs=1e-5)


def losses_by_token(home: Path, name: str, text: Batch) -> torch.Tensor:
    logits = assemble(*read_folder(home / "members" / name))(text.tokens)
    return cross_entropy(logits.double().transpose(1, 2), text.targets, reduction="none")


def test_what_members_have_in_common_is_planned_for_once(weft: Weft, home: Path) -> None:
    members = write_all(home, ["english", "python"])
    assert f"monolith   one model with as much computing as members and stack, {2 * FLOPS:.3g}" in planned(weft)
    seed = Origin(how="trained", tokens=1000, flops=FLOPS // 2, made=PARENT)
    for member in members:
        own = Origin(how="continued", tokens=1000, flops=FLOPS // 2, made=member.weights)
        write_json(home / "members" / member.name / MEMBER, replace(member, origins=(seed, own)))
    assert f"members and stack, {1.5 * FLOPS:.3g}" in planned(weft)


def planned(weft: Weft) -> str:
    return weft("compose", "plan", "english", "python", "--how", "one-way", *QUICK).out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["english"], "two members or more"),
        (["english", "english"], "two members of that name"),
        (["english", "nosuch"], "is no member"),
        (["english", "elsewhere"], "different spaces"),
        (["english", "python", "--how", "sauce", "--handover", "pre"], "root mean square 1"),
        (["english", "python", "--how", "stitch", "--how", "sauce"], "no stitch before it"),
        (["english", "python", "--how", "stitch", "--handover", "pre"], "norms"),
        (["english", "python", "--seq-len", "65"], "reads 64 tokens"),
        (["english", "python", "--scale", "2"], "only --handover scaled has a scale"),
    ],
)
def test_what_does_not_go_together_is_refused(weft: Weft, home: Path, line: list[str], words: str) -> None:
    write_all(home, ["english", "python"])
    write(home, "elsewhere", 4, of=space(9))
    answer = weft("compose", "plan", *line)
    assert answer.code != 0
    assert words in answer.err


def test_a_folder_without_a_control_is_not_told(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    weft("compose", "align", "english", "python", "--data", text, "--name", "both", *QUICK)
    shutil.rmtree(home / "composed" / "both" / "continued")
    answer = weft("compose", "evaluate", "both", "--data", text, "--no-monolith")
    assert answer.code == 2
    assert "lacks continued" in answer.err
    assert "lacks continued" in weft("compose", "list").err


def test_text_that_was_trained_on_tells_nothing(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    weft("compose", "align", "english", "python", "--data", text, "--name", "both", *QUICK)
    answer = weft("compose", "evaluate", "both", "--data", text, "--no-monolith")
    assert answer.code == 2
    assert "trained on" in answer.err
    answer = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt", "--monolith", "english")
    assert "a member of both itself" in answer.err


def test_what_a_member_took_is_counted_where_it_was_trained(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    how = "--how", "one-way", "--how", "joint", "--handover", "post"
    weft("compose", "align", "english", "python", "--data", text, "--name", "both", *how, *QUICK)
    folder = home / "composed" / "both"
    told = read(folder)
    lower, upper = (read_member(folder / name).origins[-1] for name in told.stack.members)
    assert (lower.tokens, upper.tokens) == (96, 192)  # 3 steps of 2 samples of 16 tokens: joint, and one-way as well
    assert lower.flops + upper.flops == pytest.approx(told.flops, abs=2)
    steps = read_member(folder / "continued").origins[-1].tokens / 32
    assert steps == round(steps)
    assert steps > 3


def test_a_training_reads_on_where_the_one_before_ended(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(home, ["english", "python"])
    drawn, windows_of = list[int](), stacks_descent.windows

    def windows(*given: object) -> object:
        draw = windows_of(*given)  # type: ignore[arg-type]
        return lambda number: drawn.append(number) or draw(number)

    monkeypatch.setattr(stacks_descent, "windows", windows)
    weft(
        "compose",
        "align",
        "english",
        "python",
        "--data",
        text,
        "--name",
        "both",
        "--how",
        "one-way",
        "--how",
        "joint",
        *QUICK,
    )
    assert drawn[:12] == [0, 1, 2, 3, 4, 5] * 2
    assert drawn[12:] == list(range(len(drawn) - 12))


@pytest.mark.parametrize("name", ["continued", "mixture", "stack.1"])
def test_members_are_not_called_as_what_is_made(weft: Weft, home: Path, name: str) -> None:
    write_all(home, ["english", name])
    assert "Give the member another name" in weft("compose", "plan", "english", name).err


def test_ways_are_done_from_below_where_a_member_reads_and_from_above_where_it_writes() -> None:
    training = DescentConfig(steps=5, warmup_steps=1)
    found: tuple[AlignConfig, ...] = ways_of(["stitch", "one-way", "sauce", "joint"], 3, training)
    assert [each.seam for each in found if isinstance(each, StitchConfig)] == [0, 1]
    assert [each.member for each in found if isinstance(each, OnewayConfig)] == [1, 2]
    assert [each.member for each in found if isinstance(each, SauceConfig)] == [1, 0]
    assert len(found) == 7
