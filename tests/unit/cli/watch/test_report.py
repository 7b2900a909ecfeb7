"""`weft report` and `weft compare`: what they write of logs, and that nothing private or dangerous is in it."""

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from unit.cli.small import Kept, Weft
from unit.cli.test_bad_input import LOCAL, refused
from unit.cli.watch.test_status import A, B, commit, started, step, write_log
from weft.config import dump, load
from weft.dashboard.report import FAULTS
from weft.dashboard.words import _ROWS, WARNING, in_words
from weft.events import (
    BranchOpened,
    DataReady,
    Evaluated,
    Event,
    LinkDown,
    LinkUp,
    MemberGone,
    Notice,
    PayloadOffered,
    PeerStopped,
    RoundMissed,
    TransportUp,
    WorkDropped,
)
from weft.ids import BranchId, Round, Tokens
from weft.run.config import RunFile

HOSTILE = "<script>alert(1)</script>"


def offered(round: int, tokens: int) -> PayloadOffered:
    return PayloadOffered(round=Round(round), tokens=Tokens(tokens), nbytes=9)


def evaluated(committed: int, loss: float) -> Evaluated:
    return Evaluated(
        round=Round(1), loss=loss, nats_per_byte=loss / 2, num_tokens=9, committed_tokens=Tokens(committed)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    link = LinkUp(remote=B, transport="tls", address="tls://10.1.2.3:4")
    write_log(
        folder / A / "log.jsonl",
        A,
        (1.0, started("anna")),
        (1.5, link),
        (2.0, step(3.0)),
        (2.5, offered(1, 768)),
        (3.0, commit(1, 1024, A, B)),
        (3.5, evaluated(1024, 2.8)),
        (4.0, MemberGone(member=B, silent_s=11.0)),
        (5.0, step(2.0)),
        (5.5, offered(2, 1024)),
        (6.0, commit(2, 1024, A)),
        (6.5, evaluated(2048, 2.4)),
    )
    write_log(
        folder / B / "log.jsonl",
        B,
        (1.0, started(HOSTILE)),
        (2.5, offered(1, 256)),
        (3.0, commit(1, 1024, A, B)),
        (3.2, RoundMissed(round=Round(2), carried_tokens=Tokens(5), reason="late")),
        (3.3, Notice(text=f"{HOSTILE} at 10.1.2.3:4 in /home/anna/x")),
    )
    return folder


class Tags(HTMLParser):
    """Checks that tags are closed, and keeps what would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_report_is_one_file_that_loads_nothing(weft: Weft, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert weft("report", run, "--out", out).out == f"written: {out}\n"
    text = out.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    names = {name for name, _ in tags.found}
    assert names.isdisjoint({"script", "link", "img", "iframe"})
    assert not any({"src", "href", "onload"} & set(attributes) for _, attributes in tags.found)
    assert sum(name == "svg" for name, _ in tags.found) == 2  # loss and bytes
    for words in (
        "2,048 tokens by 2 peers, up to round 2.",
        "1.2000 nats per byte (1.7312 bits); 2.4000 nats per token (perplexity 11)",
        "87.5 %",
        "12.5 %",
        "peers gone: 1",
    ):
        assert words in text
    for private in ("10.1.2.3", "/home/anna", "<script"):
        assert private not in text


def test_a_peer_that_was_killed_is_told_with_its_return_and_what_it_lost(weft: Weft, tmp_path: Path) -> None:
    """Its log holds no word of its end; what it says of the time after is told with the faults."""
    dropped = WorkDropped(tokens=Tokens(10240), reason="it is old")
    stopped = PeerStopped(reason="asked to")
    missed = RoundMissed(round=Round(2), carried_tokens=Tokens(5), reason="late")
    events = [
        started("bert"),
        commit(1, 1024, A, B),
        started("bert"),
        dropped,
        missed,
        missed,
        stopped,
        started("bert"),
    ]
    log = write_log(tmp_path / "run" / B / "log.jsonl", B, *((2.0 * at, event) for at, event in enumerate(events)))
    out = tmp_path / "report.md"
    assert weft("report", log, "--out", out).code == 0
    text = out.read_text()
    assert "Rounds missed: 2, restarts without an end: 1, times work did not count: 1." in text
    assert "| 0:04 | bert | bert begins again, 2 s after its last word: it was killed, or failed |" in text
    assert "10,240 tokens that bert trained last do not count: it is old" in text
    assert text.count("begins again") == 1


def test_starts_after_an_end_are_no_restarts_and_a_kill_is_told_from_its_last_word(weft: Weft, tmp_path: Path) -> None:
    """A process tells of its name, its data and its transports before it begins; one that only asks goes no further."""
    ready = DataReady(num_shards=1, fetched_nbytes=0, train_tokens=1, heldout_tokens=1)
    before = (Notice(text="this peer is called bert"), ready, TransportUp(transport="tls", addresses=()))
    ended = (PeerStopped(reason="asked to"), LinkDown(remote=A, reason="this peer stops"))
    lives: tuple[Event, ...] = (
        *(*before, started("bert"), commit(1, 1024, A, B), *ended, *before),
        *(*before, started("bert"), *ended, *before, started("bert"), commit(2, 1024, A, B)),
    )
    killed = len(lives)  # seconds after the log began
    lives = (*lives, *before, *before, started("bert"), *ended)
    entries = [(float(at), event) for at, event in enumerate(lives)]
    log = write_log(tmp_path / "run" / B / "log.jsonl", B, *entries)
    out = tmp_path / "report.md"
    assert weft("report", log, "--out", out).code == 0
    text = out.read_text()
    assert "Restarts without an end: 1." in text
    assert text.count("begins again") == 1
    assert f"| 0:{killed + 6} | bert | bert begins again, 7 s after its last word: it was killed, or failed |" in text


def test_a_number_that_no_round_has_is_told_beside_the_rounds(weft: Weft, tmp_path: Path) -> None:
    apart = BranchOpened(branch=BranchId("b" * 64), round=Round(3), members=(A,), reason="the other one is away")
    lives = (started("anna"), commit(1, 64, A), commit(2, 64, A), apart, commit(4, 64, A), commit(9, 64, A))
    log = write_log(tmp_path / "run" / A / "log.jsonl", A, *((float(at), event) for at, event in enumerate(lives)))
    out = tmp_path / "report.md"
    assert weft("report", log, "--out", out).code == 0
    text = out.read_text()
    assert "by 1 peer, up to round 9." in text
    assert (
        "4 rounds in 0:05; round 3 counted nothing: some went on by themselves from there; no log here tells of 4"
        in (text)
    )


def test_whatever_is_amiss_is_counted_in_words() -> None:
    amiss = {kind.__name__ for kind, row in _ROWS.items() if row.severity >= WARNING}
    assert amiss <= FAULTS.keys()


def test_the_same_as_markdown(weft: Weft, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    assert weft("report", run, "--out", out).code == 0
    text = out.read_text()
    assert "| anna a1a1a1a1 | 1,792 | 87.5 % |" in text
    assert "\\<script\\>" in text
    assert "10.1.2.3" not in text


def recipe(report: Path) -> str:
    """Return the run file that a report in Markdown has."""
    return report.read_text().split("## To repeat it")[1].split("```toml\n")[1].split("```")[0]


STAGES = ("--set", "stages=2", "--set", "model.num_layers=2", "--set", "model.is_tied=false")


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [(), pytest.param(STAGES, marks=pytest.mark.slow), ("--set", "tokenizer={type='characters'}")], ids=str
)
def test_the_recipe_of_a_report_makes_the_same_run(
    weft: Weft, run_path: Path, home: Path, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    few = ("--set", "method={type='fedavg', every=5}", *LOCAL, "--quiet")
    trained = weft("train", run_path, *changes, *few)
    assert trained.code == 0, trained.err
    (folder,) = (home / "runs").iterdir()
    assert weft("report", folder, "--out", tmp_path / "report.md").code == 0
    again, elsewhere = run_path.with_name("again.toml"), tmp_path / "elsewhere"
    again.write_text(recipe(tmp_path / "report.md"))
    made = weft("--home", elsewhere, "train", again, *LOCAL, "--quiet")
    assert made.code == 0, made.err
    assert "no effect" not in made.err
    assert [path.name for path in (elsewhere / "runs").iterdir()] == [folder.name]
    for changed in (("--set", "seed=8"), ("--set", "data.heldout_fraction=0.1")):
        answer = weft("--home", elsewhere, "train", again, *LOCAL, *changed)
        assert answer.code == 2
        assert "should make run" in answer.err
    assert len(list((elsewhere / "runs").iterdir())) == 1


def test_a_report_from_another_home_says_what_its_recipe_lacks(
    weft: Weft, kept: Kept, run_path: Path, tmp_path: Path
) -> None:
    begun = msgspec.structs.replace(started("anna"), run=kept.run.run)
    log = write_log(kept.folder.parent / "log.jsonl", A, (1.0, begun), (2.0, step(3.0)), (3.0, commit(1, 64, A)))
    out = tmp_path / "report.md"
    assert weft("report", log.parent.parent, "--out", out).code == 0
    text = out.read_text().replace("\\", "")
    assert in_words(kept.run.method) in text
    assert 'these are below, as type = "custom".' in text
    assert f"the text, {kept.run.data.train_text_nbytes:,} bytes to train on" in text
    again = run_path.with_name("again.toml")
    again.write_text(recipe(out))  # of the default corpus, which is another text
    refused(weft, 2, "data", "train", again, *LOCAL)
    data = load(run_path, RunFile).data
    again.write_text(dump(msgspec.structs.replace(load(again, RunFile), data=data)))
    made = weft("--home", tmp_path / "elsewhere", "train", again, *LOCAL, "--quiet")
    assert made.code == 0, made.err
    assert [path.name for path in (tmp_path / "elsewhere" / "runs").iterdir()] == [kept.run.run]


def test_a_run_of_this_home_is_told_by_its_name_its_digits_or_as_the_last(
    weft: Weft, kept: Kept, tmp_path: Path
) -> None:
    began = msgspec.structs.replace(started("anna"), run=kept.run.run)
    write_log(kept.folder.parent / "log.jsonl", A, (1.0, began), (2.0, step(3.0)), (3.0, commit(1, 64, A)))
    out = tmp_path / "report.md"
    for given in ("last", "small", kept.run.run[:8]):
        answer = weft("report", given, "--out", out)
        assert answer.code == 0, answer.err
        assert answer.err.startswith(f"this is run {kept.run.run[:8]} (small), as peers here have logged it")
        assert "64 tokens by 1 peer, up to round 1," in out.read_text()
    other = write_log(tmp_path / "other" / "log.jsonl", B, (1.0, started("bob")))
    both = weft("compare", "last", other, "--out", tmp_path / "both.md")
    assert both.code == 0, both.err
    assert f"this is run {kept.run.run[:8]} (small)" in both.err
    assert f"holds runs {kept.run.run[:8]} (small)" in refused(weft, 17, "a run of this home", "report", "smell")


def test_of_a_run_in_which_nobody_took_part_nothing_is_reported(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    log = kept.folder.parent / "log.jsonl"
    tried = (TransportUp(transport="tls", addresses=()), Notice(text="this peer is called bert"))
    write_log(log, A, *((float(at), event) for at, event in enumerate(tried)))
    out = tmp_path / "report.md"
    answer = weft("report", "last", "--out", out)
    assert answer.code == 2
    said = " ".join(answer.err.split())
    assert "no peer has taken part in run small yet, as far as is known here, so there is nothing to report" in said
    assert "weft join -" in said
    assert not out.exists()
    write_log(log, A, (1.0, msgspec.structs.replace(started("anna"), run=kept.run.run)))
    assert weft("report", "last", "--out", out).code == 0  # it waits for others


def test_one_run_under_two_names_is_not_compared_with_itself(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    began = msgspec.structs.replace(started("anna"), run=kept.run.run)
    write_log(kept.folder.parent / "log.jsonl", A, (1.0, began), (2.0, step(3.0)))
    out = tmp_path / "both.md"
    for other in ("small", "last", kept.folder.parents[1], kept.folder.parent / "log.jsonl"):
        answer = weft("compare", "last", other, "--out", out)
        assert answer.code == 2
        said = " ".join(answer.err.split())
        assert f"last and {other} are the same run, so there is nothing to compare." in said
        assert "weft report RUN" in said
    assert not out.exists()


def test_runs_lie_over_each_other(weft: Weft, run: Path, tmp_path: Path) -> None:
    other = write_log(
        tmp_path / "other" / "log.jsonl",
        A,
        (1.0, started("anna")),
        (2.0, step(4.0)),
        (3.0, commit(1, 512, A)),
        (4.0, step(3.5)),
        (5.0, commit(2, 512, A)),
    )
    out = tmp_path / "both.html"
    assert weft("compare", run, other, "--out", out).code == 0
    text = out.read_text()
    assert "run from 3 to 2; log.jsonl from 4 to 3.5" in text
    assert "<td>2,048</td>" in text
    assert "<td>1,024</td>" in text


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_nothing_but_a_report_is_written_over(weft: Weft, run: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    for _ in range(2):
        assert weft("report", run, "--out", out).code == 0
    out.write_text("# Run of today\n\nTen kilometres.\n")
    refused(weft, 2, "is no report of weft", "report", run, "--out", out)
    other = write_log(tmp_path / "other" / "log.jsonl", A, (1.0, started("anna")))
    refused(weft, 2, "is no report of weft", "compare", run, other, "--out", out)
    assert "kilometres" in out.read_text()


def test_what_cannot_be_written_or_read_is_refused(weft: Weft, run: Path, tmp_path: Path) -> None:
    refused(weft, 2, "should end in .html or .md", "report", run, "--out", tmp_path / "x.pdf")
    refused(weft, 2, "there is no folder", "report", run, "--out", tmp_path / "none" / "x.html")
    refused(weft, 17, "a log file", "report", tmp_path / "nothing")
    refused(weft, 2, "cannot be compared", "compare", run)
