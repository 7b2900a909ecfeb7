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
from weft.events import RoundCommitted, StateContradicted, StateJoined, StatesDiffer
from weft.ids import Digest, Round
from weft.ledger.header import HEADER_NBYTES, unpack
from weft.ledger.tree import Tree, root_of_tops
from weft.peer.audit import auditor, looking, merges, worker
from weft.run.trust import AuditedTrust, RecordedTrust
from weft.store.proving import prove
from weft.store.rounds import RoundsFile
from weft.sync.governance import votes_of
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, MethodConfig, StreamingConfig
from weft.sync.proof import shown
from weft.sync.records.messages import Accept, Entry, Manifest, RoundNote, header_of, work_of
from weft.sync.records.proof import Milestone, WorkProof
from weft.verify import passages
from weft.verify.draw import drawn
from weft.wire import Signed, decode, digest_of, encode, seal

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
    past = Tree([header_of(opening(swarm), entry(opening(swarm))).pack()])
    for manifest in manifests:
        named = entry(manifest)
        assert named.work == work_of(manifest.contributions)
        assert root_of_tops(manifest.round, named.past) == past.root()
        header = header_of(manifest, named)
        assert len(header.pack()) == HEADER_NBYTES
        assert unpack(header.pack()) == header
        past.append(header.pack())
    chain = swarm.member("a").peer.rounds.chain  # type: ignore[union-attr]
    named_in = 0
    for manifest in manifests:
        certificate = chain.certificate(manifest)
        if certificate is not None and manifest.previous in swarm.states:
            names = {vote.state for vote in votes_of(certificate, manifest.members).values()}
            assert names == {swarm.states[manifest.previous]}
            named_in += 1
    assert named_in >= len(manifests) - 2


def opening(swarm: Swarm) -> Manifest:
    return swarm.heads[swarm.run_config.run, Round(0)]  # type: ignore[index]


def test_runs_that_record_nothing_name_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=2, num_peers=2)

    async def scenario() -> None:
        await swarm.done(*await swarm.start("ab"))

    swarm.run(scenario)
    assert {manifest.entry for manifest in swarm.chains.values()} == {UNSET}


@pytest.mark.parametrize(
    ("run", "makes"),
    [({}, set()), ({"trust": RECORDED}, {"tree"}), ({"trust": AuditedTrust(audit_rate=1.0)}, {"tree", "draw"})],
    ids=["members", "recorded", "audited"],
)
def test_runs_whose_members_believe_each_other_make_no_tree_and_draw_nobody(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, run: dict[str, Any], makes: set[str]
) -> None:
    made, begin, draw = set[str](), Tree.__init__, drawn

    def noted(*given: Any) -> None:
        made.add("tree")
        begin(*given)

    def drawn_too(*given: Any) -> int | None:
        made.add("draw")
        return draw(*given)

    monkeypatch.setattr(Tree, "__init__", noted)
    for module in (auditor, looking, merges, worker, passages):
        monkeypatch.setattr(module, "drawn", drawn_too)
    swarm = make_swarm(method=METHODS[0], num_rounds=3, num_peers=3, learns="draw" in makes, **run)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abc")))

    swarm.run(scenario)
    assert made == makes


def misnamed(member: Member, name: str = "ab" * 32) -> None:
    """Let a member vote as if its state were another."""
    rounds = member.peer.rounds
    assert rounds is not None
    name_state = rounds.name_state
    rounds.name_state = lambda previous, _name: name_state(previous, Digest(name))  # type: ignore[method-assign]


def test_one_that_lies_about_its_state_is_named_and_stops_nobody(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=16)

    async def scenario() -> None:
        *honest, liar = await swarm.start("abcd")
        await swarm.round(liar, 1)
        misnamed(liar)
        one_replica(await swarm.done(*honest, liar))
        told = {each.members for member in honest for each in member.life.seen(StatesDiffer)}
        assert told == {(liar.id,)}
        assert not any(list(member.life.seen(StateContradicted)) for member in honest)

    swarm.run(scenario)
    swarm.check()


