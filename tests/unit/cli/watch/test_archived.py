"""What `weft ledger check RUN` says of leases that were made again, and how it ends."""

from pathlib import Path

import pytest

from unit.cli.small import Weft
from unit.cli.test_bad_input import refused
from unit.cli.watch.test_ledger import ME
from unit.store.test_rounds import RUN
from weft.cli.watch.archived import MAX_SAID, _judge, _line, _summary
from weft.errors import DataError
from weft.ids import PeerId, Round
from weft.launch.replays import Found, Report
from weft.peer.audit.leases.replays import Outcome, Replayed

FOUNDER, OTHER = PeerId("ab" * 32), PeerId("cd" * 32)
HERE = Path("archive")


def found(outcome: Outcome, why: str = "", distance: float = 0.0) -> Found:
    return Found(Round(7), OTHER, Replayed(0, 20, outcome, why, distance))


def report(*leases: Found) -> Report:
    return Report(founder=FOUNDER, num_rounds=9, num_segments=40, num_drawn=len(leases), found=list(leases))


def test_each_lease_is_said_in_a_line() -> None:
    assert _line(found("equal")).split() == ["round", "7", "cdcdcdcd", "20", "steps", "equal", "to", "the", "bit"]
    assert _line(found("near", distance=1.2e-6)).endswith("as near as honest machines are (1.2e-06)")
    assert _line(found("differs", "it came to other parameters")).endswith("differs: it came to other parameters")
    assert _line(found("unknown", "nobody has shown it")).endswith("not told: nobody has shown it")
    said = _summary(report(found("equal"), found("equal"), found("unknown")))
    assert said.startswith("3 of 40 leases of 9 rounds made again: 2 equal to the bit, 1 not told.")
    assert FOUNDER in said


def test_a_difference_names_the_peer_and_the_round() -> None:
    with pytest.raises(DataError, match=f"{OTHER} in round 7"):
        _judge(report(found("equal"), found("differs"), found("differs")), HERE, None)


def test_what_was_altered_is_named_and_not_all_of_it() -> None:
    altered = report(found("equal"))
    altered.faults += [f"round {number} is altered" for number in range(MAX_SAID + 3)]
    with pytest.raises(DataError, match=r"round 0 is altered; .*; and 3 more"):
        _judge(altered, HERE, None)


def test_another_founder_or_nothing_to_look_at_is_refused() -> None:
    _judge(report(found("equal"), found("unknown")), HERE, FOUNDER[:16].upper())
    with pytest.raises(DataError, match="was begun by"):
        _judge(report(found("equal")), HERE, OTHER)
    with pytest.raises(DataError, match="nobody knows whom"):
        _judge(Report(found=[found("equal")]), HERE, FOUNDER)
    with pytest.raises(DataError, match="nothing of"):
        _judge(report(found("unknown")), HERE, None)


def test_a_run_without_an_archive_is_refused(weft: Weft, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "runs" / RUN / ME).mkdir(parents=True)
    refused(weft, 11, "no archive of run", "--home", home, "ledger", "check", RUN[:8], "--all")
    refused(weft, 17, "is not a run of this home", "--home", home, "ledger", "check", "ff" * 4, "--segments", 3)
    (home / "runs" / RUN / ME / "archive").mkdir()
    refused(weft, 11, "the config of run", "--home", home, "ledger", "check", RUN[:8], "--segments", 3)
    refused(weft, 2, "say how many: --segments 100", "ledger", "check", tmp_path / "none")
