"""Pairs of answers are read in the forms that people have, and lie in rows side by side."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unit.chat.templates import CHATML
from weft.chat.conversations import Pair, are_pairs, pair_of, pairs
from weft.chat.packing import Told, pack_conversations
from weft.chat.rendering import Renderer
from weft.chat.template import Template
from weft.chat.vocabulary import Vocabulary
from weft.data.batch import Batches
from weft.data.corpus import PreferencesSource
from weft.data.rows import UNTRAINED, PairBatch
from weft.data.store import DataIndex, ShardStore
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError

ASKED, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "2 + 2?"), ("assistant", "4"), ("assistant", "5"))
)
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TOKENIZER, LENGTH = ByteTokenizer(), 400


def read(row: dict[str, Any]) -> Pair:
    return pair_of(row, "pairs.jsonl:3", "pairs.jsonl, line 3")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASKED], "chosen": GOOD, "rejected": BAD},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "2 + 2?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score_chosen": 9.0},
        {
            "conversations": [{"from": "human", "value": "2 + 2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": BAD,
        },
        {"question": "2 + 2?", "chosen": "4", "rejected": "5", "id": 1},
        {"instruction": "2 + 2?", "input": "", "chosen": "4", "rejected": "5"},
        {"messages": json.dumps([ASKED]), "chosen": "4", "rejected": "5"},
    ],
)
def test_each_form_is_the_same_pair(row: dict[str, Any]) -> None:
    found = read(row)
    assert found.chosen.messages == (ASKED, GOOD)
    assert found.rejected.messages == (ASKED, BAD)
    assert found.chosen.passed_over == found.rejected.passed_over == frozenset()


def test_what_both_begin_with_is_not_learnt_from() -> None:
    found = read({"chosen": [*EARLIER, ASKED, GOOD], "rejected": [*EARLIER, ASKED, BAD], "system": "s"})
    assert found.chosen.passed_over == found.rejected.passed_over == {0}
    assert found.chosen.messages[0] == {"role": "system", "content": "s"}
    longer = read({"prompt": [ASKED], "chosen": [GOOD, ASKED, GOOD], "rejected": [BAD, ASKED, GOOD]})
    assert longer.chosen.passed_over == frozenset()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x", "chosen": "y"}, "line 3: no pair of answers: it has chosen, prompt, and lacks rejected"),
        ({"messages": [ASKED, GOOD]}, "lacks chosen and rejected. Rename its fields, or remove it"),
        ({"chosen": "y", "rejected": "z"}, "it has chosen, rejected, and nothing that is asked. Name that prompt"),
        ({"prompt": "x", "chosen": "", "rejected": "z"}, "the assistant's turn 2 is empty"),
        ({"prompt": "x", "chosen": [], "rejected": "z"}, "field 'chosen' is empty"),
        ({"prompt": "x", "chosen": 3, "rejected": "z"}, "field 'chosen' is no list"),
        ({"chosen": [ASKED, GOOD, ASKED], "rejected": [ASKED, BAD]}, "chosen does not end with the assistant's turn"),
        ({"prompt": "x", "chosen": [{"role": "wizard", "content": "y"}], "rejected": "z"}, "unknown role 'wizard'"),
    ],
)
def test_what_is_no_pair_is_refused_by_its_place(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as error:
        read(row)
    assert said in str(error.value)
    assert "pairs.jsonl, line 3" in str(error.value)


def test_a_file_of_pairs_is_known_by_its_first_row(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [ASKED, GOOD]}) + "\n")
    assert are_pairs(["pairs.jsonl"], tmp_path)
    assert not are_pairs(["chats.jsonl"], tmp_path)


# --- rows ---


def row(number: int, num_good: int = 1, num_bad: int = 2) -> dict[str, str]:
    words = {
        name: " ".join(f"{name[0]}{number}" for _ in range(num))
        for name, num in (("chosen", num_good), ("rejected", num_bad))
    }
    return {"prompt": f"{number}?", **words}


def packed(folder: Path, rows: list[dict[str, str]], too_long: str = "cut") -> tuple[ShardStore, DataIndex, Told]:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    source = PreferencesSource(paths=("pairs.jsonl",), too_long=too_long)  # type: ignore[arg-type]
    store = ShardStore(folder / "store")
    return store, *pack_conversations(store, source, 0.2, Template(CHATML), TOKENIZER, LENGTH, folder)


def answers_in(store: ShardStore, index: DataIndex, split: str) -> list[tuple[str, str]]:
    """Return what is learnt from in each pair of a side, the chosen answer first."""
    batches, found = Batches(store, index, split, LENGTH, seed=0), list[tuple[str, str]]()  # type: ignore[arg-type]
    for number in range(batches.num_windows):
        batch = batches.windows(np.array([number]))
        assert isinstance(batch, PairBatch)
        assert batch.positions is not None
        text_of = (batch.positions[0] == 0).cumsum(0) - 1
        texts = [
            bytes(
                batch.targets[0][(text_of == text) & (batch.targets[0] != UNTRAINED)].clamp(max=255).tolist()
            ).decode()
            for text in range(int(text_of.max()) + 1)
        ]
        texts = [text for text in texts if text]
        assert batch.num_predicted == len(texts) // 2
        found += zip(texts[::2], texts[1::2], strict=True)
    return found


def test_both_answers_of_a_pair_lie_in_one_row_the_chosen_one_first(tmp_path: Path) -> None:
    store, index, told = packed(tmp_path, [row(number, 1 + number % 3, 1 + number % 4) for number in range(40)])
    assert index.is_paired
    assert str(told) == ""
    found = answers_in(store, index, "train") + answers_in(store, index, "heldout")
    renderer = Renderer(Template(CHATML), Vocabulary(TOKENIZER), 0.0)

    def written(conversation: Any) -> str:
        rendered = renderer.render(conversation)
        return "".join(rendered.text[start:stop] for start, stop in rendered.spans)

    expected = [(written(each.chosen), written(each.rejected)) for each in pairs(["pairs.jsonl"], tmp_path)]
    assert sorted(found) == sorted(expected)
    assert all(c.startswith("c") and r.startswith("r") for c, r in found)


def test_a_long_pair_is_cut_where_it_is_longer_or_left_out(tmp_path: Path) -> None:
    rows = [*(row(number) for number in range(10)), row(77, 2, 100)]
    store, index, told = packed(tmp_path, rows)
    assert str(told) == "1 pair longer than train.seq_len, cut"
    found = answers_in(store, index, "train") + answers_in(store, index, "heldout")
    (cut,) = [each for each in found if each[1].startswith("r77")]
    assert cut[0].startswith("c77 c77<|im_end|>")
    assert 100 < len(cut[1]) < LENGTH
    (tmp_path / "again").mkdir()
    store, index, told = packed(tmp_path / "again", rows, "leave_out")
    assert str(told) == "1 pair longer than train.seq_len, left out"
    assert len(answers_in(store, index, "train") + answers_in(store, index, "heldout")) == 10


def test_a_pair_of_one_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    same = {"prompt": "x?", "chosen": "y", "rejected": "y"}
    store, index, told = packed(tmp_path, [*(row(number) for number in range(10)), same, same])
    assert str(told) == "2 pairs left out, because chosen and rejected are the same"
    assert len(answers_in(store, index, "train") + answers_in(store, index, "heldout")) == 10
    assert torch.isnan(torch.tensor(index.nats_per_byte(0.5))), "a pair has no bytes"