def test_two_of_four_that_lie_about_their_state_replace_nobodys(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=16)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[3], 1)
        for liar in members[2:]:
            misnamed(liar)
        one_replica(await swarm.done(*members))
        assert not any(list(member.life.seen(StateContradicted)) for member in members[:2])

    swarm.run(scenario)
    swarm.check()


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


@pytest.mark.slow
def test_more_newcomers_than_members_that_are_given_a_false_state_replace_nobodys(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=80)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 2)
        for member in members:
            lies_about_its_state(member)
        late = [swarm.member(name) for name in "defg"]
        for member in late:
            swarm.launch(member)
        for member in late:
            await swarm.when(member, StateContradicted)
        for member in members:
            tells_the_truth(member)
        one_replica(await swarm.done(*members, *late))
        assert not any(list(member.life.seen(StateContradicted)) for member in members)

    swarm.run(scenario)


@pytest.mark.full
def test_who_gave_a_false_state_is_asked_no_more_where_another_has_one(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=16)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 2)
        for liar in members[1:]:  # two of three donors, so that theirs is what most offer
            lies_about_its_state(liar)
        late = swarm.member("d")
        swarm.launch(late)
        told = await swarm.when(late, StateContradicted)
        assert set(told.donors) == {member.id for member in members[1:]}
        one_replica(await swarm.done(*members, late))
        *_, last = late.life.seen(StateJoined)
        assert last.donors == (members[0].id,)
        assert len(list(late.life.seen(StateContradicted))) == 1

    swarm.run(scenario)
    swarm.check()


def test_a_newcomer_finds_that_all_have_given_it_a_false_state(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=14)

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
    swarm = make_swarm(trust=RECORDED, num_rounds=12)

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


