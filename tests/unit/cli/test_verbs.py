"""Verbs that need no network: what they print on a small checkpoint, on keys, tickets and tokenizers."""

import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from unit.cli.small import Kept, Weft, as_trained
from unit.cli.test_bad_input import a_ticket, refused
from weft.cli import settings
from weft.cli.demo.ngram_baseline import nats_per_byte
from weft.cli.home import find_checkpoint
from weft.cli.model.generate import legible, pieces
from weft.data.ngram import NgramModel
from weft.data.tokenizer import ByteTokenizer, train_bpe
from weft.errors import ConfigError, NoSuchRun
from weft.keys import open_identity, read_peer
from weft.model.weights import read_folder
from weft.net.ticket import read
from weft.peer.state.checkpoint import load
from weft.plan.catalogue import CATALOGUE
from weft.store.home import Home

# --- text from a checkpoint ---


def test_generating_repeats_itself_for_a_seed_and_begins_with_the_prompt(weft: Weft, kept: Kept) -> None:
    first, again, other = (weft("generate", kept.folder, "def ", "--max-tokens", 20, "--seed", n) for n in (1, 1, 2))
    assert first.code == 0
    assert first.out.startswith("def ")
    assert first.out == again.out != other.out


def test_greedy_text_is_the_models_likeliest(weft: Weft, kept: Kept) -> None:
    from weft.model.flat import assemble

    model = assemble(kept.run.model, load(kept.folder).replicated["outer"])
    ids = list(b"def ")
    for _ in range(5):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    answer = weft("generate", kept.folder, "def ", "--max-tokens", 5, "--temperature", 0)
    assert answer.out == ByteTokenizer().decode(ids) + "\n"


def test_text_appears_character_by_character_and_whole() -> None:
    text = "naïve 漢字 🙂!"
    for tokenizer in (ByteTokenizer(), train_bpe([text * 5], 260)):
        shown = list(pieces(tokenizer, [int(token) for token in tokenizer.encode(text)]))
        assert "".join(shown) == text
        assert not any("\ufffd" in piece for piece in shown)


def test_bytes_that_are_no_text_are_shown_in_the_end() -> None:
    assert "".join(pieces(ByteTokenizer(), [0xFF, 0xFE, 0xC3])) == "\ufffd" * 3


def test_what_a_terminal_cannot_show_is_a_dot() -> None:
    assert legible("a\x00\x1b[2J\ufffd\n\tb") == "a..[2J.\n\tb"


