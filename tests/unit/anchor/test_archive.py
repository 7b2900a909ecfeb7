"""What an archive holds on disk: rounds that are proven, works as they were signed, and nothing altered unseen."""

from pathlib import Path

import msgspec
import pytest

from charters import charter
from weft.anchor.archive import (
    Archive,
    Begin,
    KeptRound,
    KeptWork,
    counted_works,
    followed,
    is_sound,
    opened_work,
    stretches,
)
from weft.errors import DataError, WireError
from weft.ids import Attempt, BranchId, Digest, RunId, Tokens
from weft.keys import Identity
from weft.peer.chain import Chain, genesis, open_branch
from weft.sync.records.charter import AuditTerms
from weft.sync.records.messages import Accept, Certificate, Counted, Manifest, PartResult, RoundNote, next_base
from weft.sync.records.work import Segment, Work
from weft.wire import Signed, digest, digest_of, encode, seal

ME, OTHER = Identity.from_seed(bytes(32)), Identity.from_seed(bytes(31) + b"o")
RUN = RunId("7" * 64)
CHARTER = msgspec.structs.replace(charter(4), audits=AuditTerms(rate=0.5, trace_every=1))
FIRST = open_branch(genesis(RUN, ME.peer, CHARTER), [ME.peer], ME.peer, BranchId(RUN))
OPENED = Begin(head=FIRST, charter=CHARTER, opening=seal(ME, FIRST))


def work_for(head: Manifest, payload: Digest, signer: Identity = ME) -> Signed:
    segment = Segment(head=digest_of(head), round=head.round, holder=ME.peer, num_steps=2)
    return seal(
        signer,
        Work(
            run=RUN,
            branch=head.branch,
            round=head.round + 1,
            peer=ME.peer,
            segments=(segment,),
            follows=None,
            num_before=0,
            trace=digest(b"trace"),
            payload=payload,
            tokens=Tokens(8),
            error=None,
            left=None,
        ),
    )


def next_round(head: Manifest, archive: Archive) -> tuple[Certificate, Signed]:
    """Return a round of a run of one member, and the work that it counts."""
    result, base = archive.blobs.put(f"result {head.round}".encode()), next_base(head, CHARTER)
    work = work_for(head, result)
    manifest = msgspec.structs.replace(
        open_branch(base, [ME.peer], ME.peer, base.branch),
        contributions=(Counted(peer=ME.peer, tokens=Tokens(8), payload=result, work=digest_of(work)),),
        parts=(PartResult(owner=ME.peer, result=result),),
        committed_tokens=Tokens(base.committed_tokens + 8),
        uncounted=(),
    )
    message = Accept(attempt=Attempt(0), manifest=digest_of(manifest))
    note = RoundNote(branch=head.branch, round=manifest.round, message=message)
    return Certificate(attempt=Attempt(0), manifest=manifest, votes=(seal(ME, note),), farewells=()), work


def filled(folder: Path, num: int = 3) -> tuple[Archive, list[Signed]]:
    archive, works = Archive(folder), list[Signed]()
    archive.begin(OPENED)
    for _ in range(num):
        assert archive.head is not None
        certificate, work = next_round(archive.head, archive)
        assert archive.write(certificate)
        archive.follow(certificate)
        works.append(work)
    return archive, works


def read(folder: Path) -> list[KeptRound]:
    (stretch,) = stretches(folder)
    return list(followed(Chain(FIRST, CHARTER), stretch))


def test_an_archive_goes_on_where_an_earlier_process_stopped(tmp_path: Path) -> None:
    archive, works = filled(tmp_path)
    assert archive.stretch is not None
    archive.stretch.add(archive.chain.head.round, KeptWork(signed=works[2]))  # type: ignore[union-attr]
    again = Archive(tmp_path)
    again.load(RUN)
    assert again.head == archive.head
    assert again.stretch is not None
    lacking = again.stretch.lacking(2)
    assert [(wanted.round, kept is not None) for wanted, kept in lacking] == [(2, False), (3, True)]
    other = Archive(tmp_path)
    other.load(RunId("8" * 64))
    assert other.head is None


