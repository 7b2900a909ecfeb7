"""A run file from what peers share makes the same run, to its name."""

from math import inf
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from unit.cli.small import RUN, TEXT
from weft.config import dump, idle, leaves, load, load_tree
from weft.data.corpus import BinSource, ConversationsSource, CorpusConfig, TextSource
from weft.data.packing import JsonConfig
from weft.model.weights import write_folder
from weft.pipeline.codec.activations import LplrConfig
from weft.pipeline.config import PipelineConfig
from weft.run.amend import MODEL, TOKENIZER, run_file_of, text_of, without_places
from weft.run.config import FolderModel, RunConfig, RunFile, SizedModel
from weft.run.genesis import initial, seal
from weft.run.idle import without_effect
from weft.run.outline import OpenAdmission
from weft.run.staged import StagedConfig
from weft.run.trust import FEWEST, AuditedTrust
from weft.store.home import Home
from weft.sync.method.choices import Choices
from weft.sync.method.presets import DiLoCoConfig, FedAvgConfig, MethodConfig, NoLoCoConfig
from weft.sync.records.messages import MAX_GROUP


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(RUN)
    return load(tmp_path / "run.toml", RunFile)


def sealed(file: RunFile, base: Path, home: str) -> RunConfig:
    return seal(file, base, Home(base / home), lambda event: None).config


PRESETS = [kind for kind in get_args(MethodConfig) if kind is not Choices]
STAGED = {"stages": 2, "pipeline": PipelineConfig(micro_batch=2, activations=LplrConfig())}


def repeated(once: RunConfig, run_file: RunFile, base: Path) -> RunConfig:
    """Return what the file of a run makes elsewhere, once somebody has named the text."""
    again = base / "again.toml"
    again.write_text(text_of(run_file_of(once, num_peers=2)))
    return sealed(msgspec.structs.replace(load(again, RunFile), data=run_file.data), base, "two")


@pytest.mark.parametrize("preset", PRESETS, ids=lambda kind: kind.__struct_config__.tag)
def test_the_file_of_a_run_makes_the_same_run(tmp_path: Path, run_file: RunFile, preset: type) -> None:
    once = sealed(msgspec.structs.replace(run_file, method=preset(), peers=3), tmp_path, "one")
    assert run_file_of(once, num_peers=2).run == once.run
    assert repeated(once, run_file, tmp_path).run == once.run


@pytest.mark.parametrize("others", [{}, STAGED], ids=["whole", "stages"])
def test_so_it_does_for_a_model_by_name_and_settings_that_are_not_usual(
    tmp_path: Path, run_file: RunFile, others: dict[str, Any]
) -> None:
    asked = msgspec.structs.replace(
        run_file,
        model=SizedModel(size="nano"),
        train=msgspec.structs.replace(run_file.train, clip=inf, sample_prompt='a "quoted" \u2603'),
        admission=OpenAdmission(),
        orphan_after_s=7.5,
        has_even_leases=True,
        electors=5,
        **others,
    )
    once = sealed(asked, tmp_path, "one")
    assert isinstance(once, StagedConfig) == bool(others)
    assert repeated(once, run_file, tmp_path).run == once.run


@pytest.mark.parametrize(
    "others",
    [{}, {"model": SizedModel(size="nano"), **STAGED}, {"method": NoLoCoConfig()}, {"method": FedAvgConfig()}],
    ids=["diloco", "stages", "noloco", "fedavg"],
)
def test_the_file_of_a_run_has_no_field_that_does_nothing_but_those_that_name_the_run(
    tmp_path: Path, run_file: RunFile, others: dict[str, Any]
) -> None:
    file = run_file_of(sealed(msgspec.structs.replace(run_file, **others), tmp_path, "one"), num_peers=2)
    again = tmp_path / "again.toml"
    again.write_text(text_of(file))
    assert load(again, RunFile) == file
    named = [name for names in idle(dict(leaves(load_tree(again))), without_effect(file)).values() for name in names]
    assert named == []
    own = msgspec.structs.replace(file, train=msgspec.structs.replace(file.train, sample_prompt="Once"))
    again.write_text(text_of(own))
    assert load(again, RunFile) == own


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("text", "text"),
        ("texts/*.txt", "texts/*.txt"),
        ("/home/anna/texts", "texts"),
        ("/home/anna/texts/**/*.py", "*.py"),
        ("../texts", "texts"),
        ("..", "here"),
        ("~/texts", "texts"),
        ("/", "here"),
        ("C:\\Users\\anna\\texts", "texts"),
        ("\\\\server\\share\\texts", "texts"),
    ],
)
def test_a_path_that_leads_elsewhere_tells_nothing_of_the_machine(run_file: RunFile, path: str, named: str) -> None:
    asked = msgspec.structs.replace(run_file, data=CorpusConfig(source=TextSource(paths=("own", path))))
    found, moved = without_places(asked)
    assert found == msgspec.structs.replace(asked, data=CorpusConfig(source=TextSource(paths=("own", named))))
    assert moved == (() if path == named else (named,))
    asked = msgspec.structs.replace(
        run_file,
        model=FolderModel(path=path),
        tokenizer=JsonConfig(path=path),
        data=CorpusConfig(source=BinSource(path=path, heldout_path="own")),
    )
    found, _ = without_places(asked)
    assert (found.model, found.tokenizer) == (FolderModel(path=named), JsonConfig(path=named))
    assert found.data.source == BinSource(path=named, heldout_path="own")
    chats = CorpusConfig(source=ConversationsSource(paths=("own",), template=path))
    found, _ = without_places(msgspec.structs.replace(run_file, data=chats))
    assert found.data.source == ConversationsSource(paths=("own",), template=named)


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


@pytest.mark.parametrize(("there", "expected"), [(1, FEWEST), (2, FEWEST), (4, 4), (70, 5)])
def test_the_file_of_a_run_that_audits_names_as_many_peers_as_can(
    run_file: RunFile, tmp_path: Path, there: int, expected: int
) -> None:
    once = sealed(msgspec.structs.replace(run_file, trust=AuditedTrust(), peers=4, electors=5), tmp_path, "one")
    assert run_file_of(once, num_peers=there).peers == expected


def test_more_peers_than_a_graph_has_room_for_and_the_run_before_it(run_file: RunFile, tmp_path: Path) -> None:
    before = "ab" * 32
    asked = msgspec.structs.replace(run_file, method=NoLoCoConfig(), electors=3, predecessor=before)
    once = sealed(asked, tmp_path, "one")
    found = run_file_of(once, num_peers=70)
    assert (found.peers, found.predecessor) == (3, before)
    many = sealed(msgspec.structs.replace(asked, method=DiLoCoConfig()), tmp_path, "one")
    assert run_file_of(many, num_peers=70).peers == 70
    assert run_file_of(many, num_peers=1000).peers == 3 * MAX_GROUP
