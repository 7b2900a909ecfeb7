"""What an auditor sees of a work before it asks for anything."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from unit.peer.audit.test_heads import STATE
from unit.verify.evidence.forge import OTHER, Done, done, head, rules
from weft.clock import VirtualClock
from weft.events import Event
from weft.ids import Digest, PeerId, Round, Tokens
from weft.peer.audit import checks
from weft.peer.audit.checks import Audit, Checks, Differs, NotShown, Unknown
from weft.peer.audit.heads import Heads
from weft.sync.governance import read_lie
from weft.sync.records.messages import Counted
from weft.sync.records.work import link
from weft.wire import digest, digest_of


@pytest.fixture(autouse=True)
def without_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "shape_of", lambda _trainer: {})
    monkeypatch.setattr(checks, "StateClient", lambda *_: None)


def claimed(path: Path, made: Done, *known: Any) -> None:
    """Look at a claim where these rounds are known, the last of which counts it, and all that the work names."""
    events: list[Event] = []
    heads, nothing = Heads(path / "heads.bin", events.append), SimpleNamespace()
    for each in (*known, *made.heads):
        heads.note(each, made.charter, STATE, 0.0)
    works: Any = SimpleNamespace(signed=lambda _name: made.signed)
    context: Any = SimpleNamespace(node=None, compute=None, clock=None)
    stub: Any = nothing
    newest = (*made.heads, *known)[-1]
    replica: Any = SimpleNamespace(head=newest)
    audit = Audit(newest.round, digest_of(made.signed), made.work, link(made.work.segments, 1, 0), made.signed)
    Checks(context, stub, replica, works, heads, stub, stub).claim(audit)


def with_segment(made: Done, number: int = 0, **fields: Any) -> Done:
    segments = list(made.work.segments)
    segments[number] = msgspec.structs.replace(segments[number], **fields)
    return made.renamed(segments=tuple(segments))


def own(made: Done) -> Any:
    return (Counted(peer=made.work.peer, tokens=Tokens(8), payload=made.work.payload, work=digest_of(made.signed)),)


@pytest.mark.parametrize("honest", [done(), done(seed=1, segments=3)])
def test_of_an_honest_work_nothing_is_said(tmp_path: Path, honest: Done) -> None:
    claimed(tmp_path, honest)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda honest: honest.renamed(tokens=Tokens(33)), "other tokens"),
        (lambda honest: with_segment(honest, num_steps=5), "more training steps than there were samples"),
        (lambda honest: with_segment(honest, holder=OTHER.peer), "leased to another"),
        (lambda honest: with_segment(honest, round=4), "do not follow each other"),
    ],
)
def test_a_claim_that_rounds_do_not_bear_out_is_evidence(
    tmp_path: Path, change: Callable[[Done], Done], what: str
) -> None:
    with pytest.raises(Differs, match=what) as found:
        claimed(tmp_path, change(done()))
    assert found.value.proof is not None
    assert what in read_lie(found.value.proof).what


def test_of_rounds_that_are_not_known_here_nothing_can_be_told(tmp_path: Path) -> None:
    with pytest.raises(Unknown):
        claimed(tmp_path, with_segment(done(), head=digest(b"long ago"), round=0))


def test_a_round_that_has_not_been_is_a_lie(tmp_path: Path) -> None:
    made = done()
    with pytest.raises(Differs, match="has not been"):
        claimed(tmp_path, with_segment(made, head=digest(b"no round"), round=made.heads[0].round))


def rounds_that_count(made: Done, *numbers: int) -> list[Any]:
    """Return the rounds after the first lease of a work, of which those of these numbers count its peer."""
    rounds = [made.heads[0]]
    for number in range(1, max(numbers) + 1):
        after = head(made.heads[0].round + number, rules(), rounds[-1])
        rounds.append(msgspec.structs.replace(after, contributions=own(made)) if number in numbers else after)
    return rounds


def test_samples_that_a_round_has_counted_are_not_claimed_again(tmp_path: Path) -> None:
    made = done()
    with pytest.raises(Differs, match="counted already"):
        claimed(tmp_path, made.renamed(round=Round(made.heads[0].round + 2)), *rounds_that_count(made, 1, 2))


def test_a_work_that_is_brought_late_is_no_excuse_for_bringing_it_again(tmp_path: Path) -> None:
    """It says that it was announced before, as an honest one does that was late, and has another name."""
    made = done()
    claimed(tmp_path / "late", made, *rounds_that_count(made, 4))
    with pytest.raises(Differs, match="counted already"):
        claimed(tmp_path / "again", made, *rounds_that_count(made, 1, 4))


def test_what_another_branch_has_counted_is_nobodys_fault(tmp_path: Path) -> None:
    made = done()
    elsewhere = msgspec.structs.replace(rounds_that_count(made, 1)[1], branch="ef" * 32)
    claimed(tmp_path, made, elsewhere, *rounds_that_count(made, 4))


def test_a_byte_now_and_then_is_no_answer() -> None:
    """Each chunk may take minutes, and a state has many."""
    clock, made, stub = VirtualClock(), done(), SimpleNamespace()
    asked = list[int]()

    async def slowly(_peer: PeerId, _name: Digest, most: int) -> bytes:
        asked.append(most)
        await asyncio.Event().wait()
        return b""

    context: Any = SimpleNamespace(node=SimpleNamespace(fetch_small=slowly), compute=None, clock=clock)
    nothing: Any = stub
    looks = Checks(context, nothing, nothing, nothing, nothing, nothing, nothing)
    named, place = digest_of(made.signed), link(made.work.segments, 1, 0)
    audit = Audit(Round(4), named, made.work, place, made.signed, until=lambda: clock.now() > 40.0)

    async def scenario() -> None:
        with pytest.raises(NotShown, match="in time"):
            await looks.listed(audit, named)

    clock.run(scenario())
    assert 40.0 < clock.now() < 43.0
    assert asked[0] < 1 << 20, "no longer than a list of its own states may be"