def test_rounds_after_a_gap_begin_another_stretch(tmp_path: Path) -> None:
    archive, _ = filled(tmp_path)
    later = Begin(head=FIRST, charter=CHARTER, index=digest(b"a state"))
    archive.begin(later)
    archive.begin(later)  # no round of it came: it is begun anew in the same place
    assert [each.numbers for each in stretches(tmp_path)] == [[1, 2, 3], []]
    assert stretches(tmp_path)[1].begin() == later


def test_what_nobody_has_signed_is_not_written(tmp_path: Path) -> None:
    archive, _ = filled(tmp_path, 1)
    assert archive.head is not None
    certificate, _ = next_round(archive.head, archive)
    assert not archive.write(msgspec.structs.replace(certificate, votes=()))
    assert [each.manifest.round for each in read(tmp_path)] == [1]


@pytest.mark.parametrize("what", ["altered", "missing", "another"])
def test_a_round_that_is_not_what_was_signed_ends_what_is_read(tmp_path: Path, what: str) -> None:
    filled(tmp_path)
    path = tmp_path / "0" / "round-2.bin"
    data = bytearray(path.read_bytes())
    if what == "missing":
        path.unlink()
    elif what == "another":
        path.write_bytes((tmp_path / "0" / "round-3.bin").read_bytes())
    else:
        data[data.index(b"committed_tokens") + 16] += 1
        path.write_bytes(data)
    with pytest.raises(DataError, match=r"round-2.bin"):
        read(tmp_path)
    again = Archive(tmp_path)
    again.load(RUN)
    assert again.head is not None
    assert again.head.round == 1


def test_a_work_is_the_one_that_a_round_counts(tmp_path: Path) -> None:
    _, works = filled(tmp_path, 1)
    (kept,) = read(tmp_path)
    (wanted,) = counted_works(kept.manifest)
    assert opened_work(works[0], wanted).payload == wanted.payload
    flipped = msgspec.structs.replace(works[0], signature=bytes(64))
    for other in (flipped, work_for(FIRST, digest(b"another")), work_for(FIRST, wanted.payload, OTHER)):
        with pytest.raises(WireError):
            opened_work(other, wanted)


def test_a_blob_that_is_altered_is_said_and_stays(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    name = archive.blobs.put(b"some bytes")
    path = tmp_path / "blobs" / name
    assert archive.blobs.read(name) == b"some bytes"
    path.chmod(0o644)
    path.write_bytes(b"some bytez")
    with pytest.raises(DataError, match="altered"):
        archive.blobs.read(name)
    assert path.exists()
    with pytest.raises(DataError, match="is not in"):
        archive.blobs.read(digest(b"other bytes"))
    with pytest.raises(DataError, match="no digest"):
        archive.blobs.read(Digest("../../etc/passwd"))


def test_who_began_the_run_has_signed_how_it_begins() -> None:
    assert is_sound(OPENED, RUN)
    state = digest(b"a state")
    assert is_sound(Begin(head=FIRST, charter=CHARTER, index=state), RUN)
    for other in (
        Begin(head=FIRST, charter=CHARTER),
        Begin(head=FIRST, charter=CHARTER, opening=seal(OTHER, FIRST)),
        Begin(head=FIRST, charter=CHARTER, opening=OPENED.opening, index=state),
        Begin(head=msgspec.structs.replace(FIRST, cursor=9), charter=CHARTER, opening=OPENED.opening),
    ):
        assert not is_sound(other, RUN)
    assert not is_sound(OPENED, RunId("8" * 64))


def test_a_beginning_with_another_charter_is_refused(tmp_path: Path) -> None:
    archive, _ = filled(tmp_path, 1)
    (stretch,) = stretches(archive.folder)
    head = msgspec.structs.replace(FIRST, charter="ab" * 32)
    (tmp_path / "0" / "begin.bin").write_bytes(encode(msgspec.structs.replace(OPENED, head=head)))
    with pytest.raises(DataError, match=r"begin.bin is altered"):
        stretches(tmp_path)[0].begin()
    assert stretch.numbers == [1]
