"""Groups: what a manifest holds of them, who trains on what, and that two levels give what one would."""

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from charters import charter
from model.world import contribution as bare
from model.world import first_base
from weft.codec.build import build
from weft.codec.codec import Size
from weft.codec.config import Fp32Config
from weft.codec.dense import Bf16
from weft.codec.sparse.nonzero import Nonzero
from weft.data.assign import leases
from weft.errors import PayloadError, WireError
from weft.ids import Attempt, BranchId, PeerId, Round, Tokens
from weft.peer.chain import open_branch
from weft.sync.merge.mean import merge
from weft.sync.merge.reduce import Coding, GroupMean, Merger, encode_parts, payload_size, split
from weft.sync.records.charter import AuditTerms, PassageTerms
from weft.sync.records.messages import (
    MAX_GROUP,
    GroupRecord,
    Manifest,
    Ready,
    Stake,
    counted,
    counted_through,
    next_base,
)
from weft.sync.records.parts import cut
from weft.sync.records.weights import weight_of
from weft.sync.round import round
from weft.sync.round.groups import (
    NUM_HANDED,
    is_grace_due,
    is_true,
    may_close,
    order_of,
    parents,
    record_of,
    slices,
    tokens_of,
)
from weft.sync.round.leading import new_manifest
from weft.sync.round.machine import Received, State, Trained
from weft.sync.round.rules import is_successor, leader, says_right_work
from weft.sync.round.shares import are_fair, claim_of, shares
from weft.wire import Signed, decode, digest, digest_of, encode

BASE = msgspec.structs.replace(first_base(4), keeper=None)
QUOTA, QUOTA_TOKENS = BASE.charter.settings.quota, BASE.charter.settings.quota_tokens
ORDER = [leader(BASE, Attempt(attempt)) for attempt in range(4)]
AGGREGATOR = ORDER[1]
LEAVES = [PeerId(f"{number:064x}") for number in range(1, 4)]
CODEC = build(Fp32Config())


def stakes(tokens: int = 4, samples: int = QUOTA, leaves: list[PeerId] = LEAVES) -> list[Stake]:
    return [Stake(peer=peer, tokens=Tokens(tokens), samples=samples) for peer in (*leaves, AGGREGATOR)]


def group(**changes: Any) -> GroupRecord:
    record = record_of(BASE, AGGREGATOR, changes.pop("stakes", stakes()), [digest(b"payload")] * 4)
    return msgspec.structs.replace(record, **changes)


def planned(record: GroupRecord | None) -> State:
    """Return the first leader's state once all have announced, the aggregator with its group."""
    state = round.begin(ORDER[0], BASE)
    for number, peer in enumerate(BASE.electorate):
        parts = bare(BASE, number, 0).parts
        if peer == ORDER[0]:
            state = round.step(state, Trained(ready=Ready(tokens=Tokens(4), parts=parts)))[0]
        else:
            ready = (
                Ready(tokens=Tokens(16), parts=parts, group=record)
                if peer == AGGREGATOR
                else Ready(tokens=Tokens(4), parts=parts)
            )
            state = round.step(state, Received(sender=peer, message=ready))[0]
    return state


def manifest_of(state: State) -> Manifest:
    assert state.plan is not None
    results = {part: digest(b"merged") for part in range(BASE.num_parts)}
    return new_manifest(msgspec.structs.replace(state, results=results), state.plan)


def test_a_group_is_counted_as_one_and_leased_for_all_its_peers() -> None:
    manifest = manifest_of(planned(group()))
    (counted,) = [each for each in manifest.contributions if each.peer == AGGREGATOR]
    assert counted.group == claim_of(group(), BASE.charter)
    assert counted.tokens == 16
    assert counted_through(manifest) == 3
    leased = {lease.peer: lease.num_windows for lease in manifest.leases}
    assert leased == {peer: 4 * QUOTA if peer == AGGREGATOR else QUOTA for peer in BASE.electorate}
    assert is_successor(BASE, manifest)


def test_a_lease_for_more_peers_than_were_claimed_is_no_successor() -> None:
    manifest = manifest_of(planned(group()))
    wanted = {lease.peer: lease.num_windows for lease in manifest.leases}
    leased, cursor = leases(BASE.cursor, {**wanted, AGGREGATOR: 5 * QUOTA})
    assert not is_successor(BASE, msgspec.structs.replace(manifest, leases=leased, cursor=cursor))
    leased, cursor = leases(BASE.cursor, {**wanted, ORDER[2]: 2 * QUOTA})
    assert not is_successor(BASE, msgspec.structs.replace(manifest, leases=leased, cursor=cursor))


