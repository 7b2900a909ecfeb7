"""What a witness keeps, shows and proves, and that forged notes prove nothing and crowd nothing out."""

from types import SimpleNamespace
from typing import Any

import pytest

from model.world import first_base
from weft.ids import Attempt, Digest, Round, Tokens
from weft.keys import Identity
from weft.peer.chain import open_branch
from weft.peer.messages import Shown
from weft.peer.round.evidence import MAX_KEPT, MAX_SHOWN, EvidenceKeeper
from weft.sync.equivocation import equivocation
from weft.sync.records.acts import Warrant
from weft.sync.records.messages import (
    Accept,
    AnyRoundMessage,
    Certificate,
    Collect,
    Goodbye,
    Prepare,
    Promise,
    Propose,
    Ready,
    RoundNote,
    Vote,
)
from weft.sync.round.machine import replace
from weft.sync.round.rules import leader
from weft.wire import Signed, seal

IDENTITIES = sorted((Identity.from_seed(bytes([number] * 32)) for number in range(3)), key=lambda each: each.peer)
ME, LIAR, LEADER = IDENTITIES
BASE = replace(first_base(3), electorate=tuple(each.peer for each in IDENTITIES), round=Round(5))


class FakeNode:
    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []

    def on_note(self, kind: type[Any], handler: Any) -> None:
        self.handler = handler

    def post(self, peer: str, record: Any) -> bool:
        self.posted.append((peer, record))
        return True


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def proven() -> list[Warrant]:
    return []


@pytest.fixture
def evidence(node: FakeNode, proven: list[Warrant]) -> EvidenceKeeper:
    return EvidenceKeeper(node, SimpleNamespace(base=BASE), proven.append)  # type: ignore[arg-type]


def noted(message: AnyRoundMessage, who: Identity = LIAR, round: int = 5) -> tuple[Signed, RoundNote]:
    note = RoundNote(branch=BASE.branch, round=Round(round), message=message)
    return seal(who, note), note


def accept(attempt: int, digit: str = "a", **options: Any) -> tuple[Signed, RoundNote]:
    return noted(Accept(attempt=Attempt(attempt), manifest=Digest(digit * 64)), **options)


def forged(pair: tuple[Signed, RoundNote]) -> tuple[Signed, RoundNote]:
    return replace(pair[0], signature=bytes(64)), pair[1]


@pytest.mark.parametrize("round", [4, 5, 6])
def test_two_notes_of_a_round_near_by_prove_a_lie(evidence: EvidenceKeeper, proven: list[Warrant], round: int) -> None:
    one, other = accept(1, "a", round=round), accept(1, "b", round=round)
    evidence.hear(*one)
    evidence.hear(*one)
    assert proven == []
    evidence.hear(*other)
    assert proven == [Warrant(letters=(one[0], other[0]))]


def test_nothing_is_kept_of_rounds_far_off_or_of_strangers(evidence: EvidenceKeeper, proven: list[Warrant]) -> None:
    stranger = Identity.from_seed(bytes([9] * 32))
    for options in ({"round": 3}, {"round": 7}, {"who": stranger}):
        for digit in "ab":
            evidence.hear(*accept(1, digit, **options))
    assert proven == []
    assert evidence._kept == {}


def certificate(*letters: Signed) -> Certificate:
    manifest = open_branch(BASE, BASE.electorate, ME.peer, BASE.branch)
    return Certificate(attempt=Attempt(0), manifest=manifest, votes=letters, farewells=())


def test_a_forged_note_proves_nothing_and_is_not_kept(evidence: EvidenceKeeper, proven: list[Warrant]) -> None:
    evidence.read(certificate(forged(accept(1, "a"))[0]))
    evidence.hear(*accept(1, "b"))
    evidence.read(certificate(forged(accept(1, "c"))[0]))
    assert proven == []
    evidence.read(certificate(accept(1, "d")[0]))
    assert [letter.body for letter in proven[0].letters] == [accept(1, digit)[0].body for digit in "bd"]


def test_forged_notes_push_out_none_that_is_signed(evidence: EvidenceKeeper, proven: list[Warrant]) -> None:
    evidence.hear(*accept(0, "a"))
    evidence.read(certificate(*(forged(accept(attempt))[0] for attempt in range(1, MAX_KEPT + 1))))
    evidence.hear(*accept(0, "b"))
    assert len(proven) == 1


def harmless() -> list[AnyRoundMessage]:
    """Return many notes that an honest member may sign, of all kinds and of attempts that nobody has come to."""
    names = [Digest(f"{number:064x}") for number in range(3 * MAX_KEPT)]
    manifest = open_branch(BASE, BASE.electorate, ME.peer, BASE.branch)
    later = [Attempt(number) for number in range(10, 10 + 3 * MAX_KEPT)]
    notes: list[AnyRoundMessage] = []
    for attempt, name in zip(later, names, strict=True):
        notes += [
            Prepare(attempt=attempt),
            Promise(attempt=attempt, accepted=Vote(attempt=Attempt(attempt - 1), manifest=manifest)),
            Propose(attempt=attempt, manifest=manifest),
            Collect(attempt=attempt, revision=1, contributions=(), owners=()),
            Accept(attempt=Attempt(attempt + 3 * MAX_KEPT), manifest=name),
        ]
    return notes


