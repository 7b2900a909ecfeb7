"""What contributions weigh, and that an inner step moves the outer parameters as far whenever it is counted."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charters import charter
from model.world import contribution, first_base
from weft.data.assign import leases
from weft.ids import Attempt, PeerId, Tokens
from weft.sync.method.presets import AsyncDiLoCoConfig, DdpConfig, spell_out
from weft.sync.records.messages import Collect, Contribution, GroupClaim, Manifest, Pass, Ready
from weft.sync.records.weights import awaited_weight, weight, weight_of
from weft.sync.round import round
from weft.sync.round.leading import new_manifest
from weft.sync.round.machine import Received, State, TimedOut, Trained
from weft.sync.round.rules import is_sound, is_successor, leader
from weft.sync.round.shares import weighed
from weft.wire import digest, digest_of

RULES = charter()
LEASE = RULES.settings.quota * RULES.settings.seq_len
PEERS = [PeerId(f"{number:064x}") for number in range(4)]
GRADIENTS = msgspec.structs.replace(
    RULES, settings=msgspec.structs.replace(RULES.settings, method=spell_out(DdpConfig(), 4))
)


def brings(tokens: int, group: GroupClaim | None = None) -> Contribution:
    return Contribution(peer=PEERS[0], tokens=Tokens(tokens), parts=(), group=group)


def claim(weight: int, num_counted: int) -> GroupClaim:
    return GroupClaim(record=digest(b"record"), weight=Tokens(weight), num_counted=num_counted, num_leased=1, samples=1)


def test_a_delta_of_several_rounds_weighs_as_one_rounds_and_a_gradient_all_its_tokens() -> None:
    assert weight(RULES, LEASE // 2) == LEASE // 2
    assert weight(RULES, 3 * LEASE) == weight_of(RULES, brings(3 * LEASE)) == LEASE
    assert weight(GRADIENTS, 10**9) == 10**9


def test_a_group_weighs_what_its_peers_do_and_claims_no_more() -> None:
    assert weight_of(RULES, brings(5 * LEASE, claim(3 * LEASE, 3))) == 3 * LEASE
    assert weight_of(RULES, brings(5 * LEASE, claim(5 * LEASE, 3))) == 4 * LEASE  # four peers
    assert weight_of(RULES, brings(LEASE, claim(4 * LEASE, 3))) == LEASE  # what it is believed to have trained


def test_who_is_late_weighs_what_it_was_leased_where_deltas_are_sent() -> None:
    leased, _ = leases(0, {PEERS[0]: 8, PEERS[1]: 24})
    before, _ = leases(1000, {PEERS[1]: 5, PEERS[2]: 16})
    late = (PEERS[1], PEERS[2])
    assert awaited_weight(RULES, late, leased, (*before, *leased)) == 24 * RULES.settings.seq_len
    assert awaited_weight(RULES, (), leased, ()) == 0
    assert awaited_weight(GRADIENTS, (PEERS[1],), leased, leased) == 0
    settings = msgspec.structs.replace(RULES.settings, method=spell_out(AsyncDiLoCoConfig(), 4))
    at_work = msgspec.structs.replace(RULES, settings=settings)
    assert awaited_weight(at_work, late, leased, (*before, *leased)) == (24 + 5 + 16) * RULES.settings.seq_len


@given(st.lists(st.sets(st.sampled_from(PEERS), min_size=1), max_size=12))
def test_every_inner_step_moves_as_far_as_if_nobody_were_ever_late(counted_in: list[set[PeerId]]) -> None:
    """Four peers train a lease in each round; each round counts some of them, and the last one all."""
    carried: dict[PeerId, int] = defaultdict(int)
    moved: dict[PeerId, float] = defaultdict(float)  # by its inner steps, in multiples of one round's without losses
    leased, _ = leases(0, dict.fromkeys(PEERS, RULES.settings.quota))
    for counted in [*counted_in, set(PEERS)]:
        for peer in PEERS:
            carried[peer] += LEASE
        late = [peer for peer in PEERS if peer not in counted]
        weights = {peer: weight(RULES, carried[peer]) for peer in counted}
        divisor = sum(weights.values()) + awaited_weight(RULES, late, leased, ())
        for peer in counted:
            moved[peer] += weights[peer] / divisor * (carried.pop(peer) / LEASE) * len(PEERS)
    assert moved == {peer: pytest.approx(len(counted_in) + 1) for peer in PEERS}


# --- who counts as late ---

BASE = msgspec.structs.replace(first_base(4), keeper=None)
FIRST, *OTHERS = [leader(BASE, Attempt(attempt)) for attempt in range(4)]


def announced(*peers: PeerId, passing: PeerId | None = None) -> State:
    """Return the first leader's state once it has announced, `peers` too, and grace is over."""
    state = round.begin(FIRST, BASE)
    parts = {peer: contribution(BASE, number, 0).parts for number, peer in enumerate(BASE.electorate)}
    state = round.step(state, Trained(ready=Ready(tokens=Tokens(4), parts=parts[FIRST])))[0]
    if passing is not None:
        state = round.step(state, Received(sender=passing, message=Pass()))[0]
    for peer in peers:
        state = round.step(state, Received(sender=peer, message=Ready(tokens=Tokens(4), parts=parts[peer])))[0]
    return round.step(state, TimedOut(timer="grace", attempt=Attempt(0)))[0]


