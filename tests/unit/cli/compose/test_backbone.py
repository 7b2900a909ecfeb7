"""A run in a space that begins with the layers of a member, so that several may grow from one."""

import tomllib
from dataclasses import replace as changed
from pathlib import Path

import pytest
from msgspec.structs import replace

from unit.cli.compose.made import WORDS, space, write
from unit.cli.small import RUN, Kept, Weft, as_trained, saved
from weft.cli.compose.described import parent_of
from weft.cli.doctor import fit
from weft.cli.own.after import learnt, run_file_after, say_made
from weft.cli.plan import serving
from weft.compose.member import MEMBER, flops_together, read_member, require_one_parent
from weft.compose.space import write_space
from weft.config import from_tree
from weft.errors import ConfigError, NoSuchRun
from weft.ids import Digest, short
from weft.launch.fetch import lacks_first_weights, take_model
from weft.launch.kept import begins_elsewhere
from weft.model.flat import ends_within, layers_within, plain_vector
from weft.model.weights import read_folder, write_json
from weft.peer.state.checkpoint import load, save
from weft.run.amend import run_file_of
from weft.run.config import RunConfig, RunFile, SpaceModel
from weft.run.frozen import base_of
from weft.run.genesis import initial, resolve, seal
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.store.home import Home

SHAPE = RUN[RUN.index("[model]") : RUN.index("[data")]
MODEL = '[model]\ntype = "space"\npath = "space"\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home with a member that has learnt something, beside the space that it is of."""
    place = tmp_path / "home"
    write_space(tmp_path / "space", space(), WORDS)
    member = write(place, "english", 7, num_layers=2)
    origin = replace(member.origins[0], made=member.weights)
    write_json(place / "members" / "english" / MEMBER, replace(member, origins=(origin,)))
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    return place


def text_of(model: str, top: str = "") -> str:
    return top + RUN.replace(SHAPE, MODEL + model)


def begun(home: Path, model: str, name: str = "run", top: str = "") -> Kept:
    file = home.parent / f"{name}.toml"
    file.write_text(text_of(model, top))
    return saved(file, home)


def described(model: str, top: str = "") -> RunFile:
    found: RunFile = from_tree(tomllib.loads(text_of(model, top)), RunFile, where="run.toml")
    return found


def sealed(home: Path, model: str, top: str = "") -> RunConfig:
    return seal(described(model, top), home.parent, Home(home), lambda _event: None).config


@pytest.mark.parametrize("given", ["english", "carried"])
def test_a_run_begins_with_the_layers_of_a_member(home: Path, weft: Weft, given: str) -> None:
    assert weft("compose", "member", "english", "--to", home.parent / "carried").code == 0
    run = begun(home, f'member = "{given}"\n').run
    _, whole = read_folder(home / "members" / "english")
    assert (run.is_seeded, run.model.num_layers, run.model.has_frozen_ends) == (False, 2, True)
    vector, ends = initial(run, Home(home)), base_of(run, Home(home))
    assert vector is not None
    assert ends is not None
    assert vector.equal(layers_within(run.model, whole))
    assert ends.equal(ends_within(run.model, whole))
    assert plain_vector(run.model, ends, vector).equal(whole)
    other = Home(home.parent / "other")
    assert lacks_first_weights(run, other), "who joins is sent them"
    take_model(run, home / "members" / "english", other)
    found = initial(run, other)
    assert found is not None
    assert found.equal(vector)
    assert base_of(run, other) is not None
    assert run_file_of(run, 1).model == SpaceModel(path="space", member="model")


def test_runs_that_begin_with_other_members_are_others(home: Path) -> None:
    write(home, "python", 8, num_layers=2)
    one, other = (begun(home, f'member = "{name}"\n').run for name in ("english", "python"))
    seeded = begun(home, "num_layers = 2\nnum_heads = 2\nffn_width = 32\n").run
    assert one.initial != other.initial
    assert begins_elsewhere(one, other)
    assert begins_elsewhere(seeded, other)
    assert not begins_elsewhere(one, one)
    assert seeded.is_seeded
    with pytest.raises(ConfigError, match="its weights are not those that the run began with"):
        take_model(one, home / "members" / "python", Home(home.parent / "third"))


def test_a_run_after_one_in_a_space_stays_in_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = begun(home, 'member = "english"\n')
    as_trained(kept.folder, 2, 1, tokens=160)
    snapshot = load(kept.folder)
    moved = 1.1 * snapshot.replicated["outer"]
    save(kept.folder, changed(snapshot, replicated={"outer": moved}))
    before = learnt(kept.run.run, home)
    path, _, is_made = run_file_after(home.parent / "run.toml", [], before, is_new=False)
    assert is_made
    assert run_file_after(home.parent / "run.toml", [], before, is_new=False)[0] == path
    run = saved(path, home).run
    assert (run.model, run.predecessor) == (kept.run.model, kept.run.run)
    vector = initial(run, Home(home))
    assert vector is not None
    assert vector.equal(moved)
    assert "is of no space" not in capsys.readouterr().err
    say_made(write_plain(home.parent / "text-2.toml"), "text-2", before)
    assert "its model is of no space" in capsys.readouterr().err


