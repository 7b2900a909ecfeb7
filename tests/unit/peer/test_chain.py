"""What proves a decision, and what it costs to find out that nothing does."""

from typing import Any

import msgspec
import pytest

from weft.data.assign import leases
from weft.errors import WireError
from weft.ids import Attempt, BranchId, PeerId, RunId
from weft.keys import Identity, verify
from weft.net.membership import MAX_MEMBERS
from weft.peer import chain
from weft.peer.chain import Chain, genesis, open_branch
from weft.sync.messages import Accept, Certificate, Contribution, Manifest, PartResult, RoundNote
from weft.sync.rules import leader
from weft.wire import Signed, decode, digest, digest_of, encode, seal

RUN = RunId("cc" * 32)
MEMBERS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(3)), key=lambda each: each.peer)
STRANGER = Identity.from_seed(b"s" * 32)


@pytest.fixture
def known() -> Chain:
    peers = [each.peer for each in MEMBERS]
    return Chain(open_branch(genesis(RUN, peers[0], 4), peers, peers[0], BranchId(RUN), 4), 4)


def successor(known: Chain) -> Manifest:
    base = known.base
    leased, cursor = leases(base.cursor, dict.fromkeys(base.electorate, 4))
    part = PartResult(owner=base.electorate[0], result=digest(b"merged"))
    return msgspec.structs.replace(
        known.head,
        round=base.round,
        attempt=Attempt(0),
        leader=leader(base, Attempt(0)),
        previous=base.previous,
        contributions=(Contribution(peer=base.electorate[0], tokens=0, parts=()),),
        parts=(part,) * base.num_parts,
        leases=leased,
        cursor=cursor,
    )


def vote(known: Chain, voter: Identity, manifest: Manifest) -> Signed:
    accept = Accept(attempt=Attempt(0), manifest=digest_of(manifest))
    return seal(voter, RoundNote(branch=known.base.branch, round=known.base.round, message=accept))


def certificate(manifest: Manifest, *votes: Signed) -> Certificate:
    return Certificate(attempt=Attempt(0), manifest=manifest, votes=votes, farewells=())


def test_a_majority_proves_a_decision_and_one_member_does_not(known: Chain) -> None:
    manifest = successor(known)
    first, second = (vote(known, voter, manifest) for voter in MEMBERS[:2])
    assert known.proven(certificate(manifest, first, second))
    assert not known.proven(certificate(manifest, first, first, first))
    assert not known.proven(certificate(manifest, first, vote(known, STRANGER, manifest)))


def test_one_signature_of_each_member_is_checked(known: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[PeerId] = []

    def count(peer: PeerId, message: bytes, signature: bytes) -> bool:
        checked.append(peer)
        return verify(peer, message, signature)

    monkeypatch.setattr(chain, "verify", count)
    manifest = successor(known)
    votes: list[Any] = [vote(known, STRANGER, manifest)] * 10 + [vote(known, MEMBERS[0], manifest)] * 10
    assert not known.proven(certificate(manifest, *votes))
    assert checked == [MEMBERS[0].peer]


@pytest.mark.parametrize("field", ["votes", "farewells"])
def test_more_letters_than_members_are_not_read(known: Chain, field: str) -> None:
    manifest = successor(known)
    letters = (vote(known, MEMBERS[0], manifest),) * (MAX_MEMBERS + 1)
    long = msgspec.structs.replace(certificate(manifest), **{field: letters})
    with pytest.raises(WireError):
        decode(encode(long), Certificate)
