"""`weft train notes.txt`: what is asked, the run file that is written and found again, and what is refused."""

import gzip
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unit.cli.small import Answer, Kept, Weft, as_trained
from unit.cli.test_bad_input import LOCAL, a_ticket, refused
from weft.cli.home import find_checkpoint
from weft.cli.options import Length, length
from weft.cli.own.run_file import kind_of
from weft.cli.plan import speed_here
from weft.cli.run import running
from weft.cli.run.running import Manner
from weft.config import load, load_tree
from weft.errors import ConfigError, DiskFull
from weft.launch.corpus import Corpus
from weft.launch.session import Options
from weft.peer.state.checkpoint import load as load_checkpoint
from weft.run.config import FolderModel, RunFile
from weft.sync.method.schedule import lr

TEXT = "".join(f"It was day {n}, and the sea was calm.\n" for n in range(400))  # 15 kB


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's text, on a machine whose speed is known."""
    here = speed_here.Here(
        name="cpu, threads: 1", tokens_per_s=100.0, crowding=1.0, is_gpu=False, is_half=False, memory_nbytes=1e9
    )
    monkeypatch.setattr(speed_here, "measure", lambda *_args, **_options: here)
    path = tmp_path / "texts" / "notes.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


Begun = list[tuple[Corpus, Manner]]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """What would be trained, which is not."""
    found: Begun = []

    def run(make: Callable[..., Corpus], _options: Options, manner: Manner, on_started: object) -> None:
        found.append((make(None, None), manner))

    monkeypatch.setattr(running, "run", run)
    return found


