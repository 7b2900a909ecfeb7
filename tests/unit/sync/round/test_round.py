"""The round machine against what members of bad will say; tests/model searches what the others can do."""

from typing import Any

import msgspec
import pytest

from model.world import contribution, first_base
from weft.data.assign import leases
from weft.errors import WireError
from weft.ids import Attempt, BranchId, PeerId, Round, Tokens
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.peer.chain import open_branch
from weft.sync.records.ancestry import Legacy, Stretch
from weft.sync.records.charter import AuditTerms
from weft.sync.records.messages import (
    MAX_COUNT,
    AnyRoundMessage,
    Certificate,
    Collect,
    Goodbye,
    Holding,
    LegacyProof,
    Manifest,
    Merged,
    Pass,
    Prepare,
    Promise,
    Propose,
    Ready,
    Refuse,
    RoundNote,
    Stake,
    Vote,
)
from weft.sync.round import round
from weft.sync.round.groups import record_of
from weft.sync.round.leading import new_manifest, new_plan
from weft.sync.round.machine import Broadcast, MergeDone, Noticed, Paused, Received, Send, State, Trained
from weft.sync.round.round import publish
from weft.sync.round.rules import is_successor, leader
from weft.wire import decode, digest, digest_of, encode

BASE = msgspec.structs.replace(first_base(4), keeper=None)
ORDER = [leader(BASE, Attempt(attempt)) for attempt in range(4)]


def hear(state: State, sender: PeerId, message: AnyRoundMessage) -> State:
    return round.step(state, Received(sender=sender, message=message))[0]


def planned() -> State:
    """Return the first leader's state once it has planned."""
    state = round.begin(ORDER[0], BASE)
    for number, peer in enumerate(BASE.electorate):
        parts = contribution(BASE, number, 0).parts
        if peer == ORDER[0]:
            state = round.step(state, Trained(ready=Ready(tokens=Tokens(4), parts=parts)))[0]
        else:
            state = hear(state, peer, Ready(tokens=Tokens(4), parts=parts))
    assert state.plan is not None
    return state


def manifest_of(state: State) -> Manifest:
    assert state.plan is not None
    results = {part: digest(b"merged") for part in range(BASE.num_parts)}
    return new_manifest(msgspec.structs.replace(state, results=results), state.plan)


def ready_of(number: int) -> Ready:
    return Ready(tokens=Tokens(4), parts=contribution(BASE, number, 0).parts)


GROUP = record_of(BASE, ORDER[1], [Stake(peer=ORDER[1], tokens=Tokens(4), samples=1)], [digest(b"payload")])
LEGACY = Legacy(stretches=(Stretch(branch=BranchId("2" * 64), start=BASE.round, stop=Round(6)),), tokens=Tokens(4))
PROOF = LegacyProof(
    certificate=Certificate(
        attempt=Attempt(0), manifest=open_branch(BASE, ORDER, ORDER[1], BASE.branch), votes=(), farewells=()
    ),
    charter=BASE.charter,
)


@pytest.mark.parametrize(
    "options", [{}, {"group": GROUP}, {"legacy": LEGACY, "proof": PROOF}], ids=["own work", "group", "legacy"]
)
def test_the_leader_of_a_later_attempt_hears_all_that_was_announced(options: dict[str, Any]) -> None:
    """Of less it would count a group's mean, or what a branch had counted, as the work of who brings it."""
    parts = contribution(BASE, 1, 0).parts
    state, outputs = round.step(
        round.begin(ORDER[1], BASE), Trained(ready=Ready(tokens=Tokens(4), parts=parts, **options))
    )
    (said,) = [each.message for each in outputs if isinstance(each, Broadcast)]
    assert said == Ready(tokens=Tokens(4), parts=parts, **options)
    _, outputs = round.step(state, Received(sender=ORDER[2], message=Prepare(attempt=Attempt(2))))
    assert [each.message for each in outputs if isinstance(each, Send)] == [
        said,
        Promise(attempt=Attempt(2), accepted=None),
    ]


def test_nobody_waits_for_who_is_paused() -> None:
    state = round.begin(ORDER[0], BASE)
    (paused,) = [peer for peer in BASE.electorate if peer == ORDER[3]]
    for number, peer in enumerate(BASE.electorate):
        if peer == ORDER[0]:
            parts = contribution(BASE, number, 0).parts
            state = round.step(state, Trained(ready=Ready(tokens=Tokens(4), parts=parts)))[0]
        elif peer != paused:
            state = hear(state, peer, ready_of(number))
    assert state.plan is None
    state = hear(state, paused, Pass())
    assert state.plan is not None
    assert {each.peer for each in state.plan.contributions} == set(BASE.electorate) - {paused}
    assert paused not in state.plan.owners


