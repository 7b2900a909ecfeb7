"""`weft pause` says which of several peers did not answer."""

from pathlib import Path

import pytest

from unit.cli.small import Weft
from unit.cli.test_bad_input import refused
from weft.cli.run import pause
from weft.errors import DeadlineExceeded, NoSuchRun
from weft.store.home import PeerFolder

RUNS = ["a" * 64, "b" * 64]


def test_all_that_did_not_answer_are_named(weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [PeerFolder(tmp_path / "runs" / run / ("c" * 64)) for run in RUNS]
    for folder in folders:
        folder.root.mkdir(parents=True)
    monkeypatch.setattr(pause, "running_peers", lambda _home, _run, _every: folders)
    monkeypatch.setattr(pause, "ANSWER_S", 0.0)
    answer = weft("pause", "--all")
    assert answer.code == DeadlineExceeded.exit_code
    for run in RUNS:
        assert run[:8] in answer.err
    assert [(folder.root / "wish").exists() for folder in folders] == [False, False]


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_all_beside_one_that_is_named_is_refused(
    verb: str, weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PeerFolder(tmp_path / "runs" / RUNS[0] / ("c" * 64))
    monkeypatch.setattr(pause, "running_peers", lambda _home, _run, _every: [folder])
    refused(weft, 2, "--all has no effect: aaaaaaaa is named", verb, "aaaa", "--all")


def test_where_no_peer_runs_it_is_said_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="weft --home FOLDER pause"):
        pause.running_peers(tmp_path, None, every=False)
