"""Conversations that may not leave their machine, as real processes: none of their words is in what a peer sends."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from slow.shell import LOCAL, START_S, Shell
from unit.chat.templates import CHATML
from weft.data.store import BEGINS, TRAINED
from weft.data.tokenizer import ByteTokenizer
from weft.events import Entry, RoundCommitted
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.weights import write_folder

pytestmark = pytest.mark.slow

MODEL = ModelConfig(vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=32, ffn_width=64, max_seq_len=256)
RUN = """
name = "ward rounds"
peers = 3
is_private = {is_private}
[model]
type = "folder"
path = "model"
[tokenizer]
type = "json"
path = "model"
[data]
heldout_fraction = 0.2
[data.source]
type = "conversations"
paths = ["chats.jsonl"]
[train]
seq_len = 256
batch_size = 4
tokens = 40_000_000
evaluate_every = 2
evaluate_windows = 4
[train.schedule]
type = "constant"
[method]
type = "diloco"
every = 5
"""
PERSONS = ("anna", "ben", "cid")
TAPPED = str(Path(__file__).with_name("tapped.py"))


def secrets(person: str) -> list[str]:
    return [f"{person} keeps word {number * 7919 % 10_007:05d}" for number in range(60)]


def spellings(text: str) -> Iterable[bytes]:
    """Return how a text may lie in bytes: as it is, and as tokens, with the marks of rows and without."""
    yield text.encode()
    ids = np.array(list(text.encode()), np.int64)
    for kind in ("<u2", "<u4", "<i8", ">u4"):
        yield ids.astype(kind).tobytes()
    yield (ids.astype("<u4") | np.uint32(TRAINED)).tobytes()
    yield (ids.astype("<u4") | np.uint32(BEGINS)).tobytes()
    yield json.dumps(ids.tolist()).strip("[]").encode()


def found(texts: Iterable[str], sent: bytes) -> list[str]:
    return [text for text in texts if any(spelling in sent for spelling in spellings(text))]


def trained_together(shells: Callable[..., Shell], is_private: bool) -> dict[str, bytes]:
    """Let three persons train to the second round; return what the machine of each has sent."""
    taps = {}
    crew = [shells(name) for name in PERSONS]
    for shell, name in zip(crew, PERSONS, strict=True):
        rows = [{"prompt": f"what is the word {n}", "completion": text} for n, text in enumerate(secrets(name))]
        (shell.folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        taps[name] = shell.folder / "sent"
        shell.program = ("env", f"TAP={taps[name]}", *shell.python, TAPPED)
    anna = crew[0]
    write_folder(anna.folder / "model", MODEL, initial_vector(MODEL, 3), ByteTokenizer().to_json())
    (anna.folder / "model" / "chat_template.jinja").write_text(CHATML)
    (anna.folder / "run.toml").write_text(RUN.format(is_private=str(is_private).lower()))
    anna.run("train", "run.toml", *LOCAL)
    ticket = anna.ticket()
    for shell in crew[1:]:
        shell.run("join", "-", "--yes", *(("--data", "chats.jsonl") if is_private else ()), *LOCAL, given=ticket + "\n")
    for shell in crew:
        shell.wait(all_three, within_s=START_S)
    for shell in crew:
        shell.end()
    return {name: tap.read_bytes() for name, tap in taps.items()}


def all_three(entry: Entry) -> bool:
    return isinstance(entry.event, RoundCommitted) and entry.event.round >= 2 and len(entry.event.contributors) == 3


def test_no_word_of_private_conversations_is_in_what_is_sent(shells: Callable[..., Shell]) -> None:
    sent = trained_together(shells, is_private=True)
    for name in PERSONS:
        assert len(sent[name]) > 50_000  # deltas and results went out
        for person in PERSONS:
            assert found(secrets(person), sent[name]) == []


def test_the_same_search_finds_what_a_run_that_is_not_private_sends(shells: Callable[..., Shell]) -> None:
    sent = trained_together(shells, is_private=False)
    assert len(found(secrets("anna"), sent["anna"])) > 40  # to whom joins; what was held out is among it