@pytest.mark.parametrize(
    "changes",
    [
        {"sponsor": ORDER[2]},
        {"round": Round(BASE.round + 1)},
        {"branch": BranchId("ee" * 32)},
        {"run": "ee" * 32},
        {"stakes": tuple(stakes()[:-1])},  # without the aggregator
        {"stakes": tuple(stakes() + stakes()[:1])},  # one twice
        {"stakes": tuple(stakes(leaves=[ORDER[2]]))},  # an elector, which is counted by itself
        {"stakes": tuple(stakes(samples=QUOTA + 1))},
    ],
)
def test_a_record_that_cannot_be_is_not_heard(changes: dict[str, Any]) -> None:
    record = group(**changes)
    assert is_true(BASE, AGGREGATOR, group())
    assert not is_true(BASE, AGGREGATOR, record)
    assert AGGREGATOR not in planned(record).ready


def test_who_is_banned_is_counted_through_nobody() -> None:
    base = msgspec.structs.replace(BASE, charter=msgspec.structs.replace(BASE.charter, banned=(LEAVES[0],)))
    assert not is_true(base, AGGREGATOR, group())


def test_an_electorate_takes_no_more_than_the_run_says() -> None:
    base = msgspec.structs.replace(BASE, charter=msgspec.structs.replace(BASE.charter, electors=5))
    state = planned(None)
    state = msgspec.structs.replace(
        state, durable=msgspec.structs.replace(state.durable, base=base), joiners=frozenset(LEAVES)
    )
    manifest = manifest_of(state)
    assert len(manifest.members) == 5
    assert is_successor(base, manifest)
    members = tuple(sorted((*BASE.electorate, *LEAVES[:2])))
    quotas = dict.fromkeys(members, QUOTA)
    leased, cursor = leases(BASE.cursor, quotas)
    six = msgspec.structs.replace(
        manifest, members=members, joined=tuple(LEAVES[:2]), uplinks=(16,) * 6, leases=leased, cursor=cursor
    )
    assert not is_successor(base, six)
    assert is_successor(BASE, msgspec.structs.replace(six, charter=digest_of(BASE.charter)))


def test_no_key_has_a_free_place_more_often_than_others() -> None:
    base = msgspec.structs.replace(BASE, charter=msgspec.structs.replace(BASE.charter, electors=5))
    state, nums = planned(None), Counter[PeerId]()
    for number in range(300):
        at = msgspec.structs.replace(base, previous=digest(b"%d" % number))
        durable = msgspec.structs.replace(state.durable, base=at)
        joined = manifest_of(msgspec.structs.replace(state, durable=durable, joiners=frozenset(LEAVES))).joined
        assert len(joined) == 1
        nums.update(joined)
    assert min(nums[peer] for peer in LEAVES) > 0.6 * 300 / len(LEAVES)


def test_what_was_leased_to_a_group_is_not_leased_again() -> None:
    manifest = manifest_of(planned(group()))
    base = next_base(manifest, BASE.charter)
    assert {lease.peer for lease in base.uncounted} == set(BASE.electorate) - {AGGREGATOR}


# --- shares and slices ---


@given(
    st.lists(st.integers(0, 40), min_size=0, max_size=MAX_GROUP - 1),
    st.integers(1, 40),
    st.booleans(),
    st.integers(1, 12),
)
def test_a_lease_is_cut_into_whole_disjoint_slices(asked: list[int], own: int, is_even: bool, unit: int) -> None:
    rules = msgspec.structs.replace(charter(10, batch_size=unit), has_even_leases=is_even)
    members = [
        Stake(peer=PeerId(f"{number:064x}"), tokens=Tokens(0), samples=samples) for number, samples in enumerate(asked)
    ]
    aggregator = Stake(peer=AGGREGATOR, tokens=Tokens(0), samples=own)
    record = record_of(BASE, AGGREGATOR, [*members, aggregator], [])
    num = shares(rules, [AGGREGATOR], {}, {AGGREGATOR: claim_of(record, rules)})[AGGREGATOR]
    found = slices(num, record, rules)
    assert next(iter(found)) == AGGREGATOR
    end = 0
    for here in found.values():
        assert here.start == end
        assert len(here) > 0
        assert len(here) % unit == 0
        end = here.stop
    assert end <= num
    assert set(found) <= {stake.peer for stake in record.stakes if stake.samples}
    if is_even:
        assert {len(here) for here in found.values()} == {rules.settings.quota}
        assert end == num


