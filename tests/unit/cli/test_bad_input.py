"""What people get wrong: each mistake has an exit code of its own and one paragraph that says what to do."""

import io
import socket
from pathlib import Path

import pytest

from unit.cli.small import Kept, Weft
from weft.ids import PeerId, RunId
from weft.keys import Identity, open_identity
from weft.net.messages import Contact
from weft.net.ticket import issue

LOCAL = ("--host", "127.0.0.1", "--transports", "tls", "--device", "cpu", "--threads", "1", "--quiet")


def a_ticket(address: str = "tls://127.0.0.1:1") -> str:
    member = Identity.from_seed(bytes(31) + b"\x01")
    contact = Contact(peer=PeerId(member.peer), name="member", addresses=(address,))
    return issue(RunId("ab" * 32), [contact], b"s" * 16)


def refused(weft: Weft, code: int, words: str, *arguments: object) -> str:
    """Run a command that must fail, and hold its message to the form."""
    answer = weft(*arguments)
    assert answer.code == code, answer.err
    assert answer.err.startswith("weft: ")
    assert answer.err.count("\n") == 1  # one paragraph, no traceback
    assert words in answer.err
    assert answer.out == ""
    return answer.err


# --- tickets ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "not a ticket"),
        (a_ticket()[:-9], "cut short"),
        (a_ticket()[:60] + "1" + a_ticket()[61:], "mistyped"),
        ("weft1" + "a" * 20_000, "at most"),
    ],
)
def test_a_bad_ticket_is_15(weft: Weft, text: str, words: str) -> None:
    refused(weft, 15, words, "join", text, "--yes")


@pytest.mark.parametrize(("version", "words"), [(0, "weft ticket"), (9, "pip install -U weft")])
def test_a_ticket_of_another_version_is_16(weft: Weft, version: int, words: str) -> None:
    refused(weft, 16, words, "join", a_ticket().replace("weft2", f"weft{version}"), "--yes")