@pytest.mark.slow
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
    a, late, run = swarm.member("a"), swarm.member("e"), swarm.run_config.run
    for member in (a, late):
        file = file_of(member)
        newest = file.manifest(file.newest() or 0)
        assert newest is not None
        assert file.is_whole(run, newest)
    chain = swarm.chains.values()
    places = [(manifest, each) for manifest in chain for each in manifest.contributions if each.peer == late.id]
    for manifest, brought in (places[0], places[len(places) // 2], places[-1]):
        proof = prove(file_of(late), run, manifest.round, late.id)
        found = shown(decode(encode(proof), WorkProof))
        assert (found.round, found.payload) == (manifest.round, brought.payload)
        assert found.tokens == {late.id: brought.tokens}
        assert found.founder == a.id
        assert found.by_few == {}
        assert found.last >= found.round
        assert proof.group is None
    early = prove(file_of(a), run, Round(2), a.id)
    assert shown(early).tokens.keys() == {a.id}
    assert len(early.milestones) <= 3  # the newest, and who came or went before it


@pytest.mark.full
def test_who_was_away_for_long_has_all_rounds_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=28)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        away = members[2]
        await swarm.round(away, 3)
        swarm.kill(away)
        await swarm.round(members[0], 20)
        swarm.launch(away)
        await swarm.done(*members)

    swarm.run(scenario)
    file = file_of(swarm.member("c"))
    newest = file.manifest(file.newest() or 0)
    assert newest is not None
    assert file.is_whole(swarm.run_config.run, newest)
    assert file.manifest(10) is None  # its header alone


def test_no_proof_shows_what_was_not_counted(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=30, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        late = swarm.member("d")
        swarm.launch(late)
        await swarm.done(*members, late)

    swarm.run(scenario)
    a, b, run = swarm.member("a"), swarm.member("b"), swarm.run_config.run
    newest = max(manifest.round for manifest in swarm.chains.values())
    rounds = [Round(number) for number in range(newest - 1, 0, -1) if counts(file_of(a), number, a)]
    proof = next(each for each in (prove(file_of(a), run, number, a.id) for number in rounds) if each.place is not None)
    assert not refused(proof)
    last, counted = proof.milestones[-1], proof.counted
    certificate, place = last.certificate, proof.place
    assert place is not None
    assert len(proof.milestones) > 1
    claims = replace(entry(certificate.manifest), past=b"\0" * len(entry(certificate.manifest).past))
    lie = replace(certificate.manifest, entry=claims)
    made_up = replace(counted, tokens=999, group=None)
    made_past = b"\0" * 32 * (newest + 1).bit_count()
    made_entry = replace(entry(certificate.manifest), work=work_of((made_up,)), past=made_past)
    branch = replace(
        certificate.manifest, round=Round(newest + 1), parts=(), contributions=(), joined=(), left=(), entry=made_entry
    )

    def with_last(manifest: Manifest, votes: tuple[Signed, ...]) -> WorkProof:
        forged = replace(certificate, manifest=manifest, votes=votes)
        return replace(proof, milestones=(*proof.milestones[:-1], Milestone(certificate=forged)))

    note = RoundNote(
        branch=lie.branch, round=lie.round, message=Accept(attempt=certificate.attempt, manifest=digest_of(lie))
    )
    false: dict[str, WorkProof] = {
        "more tokens": replace(proof, counted=replace(counted, tokens=counted.tokens + 1)),
        "another peer": replace(proof, counted=replace(counted, peer=b.id)),
        "another run": replace(proof, run="ab" * 32),
        "another founder": replace(proof, opening=seal(b.identity, opening(swarm))),
        "a milestone left out": replace(proof, milestones=proof.milestones[-1:]),
        "no votes": with_last(certificate.manifest, ()),
        "votes for another": with_last(lie, certificate.votes),
        "one liar's vote": with_last(lie, (seal(b.identity, note),)),
        "a branch that nobody signs": replace(
            proof,
            milestones=(*proof.milestones, Milestone(certificate=replace(certificate, manifest=branch, votes=()))),
            header=header_of(branch, made_entry).pack(),
            place=None,
            counted=made_up,
            work=Tree([encode(made_up)]).path(0),
        ),
        "another round": replace(proof, place=replace(place, index=place.index + 1)),
        "the last round": replace(proof, place=None),
        "another header": replace(proof, header=file_of(a).headers(3, 1)),
        "another place": replace(proof, work=replace(proof.work, index=proof.work.index + 1)),
    }
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
    a, run = swarm.member("a"), swarm.run_config.run
    last = max(swarm.chains.values(), key=lambda each: each.round)
    found = shown(prove(file_of(a), run, last.round, a.id))
    assert list(found.by_few.values())[-1] == (a.id,)
    assert found.members == (a.id,)
    before = shown(prove(file_of(a), run, Round(2), a.id))  # what was decided before rests on all
    assert before.by_few == {}
    assert len(before.members) == 4


def test_the_work_of_a_group_is_shown_with_the_list_of_its_peers(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(trust=RECORDED, num_rounds=12, num_peers=5, electors=3, has_even_leases=False)

    async def scenario() -> None:
        await swarm.done(*await swarm.start("abcde"))

    swarm.run(scenario)
    a, run = swarm.member("a"), swarm.run_config.run
    groups = [
        (manifest, each, swarm.records[Digest(each.group.record)])
        for manifest in swarm.chains.values()
        for each in manifest.contributions
        if each.group is not None and each.group.num_counted
    ]
    manifest, counted, record = groups[-1]
    leaf = next(stake.peer for stake in record.stakes if stake.tokens and stake.peer != counted.peer)
    proof = prove(file_of(a), run, manifest.round, leaf)
    assert shown(proof).tokens == {stake.peer: stake.tokens for stake in record.stakes if stake.tokens}
    assert shown(proof).brought_by == counted.peer
    assert refused(replace(proof, group=None))
    assert refused(replace(proof, group=replace(record, tokens=tuple(each + 1 for each in record.tokens))))
