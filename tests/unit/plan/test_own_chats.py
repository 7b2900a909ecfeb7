"""What is proposed for conversations: rows that hold them, passes, and a run file that they can be sealed by."""

import json
from pathlib import Path

import pytest

from unit.cli.test_tuned import MODEL, TEMPLATE
from weft.chat.template import Template
from weft.config import from_tree, load_tree
from weft.data.corpus import ConversationsSource, PreferencesSource
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError
from weft.model.initial import initial_vector
from weft.model.weights import write_folder
from weft.plan.own_chats import Chats, num_rows, read_chats, run_tree, seq_len_of, usual_tokens
from weft.plan.own_text import least_tokens
from weft.run.config import RunFile
from weft.run.genesis import seal
from weft.store.home import Home

RECIPES = Path(__file__).parents[3] / "recipes"


def chats(rows: int = 100, seq_len: int = 256, **change: object) -> Chats:
    found = {
        "source": ConversationsSource(paths=("chats.jsonl",)),
        "num": 3 * rows,
        "num_tokens": rows * seq_len,
        "num_answered": rows * seq_len // 3,
        "num_too_long": 0,
        "seq_len": seq_len,
        "train_rows": rows,
        "heldout_rows": rows // 10,
    }
    return Chats(**(found | change))  # type: ignore[arg-type]


def test_a_row_holds_the_longest_and_no_more_than_the_model_takes() -> None:
    assert [seq_len_of(longest, 8192) for longest in (1, 64, 65, 300, 2048, 9000)] == [64, 64, 128, 512, 2048, 2048]
    assert seq_len_of(300, 200) == 200


def test_rows_are_counted_as_a_run_packs_them() -> None:
    assert num_rows([], 10) == 0
    assert num_rows([10, 10], 10) == 2
    assert num_rows([6, 4, 5, 99], 10) == 3  # 6 + 4, 5, and one that is cut


def test_a_step_takes_so_few_rows_that_a_pass_has_some() -> None:
    assert [chats(rows).batch_size(1) for rows in (32, 31, 8, 7, 1)] == [8, 4, 2, 1, 1]
    assert chats(32).batch_size(4) == 2
    with pytest.raises(DataError, match="4 rows of 256 tokens, and 5 peers"):
        chats(4).batch_size(5)


def test_three_passes_are_usual_and_no_more_than_there_is_time_for() -> None:
    assert usual_tokens(chats(), 1e9, 3600.0) == 76_000  # of 76,800
    assert usual_tokens(chats(), 10.0, 3600.0) == 36_000


@pytest.mark.parametrize("kind", ["conversations", "preferences"])
def test_what_a_recipe_says_of_rate_and_adapter_is_what_is_proposed(kind: str) -> None:
    recipe = load_tree(RECIPES / ("chat-lora.toml" if kind == "conversations" else "prefer.toml"))
    source = PreferencesSource if kind == "preferences" else ConversationsSource
    found = chats(10_000, source=source(paths=("chats.jsonl",)))
    tree = run_tree(found, name="x", model="model", tokens=4_000_000, peers=4)
    assert tree["adapter"] == recipe["adapter"]
    assert tree["train"]["schedule"]["lr"] == recipe["train"]["schedule"]["lr"]
    assert tree["train"]["schedule"]["type"] == recipe["train"]["schedule"]["type"]
    assert tree["train"].get("loss", {}).get("type") == recipe["train"].get("loss", {}).get("type")
    assert tree["model"] == recipe["model"]
    assert tree["tokenizer"] == recipe["tokenizer"]


@pytest.mark.parametrize(("tokens", "windows"), [(20_000, 8), (1_000_000, 117), (100_000_000, 256)])
def test_evaluation_takes_a_tenth_of_the_time_at_most(tokens: int, windows: int) -> None:
    assert run_tree(chats(), name="x", model="m", tokens=tokens, peers=1)["train"]["evaluate_windows"] == windows


def test_what_set_says_of_rows_counts(tmp_path: Path) -> None:
    rows = [{"prompt": "say", "completion": "x" * (10 * n + 1)} for n in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(**change: object) -> Chats:
        source = ConversationsSource(paths=("chats.jsonl",), too_long=change.pop("too_long", "cut"))  # type: ignore[arg-type]
        return read_chats(source, tmp_path, Template(TEMPLATE), ByteTokenizer(), 4096, **change)  # type: ignore[arg-type]

    usual, short = read(), read(seq_len=64)
    assert (usual.seq_len, usual.num_too_long) == (256, 0)
    assert (short.seq_len, short.num_too_long) == (64, 14)
    assert read(seq_len=64, too_long="leave_out").train_rows < short.train_rows
    assert read(heldout=0.5).heldout_rows > usual.heldout_rows
    large = {"prompt": "say", "completion": "x" * (2 << 20)}
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [large, *rows]))
    assert (read().num, read().num_too_large, read().num_too_long) == (20, 1, 0)
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(large)}\n" * 2)
    with pytest.raises(DataError, match=r"all are too long to be read, the last one, too: .*chats\.jsonl, line 2: "):
        read()


@pytest.mark.parametrize("num", [4, 40, 400])
@pytest.mark.parametrize("is_paired", [False, True])
def test_what_is_proposed_can_be_sealed_and_counts_the_rows_that_the_run_has(
    tmp_path: Path, num: int, is_paired: bool
) -> None:
    write_folder(tmp_path / "model", MODEL, initial_vector(MODEL, 3), ByteTokenizer().to_json())
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"say {n}", "chosen": f"ok {n}" * (n % 7 + 1), "rejected": f"no {n}"} for n in range(num)]
    if not is_paired:
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = (PreferencesSource if is_paired else ConversationsSource)(paths=("chats.jsonl",))
    found = read_chats(source, tmp_path, Template(TEMPLATE), ByteTokenizer(), MODEL.max_seq_len)
    assert found.num == num
    tree = run_tree(found, name="x", model="model", tokens=1 << 20, peers=1)
    run_file = from_tree(tree, RunFile, where="own chats")
    index = seal(run_file, tmp_path, Home(tmp_path / "home"), lambda _event: None).config.data
    assert index.num_tokens("train") == found.train_rows * found.seq_len + 1
    assert index.num_tokens("heldout") == found.heldout_rows * found.seq_len + 1
    assert least_tokens(run_file) <= 1 << 20