def test_a_bad_ticket_on_standard_input_is_15(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    refused(weft, 15, "not a ticket", "join", "-", "--yes")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n \nhello\n"))  # what was pasted begins with empty lines
    refused(weft, 15, "not a ticket", "join", "-", "--yes")


def test_nobody_reachable_is_22(weft: Weft) -> None:
    said = refused(weft, 22, "TLS over TCP to 127.0.0.1:1, nothing listens there", "join", a_ticket(), "--yes", *LOCAL)
    assert "Tried 4cb5abf6: " in said
    assert "Ask a member for a fresh ticket, which `weft ticket` prints there" in said


@pytest.mark.parametrize("verb", ["join", "anchor"])
def test_a_ticket_that_nobody_answers_leaves_no_run_in_the_home(weft: Weft, home: Path, verb: str) -> None:
    options = ("--yes", *LOCAL) if verb == "join" else ("--host", "127.0.0.1", "--transports", "tls", "--quiet")
    refused(weft, 22, "nothing listens there", verb, a_ticket(), *options)
    assert weft("runs").out == ""
    for verb_of_a_run in ("watch", "status", "report", "generate", "train", "eval"):
        refused(weft, 17, f"There is no run in {home} yet.", verb_of_a_run, "last")


def test_a_ticket_of_this_very_key_says_so(weft: Weft, tmp_path: Path) -> None:
    (tmp_path / "home" / "keys").mkdir(parents=True)
    copied = open_identity(tmp_path / "copied.pem", create=True)
    own = Contact(peer=copied.peer, name="maker", addresses=("tls://127.0.0.1:1",))
    ticket = issue(RunId("ab" * 32), [own], b"s" * 16)
    copied.close()
    said = refused(
        weft, 22, "leads only to this peer itself", "join", ticket, "--yes", "--key", tmp_path / "copied.pem", *LOCAL
    )
    assert "--key other.pem" in said


VERBS_OF_A_RUN = [
    ("status", "nosuch"),
    ("watch", "nosuch"),
    ("report", "nosuch"),
    ("compare", "nosuch", "nosuch"),
    ("ticket", "nosuch"),
    ("pause", "nosuch"),
    ("resume", "nosuch"),
    ("act", "show", "--run", "nosuch"),
    ("gather", "nosuch"),
    ("generate", "nosuch"),
    ("eval", "nosuch"),
    ("export", "nosuch", "out"),
    ("inspect", "nosuch"),
    ("serve", "nosuch"),
    ("plan", "--serve", "nosuch"),
    ("train", "nosuch"),
    ("runs", "delete", "nosuch"),
]


@pytest.mark.parametrize("typed", VERBS_OF_A_RUN, ids=lambda typed: " ".join(typed))
def test_a_run_that_is_not_here_is_17_for_every_verb_with_what_to_type(
    weft: Weft, home: Path, typed: tuple[str, ...]
) -> None:
    said = refused(weft, 17, "a run of this home. There is no run in", *typed)
    assert said.startswith("weft: 'nosuch' is not ")
    assert f"To begin one: weft --home {home} train FILE. To join one: weft --home {home} join -" in said


@pytest.mark.parametrize("typed", VERBS_OF_A_RUN, ids=lambda typed: " ".join(typed))
def test_beside_a_run_that_is_not_here_those_that_are_here_are_named(
    weft: Weft, kept: Kept, typed: tuple[str, ...]
) -> None:
    said = refused(weft, 17, "'nosuch' is not ", *typed)
    assert f"holds runs {kept.run.run[:8]} (small). Type the name of one, its first digits, or" in said


@pytest.mark.parametrize("verb", ["status", "watch", "report", "ticket"])
def test_an_empty_home_says_that_no_run_is_there_and_how_to_begin_or_join_one(
    weft: Weft, home: Path, verb: str
) -> None:
    said = refused(weft, 17, f"There is no run in {home} yet.", verb)
    assert f"To begin one: weft --home {home} train FILE." in said
    assert f"To join one: weft --home {home} join - with a ticket" in said


# --- run files ---


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "small"', 'nam = "small"', 'Did you mean "name"?'),
        ("batch_size = 2", 'batch_size = "two"', "train.batch_size"),
        ("batch_size = 2", "batch_size = 0", "train.batch_size"),
        ("batch_size = 2", "batch_sizes = 2", "batch_size"),
        ('type = "constant"', 'type = "cosinus"', '"cosine"'),
        ('name = "small"', "name = ", "not valid TOML"),
    ],
)
def test_a_bad_run_file_is_2_and_names_file_and_field(
    weft: Weft, run_path: Path, old: str, new: str, words: str
) -> None:
    run_path.write_text(run_path.read_text().replace(old, new))
    assert str(run_path) in refused(weft, 2, words, "train", run_path)


def test_a_missing_run_file_is_17_as_it_may_be_a_run_that_is_not_here(weft: Weft, tmp_path: Path) -> None:
    said = refused(weft, 17, "or a run of this home", "train", tmp_path / "absent.toml")
    assert f"is not a file or a folder (paths start from {Path.cwd()}), or a run" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.tokens", "section.field=value"),
        ("train.tokens=many", "train.tokens"),
        ("name.first=x", "name is a value"),
        ("train.sched=1", "sched"),
    ],
)
def test_a_bad_change_of_the_run_file_is_2(weft: Weft, run_path: Path, change: str, words: str) -> None:
    refused(weft, 2, words, "train", run_path, "--set", change)


