"""`weft status`: of a run that trains in this process, and of logs."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from commits import committed
from unit.cli.company import founder
from unit.cli.small import Kept, Weft
from unit.cli.test_bad_input import refused
from unit.peer.crew import Member
from weft.events import VERSION, Entry, Evaluated, Event, LinkUp, Notice, PeerStarted, RoundCommitted, StepDone
from weft.ids import PeerId, Round, RunId, Step, Tokens
from weft.keys import Identity
from weft.launch.visit import visit
from weft.net.ticket import read
from weft.run.machine import PeerConfig

TLS = ("--transports", "tls")
A, B = PeerId("a1" * 32), PeerId("b2" * 32)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Member]:
    with founder(tmp_path / "a", num_rounds=1_000_000, wait_for=1, num_peers=1) as member:
        yield member


def commit(round: int, tokens: int, *counted: PeerId) -> RoundCommitted:
    return committed(
        round=Round(round),
        contributors=counted,
        tokens=Tokens(tokens),
        committed_tokens=Tokens(round * tokens),
        sent_nbytes=1000,
        received_nbytes=2000,
        work_s=2.0,
    )


def step(loss: float) -> StepDone:
    return StepDone(step=Step(1), loss=loss, learning_rate=1e-3, gradient_norm=1.0, num_tokens=512, duration_s=0.5)


def started(name: str) -> PeerStarted:
    return PeerStarted(run=RunId("e5" * 32), name=name, software="weft", device="cpu", num_parameters=1000)


def write_log(path: Path, peer: PeerId, *events: tuple[float, Event]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(Entry(v=VERSION, at=at, peer=peer, event=event)) for at, event in events]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_log(
        folder / A / "log.jsonl",
        A,
        (1.0, started("anna")),
        (4.0, step(3.0)),
        (6.0, commit(1, 1024, A, B)),
        (7.0, Evaluated(round=Round(1), loss=2.5, nats_per_byte=2.0, num_tokens=64, committed_tokens=Tokens(1024))),
    )
    write_log(folder / B / "log.jsonl", B, (2.0, started("bob")), (5.0, step(2.0)), (6.1, commit(1, 1024, A, B)))
    return folder


@pytest.mark.full
def test_a_running_run_tells_how_it_stands(weft: Weft, run: Member) -> None:
    answer = weft("status", run.ticket, "--json", *TLS)
    assert answer.code == 0, answer.err
    told = json.loads(answer.out)
    assert told["run"] == run.peer.run.name
    assert told["total_tokens"] == run.peer.run.train.tokens
    (peer,) = told["peers"]
    assert (peer["peer"], peer["name"], peer["speaks_for_itself"]) == (run.id, "founder", True)
    shown = weft("status", run.ticket, *TLS)
    assert "founder" in shown.out
    assert run.ticket not in shown.out + shown.err + answer.out + answer.err


@pytest.mark.full
def test_who_watches_is_no_peer_and_is_told_to_others_who_do(weft: Weft, run: Member) -> None:
    watches, is_over = threading.Event(), threading.Event()

    async def look() -> None:
        async with visit(read(run.ticket), Identity.generate(), PeerConfig(transports=("tls",))):
            watches.set()
            await asyncio.to_thread(is_over.wait, 60)

    thread = threading.Thread(target=lambda: asyncio.run(look()))
    thread.start()
    try:
        assert watches.wait(60)
        time.sleep(2.5)  # a bulletin is of two seconds
        told = json.loads(weft("status", run.ticket, "--json", *TLS).out)
    finally:
        is_over.set()
        thread.join(60)
    assert [peer["peer"] for peer in told["peers"]] == [run.id]
    assert told["watching"] == 1


def test_logs_of_several_peers_are_one_run(weft: Weft, runs: Path) -> None:
    told = json.loads(weft("status", runs, "--json").out)
    assert (told["round"], told["committed_tokens"], told["nats_per_byte"]) == (1, 1024, 2.0)
    assert told["loss"] == 2.5  # of both steps
    assert [(peer["name"], peer["state"]) for peer in told["peers"]] == [("anna", "training"), ("bob", "training")]
    shown = weft("status", runs)
    assert "anna" in shown.out
    assert "bob" in shown.out


def test_a_run_of_this_home_is_found_by_its_name_its_digits_or_as_the_last(weft: Weft, kept: Kept) -> None:
    write_log(kept.folder.parent / "log.jsonl", A, (1.0, started("anna")), (2.0, step(3.0)), (3.0, commit(1, 64, A)))
    for given in ("last", "small", kept.run.run[:8]):
        answer = weft("status", given, "--json")
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)["committed_tokens"] == 64
        assert f"this is run {kept.run.run[:8]} (small), as peers here have logged it; none of them runs" in answer.err
    refused(weft, 17, f"holds runs {kept.run.run[:8]} (small)", "status", "smell")
    refused(weft, 17, "status last` tells of the last run", "status")


def test_a_folder_or_file_that_is_none_of_it_does_not_hide_the_run_of_its_name(
    weft: Weft, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(kept.folder.parent / "log.jsonl", A, (1.0, started("anna")), (2.0, step(3.0)), (3.0, commit(1, 64, A)))
    here = tmp_path / "here"
    (here / "small").mkdir(parents=True)
    (here / "small" / "lines.jsonl").write_text('{"text": "not an event"}\n')
    monkeypatch.chdir(here)
    run = f"so run {kept.run.run[:8]} (small) of this home is taken"
    answer = weft("status", "small", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["committed_tokens"] == 64
    assert f"the folder small holds no log of events, {run}" in " ".join(answer.err.split())
    answer = weft("inspect", "small")
    assert answer.code == 0, answer.err
    assert f"the folder small holds no checkpoint, {run}" in " ".join(answer.err.split())
    refused(weft, 2, "line 1 is not an event", "status", "./small")  # a path is a path
    shutil.rmtree("small")
    Path("small").write_text("words\n")
    for verb in ("status", "inspect"):
        answer = weft(verb, "small")
        assert answer.code == 0, answer.err
        assert "the file small holds no " in " ".join(answer.err.split())


@pytest.mark.full
def test_a_run_of_which_a_member_is_here_is_told_by_its_members(weft: Weft, run: Member, home: Path) -> None:
    folder = home / "runs" / run.peer.run.run / run.id
    folder.mkdir(parents=True)
    (folder / "ticket").write_text(run.ticket)  # its key is elsewhere: it is taken to run
    answer = weft("status", run.peer.run.run[:8], "--json", *TLS)
    assert answer.code == 0, answer.err
    assert [peer["name"] for peer in json.loads(answer.out)["peers"]] == ["founder"]
    assert "as its members tell" in answer.err


def test_one_log_is_enough(weft: Weft, runs: Path) -> None:
    told = json.loads(weft("status", runs / B / "log.jsonl", "--json").out)
    assert [peer["name"] for peer in told["peers"]] == ["bob"]
    assert told["loss"] == 2.0


def test_what_is_no_run_is_refused_with_what_there_is_to_give(weft: Weft, tmp_path: Path) -> None:
    refused(weft, 2, "no log of events", "status", tmp_path)
    refused(weft, 17, "is not a ticket, a log file (log.jsonl), a folder of a run, or a run of", "status", "nothing")
    (tmp_path / "log.jsonl").write_text("no event\n")
    refused(weft, 2, "line 1 is not an event", "status", tmp_path)
    refused(weft, 17, "There is no run in", "status")


def test_markup_and_control_characters_in_a_log_are_shown_as_text(weft: Weft, tmp_path: Path) -> None:
    hostile = "\x1b[2J[bold red]<script>alert(1)</script>"
    link = LinkUp(remote=B, transport="tls", address="10.0.0.1:1")
    write_log(tmp_path / "log.jsonl", A, (1.0, started(hostile)), (2.0, link), (3.0, Notice(text=hostile)))
    shown = weft("status", tmp_path)
    assert shown.code == 0
    assert "\x1b[2J" not in shown.out
    assert "[bold red]" in shown.out.replace("\n", "")
