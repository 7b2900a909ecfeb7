"""What proves a decision, and what it costs to find out that nothing does."""

from typing import Any

import msgspec
import pytest

from charters import charter
from weft.errors import WireError
from weft.ids import Attempt, BranchId, PeerId, RunId
from weft.keys import Identity, verify
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.peer import chain
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.round.inbox import Proofs
from weft.sync.records.messages import Accept, Certificate, Committed, Counted, Goodbye, Manifest, PartResult, RoundNote
from weft.sync.round import round
from weft.sync.round.machine import replace
from weft.sync.round.rules import leader
from weft.sync.round.shares import lease
from weft.wire import Signed, decode, digest, digest_of, encode, seal

RUN = RunId("cc" * 32)
MEMBERS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(3)), key=lambda each: each.peer)
STRANGER = Identity.from_seed(b"s" * 32)


@pytest.fixture
def known() -> Chain:
    peers = [each.peer for each in MEMBERS]
    return Chain(open_branch(genesis(RUN, peers[0], charter(4)), peers, peers[0], BranchId(RUN)), charter(4))


def successor(known: Chain) -> Manifest:
    base = known.base
    counted = (Counted(peer=base.electorate[0], tokens=0, payload=digest(b"payload")),)
    leased = lease(base, base.charter, counted, dict.fromkeys(base.electorate, 4))
    part = PartResult(owner=base.electorate[0], result=digest(b"merged"))
    return msgspec.structs.replace(
        known.head,
        round=base.round,
        attempt=Attempt(0),
        leader=leader(base, Attempt(0)),
        previous=base.previous,
        contributions=counted,
        parts=(part,) * base.num_parts,
        leases=leased.leases,
        cursor=leased.cursor,
        uncounted=leased.uncounted,
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


def test_one_signature_of_each_member_is_checked(known: Chain) -> None:
    checked: list[PeerId] = []

    def count(peer: PeerId, message: bytes, signature: bytes) -> bool:
        checked.append(peer)
        return verify(peer, message, signature)

    manifest = successor(known)
    votes: list[Any] = [vote(known, STRANGER, manifest)] * 10 + [vote(known, MEMBERS[0], manifest)] * 10
    assert not known.proven(certificate(manifest, *votes), count)
    assert checked == [MEMBERS[0].peer]


@pytest.mark.parametrize("field", ["votes", "farewells"])
def test_more_letters_than_members_are_not_read(known: Chain, field: str) -> None:
    manifest = successor(known)
    letters = (vote(known, MEMBERS[0], manifest),) * (MAX_MEMBERS + 1)
    long = msgspec.structs.replace(certificate(manifest), **{field: letters})
    with pytest.raises(WireError):
        decode(encode(long), Certificate)


def test_results_that_no_manifest_named_go_when_their_round_is_decided(known: Chain) -> None:
    manifest = successor(known)
    for data in (b"merged", b"of another plan"):
        known.keep(manifest.round, digest(data), data)
    known.append(certificate(manifest))
    assert known.result(digest(b"merged")) == b"merged"
    assert known.result(digest(b"of another plan")) is None


def test_results_go_with_the_certificate_that_leads_to_them(known: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MAX_REMEMBERED", 3)
    for number in range(6):
        data = f"round {number}".encode()
        manifest = successor(known)
        part = PartResult(owner=known.base.electorate[0], result=digest(data))
        known.keep(manifest.round, digest(data), data)
        known.append(certificate(msgspec.structs.replace(manifest, parts=(part,) * known.base.num_parts)))
    kept = [known.result(digest(f"round {number}".encode())) is not None for number in range(6)]
    assert kept == [False] * 3 + [True] * 3
    assert known._nbytes == 3 * len(b"round 0")


def test_a_certificate_names_only_the_farewells_that_it_needs(known: Chain) -> None:
    """Each may hold a manifest: those of many members would be too much for one message."""
    me, other, third = MEMBERS
    manifest = successor(known)
    goodbye = Goodbye(promised=Attempt(0), accepted=None)
    committed = Committed(attempt=Attempt(0), manifest=manifest)

    def proof(voters: tuple[Identity, ...]) -> Certificate:
        proofs, state = Proofs(me, known), round.begin(me.peer, known.base)
        state = replace(state, proposal=manifest, votes=frozenset({me.peer, *(voter.peer for voter in voters)}))
        note = RoundNote(branch=known.base.branch, round=known.base.round, message=goodbye)
        proofs.keep(state, third.peer, seal(third, note), goodbye)
        for voter in voters:
            proofs.keep(
                state,
                voter.peer,
                vote(known, voter, manifest),
                Accept(attempt=Attempt(0), manifest=digest_of(manifest)),
            )
        return proofs.certify(replace(state, farewells={third.peer: goodbye}), committed)

    assert proof((other,)).farewells == ()
    (needed,) = proof(()).farewells  # one vote of three, or of the two that are left: the tie-breaker's
    assert needed.signer == third.peer
    assert all(known.proven(proof(voters)) for voters in ((), (other,)))