def test_a_change_is_blamed_and_not_the_file(weft: Weft, run_path: Path) -> None:
    changes = ("--set", "name=other", "--set", "train.batch_size=-3")
    said = refused(weft, 2, "--set train.batch_size=-3: train.batch_size is -3.", "train", run_path, *changes)
    assert str(run_path) not in said
    assert "name=other" not in said
    run_path.write_text(run_path.read_text().replace("batch_size = 2", "batch_size = 0"))
    assert "--set" not in refused(weft, 2, str(run_path), "train", run_path, "--set", "name=other")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "gpu"), "device"),
        (("--transports", "tls,pigeon"), "pigeon"),
        (("--port", "99999"), "it must be at most 65535"),
        (("--device", "banana"), "--device banana: weft cannot take that. Allowed: auto, cpu, mps, cuda, or"),
        (("--port", "70000"), "'--port'"),
        (("--port", "-1"), "'--port'"),
        (("--threads", "-1"), "'--threads'"),
        (("--threads", "two"), "'--threads': it must be a whole number."),
        (("--per-day", "1000000"), "--per-day 1000000: weft cannot take that. Allowed: at least 10MB."),
        (("--set", "train.tokens=320", "--set", "train.tokens=640"), "--set train.tokens is given twice"),
        (("--log", "foo"), "--log foo: should be tensorboard:FOLDER"),
        (("--name", "a\nb"), "--name"),
        (("--name", ""), "--name is empty. Give the name that others should see"),
        (("--name", " "), "--name is empty. Give the name that others should see"),
    ],
)
def test_a_bad_option_of_this_machine_is_2(weft: Weft, run_path: Path, options: tuple[str, ...], words: str) -> None:
    refused(weft, 2, words, "train", run_path, *options)


