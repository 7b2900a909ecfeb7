"""What one run is told as, by the logs of one home or of several, before its end and after."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from unit.cli.small import Kept, Weft
from unit.cli.test_bad_input import refused
from unit.cli.watch.test_report import evaluated
from unit.cli.watch.test_status import A, B, commit, started, step, write_log
from weft.dashboard.run import Run
from weft.events import Event, LoopStalled, MemberGone, MemberLeft, MemberProgress, PeerStarted, PeerStopped
from weft.ids import PeerId, Round, RunId, Tokens

C = PeerId("c3" * 32)
TOKENS = 64  # of each of five rounds, which are the run's 320


def told(round: int, *counted: PeerId) -> Event:
    made = commit(round, TOKENS, *counted)
    return msgspec.structs.replace(made, contributed=tuple(Tokens(TOKENS // len(counted)) for _ in counted))


def progress(member: PeerId, name: str, round: int, state: str) -> MemberProgress:
    return MemberProgress(
        member=member, name=name, round=Round(round), state=state, loss=2.5, tokens_per_s=700.0, link="tls"
    )


def begun(name: str, run: str) -> PeerStarted:
    return msgspec.structs.replace(started(name), run=RunId(run))


@pytest.fixture
def homes(kept: Kept, tmp_path: Path) -> dict[str, Path]:
    """Three homes' folders of one run: anna and bert begin, bert is killed in round 3, carl joins for round 3."""
    run, here = kept.run.run, kept.folder.parents[1]
    folders = {name: tmp_path / name / "runs" / run for name in ("anna", "bert", "carl")}
    for folder in folders.values():
        shutil.copytree(here.parents[1] / "blobs", folder.parents[1] / "blobs")
    rounds = {1: (A, B), 2: (A, B), 3: (A, C), 4: (A, C), 5: (A, C)}
    write_log(
        folders["anna"] / A / "log.jsonl",
        A,
        (1.0, begun("anna", run)),
        (1.5, progress(B, "bert", 0, "training")),
        *((10.0 * n - 1, step(3.0 - n / 10)) for n in rounds),
        *((10.0 * n, told(n, *who)) for n, who in rounds.items()),
        (12.0, evaluated(TOKENS, 2.8)),
        (29.0, MemberGone(member=B, silent_s=11.0)),
        (49.0, progress(C, "carl", 4, "training")),
        (50.5, MemberLeft(member=C)),
        (51.0, msgspec.structs.replace(evaluated(5 * TOKENS, 2.4), round=Round(5))),
        (51.5, msgspec.structs.replace(evaluated(4 * TOKENS, 2.5), round=Round(4))),  # told late
        (52.0, PeerStopped(reason="complete")),
    )
    write_log(
        folders["bert"] / B / "log.jsonl",
        B,
        (1.0, begun("bert", run)),
        (9.0, step(2.9)),
        (10.1, told(1, A, B)),
        (11.0, progress(A, "anna", 1, "training")),
        (11.5, LoopStalled(stall_s=0.7)),
        (20.1, told(2, A, B)),
    )
    write_log(
        folders["carl"] / C / "log.jsonl",
        C,
        (22.0, begun("carl", run)),
        (22.5, progress(A, "anna", 2, "training")),
        (24.0, progress(B, "bert", 2, "syncing")),
        *((10.0 * n - 1, step(2.9 - n / 10)) for n in (3, 4, 5)),
        *((10.0 * n + 0.2, told(n, A, C)) for n in (3, 4, 5)),
        (50.4, progress(A, "anna", 5, "finishing")),
        (50.6, PeerStopped(reason="complete")),
    )
    for folder in folders.values():
        (log,) = folder.glob("*/log.jsonl")
        lines = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join(sorted(lines, key=lambda line: json.loads(line)["at"])))
    return folders


def reported(weft: Weft, tmp_path: Path, *sources: object) -> str:
    answer = weft("report", *sources, "--out", tmp_path / "report.md")
    assert answer.code == 0, answer.err
    return (tmp_path / "report.md").read_text().replace("\\", "")


