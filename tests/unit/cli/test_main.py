"""The command line as a whole: verbs, version, and what becomes of errors."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft as package
from unit.cli.small import Weft
from weft.cli.failure import explain
from weft.cli.settings import run_file
from weft.errors import DataError, NotFinite, WeftError

VERBS = ["demo", "train", "join", "ticket", "generate", "eval", "export", "inspect", "doctor", "keys", "tokenizer"]
VERBS += ["methods", "plan", "simulate", "bench", "chat"]


def all_errors(base: type[WeftError] = WeftError) -> list[type[WeftError]]:
    found = [kind for child in base.__subclasses__() for kind in (child, *all_errors(child))]
    return [kind for kind in found if kind.__module__ == "weft.errors"]


def test_help_names_every_verb(weft: Weft) -> None:
    answer = weft("--help")
    assert answer.code == 0
    assert [verb for verb in VERBS if not re.search(rf"\b{verb}\b", answer.out)] == []


def test_help_groups_verbs_by_what_they_are_for(weft: Weft) -> None:
    said = weft("--help").out
    titles = ("Train together:", "Use the model:", "Look:", "Plan and compare:", "This machine:")
    assert [said.index(title) for title in titles] == sorted(said.index(title) for title in titles)
    assert "Others:" not in said
    assert said.index("Use the model:") < said.index("  generate ") < said.index("Look:")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(weft: Weft, verb: str) -> None:
    answer = weft(verb, "--help")
    assert answer.code == 0
    assert verb in answer.out


def test_a_run_file_from_the_help_is_one(weft: Weft, tmp_path: Path) -> None:
    said = weft("train", "--help").out
    lines = said[said.index("name = ") : said.index("It trains")].splitlines()
    (tmp_path / "first.toml").write_text("\n".join(line.strip() for line in lines))
    assert run_file(tmp_path / "first.toml", ()).train.tokens == 1_000_000


def test_help_shows_flags_without_a_type_and_defaults(weft: Weft) -> None:
    said = weft("demo", "--help").out
    assert "bool" not in said
    assert said.count("Default: ") == 3


def test_the_version_is_the_packages(weft: Weft) -> None:
    assert weft("--version").out == f"weft {package.__version__}\n"


@pytest.mark.parametrize("arguments", [["fly"], ["train"], ["generate", "x", "--top-k", "many"], ["--hom", "x"]])
def test_wrong_usage_is_2(weft: Weft, arguments: list[str]) -> None:
    answer = weft(*arguments)
    assert answer.code == 2
    assert answer.err.startswith("weft: ")
    assert "--help` shows what is allowed." in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "x", "--size", "nano"], "`weft join` has no option --size; `weft train` has it. `weft join --help`"),
        (["train", "x", "--max-tokens", "9"], "`weft train` has no option --max-tokens; `weft "),
        (["train", "x", "--host-name", "9"], "`weft train` has no option --host-name"),
        (["status", "--home", "x"], "has no option --home; it stands before the verb: weft --home ... status."),
        (["generate", "x", "--temprature", "9"], "has no option --temprature. Did you mean --temperature? `weft gen"),
        (["generate", "x", "y", "--tokens", "9"], "has no option --tokens. Did you mean --max-tokens? `weft gen"),
        (["export", "last"], "'target': the folder to write; with --gguf the file. `weft export --help`"),
        (["trian"], "Did you mean 'train'? `weft --help`"),
    ],
)
def test_an_option_of_another_verb_is_said_to_be_that_ones(weft: Weft, arguments: list[str], words: str) -> None:
    answer = weft(*arguments)
    assert answer.code == 2
    assert words in answer.err
    assert "?." not in answer.err
    assert answer.err.count("\n") == 1


def test_neither_torch_nor_rich_tables_are_needed_to_refuse_a_ticket() -> None:
    program = (
        "import sys; from weft.cli.main import run; assert run(['join', 'weft1abc']) == 15; "
        "sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_sleep_unless_it_is_said_otherwise(given: dict[str, str], policy: str) -> None:
    program = (
        "import os, sys; from weft.cli import main as it\n"
        "it.run = lambda _: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules) or 0\n"
        "it.main()"
    )
    without = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    env = without | given | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", program]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == f"{policy} False\n"  # before torch reads it


def test_the_home_may_come_from_the_environment(weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "elsewhere"))
    assert weft("keys", "new").code == 0
    assert (tmp_path / "elsewhere" / "keys" / "peer-0.pem").exists()
    assert weft("--home", tmp_path / "other", "keys", "list").err  # beats it, and is empty


def test_a_home_that_is_a_file_is_refused_and_one_beside_a_question_for_help_is_no_mistake(
    weft: Weft, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("no folder")
    answer = weft("--home", tmp_path / "notes", "runs")
    assert (answer.code, "a file has that name" in answer.err) == (2, True)
    assert weft("--home", tmp_path, "serve", "key", "--help").err == ""


# --- failure ---


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_is_one_paragraph_and_its_own_code(
    kind: type[WeftError], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(kind("tried this on that.\nDo the other."), tmp_path) == kind.exit_code
    said = capsys.readouterr().err
    assert said == "weft: tried this on that. Do the other.\n"
    assert list(tmp_path.iterdir()) == []


def test_an_error_among_tasks_is_found(tmp_path: Path) -> None:
    group = BaseExceptionGroup("tasks", [ValueError("x"), BaseExceptionGroup("inner", [NotFinite("nan")])])
    assert explain(group, tmp_path) == NotFinite.exit_code


def test_a_full_disk_is_41_wherever_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(OSError(errno.ENOSPC, "No space left on device"), tmp_path) == 41
    assert "disk" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EROFS, errno.ENAMETOOLONG])
def test_a_file_that_the_system_refuses_is_11_and_named(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "there"))
    for each in (error, BaseExceptionGroup("tasks", [ValueError("x"), error])):
        assert explain(each, tmp_path) == 11
        said = capsys.readouterr().err
        assert str(tmp_path / "there") in said
        assert os.strerror(number) in said
    assert list(tmp_path.iterdir()) == []  # it is no fault of weft's, of which a traceback would tell


def test_too_many_open_files_are_said_whatever_met_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    met = OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(tmp_path / "there"))
    put_into_words = NotFinite("cannot read it")
    put_into_words.__context__ = met
    for error, code in ((met, 11), (BaseExceptionGroup("tasks", [ValueError("x"), met]), 11), (put_into_words, 43)):
        assert explain(error, tmp_path) == code
        said = capsys.readouterr().err
        assert said.startswith("weft: too many files are open")
        assert "ulimit -n 1024" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_memory_that_runs_out_is_42_wherever_it_does(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(error, tmp_path) == 42
    assert "weft doctor" in capsys.readouterr().err


def test_the_unexpected_leaves_its_traceback_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("odd")
    assert explain(raised.value, tmp_path) == 1
    said = capsys.readouterr().err
    (kept,) = (tmp_path / "errors").iterdir()
    assert "Traceback" not in said
    assert "RuntimeError: odd" in said
    assert str(kept) in said
    assert "test_main.py" in kept.read_text()


def test_the_unexpected_is_said_where_no_file_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("no folder")
    assert explain(RuntimeError("odd"), tmp_path / "home") == 1
    assert "RuntimeError: odd" in capsys.readouterr().err


def test_an_interrupt_is_130_and_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(KeyboardInterrupt(), tmp_path) == 130
    assert capsys.readouterr().err == ""


def test_an_error_leaves_the_verb_as_it_is(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cli.model import inspect

    def fail(*_: object) -> Path:
        raise DataError("gone")

    monkeypatch.setattr(inspect, "find_checkpoint", fail)
    answer = weft("inspect", "last")
    assert (answer.code, answer.err) == (11, "weft: gone\n")
