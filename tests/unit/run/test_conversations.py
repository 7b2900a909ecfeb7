"""A run of conversations: what its peers fetch, what they refuse, and how those of a private run read their own."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from unit.chat.templates import CHATML
from weft.chat.template import template_of
from weft.config import from_tree
from weft.data.batch import Batches
from weft.data.corpus import CorpusConfig, JsonlSource, TextSource
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError, DataError
from weft.events import Event, Notice
from weft.ids import Digest
from weft.model.came_with import decode
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.weights import write_folder
from weft.run.amend import first_charter
from weft.run.config import RunFile
from weft.run.genesis import Sealed, pack_private, read_run, seal
from weft.store.home import Home
from weft.sync.amendments import amended_settings
from weft.sync.governance import Void
from weft.sync.records.acts import Amend

LIMIT = 1_000_000_000
LENGTH = 192
MODEL = ModelConfig(
    vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=16, ffn_width=32, max_seq_len=LENGTH
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a chat model and conversations."""
    write_folder(tmp_path / "model", MODEL, initial_vector(MODEL, 3), ByteTokenizer().to_json())
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
    write_chats(tmp_path / "chats.jsonl", 40)
    return tmp_path


def write_chats(path: Path, num: int, word: str = "ok") -> None:
    rows = [{"prompt": f"say {number}", "completion": f"{word} {number}"} for number in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_file(**changes: Any) -> RunFile:
    tree: dict[str, Any] = {
        "name": "chat",
        "model": {"type": "folder", "path": "model"},
        "tokenizer": {"type": "json", "path": "model"},
        "data": {"source": {"type": "conversations", "paths": ["chats.jsonl"]}, "heldout_fraction": 0.2},
        "train": {"seq_len": LENGTH, "batch_size": 2, "tokens": 10_000, "schedule": {"type": "constant"}},
    }
    return from_tree(tree | changes, RunFile, where="run.toml")


def sealed(base: Path, told: list[Event] | None = None, **changes: Any) -> Sealed:
    return seal(run_file(**changes), base, Home(base / "home"), ([] if told is None else told).append)


def test_it_is_sealed_with_its_rows_and_its_template(base: Path) -> None:
    told = list[Event]()
    made = sealed(base, told)
    rows = made.config.data.rows
    assert made.config.data.has_rows
    assert rows.length == LENGTH  # type: ignore[union-attr]
    assert not [event for event in told if isinstance(event, Notice)]
    assert template_of(decode(made.came_with)) is not None
    kept = Home(base / "home").blobs.read(Digest(made.config.run), 1 << 20) or b""
    assert read_run(kept, LIMIT) == made.config
    batch = next(Batches(made.store, made.index, "heldout", LENGTH, 0).heldout_batches(1, 1))
    assert 0 < batch.num_predicted < LENGTH
    assert sealed(base).config == made.config


def test_a_template_of_a_file_is_the_runs_and_goes_with_it(base: Path) -> None:
    (base / "model" / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"no chat template.*name a file of Jinja"):
        sealed(base)
    (base / "own.jinja").write_text(CHATML)
    source = {"type": "conversations", "paths": ["chats.jsonl"], "template": "own.jinja"}
    made = sealed(base, data={"source": source})
    assert decode(made.came_with).files["chat_template.jinja"] == CHATML.encode()
    (base / "own.jinja").write_text("a\n{% for %}")
    with pytest.raises(
        DataError, match=r"^own\.jinja: the chat template .* cannot be read: line 2: .* change the templ"
    ):
        sealed(base, data={"source": source})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        sealed(base, data={"source": source | {"template": "none.jinja"}})


def test_what_was_cut_is_told(base: Path) -> None:
    with (base / "chats.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "long", "completion": "x" * 500}) + "\n")
    told = list[Event]()
    sealed(base, told)
    assert [event.text for event in told if isinstance(event, Notice)] == [
        "1 conversation longer than train.seq_len, cut"
    ]


def test_an_alphabet_of_its_own_is_refused(base: Path) -> None:
    with pytest.raises(DataError, match="characters"):
        sealed(base, tokenizer={"type": "characters"})


def test_a_team_that_computes_a_section_together_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.split: .* running text only"):
        sealed(
            base,
            model={"type": "shape", "num_layers": 2, "num_heads": 2, "width": 16, "ffn_width": 32, "is_tied": False},
            stages=2,
            method={"type": "ddp"},
            pipeline={"split": {"by": "heads", "members": 2}},
        )


def test_a_peer_of_a_private_run_reads_its_own_conversations_by_the_runs_template(base: Path) -> None:
    made, home, told = sealed(base, is_private=True), Home(base / "other"), list[Event]()
    assert made.config.data.rows == msgspec.structs.replace(made.index.rows, train_trained=0, heldout_trained=0)  # type: ignore[type-var]
    write_chats(base / "mine.jsonl", 30, "yes")

    def packed(source: Any) -> Any:
        corpus = CorpusConfig(source=source, heldout_fraction=0.2)
        return pack_private(made.config, made.tokenizer, made.came_with, corpus, base, home, told.append)

    index = packed(JsonlSource(paths=("mine.jsonl",)))
    tokens = Batches(home.private, index, "train", LENGTH, 0).windows(torch.arange(1).numpy()).tokens
    assert "<|im_start|>assistant\nyes " in made.tokenizer.decode(tokens[0].numpy())
    (base / "text.txt").write_text("running text " * 100)
    with pytest.raises(DataError, match="trains on conversations, and these files are text"):
        packed(TextSource(paths=("text.txt",)))


def test_a_peer_of_a_private_run_packs_as_the_run_says(base: Path) -> None:
    source = {"type": "conversations", "paths": ["chats.jsonl"], "too_long": "leave_out", "date": "2026-11-01"}
    made, told = sealed(base, is_private=True, data={"source": source, "heldout_fraction": 0.2}), list[Event]()
    write_chats(base / "mine.jsonl", 30, "yes")
    with (base / "mine.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "long", "completion": "x" * 500}) + "\n")
    corpus = CorpusConfig(source=JsonlSource(paths=("mine.jsonl",)), heldout_fraction=0.2)
    index = pack_private(made.config, made.tokenizer, made.came_with, corpus, base, Home(base / "other"), told.append)
    assert [event.text for event in told if isinstance(event, Notice)] == [
        "1 conversation longer than train.seq_len, left out"
    ]
    assert (index.rows.too_long, index.rows.date) == ("leave_out", "2026-11-01")  # type: ignore[union-attr]


def test_a_peer_of_a_private_run_of_pairs_packs_pairs(base: Path) -> None:
    rows = [{"prompt": f"say {n}", "chosen": f"ok {n}", "rejected": f"no {n}", "messages": []} for n in range(40)]
    (base / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "short.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    source = {"type": "preferences", "paths": ["pairs.jsonl"], "template": "short.jinja"}
    tree = {"source": source, "heldout_fraction": 0.2}
    train = {"seq_len": LENGTH, "batch_size": 2, "tokens": 10_000, "schedule": {"type": "constant"}}
    made = sealed(base, is_private=True, data=tree, train=train | {"loss": {"type": "dpo"}})
    corpus = CorpusConfig(source=JsonlSource(paths=("pairs.jsonl",)), heldout_fraction=0.2)
    index = pack_private(made.config, made.tokenizer, made.came_with, corpus, base, Home(base / "other"), print)
    assert index.is_paired
    text = CorpusConfig(source=TextSource(paths=("pairs.jsonl",)))
    with pytest.raises(DataError, match="trains on pairs of answers, and these files are text"):
        pack_private(made.config, made.tokenizer, made.came_with, text, base, Home(base / "other"), print)


def test_the_length_of_samples_cannot_be_amended(base: Path) -> None:
    charter = first_charter(sealed(base).config)
    for seq_len in (LENGTH // 2, LENGTH * 2):
        with pytest.raises(Void, match="seq_len"):
            amended_settings(charter, Amend(reason="longer", seq_len=seq_len))
    assert amended_settings(charter, Amend(reason="more", batch_size=3)).batch_size == 3


def test_conversations_are_refused_where_a_private_run_is_of_running_text(base: Path) -> None:
    (base / "text.txt").write_text("running text " * 1000)
    text = {"source": {"type": "text", "paths": ["text.txt"]}, "heldout_fraction": 0.2}
    made = sealed(base, is_private=True, data=text)
    corpus = run_file().data
    with pytest.raises(DataError, match="running text, not on conversations"):
        pack_private(made.config, made.tokenizer, made.came_with, corpus, base, Home(base / "other"), print)
