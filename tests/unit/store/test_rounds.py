"""Rounds by number on disk, what others tell of those before, and proofs of a long run."""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from unit.peer.snapshots import manifest
from weft.data.assign import Lease
from weft.errors import DataError, WireError
from weft.ids import Attempt, BranchId, PeerId, Round, RunId, Tokens
from weft.keys import Identity
from weft.ledger.header import HEADER_NBYTES
from weft.ledger.tree import Tree
from weft.store import rounds as module
from weft.store.proving import prove
from weft.store.rounds import RoundsFile
from weft.sync.proof import followed, shown
from weft.sync.records.messages import (
    Accept,
    Certificate,
    Counted,
    Entry,
    Manifest,
    PartResult,
    RoundNote,
    header_of,
    past_after,
    work_of,
)
from weft.sync.records.proof import Milestone
from weft.wire import Signed, digest, digest_of, encode, seal

RUN = RunId("cd" * 32)
KEYS = {each.peer: each for each in (Identity.from_seed(bytes([number]) * 32) for number in range(40))}


def milestone_of(manifest: Manifest, voters: tuple[PeerId, ...] = ()) -> Milestone:
    """Return a milestone that these have signed."""
    accept = Accept(attempt=manifest.attempt, manifest=digest_of(manifest))
    note = RoundNote(branch=manifest.branch, round=manifest.round, message=accept)
    votes = tuple(seal(KEYS[peer], note) for peer in sorted(voters))
    return Milestone(certificate=Certificate(attempt=manifest.attempt, manifest=manifest, votes=votes, farewells=()))


def opened(members: tuple[PeerId, ...]) -> Manifest:
    plain = replace(
        manifest(0),
        run=RUN,
        branch=BranchId(RUN),
        round=Round(0),
        contributions=(),
        parts=(),
        members=members,
        uplinks=(16,) * len(members),
        joined=(),
        left=(),
        leader=members[0],
    )
    return replace(plain, entry=Entry(work=work_of(()), past=b""))


def following(
    before: Manifest, joined: tuple[PeerId, ...] = (), left: tuple[PeerId, ...] = (), *, num_counted: int | None = None
) -> Manifest:
    """Return the next manifest, in which these members come and go."""
    assert before.entry is not UNSET
    members = tuple(sorted(set(before.members) - set(left) | set(joined)))
    counted = tuple(
        Counted(peer=peer, tokens=Tokens(before.round + 1), payload=digest(peer.encode()))
        for peer in before.members[:num_counted]
    )
    return replace(
        before,
        round=Round(before.round + 1),
        attempt=Attempt(0),
        previous=digest_of(before),
        contributions=counted,
        parts=tuple(PartResult(owner=peer, result=digest(b"part")) for peer in before.members),
        members=members,
        uplinks=(16,) * len(members),
        joined=joined,
        left=left,
        entry=Entry(work=work_of(counted), past=past_after(before, before.entry)),
    )


def chain(num: int, members: tuple[PeerId, ...]) -> list[Manifest]:
    found = [opened(members)]
    while len(found) < num:
        found.append(following(found[-1]))
    return found


def header(manifest: Manifest) -> bytes:
    assert manifest.entry is not UNSET
    return header_of(manifest, manifest.entry).pack()


def entry(manifest: Manifest) -> Entry:
    assert manifest.entry is not UNSET
    return manifest.entry


def signed(opening: Manifest) -> Signed:
    return seal(KEYS[opening.leader], opening)


MEMBERS = tuple(sorted(KEYS))[:3]
OPENING = signed(opened(MEMBERS))


def kept(path: Path, manifests: list[Manifest]) -> RoundsFile:
    file = RoundsFile(path)
    file.begin(signed(manifests[0]))
    file.put(manifests[0], None)
    for before, each in pairwise(manifests):
        file.put(each, milestone_of(each, before.members))
    return file


def kept_rounds(file: RoundsFile) -> list[int]:
    return [each.certificate.manifest.round for each in file.milestones()]


