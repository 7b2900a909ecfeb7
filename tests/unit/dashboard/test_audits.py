"""What members found of each other's work, summed up: in the history, for Prometheus, in a report and on the page."""

import json
import math
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from unit.dashboard.test_history import A, B, C, commit, history, said, started
from unit.peer.tiny import run_config
from weft.dashboard.audits import Found, share
from weft.dashboard.page import metrics_of
from weft.dashboard.report import told_of
from weft.dashboard.run import Run, about_of
from weft.dashboard.view import About
from weft.events import Entry, MergeAudited, MergeDoubted, WorkAudited, WorkDoubted
from weft.ids import Digest, PeerId, Round
from weft.run.trust import AuditedTrust, RecordedTrust

AUDITED = About(audit_rate=0.1)
NODE = shutil.which("node")
FOLDERS = [Path(str(files("weft") / room / "static")) for room in ("web", "dashboard")]


def equal(round: int, member: PeerId, distance: float = 1e-6, num_steps: int = 1) -> WorkAudited:
    name = Digest(f"{round:02}{member[:2]}" * 16)
    return WorkAudited(round=Round(round), member=member, work=name, num_steps=num_steps, distance=distance)


def doubted(round: int, member: PeerId, outcome: str, distance: float = 0.0) -> WorkDoubted:
    name = Digest(f"{round:02}{member[:2]}" * 16)
    return WorkDoubted(
        round=Round(round), member=member, work=name, num_steps=2, outcome=outcome, why="why", distance=distance
    )


def merged(round: int, member: PeerId) -> MergeAudited:
    return MergeAudited(round=Round(round), member=member, part=1, result=Digest("d" * 64))


def not_shown(round: int, member: PeerId) -> MergeDoubted:
    return MergeDoubted(
        round=Round(round), member=member, part=0, result=Digest("d" * 64), outcome="unanswered", why="it is silent"
    )


def whole() -> list[Entry]:
    """Two rounds of three, in which B is found to be wrong."""
    told = [
        (A, started("anna"), 1.0),
        (B, started("bert"), 1.0),
        (A, commit(4, 300, A, B, C), 10.0),
        (B, commit(4, 300, A, B, C), 10.5),
        (A, equal(4, C, 2e-6), 11.0),
        (A, merged(4, B), 11.5),
        (A, commit(5, 600, A, B, C), 20.0),
        (A, doubted(5, B, "differs", 0.5), 21.0),
        (B, doubted(5, C, "unanswered"), 22.0),
        (B, equal(4, C, 1e-6, num_steps=10), 23.0),
        (B, not_shown(5, A), 24.0),
    ]
    return [said(peer, event, at) for peer, event, at in told]


def test_who_audited_whom_and_what_came_of_it_is_a_row() -> None:
    assert history(*whole()).whole()["audits"] == [
        [11.0, 0, 2, 4, True, 1, "equal", 2e-6],
        [11.5, 0, 1, 4, False, 1, "equal", None],
        [21.0, 0, 1, 5, True, 2, "differs", 0.5],
        [22.0, 1, 2, 5, True, 2, "unanswered", None],
        [23.0, 1, 2, 4, True, 10, "equal", 1e-6],
        [24.0, 1, 0, 5, False, 0, "unanswered", None],
    ]


def test_each_peer_s_audits_are_summed_up_and_a_contribution_counts_once() -> None:
    now = history(*whole()).now.audits
    assert now.of == {
        C: Found(num_equal=2, num_unanswered=1, distance=2e-6),
        B: Found(num_equal=1, num_differing=1, distance=0.5),
        A: Found(num_unanswered=1),
    }
    assert (now.num_counted, now.num_audited, now.num_steps) == (6, 3, 13)  # who did not answer did nothing again
    assert now.num_by[("steps", "equal")] == 2
    assert now.num == 6


def test_an_audit_of_a_round_that_nobody_told_of_is_no_share_of_those_that_were() -> None:
    now = history(said(A, started("anna")), said(A, equal(3, B)), said(A, commit(4, 200, A, B))).now.audits
    assert (now.num_counted, now.num_audited, now.num_steps) == (2, 0, 1)