def write_plain(path: Path) -> Path:
    path.write_text(RUN)
    return path


def test_members_of_one_backbone_say_so(home: Path, weft: Weft) -> None:
    backbone, made = read_member(home / "members" / "english"), []
    for number, name in enumerate(("one", "other")):
        kept = begun(home, 'member = "english"\n', name, f"seed = {number}\n")
        as_trained(kept.folder, 2, 1, tokens=160)
        snapshot = load(kept.folder)
        save(kept.folder, changed(snapshot, replicated={"outer": (1.1 + number) * snapshot.replicated["outer"]}))
        answer = weft("compose", "member", kept.folder, "--name", name)
        assert "its run began with english: what that took counts" in answer.err
        made.append(read_member(home / "members" / name))
    for number, member in enumerate(made):
        assert (member.parent, member.seed, member.is_seeded) == (backbone.weights, number, False)
        assert member.space == backbone.space
        assert member.origins[0] == backbone.origins[0]
        assert (len(member.origins), member.tokens) == (2, 1160)
    require_one_parent(made)
    assert flops_together(made) == sum(each.flops for each in made) - backbone.flops
    assert f"from {short(backbone.weights)}" in weft("compose", "list").out


def test_in_stages_it_is_the_same_beginning(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = begun(home, 'member = "english"\n').run
    run = sealed(home, 'member = "english"\n', "stages = 2\n")
    assert isinstance(run, StagedConfig)
    assert parent_of(run, home) == parent_of(whole, home) == read_member(home / "members" / "english").weights
    assert capsys.readouterr().err == ""
    other = Home(home.parent / "other")
    for stage in range(2):
        assert lacks_first_weights(run.of_stage(stage), other)
    take_model(run, home / "members" / "english", other)
    assert parent_of(run, other.root) == parent_of(whole, home)
    (other.blobs.folder / run.initials[1]).unlink()
    assert parent_of(run, other.root) == run.initial
    assert "not here in one piece" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ('member = "english"\nnum_layers = 3\n', "num_layers is 3, and the member english has 2. .*leave it out"),
        ('member = "english"\nhas_qk_norm = true\n', "has_qk_norm is True, and the member english has False"),
        ('member = "stranger"\n', "stranger is of another space than space: its embedding, norm or head"),
        ('member = "altered"\n', "one of them was altered"),
        ('member = "nobody"\n', "'nobody' is no member"),
        (
            "num_layers = 2\n",
            "num_heads, ffn_width: required where layers are made from the seed. Give them, or member",
        ),
    ],
)
def test_what_cannot_begin_so_is_refused(home: Path, model: str, words: str) -> None:
    write(home, "stranger", 1, of=space(seed=4))
    told = write(home, "altered", 2)
    write_json(home / "members" / "altered" / MEMBER, replace(told, weights=Digest("cd" * 32)))
    with pytest.raises((ConfigError, NoSuchRun), match=words):
        sealed(home, model)
    assert not [file for file in Home(home).shards.folder.glob("*") if file.is_file()], "no text was packed before that"


def test_a_folder_is_sought_beside_the_run_file_alone(
    home: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(home, "python", 8, num_layers=2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert weft("compose", "member", "python", "--to", "english").code == 0
    run = begun(home, 'member = "english"\n').run
    _, whole = read_folder(home / "members" / "english")
    found = initial(run, Home(home))
    assert found is not None
    assert found.equal(layers_within(run.model, whole))


def test_plans_find_a_member_by_name_as_training_does(home: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.doctor.fit.usual_s", lambda _step, **_how: 0.1)
    file = home.parent / "run.toml"
    file.write_text(text_of('member = "english"\n'))
    answer = weft("plan", file, "--tokens-per-s", "1000")
    assert answer.code == 0, answer.err
    assert serving.of_run_file(file, (), home).config.num_layers == 2
    here = PeerConfig(device="cpu", threads=1)
    (found,) = [each for each in fit.of_run_file(file, home, here, 1e12) if each.topic == "fit"]
    assert found.level == "ok"


def test_a_plan_needs_no_member_where_its_shape_is_said(home: Path) -> None:
    shape = "num_layers = 2\nnum_heads = 2\nffn_width = 32\n"
    for given in ('member = "home/members/english"\n', f'member = "english"\n{shape}'):
        run_file = described(given)
        model = resolve(run_file, WORDS, home.parent)
        assert (model.num_layers, model.num_heads, model.ffn_width, model.has_frozen_ends) == (2, 2, 32, True)
    with pytest.raises(ConfigError, match=r"members are not found by name\. .*num_layers, num_heads, ffn_width"):
        resolve(described('member = "english"\n'), WORDS, home.parent)