def test_a_round_is_found_by_its_number_and_only_milestones_stay(tmp_path: Path) -> None:
    rounds = chain(6, MEMBERS)
    rounds.append(following(rounds[-1], left=MEMBERS[2:]))
    rounds.append(following(rounds[-1]))
    rounds.append(following(rounds[-1]))
    file = kept(tmp_path / "rounds.db", rounds)
    assert file.newest() == 8
    assert file.num() == 9
    assert [file.manifest(number) for number in range(9)] == rounds
    assert list(file.manifests()) == rounds
    assert kept_rounds(file) == [6, 8]
    assert [each.certificate.manifest.round for each in file.milestones(after=0, most=1)] == [6]
    assert file.headers(2, 3) == b"".join(map(header, rounds[2:5]))
    assert file.manifest(9) is None
    assert file.is_whole(RUN, rounds[-1])


def test_another_branch_takes_the_place_of_what_stood_there(tmp_path: Path) -> None:
    rounds = chain(6, MEMBERS)
    file = kept(tmp_path / "rounds.db", rounds)
    other = following(rounds[2], num_counted=1)
    file.put(other, milestone_of(other, MEMBERS))
    assert file.newest() == 3
    assert file.manifest(3) == other
    assert file.is_whole(RUN, other)


def test_a_process_that_knows_less_takes_nothing_away(tmp_path: Path) -> None:
    rounds = chain(4, MEMBERS)
    file = kept(tmp_path / "rounds.db", rounds)
    file.put(rounds[3], None)
    assert kept_rounds(file) == [3]
    file.put(rounds[1], None)  # of an older checkpoint
    assert file.newest() == 3


def test_what_was_decided_before_a_branch_can_be_proved_still(tmp_path: Path) -> None:
    rounds = chain(4, MEMBERS)
    file = kept(tmp_path / "rounds.db", rounds)
    alone = replace(
        following(rounds[-1], left=MEMBERS[1:]), branch=BranchId("ef" * 32), contributions=(), parts=(), uplinks=(16,)
    )
    branch = replace(alone, entry=replace(entry(alone), work=work_of(())))
    file.put(branch, Milestone(certificate=milestone_of(branch).certificate))
    after = following(branch)
    file.put(after, milestone_of(after, branch.members))
    assert kept_rounds(file) == [3, 4, 5]
    assert shown(prove(file, RUN, Round(2), MEMBERS[1])).by_few == {}
    assert shown(prove(file, RUN, Round(5), MEMBERS[0])).by_few == {Round(4): MEMBERS[:1]}


def test_what_others_tell_has_to_be_what_the_head_names(tmp_path: Path) -> None:
    rounds = chain(3, MEMBERS)
    rounds.append(following(rounds[-1], left=MEMBERS[2:]))
    while len(rounds) < 8:
        rounds.append(following(rounds[-1]))
    told, true = b"".join(map(header, rounds[:6])), [milestone_of(rounds[3], MEMBERS)]
    file = RoundsFile(tmp_path / "rounds.db")
    file.put(rounds[6], None)
    wrong = told[:HEADER_NBYTES] + header(following(rounds[0], num_counted=1)) + told[2 * HEADER_NBYTES :]
    for headers in (wrong, told[:-HEADER_NBYTES], told[HEADER_NBYTES:], b""):
        assert not file.fill(RUN, OPENING, headers, true, rounds[6])
    lie = replace(rounds[3], committed_tokens=Tokens(999))
    for milestones in (
        [],  # others vote for the head than began
        [milestone_of(rounds[3], MEMBERS[:1])],  # too few votes
        [milestone_of(lie, MEMBERS)],  # not the round that the header is of
        [milestone_of(rounds[2], MEMBERS), *true],  # nobody needs it
        [*true, *true],
        [milestone_of(rounds[7], MEMBERS[:2])],  # after the head
    ):
        assert not file.fill(RUN, OPENING, told, milestones, rounds[6])
    assert not file.fill(RUN, seal(KEYS[MEMBERS[1]], rounds[0]), told, true, rounds[6])
    assert not file.fill(RUN, signed(opened(MEMBERS[:2])), told, true, rounds[6])
    assert file.num() == 1
    assert not file.is_whole(RUN, rounds[6])

    assert file.fill(RUN, OPENING, told, true, rounds[6])
    assert file.is_whole(RUN, rounds[6])
    file.put(rounds[7], milestone_of(rounds[7], MEMBERS[:2]))
    assert file.tree().root() == Tree(map(header, rounds)).root()
    assert kept_rounds(file) == [3, 7]
    assert file.manifest(3) is None
    assert shown(prove(file, RUN, Round(7), MEMBERS[0])).founder == MEMBERS[0]


