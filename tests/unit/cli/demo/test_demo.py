"""What the demo decides: its folder, its length, its verdict. The processes are run in tests/slow."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from weft.cli.demo.run import Follower, Wishes, finished_run, judge, prepare, read_report, run_demo, with_tokens
from weft.cli.demo.swarm import PeerFailed, Swarm
from weft.cli.plan import speed_here as here
from weft.cli.plan.speed_here import tokens_in, usual_s
from weft.cli.run.running import Report
from weft.cli.screen.screen import PlainScreen
from weft.config import load
from weft.dashboard.view import View
from weft.data.tokenizer import ByteTokenizer
from weft.errors import CheckpointError, ConfigError
from weft.run.config import RunFile
from weft.run.genesis import resolve
from weft.sync.method.schedule import CosineConfig

REPORT = Report(
    reason="complete",
    run="ab" * 32,
    peer="cd" * 32,
    round=7,
    committed_tokens=1000,
    replica="ef" * 32,
    loss=1.8,
    nats_per_byte=1.8,
    sample=None,
    sent_nbytes=1,
    received_nbytes=1,
    checkpoint="c",
)


def wishes(*, tokens: int | None = None, is_fresh: bool = False, num_peers: int | None = None) -> Wishes:
    return Wishes(num_peers, None, tokens, is_fresh=is_fresh, is_quiet=True)


def swarm_in(folder: Path, *names: str) -> Swarm:
    return Swarm(folder, names, 1)


def test_the_recipe_is_in_the_package_and_is_under_a_million_parameters(tmp_path: Path) -> None:
    from weft.model.config import num_parameters

    assert (files("weft") / "recipes" / "demo.toml").is_file()
    run_file = prepare(tmp_path / "demo", wishes())
    assert num_parameters(resolve(run_file, ByteTokenizer(), tmp_path)) < 1_000_000
    assert load(tmp_path / "demo" / "demo.toml", RunFile) == run_file


def test_another_length_stretches_the_whole_schedule(tmp_path: Path) -> None:
    full = prepare(tmp_path / "full", wishes())
    half = prepare(tmp_path / "half", wishes(tokens=full.train.tokens // 2, num_peers=2))
    assert half.peers == 2
    assert half.train.tokens * 2 == full.train.tokens
    assert isinstance(full.train.schedule, CosineConfig)
    assert isinstance(half.train.schedule, CosineConfig)
    assert half.train.schedule.total_tokens * 2 == full.train.schedule.total_tokens
    assert half.train.schedule.lr == full.train.schedule.lr


def test_tokens_of_a_schedule_are_scaled_and_nothing_else() -> None:
    tree = {"name": "x", "train": {"tokens": 100, "schedule": {"lr": 1.0, "warmup_tokens": 10, "total_tokens": 100}}}
    assert with_tokens(tree, 300) == {
        "name": "x",
        "train": {"tokens": 300, "schedule": {"lr": 1.0, "warmup_tokens": 30, "total_tokens": 300}},
    }


class _Steps:
    """A clock on which steps take as long as it is told, over and over."""

    def __init__(self, *steps_s: float) -> None:
        self._now, self._num, self._steps_s = 0.0, 0, steps_s

    def now(self) -> float:
        if self._num % 2:  # the second look at it ends a step
            self._now += self._steps_s[self._num // 2 % len(self._steps_s)]
        self._num += 1
        return self._now

    def wall(self) -> float:
        raise AssertionError("no step is timed by the wall clock")


def test_minutes_become_whole_rounds_of_tokens(tmp_path: Path) -> None:
    run_file = prepare(tmp_path / "demo", wishes())
    per_round = run_file.peers * run_file.train.batch_size * run_file.train.seq_len * run_file.method.every  # type: ignore[union-attr]
    few, many = tokens_in(run_file, 1.0, 10_000.0), tokens_in(run_file, 1000.0, 10_000.0)
    assert few % per_round == 0 == many % per_round
    assert few == per_round  # one round at least
    assert 0.5 * 1000 * 40_000 < many < 1000 * 40_000


def test_a_step_takes_what_half_of_them_take_at_most() -> None:
    """One was lucky, and a program beside it made one a hundred times as long."""
    assert usual_s(lambda: None, _Steps(0.3, 30.0, 0.2, 0.3, 0.4)) == pytest.approx(0.3)


@pytest.mark.parametrize(("step_s", "num"), [(0.125, 3 + 24), (1.0, 3 + 8), (4.0, 3 + 3), (40.0, 1 + 1)])
def test_of_long_steps_fewer_are_made(step_s: float, num: int) -> None:
    made = []
    assert usual_s(lambda: made.append(None), _Steps(step_s)) == pytest.approx(step_s)
    assert len(made) == num


@pytest.mark.full
def test_a_peer_is_timed_with_its_own_threads_and_has_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file, before = prepare(tmp_path / "demo", wishes(num_peers=4)), torch.get_num_threads()
    model, alone = (
        resolve(run_file, ByteTokenizer(), tmp_path),
        run_file.train.batch_size * run_file.train.seq_len / 0.5,
    )
    threads = []

    def half_a_second(step: Callable[[], None]) -> float:
        threads.append(torch.get_num_threads())
        step()
        return 0.5

    found, others = [], []
    monkeypatch.setattr(here, "_others", lambda num, *_: others.append(num) or nullcontext())
    for cores in (1, 2, 4, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _process, cores=cores: set(range(cores)), raising=False)
        found.append(here.measure(model, run_file.train, 4, half_a_second, on="cpu").tokens_per_s / alone)
    assert found == pytest.approx([0.25, 0.5, 1, 1])
    assert threads == [1, 1, 1, 2]
    assert others == [0, 1, 3, 3]  # that work beside it: as many as have cores of their own
    assert torch.get_num_threads() == before


@pytest.mark.full
def test_who_is_timed_among_others_has_them_at_work_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "num_cores", lambda: 2)
    run_file = prepare(tmp_path / "demo", wishes(num_peers=2))
    model, beside = resolve(run_file, ByteTokenizer(), tmp_path), list[psutil.Process]()

    def look(step: Callable[[], None]) -> float:
        mine = {each.pid for each in multiprocessing.active_children()}
        beside.extend(psutil.Process(pid) for pid in mine)
        before = [sum(each.cpu_times()[:2]) for each in beside]
        while any(sum(each.cpu_times()[:2]) <= used + 0.1 for each, used in zip(beside, before, strict=True)):
            step()
        return 1.0

    here.measure(model, run_file.train, 2, look, on="cpu")
    assert len(beside) == 1
    assert not beside[0].is_running()


@pytest.mark.full
def test_minutes_say_what_was_measured_and_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.training.device.best", lambda: "cuda")  # which the demo's peers do not train on
    monkeypatch.setattr(here, "usual_s", lambda step: step() or 0.1)
    wished = Wishes(2, 0.5, None, is_fresh=False, is_quiet=True)
    run_file = prepare(tmp_path / "demo", wished)
    said = " ".join(capsys.readouterr().err.split())
    assert f"together they train on about {run_file.train.tokens:,} tokens in 0.5 minutes" in said
    assert "tokens/s by each of 2 peers (cpu, threads: " in said


def test_peers_have_threads_for_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def swarm(_folder: Path, names: tuple[str, ...], num_threads: int) -> Swarm:
        raise Started(names, num_threads)

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3, 5, 7, 9}, raising=False)
    monkeypatch.setattr("weft.cli.demo.run.Swarm", swarm)
    with pytest.raises(Started) as caught:
        run_demo(tmp_path / "demo", wishes(num_peers=2))
    assert caught.value.args == (("peer 1", "peer 2"), 2)


def test_a_demo_that_is_there_is_taken_up_as_it_was(tmp_path: Path) -> None:
    first = prepare(tmp_path / "demo", wishes(tokens=50_000))
    assert prepare(tmp_path / "demo", wishes()) == first
    for other in (wishes(tokens=60_000), wishes(num_peers=2)):
        with pytest.raises(ConfigError, match="--fresh"):
            prepare(tmp_path / "demo", other)


def test_fresh_removes_an_earlier_demo_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    prepare(folder, wishes(tokens=50_000))
    (folder / "home").mkdir()
    assert prepare(folder, wishes(tokens=60_000, is_fresh=True)).train.tokens == 60_000
    assert not (folder / "home").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(ConfigError, match="holds no demo"):
        prepare(other, wishes(is_fresh=True))
    assert (other / "mine").exists()


def test_a_demo_is_finished_once_every_peer_says_complete(tmp_path: Path) -> None:
    swarm = swarm_in(tmp_path, "peer 1", "peer 2")
    swarm.report("peer 1").write_bytes(msgspec.json.encode(REPORT))
    assert finished_run(swarm) is None
    stopped = msgspec.structs.replace(REPORT, reason="stopped by SIGTERM")
    swarm.report("peer 2").write_bytes(msgspec.json.encode(stopped))
    assert finished_run(swarm) is None
    swarm.report("peer 2").write_bytes(msgspec.json.encode(REPORT))
    assert finished_run(swarm) == REPORT.run


def test_half_a_report_is_none(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"reason": "complete"}))
    with pytest.raises(CheckpointError, match="does not say"):
        read_report(tmp_path / "r.json")


@pytest.mark.parametrize(("ngram", "verdict"), [(2.0, "this model is better"), (1.5, "this model is not better yet")])
def test_the_verdict_names_both_figures(ngram: float, verdict: str) -> None:
    lines = "\n".join(judge(REPORT, View(), ngram))
    assert "1.8000 nats per byte" in lines
    assert f"n-gram model of the same text has {ngram:.4f}:" in lines
    assert verdict in lines


def test_bytes_of_all_peers_are_told_as_sent_once_and_received_once() -> None:
    view = replace(View(), sent_nbytes=3_000_000, received_nbytes=3_000_000, ring_nbytes=600_000_000)
    lines = "\n".join(judge(REPORT, view, 2.0))
    assert "3 MB sent by all peers together, as much received" in lines
    assert "ring DDP, which exchanges gradients at every step: 600 MB, 100 times as much" in lines


@pytest.mark.full
def test_a_founder_that_cannot_begin_is_said_with_its_own_code_and_words(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("nam = 1\n")
    swarm = swarm_in(tmp_path, "peer 1")
    with pytest.raises(PeerFailed, match=r"peer 1 ended with code 2; it said: weft: .*bad\.toml") as failed:
        swarm.start(tmp_path / "bad.toml")
    swarm.end()
    assert failed.value.exit_code == 2


def test_news_are_read_once_line_by_line_from_all_peers(tmp_path: Path) -> None:
    from weft.events import Entry, Notice
    from weft.ids import PeerId, RunId

    swarm = swarm_in(tmp_path, "peer 1", "peer 2")
    swarm.take_up(RunId("ab" * 32))
    logs = [swarm.home / "runs" / ("ab" * 32) / (letter * 64) / "log.jsonl" for letter in "cd"]
    line = {
        n: msgspec.json.encode(Entry(v=1, at=float(n), peer=PeerId("c" * 64), event=Notice(text=str(n)))) + b"\n"
        for n in range(4)
    }
    for log, numbers in zip(logs, ((0, 3), (1,)), strict=True):
        log.parent.mkdir(parents=True)
        log.write_bytes(b"".join(line[n] for n in numbers))
    with logs[1].open("ab") as file:
        file.write(line[2][:20])  # being written just now
    assert [entry.at for entry in swarm.news()] == [0.0, 1.0, 3.0]
    assert swarm.news() == []
    with logs[1].open("ab") as file:
        file.write(line[2][20:])
    assert [entry.at for entry in swarm.news()] == [2.0]


def test_a_demo_that_goes_on_says_that_its_peers_come_back_and_a_complete_one_that_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    prepare(folder, wishes(num_peers=2))
    assert "2 peers on this machine, which train one model on the source code of Python" in capsys.readouterr().err
    prepare(folder, wishes())
    assert "its 2 peers come back where they stopped" in capsys.readouterr().err
    for name in ("peer 1", "peer 2"):
        swarm_in(folder, name).report(name).write_bytes(msgspec.json.encode(REPORT))
    prepare(folder, wishes())
    said = capsys.readouterr().err
    assert "is complete" in said
    assert "come back" not in said


def test_what_was_told_before_this_start_is_taken_and_not_said_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.events import Entry, Notice
    from weft.ids import PeerId, RunId

    swarm, screen = swarm_in(tmp_path, "peer 1"), PlainScreen()
    swarm.take_up(RunId("ab" * 32))
    follower = Follower(swarm, screen)
    log = swarm.home / "runs" / ("ab" * 32) / ("c" * 64) / "log.jsonl"
    log.parent.mkdir(parents=True)
    told = (("long ago", 5.0), ("just now", time.time() + 5))
    entries = [Entry(v=1, at=at, peer=PeerId("c" * 64), event=Notice(text=text)) for text, at in told]
    log.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    follower.follow()
    said = capsys.readouterr().err
    assert "just now" in said
    assert "long ago" not in said
