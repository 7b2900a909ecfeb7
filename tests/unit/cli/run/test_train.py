"""`weft train` from a home that has trained before."""

from pathlib import Path

from unit.cli.small import Weft
from unit.cli.test_bad_input import LOCAL
from weft.cli.home import find_checkpoint
from weft.errors import ConfigError
from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.peer.state.checkpoint import load, read_contents

TWO_ROUNDS = ("--set", "method={type='fedavg', every=5}")


def test_a_run_that_is_taken_up_and_left_does_not_become_the_last(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    first = find_checkpoint("last", home)
    assert weft(*train, "--set", "name=other").code == 0
    other = find_checkpoint("last", home)
    assert other != first
    assert "complete" in weft(*train).out  # and nothing was trained
    assert find_checkpoint("last", home) == other


LONGER = ("--set", "train.tokens=640")


def rounds(home: Path, run: str) -> list[int]:
    (log,) = (home / "runs" / run).glob("*/log.jsonl")
    return [entry.event.round for entry in read_jsonl(log) if isinstance(entry.event, RoundCommitted)]


def test_a_changed_run_file_begins_nothing_anew_unasked(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    (run,) = [path.name for path in (home / "runs").iterdir()]
    changed = weft(*train, *LONGER)
    said = " ".join(changed.err.split())
    assert (changed.code, changed.out) == (ConfigError.exit_code, "")
    assert f"run {run[:8]} (small) at round 2" in said
    assert "train.tokens 320 -> 640" in said
    assert "--go-on" in said
    assert "--new" in said
    assert len(list((home / "runs").iterdir())) == 1
    assert weft(*train, *LONGER, "--go-on", "--new").code == ConfigError.exit_code


def test_who_holds_a_run_alone_trains_it_longer(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    before = read_contents(find_checkpoint("last", home))
    longer = weft(*train, *LONGER, "--go-on")
    assert longer.code == 0, longer.err
    assert "complete after 640 tokens, round 4" in longer.out
    after = read_contents(find_checkpoint("last", home))
    assert after.run == before.run
    assert after.charter is not None
    assert after.charter.settings.tokens == 640
    assert after.counters["num_steps"] == 2 * before.counters["num_steps"], "the optimizer goes on"
    assert rounds(home, before.run) == [1, 2, 3, 4]
    again = weft(*train, *LONGER)  # the file says now what the run is: nothing is asked
    assert (again.code, "round 4" in again.out) == (0, True)
    assert weft(*train, "--set", "train.tokens=960", "--go-on").code == 0
    assert rounds(home, before.run)[-1] == 6


def test_a_run_in_the_middle_takes_another_rate(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train, "--until", "1rounds").code == 0
    rate = ("--set", "train.schedule.lr=0.02")
    assert " -> 0.02" in " ".join(weft(*train, *rate).err.split())
    assert "round 2" in weft(*train, *rate, "--go-on").out
    contents = read_contents(find_checkpoint("last", home))
    assert contents.charter is not None
    assert contents.charter.settings.schedule.lr == 0.02


def test_more_text_is_another_run_and_is_told_how(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    text = run_path.parent / "text.txt"
    text.write_text(text.read_text() + "one more line\n")
    for more in ((), ("--go-on",)):
        said = " ".join(weft(*train, *more).err.split())
        assert " B of text -> " in said
        assert "weft export" in said
    assert weft(*train, "--new").code == 0
    assert len(list((home / "runs").iterdir())) == 2


def test_what_a_run_has_learnt_begins_another_on_more_text(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    run = find_checkpoint("last", home).parents[1].name
    assert weft("export", "last", run_path.parent / "ours").code == 0
    text = run_path.parent / "text.txt"
    text.write_text(text.read_text() + "one more line\n")
    start = ("model={type='folder', path='ours'}", "tokenizer={type='json', path='ours'}", f"predecessor='{run}'")
    answer = weft(*train, *(word for change in start for word in ("--set", change)))
    assert answer.code == 0, answer.err
    other = find_checkpoint("last", home)
    assert other.parents[1].name != run
    assert load(other).config.predecessor == run