def test_headers_of_a_branch_that_was_left_are_replaced(tmp_path: Path) -> None:
    rounds = chain(8, MEMBERS)
    own = [*rounds[:3], following(rounds[2], num_counted=1)]
    file = kept(tmp_path / "rounds.db", own)
    file.put(rounds[6], None)
    assert not file.is_whole(RUN, rounds[6])
    assert file.fill(RUN, OPENING, b"".join(map(header, rounds[:6])), [], rounds[6])
    assert file.is_whole(RUN, rounds[6])
    assert file.manifest(2) == rounds[2]
    assert file.manifest(3) is None


def test_nothing_is_filled_in_for_a_head_that_was_left_meanwhile(tmp_path: Path) -> None:
    rounds = chain(5, MEMBERS)
    file = RoundsFile(tmp_path / "rounds.db")
    file.put(following(rounds[3], num_counted=1), None)
    assert not file.fill(RUN, OPENING, b"".join(map(header, rounds[:4])), [], rounds[4])
    assert file.num() == 1


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rounds.db"
    path.write_bytes(b"no database at all, and long enough to be looked at" * 100)
    file = RoundsFile(path)
    with pytest.raises(DataError, match=r"rounds\.db"):
        file.newest()
    with pytest.raises(DataError, match=r"rounds\.db"):
        file.put(opened(MEMBERS), None)


@pytest.mark.parametrize(
    ("round", "peer", "why"),
    [(2, KEYS.keys() - set(MEMBERS), "counts nothing"), (9, MEMBERS, "newest is 5"), (0, MEMBERS, "counts nothing")],
)
def test_what_cannot_be_proved_is_said(tmp_path: Path, round: int, peer: set[PeerId], why: str) -> None:
    file = kept(tmp_path / "rounds.db", chain(6, MEMBERS))
    with pytest.raises(DataError, match=why):
        prove(file, RUN, Round(round), min(peer))