def manifest_of(state: State) -> Manifest:
    assert state.plan is not None
    results = {part: digest(b"merged") for part in range(BASE.num_parts)}
    return new_manifest(msgspec.structs.replace(state, results=results), state.plan)


def test_a_manifest_names_the_late_but_neither_the_paused_nor_the_gone() -> None:
    assert manifest_of(announced(*OTHERS)).awaited == ()
    assert manifest_of(announced(OTHERS[0], OTHERS[1])).awaited == (OTHERS[2],)
    assert manifest_of(announced(OTHERS[0], OTHERS[1], passing=OTHERS[2])).awaited == ()


@pytest.mark.parametrize("awaited", [(OTHERS[0],), (PEERS[0],), (OTHERS[2], OTHERS[2])], ids=str)
def test_nobody_counted_and_no_stranger_is_awaited_and_nobody_twice(awaited: tuple[PeerId, ...]) -> None:
    state = announced(OTHERS[0], OTHERS[1])
    manifest = manifest_of(state)
    assert state.plan is not None
    assert is_successor(BASE, manifest)
    assert is_sound(BASE, state.plan)
    assert not is_successor(BASE, msgspec.structs.replace(manifest, awaited=awaited))
    assert not is_sound(BASE, msgspec.structs.replace(state.plan, awaited=awaited))


def test_a_verdict_says_what_the_mean_was_made_of_that_has_counted_a_work() -> None:
    base = first_base(3, num_parts=3)
    leased, _ = leases(0, dict.fromkeys(base.electorate, base.quota))
    brought = tuple(msgspec.structs.replace(contribution(base, number, 0), tokens=Tokens(8)) for number in range(2))
    state = msgspec.structs.replace(round.begin(base.electorate[0], base), results=dict.fromkeys(range(3), digest(b"")))
    plan = Collect(
        attempt=Attempt(0), revision=0, contributions=brought, owners=base.electorate, awaited=(base.electorate[2],)
    )
    manifest = new_manifest(state, plan)
    found = weighed(base, manifest, leased, base.electorate[0])
    assert found is not None
    assert (found.manifest, found.weights) == (digest_of(manifest), (8, 8))
    assert found.late == awaited_weight(base.charter, plan.awaited, leased, base.uncounted) > 0
    assert weighed(base, manifest, leased, base.electorate[2]) is None, "it was not counted"
    less = msgspec.structs.replace(manifest, counters=(base.electorate[2],))
    assert weighed(base, less, leased, base.electorate[0]) is None, "its results are less by another false work"