def row(text: str, begins: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {begins}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_late_joiner_s_report_says_since_when_it_saw_the_run_and_what_members_tell_of_the_rest(
    weft: Weft, homes: dict[str, Path], tmp_path: Path
) -> None:
    text = reported(weft, tmp_path, homes["carl"])
    assert "320 tokens by 3 peers, up to round 5: all of the 320 wanted." in text
    assert "As carl saw it from round 3 on: 3 rounds in 0:29. 128 tokens were counted before that" in text
    assert "There is no log here of anna and bert" in text
    assert row(text, "anna")[1:3] == ["96", "50.0 %"]  # what rounds counted of others, carl has heard
    assert row(text, "anna")[3:6] == ["not heard"] * 3
    assert row(text, "anna")[-1] == "finished, round 5"
    assert row(text, "carl")[1:6] == ["96", "50.0 %", "3 kB", "6 kB", "0"]


def test_logs_of_several_homes_are_one_report(weft: Weft, homes: dict[str, Path], tmp_path: Path) -> None:
    text = reported(weft, tmp_path, *homes.values())
    assert "As anna saw it from round 1 on, bert from round 1 to 2 and carl from round 3 on: 5 rounds" in text
    assert "There is no log here" not in text
    assert "counted before that" not in text
    shares = {"anna": "160", "bert": "64", "carl": "96"}
    assert {name: row(text, name)[1] for name in shares} == shares
    assert [row(text, name)[3] for name in shares] == ["5 kB", "2 kB", "3 kB"]
    assert row(text, "bert")[-1] == "gone, round 2"
    assert "anna, bert and carl moved 30 kB, sent and received; for the same rounds ring" in text
    assert Run.load(*homes.values()).history.now.moved_nbytes == 30_000


def test_what_is_given_twice_counts_once(weft: Weft, homes: dict[str, Path], tmp_path: Path) -> None:
    once = reported(weft, tmp_path, homes["anna"], homes["bert"])
    (log,) = homes["anna"].glob("*/log.jsonl")
    copy = tmp_path / "copy" / "log.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(log.read_bytes())
    assert reported(weft, tmp_path, homes["anna"], homes["anna"], homes["bert"], log, copy) == once


def test_logs_of_two_runs_are_no_report(weft: Weft, homes: dict[str, Path], tmp_path: Path) -> None:
    other = write_log(tmp_path / "anna" / "runs" / ("e5" * 32) / A / "log.jsonl", A, (1.0, started("anna")))
    for verb in ("report", "status", "watch"):
        refused(weft, 2, "logs of 2 runs", verb, homes["anna"].parent)
    loose = write_log(tmp_path / "loose.jsonl", A, (1.0, started("anna")))
    for logs in ((homes["anna"], other), (homes["anna"], loose)):
        refused(weft, 2, "weft compare", "report", *logs)


def test_the_ratio_of_bytes_is_the_same_wherever_it_is_told(weft: Weft, homes: dict[str, Path], tmp_path: Path) -> None:
    for folder in homes.values():
        now = Run.load(folder).history.now
        ratio = now.ring_nbytes / now.moved_nbytes
        assert ratio > 1
        text = f"{ratio:.3g} times as much"
        assert text in reported(weft, tmp_path, folder)
        assert text in " ".join(weft("status", folder).out.split())
        tree = json.loads(weft("status", folder, "--json").out)
        assert tree["ring_nbytes"] / (tree["sent_nbytes"] + tree["received_nbytes"]) == ratio
        assert Run.load(folder).history.whole()["moved"] == [now.moved_nbytes, now.ring_nbytes, 1]  # the page's
    assert weft("compare", homes["anna"], homes["carl"], "--out", tmp_path / "both.md").code == 0
    now = Run.load(homes["carl"]).history.now
    assert f"| carl | {now.ring_nbytes / now.moved_nbytes:.3g}x |" in (tmp_path / "both.md").read_text()


def test_a_round_has_its_own_held_out_loss(homes: dict[str, Path]) -> None:
    found = {row["round"]: row["heldout_loss"] for row in Run.load(homes["anna"]).frame()}
    assert found == {1: 2.8, 2: None, 3: None, 4: 2.5, 5: 2.4}
    assert Run.load(homes["anna"]).history.now.heldout == 2.4


def test_peers_are_told_as_they_ended(weft: Weft, homes: dict[str, Path]) -> None:
    def states(name: str) -> dict[str, str]:
        return {peer["name"]: peer["state"] for peer in json.loads(weft("status", homes[name], "--json").out)["peers"]}

    assert states("anna") == {"anna": "finished", "bert": "gone", "carl": "finished"}
    assert states("carl") == {"anna": "finished", "bert": "was syncing", "carl": "finished"}
    shown = weft("status", homes["anna"]).out
    assert "320 tokens (100 %)" in " ".join(shown.split())
    assert "nothing was logged since" not in shown


def test_a_log_that_ends_without_a_word_is_told_with_its_age(weft: Weft, homes: dict[str, Path]) -> None:
    shown = " ".join(weft("status", homes["bert"]).out.split())
    assert "nothing was logged since 1970-01-01 00:00:20 UTC" in shown
    assert "128 of 320 tokens (40 %)" in shown


def test_a_short_stall_is_no_fault(weft: Weft, homes: dict[str, Path], tmp_path: Path) -> None:
    text = reported(weft, tmp_path, homes["bert"])
    assert "None was told." in text
    assert "stall_s" not in text