class _Spaced:
    """A tokenizer that, as many do, drops the space before the first word of what it decodes."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return " ".join(f"w{number}" for number in ids)


def test_spaces_between_tokens_are_kept() -> None:
    assert "".join(pieces(_Spaced(), [1, 2, 3])) == "w1 w2 w3"  # type: ignore[arg-type]


# --- training ---


@pytest.mark.parametrize("method", ["{type='fedavg', every=2}", "{type='ddp'}"])
def test_a_clip_that_does_not_clip_may_be_written_in_the_file(
    weft: Weft, run_path: Path, home: Path, method: str
) -> None:
    run_path.write_text(run_path.read_text().replace("batch_size = 2", "batch_size = 2\nclip = inf"))
    options = ("--host", "127.0.0.1", "--transports", "tls", "--device", "cpu", "--threads", 1, "--quiet")
    answer = weft("train", run_path, "--set", f"method={method}", *options)
    assert answer.code == 0, answer.err
    assert load(find_checkpoint("last", home)).config.train.clip == math.inf


# --- loss ---


def test_eval_is_the_loss_on_all_heldout_windows(weft: Weft, kept: Kept, home: Path) -> None:
    from weft.data.batch import Batches
    from weft.model.flat import assemble

    run = kept.run
    batches = Batches(Home(home).shards, run.data, "heldout", run.train.seq_len, 0)
    model = assemble(run.model, load(kept.folder).replicated["outer"])
    tokens, targets, _ = batches.windows(np.arange(batches.num_windows))
    wanted = float(model.loss(tokens, targets))
    found = re.match(r"(\S+) nats per byte .*over (\d+) tokens", weft("eval", kept.folder).out)
    assert found is not None
    assert float(found[1]) == pytest.approx(run.data.nats_per_byte(wanted), abs=2e-4)
    assert int(found[2]) == tokens.numel()


def test_eval_takes_other_text(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("zebra " * 40)
    answer = weft("eval", kept.folder, "--data", tmp_path / "other.txt", "--windows", 3)
    assert answer.code == 0
    assert f"over {3 * kept.run.train.seq_len} tokens" in answer.out
    assert float(answer.out.split()[0]) == pytest.approx(math.log(257), abs=0.5)  # an untrained model


def test_the_yardstick_predicts_the_windows_of_the_evaluation(kept: Kept, home: Path) -> None:
    run, place = kept.run, Home(home)
    streams = [
        np.concatenate([place.shards.open(run.data, i) for i in run.data.shards(s)]) for s in ("train", "heldout")
    ]
    model, seq_len = NgramModel.fit(streams[0], 3, 257), run.train.seq_len
    there = (len(streams[1]) - 1) // seq_len
    losses = []
    for number in range(4):
        start = number * there // 4 * seq_len
        context = streams[1][: start + seq_len + 1]
        losses += list(-np.log(model.probabilities(context)[start:]))
    assert len(losses) == 4 * seq_len
    assert nats_per_byte(place, run) == pytest.approx(run.data.nats_per_byte(float(np.mean(losses))))


# --- export, inspect ---


def test_an_export_holds_the_very_parameters(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    answer = weft("export", kept.folder, tmp_path / "model")
    assert answer.out == f"{tmp_path / 'model'}\n"
    config, vector = read_folder(tmp_path / "model")
    assert config == kept.run.model
    assert torch.equal(vector, load(kept.folder).replicated["outer"])
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_an_export_may_be_a_file_of_llama_cpp(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    for dtype, nbytes in (("float32", 4), ("bfloat16", 2)):
        file = tmp_path / f"{dtype}.gguf"
        answer = weft("export", kept.folder, file, "--gguf", "--dtype", dtype)
        assert (answer.code, answer.out) == (0, f"{file}\n")
        assert f"llama-server -m {file}" in answer.err
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        assert tensors["token_embd.weight"].n_bytes == 16 * kept.run.model.vocab_size * nbytes


def test_what_gguf_needs_is_said(weft: Weft, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    answer = weft("export", kept.folder, tmp_path / "m.gguf", "--gguf")
    assert answer.code == 2
    assert "pip install 'weft[gguf]'" in answer.err
    assert not (tmp_path / "m.gguf").exists()


def test_an_export_can_be_used_as_a_checkpoint(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    weft("export", kept.folder, tmp_path / "model")
    options = ("def ", "--max-tokens", 20, "--seed", 3)
    assert weft("generate", tmp_path / "model", *options).out == weft("generate", kept.folder, *options).out


def test_inspect_describes_a_checkpoint(weft: Weft, kept: Kept) -> None:
    answer = weft("inspect", kept.folder)
    assert answer.code == 0
    for words in (kept.run.run, "small", "width 16", "257 ids", "every byte checked"):
        assert words in answer.out


def test_inspect_never_prints_a_tickets_secret(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    text = a_ticket()
    ticket = read(text)
    assert ticket.secret is not None
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    for answer in (weft("inspect", text), weft("inspect", "-")):
        assert answer.code == 0
        assert ticket.run in answer.out
        assert "tls://127.0.0.1:1" in answer.out
        for spelling in (ticket.secret.hex(), ticket.secret.decode(), text):
            assert spelling not in answer.out + answer.err


def test_inspect_prints_the_public_half_of_a_key(weft: Weft, tmp_path: Path) -> None:
    with open_identity(tmp_path / "mine.pem", create=True) as identity:
        answer = weft("inspect", tmp_path / "mine.pem")  # also while it is in use
    assert identity.peer in answer.out
    assert identity.private_key.private_bytes_raw().hex() not in answer.out


def test_inspect_describes_a_run_file(weft: Weft, run_path: Path) -> None:
    answer = weft("inspect", run_path)
    assert answer.code == 0
    for words in ("run file", f"weft train {run_path}", "batch_size = 2", "evaluate_every = 5"):
        assert words in answer.out


def test_inspect_tells_a_backup_from_a_key(weft: Weft, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("horse")
    key = weft("keys", "new").out.split()[1]
    weft("keys", "backup", key, tmp_path / "my.bak", "--passphrase-file", tmp_path / "word")
    restore = f"weft keys restore {tmp_path / 'my.bak'}"
    answer = weft("inspect", tmp_path / "my.bak")
    assert "an encrypted backup of an identity" in answer.out
    assert restore in answer.out
    shown = weft("keys", "show", tmp_path / "my.bak")
    assert shown.code == 14
    assert restore in shown.err


# --- which checkpoint ---


@pytest.mark.parametrize("verb", ["generate", "eval"])
def test_it_is_said_which_checkpoint_is_read_and_that_it_is_untrained(weft: Weft, kept: Kept, verb: str) -> None:
    said = weft(verb, "last").err
    assert f"reading run small ({kept.run.run[:8]}), round 0, saved 0:" in said
    assert str(kept.folder) in said
    exact = weft(verb, kept.folder).err
    assert exact == "round 0: this model is untrained, its weights are random\n"


def test_a_checkpoint_is_found_by_folder_run_digits_and_last(kept: Kept, home: Path) -> None:
    run = home / "runs" / kept.run.run
    for given in (kept.folder, kept.folder.parent, run, kept.run.run, kept.run.run[:8], "last"):
        assert find_checkpoint(str(given), home) == kept.folder


def test_last_is_the_newest(kept: Kept, home: Path) -> None:
    import os

    other = home / "runs" / ("cd" * 32) / ("ef" * 32) / "checkpoint"
    shutil.copytree(kept.folder, other)
    for folder, at in ((kept.folder, 2000), (other, 1000)):
        os.utime(folder / "checkpoint.json", (at, at))
    assert find_checkpoint("last", home) == kept.folder
    assert find_checkpoint("cdcd", home) == other


@pytest.mark.parametrize("state", ["begun", "joined", "saved before it was told"])
def test_last_is_the_run_that_was_trained_last(weft: Weft, kept: Kept, home: Path, state: str) -> None:
    import os

    trained = home / "runs" / ("cd" * 32) / ("ef" * 32) / "checkpoint"
    shutil.copytree(kept.folder, trained)
    as_trained(trained, 1, 3_000_000)
    as_trained(kept.folder, *{"begun": (0, 5_000_000), "joined": (1, 0)}.get(state, (1, None)))
    os.utime(trained / "checkpoint.json", (1000, 1000))
    os.utime(kept.folder / "checkpoint.json", (4000, 4000))  # saved later than the other was trained
    assert find_checkpoint("last", home) == (kept.folder if state == "saved before it was told" else trained)
    assert find_checkpoint(kept.run.run[:8], home) == kept.folder
    assert "reading run small" in weft("export", "last", home / "out").err


@pytest.mark.parametrize("damage", ["abc\n", "", "{}"])
def test_a_damaged_checkpoint_is_refused_and_no_other_model_takes_its_place(
    weft: Weft, kept: Kept, home: Path, damage: str
) -> None:
    import os

    other = home / "runs" / ("cd" * 32) / ("ef" * 32) / "checkpoint"
    shutil.copytree(kept.folder, other)
    as_trained(other, 416, 1_000_000)
    as_trained(kept.folder, 45, 2_000_000)
    file, run = kept.folder / "checkpoint.json", kept.run.run[:8]
    file.write_text(damage)
    os.utime(file, (500, 500))  # copied, with times that are no help
    for given in ("last", run):
        said = refused(weft, 40, f"is damaged: {file} is cut short or altered", "generate", given)
        assert f"the checkpoint of run {run} (small)" in said
        assert ("trained last" in said) == (given == "last")
        assert "name it by its digits: cdcdcdcd (small)" in said
        assert f"weft --home {home} runs delete {run}" in said
        assert f"weft --home {home} join -" in said
    assert find_checkpoint("cdcd", home) == other
    for vectors in kept.folder.glob("*.safetensors"):
        os.utime(vectors, (500, 500))  # the other was trained later
    assert find_checkpoint("last", home) == other


def test_digits_that_fit_two_runs_are_not_guessed_at(kept: Kept, home: Path) -> None:
    (home / "runs" / (kept.run.run[:10] + "0" * 54)).mkdir()
    with pytest.raises(NoSuchRun, match="more digits"):
        find_checkpoint(kept.run.run[:6], home)


# --- tickets, keys, tokenizers ---


def test_the_newest_ticket_of_this_home_is_printed(weft: Weft, home: Path) -> None:
    import os

    for letter, at in (("a", 1000), ("b", 2000)):
        file = home / "runs" / (letter * 64) / ("0" * 64) / "ticket"
        file.parent.mkdir(parents=True)
        file.write_text(f"weft1{letter}")
        os.utime(file, (at, at))
    assert weft("ticket").out == "weft1b\n"
    assert weft("ticket", "aaaa").out == "weft1a\n"


def test_where_nothing_trains_that_is_said_with_what_to_ask_instead(weft: Weft, home: Path, kept: Kept) -> None:
    as_trained(kept.folder, 3, 5_000)
    called = f"{kept.run.run[:8]} (small)"
    for verb in ("status", "watch", "report"):
        said = weft(verb)
        assert said.code == NoSuchRun.exit_code
        assert said.err.startswith(f"weft: nothing trains in {home} now; `weft --home {home} {verb} last` tells of the")
        assert called in said.err
    for asked in (("ticket",), ("act", "show")):
        said = weft(*asked)
        assert said.code == NoSuchRun.exit_code
        assert f"so there is no ticket. `weft --home {home} runs` says how each run here goes on" in said.err
        assert f"the last was {called}" in said.err
    assert "nothing trains in" in weft("pause").err


def test_a_home_in_which_nothing_has_trained_says_how_to_begin(weft: Weft, home: Path) -> None:
    said = weft("status").err
    assert f"There is no run in {home} yet. To begin one: weft --home {home} train FILE" in said
    assert f"There is no run in {home} yet" in weft("generate", "last").err


def test_a_ticket_whose_member_was_killed_is_none(weft: Weft, home: Path, kept: Kept) -> None:
    key = Path(weft("keys", "new").out.split()[1])
    file = home / "runs" / kept.run.run / read_peer(key) / "ticket"
    file.parent.mkdir(parents=True)
    file.write_text("weft1a")
    answer = weft("ticket")
    assert (answer.code, answer.out) == (17, "")
    assert f"no member here has a ticket of run {kept.run.run[:8]} (small)" in answer.err
    assert f"`weft --home {home} status last` tells what it logged" in weft("status").err
    with open_identity(key):  # the member runs
        answer = weft("ticket")
        assert (answer.code, answer.out, answer.err) == (0, "weft1a\n", "")
        other = home / "runs" / ("f" * 64) / ("0" * 64) / "ticket"
        other.parent.mkdir(parents=True)
        other.write_text("weft1b")
        assert "run ffffffff" in weft("ticket").err


def test_keys_are_made_shown_listed_backed_up_and_restored(weft: Weft, tmp_path: Path, home: Path) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    made = weft("keys", "new")
    peer = made.out.split()[0]
    key = home / "keys" / "peer-0.pem"
    assert weft("keys", "show", key).out == f"{peer}\n"
    assert weft("keys", "list").out == f"{peer}  {key}  free\n"
    with open_identity(key):
        assert weft("keys", "list").out == f"{peer}  {key}  in use\n"
    assert weft("keys", "backup", key, tmp_path / "b", "--passphrase-file", secret).code == 0
    assert weft("keys", "restore", tmp_path / "b", tmp_path / "back.pem", "--passphrase-file", secret).code == 0
    assert weft("keys", "show", tmp_path / "back.pem").out == f"{peer}\n"
    assert weft("keys", "restore", tmp_path / "b", "--plain").code == 14


def test_a_new_key_takes_the_next_number_and_overwrites_none(weft: Weft, home: Path) -> None:
    assert [weft("keys", "new").code for _ in range(2)] == [0, 0]
    assert weft("keys", "new", home / "keys" / "peer-1.pem").code == 14
    assert sorted(path.name for path in (home / "keys").glob("*.pem")) == ["peer-0.pem", "peer-1.pem"]


def test_a_model_is_patched(weft: Weft, tmp_path: Path, kept: Kept) -> None:
    old, new, again, file = (tmp_path / name for name in ("old", "new", "again", "p"))
    assert weft("export", kept.folder, old, "--dtype", "bfloat16").code == 0
    shutil.copytree(old, new)
    tensors = load_file(new / "model.safetensors")
    name = max(tensors, key=lambda each: tensors[each].numel())
    tensors[name][::7] *= 1.01
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    made = weft("patch", "make", old, new, file)
    assert made.code == 0
    assert made.out.startswith(f"{file}: ")
    assert "numbers changed" in made.err
    assert file.stat().st_size < 0.5 * sum(each.stat().st_size for each in new.iterdir())
    assert weft("patch", "apply", old, file, again).out == f"{again}\n"
    assert {each.name: each.read_bytes() for each in again.iterdir()} == {
        each.name: each.read_bytes() for each in new.iterdir()
    }
    refused = weft("patch", "apply", old, file, old)
    assert (refused.code, "it is the older folder" in refused.err) == (2, True)
    assert weft("patch", "apply", new, file, tmp_path / "other").code == 2
    assert weft("patch", "make", old, new, file).code == 2  # nothing is overwritten


def test_a_tokenizer_is_trained_and_shown(weft: Weft, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat and the hat " * 50)
    target = tmp_path / "t.json"
    assert weft("tokenizer", "train", target, "--vocab-size", 262, "--data", tmp_path / "text.txt").code == 0
    shown = weft("tokenizer", "show", target, "the cat")
    assert shown.out.startswith("262 pieces")
    assert "tokens for 7 bytes" in shown.out
    assert weft("tokenizer", "train", target).code == 2  # nothing is overwritten


# --- settings ---


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 0.001), ("true", True), ('"a b"', "a b"), ("tiny", "tiny"), ("[1, 2]", [1, 2]), ("", "")],
)
def test_values_of_set_are_toml_or_plain_words(text: str, value: object) -> None:
    assert settings.toml_value(text) == value


def test_set_beats_the_file(run_path: Path) -> None:
    found = settings.run_file(run_path, ["train.batch_size=5", "name=other", "train.schedule.lr = 0.5"])
    assert (found.train.batch_size, found.name) == (5, "other")
    assert found.train.schedule.lr == 0.5


def test_options_beat_the_machine_file(tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text('name = "file"\nthreads = 3\n[tls]\nport = 5\n')
    found = settings.machine_settings(machine, {"name": "option", "threads": None, "tls.port": 6})
    assert (found.name, found.threads, found.tls.port) == ("option", 3, 6)
    assert settings.machine_settings(None, {"is_blocking": True}).is_blocking  # weft join --blocking


def test_an_option_is_checked_like_a_field() -> None:
    with pytest.raises(ConfigError, match="threads"):
        settings.machine_settings(None, {"threads": -1})


RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_run_file(path: Path) -> None:
    assert settings.run_file(path, []).train.tokens > 0


def test_methods_are_shown_side_by_side_and_one_by_one(weft: Weft) -> None:
    found = weft("methods")
    assert found.code == 0
    assert [line.split()[0] for line in found.out.splitlines()[1 : 1 + len(CATALOGUE)]] == [
        each.name for each in CATALOGUE
    ]
    one = weft("methods", "sparseloco")
    assert "2508.15706" in one.out
    assert "bits" in one.out
    unknown = weft("methods", "adam")
    assert unknown.code == 2
    assert "sparseloco" in unknown.err
