"""`weft compose`: spaces and members from the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from unit.cli.compose.made import write_all
from unit.cli.small import RUN, TEXT, Kept, Weft, as_trained, saved
from weft.compose.member import MEMBER, Member, TextOf, flops_together, read_member
from weft.compose.space import read_space
from weft.data.tokenizer import ByteTokenizer
from weft.ids import Digest
from weft.model.flat import assemble
from weft.model.weights import read_folder, write_json
from weft.peer.state.checkpoint import load, load_model, save
from weft.store.chunks import raw
from weft.wire import digest

SHARDS = [("few", "a"), ("most", "abcd"), ("other", "e")]


def test_a_space_has_the_ends_of_a_model(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    answer = weft("compose", "space", kept.folder, tmp_path / "space")
    assert (answer.code, answer.out) == (0, f"{tmp_path / 'space'}\n")
    space = read_space(tmp_path / "space")
    assert (space.vocab_size, space.width, space.tokenizer) == (257, 16, ByteTokenizer().digest)
    assert '[model] type = "space"' in answer.err
    run, _, vector = load_model(kept.folder)
    assert space.head.equal(assemble(run.model, vector).head_weight)  # the norm's gain is one
    assert weft("compose", "space", kept.folder, tmp_path / "space").err.count("exists") == 1
    assert weft("compose", "space", "nosuch", tmp_path / "other").code != 0


def test_a_member_says_how_it_came_to_be_and_is_a_folder_that_programs_load(
    weft: Weft, kept: Kept, tmp_path: Path, home: Path
) -> None:
    answer = weft("compose", "member", kept.folder, "--name", "english")
    folder = home / "members" / "english"
    assert (answer.code, answer.out) == (0, f"{folder}\n")
    member = read_member(folder)
    assert (member.run, member.parent, member.is_seeded) == (kept.run.run, kept.run.initial, True)
    assert [each.digest for each in member.texts] == [each.digest for each in kept.run.data.train]
    config, vector = read_folder(folder)
    assert config == member.model
    assert digest(raw(vector)) == member.weights
    assert member.heldout is not None
    said = weft("eval", kept.folder).out
    assert f"{member.heldout.loss:.3f}" in said
    assert weft("eval", folder, "--data", tmp_path / "text.txt").code == 0
    assert "exists" in weft("compose", "member", kept.folder, "--name", "english").err


def test_a_member_is_carried_to_another_machine_and_named_there(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    assert weft("compose", "member", kept.folder, "--to", tmp_path / "carried").code == 0
    assert weft("compose", "list").err == "0 members in this home\n"
    assert weft("compose", "member", tmp_path / "carried", "--name", "theirs").code == 0
    listed = weft("compose", "list")
    assert listed.out.startswith("theirs: ")
    assert listed.err == "1 member in this home\n"
    (found,) = json.loads(weft("compose", "list", "--json").out)["members"]
    before = read_member(tmp_path / "carried")
    assert msgspec.convert(found, Member) == msgspec.structs.replace(before, name="theirs")
    assert weft("compose", "remove", "theirs").code == 0
    assert weft("compose", "list").out == ""
    assert "'theirs' is no member of this home" in weft("compose", "remove", "theirs").err


def test_a_member_has_another_name_and_is_what_it_was(weft: Weft, kept: Kept, home: Path, tmp_path: Path) -> None:
    assert weft("compose", "member", kept.folder, "--name", "english").code == 0
    before = read_member(home / "members" / "english")
    assert weft("compose", "member", "english", "--name", "other").code == 0
    assert read_member(home / "members" / "other") == msgspec.structs.replace(before, name="other")
    assert weft("compose", "member", "other", "--to", tmp_path / "carried").code == 0
    assert read_member(tmp_path / "carried").run == kept.run.run
    assert "exists" in weft("compose", "member", "english").err


def test_what_the_beginning_of_a_run_took_counts_where_it_is_a_member(
    weft: Weft, kept: Kept, run_path: Path, home: Path
) -> None:
    as_trained(kept.folder, 3, 1, tokens=320)
    shape = RUN[RUN.index("[model]") : RUN.index("[data")]
    on = run_path.with_name("on.toml")
    assert weft("compose", "member", kept.folder, "--to", run_path.parent / "seed").code == 0
    on.write_text(RUN.replace(shape, f'[model]\ntype = "folder"\npath = "{run_path.parent / "seed"}"\n'))
    folder = saved(on, home).folder
    as_trained(folder, 2, 1, tokens=160)
    snapshot = load(folder)
    save(folder, replace(snapshot, replicated={"outer": 1.1 * snapshot.replicated["outer"]}))
    answer = weft("compose", "member", folder, "--name", "alone")
    assert "no member of this home: what that took is not counted" in answer.err
    assert read_member(home / "members" / "alone").tokens == 160
    assert weft("compose", "member", run_path.parent / "seed").code == 0
    assert "its run began with seed: what that took counts" in weft("compose", "member", folder, "--name", "on").err
    seed, member = (read_member(home / "members" / name) for name in ("seed", "on"))
    assert (member.parent, member.is_seeded) == (seed.weights, False)
    assert member.origins[:-1] == seed.origins
    assert (member.tokens, member.origins[-1].made) == (480, member.weights)
    assert flops_together([member, seed]) == member.flops  # what both have is counted once


@pytest.mark.parametrize("name", ["a b", "../x", "", "x" * 65])
def test_a_name_that_could_be_a_place_is_refused(weft: Weft, kept: Kept, name: str) -> None:
    answer = weft("compose", "member", kept.folder, "--name", name)
    assert answer.code == 2
    assert "a name has letters" in answer.err


def test_a_member_whose_weights_were_left_behind_is_refused(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    weft("compose", "member", kept.folder, "--to", tmp_path / "carried")
    (tmp_path / "carried" / "model.safetensors").unlink()
    assert "holds no weights" in weft("compose", "member", tmp_path / "carried").err
    (tmp_path / "carried" / "member.json").write_text("{}")
    assert "cannot be read" in weft("compose", "member", tmp_path / "carried").err


def test_members_whose_weights_are_others_are_refused_wherever_they_are_read(
    weft: Weft, home: Path, tmp_path: Path
) -> None:
    write_all(home, ["a", "b"])
    (tmp_path / "text.txt").write_text(TEXT)
    members = home / "members"
    shutil.copy(members / "a" / "model.safetensors", members / "b" / "model.safetensors")
    given = ("--data", tmp_path / "text.txt")
    short = ("--seq-len", "16")
    for line in (
        ("eval", "b", *given),
        ("compose", "select", "a", "b", *given, *short),
        ("compose", "align", "a", "b", *given, *short, "--name", "x"),
        ("compose", "mix", "a", "b", *given, *short, "--name", "x"),
        ("compose", "mix", "a", "b", *given, *short, "--name", "x", "--how", "soup"),
        ("compose", "merge", "a", "b", *given, *short, "--name", "x"),
        ("compose", "route", "b", tmp_path / "talk", *given, "--levels", "1"),
    ):
        answer = weft(*line)
        assert answer.code == 2, line
        assert "one of them was altered" in answer.err, line


def test_the_list_tells_what_a_member_has_learnt_to_read(weft: Weft, home: Path) -> None:
    learnt = {"denoise": "sees all of a text", "none": "", "previous": "wrote a token before", "same": "what it wrote"}
    for member in write_all(home, [*learnt]):
        write_json(home / "members" / member.name / MEMBER, msgspec.structs.replace(member, latents=member.name))
    for line, words in zip(weft("compose", "list").out.splitlines(), learnt.values(), strict=True):
        assert line.endswith(words)
    assert "reads" not in weft("compose", "list").out.splitlines()[1]


def test_the_list_tells_how_much_of_its_text_a_member_shares(weft: Weft, home: Path) -> None:
    texts = {name: tuple(TextOf(digest=Digest(each * 64), num_tokens=10) for each in has) for name, has in SHARDS}
    for member in write_all(home, [*texts, "silent"]):
        told = msgspec.structs.replace(member, texts=texts.get(member.name, ()))
        write_json(home / "members" / member.name / "member.json", told)
    said = weft("compose", "list").out.splitlines()
    assert said[0].endswith("; of its text it shares 100% with most")
    assert said[1].endswith("; of its text it shares 25% with few")
    assert "shares" not in said[2] + said[3]
    found = json.loads(weft("compose", "list", "--json").out)["overlaps"]
    assert found["few"] == {"most": 1.0, "other": 0.0}
    assert "silent" not in found
