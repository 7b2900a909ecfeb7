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
from unit.verify.evidence.forge import Done, done
from weft.events import Event, WorkStays
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.peer.audit.counters import DISAGREED, LOST, MIXED, UNSAID, Counters
from weft.peer.audit.heads import Heads
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.records.acts import Warrant, Weighed
from weft.sync.records.ancestry import Legacy, Stretch
from weft.sync.records.charter import Charter, FalseWork
from weft.sync.records.counters import WITHIN
from weft.sync.records.messages import Counted, Manifest
from weft.verify.evidence.works import prove_claim
from weft.wire import digest, digest_of, encode

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


def claims_too_much() -> tuple[Done, Warrant]:
    """Return a work, and evidence that its claim is false."""
    made = done().renamed(tokens=Tokens(33))
    shown = prove_claim(made.work, [(each, made.charter) for each in made.heads])
    return made, Warrant(letters=(made.signed,), shown=encode(shown))


def stays(path: Path, struck_in: int, said: bool) -> list[WorkStays]:
    """Return what a peer says in the rounds after round 1, which has counted a work that a later one proves false."""
    made, warrant = claims_too_much()
    name, peer = digest_of(made.signed), PeerId(made.work.peer)
    events: list[Event] = []
    row = a_row(WITHIN + 6)
    row[1] = replace(row[1], contributions=(Counted(peer=peer, tokens=Tokens(7), payload=digest(b"p"), work=name),))
    row[struck_in] = replace(row[struck_in], acts=(warrant,))
    for number in range(1, len(row)):
        row[number] = replace(row[number], previous=digest_of(row[number - 1]))
    rules: Charter = replace(charter(1), settings=replace(charter(1).settings, method=PLAIN))
    weighed = Weighed(branch=row[1].branch, manifest=digest_of(row[1]), weights=(1,), late=0, method=digest_of(PLAIN))
    if said:
        rules = replace(rules, false_works=(FalseWork(peer=peer, round=Round(1), weighed=weighed),))
    heads = Heads(path, events.append)
    context: Any = SimpleNamespace(node=SimpleNamespace(serve_blobs=lambda _: None), emit=events.append)
    rounds: Any = SimpleNamespace(on_decided=lambda _: None, merger=SimpleNamespace(recall_by=lambda _: None))
    replica: Any = SimpleNamespace(head=None, charter=rules)
    kept: Any = SimpleNamespace()
    for each in row:
        heads.note(each, rules, STATE, float(each.round))
        replica.head = each
        Counters(context, replica, rounds, heads, kept).follow(each)  # as of a process that has just begun
    return [each for each in events if isinstance(each, WorkStays)]


@pytest.mark.parametrize("struck_in", [2, 1 + WITHIN, 3 + WITHIN])
def test_where_nobody_says_what_was_counted_of_a_proven_lie_it_is_told_once_that_it_stays(
    tmp_path: Path, struck_in: int
) -> None:
    (told,) = stays(tmp_path / "heads.bin", struck_in, said=False)
    assert (told.round, told.counted_in, told.why) == (max(struck_in, 1 + WITHIN), 1, UNSAID)


def test_where_it_was_said_it_is_told_why_it_was_not_taken_out(tmp_path: Path) -> None:
    (told,) = stays(tmp_path / "heads.bin", 2, said=True)
    assert (told.round, told.why) == (1 + WITHIN, LOST)