MANIFEST = open_branch(BASE, BASE.electorate, ME.peer, BASE.branch)
OTHER_MANIFEST = replace(MANIFEST, committed_tokens=Tokens(99))
TURN = next(Attempt(number) for number in range(1, 4) if leader(BASE, Attempt(number)) == LIAR.peer)
LIES: list[tuple[AnyRoundMessage, AnyRoundMessage]] = [
    (Accept(attempt=Attempt(1), manifest=Digest("a" * 64)), Accept(attempt=Attempt(1), manifest=Digest("b" * 64))),
    (Propose(attempt=TURN, manifest=MANIFEST), Propose(attempt=TURN, manifest=OTHER_MANIFEST)),
    (Accept(attempt=Attempt(1), manifest=Digest("a" * 64)), Promise(attempt=Attempt(4), accepted=None)),
    (Promise(attempt=Attempt(4), accepted=None), Accept(attempt=Attempt(1), manifest=Digest("a" * 64))),
    (
        Promise(attempt=Attempt(4), accepted=Vote(attempt=Attempt(1), manifest=MANIFEST)),
        Accept(attempt=Attempt(1), manifest=Digest("b" * 64)),
    ),
    (Goodbye(promised=Attempt(4), accepted=None), Accept(attempt=Attempt(1), manifest=Digest("b" * 64))),
    (
        Collect(attempt=TURN, revision=1, contributions=(), owners=()),
        Collect(attempt=TURN, revision=1, contributions=(), owners=(ME.peer,)),
    ),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: " ".join(type(each).__name__ for each in lie))
def test_harmless_notes_push_out_none_that_a_later_one_contradicts(
    evidence: EvidenceKeeper,
    proven: list[Warrant],
    lie: tuple[AnyRoundMessage, AnyRoundMessage],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.peer.round.evidence.MAX_KEPT_NBYTES", 8_000)  # a few of those that are not small
    one, other = (noted(each) for each in lie)
    many = [
        noted(each)
        for each in harmless()
        if all(equivocation(noted(each)[1], note) is None for _, note in (one, other))
    ]
    assert len(many) > MAX_KEPT
    evidence.hear(*one)
    for each in many:
        evidence.hear(*each)
    assert proven == []
    evidence.hear(*other)
    assert proven == [Warrant(letters=(one[0], other[0]))]
    kept = evidence._kept[BASE.branch, Round(5)][LIAR.peer]
    assert len(kept) <= 4 * MAX_KEPT
    assert sum(len(letter.body) for letter, _ in kept.values()) < 5 * 8_000 + MAX_KEPT * 400


def test_of_more_attempts_than_are_kept_the_latest_are_forgotten(
    evidence: EvidenceKeeper, proven: list[Warrant]
) -> None:
    for attempt in range(MAX_KEPT + 1):
        evidence.hear(*accept(attempt, "a"))
    evidence.hear(*accept(MAX_KEPT, "b"))
    assert proven == []
    evidence.hear(*accept(MAX_KEPT - 1, "b"))
    assert len(proven) == 1


def test_of_promises_the_one_that_denies_most_stays(evidence: EvidenceKeeper, proven: list[Warrant]) -> None:
    for attempt in (4, 6, 5):
        evidence.hear(*noted(Promise(attempt=Attempt(attempt), accepted=None)))
    evidence.hear(*accept(5))
    assert len(proven) == 1


def test_what_was_said_before_it_was_known_who_leads_gives_way(node: FakeNode, proven: list[Warrant]) -> None:
    chain = SimpleNamespace(base=replace(BASE, round=Round(4)))
    evidence = EvidenceKeeper(node, chain, proven.append)  # type: ignore[arg-type]
    for attempt in range(4):
        evidence.hear(*noted(Propose(attempt=Attempt(attempt), manifest=MANIFEST)))
    chain.base = BASE
    evidence.begin()
    kept = evidence._kept[BASE.branch, Round(5)][LIAR.peer].values()
    made = [note.message.attempt for _, note in kept]  # type: ignore[union-attr]
    assert made == [attempt for attempt in range(4) if leader(BASE, Attempt(attempt)) == LIAR.peer]


def test_the_leader_of_a_later_attempt_is_shown_what_others_voted(node: FakeNode, evidence: EvidenceKeeper) -> None:
    vote = accept(0)
    evidence.hear(*vote)
    evidence.hear(*accept(0, who=LEADER))
    evidence.hear(*noted(Promise(attempt=Attempt(1), accepted=None), who=ME))
    evidence.hear(*noted(Prepare(attempt=Attempt(1))))
    evidence.hear(*noted(Ready(tokens=8, parts=())))  # type: ignore[arg-type]
    evidence.hear(*accept(7))
    evidence.show(LEADER.peer, Attempt(1))
    assert node.posted == [(LEADER.peer, Shown(signed=vote[0]))]


def test_a_leader_is_shown_a_bounded_number_of_votes_and_the_newest_proposal(
    node: FakeNode, evidence: EvidenceKeeper
) -> None:
    for attempt in range(MAX_KEPT):
        evidence.hear(*accept(attempt, who=ME))
    proposals = [noted(Propose(attempt=Attempt(TURN + 3 * number), manifest=MANIFEST)) for number in range(3)]
    for each in proposals:
        evidence.hear(*each)
    evidence.show(LEADER.peer, Attempt(TURN + 4))
    shown = [record.signed for _, record in node.posted]
    assert shown[-1] == proposals[1][0], "the one after it is of no attempt before"
    before = range(TURN + 4 - min(MAX_SHOWN, TURN + 4), TURN + 4)
    assert shown[:-1] == [accept(attempt, who=ME)[0] for attempt in before]
