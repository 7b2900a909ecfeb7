"""An adapter of a folder goes beside the model that it was trained beside, as far as anybody can tell."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from unit.chat.templates import CHATML
from unit.run.test_conversations import MODEL, sealed, write_chats
from weft.cli.model.trained import Adapter
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError
from weft.events import Event, Notice
from weft.model.config import AdapterConfig, num_parameters
from weft.model.initial import initial_vector
from weft.model.peft import CONFIG, write_adapter
from weft.model.weights import write_folder
from weft.run.frozen import base_of, name_of_base
from weft.store.home import Home

WITH = replace(MODEL, adapter=AdapterConfig(rank=2, alpha=4.0))
FOLDER = {"type": "folder", "path": "adapter"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with two models of one shape, and conversations."""
    torch.set_num_threads(1)
    for name, seed in (("model", 3), ("other", 4)):
        write_folder(tmp_path / name, MODEL, initial_vector(MODEL, seed), ByteTokenizer().to_json())
        (tmp_path / name / "chat_template.jinja").write_text(CHATML)
    write_chats(tmp_path / "chats.jsonl", 60)
    return tmp_path


def written(base: Path, **changes: Any) -> Adapter:
    """Write what a run with an adapter would export."""
    run = sealed(base, adapter={"type": "lora", "rank": 2, "alpha": 4.0}, **changes).config
    whole = base_of(run, Home(base / "home"))
    assert whole is not None
    adapter = Adapter(WITH, torch.ones(num_parameters(WITH)), name_of_base(run, whole))
    write_adapter(base / "adapter", *adapter)
    return adapter


def said(told: list[Event]) -> str:
    return " ".join(event.text for event in told if isinstance(event, Notice))


def test_beside_its_own_base_nothing_is_said(base: Path) -> None:
    written(base)
    told = list[Event]()
    sealed(base, told, adapter=FOLDER)
    assert "adapter" not in said(told)


def test_beside_another_model_of_the_same_shape_it_is_refused(base: Path) -> None:
    written(base)
    other = {"model": {"type": "folder", "path": "other"}, "tokenizer": {"type": "json", "path": "other"}}
    with pytest.raises(ConfigError, match=r"trained beside other weights .* than those of .*other .*model\.path"):
        sealed(base, adapter=FOLDER, **other)


def test_a_run_in_stages_names_the_same_base(base: Path) -> None:
    shutil.rmtree(base / "model")
    deep = replace(MODEL, num_layers=2)
    write_folder(base / "model", deep, initial_vector(deep, 3), ByteTokenizer().to_json())
    (base / "model" / "chat_template.jinja").write_text(CHATML)
    method = {"type": "fedavg"}
    runs = [sealed(base, adapter={"type": "lora", "rank": 2}, method=method, stages=stages).config for stages in (1, 2)]
    names = set()
    for run in runs:
        whole = base_of(run, Home(base / "home"))
        assert whole is not None
        names.add(name_of_base(run, whole))
    assert len(names) == 1


@pytest.mark.parametrize(
    ("named", "own", "expected"),
    [
        ("someone/small", "someone/small", ""),
        ("someone/small", "someone/small-chat", "names its base 'someone/small', and the model"),
        ("someone/small", None, "does not say its name"),
        ("", "someone/small", "does not name its base"),
    ],
)
def test_of_an_adapter_made_elsewhere_is_said_what_it_names(
    base: Path, named: str, own: str | None, expected: str
) -> None:
    write_adapter(base / "adapter", WITH, torch.ones(num_parameters(WITH)))
    for file, changes in (
        (base / "adapter" / CONFIG, {"base_model_name_or_path": named}),
        (base / "model/config.json", {}),
    ):
        tree = json.loads(file.read_text()) | changes
        file.write_text(json.dumps(tree | ({"_name_or_path": own} if file.name == "config.json" and own else {})))
    told = list[Event]()
    sealed(base, told, adapter=FOLDER)
    assert expected in said(told)
    assert bool(expected) == ("only names and shapes" in said(told))
