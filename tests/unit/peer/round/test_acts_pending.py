"""What proves a lie: of whom it is kept, whom it is told to, and how much of it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.world import first_base
from unit.verify.evidence.forge import ME as WORKER
from unit.verify.evidence.forge import rules
from unit.verify.evidence.test_evidence import RUN, step
from weft.errors import DiskFull
from weft.events import Event, LieProven, Notice
from weft.ids import Attempt, Digest, PeerId, Round
from weft.keys import Identity
from weft.peer.messages import LieNote
from weft.peer.round import acts
from weft.peer.round.acts import MAX_LIES, TELL_AGAIN_S, KnownLies, Letters, PendingActs, lies_file, that_fit
from weft.store import home
from weft.sync.records.acts import MAX_CONTRADICTION_NBYTES, Warrant
from weft.sync.records.charter import Struck
from weft.sync.records.messages import Accept, RoundNote
from weft.sync.round.machine import replace
from weft.wire import seal

IDENTITIES = sorted((Identity.from_seed(bytes([number] * 32)) for number in range(4)), key=lambda each: each.peer)
ME, LIAR, OTHER, THIRD = (each.peer for each in IDENTITIES)
BASE = replace(first_base(4), electorate=tuple(each.peer for each in IDENTITIES), round=Round(5))


class FakeNode:
    def __init__(self) -> None:
        self.passport = SimpleNamespace(banned=frozenset())
        self.peers: tuple[PeerId, ...] = (OTHER, THIRD)
        self.posted: list[PeerId] = []
        self.has_room = True
        self.handlers: dict[type[Any], Any] = {}

    def serve(self, kind: type[Any], handler: Any) -> None:
        self.handlers[kind] = handler

    on_note = serve

    def on_link(self, callback: Callable[[PeerId, bool, str], None]) -> None:
        self.tell_link = callback

    def post(self, peer: PeerId, _record: Any) -> bool:
        if self.has_room:
            self.posted.append(peer)
        return self.has_room

    def told(self) -> list[PeerId]:
        """Return whom something was posted to since the last look."""
        posted, self.posted = self.posted, []
        return posted


class Trial:
    """The acts of one peer, and what it did."""

    def __init__(self, path: Path) -> None:
        self.node, self.chain = FakeNode(), SimpleNamespace(base=BASE, charter=BASE.charter)
        self.events: list[Event] = []
        self.now = 0.0
        kept = SimpleNamespace(keep=lambda letters: None, read=lambda: Letters(letters=()))
        self.path = path
        emit, known = self.events.append, lies_file(path)
        self.acts = PendingActs(self.node, self.chain, emit, kept, known, lambda: None)  # type: ignore[arg-type]

    def restarted(self) -> "Trial":
        """Return another process of the same machine."""
        after = Trial(self.path)
        after.chain = self.chain
        after.acts._chain = self.chain  # type: ignore[assignment]
        after.acts.recall()
        return after

    def tell_again(self) -> list[PeerId]:
        self.now += TELL_AGAIN_S
        self.acts.tell_again(self.now)
        return self.node.told()


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path / "lies.bin")


def lie(who: Identity = IDENTITIES[1], round: int = 5) -> Warrant:
    notes = (
        RoundNote(
            branch=BASE.branch, round=Round(round), message=Accept(attempt=Attempt(1), manifest=Digest(digit * 64))
        )
        for digit in "ab"
    )
    return Warrant(letters=tuple(seal(who, note) for note in notes))


def test_nothing_is_kept_or_told_of_the_lies_of_keys_that_are_no_members(trial: Trial) -> None:
    for number in range(100, 110):
        trial.acts.accuse(lie(Identity.from_seed(bytes([number] * 32))), OTHER)
    assert trial.acts.liars == ()
    assert trial.node.told() == trial.tell_again() == []
    assert trial.events == []


def test_a_lie_in_a_round_to_come_is_not_kept_in_the_place_of_another(trial: Trial) -> None:
    trial.acts.accuse(lie(round=BASE.round + 2), OTHER)
    assert trial.acts.liars == ()
    trial.acts.accuse(lie(), OTHER)
    assert trial.acts.liars == (IDENTITIES[1].peer,)


def test_a_lie_is_told_once_to_each_that_has_not_told_it(trial: Trial) -> None:
    trial.acts.accuse(lie(), OTHER)
    assert trial.node.told() == [THIRD]
    assert trial.tell_again() == []
    trial.node.peers = (ME, OTHER, THIRD)
    assert trial.tell_again() == [ME], "who is linked anew"
    trial.node.tell_link(THIRD, False, "reset")
    assert trial.tell_again() == [THIRD], "it may not have got it"
    trial.acts.accuse(lie())
    assert trial.node.told() == []


def test_who_had_no_room_for_it_is_told_later(trial: Trial) -> None:
    trial.node.has_room = False
    trial.acts.accuse(lie())
    trial.node.has_room = True
    assert trial.tell_again() == [OTHER, THIRD]


def test_who_tells_it_as_well_is_not_told(trial: Trial) -> None:
    trial.node.has_room = False
    trial.acts.accuse(lie())
    trial.acts.accuse(lie(), THIRD)
    trial.node.has_room = True
    assert trial.tell_again() == [OTHER]


def test_of_several_lies_no_more_is_told_at_a_time_than_a_link_can_bear(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sum(len(letter.body) for letter in lie().letters)
    monkeypatch.setattr(acts, "TELL_NBYTES", 2 * one)
    trial.node.peers = (OTHER,)
    for who in IDENTITIES[1:]:
        trial.acts.accuse(lie(who))
    assert trial.node.told() == [OTHER, OTHER]
    assert trial.tell_again() == [OTHER]
    assert trial.tell_again() == []


@pytest.mark.parametrize("is_member", [True, False], ids=["member", "left"])
def test_a_lie_waits_as_long_as_its_teller_is_a_member(trial: Trial, is_member: bool) -> None:
    trial.acts.accuse(lie())
    trial.node.told()
    others = tuple(peer for peer in BASE.electorate if peer != LIAR)
    trial.chain.base = replace(BASE, electorate=BASE.electorate if is_member else others)
    trial.acts.follow(SimpleNamespace(acts=()))  # type: ignore[arg-type]
    assert trial.acts.liars == ((LIAR,) if is_member else ())
    trial.node.peers = (ME,)
    assert trial.tell_again() == ([ME] if is_member else [])


def test_a_lie_outlives_the_process_and_is_told_anew(trial: Trial) -> None:
    trial.acts.accuse(lie(), OTHER)
    after = trial.restarted()
    assert after.acts.liars == (LIAR,)
    assert after.node.told() == [OTHER, THIRD]


@pytest.mark.parametrize("why", ["struck out", "left"])
def test_it_is_forgotten_on_disk_once_its_teller_is_out(trial: Trial, why: str) -> None:
    trial.acts.accuse(lie())
    if why == "left":
        trial.chain.base = replace(BASE, electorate=tuple(peer for peer in BASE.electorate if peer != LIAR))
    else:
        struck = replace(BASE.charter, struck=(Struck(peer=LIAR, round=Round(5)),))
        trial.chain.base = replace(BASE, charter=struck)
    assert trial.restarted().acts.liars == (), "it was decided while this peer was away"
    trial.acts.follow(SimpleNamespace(acts=()))  # type: ignore[arg-type]
    assert lies_file(trial.path).read().lies == ()


def test_a_file_proves_nothing_by_itself(trial: Trial) -> None:
    first, second = lie().letters
    wrong = Warrant(letters=(first, first)), Warrant(letters=(first, replace(second, signer=OTHER)))
    lies_file(trial.path).keep(KnownLies(lies=wrong))
    assert trial.restarted().acts.liars == ()
    lies_file(trial.path).keep(KnownLies(lies=(lie(),)))
    trial.path.write_bytes(trial.path.read_bytes()[:-1])
    assert trial.restarted().acts.liars == ()


def test_a_lie_that_cannot_be_kept_waits_in_memory_and_is_told(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_named: object) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(home, "write_atomically", refuse)
    trial.acts.accuse(lie())
    assert trial.acts.liars == (LIAR,)
    assert trial.node.told() == [OTHER, THIRD]
    assert any(
        "only in this process's memory: no room" in event.text for event in trial.events if isinstance(event, Notice)
    )


def test_no_more_lies_are_kept_than_can_be_read(tmp_path: Path) -> None:
    def large(number: int) -> Warrant:
        letters = (replace(each, body=bytes([number]) * (MAX_CONTRADICTION_NBYTES // 2)) for each in lie().letters)
        return Warrant(letters=tuple(letters))

    many = [*(large(number) for number in range(MAX_LIES)), *(lie() for _ in range(MAX_LIES))]
    lies_file(tmp_path / "lies.bin").keep(that_fit(many))
    kept = lies_file(tmp_path / "lies.bin").read().lies
    assert len(kept) == MAX_LIES
    assert kept[0] == many[0]
    assert kept[-1] == lie()


async def test_a_note_of_anybody_proves_what_it_proves(trial: Trial) -> None:
    first, second = lie().letters
    await trial.node.handlers[LieNote](OTHER, LieNote(lie=Warrant(letters=(first, second))))
    assert trial.acts.liars == (LIAR,)


async def test_what_is_shown_and_proves_nothing_is_not_kept(trial: Trial) -> None:
    for letters in (lie().letters, lie().letters[:1]):
        await trial.node.handlers[LieNote](OTHER, LieNote(lie=Warrant(letters=letters, shown=b"nothing")))
    assert trial.acts.liars == ()
    assert trial.events == []
    assert trial.node.told() == []


async def test_evidence_is_kept_told_and_outlives_a_process(trial: Trial) -> None:
    evidence, heard = step(), list[Any]()
    base = replace(BASE, run=RUN, electorate=tuple(sorted((ME, OTHER, WORKER.peer))), charter=rules())
    trial.chain.base, trial.chain.charter = base, base.charter
    trial.acts.on_lie(lambda found, warrant: heard.append((found.peer, found.work is not None, warrant)))
    await trial.node.handlers[LieNote](OTHER, LieNote(lie=evidence))
    assert trial.acts.liars == (WORKER.peer,)
    assert trial.acts.warrants() == (evidence,)
    assert trial.node.told() == [THIRD], "who told it knows it"
    assert heard == [(WORKER.peer, True, evidence)]
    assert [type(event) for event in trial.events] == [LieProven]
    assert trial.restarted().acts.liars == (WORKER.peer,)
    elsewhere = Trial(trial.path.with_name("other.bin"))
    elsewhere.chain.base = elsewhere.acts._chain.base = replace(base, run="ab" * 32)
    await elsewhere.node.handlers[LieNote](OTHER, LieNote(lie=evidence))
    assert elsewhere.acts.liars == (), "it is of another run"
