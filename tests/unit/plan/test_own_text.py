"""What is proposed for somebody's own text: sizes, length, and a run file that every text it takes can be sealed by."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from weft.config import from_tree, load
from weft.data import assign
from weft.data.corpus import CorpusConfig, TextSource
from weft.data.packing import pack
from weft.data.store import ShardStore
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError
from weft.model.config import num_parameters
from weft.plan import own_text
from weft.plan.own_text import Answers, Text, read_text, run_tree, sizes_for, unsealed, usual_size, usual_tokens
from weft.run.config import RunFile
from weft.run.genesis import seal
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.training.device import choose, needed_nbytes

RECIPE = Path(__file__).parents[3] / "recipes" / "mytext.toml"
SOURCE = TextSource(paths=("my.txt",))


def a_text(nbytes: int) -> Text:
    held = nbytes // 10
    return Text(source=SOURCE, num_documents=1, train_nbytes=nbytes - held, heldout_nbytes=held, begins="")


def answers(tokens: int = 14_000_000, peers: int = 1) -> Answers:
    return Answers(name="mytext", size="nano", tokens=tokens, peers=peers)


def test_the_recipe_is_what_is_proposed_for_a_megabyte() -> None:
    text = a_text(1_000_000)
    num = num_parameters(own_text.model_of(text, "nano"))
    tokens = usual_tokens(text, num, 1e9, 3600.0)
    assert from_tree(run_tree(text, answers(tokens)), RunFile, where="") == load(RECIPE, RunFile)


@pytest.mark.parametrize("peers", [1, 2, 8])
@pytest.mark.parametrize("nbytes", [500, 3_000, 20_000, 1_000_000, 1_000_000_000])
def test_every_run_file_has_samples_for_all_and_held_out_ones(nbytes: int, peers: int) -> None:
    text = a_text(nbytes)
    if nbytes < 290 * peers:
        with pytest.raises(DataError, match=f"{nbytes:,} bytes"):
            run_tree(text, answers(peers=peers))
        return
    run_file: RunFile = from_tree(run_tree(text, answers(peers=peers)), RunFile, where="")
    train = run_file.train
    assert assign.num_windows(text.train_tokens, train.seq_len) >= peers * train.batch_size
    assert assign.num_windows(text.heldout_tokens, train.seq_len) >= 1
    assert train.evaluate_every >= 1


@pytest.mark.parametrize("tokens", [1, 100, 10_000, 10**9, 10**12])
def test_any_length_has_a_schedule(tokens: int) -> None:
    run_file: RunFile = from_tree(run_tree(a_text(10**6), answers(tokens)), RunFile, where="")
    assert run_file.train.tokens == tokens


@pytest.mark.parametrize(
    ("tokens", "planned"),
    [
        (31_000, 30_720),  # a second round for 280 tokens would train as many again
        (40_000, 30_720),
        (50_000, 61_440),
        (61_440, 61_440),
        (9_000_000, 9_000_000),  # of 293 rounds the last adds nothing to speak of
        (30_000, 30_000),  # less than a round is refused elsewhere
    ],
)
def test_a_run_of_few_rounds_has_whole_ones(tokens: int, planned: int) -> None:
    run_file: RunFile = from_tree(run_tree(a_text(10**6), answers(tokens, peers=3)), RunFile, where="")
    assert own_text.round_tokens(run_file) == 30_720
    assert own_text.whole_rounds(tokens, run_file) == planned


def test_a_run_of_single_steps_has_more_than_one() -> None:
    tree = run_tree(a_text(10**6), answers(1_400)) | {"method": {"type": "diloco", "every": 1}}
    assert own_text.whole_rounds(1_400, from_tree(tree, RunFile, where="")) == 1_400


def test_a_run_that_begins_with_a_model_has_a_third_of_the_rate() -> None:
    new, further = (run_tree(a_text(10**6), replace(answers(), context=context))["train"] for context in (None, 128))
    assert (new["schedule"]["lr"], further["schedule"]["lr"]) == (3e-3, 1e-3)
    assert new["schedule"] | {"lr": 1e-3} == further["schedule"]


def test_what_is_read_is_counted_as_it_is_packed(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"ä{number} " * (number * 20))
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("one text\n" * 90)
    for paths, num in (((".",), 30), (("few",), 1)):
        source = TextSource(paths=paths)
        text = read_text(source, tmp_path)
        data = CorpusConfig(source=source, heldout_fraction=own_text.HELDOUT)
        index = pack(ShardStore(tmp_path / "shards" / str(num)), data, ByteTokenizer(), tmp_path)
        assert (text.train_tokens, text.heldout_tokens) == (index.num_tokens("train"), index.num_tokens("heldout"))
        assert text.num_documents == num


def test_too_little_text_is_refused_with_figures() -> None:
    with pytest.raises(
        DataError, match=r"too little text to train on: 200 bytes in 1 document, of which \d+ bytes would be held out"
    ):
        run_tree(a_text(200), answers())


@pytest.mark.parametrize("peers", [1, 5])
@pytest.mark.parametrize("tokens_per_byte", [1.0, 0.27])
def test_as_much_text_as_the_refusal_asks_for_is_enough_of_any_tokenizer(tokens_per_byte: float, peers: int) -> None:
    given = replace(a_text(200), tokens_per_byte=tokens_per_byte)
    with pytest.raises(DataError) as refused:
        run_tree(given, answers(peers=peers))
    said = re.search(
        r"too little text to train on: 200 bytes .* For (.+) the text must have about ([\d,]+) bytes",
        str(refused.value),
    )
    assert said is not None, refused.value
    assert said[1] == ("1 peer" if peers == 1 else "5 peers")
    needed = int(said[2].replace(",", ""))
    run_tree(replace(a_text(needed + 10), tokens_per_byte=tokens_per_byte), answers(peers=peers))
    with pytest.raises(DataError):
        run_tree(replace(a_text(needed * 9 // 10), tokens_per_byte=tokens_per_byte), answers(peers=peers))


def test_sizes_are_offered_that_fit_and_that_the_text_can_teach() -> None:
    assert sizes_for(a_text(20_000), lambda _model, _size: True) == ("nano",)
    assert sizes_for(a_text(10_000_000), lambda _model, _size: True)[:3] == ("nano", "tiny", "35m")
    assert sizes_for(a_text(10**9), lambda _model, size: size in ("nano", "tiny")) == ("nano", "tiny")


def test_a_gpu_takes_the_largest_size_that_the_text_fills_and_a_cpu_the_smallest() -> None:
    sizes = ("nano", "tiny", "35m")
    assert usual_size(a_text(10**9), sizes, is_gpu=False) == "nano"
    assert usual_size(a_text(10**5), sizes, is_gpu=True) == "nano"
    assert usual_size(a_text(10**9), sizes, is_gpu=True) == "35m"


def test_the_usual_length_is_bounded_by_text_size_and_time() -> None:
    assert usual_tokens(a_text(10_000), 10**6, 1e9, 3600) == 140_000  # 16 passes over 9,000, in two digits
    assert usual_tokens(a_text(10**9), 10**6, 1e9, 3600) == 20_000_000
    assert usual_tokens(a_text(10**9), 10**6, 1000.0, 3600) == 3_600_000


def test_an_unsealed_run_takes_what_the_sealed_one_does(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("some words\n" * 500)
    text = read_text(SOURCE, tmp_path)
    run_file: RunFile = from_tree(run_tree(text, answers(50_000)), RunFile, where="")
    run, sealed = (
        unsealed(run_file, tmp_path),
        seal(run_file, tmp_path, Home(tmp_path / "home"), lambda _event: None).config,
    )
    assert (run.model, run.method, run.train) == (sealed.model, sealed.method, sealed.train)
    machine = PeerConfig(device="cpu")
    needed = [needed_nbytes(each, machine, choose(machine), 1) for each in (run, sealed)]
    assert needed[0] == needed[1]
    assert msgspec.structs.replace(sealed, initial=run.initial, data=run.data) == run


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("notes.txt", "notes"),
        ("my book.txt.gz", "my book"),
        (".hidden", "hidden"),
        ("a:b!.txt", "a-b"),
        ("!!", "mytext"),
    ],
)
def test_a_run_is_called_as_its_file(name: str, wanted: str) -> None:
    assert own_text.run_name(Path(name)) == wanted


def test_a_sample_goes_on_from_the_first_words() -> None:
    assert own_text.first_words("\n\n  Once upon a time there was a king\n") == "Once upon a time there "
    assert own_text.first_words("Yes\nno") == "Yes "
    assert own_text.first_words("x" * 100) == "x" * 24
    assert own_text.first_words(" \n") == ""
