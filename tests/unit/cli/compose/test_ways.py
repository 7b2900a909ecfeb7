"""What a stack is asked to be, from the command line: cuts, scales, exits, rounds, and what else it is told beside."""

import json
from pathlib import Path

import pytest

from unit.cli.compose.made import FLOPS, write_all
from unit.cli.small import TEXT, Weft
from weft.compose.composed import Stacked, read_composed
from weft.compose.making import Tuned, ways_of
from weft.compose.member import read_member
from weft.compose.stacks.align import JointConfig
from weft.compose.stacks.sauce import SauceConfig
from weft.compose.stacks.stack import ScaledConfig
from weft.model.weights import read_folder

QUICK = "--steps", "2", "--batch-size", "2", "--seq-len", "16"


@pytest.fixture
def text(home: Path, tmp_path: Path) -> Path:
    write_all(home, ["a", "b", "c"], num_layers=2)
    (tmp_path / "other.txt").write_text("class A:\n    pass\n" * 60)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def read(home: Path, name: str) -> Stacked:
    found = read_composed(home / "composed" / name)
    assert isinstance(found, Stacked)
    return found


def test_a_stack_is_told_beside_copies_and_depth_where_they_are_asked_for(weft: Weft, home: Path, text: Path) -> None:
    line = ("compose", "align", "a", "b", "--data", text, *QUICK)
    grown = ("--growth", "depth", "--growth", "copy", "--growth", "copy")
    assert weft(*line, "--name", "plain").code == 0
    assert weft(*line, *grown, "--name", "both").code == 0
    folder, told = home / "composed" / "both", read(home, "both")
    assert read(home, "plain").growth == ()
    assert [(each.how, each.stack.members) for each in told.growth] == [
        ("depth", ("a", "depth.1")),
        ("copy", ("a", "copy.1")),
    ]
    for name, how in (("depth.1", "depth up-scaling"), ("copy.1", "copy")):
        last = read_member(folder / name).origins[-1]
        assert (last.how, last.of, last.tokens) == (how, (read_member(folder / "a").weights,), 2 * 2 * 16)
    # what the stack is does not depend on what else it is told beside
    for name in ("stack.1", "identity.1", "continued"):
        assert read_folder(folder / name)[1].equal(read_folder(home / "composed" / "plain" / name)[1])
    said = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt", "--no-monolith", "--json")
    found = json.loads(said.out)["controls"]
    assert [*found] == [
        "best single", "ensemble", "identity", "depth up-scaling", "copy", "continued", "monolith",
    ]  # fmt: skip
    assert found["copy"]["flops"] == FLOPS + told.flops  # members are alike, so copies take as much
    assert found["depth up-scaling"]["flops"] < found["copy"]["flops"]
    assert found["copy"]["loss"] != found["identity"]["loss"]
    people = weft("compose", "evaluate", "both", "--data", text.parent / "other.txt", "--no-monolith").out
    assert "copies of the lowest, trained alike" in people
    planned = weft("compose", "plan", "a", "b", *grown, *QUICK).out
    assert f"by copy    {told.flops:.3g} operations more" in planned
    write_all(home, ["copy.1"])
    assert "Give the member another name" in weft("compose", "plan", "a", "copy.1", *QUICK).err


def test_what_cannot_be_grown_is_said_before_anything_is_trained(weft: Weft, home: Path, text: Path) -> None:
    answer = weft("compose", "align", "a", "b", "c", "--data", text, "--name", "x", "--growth", "depth", *QUICK)
    assert answer.code == 2
    assert "grow by a copy" in answer.err
    assert not list((home / "composed").glob("*"))


def test_cuts_and_scales_are_one_for_all_or_one_for_each_place(weft: Weft, home: Path, text: Path) -> None:
    line = ("compose", "align", "a", "b", "c", "--data", text, *QUICK)
    how = ("--handover", "scaled", "--scale", "2", "--scale", "4", "--cut-last", "1")
    answer = weft(*line, *how, "--cut-first", "1", "--cut-first", "0", "--name", "stack")
    assert answer.code == 2
    assert "member 1 has 2 layers, and all are cut off" in answer.err
    answer = weft("compose", "align", "a", "b", "--data", text, *QUICK, *how[:2], "--cut-last", "1", "--name", "two")
    assert answer.code == 0, answer.err
    assert [(each.handover, each.cut_last, each.cut_first) for each in read(home, "two").stack.seams] == [
        (ScaledConfig(alpha=1.0), 1, 0)
    ]
    assert weft(*line, *how, "--cut-first", "0", "--cut-first", "1", "--name", "stack").code == 0
    assert [(each.handover, each.cut_last, each.cut_first) for each in read(home, "stack").stack.seams] == [
        (ScaledConfig(alpha=2.0), 1, 0),
        (ScaledConfig(alpha=4.0), 1, 1),
    ]
    answer = weft("compose", "plan", "a", "b", *how[:6], *QUICK)
    assert "--scale: 2 values, and there is 1 place between 2 members" in answer.err
    # a decoder lacks the layers that were left out
    assert weft("compose", "align", "a", "b", "--data", text, *QUICK, *CUT, "--name", "one").code == 0
    assert weft("compose", "export", "one", text.parent / "folder").code == 0
    assert read_folder(text.parent / "folder")[0].num_layers == 3


CUT = "--handover", "pre", "--how", "joint", "--cut-first", "1"


def test_joint_and_sauce_take_what_they_are_told(weft: Weft, home: Path, text: Path) -> None:
    line = ("compose", "align", "a", "b", "--data", text, *QUICK, "--handover", "post")
    how = ("--how", "sauce", "--eta", "0.25", "--per-round", "1", "--how", "joint", "--exits", "all")
    assert weft(*line, *how, "--name", "told").code == 0
    sauce, joint = read(home, "told").how
    assert isinstance(sauce, SauceConfig)
    assert isinstance(joint, JointConfig)
    assert (sauce.eta, sauce.per_round, joint.exits) == (0.25, 1, "all")
    training = sauce.training
    assert ways_of(["sauce"], 2, training) == (SauceConfig(training=training, member=0),)
    assert ways_of(["sauce"], 2, training, Tuned(eta=2.0)) == (SauceConfig(training=training, eta=2.0),)


def test_what_is_selected_can_be_trained_as_it_was_told(weft: Weft, home: Path, text: Path) -> None:
    answer = weft("compose", "select", "a", "b", "--data", text, "--seq-len", "16")
    line = answer.err.partition("its controls: weft ")[2].split()
    assert "--scale" in line
    given = [{"TEXT": str(text), "NEW": "both"}.get(word, word) for word in line]
    assert weft(*given, *QUICK).code == 0
    (seam,) = read(home, "both").stack.seams
    assert seam.handover == ScaledConfig(alpha=float(line[line.index("--scale") + 1]))
