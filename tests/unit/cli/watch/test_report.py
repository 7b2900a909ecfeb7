"""`weft report` and `weft compare`: what they write of logs, and that nothing private or dangerous is in it."""

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from unit.cli.small import Kept, Weft
from unit.cli.test_bad_input import refused
from unit.cli.watch.test_status import A, B, commit, started, step, write_log
from weft.config import load
from weft.dashboard.words import in_words
from weft.events import Evaluated, LinkUp, MemberGone, Notice, PayloadOffered, RoundMissed
from weft.ids import Round, Tokens
from weft.run.config import RunFile
from weft.run.genesis import seal
from weft.store.home import Home

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
    for words in ("2,048 tokens in 2 rounds", "1.2000 nats per byte at the end", "87.5 %", "12.5 %", "1 x MemberGone"):
        assert words in text
    for private in ("10.1.2.3", "/home/anna", "<script"):
        assert private not in text


def test_the_same_as_markdown(weft: Weft, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    assert weft("report", run, "--out", out).code == 0
    text = out.read_text()
    assert "| anna a1a1a1a1 | 1,792 | 87.5 % |" in text
    assert "\\<script\\>" in text
    assert "10.1.2.3" not in text


def test_a_run_of_this_machine_is_told_with_what_makes_it_again(
    weft: Weft, kept: Kept, run_path: Path, tmp_path: Path
) -> None:
    log = write_log(
        kept.folder.parent / "log.jsonl", A, (1.0, started("anna")), (2.0, step(3.0)), (3.0, commit(1, 64, A))
    )
    out = tmp_path / "report.md"
    assert weft("report", log.parent.parent, "--out", out).code == 0
    text = out.read_text()
    assert in_words(kept.run.method) in text.replace("\\", "")
    again = run_path.with_name("again.toml")
    again.write_text(text.split("## To repeat it")[1].split("```toml\n")[1].split("```")[0])
    found = msgspec.structs.replace(load(again, RunFile), data=load(run_path, RunFile).data)
    made = seal(found, tmp_path, Home(tmp_path / "elsewhere"), lambda _event: None)
    assert made.config.run == kept.run.run


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


def test_what_cannot_be_written_or_read_is_refused(weft: Weft, run: Path, tmp_path: Path) -> None:
    refused(weft, 2, "should end in .html or .md", "report", run, "--out", tmp_path / "x.pdf")
    refused(weft, 2, "there is no folder", "report", run, "--out", tmp_path / "none" / "x.html")
    refused(weft, 2, "a log file", "report", tmp_path / "nothing")
    refused(weft, 2, "cannot be compared", "compare", run)