def test_a_paused_leader_plans_for_the_others_and_says_so_once() -> None:
    state, outputs = round.step(round.begin(ORDER[0], BASE), Paused())
    assert outputs == (Broadcast(message=Pass()),)
    assert round.step(state, Paused()) == (state, ())
    for number, peer in enumerate(BASE.electorate):
        if peer != ORDER[0]:
            state = hear(state, peer, ready_of(number))
    assert state.plan is not None
    assert len(state.plan.contributions) == 3


def test_what_a_paused_member_announces_in_time_counts() -> None:
    state = hear(round.begin(ORDER[0], BASE), ORDER[1], Pass())
    for number, peer in enumerate(BASE.electorate):
        parts = contribution(BASE, number, 0).parts
        if peer == ORDER[0]:
            last = Trained(ready=Ready(tokens=Tokens(4), parts=parts))
        else:
            state = hear(state, peer, ready_of(number))
    state = round.step(state, last)[0]
    assert state.plan is not None
    assert len(state.plan.contributions) == 4
    # Who has announced something passes no more.
    assert round.step(state, Paused()) == (state, ())


def test_a_leader_gives_an_attempt_up_when_it_can_no_longer_succeed() -> None:
    state = planned()
    once = hear(state, ORDER[1], Refuse(attempt=Attempt(0), promised=Attempt(9)))
    assert once.attempt == 0
    assert hear(once, ORDER[1], Refuse(attempt=Attempt(0), promised=Attempt(7))).attempt == 0
    assert hear(once, ORDER[2], Refuse(attempt=Attempt(0), promised=Attempt(5))).attempt == 5


@pytest.mark.parametrize("me", ORDER[1:])
def test_a_refusal_means_nothing_to_who_does_not_lead(me: PeerId) -> None:
    state = round.begin(me, BASE)
    for sender in set(ORDER) - {me}:
        state = hear(state, sender, Refuse(attempt=Attempt(0), promised=Attempt(5)))
    assert state.attempt == 0


def test_a_refusal_of_another_attempt_means_nothing() -> None:
    state = planned()
    for sender in ORDER[1:]:
        state = hear(state, sender, Refuse(attempt=Attempt(4), promised=Attempt(5)))
    assert state.attempt == 0


@pytest.mark.parametrize("kind", [Prepare, Collect, Propose])
def test_nobody_is_followed_to_an_attempt_out_of_all_measure(kind: type[AnyRoundMessage]) -> None:
    plan, manifest = planned().plan, manifest_of(planned())
    assert plan is not None
    state = round.begin(ORDER[1], BASE)
    for attempt in (round.MAX_ATTEMPTS_AHEAD - round.MAX_ATTEMPTS_AHEAD % 4, MAX_COUNT - MAX_COUNT % 4):
        far = Attempt(attempt + (4 if attempt < MAX_COUNT - 4 else 0))
        message = {
            Prepare: Prepare(attempt=far),
            Collect: msgspec.structs.replace(plan, attempt=far),
            Propose: Propose(attempt=far, manifest=manifest),
        }[kind]  # type: ignore[index]
        assert leader(BASE, far) == ORDER[0]
        assert hear(state, ORDER[0], message) == state
    near = Attempt(round.MAX_ATTEMPTS_AHEAD - round.MAX_ATTEMPTS_AHEAD % 4)
    assert hear(state, ORDER[0], Prepare(attempt=near)).durable.promised == near


@pytest.mark.parametrize("is_goodbye", [True, False])
def test_what_nobody_could_have_accepted_is_not_proposed_again(is_goodbye: bool) -> None:
    manifest = manifest_of(planned())
    state = round.begin(ORDER[1], BASE)
    state = round.step(state, Noticed(peer=ORDER[0], status="suspected"))[0]
    assert state.attempt == 1
    impossible = [
        Vote(attempt=Attempt(0), manifest=msgspec.structs.replace(manifest, committed_tokens=Tokens(1 << 40))),
        Vote(attempt=Attempt(2), manifest=manifest),
    ]
    for vote in impossible:
        if is_goodbye:
            heard = hear(state, ORDER[2], Goodbye(promised=Attempt(1), accepted=vote))
            assert heard.farewells == {}
        else:
            heard = hear(state, ORDER[2], Promise(attempt=Attempt(1), accepted=vote))
            assert ORDER[2] not in heard.promises
    possible = Vote(attempt=Attempt(0), manifest=manifest)
    assert ORDER[2] in hear(state, ORDER[2], Promise(attempt=Attempt(1), accepted=possible)).promises


def test_a_leader_proposes_only_what_it_holds() -> None:
    base = first_base(4)
    state = planned()
    plan = state.plan
    assert plan is not None
    owner, result = plan.owners[0], digest(b"merged")
    if owner == state.me:  # another revision gives the part to another
        plan = new_plan(msgspec.structs.replace(state, revision=1), set(base.electorate), frozenset())
        state = msgspec.structs.replace(state, plan=plan)
        owner = plan.owners[0]
    state = hear(state, owner, Merged(attempt=plan.attempt, revision=plan.revision, part=0, result=result))
    holding = Holding(attempt=plan.attempt, revision=plan.revision, results=(result,))
    for peer in ORDER[1:]:
        state = hear(state, peer, holding)
    assert state.proposal is None
    assert hear(state, state.me, holding).proposal is not None


