"""Conversations in shards: the tokens that the template makes of each, whole, once, on one side."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from unit.chat.templates import CHATML
from weft.chat.conversations import conversations
from weft.chat.packing import Told, pack_conversations
from weft.chat.rendering import Renderer
from weft.chat.template import Template
from weft.chat.vocabulary import Vocabulary
from weft.data.batch import Batches, check_windows
from weft.data.corpus import ConversationsSource
from weft.data.rows import UNTRAINED
from weft.data.store import DataIndex, ShardStore
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError

TOKENIZER = ByteTokenizer()
LENGTH = 256


def chat(number: int, num_words: int = 1) -> dict[str, list[dict[str, str]]]:
    answer = " ".join(f"w{number}" for _ in range(num_words))
    return {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}]}


def packed(
    folder: Path, rows: list[object], *, too_long: str = "cut", fraction: float = 0.2, template: str = CHATML
) -> tuple[ShardStore, DataIndex, Told]:
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ConversationsSource(paths=("chats.jsonl",), too_long=too_long)  # type: ignore[arg-type]
    store = ShardStore(folder / "store")
    found = pack_conversations(store, source, fraction, Template(template), TOKENIZER, LENGTH, folder)
    return store, *found


def texts_in(store: ShardStore, index: DataIndex, split: str) -> list[tuple[list[int], list[int]]]:
    """Return each text of a side: its tokens, and what of them is trained on."""
    batches, found = Batches(store, index, split, LENGTH, seed=0), list[tuple[list[int], list[int]]]()  # type: ignore[arg-type]
    for row in range(batches.num_windows):
        tokens, targets, positions = batches.windows(np.array([row]))
        assert positions is not None
        starts = [*torch.nonzero(positions[0] == 0).flatten().tolist(), LENGTH]
        for start, stop in pairwise(starts):
            trained = [each for each in targets[0, start : stop - 1].tolist() if each != UNTRAINED]
            if trained:  # else it is padding
                found.append((tokens[0, start:stop].tolist(), trained))
    return found


def test_all_conversations_are_packed_as_the_renderer_writes_them(tmp_path: Path) -> None:
    store, index, told = packed(tmp_path, [chat(number, 1 + number % 5) for number in range(40)])
    renderer = Renderer(Template(CHATML), Vocabulary(TOKENIZER), 0.0)
    rendered = [renderer.render(each) for each in conversations(["chats.jsonl"], tmp_path)]
    expected = sorted((each.ids.tolist(), each.ids[each.is_trained].tolist()) for each in rendered)
    train, heldout = texts_in(store, index, "train"), texts_in(store, index, "heldout")
    assert sorted(train + heldout) == expected
    assert 0 < len(heldout) < len(train)
    assert str(told) == ""
    assert index.num_predicted("train") == sum(len(trained) for _, trained in train)
    nbytes = sum(len(bytes(trained)) for _, trained in heldout)  # of this tokenizer a token is a byte
    assert index.heldout_text_nbytes == nbytes
    assert index.nats_per_byte(1.5) == pytest.approx(1.5)


def test_the_same_files_give_the_same_shards(tmp_path: Path) -> None:
    rows = [chat(number) for number in range(30)]
    _, first, _ = packed(tmp_path, rows)  # type: ignore[arg-type]
    _, second, _ = packed(tmp_path, rows)  # type: ignore[arg-type]
    assert first == second


def test_a_long_one_is_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*(chat(number) for number in range(10)), chat(77, 100)]
    store, index, told = packed(tmp_path, rows)  # type: ignore[arg-type]
    assert str(told) == "1 conversation longer than train.seq_len, cut"
    longest = max((*texts_in(store, index, "train"), *texts_in(store, index, "heldout")), key=lambda text: len(text[0]))
    assert len(longest[0]) == LENGTH
    assert TOKENIZER.decode(np.array(longest[1])).startswith("w77 w77 w77")
    store, index, told = packed(tmp_path, rows, too_long="leave_out")  # type: ignore[arg-type]
    assert str(told) == "1 conversation longer than train.seq_len, left out"
    assert len(texts_in(store, index, "train")) + len(texts_in(store, index, "heldout")) == 10


@pytest.mark.parametrize("too_long", ["cut", "leave_out"])
def test_one_of_more_than_a_template_may_make_is_left_out_and_counted(tmp_path: Path, too_long: str) -> None:
    rows = [*(chat(number) for number in range(10)), chat(77, 400_000)]
    store, index, told = packed(tmp_path, rows, too_long=too_long)  # type: ignore[arg-type]
    assert str(told) == "1 conversation left out, because of more than the 1 MiB that a chat template may make"
    assert len(texts_in(store, index, "train")) + len(texts_in(store, index, "heldout")) == 10


def test_a_template_without_end_stops_packing(tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"chats\.jsonl, line 1: .*does not come to an end"):
        packed(tmp_path, [chat(number, 400_000 // 9) for number in range(3)], template=endless)


def test_one_whose_answer_is_cut_off_whole_is_left_out_and_counted(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "yes"}]}
    store, index, told = packed(tmp_path, [*(chat(number) for number in range(10)), long])
    assert str(told) == "1 conversation left out, because nothing in what is read of them is trained on"
    assert len(texts_in(store, index, "train")) + len(texts_in(store, index, "heldout")) == 10


def test_of_two_conversations_one_is_held_out_and_of_one_none_can_be(tmp_path: Path) -> None:
    store, index, _ = packed(tmp_path, [chat(1), chat(2)])
    assert len(texts_in(store, index, "train")) == len(texts_in(store, index, "heldout")) == 1
    with pytest.raises(DataError, match=r"there is one conversation in chats\.jsonl"):
        packed(tmp_path, [chat(1)])


def test_a_conversation_stays_on_its_side_when_others_are_added(tmp_path: Path) -> None:
    store, index, _ = packed(tmp_path, [chat(number) for number in range(30)])
    before = {tuple(tokens) for tokens, _ in texts_in(store, index, "heldout")}
    store, index, _ = packed(tmp_path, [chat(number) for number in range(60)])
    after = {tuple(tokens) for tokens, _ in texts_in(store, index, "heldout")}
    # One of few may be held out only because it had to be.
    assert len(before - after) <= 1


def test_a_run_of_another_length_is_told_so(tmp_path: Path) -> None:
    _, index, _ = packed(tmp_path, [chat(number) for number in range(10)])
    check_windows(index, "train", LENGTH, 1)
    with pytest.raises(DataError, match=r"rows of 256 tokens, so train.seq_len cannot be 128"):
        check_windows(index, "train", 128, 1)


def test_templates_that_say_the_date_are_told_the_one_of_the_file(tmp_path: Path) -> None:
    dated = CHATML.replace("You are a helpful assistant", "{{ '' }}' + strftime_now('%d %b %Y') + '")
    assert dated != CHATML
    store, index, _ = packed(tmp_path, [chat(number) for number in range(5)], template=dated)
    assert all(b"01 Jan 2026" in bytes(tokens) for tokens, _ in texts_in(store, index, "train"))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": [{"role": "wizard", "content": "hi"}]}, r"chats.jsonl, line 2.*wizard"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}, "line 2"),
        ({"text": "hi"}, "line 2: no conversation"),
    ],
)
def test_what_is_no_conversation_is_said_with_file_and_line(tmp_path: Path, row: object, match: str) -> None:
    with pytest.raises(DataError, match=match):
        packed(tmp_path, [chat(1), row, chat(2)])


def test_a_day_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat(number)) + "\n" for number in range(3)))
    source = ConversationsSource(paths=("chats.jsonl",), date="2026-02-31")
    with pytest.raises(DataError, match="2026-02-31 is no day"):
        pack_conversations(ShardStore(tmp_path), source, 0.2, Template(CHATML), TOKENIZER, LENGTH, tmp_path)
