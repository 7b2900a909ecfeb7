"""Rounds by number on disk, what others tell of those before, and proofs of a long run."""

from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from unit.peer.snapshots import manifest
from weft.errors import DataError
from weft.ids import Attempt, BranchId, PeerId, Round, RunId, Tokens
from weft.keys import Identity
from weft.ledger.header import HEADER_NBYTES
from weft.ledger.tree import Tree
from weft.store.proving import prove
from weft.store.rounds import RoundsFile, is_history
from weft.sync.proof import shown
from weft.sync.records.messages import (
    Accept,
    Certificate,
    Counted,
    Entry,
    Manifest,
    PartResult,
    RoundNote,
    header_of,
    history_after,
    work_of,
)
from weft.sync.records.proof import Link
from weft.wire import digest, digest_of, encode, seal

RUN = RunId("cd" * 32)
KEYS = {each.peer: each for each in (Identity.from_seed(bytes([number]) * 32) for number in range(40))}


def link_of(manifest: Manifest, voters: tuple[PeerId, ...] = ()) -> Link:
    """Return a link that these have signed."""
    accept = Accept(attempt=manifest.attempt, manifest=digest_of(manifest))
    note = RoundNote(branch=manifest.branch, round=manifest.round, message=accept)
    votes = tuple(seal(KEYS[peer], note) for peer in sorted(voters))
    return Link(certificate=Certificate(attempt=manifest.attempt, manifest=manifest, votes=votes, farewells=()))


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
    )
    return replace(plain, entry=Entry(work=work_of(()), state=None, history=b""))


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
        entry=Entry(work=work_of(counted), state=digest(b"state"), history=history_after(before, before.entry)),
    )


def chain(num: int, members: tuple[PeerId, ...]) -> list[Manifest]:
    found = [opened(members)]
    while len(found) < num:
        found.append(following(found[-1]))
    return found


def header(manifest: Manifest) -> bytes:
    assert manifest.entry is not UNSET
    return header_of(manifest, manifest.entry).pack()


MEMBERS = tuple(sorted(KEYS))[:3]


def kept(path: Path, manifests: list[Manifest]) -> RoundsFile:
    file = RoundsFile(path)
    for each in manifests:
        file.put(each, link_of(each, each.members if each.round else ()))
    return file


def test_a_round_is_found_by_its_number_and_only_links_that_are_needed_stay(tmp_path: Path) -> None:
    rounds = chain(6, MEMBERS)
    rounds.append(following(rounds[-1], left=MEMBERS[2:]))
    rounds.append(following(rounds[-1]))
    rounds.append(following(rounds[-1]))
    file = kept(tmp_path / "rounds.db", rounds)
    assert file.newest() == 8
    assert [file.manifest(number) for number in range(9)] == rounds
    assert list(file.manifests()) == rounds
    assert [each.certificate.manifest.round for each in file.links()] == [0, 6, 8]
    assert [each.certificate.manifest.round for each in file.links(after=0, most=1)] == [6]
    assert file.headers(2, 3) == b"".join(map(header, rounds[2:5]))
    assert file.manifest(9) is None
    assert is_history(rounds[-1], file.tree())


def test_another_branch_takes_the_place_of_what_stood_there(tmp_path: Path) -> None:
    rounds = chain(6, MEMBERS)
    file = kept(tmp_path / "rounds.db", rounds)
    other = following(rounds[2], num_counted=1)
    file.put(other, link_of(other, MEMBERS))
    assert file.newest() == 3
    assert file.manifest(3) == other
    assert is_history(other, file.tree())
    file.put(other, None)  # again, by a process that does not know its votes
    assert file.links()[-1].certificate.manifest == other


def test_what_others_tell_of_earlier_rounds_has_to_be_what_the_head_names(tmp_path: Path) -> None:
    rounds = chain(8, MEMBERS)
    told = b"".join(map(header, rounds[:6]))
    file = RoundsFile(tmp_path / "rounds.db")
    file.put(rounds[6], None)
    wrong = told[:HEADER_NBYTES] + header(following(rounds[0], num_counted=1)) + told[2 * HEADER_NBYTES :]
    for each in (wrong, told[:-HEADER_NBYTES], told[HEADER_NBYTES:], b""):
        assert not file.fill(each, (), rounds[6])
    assert len(file.tree()) == 0
    assert file.fill(told, (link_of(rounds[0]),), rounds[6])
    file.put(rounds[7], link_of(rounds[7], MEMBERS))
    assert file.tree().root() == Tree(map(header, rounds)).root()
    assert [each.certificate.manifest.round for each in file.links()] == [0, 7]
    assert file.manifest(3) is None


def test_headers_of_a_branch_that_was_left_are_replaced(tmp_path: Path) -> None:
    rounds = chain(8, MEMBERS)
    own = [*rounds[:3], following(rounds[2], num_counted=1)]
    file = kept(tmp_path / "rounds.db", own)
    file.put(rounds[6], None)
    assert not is_history(rounds[6], file.tree())
    assert file.fill(b"".join(map(header, rounds[:6])), (), rounds[6])
    assert is_history(rounds[6], file.tree())
    assert file.manifest(2) == rounds[2]
    assert file.manifest(3) is None


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


@pytest.mark.full
def test_a_round_of_long_ago_is_proved_in_few_bytes(tmp_path: Path) -> None:
    """10,000 rounds of 32 members, of whom one goes and another comes each hundred rounds."""
    peers = tuple(sorted(KEYS))
    members, waiting = peers[:32], list(peers[32:])
    last = opened(members)
    file = RoundsFile(tmp_path / "rounds.db")
    file.put(last, link_of(last))
    headers, links, links_nbytes = [header(last)], [link_of(last)], 0
    early = None
    for number in range(1, 10_001):
        change = number % 100 == 0
        goes, comes = (last.members[number // 100 % 32], waiting.pop(0)) if change else (None, None)
        before = last
        last = following(
            last, (comes,) if comes else (), (goes,) if goes else (), num_counted=32 if number == 17 else 1
        )
        waiting += [goes] if goes else []
        headers.append(header(last))
        if number == 17:
            early = last
        if change:
            links.append(link_of(last, before.members))
            links_nbytes += len(encode(links[-1]))
    assert early is not None
    file.put(early, None)
    file.put(last, link_of(last, last.members))
    assert file.fill(b"".join(headers[:-1]), tuple(links[:-1]), last)
    assert len(b"".join(headers)) <= 2.1e6
    proof = prove(file, RUN, Round(17), early.contributions[5].peer)
    found = shown(proof)
    assert (found.round, found.peer) == (17, early.contributions[5].peer)
    assert len(encode(proof)) <= 3e6
    assert len(proof.links) == 1  # the first in whose history it is
    newest = prove(file, RUN, Round(10_000), last.contributions[0].peer)
    assert len(newest.links) == 100
    assert len(encode(newest)) <= 3e6
    assert shown(newest).members == last.members
