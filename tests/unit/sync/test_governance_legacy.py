"""What a legacy weighs, and that it is counted once."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from charters import charter
from weft.codec.build import build
from weft.codec.config import Fp32Config
from weft.ids import BranchId, PeerId, Round, RunId, Tokens
from weft.peer.chain import genesis, open_branch
from weft.sync.governance import charter_after, countable, enacted, legacy_tokens
from weft.sync.merge.reduce import Coding, Merger
from weft.sync.records.ancestry import Legacy, Stretch
from weft.sync.records.charter import AuditTerms
from weft.sync.records.messages import (
    Base,
    Certificate,
    Contribution,
    LegacyProof,
    Manifest,
    Ready,
    counted,
    counted_of,
    own_work,
)
from weft.sync.round.rules import says_right_work
from weft.sync.round.shares import contribution
from weft.wire import Signed, digest_of

RUN = RunId("1" * 64)
PEERS = [PeerId(letter * 64) for letter in "abcdef"]
HUGE = 10**18


def base(**changes: object) -> Base:
    return msgspec.structs.replace(genesis(RUN, PEERS[0], charter()), round=Round(5), cursor=10_000, **changes)


def own(peer: PeerId, tokens: int) -> Contribution:
    return Contribution(peer=peer, tokens=Tokens(tokens), parts=())


def legacy(peer: PeerId, tokens: int, branch: str = "2", start: int = 3, stop: int = 6) -> Contribution:
    stretch = Stretch(branch=BranchId(branch * 64), start=Round(start), stop=Round(stop))
    return Contribution(
        peer=peer, tokens=Tokens(tokens), parts=(), legacy=Legacy(stretches=(stretch,), tokens=Tokens(tokens))
    )


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), st.integers(1, HUGE))
def test_a_legacy_weighs_its_tokens_and_at_most_the_median(weights: list[int], tokens: int) -> None:
    others = [own(peer, weight) for peer, weight in zip(PEERS, weights, strict=False)]
    counted = countable(base(), [*others, legacy(PEERS[-1], tokens)])
    assert counted[:-1] == tuple(others)
    assert counted[-1].tokens == min(tokens, sorted(weights)[(len(weights) - 1) // 2])
    assert countable(base(), counted) == counted  # which is how members check it


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=5), st.integers(0, 3000))
def test_all_claim_no_more_together_than_was_leased_and_who_claims_most_is_cut_first(
    claims: list[int], leased: int
) -> None:
    charter_now = base().charter
    here = base(committed_tokens=Tokens(charter_now.leased_tokens(base().cursor) - leased))
    counted = countable(here, [own(peer, tokens) for peer, tokens in zip(PEERS, claims, strict=False)])
    cut = [each.tokens for each in counted]
    assert sum(cut) <= leased
    assert sum(cut) > leased - len(claims) or cut == claims
    assert all(after == min(before, max(cut)) for before, after in zip(claims, cut, strict=True))
    assert countable(here, counted) == counted


def test_a_stretch_of_no_rounds_is_no_legacy() -> None:
    assert countable(base(), [legacy(PEERS[1], 100, start=4, stop=4)]) == ()
    assert countable(base(), [legacy(PEERS[1], 100, start=6, stop=3)]) == ()


def test_of_two_pieces_of_one_branch_the_larger_is_counted() -> None:
    offered = [own(PEERS[0], 64), legacy(PEERS[1], 100, stop=5), legacy(PEERS[2], 200), legacy(PEERS[3], 10, "3")]
    assert [each.peer for each in countable(base(), offered)] == [PEERS[0], PEERS[2], PEERS[3]]


def test_what_was_taken_in_is_not_counted_again_and_its_tokens_count_as_leased() -> None:
    first = base()
    contributions = countable(first, [own(PEERS[0], 64), legacy(PEERS[1], HUGE)])
    after = enacted(first, (), contributions).charter
    assert after.leased_tokens(0) == first.charter.leased_tokens(0) + 64
    second = base(charter=after)
    assert countable(second, contributions) == contributions[:1]
    assert countable(second, [own(PEERS[0], 64), legacy(PEERS[1], 5, start=6, stop=7)])[1:] != ()


def test_rounds_of_the_branch_itself_are_no_legacy() -> None:
    here = base(branch=BranchId("2" * 64))
    assert countable(here, [own(PEERS[0], 64), legacy(PEERS[1], 100)]) == (own(PEERS[0], 64),)


def test_beside_nobody_it_weighs_a_quota() -> None:
    settings = charter().settings
    (counted,) = countable(base(), [legacy(PEERS[0], HUGE)])
    assert counted.tokens == settings.quota * settings.seq_len


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_a_legacy_moves_the_mean_no_further_than_the_median_of_the_others(scale: float) -> None:
    codec, generator = build(Fp32Config()), torch.Generator().manual_seed(1)
    vectors = [torch.randn(5000, generator=generator) * length for length in (1.0, 2.0, 5.0)]
    brought = torch.randn(5000, generator=generator) * scale
    merger = Merger(5000, Coding(codec, codec), is_measuring=True)
    for vector in vectors:
        merger.add(64, codec.encode(vector))
    merger.add_legacy(64, codec.encode(brought), num_rounds=7)
    mean = np.frombuffer(merger.result().encoded, dtype=np.float32)
    others = sum(vector.numpy().astype(np.float64) for vector in vectors) / 4
    moved, median = np.linalg.norm(mean - others), float(torch.linalg.vector_norm(vectors[1]))
    assert moved == pytest.approx(min(float(torch.linalg.vector_norm(brought)), median) / 4, rel=1e-4)


def test_alone_it_moves_as_far_as_the_mean_of_its_rounds() -> None:
    codec = build(Fp32Config())
    merger = Merger(3, Coding(codec, codec), is_measuring=True)
    merger.add_legacy(64, codec.encode(torch.tensor([8.0, 0.0, 4.0])), num_rounds=4)
    assert np.frombuffer(merger.result().encoded, dtype=np.float32).tolist() == [2.0, 0.0, 1.0]


def test_an_opening_adds_a_fork_and_any_other_manifest_none() -> None:
    here = base()
    opened = msgspec.structs.replace(_manifest(here), branch=BranchId("7" * 64))
    (fork,) = charter_after(here, opened).forks
    assert (fork.branch, fork.round, fork.manifest) == (here.branch, here.round, here.previous)
    assert charter_after(here, _manifest(here)) == here.charter


def test_a_manifest_counts_own_work_or_a_legacy_of_a_peer_and_each_is_told_apart() -> None:
    brought = (own(PEERS[0], 7), legacy(PEERS[1], 7))
    counts = msgspec.structs.replace(_manifest(base()), contributions=tuple(map(counted, brought)))
    assert [counted_of(counts, peer) for peer in PEERS[:3]] == [*counts.contributions, None]
    assert [own_work(counts, peer) for peer in PEERS[:3]] == [counts.contributions[0], None, None]


def _manifest(here: Base) -> Manifest:
    return open_branch(here, PEERS[:1], PEERS[0], here.branch)


def made_up(here: Base, by: PeerId) -> Ready:
    """Return what one member alone can bring as that of a branch: it has signed all of it itself."""
    branch = BranchId("9" * 64)
    opening = open_branch(here, [by], by, branch)
    held = charter_after(here, opening)
    counts = Tokens(opening.committed_tokens + HUGE)
    head = msgspec.structs.replace(
        opening, round=Round(here.round + 3), committed_tokens=counts, charter=digest_of(held)
    )
    stretch = Stretch(branch=branch, start=here.round, stop=Round(head.round + 1))
    certificate = Certificate(attempt=head.attempt, manifest=head, votes=(), farewells=())
    return Ready(
        tokens=Tokens(HUGE),
        parts=(),
        legacy=Legacy(stretches=(stretch,), tokens=Tokens(HUGE)),
        proof=LegacyProof(certificate=certificate, charter=held),
    )


def test_where_members_audit_each_other_nothing_that_a_branch_had_counted_is_brought() -> None:
    """A member that makes branches up would be counted in each round for what nobody can look at."""
    terms = AuditTerms(rate=0.1, trace_every=1)
    for audits, tokens in ((UNSET, base().charter.settings.quota_tokens), (terms, 0)):
        here = base(charter=msgspec.structs.replace(base().charter, audits=audits), electorate=tuple(sorted(PEERS)))
        ready = made_up(here, PEERS[1])
        assert legacy_tokens(here, ready) == tokens
        assert says_right_work(here, contribution(here.charter, PEERS[1], ready)) == (audits is UNSET)
        signed = Signed(kind="Work", signer=PEERS[1], body=b"a work", signature=bytes(64))
        beside = msgspec.structs.replace(ready, work=signed)
        assert not says_right_work(here, contribution(here.charter, PEERS[1], beside))