def test_of_a_round_of_which_the_header_alone_is_kept_only_a_proof_of_before_shows_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it costs to keep the newest rounds alone: nobody can show any more what an older one has counted."""
    monkeypatch.setattr(module, "MAX_MANIFESTS", 4)
    rounds = chain(6, MEMBERS)
    path = tmp_path / "rounds.db"
    file = kept(path, rounds)
    early = prove(file, RUN, Round(2), MEMBERS[1])
    for _ in range(4):
        rounds.append(following(rounds[-1]))
        file.put(rounds[-1], milestone_of(rounds[-1], MEMBERS))
    assert [file.manifest(number) is None for number in (4, 5, 6)] == [True, True, False]
    assert file.is_whole(RUN, rounds[-1])
    for peer in MEMBERS:
        with pytest.raises(DataError, match=r"of round 2 the header alone is here: .* rounds ago"):
            prove(file, RUN, Round(2), peer)
    assert shown(early).round == 2
    assert shown(early).tokens == {MEMBERS[1]: Tokens(2)}
    assert file.headers(2, 1) == early.header, "the header is the same, and tells nothing of who was counted"


def test_a_proof_shows_what_had_been_leased(tmp_path: Path) -> None:
    first = opened(MEMBERS)
    leases = tuple(Lease(peer=peer, start=8 * at, stop=8 * at + 8) for at, peer in enumerate(MEMBERS))
    rounds = [first, replace(following(first), leases=leases)]
    rounds += [following(rounds[-1])]
    rounds += [following(rounds[-1])]
    file = kept(tmp_path / "rounds.db", rounds)
    proof = prove(file, RUN, Round(2), MEMBERS[1])
    assert shown(proof).leases == leases[1:2]
    assert shown(replace(proof, before=None)).leases is None
    other = replace(rounds[1], leases=tuple(replace(each, stop=each.stop + 1000) for each in leases))
    with pytest.raises(WireError, match="does not follow"):
        shown(replace(proof, before=other))


def test_members_of_later_rounds_cannot_tell_another_past(tmp_path: Path) -> None:
    """All of them sign a round in which none of them was a member yet."""
    later = tuple(sorted(KEYS))[3:8]
    rounds = chain(4, MEMBERS)
    rounds.append(following(rounds[-1], joined=later))
    rounds.append(following(rounds[-1], left=MEMBERS))
    rounds.append(following(rounds[-1]))
    file = kept(tmp_path / "rounds.db", rounds)
    true = prove(file, RUN, Round(3), MEMBERS[0])
    assert set(later) < set(shown(true).members)
    forged = replace(following(rounds[2], num_counted=1), members=later, uplinks=(16,) * len(later))
    alone = replace(forged, joined=later, left=MEMBERS)
    for lie in (forged, alone):
        proof = replace(
            true,
            milestones=(milestone_of(lie, later),),
            header=header(lie),
            place=None,
            counted=lie.contributions[0],
            work=Tree(map(encode, lie.contributions)).path(0),
            before=rounds[2],
        )
        with pytest.raises(WireError, match=r"became members|not signed by a majority"):
            shown(proof)


def test_a_history_that_ends_early_is_shown_to_end_there(tmp_path: Path) -> None:
    rounds = chain(4, MEMBERS)
    early = prove(kept(tmp_path / "early.db", rounds), RUN, Round(2), MEMBERS[0])
    rounds.append(following(rounds[-1], left=MEMBERS[2:]))
    rounds.append(following(rounds[-1]))
    late = prove(kept(tmp_path / "late.db", rounds), RUN, Round(5), MEMBERS[0])
    assert (shown(early).last, shown(early).members) == (Round(3), MEMBERS)
    assert (shown(late).last, shown(late).members) == (Round(5), MEMBERS[:2])
    with pytest.raises(WireError, match="became members"):
        shown(replace(late, milestones=late.milestones[1:]))


def test_what_half_of_the_members_decided_is_by_few(tmp_path: Path) -> None:
    two = MEMBERS[:2]
    rounds = chain(5, two)
    by_one = milestone_of(rounds[2], two[:1])
    assert followed(RUN, signed(rounds[0]), [by_one]).by_few == {Round(2): two[:1]}
    assert followed(RUN, signed(rounds[0]), [milestone_of(rounds[2], two)]).by_few == {}
    file = RoundsFile(tmp_path / "rounds.db")
    file.begin(signed(rounds[0]))
    file.put(rounds[0], None)
    file.put(rounds[1], milestone_of(rounds[1], two[:1]))
    file.put(rounds[2], milestone_of(rounds[2], two))
    file.put(rounds[3], milestone_of(rounds[3], two[1:]))
    assert kept_rounds(file) == [2, 3]  # the last that a majority signed stays
    assert shown(prove(file, RUN, Round(1), two[0])).by_few == {}
    assert shown(prove(file, RUN, Round(3), two[0])).by_few == {Round(3): two[1:]}
    file.put(rounds[4], milestone_of(rounds[4], two))
    assert kept_rounds(file) == [4]
    by_third = milestone_of(chain(2, MEMBERS)[1], two[:1])
    with pytest.raises(WireError, match="majority"):
        followed(RUN, signed(opened(MEMBERS)), [by_third])


@pytest.mark.full
def test_a_round_of_long_ago_is_proved_in_few_bytes(tmp_path: Path) -> None:
    """10,000 rounds of 32 members, of whom one goes and another comes each hundred rounds."""
    peers = tuple(sorted(KEYS))
    members, waiting = peers[:32], list(peers[32:])
    last = first = opened(members)
    file = RoundsFile(tmp_path / "rounds.db")
    file.begin(signed(first))
    headers, milestones = [header(last)], list[Milestone]()
    early = last
    for number in range(1, 10_001):
        change = number % 100 == 0
        goes, comes = (last.members[number // 100 % 32], waiting.pop(0)) if change else (None, None)
        before, num_counted = last, 32 if number == 17 else 1
        last = following(last, (comes,) if comes else (), (goes,) if goes else (), num_counted=num_counted)
        waiting += [goes] if goes else []
        headers.append(header(last))
        early = last if number == 17 else early
        if change:
            milestones.append(milestone_of(last, before.members))
    file.put(early, None)
    file.put(last, milestones[-1])
    assert file.fill(RUN, signed(first), b"".join(headers[:-1]), milestones, last)
    assert len(b"".join(headers)) <= 2.1e6
    proof = prove(file, RUN, Round(17), early.contributions[5].peer)
    found = shown(proof)
    assert (found.round, found.brought_by) == (17, early.contributions[5].peer)
    assert len(encode(proof)) <= 3e6
    assert len(proof.milestones) == 1  # the first before which it is
    newest = prove(file, RUN, Round(10_000), last.contributions[0].peer)
    assert len(newest.milestones) == 100
    assert len(encode(newest)) <= 3e6
    assert shown(newest).members == last.members
