"""Every verb on a run that tunes an adapter on pairs of answers, or on conversations."""

import json
from pathlib import Path

import pytest

from unit.cli.small import Weft
from weft.config import load
from weft.data.tokenizer import ByteTokenizer
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.peft import read_adapter
from weft.model.weights import read_config, read_folder, write_folder
from weft.run.config import NewAdapter, RunFile

LOCAL = ("--host", "127.0.0.1", "--transports", "tls", "--device", "cpu", "--threads", "1", "--quiet")
SEQ_LEN = 96
MODEL = ModelConfig(
    vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=32, ffn_width=48, max_seq_len=SEQ_LEN
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
RUN = """
name = "NAME"
peers = 1
model = {type = "folder", path = "model"}
adapter = {type = "lora", rank = 2, alpha = 8.0}
tokenizer = {type = "json", path = "model"}
method = {type = "fedavg", every = 4}
data = {heldout_fraction = 0.2, source = {type = "KIND", paths = ["FILE"]}}
[train]
seq_len = 96
batch_size = 2
tokens = 6144
evaluate_every = 1
schedule = {type = "constant", lr = 0.01}
LOSS
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a chat model, files to learn from, and the run files prefer.toml and chat.toml."""
    write_folder(tmp_path / "model", MODEL, initial_vector(MODEL, 3), ByteTokenizer().to_json())
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    pairs = [{"prompt": f"say {n}", "chosen": f"ok {n}", "rejected": f"no {n}"} for n in range(60)]
    chats = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    for name, rows in (("pairs.jsonl", pairs), ("chats.jsonl", chats)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, file, loss in (
        ("prefer", "preferences", "pairs.jsonl", 'loss = {type = "dpo", beta = 0.5}'),
        ("chat", "conversations", "chats.jsonl", ""),
    ):
        text = RUN.replace("NAME", name).replace("KIND", kind).replace("FILE", file).replace("LOSS", loss)
        (tmp_path / f"{name}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("name", ["prefer", "chat"])
def test_what_it_takes_is_told_before_it_begins(weft: Weft, folder: Path, name: str) -> None:
    for command in (
        ("plan", f"{name}.toml", "--tokens-per-s", "1000"),
        ("plan", f"{name}.toml", "--serve"),
        ("doctor", f"{name}.toml"),
    ):
        said = weft(*command)
        assert said.code == 0, (command, said)
        assert "crash" not in said.err


@pytest.mark.full
def test_verbs_know_a_run_of_pairs(weft: Weft, folder: Path) -> None:
    said = weft("train", "prefer.toml", *LOCAL)
    assert said.code == 0, said.err
    assert "% of the pairs right" in said.out + said.err
    said = weft("eval", "last")
    assert "nats per pair" in said.out
    assert " pairs (all" in said.out
    said = weft("status", "last", "--json")
    held = json.loads(said.out)["heldout"]
    assert held["pairs"] > 0
    assert held["preferred"]["accuracy"] > 0.9
    report = weft("report", "last")
    assert report.code == 0
    for command in (("plan", "last", "--tokens-per-s", "1000"), ("plan", "last", "--serve")):
        said = weft(*command)
        assert said.code == 0, said
    assert weft("export", "--adapter", "last", "out").code == 0
    config, _ = read_adapter(folder / "out", read_config(folder / "model"))
    assert config.adapter
    assert config.adapter.rank == 2
    assert weft("export", "last", "merged").code == 0
    assert weft("export", "model", "other", "--adapter").err.count("has no adapter") == 1
    assert "exists" in weft("export", "--adapter", "last", "out").err
    assert read_folder(folder / "merged")[0] == read_config(folder / "model")


@pytest.mark.full
def test_a_run_after_one_of_an_adapter_trains_what_its_own_file_says(weft: Weft, folder: Path) -> None:
    assert weft("train", "chat.toml", *LOCAL).code == 0
    (folder / "prefer.toml").write_text((folder / "prefer.toml").read_text().replace("rank = 2", "rank = 4"))
    assert weft("train", "prefer.toml", "--after", "chat", *LOCAL).code == 0
    made = load(folder / "prefer-2.toml", RunFile)
    assert isinstance(made.adapter, NewAdapter)
    assert made.adapter.rank == 4
    assert made.predecessor is not None
    whole = (folder / "chat.toml").read_text().replace("adapter = {", "# adapter = {").replace('"chat"', '"whole"')
    (folder / "whole.toml").write_text(whole)
    assert weft("train", "whole.toml", "--after", "chat", *LOCAL).code == 0
    assert load(folder / "whole-2.toml", RunFile).adapter is None
