"""What an anchor is started with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from msgspec import UNSET

from weft.anchor.archive import Archive
from weft.events import Event, Notice
from weft.launch.anchor import _archive
from weft.run.machine import PeerConfig
from weft.run.outline import Trusted


def kept(path: Path, keep: Literal["newest", "all"], trust: Any, told: list[Event]) -> Archive | None:
    session: Any = SimpleNamespace(
        options=SimpleNamespace(settings=PeerConfig(keep=keep)),
        emit=told.append,
        folder=SimpleNamespace(archive=path / "archive"),
        node=SimpleNamespace(run="7" * 64),
    )
    is_audited = trust is not UNSET and trust.type == "audited"
    return asyncio.run(_archive(session, SimpleNamespace(trust=trust, is_audited=is_audited)))  # type: ignore[arg-type]


def test_of_a_run_that_is_not_audited_nothing_more_is_kept(tmp_path: Path) -> None:
    told: list[Event] = []
    audited = Trusted(type="audited")
    assert kept(tmp_path, "newest", audited, told) is None
    assert told == []
    assert kept(tmp_path, "all", audited, told) is not None
    assert told == []
    for trust in (UNSET, Trusted(type="recorded")):
        assert kept(tmp_path, "all", trust, told) is None
    assert [isinstance(each, Notice) and "do not audit each other" in each.text for each in told] == [True, True]
