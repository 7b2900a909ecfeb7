"""Runs whose rounds name the state that they began with, and all rounds before them."""

from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from scenarios.swarm import Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Int8Config
from weft.errors import WireError
from weft.events import RoundCommitted, StateContradicted, StateJoined
from weft.ids import Digest, Round
from weft.ledger.header import HEADER_NBYTES, unpack
from weft.ledger.tree import Tree, root_of_tops
from weft.run.trust import RecordedTrust
from weft.store.proving import prove
from weft.store.rounds import RoundsFile, is_history
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, MethodConfig, StreamingConfig
from weft.sync.proof import shown
from weft.sync.records.messages import Entry, Manifest, Propose, header_of, work_of
from weft.sync.records.proof import WorkProof
from weft.wire import decode, digest_of, encode

RECORDED = RecordedTrust()
METHODS: tuple[MethodConfig, ...] = (
    DiLoCoConfig(every=2, codec=Int8Config()),
    DdpConfig(),
    StreamingConfig(every=2, fragments=2, overlap=1),
)


def entry(manifest: Manifest) -> Entry:
    assert manifest.entry is not UNSET
    return manifest.entry


def flip(vector: torch.Tensor) -> None:
    """Flip the lowest bit of the first number."""
    vector[:1].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize("method", METHODS, ids=lambda each: type(each).__name__)
def test_each_round_names_the_state_before_it_and_all_rounds_before(
    make_swarm: MakeSwarm, method: MethodConfig
) -> None:
    swarm = make_swarm(method=method, trust=RECORDED, num_rounds=6, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    manifests = [manifest for _, manifest in sorted(swarm.chains.items())]
    assert len(manifests) >= 6
    history = Tree([header_of(opening(swarm), entry(opening(swarm))).pack()])
    known = 0
    for manifest in manifests:
        named = entry(manifest)
        if manifest.previous in swarm.states:
            assert named.state == swarm.states[manifest.previous]
            known += 1
        assert named.work == work_of(manifest.contributions)
        assert root_of_tops(manifest.round, named.history) == history.root()
        header = header_of(manifest, named)
        assert len(header.pack()) == HEADER_NBYTES
        assert unpack(header.pack()) == header
        history.append(header.pack())
    assert known == len(manifests) - 1  # the first follows on what the run began with


def opening(swarm: Swarm) -> Manifest:
    return swarm.heads[swarm.run_config.run, Round(0)]  # type: ignore[index]


def test_runs_that_record_nothing_name_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=2, num_peers=2)

    async def scenario() -> None:
        await swarm.done(*await swarm.start("ab"))

    swarm.run(scenario)
    assert {manifest.entry for manifest in swarm.chains.values()} == {UNSET}


def test_nobody_votes_for_another_state_than_its_own(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=16)
    lies: set[Digest] = set()

    async def scenario() -> None:
        *honest, liar = await swarm.start("abcd")
        await swarm.round(liar, 1)
        rounds = liar.peer.rounds
        assert rounds is not None
        send = rounds._send

        def lie(to: Any, message: Any) -> None:
            if isinstance(message, Propose):
                false = replace(entry(message.manifest), state=Digest("ab" * 32))
                manifest = replace(message.manifest, entry=false)
                lies.add(digest_of(manifest))
                message = Propose(attempt=message.attempt, manifest=manifest)
            send(to, message)

        rounds._send = lie  # type: ignore[method-assign]
        one_replica(await swarm.done(*honest))

    swarm.run(scenario)
    assert lies
    assert not lies & {digest_of(manifest) for manifest in swarm.chains.values()}


def lies_about_its_state(member: Member) -> None:
    """Let what the member gives to newcomers be wrong in one bit, and named accordingly."""
    pin = member.peer.pin.__self__  # type: ignore[attr-defined]
    copy = pin._copy

    def false() -> Any:
        head, charter, vectors = copy()
        flip(next(iter(vectors.values())))
        return head, charter, vectors

    pin._copy = false


def tells_the_truth(member: Member) -> None:
    server = member.peer.pin.__self__  # type: ignore[attr-defined]
    del server._copy
    server._pins.clear()


def test_a_newcomer_finds_that_all_have_given_it_a_false_state(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=40)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 2)
        for member in members:
            lies_about_its_state(member)
        late = swarm.member("d")
        swarm.launch(late)
        told = await swarm.when(late, StateContradicted)
        assert set(told.donors) <= {member.id for member in members}
        assert told.donors
        for member in members:
            tells_the_truth(member)
        one_replica(await swarm.done(*members, late))
        assert len(list(late.life.seen(StateJoined))) >= 2
        assert any(late.id in {each.peer for each in manifest.contributions} for manifest in swarm.chains.values())

    swarm.run(scenario)
    swarm.check()


