"""What an observer makes of certificates: proofs in order, who tells what nobody signed, and whose word differs."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from charters import charter
from unit.hands import Hands
from unit.peer.test_chain import MEMBERS, RUN, certificate, successor, vote
from weft.errors import DeadlineExceeded
from weft.events import Event, Notice, RoundProven
from weft.ids import BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.observe.light_client import DEAF_S, MAX_AHEAD, STALE_S, LightClient, is_beginning
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.messages import ChainAnswer, ChainRequest, CharterAnswer, StateOffer, StateRequest
from weft.sync.records.messages import Certificate
from weft.wire import digest, digest_of

PEERS = [each.peer for each in MEMBERS]
A, B, C = PEERS


class Crowd:
    """Stands for the node, and for the members it is linked to: what each knows."""

    def __init__(self) -> None:
        self.run = RUN
        self.peers = PEERS
        self.known = {peer: self._fresh() for peer in PEERS}
        self.told: dict[PeerId, Sequence[Certificate] | None] = {}
        self.silent: set[PeerId] = set()
        self.homeless: set[PeerId] = set()  # who says that it has not begun
        self.starts: list[PeerId] = []  # who was asked where the run stands

    def _fresh(self) -> Chain:
        return Chain(open_branch(genesis(RUN, A, charter(4)), PEERS, A, BranchId(RUN)), charter(4))

    def decide(self, num_signed: int = 3) -> Certificate:
        """Let all members decide a round."""
        known = self.known[A]
        manifest = successor(known)
        made = certificate(manifest, *(vote(known, voter, manifest) for voter in MEMBERS[:num_signed]))
        for chain in self.known.values():
            chain.append(made)
        return made

    def signed(self, peer: PeerId) -> Certificate:
        """Return the next round as this member knows it, signed by all."""
        known = self.known[peer]
        manifest = successor(known)
        return certificate(manifest, *(vote(known, voter, manifest) for voter in MEMBERS))

    async def call(self, peer: PeerId, request: Any, _kind: type, *, deadline_s: float) -> Any:
        if peer in self.silent:
            raise DeadlineExceeded(f"nothing within {deadline_s} s")
        chain = self.known[peer]
        if isinstance(request, StateRequest):
            self.starts.append(peer)
            return StateOffer(head=None if peer in self.homeless else chain.head, index=None, charter=None)
        if isinstance(request, ChainRequest):
            there = self.told[peer] if peer in self.told else chain.after_in(request.branch, request.after, 100)
            return ChainAnswer(certificates=None if there is None else tuple(there))
        return CharterAnswer(charter=chain.charter, round=chain.head.round, members=chain.head.members)


class Looking:
    def __init__(self) -> None:
        self.crowd, self.clock, self.events = Crowd(), Hands(), list[Event]()
        self.proving = LightClient(self.crowd, self.clock, self.events.append)  # type: ignore[arg-type]

    async def look(self, *peers: PeerId) -> None:
        await self.proving.look(peers or PEERS)

    @property
    def proven(self) -> list[tuple[int, int, int]]:
        return [(e.round, e.num_signed, e.num_electors) for e in self.events if isinstance(e, RoundProven)]

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def looking() -> Looking:
    return Looking()


async def test_what_is_decided_is_proven_in_order(looking: Looking) -> None:
    await looking.look()  # where it begins there is nothing to check it by
    assert looking.events == []
    first, second = looking.crowd.decide(), looking.crowd.decide(num_signed=2)
    await looking.look()
    assert looking.proven == [(first.manifest.round, 3, 3), (second.manifest.round, 2, 3)]
    await looking.look()
    assert len(looking.events) == 2


async def test_what_no_majority_signed_is_no_proof_and_the_next_one_is_asked(looking: Looking) -> None:
    await looking.look()
    crowd = looking.crowd
    forged = certificate(successor(crowd.known[A]), vote(crowd.known[A], MEMBERS[0], successor(crowd.known[A])))
    made = crowd.decide()
    crowd.told[A] = [forged]
    await looking.look(A, B)
    assert looking.proven == [(made.manifest.round, 3, 3)]
    assert ["no majority signed" in text for text in looking.notices] == [True]


async def test_who_is_silent_or_forgot_is_passed_over(looking: Looking) -> None:
    await looking.look()
    made = looking.crowd.decide()
    looking.crowd.silent, looking.crowd.told[B] = {A}, None
    await looking.look(A, B, C)
    assert looking.proven == [(made.manifest.round, 3, 3)]


async def test_whose_word_differs_from_what_was_signed_is_named_once(looking: Looking) -> None:
    await looking.look()
    branch = looking.crowd.known[A].head.branch
    made = looking.crowd.decide()
    name, other = digest_of(made.manifest), digest(b"another")
    looking.proving.claimed(A, branch, made.manifest.round, name)  # before it is proven,
    looking.proving.claimed(B, branch, made.manifest.round, other)
    await looking.look()
    assert [B[:8] in text for text in looking.notices] == [True]
    looking.proving.claimed(B, branch, made.manifest.round, other)
    looking.proving.claimed(C, branch, made.manifest.round, other)  # and after it
    looking.proving.claimed(
        A, branch, Round(made.manifest.round - 1), Digest("0" * 64)
    )  # of a round nobody knows of here
    assert [text[:8] for text in looking.notices] == [B[:8], C[:8]]


async def test_where_nobody_knows_how_it_goes_on_it_begins_anew(looking: Looking) -> None:
    await looking.look()
    looking.crowd.decide()
    looking.crowd.told = dict.fromkeys(PEERS)
    await looking.look()
    assert looking.proven == []
    looking.clock.at += STALE_S + 1
    await looking.look()
    looking.crowd.told = {}
    made = looking.crowd.decide()
    await looking.look()
    assert looking.proven == [(made.manifest.round, 3, 3)]


async def test_while_a_round_lasts_longer_it_waits(looking: Looking) -> None:
    await looking.look()
    looking.clock.at += 10 * STALE_S
    looking.crowd.starts.clear()
    await looking.look()
    made = looking.crowd.decide()
    await looking.look()
    assert looking.proven == [(made.manifest.round, 3, 3)]
    assert looking.crowd.starts == []


async def test_where_nobody_says_where_the_run_stands_it_keeps_what_it_knows(looking: Looking) -> None:
    await looking.look()
    made = looking.crowd.decide()
    looking.crowd.told, looking.crowd.homeless = dict.fromkeys(PEERS), set(PEERS)
    looking.clock.at += STALE_S + 1
    await looking.look()
    looking.crowd.told = {}
    await looking.look()
    assert looking.proven == [(made.manifest.round, 3, 3)]


async def test_who_tells_what_no_majority_signed_is_not_asked_for_a_minute(looking: Looking) -> None:
    await looking.look()
    crowd = looking.crowd
    crowd.told[A] = [certificate(successor(crowd.known[A]))]
    for _ in range(3):
        await looking.look(A, B)
    assert len(looking.notices) == 1
    looking.clock.at += DEAF_S
    await looking.look(A, B)
    assert len(looking.notices) == 2


async def test_of_two_that_differ_neither_is_believed_and_one_round_is_no_difference(looking: Looking) -> None:
    lonely = looking.crowd.known[A]
    lonely.append(certificate(msgspec.structs.replace(successor(lonely), leader=A, committed_tokens=Tokens(1))))
    lonely.append(certificate(successor(lonely)))
    await looking.look(A, B)
    looking.crowd.known[B].append(looking.crowd.signed(B))
    looking.crowd.known[C].append(looking.crowd.signed(C))
    await looking.look(A, B)
    assert looking.proven == []
    looking.crowd.known[C].append(made := looking.crowd.signed(C))
    await looking.look(B, C)  # one is a round ahead
    assert looking.proven == [(made.manifest.round, 3, 3)]


async def test_a_head_of_another_run_or_of_nobody_is_none(looking: Looking) -> None:
    for wrong in (
        {"run": RunId("cd" * 32)},
        {"members": (), "uplinks": ()},
        {"uplinks": (1,)},
        {"charter": digest(b"another")},
    ):
        head = msgspec.structs.replace(looking.crowd.known[A].head, **wrong)
        assert not is_beginning(head, charter(4), RUN)
    assert is_beginning(looking.crowd.known[A].head, charter(4), RUN)


async def test_claims_of_rounds_far_ahead_are_not_kept(looking: Looking) -> None:
    await looking.look()
    head = looking.crowd.known[A].head
    for ahead in range(1, 10 * MAX_AHEAD):
        looking.proving.claimed(B, head.branch, Round(head.round + ahead), digest(b"another"))
    for _ in range(MAX_AHEAD + 1):
        looking.crowd.decide()
        await looking.look()
    assert len(looking.proven) == MAX_AHEAD + 1
    assert len(looking.proving._claims) == 0


async def test_most_of_those_asked_are_believed_where_it_begins(looking: Looking) -> None:
    lonely = looking.crowd.known[A]
    lonely.append(certificate(successor(lonely)))  # which nobody signed
    await looking.look()
    lonely.restart(looking.crowd.known[B].head, charter(4))
    made = looking.crowd.decide()
    await looking.look()
    assert looking.proven == [(made.manifest.round, 3, 3)]
