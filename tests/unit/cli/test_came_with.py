"""What came with a Hugging Face folder goes out with an export again, whoever exports, and transformers reads it."""

import json
import shutil
import warnings
from pathlib import Path

import msgspec
import pytest

from unit.cli.small import RUN, TEXT, Weft
from unit.model.test_came_with import TEMPLATE
from unit.peer.crew import Crew
from weft.config import load
from weft.data.packing import JsonConfig
from weft.data.tokenizer import ByteTokenizer
from weft.ids import PeerId
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.weights import write_folder
from weft.run.config import FolderModel, RunFile
from weft.run.genesis import Sealed, seal
from weft.run.outline import public, read_outline
from weft.store.home import Home
from weft.wire import encode

SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "model_max_length": 77,
}
IDS = {"bos_token_id": 256, "eos_token_id": [256, 10], "pad_token_id": 256}
TEXTS = {
    "tokenizer_config.json": json.dumps(SETTINGS),
    "chat_template.jinja": TEMPLATE,
    "generation_config.json": json.dumps({"temperature": 0.6, "do_sample": True, "eos_token_id": [256, 10]}),
    "LICENSE": "Some licence\n",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as one downloads it."""
    folder, config = (
        tmp_path / "theirs",
        ModelConfig(vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=16, ffn_width=32, max_seq_len=32),
    )
    write_folder(folder, config, initial_vector(config, 3), ByteTokenizer().to_json())
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | IDS))
    return folder


def has_all(folder: Path) -> None:
    for name, text in TEXTS.items():
        assert (folder / name).read_text() == text, name
    tree = json.loads((folder / "config.json").read_text())
    assert {name: tree[name] for name in IDS} == IDS


def sealed(tmp_path: Path, home: str = "maker") -> Sealed:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(RUN)
    run_file = load(tmp_path / "run.toml", RunFile)
    folder = {"model": FolderModel(path="theirs"), "tokenizer": JsonConfig(path="theirs")}
    return seal(msgspec.structs.replace(run_file, **folder), tmp_path, Home(tmp_path / home), lambda event: None)


def test_a_folder_that_is_no_run_is_exported_with_all(weft: Weft, source: Path, tmp_path: Path) -> None:
    assert weft("export", source, tmp_path / "out").code == 0
    has_all(tmp_path / "out")
    line = "beside      LICENSE, chat_template.jinja, generation_config.json, tokenizer_config.json"
    assert line in weft("inspect", source).out
    assert line in weft("inspect", tmp_path / "out").out


def test_what_stays_behind_is_said(weft: Weft, source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").write_text("[]")
    answer = weft("export", source, tmp_path / "out")
    assert answer.code == 0
    assert "generation_config.json is left out: it is not a JSON object" in answer.err


@pytest.mark.usefixtures("source")
def test_a_run_names_what_came_and_anybody_in_it_may_have_it(tmp_path: Path) -> None:
    made = sealed(tmp_path)
    run, name, home = made.config.run, made.config.came_with, Home(tmp_path / "maker")
    assert isinstance(name, str)
    for described in (made.config, read_outline(encode(made.config), run)):  # an anchor's is an outline
        assert public(described, run, home)(PeerId("ab" * 32), name) == made.came_with
    assert sealed(tmp_path, "again").config.run == made.config.run


def test_a_run_with_which_nothing_came_is_named_as_before(tmp_path: Path, source: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(RUN)
    made = seal(load(tmp_path / "run.toml", RunFile), tmp_path, Home(tmp_path / "maker"), lambda event: None)
    assert made.came_with == b""
    assert "came_with" not in msgspec.to_builtins(made.config)
    assert source.is_dir()


@pytest.mark.full
async def test_a_newcomers_copied_checkpoint_exports_what_came_and_transformers_reads_it(
    weft: Weft, source: Path, tmp_path: Path
) -> None:
    crew = Crew(
        tmp_path, num_peers=2, num_rounds=2, model=FolderModel(path="theirs"), tokenizer=JsonConfig(path="theirs")
    )
    async with crew.deadline():
        outcomes = await crew.done(crew.found("a", wait_for=2), crew.join("b"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import transformers

    def said(folder: Path) -> tuple[str, list[int], str, int]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        chat = [{"role": "user", "content": "warp"}, {"role": "assistant", "content": "weft"}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        return text, ids, tokenizer.bos_token, tokenizer.model_max_length

    shutil.copytree(outcomes[1].checkpoint, tmp_path / "copied")
    before = said(source)
    shutil.rmtree(source)  # a newcomer has never had it
    assert "beside      LICENSE, chat_template.jinja" in weft("inspect", tmp_path / "copied").out
    assert weft("export", tmp_path / "copied", tmp_path / "out").code == 0
    has_all(tmp_path / "out")
    assert before[0] == "<|user|>warp<|assistant|>weft"
    assert said(tmp_path / "out") == before
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.bos_token_id == 256
    assert model.generation_config.temperature == 0.6
    assert model.generation_config.eos_token_id == [256, 10]