def test_a_member_finds_that_its_own_state_has_changed(make_swarm: MakeSwarm) -> None:
    """As memory does that fails: the first who notices is the member itself."""
    swarm = make_swarm(trust=RECORDED, num_rounds=20)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        broken = members[2]
        await swarm.round(broken, 3)
        replica = broken.peer.replica
        make_step = replica.make_step

        def badly(*args: Any) -> None:
            make_step(*args)
            flip(replica.outer)
            replica.make_step = make_step  # type: ignore[method-assign]

        replica.make_step = badly  # type: ignore[method-assign]
        swarm._check_replica = lambda life, event: None  # type: ignore[method-assign]
        told = await swarm.when(broken, StateContradicted)
        assert told.donors == ()
        outcomes = await swarm.done(*members)
        one_replica(outcomes)
        assert max(event.round for event in broken.life.seen(RoundCommitted)) > told.round

    swarm.run(scenario)


# --- what can be shown afterwards ---


def file_of(member: Member) -> RoundsFile:
    return RoundsFile(member.folder.rounds)


def counts(file: RoundsFile, round: int, member: Member) -> bool:
    manifest = file.manifest(round)
    return manifest is not None and member.id in {each.peer for each in manifest.contributions}


def refused(proof: WorkProof) -> bool:
    try:
        shown(proof)
    except WireError:
        return True
    return False


def test_who_came_late_can_prove_what_was_counted_of_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=100)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 3)
        late = swarm.member("e")
        swarm.launch(late)
        await swarm.round(late, 8)
        swarm.kill(members[1])
        await swarm.done(members[0], *members[2:], late)

    swarm.run(scenario)
    a, late = swarm.member("a"), swarm.member("e")
    for member in (a, late):
        file = file_of(member)
        newest = file.manifest(file.newest() or 0)
        assert newest is not None
        assert is_history(newest, file.tree())
    counted = [
        manifest for manifest in swarm.chains.values() if late.id in {each.peer for each in manifest.contributions}
    ]
    run = swarm.run_config.run
    for manifest in (counted[0], counted[len(counted) // 2], counted[-1]):
        proof = prove(file_of(late), run, manifest.round, late.id)
        found = shown(decode(encode(proof), WorkProof))
        brought = next(each for each in manifest.contributions if each.peer == late.id)
        assert (found.round, found.tokens, found.payload) == (
            manifest.round,
            {late.id: brought.tokens},
            brought.payload,
        )
        assert found.founder == a.id
        assert found.split_at == ()
        assert found.newest >= found.round
        assert proof.group is None
    early = prove(file_of(a), run, Round(2), a.id)
    assert shown(early).peer == a.id
    assert len(early.links) <= 3  # the newest, and who came or went before it


def test_no_proof_shows_what_was_not_counted(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=30, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        late = swarm.member("d")
        swarm.launch(late)
        await swarm.done(*members, late)

    swarm.run(scenario)
    a, run = swarm.member("a"), swarm.run_config.run
    newest = max(manifest.round for manifest in swarm.chains.values())
    round = next(round for round in range(newest - 1, 0, -1) if counts(file_of(a), round, a))
    proof = prove(file_of(a), run, Round(round), a.id)
    assert not refused(proof)
    last, counted = proof.links[-1], proof.counted
    certificate, place = last.certificate, proof.place
    assert place is not None
    false_manifest, few = replace(certificate.manifest, committed_tokens=1), replace(certificate, votes=())
    false: dict[str, WorkProof] = {
        "more tokens": replace(proof, counted=replace(counted, tokens=counted.tokens + 1)),
        "another peer": replace(proof, counted=replace(counted, peer=swarm.member("b").id)),
        "another run": replace(proof, run="ab" * 32),
        "another opening": replace(proof, opening=replace(proof.opening, members=(a.id,), uplinks=(16,))),
        "no links": replace(proof, links=proof.links[-1:]),
        "few votes": replace(proof, links=(*proof.links[:-1], replace(last, certificate=few))),
        "votes for another": replace(
            proof, links=(*proof.links[:-1], replace(last, certificate=replace(certificate, manifest=false_manifest)))
        ),
        "another round": replace(proof, place=replace(place, index=place.index + 1)),
        "not in the history": replace(proof, place=None),
        "another header": replace(proof, header=file_of(a).headers(3, 1)),
        "another place": replace(proof, work=replace(proof.work, index=proof.work.index + 1)),
    }
    assert len(proof.links) > 1
    assert [name for name, each in false.items() if not refused(each)] == []


def test_a_branch_that_went_on_by_its_own_word_is_told(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=30, orphan_after_s=20.0)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 3)
        for member in members[1:]:
            swarm.kill(member)
        await swarm.done(members[0])

    swarm.run(scenario)
    a = swarm.member("a")
    last = max(swarm.chains.values(), key=lambda each: each.round)
    found = shown(prove(file_of(a), swarm.run_config.run, last.round, a.id))
    assert len(found.split_at) >= 1
    assert found.members == (a.id,)
