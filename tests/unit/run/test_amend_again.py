"""A run file from what peers share makes the same run, to its name."""

from pathlib import Path

import msgspec
import pytest

from unit.cli.small import RUN, TEXT
from weft.config import dump, load
from weft.model.weights import write_folder
from weft.run.amend import MODEL, TOKENIZER, run_file_of
from weft.run.config import FolderModel, RunConfig, RunFile, SizedModel
from weft.run.genesis import initial, seal
from weft.store.home import Home
from weft.sync.method.presets import DiLoCoConfig, NoLoCoConfig, SparseLoCoConfig, StreamingConfig
from weft.sync.records.messages import MAX_GROUP


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(RUN)
    return load(tmp_path / "run.toml", RunFile)


def sealed(file: RunFile, base: Path, home: str) -> RunConfig:
    return seal(file, base, Home(base / home), lambda event: None).config


@pytest.mark.parametrize("method", [DiLoCoConfig(), SparseLoCoConfig(), StreamingConfig()], ids=lambda each: type(each))
@pytest.mark.parametrize("model", [None, SizedModel(size="nano")], ids=["shape", "size"])
def test_the_file_of_a_run_makes_the_same_run(
    tmp_path: Path, run_file: RunFile, method: DiLoCoConfig, model: SizedModel | None
) -> None:
    asked = msgspec.structs.replace(run_file, method=method, model=model or run_file.model)
    once = sealed(asked, tmp_path, "one")
    again = tmp_path / "again.toml"
    again.write_text(dump(run_file_of(once, num_peers=2)))
    found = msgspec.structs.replace(load(again, RunFile), data=run_file.data)  # whoever repeats it names the text
    assert sealed(found, tmp_path, "two").run == once.run


def test_a_model_of_a_folder_is_that_of_an_export(tmp_path: Path, run_file: RunFile) -> None:
    made = seal(run_file, tmp_path, Home(tmp_path / "one"), lambda event: None)
    vector, tokenizer = initial(made.config, Home(tmp_path / "one")), made.tokenizer
    assert vector is not None
    write_folder(tmp_path / MODEL, made.config.model, vector, tokenizer.to_json(), stop_id=tokenizer.end_of_text)
    once = sealed(msgspec.structs.replace(run_file, model=FolderModel(path=MODEL)), tmp_path, "one")
    found = run_file_of(once, num_peers=2)
    assert found.model == FolderModel(path=MODEL)
    assert sealed(msgspec.structs.replace(found, data=run_file.data), tmp_path, "two").run == once.run


def test_another_tokenizer_is_named_by_its_file(run_file: RunFile, tmp_path: Path) -> None:
    once = sealed(run_file, tmp_path, "one")
    other = msgspec.structs.replace(once, data=msgspec.structs.replace(once.data, tokenizer=once.initial))
    assert TOKENIZER in dump(run_file_of(other, num_peers=2))


def test_more_peers_than_a_graph_has_room_for_and_the_run_before_it(run_file: RunFile, tmp_path: Path) -> None:
    before = "ab" * 32
    asked = msgspec.structs.replace(run_file, method=NoLoCoConfig(), electors=3, predecessor=before)
    once = sealed(asked, tmp_path, "one")
    found = run_file_of(once, num_peers=70)
    assert (found.peers, found.predecessor) == (3, before)
    many = sealed(msgspec.structs.replace(asked, method=DiLoCoConfig()), tmp_path, "one")
    assert run_file_of(many, num_peers=70).peers == 70
    assert run_file_of(many, num_peers=1000).peers == 3 * MAX_GROUP
