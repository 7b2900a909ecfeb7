"""`weft train` from a home that has trained before."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from unit.cli.small import Weft
from unit.cli.test_bad_input import LOCAL, refused
from weft.cli.home import find_checkpoint
from weft.errors import ConfigError
from weft.events import Notice, RoundCommitted
from weft.ids import PeerId
from weft.launch.runs import names_in
from weft.log import read_jsonl
from weft.peer.state.checkpoint import load, read_contents, save
from weft.run.config import RunConfig
from weft.run.genesis import initial
from weft.store.home import Home
from weft.sync.records.charter import Settings

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


def test_a_run_of_this_home_goes_on_without_its_run_file(weft: Weft, run_path: Path, home: Path) -> None:
    assert weft("train", run_path, *TWO_ROUNDS, *LOCAL, "--until", "1rounds").code == 0
    run = find_checkpoint("last", home).parents[1].name
    run_path.unlink()
    (run_path.parent / "text.txt").unlink()
    answer = weft("train", "small", *LOCAL)
    assert answer.code == 0, answer.err
    assert "complete after 320 tokens, round 2" in answer.out
    assert rounds(home, run) == [1, 2]
    for given in ("last", run[:8]):
        assert "round 2" in weft("train", given, *LOCAL).out
    assert [path.name for path in (home / "runs").iterdir()] == [run]


def test_a_run_that_would_begin_anew_or_lacks_its_data_is_refused(weft: Weft, run_path: Path, home: Path) -> None:
    assert weft("train", run_path, *TWO_ROUNDS, *LOCAL, "--until", "1rounds").code == 0
    run = load(find_checkpoint("last", home)).config
    assert isinstance(run, RunConfig)
    refused(weft, 2, "--set, --new: last is a run of", "train", "last", *LOCAL, "--set", "train.tokens=9", "--new")
    said = refused(weft, 2, "--length: last is a run of", "train", "last", *LOCAL, "--length", "5Mtokens")
    assert "weft train TEXT --go-on --length 10Mtokens" in said
    assert "--set" not in said
    key = Path(weft("keys", "new", home / "other.pem").out.split()[1])
    refused(weft, 40, "would begin anew", "train", "last", *LOCAL, "--key", key)
    (home / "shards" / run.data.train[0].digest).unlink()
    refused(weft, 11, "1 of the 2 pieces of its data are not here", "train", "last", *LOCAL)


def test_that_a_run_goes_on_is_said(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL)
    assert weft(*train, "--until", "1rounds").code == 0
    assert weft(*train).code == 0
    (log,) = (home / "runs").glob("*/*/log.jsonl")
    notices = [entry.event.text for entry in read_jsonl(log) if isinstance(entry.event, Notice)]
    assert any("going on with run" in text and "from round 1" in text for text in notices)


LONGER = ("--set", "train.tokens=640")


def rounds(home: Path, run: str) -> list[int]:
    (log,) = (home / "runs" / run).glob("*/log.jsonl")
    return [entry.event.round for entry in read_jsonl(log) if isinstance(entry.event, RoundCommitted)]


def notices(home: Path) -> list[str]:
    (log,) = (home / "runs").glob("*/*/log.jsonl")
    return [entry.event.text for entry in read_jsonl(log) if isinstance(entry.event, Notice)]


def test_a_changed_run_file_begins_nothing_anew_unasked(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    (run,) = [path.name for path in (home / "runs").iterdir()]
    before = names_in(Home(home))
    changed = weft(*train, *LONGER)
    said = " ".join(changed.err.split())
    assert (changed.code, changed.out) == (ConfigError.exit_code, "")
    assert f"run {run[:8]} (small) at round 2" in said
    assert "train.tokens 320 -> 640" in said
    assert "--go-on" in said
    assert "--new" in said
    assert len(list((home / "runs").iterdir())) == 1
    assert names_in(Home(home)) == before, "what was refused leaves nothing"
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
    shorter = weft(*train, "--set", "train.tokens=480", "--go-on")
    assert (shorter.code, rounds(home, before.run)[-1]) == (ConfigError.exit_code, 4)
    assert "480 in all are asked for" in shorter.err
    assert "has already counted 640: nothing would be left" in " ".join(shorter.err.split())
    assert weft(*train, "--set", "train.tokens=1280", "--go-on", "--until", "1rounds").code == 0
    assert rounds(home, before.run)[-1] == 5
    assert [run["run"] for run in json.loads(weft("runs", "--json").out)["runs"]] == [before.run]
    shown = weft("train", "last", *(option for option in LOCAL if option != "--quiet"), "--until", "1rounds")
    assert "960 of 1.28k tokens (75 %)" in shown.err
    assert rounds(home, before.run)[-1] == 6
    assert json.loads(weft("status", "last", "--json").out)["total_tokens"] == 1280


def test_a_change_begins_at_what_the_run_is_now_and_not_at_what_its_file_was(
    weft: Weft, run_path: Path, home: Path
) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")

    def settings() -> Settings:
        charter = read_contents(find_checkpoint("last", home)).charter
        assert charter is not None
        return charter.settings

    def edit(old: str, new: str) -> None:
        run_path.write_text(run_path.read_text().replace(old, new))

    assert weft(*train, "--until", "1rounds").code == 0
    assert weft(*train, *LONGER, "--go-on", "--until", "1rounds").code == 0
    rate = ("--set", "train.schedule.lr=0.02")
    asked = " ".join(weft(*train, *rate).err.split())
    assert " -> 0.02" in asked
    assert "train.tokens" not in asked, "nobody has asked for another length"
    assert weft(*train, *rate, "--go-on", "--until", "1rounds").code == 0
    assert (settings().tokens, settings().schedule.lr) == (640, 0.02)
    assert "it was changed since its file was written: train.tokens 320 -> 640" in notices(home)[-1] + "".join(
        each for each in notices(home) if "with these changes" in each
    )
    edit("tokens = 320", "tokens = 960")  # what somebody changes in the file is asked for
    assert weft(*train, "--go-on", "--until", "1rounds").code == 0
    assert (settings().tokens, settings().schedule.lr) == (960, 0.02)
    assert weft(*train, "--set", "train.tokens=1280", "--go-on", "--until", "1rounds").code == 0
    assert weft(*train, "--set", "train.schedule.lr=0.01", "--go-on", "--until", "1rounds").code == 0
    assert (settings().tokens, settings().schedule.lr) == (1280, 0.01)
    assert weft(*train, "--until", "1rounds").code == 0, "without a change it goes on as it is"
    assert (settings().tokens, settings().schedule.lr) == (1280, 0.01)


def test_a_machine_with_room_for_texts_says_that_it_draws_them(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("serve_nbytes = 1_000_000\n")
    loud = (option for option in LOCAL if option != "--quiet")
    done = weft("train", run_path, *TWO_ROUNDS, *loud, "--machine", machine)
    assert done.code == 0, done.err
    assert "this peer draws text with the whole model: room for" in " ".join(done.err.split())


@pytest.mark.parametrize(("num_stages", "what"), [(1, "the model"), (2, "a stage")])
def test_room_for_no_text_is_refused_before_there_is_a_run(
    weft: Weft, run_path: Path, tmp_path: Path, home: Path, num_stages: int, what: str
) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("serve_nbytes = 100\n")
    stages = (f"stages={num_stages}", "model.num_layers=2", "model.is_tied=false", "method={type='ddp'}")
    changed = [word for each in stages for word in ("--set", each)]
    said = refused(weft, 2, "serve_nbytes: 100 bytes", "train", run_path, *changed, *LOCAL, "--machine", machine)
    assert f"64 tokens of {what} of this run take" in said
    assert names_in(Home(home)) == set()


def test_what_cannot_begin_is_no_run_of_this_home(weft: Weft, run_path: Path, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = weft("train", run_path, *TWO_ROUNDS, *LOCAL, "--port", taken.getsockname()[1])
    assert answer.code != 0
    assert names_in(Home(home)) == set()
    assert weft("train", run_path, *TWO_ROUNDS, *LOCAL).code == 0


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
        place = " in the place of --go-on" if more else ""
        after = f"--after {find_checkpoint('last', home).parents[1].name[:8]}"
        assert f"the same command with {after}{place}." in said
        assert f"begins anew: add --new{place} or give" in said
    assert weft(*train, "--new").code == 0
    assert len(list((home / "runs").iterdir())) == 2


def test_what_a_run_has_learnt_begins_another_on_more_text(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    run = find_checkpoint("last", home).parents[1].name
    text = run_path.parent / "text.txt"
    text.write_text(text.read_text() + "one more line\n")
    answer = weft(*train, "--after", "last")
    assert answer.code == 0, answer.err
    made = run_path.with_name("run-2.toml")
    said = " ".join(answer.err.split())
    assert f"run file: {made}" in said
    assert "so the loss may rise before it falls" in said
    assert "before the first round it was " in answer.out
    assert f"the new run small-2 begins with what run {run[:8]} (small) has learnt by round 2" in said
    other = find_checkpoint("small-2", home)
    began, learnt = load(other).config, load(find_checkpoint("small", home)).replicated["outer"]
    assert isinstance(began, RunConfig)
    assert began.predecessor == run
    weights = initial(began, Home(home))
    assert weights is not None
    assert torch.equal(weights, learnt)
    again = weft(*train, "--after", run[:8])  # finds what it has written, and begins nothing anew
    assert again.code == 0, again.err
    assert f"{made} begins with what run {run[:8]} had learnt" in " ".join(again.err.split())
    assert len(list((home / "runs").iterdir())) == 2
    same = weft(*train, "--after", "last")  # which is the new run by now
    assert f"{made} begins with what run {run[:8]} had learnt" in " ".join(same.err.split())
    assert weft("train", made, *LOCAL, "--quiet").code == 0
    assert rounds(home, other.parents[1].name) == [1, 2]
    assert sorted(path.name for path in run_path.parent.glob("*.toml")) == ["run-2.toml", "run.toml"]


def test_what_cannot_begin_another_is_refused_and_leaves_nothing(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    refused(weft, 17, "means nothing yet", *train, "--after", "last")
    assert weft(*train).code == 0
    refused(weft, 2, "exclude each other", *train, "--after", "last", "--go-on")
    refused(weft, 2, "and last is a run. Name the text", "train", "last", *LOCAL, "--after", "last")
    missing = refused(weft, 2, "more.txt is not here", "train", "more.txt", *LOCAL, "--after", "last")
    assert "there is no such file or folder in" in missing
    refused(weft, 2, "tokens", *train, "--after", "last", "--set", "train.tokens=none")
    assert weft("export", "last", run_path.parent / "ours").code == 0
    refused(weft, 2, "that is a model folder, not a run", *train, "--after", run_path.parent / "ours")
    assert sorted(path.name for path in run_path.parent.iterdir()) == ["home", "ours", "run.toml", "text.txt"]


def test_a_complete_run_says_so_and_asks_for_nobody(weft: Weft, run_path: Path, home: Path) -> None:
    seen = [option for option in LOCAL if option != "--quiet"]
    train = ("train", run_path, *TWO_ROUNDS, *seen)
    assert weft(*train).code == 0
    run = find_checkpoint("last", home).parents[1].name
    for given in (train, ("train", "last", *seen)):
        answer = weft(*given, "--wait-for", 3)
        assert answer.code == 0, answer.err
        first, *others = answer.err.splitlines()
        assert first.endswith(f"run {run[:8]} (small) is complete at round 2: nothing is left to train")
        assert [line for line in others if "held-out loss" not in line] == []
        assert answer.out.startswith("\nrun small: complete after 320 tokens, round 2")
        assert f"weft --home {home} train MORE.txt --after {run[:8]}" in answer.out


def test_what_several_hold_nobody_changes_alone_and_that_is_said_first(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    folder = find_checkpoint("last", home)
    snapshot = load(folder)
    assert snapshot.head is not None
    members = tuple(sorted((*snapshot.head.members, PeerId("a" * 64), PeerId("b" * 64))))
    head = msgspec.structs.replace(snapshot.head, members=members)
    save(folder, replace(snapshot, head=head, replicated=dict(snapshot.replicated)))
    run = folder.parents[1].name
    for more in ((), ("--go-on",)):
        said = " ".join(refused(weft, 2, "Nothing was started", *train, *LONGER, *more).split())
        assert f"3 members hold run {run[:8]} (small), this home among them, at round 2" in said
        assert "3 members hold it, and none of them may change it alone" in said
        assert f"the same command with --after {run[:8]}" in said
        assert "Python" not in said


def test_a_run_that_is_just_this_one_is_not_begun_anew(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train, "--new").code == 0  # nothing is here that it could go on with
    again = weft(*train, "--new")
    assert (again.code, again.out) == (ConfigError.exit_code, "")
    assert "at round 2, and it is exactly this run" in again.err
    assert "--set seed=1" in again.err
    assert weft(*train, "--new", "--set", "seed=1").code == 0
    assert len(list((home / "runs").iterdir())) == 2


def test_going_on_with_what_is_not_here_begins_nothing(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet", "--go-on")
    said = weft(*train)
    assert (said.code, said.out) == (ConfigError.exit_code, "")
    assert "no run called small" in said.err
    assert not (home / "runs").exists()


def test_a_run_is_not_begun_anew_by_another_key_unasked(weft: Weft, run_path: Path, home: Path, tmp_path: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    own, other = ("--key", tmp_path / "own.pem"), ("--key", tmp_path / "other.pem")
    assert weft(*train, *own, "--until", "1rounds").code == 0
    run = find_checkpoint("last", home).parents[1].name
    for key, words in ((other, "leave out --key"), ((), "name the key: --key FILE")):
        said = weft(*train, *key)
        assert (said.code, said.out) == (ConfigError.exit_code, "")
        assert f"run {run[:8]} (small) at round 1" in said.err
        assert words in said.err
        assert weft(*train, *key, *LONGER, "--go-on").code == ConfigError.exit_code
    assert "round 2" in weft(*train, *own).out
    assert rounds(home, run) == [1, 2]


def test_a_run_that_has_begun_waits_for_nobody_and_says_so(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train, "--until", "1rounds").code == 0
    assert weft(*train, "--wait-for", 2).code == 0
    assert any("it goes on with the peers that are here, and waits for no more" in text for text in notices(home))


def test_a_field_of_the_file_that_does_nothing_is_named(weft: Weft, run_path: Path) -> None:
    run_path.write_text(run_path.read_text() + '[method]\ntype = "async-diloco"\nmomentum = 0.0\ndelay = 3\n')
    why = "momentum is 0, so there is none to delay"
    for verb in (("train", run_path, *LOCAL, "--quiet"), ("plan", run_path, "--tokens-per-s", 1000)):
        said = weft(*verb)
        line = f"{run_path}: these have no effect here, since {why}: method.delay"
        assert (said.code, said.err.count(line)) == (0, 1), said.err


STAGES = ("--set", "stages=2", "--set", "model.num_layers=2", "--set", "model.is_tied=false")


@pytest.mark.slow  # a peer that is alone with a run of stages looks for others for half a minute
def test_of_a_run_with_stages_nothing_is_amended_and_nothing_begun_anew_unasked(
    weft: Weft, run_path: Path, home: Path
) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *STAGES, *LOCAL, "--quiet")
    first = weft(*train)
    assert first.code == 0, first.err
    (run,) = [path.name for path in (home / "runs").iterdir()]
    changed = weft(*train, *LONGER)
    said = " ".join(changed.err.split())
    assert (changed.code, changed.out) == (ConfigError.exit_code, "")
    assert f"run {run[:8]} (small) at round " in said
    assert "train.tokens 320 -> 640" in said
    assert "initial" not in said
    assert f"`weft gather {run[:8]}`, then the same command with --after {run[:8]}" in said
    assert "--go-on" not in said, "it could not"
    asked = weft(*train, *LONGER, "--go-on")
    assert asked.code == ConfigError.exit_code
    assert "each of its stages is a run of its own" in asked.err
    whole = weft("train", run_path, *TWO_ROUNDS, *STAGES[2:], *LOCAL, "--quiet")
    assert "stages 2 -> left out" in whole.err
    assert "pipeline" not in whole.err
    machine = run_path.parent / "m.toml"
    machine.write_text("micro_batch = 1\n")
    assert weft(*train, "--machine", machine, "--wait-for", 2).code == 0  # as it was: nothing is asked
    told = notices(home)
    assert any("and waits for no more" in text for text in told)
    assert any(text.endswith("sets the micro-batch for all peers (pipeline): micro_batch") for text in told)
    assert weft(*train, "--new").code == ConfigError.exit_code
    assert [path.name for path in (home / "runs").iterdir()] == [run]
    assert weft(*train, *LONGER, "--new").code == 0
    assert len(list((home / "runs").iterdir())) == 2