def words(answer: Answer) -> str:
    return " ".join(answer.err.split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_with_yes_it_says_what_it_takes_and_writes_a_run_file_beside_the_text(
    weft: Weft, notes: Path, begun: Begun
) -> None:
    answer = weft("train", notes, "--yes")
    assert answer.code == 0, answer.err
    path = notes.with_name("notes.toml")
    made = load(path, RunFile)
    assert (made.name, made.peers, made.data.source.paths) == ("notes", 1, ("notes.txt",))  # type: ignore[union-attr]
    assert made.train.tokens == 210_000  # 16 passes over 13.6 kB
    said = words(answer)
    for line in (
        "15.1 kB of text in 1 document",
        "name of the run: notes",
        "size of the model: nano",
        "how long: 210ktokens",
        "number of machines that train: 1",
        "about 35 min of training steps, at 100 tokens/s measured on cpu",
        "memory about",
        "disk about",
        f"run file: {path}",
        "whoever has the ticket can join and then has the text",
    ):
        assert line in said
    ((corpus, manner),) = begun
    assert corpus.described == (made, notes.parent)
    assert manner.wait_for == 1


def test_a_person_is_asked_four_questions_and_again_where_an_answer_makes_no_sense(
    weft: Weft, notes: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = Terminal("\n".join(("my: diary", "diary", "huge", "nano", "0", "2", "2 weeks", "1h")) + "\n")
    monkeypatch.setattr("sys.stdin", typed)
    answer = weft("train", notes)
    assert answer.code == 0, answer.err
    assert typed.read() == ""
    made = load(notes.with_name("notes.toml"), RunFile)
    assert (made.name, made.peers, made.train.tokens) == ("diary", 2, 720_000)  # an hour of both
    said = words(answer)
    for fault in (
        "my: diary: no run may be called so. Allowed",
        "huge: there is no such size here. Allowed: nano",
        "2 weeks: that is no length",
        "0: that is no number of machines. Allowed",
    ):
        assert fault in said
    assert "--size" not in said, "no option was typed"
    assert "2 machines as fast as this one train at 200 tokens/s" in said
    assert " a round among 2 machines" in said
    assert "about 60 min of training steps by 2 machines as fast as this one" in said
    assert begun[0][1].wait_for == 2


def test_a_wrong_unit_is_refused_before_anything_is_read_or_timed(weft: Weft, notes: Path) -> None:
    answer = weft("train", notes, "--yes", "--length", "10minuts")
    assert answer.code == 2
    assert "--length 10minuts: that is no length. Allowed" in words(answer)
    assert "as given" not in words(answer)
    assert "held out" not in words(answer)


def test_thousands_as_much_of_europe_writes_them_are_refused_with_both_readings(weft: Weft, notes: Path) -> None:
    said = refused(weft, 2, "that may be 2,000 or 2.", "train", notes, "--yes", "--length", "2.000tokens")
    assert "Write 2000tokens or 2tokens." in said
    assert "held out" not in said
    assert not notes.with_name("notes.toml").exists()


@pytest.mark.parametrize(
    ("given", "more", "least"),
    [
        ("1ktokens", (), "that is 1,000 tokens, and with less than 10,240, about a round"),
        ("10ktokens", (), "Give at least 11ktokens, which take about 2 min."),
        ("15ktokens", ("--peers", "2"), "Give at least 21ktokens"),
        ("50s", (), "that is 5,000 tokens, and with less than 10,240, about a round"),
        ("0.1passes", (), "that is 1,300 tokens, and with less than 10,240, about a round"),
        ("1ktokens", ("--set", "method.every=1"), "that is 1,000 tokens, and with less than 1,025, about a round"),
    ],
)
def test_a_length_in_which_nothing_is_learnt_is_refused_with_the_least_one(
    weft: Weft, notes: Path, begun: Begun, given: str, more: tuple[str, ...], least: str
) -> None:
    answer = weft("train", notes, "--yes", "--length", given, *more)
    assert answer.code == 2
    assert least in words(answer)
    assert not notes.with_name("notes.toml").exists()
    assert weft("train", notes, "--yes", "--length", "21ktokens", *more).code == 0
    described = begun[0][0].described
    assert described is not None
    train = described[0].train
    assert lr(train.schedule, train.batch_size * train.seq_len * described[0].peers) > 0


def test_the_usual_length_is_a_round_at_least_however_slow_the_machine_is(
    weft: Weft, notes: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(speed_here.measure(), tokens_per_s=0.5)  # type: ignore[call-arg]
    monkeypatch.setattr(speed_here, "measure", lambda *_args, **_options: slow)
    assert weft("train", notes, "--yes").code == 0
    described = begun[0][0].described
    assert described is not None
    assert described[0].train.tokens == 10_240


def test_a_field_that_is_not_there_is_refused_before_anything_is_timed(
    weft: Weft, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_args: object, **_options: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(speed_here, "measure", measure)
    said = refused(weft, 2, "--set train.tokns=5", "train", notes, "--yes", "--set", "train.tokns=5")
    assert 'Did you mean "tokens"?' in said


@pytest.mark.parametrize("form", ["home", "host"])
def test_what_could_not_begin_anyway_is_refused_before_anything_is_asked(
    weft: Weft, notes: Path, tmp_path: Path, form: str
) -> None:
    (tmp_path / "file").write_text("")
    before = ("--home", tmp_path / "file") if form == "home" else ()
    after = () if form == "home" else ("--host", "203.0.113.9")
    words_of = {"home": "a file has that name, and home is a folder", "host": "203.0.113.9"}
    answer = weft(*before, "train", notes, *after, "--yes")
    assert answer.code == (2 if form == "home" else 20)
    assert words_of[form] in words(answer)
    assert "held out" not in words(answer)
    assert not notes.with_name("notes.toml").exists()


def test_what_would_have_no_effect_is_not_written(weft: Weft, notes: Path, begun: Begun) -> None:
    answer = weft("train", notes, "--yes", "--set", "stages=2")
    assert answer.code == 0, answer.err
    made = load_tree(notes.with_name("notes.toml"))
    assert made["stages"] == 2
    assert "sample_prompt" not in made["train"]
    assert "no effect" not in words(answer)
    assert len(begun) == 1


def test_nobody_to_ask_is_refused_with_the_options_that_answer(weft: Weft, notes: Path, begun: Begun) -> None:
    refused(
        weft,
        2,
        "Add --yes for the defaults, or answer with --run-name, --peers, --length",
        "train",
        notes,
        "--size",
        "nano",
    )
    assert not notes.with_name("notes.toml").exists()
    options = ("--run-name", "a", "--size", "nano", "--length", "3passes", "--peers", 1)
    assert weft("train", notes, *options).code == 0
    assert load(notes.with_name("notes.toml"), RunFile).train.tokens == 40_000
    assert len(begun) == 1


def test_the_same_text_again_finds_its_run_file_and_says_so(weft: Weft, notes: Path, begun: Begun, home: Path) -> None:
    assert weft("train", notes, "--yes").code == 0
    before = notes.with_name("notes.toml").read_text()
    again = weft("train", notes)
    assert again.code == 0
    assert f"{notes.with_name('notes.toml')} says how to train {notes}" in words(again)
    assert notes.with_name("notes.toml").read_text() == before
    assert begun[0][0].described == begun[1][0].described
    held(home, "notes")
    refused(weft, 2, "already says how", "train", notes, "--size", "nano")
    anew = weft("train", notes, "--yes", "--new")
    assert anew.code == 0
    path = notes.with_name("notes.toml")
    assert f"{path} stays as it is, and this run has none of its settings" in words(anew)
    assert f"weft train {path} --new" in words(anew)
    other = notes.with_name("notes-2.toml")
    assert load(other, RunFile).name == "notes-2"
    (home / "blobs" / ("ab" * 32)).write_bytes(msgspec.msgpack.encode({"name": "notes-2"}))
    assert f"{other} says how" in words(weft("train", notes))


def test_a_text_is_trained_on_with_what_a_run_has_learnt(
    weft: Weft, notes: Path, begun: Begun, kept: Kept, home: Path
) -> None:
    assert weft("train", notes, "--yes").code == 0
    after = ("train", notes, "--after", kept.run.run[:8])
    refused(weft, 2, "is at round 0 and has learnt nothing yet", *after, "--yes")
    as_trained(kept.folder, 3, 5_000)
    refused(weft, 2, "--size: no effect with --after", *after, "--yes", "--size", "nano")
    assert weft(*after, "--yes", "--length", "long").code == 2
    assert not notes.with_name("notes-2-model").exists(), "what broke off leaves nothing"
    answer = weft(*after, "--yes", "--length", "2passes")
    assert answer.code == 0, answer.err
    made = notes.with_name("notes-2.toml")
    described = load(made, RunFile)
    assert (described.name, described.predecessor) == ("notes-2", kept.run.run)
    assert described.model == FolderModel(path="notes-2-model")
    assert described.train.seq_len == 16  # as much as that model takes
    assert described.train.schedule.lr == 1e-3
    said = words(answer)
    assert "learning rate: a third of that of a new model of this size" in said
    assert f"so the loss may rise before it falls; a lower rate forgets less: train.schedule.lr in {made}" in said
    assert f"model: what run {kept.run.run[:8]} (small) has learnt by round 3" in said
    assert f"the new run notes-2 begins with what run {kept.run.run[:8]} (small) has learnt by round 3" in said
    again = weft(*after)
    assert f"{made} begins with what run {kept.run.run[:8]} had learnt" in words(again)
    assert begun[-1][0].described == begun[-2][0].described == (described, notes.parent)
    assert len(begun) == 3
    assert home.is_dir()


def test_a_run_that_goes_on_takes_a_length(weft: Weft, notes: Path, begun: Begun, home: Path) -> None:
    assert weft("train", notes, "--yes").code == 0
    held(home, "notes")
    for given, tokens in (("400ktokens", 400_000), ("30passes", 400_000)):
        answer = weft("train", notes, "--go-on", "--length", given)
        assert answer.code == 0, answer.err
        described = begun[-1][0].described
        assert described is not None
        train = described[0].train
        assert (train.tokens, train.schedule.total_tokens) == (tokens, tokens)  # type: ignore[union-attr]
    refused(weft, 2, "weft takes tokens or passes", "train", notes, "--go-on", "--length", "2h")
    said = refused(weft, 2, "already says how", "train", notes, "--length", "5Mtokens")
    assert "counted from its first round, add --go-on." in said
    said = refused(weft, 2, "takes 63,000 to rise and to fall", "train", notes, "--go-on", "--length", "250tokens")
    assert "--set" not in said


def test_a_length_that_the_run_has_counted_already_is_refused(
    weft: Weft, notes: Path, begun: Begun, kept: Kept
) -> None:
    assert weft("train", notes, "--yes", "--run-name", kept.run.name).code == 0
    as_trained(kept.folder, 3, 5_000, tokens=100_000)
    longer = ("train", notes, "--go-on", "--length")
    for given, asked in (("250tokens", "250 tokens"), ("80ktokens", "80,000 tokens"), ("100ktokens", "100,000 tokens")):
        said = refused(weft, 2, f"{asked} would leave nothing to train", *longer, given)
        assert f"--length {given}: run {kept.run.run[:8]} (small) has already counted 100,000 tokens" in said
        assert "the whole run from its first round" in said
        assert "Give more, such as --length 200ktokens." in said
    said = refused(weft, 2, "would leave less than a round, of 10,240 tokens, to train", *longer, "110ktokens")
    assert "Give more, such as --length 200ktokens." in said
    refused(
        weft, 2, "--length and --set train.tokens exclude each other", *longer, "200k tokens", "--set", "train.tokens=1"
    )
    assert weft(*longer, "200ktokens").code == 0
    assert len(begun) == 2


def test_passes_over_a_text_are_no_length_where_tokens_are_no_bytes(
    weft: Weft, notes: Path, begun: Begun, home: Path
) -> None:
    assert weft("train", notes, "--yes").code == 0
    held(home, "notes")
    path = notes.with_name("notes.toml")
    path.write_text(path.read_text().replace('type = "bytes"', 'type = "json"\npath = "notes-model"'))
    said = refused(weft, 2, "Give the length in tokens: 5Mtokens.", "train", notes, "--go-on", "--length", "30passes")
    assert f"by {path} tokens are no bytes" in said
    assert weft("train", notes, "--go-on", "--length", "400ktokens").code == 0
    assert len(begun) == 2


def held(home: Path, name: str) -> None:
    """Let a home hold a run of that name."""
    run = "ab" * 32
    (home / "runs" / run).mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    (home / "blobs" / run).write_bytes(msgspec.msgpack.encode({"name": name}))


def test_a_start_that_fails_takes_its_run_file_away_and_the_right_command_begins(
    weft: Weft, notes: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object, **_named: object) -> None:
        raise ConfigError("cannot listen on 10.9.9.9")

    monkeypatch.setattr(running, "run", fails)
    length = ("--yes", "--length", "3passes")
    failed = weft("train", notes, *length)
    said = words(failed)
    assert failed.code == 2
    assert said.endswith("weft: cannot listen on 10.9.9.9")
    assert f"nothing was begun, so {notes.with_name('notes.toml')} is removed again" in said
    assert not notes.with_name("notes.toml").exists()
    monkeypatch.setattr(running, "run", lambda *_args, **_named: None)
    assert weft("train", notes, *length).code == 0
    assert notes.with_name("notes.toml").exists()
    held(home, "notes")  # a start that fails later leaves the file of what it began
    monkeypatch.setattr(running, "run", fails)
    assert weft("train", notes).code == 2
    assert notes.with_name("notes.toml").exists()

    def ends(_make: object, _options: object, _manner: object, *, on_started: Callable[..., None]) -> None:
        on_started(None)
        raise DiskFull("no room")

    notes.with_name("notes.toml").unlink()  # what goes on with a run here has its file made anew, and then keeps it
    monkeypatch.setattr(running, "run", ends)
    assert weft("train", notes, *length).code == DiskFull.exit_code
    assert notes.with_name("notes.toml").exists()
    monkeypatch.setattr(running, "run", fails)
    of_same_name = tmp_path / "elsewhere" / "notes.txt"
    of_same_name.parent.mkdir()
    of_same_name.write_text(notes.read_text())
    assert "is removed again" in words(weft("train", of_same_name, *length))  # the run of that name is another
    assert not of_same_name.with_name("notes.toml").exists()


def test_a_start_that_is_refused_names_the_text_and_not_the_file_that_it_took_away(
    weft: Weft, notes: Path, kept: Kept, home: Path
) -> None:
    as_trained(kept.folder, 3, 5_000)
    name = kept.run.name
    failed = weft("train", notes, "--yes", "--length", "3passes", "--run-name", name, "--set", "seed=7", *LOCAL)
    said = words(failed)
    assert failed.code == 2
    assert "is removed again" in said
    assert not notes.with_name("notes.toml").exists()
    command = f"`weft --home {home} train {notes} --set seed=7"
    assert f"For a new run beside it, which begins anew: {command} --new`" in said
    assert f"To begin another run with what it has learnt: {command} --after {kept.run.run[:8]}`" in said


def test_a_run_file_that_began_nothing_sends_nobody_in_a_circle(weft: Weft, notes: Path, begun: Begun) -> None:
    assert weft("train", notes, "--yes").code == 0  # of another home, as it were
    said = refused(weft, 2, "holds no run that it made", "train", notes, "--length", "3passes")
    assert "To begin as that file says, leave it out." in said
    assert "--go-on" not in said
    said = refused(weft, 2, "holds no run that it made", "train", notes, "--length", "3passes", "--go-on")
    assert "leave them out" in said
    assert "add --new in the place of --go-on" in said
    assert len(begun) == 1


def test_of_several_run_files_the_one_is_taken_by_which_this_home_holds_a_run(
    weft: Weft, notes: Path, begun: Begun, home: Path
) -> None:
    assert weft("train", notes, "--yes").code == 0
    held(home, "notes")
    assert weft("train", notes, "--yes", "--new").code == 0  # and nothing was begun by it here
    first, second = notes.with_name("notes.toml"), notes.with_name("notes-2.toml")
    said = words(weft("train", notes))
    assert f"{first} says how to train {notes}" in said
    assert f"{second} makes another run, and {home} holds nothing of that: name the file to train it" in said
    assert begun[-1][0].described == begun[0][0].described


def test_no_file_of_anybody_is_overwritten(weft: Weft, notes: Path, begun: Begun) -> None:
    foreign = notes.with_name("notes.toml")
    foreign.write_text("of = 'somebody'\n")
    assert weft("train", notes, "--yes").code == 0
    assert foreign.read_text() == "of = 'somebody'\n"
    assert load(notes.with_name("notes-2.toml"), RunFile).name == "notes"
    assert len(begun) == 1


def test_where_nothing_can_be_written_beside_the_text_the_run_file_is_here(
    weft: Weft, notes: Path, begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path.open

    def no_writing(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if path.parent == notes.parent and "x" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return own(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", no_writing)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert weft("train", notes, "--yes").code == 0
    assert load(here / "notes.toml", RunFile).data.source.paths == (str(notes),)  # type: ignore[union-attr]
    assert "notes.toml says how" in words(weft("train", notes))
    monkeypatch.chdir(notes.parent)
    nowhere = weft("train", notes, "--yes")
    assert nowhere.code == 2
    assert "weft cannot write a run file beside" in words(nowhere)
    assert len(begun) == 2


def test_what_set_says_is_written_down_but_for_the_questions(weft: Weft, notes: Path, begun: Begun) -> None:
    lines = notes.with_name("rows.jsonl")
    lines.write_text("".join(f'{{"body": "{line}"}}\n' for line in TEXT.splitlines()))
    refused(weft, 11, "no field 'text'", "train", lines, "--yes")
    made = ("train", lines, "--yes", "--set", "data.source.field=body", "--set", "train.batch_size=4")
    assert weft(*made).code == 0
    written = load(notes.with_name("rows.toml"), RunFile)
    assert (written.train.batch_size, written.data.source.field) == (4, "body")  # type: ignore[union-attr]
    refused(
        weft,
        2,
        "--set train.tokens: for your own text, --length says that",
        "train",
        notes,
        "--yes",
        "--set",
        "train.tokens=5",
    )
    assert len(begun) == 1


@pytest.mark.parametrize("form", ["folder", "packed"])
def test_every_form_of_text_is_taken(weft: Weft, notes: Path, begun: Begun, form: str) -> None:
    text = notes.parent
    if form == "packed":
        text = notes.with_name("notes.txt.gz")
        text.write_bytes(gzip.compress(TEXT.encode()))
    assert weft("train", text, "--yes").code == 0
    path = notes.parents[1] / "texts.toml" if form == "folder" else notes.with_name("notes.toml")
    assert load(path, RunFile).train.tokens == 210_000
    assert len(begun) == 1


def test_what_is_a_run_file_is_told_by_what_is_in_it(tmp_path: Path, run_path: Path) -> None:
    (tmp_path / "run").write_bytes(run_path.read_bytes())
    (tmp_path / "settings").write_text("a = 1\n")
    (tmp_path / "empty.TOML").write_text("")
    kinds = {
        "run": "run file",
        "run.toml": "run file",
        "empty.TOML": "run file",
        "settings": "text",
        "text.txt": "text",
    }
    assert {name: kind_of(str(tmp_path / name)) for name in kinds} == kinds
    assert kind_of("last") == "run"


def test_what_is_neither_is_refused_with_what_to_do(weft: Weft, tmp_path: Path, notes: Path, run_path: Path) -> None:
    ticket = a_ticket()
    answer = weft("train", ticket)
    assert answer.code == 2
    assert "weft join" in answer.err
    assert ticket not in answer.err
    refused(weft, 17, "or a run of this home", "train", "nothing")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    refused(weft, 2, "holds a model, not text", "train", model)
    files = tmp_path / "recipes"
    files.mkdir()
    (files / "a.toml").write_text("")
    refused(weft, 2, "holds run files: a.toml", "train", files)
    refused(weft, 2, "--size, --yes: no effect on a run file", "train", run_path, "--size", "nano", "--yes")
    refused(
        weft,
        2,
        "--size: no effect on a run file, only on your own text. Leave it out",
        "train",
        run_path,
        "--size",
        "nano",
    )
    little = notes.with_name("little.txt")
    little.write_text("few words")
    refused(weft, 11, "too little text to train on: 9 bytes", "train", little, "--yes")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2h", Length(seconds=7200)),
        ("90 min", Length(seconds=5400)),
        ("5Mtokens", Length(tokens=5_000_000)),
        ("200k tokens", Length(tokens=200_000)),
        ("10passes", Length(passes=10)),
        ("1 pass", Length(passes=1)),
        ("0.5x", Length(passes=0.5)),
    ],
)
def test_a_length_is_a_while_tokens_or_passes(text: str, wanted: Length) -> None:
    assert length("--length", text) == wanted


@pytest.mark.parametrize("text", ["", "5M", "5", "0h", "0tokens", "20rounds", "long", "-1h"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Allowed: a while"):
        length("--length", text)


@pytest.mark.full
def test_own_text_is_trained_and_gone_on_with(weft: Weft, notes: Path, home: Path) -> None:
    train = ("train", notes, *LOCAL, "--quiet")
    first = weft(*train, "--yes", "--length", "2passes", "--until", "1rounds")
    assert first.code == 0, first.err
    run = find_checkpoint("last", home).parents[1].name
    log = find_checkpoint("last", home).parent / "log.jsonl"
    again = weft(*train)
    assert again.code == 0, again.err
    assert "complete after" in again.out
    assert f"going on with run {run[:8]} (notes)" in log.read_text()
    assert find_checkpoint("notes", home).parents[1].name == run
    assert load_checkpoint(find_checkpoint("last", home)).config.train.tokens == 30_720  # whole rounds
    notes.write_text(TEXT + "And then it was not.\n")
    changed = words(weft(*train))
    assert " B of text -> " in changed
    assert "Nothing was started" in changed
    file = notes.with_name("notes.toml")
    assert f"`weft --home {home} train {file} --after {run[:8]}`" in changed  # which has what the file says
    assert f"`weft --home {home} train {file} --new`" in changed