def test_slices_are_what_was_asked_for() -> None:
    rules = charter(10, batch_size=4)
    record = record_of(
        BASE,
        AGGREGATOR,
        [
            Stake(peer=LEAVES[0], tokens=Tokens(0), samples=8),
            Stake(peer=AGGREGATOR, tokens=Tokens(0), samples=40),
            Stake(peer=LEAVES[1], tokens=Tokens(9), samples=0),
            Stake(peer=LEAVES[2], tokens=Tokens(0), samples=4),
        ],
        [],
    )
    assert slices(52, record, rules) == {AGGREGATOR: range(40), LEAVES[0]: range(40, 48), LEAVES[2]: range(48, 52)}
    assert slices(44, record, rules) == {AGGREGATOR: range(40), LEAVES[0]: range(40, 44)}
    assert tokens_of(record, LEAVES[1]) == 9
    assert tokens_of(record, ORDER[0]) == 0


def test_a_group_may_be_leased_no_more_than_its_peers_may_train() -> None:
    rules = charter(10, batch_size=4)
    greedy = claim_of(group(stakes=tuple(stakes(samples=10**6))), BASE.charter)
    assert shares(rules, [AGGREGATOR], {}, {AGGREGATOR: greedy}) == {AGGREGATOR: 160}
    opening = open_branch(BASE, BASE.electorate, ORDER[0], BASE.branch)
    quotas = dict.fromkeys(BASE.electorate, 40)
    leased, cursor = leases(0, {**quotas, AGGREGATOR: 80})
    base = msgspec.structs.replace(BASE, charter=rules)
    assert not are_fair(base, rules, msgspec.structs.replace(opening, leases=leased, cursor=cursor))


def test_groups_are_about_even_and_each_peer_has_an_order_of_its_own() -> None:
    electors = [PeerId(f"{number:064x}") for number in range(16)]
    firsts = [order_of(BASE.run, PeerId(f"{number:064x}"), electors)[0] for number in range(100, 1100)]
    sizes = [firsts.count(elector) for elector in electors]
    assert min(sizes) > 30
    assert max(sizes) < 100
    assert set(order_of(BASE.run, electors[3], electors)) == set(electors) - {electors[3]}


# --- when ---


def test_an_aggregator_waits_for_the_living_until_the_grace_is_over() -> None:
    everybody = {*LEAVES, AGGREGATOR}
    assert not may_close(everybody, {AGGREGATOR}, set(), is_grace_over=False)
    assert not may_close(everybody, {AGGREGATOR, *LEAVES[:2]}, set(), is_grace_over=False)
    assert may_close(everybody, {AGGREGATOR, *LEAVES[:2]}, {LEAVES[2]}, is_grace_over=False)
    assert may_close(everybody, everybody, set(), is_grace_over=False)
    assert may_close(everybody, {AGGREGATOR}, set(), is_grace_over=True)
    assert not is_grace_due(everybody, {AGGREGATOR, LEAVES[0]})
    assert is_grace_due(everybody, {AGGREGATOR, *LEAVES[:2]})


# --- means ---

PARTS = cut(50_000, [16, 4, 8])


def vectors(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(50_000, generator=generator) for _ in range(num)]


def test_two_levels_give_the_mean_of_all() -> None:
    tokens, all_vectors = [64, 32, 200, 64, 7, 64], vectors(6)
    weights = [min(each, 64) for each in tokens]
    groups = [range(3), range(3, 5), range(5, 6)]
    top = [Merger(len(part), Coding(CODEC, CODEC), awaited=64) for part in PARTS]
    for members in groups:
        mean = GroupMean(CODEC, PARTS)
        for number in members:
            mean.add(weights[number], encode_parts(CODEC, all_vectors[number], PARTS))
        for merger, part in zip(top, mean.result(CODEC), strict=True):
            merger.add(sum(weights[number] for number in members), part.encoded)
    flat = [Merger(len(part), Coding(CODEC, CODEC), awaited=64) for part in PARTS]
    for number, vector in enumerate(all_vectors):
        for merger, encoded in zip(flat, encode_parts(CODEC, vector, PARTS), strict=True):
            merger.add(weights[number], encoded)
    for one, other, part in zip(top, flat, PARTS, strict=True):
        a, b = (torch.frombuffer(bytearray(each.result().encoded), dtype=torch.float32) for each in (one, other))
        assert a.numel() == len(part)
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_the_mean_of_a_group_is_the_mean_that_merging_gives() -> None:
    mean = GroupMean(CODEC, PARTS)
    for tokens, vector in zip((3, 5), vectors(2), strict=True):
        payload = b"".join(bytes(memoryview(part)) for part in encode_parts(CODEC, vector, PARTS))
        assert payload_size(CODEC, PARTS) == Size(len(payload))
        mean.add(tokens, split(CODEC, payload, PARTS))
    expected = merge(zip((3, 5), vectors(2), strict=True))
    encoded = b"".join(bytes(memoryview(part.encoded)) for part in mean.result(CODEC))
    assert encoded == expected.numpy().tobytes()


