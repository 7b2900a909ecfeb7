"""Acts and ballots for going back: who keeps them, and who has them decided."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from unit.peer.round.test_acts_pending import BASE, IDENTITIES, FakeNode
from weft.events import ActRefused, ActWaits, Event
from weft.ids import Round
from weft.keys import Identity
from weft.peer.round.acts import PendingActs, kind_of, letters_file, lies_file
from weft.sync.records.acts import Act, Rewind, RewindBallot
from weft.sync.records.charter import AuditTerms
from weft.sync.records.messages import Base, Manifest
from weft.wire import Signed, digest, seal

AT = Round(30)
STEWARD = Identity.from_seed(bytes([9] * 32))
CHARTER = replace(BASE.charter, audits=AuditTerms(rate=0.1, trace_every=1), stewards=(STEWARD.peer,), serials=(0,))
AUDITED: Base = replace(BASE, charter=CHARTER, round=AT)


def back(to: int = 20, state: str = "state") -> Rewind:
    manifest = digest(b"manifest")
    return Rewind(round=Round(to), manifest=manifest, state=digest(state.encode()), reason="it diverges")


def ballot(by: Identity, rewind: Rewind | None = None) -> Signed:
    return seal(by, RewindBallot(run=BASE.run, rewind=rewind or back()))


def act(rewind: Rewind | None = None) -> Signed:
    return seal(STEWARD, Act(run=BASE.run, serial=1, deed=rewind or back()))


@dataclass
class Kept:
    """What a peer has of earlier rounds."""

    has: bool = True
    why: str = ""

    def why_not(self, _rewind: Rewind) -> str:
        return self.why

    def is_here(self, _rewind: Rewind) -> bool:
        return self.has and not self.why

    async def find(self, _manifest: Manifest) -> object:
        return None


@dataclass
class Trial:
    folder: Path
    base: Base = AUDITED
    kept: Kept = field(default_factory=Kept)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chain: Any = SimpleNamespace(base=self.base, charter=self.base.charter)
        self.acts = self.process()

    def process(self) -> PendingActs:
        node: Any = FakeNode()
        files = letters_file(self.folder / "awaiting.bin"), lies_file(self.folder / "lies.bin")
        made = PendingActs(node, self.chain, self.events.append, *files, lambda: None)
        made.go_back_by(self.kept)
        return made

    def decided(self) -> list[int]:
        """Return how many letters each of the next manifest's warrants has."""
        return [len(each.letters) for each in self.acts.warrants()]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_ballots_wait_until_more_than_half_of_the_members_name_the_same(trial: Trial) -> None:
    voters = IDENTITIES
    assert [trial.acts.take(ballot(each)) for each in voters[:2]] == [None, None]
    assert trial.acts.take(ballot(voters[3], back(21))) is None
    assert trial.decided() == []
    assert trial.acts.take(ballot(voters[2])) is None
    assert trial.decided() == [3]
    waits = [each for each in trial.events if isinstance(each, ActWaits)]
    assert {(each.kind, each.subject) for each in waits} == {("rewind", "")}
    assert kind_of(ballot(voters[0])) == kind_of(act()) == "rewind"


def test_they_outlive_the_process(trial: Trial) -> None:
    for each in IDENTITIES[:3]:
        trial.acts.take(ballot(each))
    trial.acts = trial.process()
    trial.acts.recall()
    assert trial.decided() == [3]


@pytest.mark.parametrize("letters", [[act()], [ballot(each) for each in IDENTITIES[:3]]], ids=["act", "ballots"])
def test_who_has_not_what_it_takes_keeps_it_for_those_that_have(trial: Trial, letters: list[Signed]) -> None:
    trial.kept.has = False
    assert [trial.acts.take(each) for each in letters] == [None] * len(letters)
    assert trial.decided() == []
    trial.kept.has = True
    assert trial.decided() == [len(letters)]


@pytest.mark.parametrize("letter", [act(), ballot(IDENTITIES[0])], ids=["act", "ballot"])
def test_what_was_not_so_is_kept_by_nobody_who_was_there(trial: Trial, letter: Signed) -> None:
    trial.kept.why = "the state after round 20 was another"
    assert trial.acts.take(letter) == "the state after round 20 was another"
    assert trial.decided() == []


@pytest.mark.parametrize(
    ("letter", "why"),
    [
        (ballot(STEWARD), "is not a member"),
        (seal(IDENTITIES[0], RewindBallot(run="ab" * 32, rewind=back())), "the ballot is for run"),
        (ballot(IDENTITIES[0], back(AT - 1)), "one of the last 16"),
        (act(back(AT - 17)), "one of the last 16"),
    ],
)
def test_what_has_no_effect_is_refused(trial: Trial, letter: Signed, why: str) -> None:
    assert why in (trial.acts.take(letter) or "")


def test_what_is_too_long_ago_is_dropped_and_said(trial: Trial) -> None:
    trial.acts.take(ballot(IDENTITIES[0]))
    trial.acts.take(act())
    trial.chain.base = replace(AUDITED, round=Round(20 + 17))
    manifest: Any = SimpleNamespace(acts=())
    trial.acts.follow(manifest)
    refused = [each for each in trial.events if isinstance(each, ActRefused)]
    assert [(each.kind, "one of the last 16" in each.reason) for each in refused] == [("rewind", True)] * 2
    assert letters_file(trial.folder / "awaiting.bin").read().letters == ()