def test_more_cores_than_there_are_is_said(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("[caps]\ncores = 1000\n")
    for given, named in ((("--cores", 1000), "--cores 1000"), (("--machine", machine), "caps.cores is 1000")):
        said = weft("train", run_path, *given, "--set", "train.batch_size=0").err  # of which no run is made
        assert f"{named}: this process may use" in said
        assert "and uses all of them" in said
        assert "threads" not in said


def test_more_threads_than_there_are_cores_is_said(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("threads = 1000\n")
    for given, named in ((("--threads", 1000), "--threads 1000"), (("--machine", machine), "threads is 1000")):
        said = weft("train", run_path, *given, "--set", "train.batch_size=0").err
        assert f"{named}: this process may use" in said
        assert "more threads than that wait for one another" in said
    assert "threads" not in weft("train", run_path, "--threads", 1, "--set", "train.batch_size=0").err


def test_a_bad_place_for_curves_is_refused_before_anything_is_asked(weft: Weft, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    refused(weft, 2, "--log foo", "train", tmp_path / "notes.txt", "--log", "foo")
    refused(weft, 2, "--log foo", "join", a_ticket(), "--log", "foo")


def test_an_empty_name_is_refused_by_join_as_by_train(weft: Weft) -> None:
    refused(weft, 2, "--name is empty", "join", a_ticket(), "--name", "")


def test_a_bad_machine_file_is_2(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("micro_batch = -1\n")
    refused(weft, 2, "micro_batch", "train", run_path, "--machine", machine)


def test_a_model_beyond_this_machine_is_10(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("max_parameters = 1000\n")
    refused(weft, 10, "parameters", "train", run_path, "--machine", machine, *LOCAL)


# --- data ---


def test_missing_data_is_11(weft: Weft, run_path: Path) -> None:
    refused(weft, 11, "absent.txt", "train", run_path, "--set", 'data.source.paths=["absent.txt"]')


def test_own_text_that_is_missing_is_looked_for_in_the_current_folder(
    weft: Weft, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (("tokenizer", "train", tmp_path / "t.json"), ("eval", kept.folder)):
        said = weft(*verb, "--data", "nope.txt")
        assert said.code == 11
        assert said.err.endswith(f"weft: --data nope.txt: no such file or folder in {tmp_path}.\n")


def test_empty_data_is_11(weft: Weft, run_path: Path) -> None:
    (run_path.parent / "text.txt").write_text("")
    refused(weft, 11, "empty", "train", run_path, *LOCAL)


def test_data_that_are_too_small_are_11(weft: Weft, run_path: Path) -> None:
    (run_path.parent / "text.txt").write_text("def f(): pass\n")
    refused(weft, 11, "too small", "train", run_path, *LOCAL)


def test_a_tokenizer_of_another_vocabulary_is_12(weft: Weft, run_path: Path, kept: Kept, tmp_path: Path) -> None:
    assert weft("export", kept.folder, tmp_path / "model").code == 0
    assert (
        weft(
            "tokenizer", "train", tmp_path / "t.json", "--vocab-size", 320, "--data", run_path.parent / "text.txt"
        ).code
        == 0
    )
    changes = ("--set", 'model={type="folder", path="model"}', "--set", 'tokenizer={type="json", path="t.json"}')
    refused(weft, 12, "320", "train", run_path, *changes, *LOCAL)


def test_a_home_that_is_no_folder_is_2(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    refused(weft, 2, "a file has that name, and home is a folder", "--home", run_path, "train", run_path)


def test_a_report_that_cannot_be_written_takes_no_summary_away(weft: Weft, run_path: Path) -> None:
    answer = weft("train", run_path, *LOCAL, "--report", run_path / "report.json")
    assert answer.code == 11
    assert "run small: complete after" in answer.out
    assert "Choose another place" in answer.err.splitlines()[-1]


def test_a_report_far_from_any_folder_is_2_before_anything_is_done(weft: Weft, run_path: Path, home: Path) -> None:
    far = run_path.parent / "reprots" / "today" / "report.json"
    refused(weft, 2, f"there is no folder {far.parent.parent}", "train", run_path, *LOCAL, "--report", far)
    assert not home.exists()
    near = run_path.parent / "reports" / "report.json"
    assert weft("train", run_path, *LOCAL, "--report", near).code == 0
    assert near.exists()


# --- checkpoints, keys, ports ---


def test_a_file_in_the_place_of_a_folder_is_said_to_be_one(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    said = refused(weft, 40, "weft reads a model from a folder", "generate", path)
    assert "If it is a GGUF file, transformers reads it" in said
    assert weft("inspect", path).out.startswith("GGUF file")
    refused(weft, 2, "small.gguf names a GGUF file", "export", kept.folder, path)
    assert path.stat().st_size == 8


def test_a_model_that_is_not_here_is_said_before_a_port_that_is_taken(weft: Weft) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(weft, 17, "nosuch", "serve", "nosuch", "--port", port)


def test_a_prompt_comes_from_standard_input_and_what_is_not_read_of_it_is_said(
    weft: Weft, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "def f1(x):\n    return x + 1\n" * 8
    monkeypatch.setattr("sys.stdin", io.StringIO(long))
    wrote = weft("generate", kept.folder, "-", "--max-tokens", 3)
    assert wrote.code == 0
    assert wrote.out.startswith(long.removesuffix("\n"))
    context = kept.run.model.max_seq_len
    assert (
        f"the prompt has {len(long) - 1} tokens and the model's context {context}: the model reads at most the last"
        in wrote.err
    )
    wrote = weft("generate", kept.folder, "def f", "--max-tokens", 3)
    assert "tokens" not in wrote.err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    refused(
        weft,
        2,
        "standard input is empty or closed; weft expected the beginning of a text",
        "generate",
        kept.folder,
        "-",
    )


@pytest.mark.parametrize("verb", ["generate", "eval", "inspect"])
def test_the_last_run_of_an_empty_home_is_17(weft: Weft, verb: str) -> None:
    refused(weft, 17, '"last" means nothing yet: no run was trained in this home', verb, "last")


def test_a_run_that_has_saved_nothing_yet_is_40(weft: Weft, home: Path) -> None:
    (home / "runs" / ("c" * 64) / ("0" * 64)).mkdir(parents=True)
    said = refused(weft, 40, "run cccccccc has saved no checkpoint yet", "generate", "cccc")
    assert f"`weft --home {home} runs` says how it goes on" in said


def test_a_corrupt_checkpoint_is_40_and_names_the_chunk(weft: Weft, kept: Kept) -> None:
    (vectors,) = kept.folder.glob("replicated-*.safetensors")
    data = bytearray(vectors.read_bytes())
    data[-3] ^= 1
    vectors.chmod(0o644)
    vectors.write_bytes(data)
    for verb in ("generate", "inspect"):
        assert "chunk" in refused(weft, 40, "outer", verb, kept.folder)


def test_a_half_written_checkpoint_is_40(weft: Weft, kept: Kept) -> None:
    (kept.folder / "checkpoint.json").unlink()
    refused(weft, 40, "half-written", "generate", kept.folder)


def test_a_folder_without_a_checkpoint_is_40_and_the_runs_that_are_there_are_named(
    weft: Weft, kept: Kept, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    said = refused(weft, 40, "holds no checkpoint: there is no checkpoint.json in it", "generate", tmp_path / "empty")
    assert f"holds runs {kept.run.run[:8]} (small)." in said


def test_an_export_overwrites_nothing(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    refused(weft, 2, "exists", "export", kept.folder, tmp_path / "model")


def test_a_port_in_use_is_21(weft: Weft, run_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(weft, 21, f"port {port}", "train", run_path, "--port", port, *LOCAL)


def test_an_address_of_another_machine_is_20_though_another_transport_would_do(weft: Weft, run_path: Path) -> None:
    options = ("--host", "203.0.113.1", "--transports", "tls,iroh", "--device", "cpu", "--threads", "1", "--quiet")
    refused(weft, 20, "cannot listen on 203.0.113.1", "train", run_path, *options)


def test_a_key_in_use_is_13(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    from weft.keys import open_identity

    with open_identity(tmp_path / "mine.pem", create=True):
        refused(weft, 13, "--key", "train", run_path, "--key", tmp_path / "mine.pem", *LOCAL)


def test_a_file_that_is_nothing_of_wefts_is_2(weft: Weft, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("to do")
    said = refused(weft, 2, "is not a checkpoint, a ticket, a key", "inspect", tmp_path / "notes.txt")
    assert "chmod" not in said


def test_a_passphrase_without_a_terminal_is_asked_for_in_a_file(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    key = weft("keys", "new").out.split()[1]
    for target in ("plain", "sealed"):
        (tmp_path / "word").write_text("horse")
        options = ("--plain",) if target == "plain" else ("--passphrase-file", tmp_path / "word")
        assert weft("keys", "backup", key, tmp_path / target, *options).code == 0
    refused(weft, 2, "--passphrase-file FILE", "keys", "backup", key, tmp_path / "more")
    refused(weft, 2, "--passphrase-file FILE", "keys", "restore", tmp_path / "sealed")
    refused(weft, 14, "no identity at", "keys", "backup", tmp_path / "absent.pem", tmp_path / "more")
    refused(weft, 14, "no backup at", "keys", "restore", tmp_path / "absent")
    refused(weft, 14, f"is here already: {key}", "keys", "restore", tmp_path / "plain")
    assert weft("keys", "restore", tmp_path / "plain", tmp_path / "back.pem").code == 0  # nothing to ask


def test_no_key_is_14(weft: Weft, tmp_path: Path) -> None:
    refused(weft, 14, "weft keys new", "keys", "show", tmp_path / "absent.pem")


def test_bad_sampling_is_2(weft: Weft, kept: Kept) -> None:
    refused(weft, 2, "--top-p is 2.0", "generate", kept.folder, "x", "--top-p", "2")
    refused(weft, 2, "--max-tokens is -3", "generate", kept.folder, "x", "--max-tokens", "-3")


def test_weights_that_are_not_finite_are_43(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    import torch

    from weft.data.tokenizer import ByteTokenizer
    from weft.model.config import num_parameters
    from weft.model.weights import write_folder

    broken = torch.full((num_parameters(kept.run.model),), float("nan"))
    write_folder(tmp_path / "model", kept.run.model, broken, ByteTokenizer().to_json())
    refused(weft, 43, "NaN", "generate", tmp_path / "model", "x")
    refused(weft, 43, "NaN", "eval", tmp_path / "model", "--data", tmp_path / "text.txt")


def test_a_section_of_a_run_file_that_would_do_nothing_is_refused(weft: Weft, run_path: Path) -> None:
    refused(
        weft,
        2,
        "pipeline: it has no effect in a run without stages",
        "train",
        run_path,
        "--set",
        "pipeline.micro_batch=2",
    )