def test_what_is_no_payload_leaves_the_mean_as_it_was() -> None:
    mean = GroupMean(CODEC, PARTS)
    first, second = vectors(2)
    mean.add(3, encode_parts(CODEC, first, PARTS))
    second[49_999] = float("nan")
    broken = b"".join(second[part.start : part.stop].numpy().tobytes() for part in PARTS)
    with pytest.raises(PayloadError):
        mean.add(5, split(CODEC, broken, PARTS))
    with pytest.raises(PayloadError):
        split(CODEC, broken[:-4], PARTS)
    with pytest.raises(PayloadError):
        mean.add(0, encode_parts(CODEC, first, PARTS))
    encoded = b"".join(bytes(memoryview(part.encoded)) for part in mean.result(CODEC))
    assert encoded == first.numpy().tobytes()
    with pytest.raises(PayloadError):
        GroupMean(CODEC, PARTS).result(CODEC)


# --- what was decided ---


@pytest.mark.parametrize("num", range(MAX_GROUP))
def test_nobody_hands_results_on_to_more_than_two_and_everybody_is_near_the_aggregator(num: int) -> None:
    leaves = [PeerId(f"{number:064x}") for number in range(num)]
    found = parents(AGGREGATOR, leaves)
    assert list(found) == leaves
    assert max(Counter(found.values()).values(), default=0) <= NUM_HANDED

    def distance(peer: PeerId) -> int:
        return 0 if peer == AGGREGATOR else 1 + distance(found[peer])

    assert all(distance(leaf) <= 6 for leaf in leaves)


@pytest.mark.parametrize("changes", [{"peers": bytes(32)}, {"peers": bytes(100)}, {"tokens": (4,)}, {"samples": ()}])
def test_a_record_whose_columns_differ_in_length_is_none(changes: dict[str, Any]) -> None:
    record = group()
    fields = {"peers": record.peers, "tokens": record.tokens, "samples": record.samples} | changes
    whole = msgspec.msgpack.decode(encode(record)) | fields
    assert decode(encode(record), GroupRecord) == record
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(whole, order="sorted"), GroupRecord)


def test_a_payload_of_parts_of_unknown_length_is_cut_where_each_ends() -> None:
    codec, vector = Nonzero(Bf16()), vectors(1)[0]
    vector[::3] = 0.0
    encoded = encode_parts(codec, vector, PARTS)
    payload = b"".join(bytes(memoryview(part)) for part in encoded)
    size = payload_size(codec, PARTS)
    assert not size.is_exact
    assert len(payload) < size.most
    assert [bytes(part) for part in split(codec, payload, PARTS)] == [bytes(memoryview(part)) for part in encoded]
    for broken in (payload[:-1], payload + b"x", b""):
        with pytest.raises(PayloadError):
            split(codec, broken, PARTS)


def test_where_members_audit_each_other_no_group_is_heard_or_counted() -> None:
    """A member that was late brings the sum of some leases, which weighs as one; as a group's it would weigh as all."""
    charter = msgspec.structs.replace(BASE.charter, audits=AuditTerms(rate=0.1, trace_every=1))
    audited, work = msgspec.structs.replace(BASE, charter=charter), digest(b"work")
    brought = counted(msgspec.structs.replace(bare(audited, 1, 0), tokens=Tokens(4 * QUOTA_TOKENS), work=work))
    grouped = msgspec.structs.replace(brought, group=claim_of(group(stakes=stakes(QUOTA_TOKENS)), charter))
    assert weight_of(charter, grouped) == 4 * weight_of(charter, brought) == 4 * QUOTA_TOKENS
    assert says_right_work(audited, brought)
    assert not says_right_work(audited, grouped)
    bare_group = msgspec.structs.replace(grouped, work=UNSET)
    assert says_right_work(BASE, bare_group), "others have groups"
    stage = msgspec.structs.replace(BASE.charter, passages=PassageTerms(rate=0.1))
    assert not says_right_work(msgspec.structs.replace(BASE, charter=stage), bare_group)
    state, parts = round.begin(ORDER[0], audited), bare(BASE, BASE.electorate.index(AGGREGATOR), 0).parts
    signed = Signed(kind="Work", signer=AGGREGATOR, body=b"a work", signature=bytes(64))
    for record, is_heard in ((group(), False), (None, True)):
        ready = Ready(tokens=Tokens(16), parts=parts, group=record, work=signed)
        after, _ = round.step(state, Received(sender=AGGREGATOR, message=ready))
        assert (AGGREGATOR in after.ready) == is_heard
