"""`weft compose block | blocks`: members that become blocks, each alone, and what these are worth together."""

import json
from pathlib import Path

import pytest

from unit.cli.compose.made import FLOPS, write, write_all
from unit.cli.small import TEXT, Weft
from weft.compose.blocks.kept import BLOCK
from weft.compose.member import read_member
from weft.model.weights import read_folder

QUICK = "--steps", "3", "--batch-size", "2", "--seq-len", "16"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    return tmp_path / "text.txt"


def made(weft: Weft, text: Path, member: str, number: int, name: str, *more: str) -> None:
    line = ("compose", "block", member, number, "--of", "2", "--data", text, "--name", name, *QUICK, *more)
    answer = weft(*map(str, line))
    assert answer.code == 0, answer.err


def test_a_member_that_became_a_block_says_so_and_is_still_a_decoder(weft: Weft, home: Path, text: Path) -> None:
    before = write(home, "python", 1)
    answer = weft("compose", "block", "python", "1", "--of", "2", "--data", text, "--name", "b1", *QUICK)
    folder = home / "members" / "b1"
    assert (answer.code, answer.out) == (0, f"{folder}\n"), answer.err
    block = read_member(folder)
    assert (block.latents, block.space, block.parent) == ("noise", before.space, before.parent)
    assert (block.origins[-1].of, block.origins[-1].tokens) == ((before.weights,), 3 * 2 * 16)
    assert block.flops > FLOPS
    assert not read_folder(folder)[1].equal(read_folder(home / "members" / "python")[1])
    assert "block 1 of 2, at its own noise" in answer.err
    assert "weft compose blocks BLOCK0 b1 --data TEXT" in answer.err
    assert weft("eval", "b1", "--data", text).code == 0
    assert weft("compose", "member", "b1", "--name", "b1-here").code == 0
    assert (home / "members" / "b1-here" / BLOCK).read_bytes() == (folder / BLOCK).read_bytes()
    # trained on as a causal member, it tells nothing by noise any more
    assert weft("compose", "loop", "b1", "--data", text, "--name", "looped", *QUICK).code == 0
    assert read_member(home / "members" / "looped").latents == "same"
    assert not (home / "members" / "looped" / BLOCK).exists()


def test_blocks_are_told_in_the_order_of_their_noise_beside_each_alone(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python", "whole"])
    made(weft, text, "english", 0, "b0")
    made(weft, text, "python", 1, "b1")
    line = ("compose", "blocks", "b1", "b0", "--data", text.parent / "other.txt", "--seq-len", "16", "--draws", "2")
    found = json.loads(weft(*line, "--json", "--monolith", "whole").out)
    assert list(found) == [
        "b0 > b1, by 2 draws of noise",
        "the same by one draw",
        "by one draw, after b0",
        "b0 alone, its layers as a decoder",
        "b1 alone, its layers as a decoder",
        "these asked together, alike",
        "whole, trained whole",
    ]
    people = weft(*line)
    for losses in [*found.values()][:-1]:
        assert f"{losses:.3f} nats a token" in people.out
    assert "--monolith" in people.err
    again = json.loads(weft(*line, "--json", "--seed", "9").out)
    assert again["the same by one draw"] != found["the same by one draw"]
    assert "the same by one draw" not in json.loads(weft(*line[:-1], "1", "--json").out)


def test_what_is_no_block_or_no_whole_cut_is_refused(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["english", "python"])
    made(weft, text, "english", 0, "b0")
    made(weft, text, "python", 1, "b1", "--low", "0.5")
    made(weft, text, "python", 0, "c0")
    for members, why in (
        (("b0", "english"), "english is no block"),
        (("b0", "c0"), "give each block of one cut once"),
        (("b0", "b1"), "other noise levels"),
    ):
        answer = weft("compose", "blocks", *members, "--data", text, "--seq-len", "16")
        assert (answer.code, why in answer.err) == (2, True), answer.err
    line = ("--data", text, "--name", "x", *QUICK)
    assert "numbered from 0 to 1" in weft("compose", "block", "english", "2", "--of", "2", *line).err
    noise = weft("compose", "block", "english", "0", "--of", "2", "--low", "3", "--high", "2", *line)
    assert (noise.code, "not below" in noise.err) == (2, True), noise.err
    (home / "members" / "b0" / BLOCK).unlink()
    answer = weft("compose", "blocks", "b0", "b1", "--data", text, "--seq-len", "16")
    assert (answer.code, f"it has no {BLOCK}" in answer.err) == (2, True), answer.err