def test_an_owner_names_its_plan_and_the_round_before_where_parts_are_audited() -> None:
    state = planned()
    charter = msgspec.structs.replace(state.base.charter, audits=AuditTerms(rate=0.1, trace_every=1))
    base = msgspec.structs.replace(state.base, charter=charter)
    state = msgspec.structs.replace(state, durable=msgspec.structs.replace(state.durable, base=base))
    plan = state.plan
    assert plan is not None
    mine = plan.owners.index(state.me)
    _, outputs = publish(state, MergeDone(plan=plan, part=mine, result=digest(b"merged")))
    (said,) = [each.message for each in outputs if isinstance(each, Broadcast) and isinstance(each.message, Merged)]
    assert (said.plan, said.head) == (digest_of(plan), state.base.previous)
    plan = msgspec.structs.replace(plan, owners=(ORDER[1],))
    state = msgspec.structs.replace(state, plan=plan)
    of_other = msgspec.structs.replace(said, plan=digest_of(plan))
    for other in ({"head": digest(b"another")}, {"plan": digest(b"another")}, {"head": msgspec.UNSET}):
        assert not hear(state, ORDER[1], msgspec.structs.replace(of_other, **other)).results
    assert hear(state, ORDER[1], of_other).results == {0: of_other.result}


def test_nobody_waits_for_a_newcomer_in_its_first_round() -> None:
    leading, newcomer = ORDER[0], ORDER[3]

    def planned_of(newcomers: tuple[PeerId, ...], speakers: list[PeerId]) -> set[PeerId]:
        base = msgspec.structs.replace(BASE, newcomers=newcomers)
        state = round.begin(leading, base)
        for peer in speakers:
            state = hear(state, peer, Ready(tokens=Tokens(4), parts=(digest(peer.encode()),)))
        plan = round.step(state, Trained(ready=Ready(tokens=Tokens(4), parts=(digest(b"mine"),))))[0].plan
        return set() if plan is None else {each.peer for each in plan.contributions}

    assert planned_of((), ORDER[1:3]) == set()
    assert planned_of((newcomer,), ORDER[1:3]) == set(ORDER) - {newcomer}
    assert planned_of((newcomer,), ORDER[1:]) == set(ORDER)


def test_newcomers_lead_after_all_others() -> None:
    base = msgspec.structs.replace(BASE, newcomers=tuple(sorted(ORDER[:2])))
    assert [leader(base, Attempt(turn)) for turn in range(5)] == [*ORDER[2:], *ORDER[:2], ORDER[2]]


def test_an_electorate_grows_no_larger_than_membership() -> None:
    state = planned()
    joiners = frozenset(PeerId(f"{number:064x}") for number in range(100))
    manifest = manifest_of(msgspec.structs.replace(state, joiners=joiners))
    assert len(manifest.members) == MAX_MEMBERS
    assert is_successor(BASE, manifest)
    one_more = manifest_of(msgspec.structs.replace(state, joiners=frozenset(manifest.joined)))
    assert one_more.members == manifest.members
    members = tuple(sorted((*manifest.members, PeerId("ff" * 32))))
    joined = tuple(sorted((*manifest.joined, PeerId("ff" * 32))))
    leased, cursor = leases(BASE.cursor, dict.fromkeys(members, BASE.quota))
    uplinks = (*manifest.uplinks, 0)
    too_many = msgspec.structs.replace(
        manifest, members=members, joined=joined, uplinks=uplinks, leases=leased, cursor=cursor
    )
    assert not is_successor(BASE, too_many)


@pytest.mark.parametrize(
    "message",
    [
        Refuse(attempt=Attempt(0), promised=Attempt(MAX_COUNT + 1)),
        Prepare(attempt=Attempt(-1)),
        Ready(tokens=Tokens(-1), parts=()),
        Ready(tokens=Tokens((1 << 63) - 1), parts=()),
        Ready(tokens=Tokens(1), parts=(digest(b""),) * (MAX_MEMBERS + 1)),
        Ready(tokens=Tokens(1), parts=("no digest",)),  # type: ignore[arg-type]
        Merged(attempt=Attempt(0), revision=0, part=MAX_MEMBERS, result=digest(b"")),
        Merged(attempt=Attempt(0), revision=-1, part=0, result=digest(b"")),
    ],
    ids=str,
)
def test_what_is_out_of_bounds_is_not_read(message: AnyRoundMessage) -> None:
    note = RoundNote(branch=BASE.branch, round=BASE.round, message=message)
    with pytest.raises(WireError):
        decode(encode(note), RoundNote)