def test_no_more_contributions_are_audited_than_were_counted() -> None:
    """Whoever tells of audits may name members that the round did not count."""
    told = [said(A, commit(4, 200, A, B)), *(said(A, equal(4, PeerId(letter * 64))) for letter in "bcdef")]
    now = history(said(A, started("anna")), *told).now.audits
    assert (now.num_counted, now.num_audited, now.num) == (2, 1, 5)


@pytest.mark.parametrize("distance", [math.nan, math.inf])
def test_a_distance_that_is_no_number_is_none(distance: float) -> None:
    found = history(said(A, doubted(4, B, "differs", distance)), said(A, doubted(4, B, "whatever")))
    assert found.now.audits.of == {B: Found(num_differing=2)}
    json.dumps(found.whole(), allow_nan=False)


def test_prometheus_has_audits_by_result_where_there_are_any() -> None:
    text = metrics_of(history(*whole(), run=AUDITED)).decode()
    for line in (
        "weft_audit_rate 0.1",
        "weft_contributions_total 6.0",
        "weft_audited_contributions_total 3.0",
        "weft_audited_steps_total 13.0",
        'weft_audits_total{of="steps",result="equal"} 2.0',
        'weft_audits_total{of="part",result="unanswered"} 1.0',
        'weft_audits_total{of="part",result="differs"} 0.0',
        f'weft_peer_audits_total{{name="bert",peer="{B[:16]}",result="differs"}} 1.0',
    ):
        assert line in text, line
    assert "audit" not in metrics_of(history(said(A, started("anna")))).decode()
    assert 'weft_audits_total{of="steps",result="equal"} 0.0' in metrics_of(history(run=AUDITED)).decode()


def test_a_report_has_the_same_figures_and_says_whose_they_are() -> None:
    (audits,) = [
        each for each in told_of(Run(title="r", history=history(*whole(), run=AUDITED))) if each.title == "Audits"
    ]
    assert audits.table == (
        ("peer", "audited", "equal", "differs", "unanswered", "largest distance"),
        ("anna", "1", "0", "0", "1", "-"),
        ("bert", "2", "1", "1", "0", "0.5"),
        (C[:8], "3", "2", "0", "1", "2e-06"),
    )
    assert audits.texts == (
        "3 of 6 contributions audited (50 %); the run asks for 10 %, of newcomers for four times as much. Done again: "
        "13 training steps; merged again: 2 parts.",
        "These are the audits that anna and bert made: of those that others made there is no log here.",
    )
    alone = told_of(Run(title="r", history=history(said(A, started("anna")))))
    assert not [each for each in alone if each.title == "Audits"]


def test_the_rate_is_that_of_the_run_and_none_where_nobody_audits() -> None:
    audited = msgspec.structs.replace(run_config(), trust=AuditedTrust(audit_rate=0.2))
    assert about_of(audited).audit_rate == 0.2
    assert about_of(run_config()).audit_rate is None
    assert about_of(msgspec.structs.replace(run_config(), trust=RecordedTrust())).audit_rate is None


def test_before_anything_was_counted_there_is_no_share() -> None:
    assert share(history().now.audits, None).startswith("0 of 0 contributions audited. Done again: 0 training steps")


@pytest.mark.skipif(NODE is None, reason="no node on the path: the page's modules were tried by nobody")
def test_the_page_sums_up_the_same_rows_to_the_same_figures_at_any_time(tmp_path: Path) -> None:
    assert NODE is not None
    for path in [script for folder in FOLDERS for script in folder.glob("*.js")]:
        shutil.copy(path, tmp_path)
    found = history(*whole(), run=AUDITED)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "told.json").write_text(json.dumps(found.whole()))
    shutil.copy(Path(__file__).parent / "audits.test.mjs", tmp_path)
    ran = subprocess.run([NODE, "audits.test.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
