"""`weft.train` from Python: a run to its end, with callbacks, broken off, joined, and shown."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import weft
from unit.cli.small import RUN, TEXT
from weft.config import load
from weft.dashboard.chart import Chart
from weft.errors import ConfigError
from weft.events import Entry, Notice, PeerStopped, RoundCommitted, StepDone
from weft.net.transport.tls import TlsConfig
from weft.peer.peer import Outcome
from weft.run.config import RunFile
from weft.run.machine import CapsConfig, PeerConfig

ENDS_S = 90.0  # only ends a test that would hang
SETTINGS = PeerConfig(device="cpu", transports=("tls",), tls=TlsConfig(host="127.0.0.1"))


def machine(folder: Path, name: str = "home") -> weft.Machine:
    return weft.Machine(home=folder / name, settings=SETTINGS)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("tokens = 320", "tokens = 1920"))  # two rounds
    return path


def test_a_run_is_trained_to_its_end_and_callbacks_have_all_events(run_file: Path, tmp_path: Path) -> None:
    entries: list[Entry] = []
    threads = set[int]()

    def keep(entry: Entry) -> None:
        entries.append(entry)
        threads.add(threading.get_ident())

    chart = weft.Chart()
    outcome = weft.train(run_file, machine=machine(tmp_path), callbacks=[keep, chart], on_ticket=lambda _: None)
    assert (outcome.reason, outcome.committed_tokens) == ("complete", 1920)
    assert threads == {threading.get_ident()}
    assert isinstance(entries[-1].event, PeerStopped)
    run = weft.Run.load(tmp_path / "home" / "runs" / outcome.run.run)
    assert [entry.event for entry in run.entries] == [entry.event for entry in entries]
    records = run.frame()
    assert [each["round"] for each in records] == list(range(1, outcome.round + 1))
    assert records[-1]["committed_tokens"] == 1920
    assert records[-1]["loss"] > 0
    assert [each["name"] for each in run.frame("peers")] == [run.history.name(outcome.peer)]
    assert len(run.frame("StepDone")) == sum(isinstance(entry.event, StepDone) for entry in entries) > 0
    assert "2 rounds, 1.92k tokens, loss" in chart.html()
    assert "<svg" in chart.html()


def test_a_run_that_was_changed_is_gone_on_with_or_begun_beside_it_as_is_wished(run_file: Path, tmp_path: Path) -> None:
    first = weft.train(run_file, machine=machine(tmp_path), on_ticket=lambda _: None)
    run_file.write_text(run_file.read_text().replace("tokens = 1920", "tokens = 2880"))
    with pytest.raises(ConfigError, match=r'at round 2.*train\.tokens 1,920 -> 2,880.*wish="go on".*wish="new"'):
        weft.train(run_file, machine=machine(tmp_path), on_ticket=lambda _: None)
    longer = weft.train(run_file, wish="go on", machine=machine(tmp_path), on_ticket=lambda _: None)
    assert (longer.run.run, longer.committed_tokens) == (first.run.run, 2880)
    other = weft.train(run_file, wish="new", machine=machine(tmp_path), on_ticket=lambda _: None)
    assert other.run.run != first.run.run


def test_what_has_no_effect_is_told(run_file: Path, tmp_path: Path) -> None:
    entries: list[Entry] = []
    run_file.write_text(run_file.read_text() + '[method]\ntype = "dpsgd"\nevery = 5\ndegree = 3\n')
    settings = msgspec.structs.replace(SETTINGS, caps=CapsConfig(vram_nbytes=10**9))
    here = weft.Machine(home=tmp_path / "home", settings=settings)
    weft.train(run_file, machine=here, callbacks=[entries.append], on_ticket=lambda _: None)
    told = [
        each.event.text for each in entries if isinstance(each.event, Notice) and "have no effect" in each.event.text
    ]
    assert told == [
        "machine: settings: these have no effect here, since device is cpu, which has no memory of its own: "
        "caps.vram_nbytes",
        "config: these have no effect here, since graph is ring, and only a random one has a degree: method.degree",
    ]


def test_records_are_what_pandas_takes(run_file: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is an extra")
    outcome = weft.train(run_file, machine=machine(tmp_path), on_ticket=lambda _: None)
    frame = pandas.DataFrame(weft.Run.load(outcome.checkpoint.parent).frame())
    assert frame["tokens"].sum() == 1920
    assert frame["loss"].dtype == float


def test_a_table_and_a_run_file_are_taken_as_a_path_is(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    described: RunFile = load(run_file, RunFile)
    found = [
        weft.train(given, machine=machine(tmp_path, f"home{number}"), on_ticket=lambda _: None)
        for number, given in enumerate((run_file, described, msgspec.to_builtins(described)))
    ]
    assert len({outcome.run.run for outcome in found}) == 1
    assert len({outcome.replica for outcome in found}) == 1


def test_a_callback_that_raises_ends_the_peer_which_goes_on_later(run_file: Path, tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    entries: list[Entry] = []

    def breaks(entry: Entry) -> None:
        entries.append(entry)
        if isinstance(entry.event, RoundCommitted):
            raise Broken

    longer = tmp_path / "longer.toml"
    longer.write_text(RUN.replace("tokens = 320", "tokens = 32000"))
    with pytest.raises(Broken):
        weft.train(longer, machine=machine(tmp_path), callbacks=[breaks], on_ticket=lambda _: None)
    logs = weft.Run.load(tmp_path / "home" / "runs")
    assert logs.frame("PeerStopped")[-1]["reason"] == "Broken"
    with pytest.raises(Broken):
        weft.train(longer, machine=machine(tmp_path), callbacks=[breaks], on_ticket=lambda _: None)
    rounds = [entry.event.round for entry in entries if isinstance(entry.event, RoundCommitted)]
    assert rounds == sorted(set(rounds))
    assert len(rounds) == 2


@pytest.mark.full
@pytest.mark.parametrize("is_private", [False, True])
def test_two_train_together_by_a_ticket(run_file: Path, tmp_path: Path, is_private: bool) -> None:
    tickets, found = list[str](), dict[str, Outcome]()
    has_ticket = threading.Event()

    def told(ticket: str) -> None:
        tickets.append(ticket)
        has_ticket.set()

    def first() -> None:
        described = run_file.read_text().replace("peers = 1", "peers = 2").replace("tokens = 1920", "tokens = 6400")
        run_file.write_text("is_private = true\n" * is_private + described)
        found["a"] = weft.train(run_file, wait_for=2, machine=machine(tmp_path, "a"), on_ticket=told)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    assert has_ticket.wait(ENDS_S)
    own = tmp_path / "own.txt"
    own.write_text(TEXT)
    data = [own] if is_private else []
    odd, why = ([], r"is private.*data=") if is_private else ([own], r"is not private.*Leave out.*data=")
    with pytest.raises(ConfigError, match=why):
        weft.train(ticket=tickets[0], data=odd, machine=machine(tmp_path, "b"))
    with pytest.raises(ConfigError, match=r"names its files in the run file"):
        weft.train(run_file, data=[own], machine=machine(tmp_path, "c"))
    entries, terms = list[Entry](), list[str]()
    joined = {"data": data, "machine": machine(tmp_path, "b"), "callbacks": [entries.append], "on_terms": terms.append}
    found["b"] = weft.train(ticket=tickets[0], **joined)
    assert "bytes a day are not known" in terms[0]
    assert terms == [
        each.event.text for each in entries if isinstance(each.event, Notice) and "joining" in each.event.text
    ]
    thread.join(ENDS_S)
    assert not thread.is_alive()
    assert {outcome.reason for outcome in found.values()} == {"complete"}
    assert len({outcome.replica for outcome in found.values()}) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "needs a config, to make a run, or ticket"),
        ({"config": {}, "ticket": "weft1"}, "needs a config, to make a run, or ticket"),
        ({"config": 3}, "config is 3, of type int"),
        ({"config": {"nmae": "x"}}, "nmae"),
        ({"config": "no/run.toml"}, "no such file"),
        ({"config": {}, "wait_for": 0}, "wait_for is 0"),
        ({"config": {}, "machine": "here"}, "machine is 'here'"),
        ({"ticket": 3}, "ticket is 3"),
        ({"config": {}, "wish": "anew"}, "wish is 'anew'"),
        ({"ticket": "weft1", "data": "text.txt"}, "data is 'text.txt'"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_reason(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        weft.train(**{"machine": machine(tmp_path), **arguments})


def test_a_kind_of_records_that_is_not_there_is_named(run_file: Path, tmp_path: Path) -> None:
    weft.train(run_file, machine=machine(tmp_path), on_ticket=lambda _: None)
    run = weft.Run.load(tmp_path / "home" / "runs")
    with pytest.raises(ConfigError, match=r"'losses': there is none\. There are: rounds, peers, .*StepDone"):
        run.frame("losses")


def test_a_chart_of_nothing_is_a_picture_still() -> None:
    assert "0 rounds" in Chart().html()
