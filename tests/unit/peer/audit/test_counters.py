"""What a peer says of false works that stay in the model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from charters import charter
from unit.peer.audit.test_heads import STATE, a_row
from unit.sync.test_governance_audits import ACCUSED, OTHERS, WORK, found
from weft.events import Event, WorkStays
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.peer.audit.counters import DISAGREED, MIXED, Counters
from weft.peer.audit.heads import Heads
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.records.ancestry import Legacy, Stretch
from weft.sync.records.messages import Counted, Manifest
from weft.wire import digest, digest_of

PLAIN = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0))
BRINGS = Counted(peer=ACCUSED, tokens=Tokens(7), payload=digest(b"payload"), work=WORK)
EARLIER = PeerId("00" * 32)
STRETCH = Stretch(branch=BranchId(digest(b"given up")), start=Round(0), stop=Round(1))
LEGACY = Counted(
    peer=EARLIER, tokens=Tokens(7), payload=digest(b"legacy"), legacy=Legacy(stretches=(STRETCH,), tokens=Tokens(7))
)


def followed(path: Path, **round: Any) -> tuple[Counters, list[Event], Manifest]:
    """Return a peer that knows a round which has counted a work, what it tells, and the round that strikes that out."""
    events: list[Event] = []
    first, second, third = a_row(3)
    second = replace(second, **({"contributions": (BRINGS,)} | round))
    third = replace(third, previous=digest_of(second), acts=(found(OTHERS, round=1),))
    rules = replace(charter(1), settings=replace(charter(1).settings, method=PLAIN))
    heads = Heads(path, events.append)
    for number, each in enumerate((first, second, third)):
        heads.note(each, rules, STATE, float(number))
    context: Any = SimpleNamespace(node=SimpleNamespace(serve_blobs=lambda _: None), emit=events.append)
    merger = SimpleNamespace(recall_by=lambda _: None)
    rounds: Any = SimpleNamespace(on_decided=lambda _: None, merger=merger)
    replica: Any = SimpleNamespace(head=third, charter=rules)
    kept: Any = SimpleNamespace()
    return Counters(context, replica, rounds, heads, kept), events, third


@pytest.mark.parametrize(
    "round", [{"counters": (EARLIER,)}, {"contributions": (BRINGS, LEGACY)}], ids=["false work", "legacy"]
)
def test_a_work_stays_where_its_round_is_more_than_a_mean_of_works(tmp_path: Path, round: dict[str, Any]) -> None:
    counters, events, now = followed(tmp_path / "heads.bin", **round)
    assert counters.weighed(ACCUSED, Round(1), Digest(WORK)) is UNSET
    counters.follow(now)
    assert events == [WorkStays(round=Round(2), member=ACCUSED, counted_in=Round(1), why=MIXED)]


def test_of_any_other_round_a_verdict_says_what_was_counted(tmp_path: Path) -> None:
    counters, events, now = followed(tmp_path / "heads.bin")
    assert counters.weighed(ACCUSED, Round(1), Digest(WORK)) is not UNSET
    counters.follow(now)  # of whom the charter has nothing all the same
    assert [each.why for each in events if isinstance(each, WorkStays)] == [DISAGREED]
