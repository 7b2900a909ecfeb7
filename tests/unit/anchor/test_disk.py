"""What an anchor keeps on its disk: whole or not at all, bounded, and read back as far as it is proven."""

from pathlib import Path

import msgspec
import pytest

from charters import charter
from unit.peer.tiny import run_config
from weft import wire
from weft.anchor.disk import Anchored
from weft.errors import DataError, GenesisMismatch
from weft.ids import Attempt, BranchId, Digest, Round, RunId, Tokens
from weft.keys import Identity
from weft.peer.chain import genesis, open_branch
from weft.run.outline import public, read_outline
from weft.store.home import Home
from weft.sync.records.index import CHUNK_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import Accept, Certificate, Counted, Manifest, PartResult, RoundNote, next_base
from weft.wire import digest, digest_of, encode, seal

ME = Identity.from_seed(bytes(32))
RUN = RunId("7" * 64)
CHARTER = charter(4)
FIRST = open_branch(genesis(RUN, ME.peer, CHARTER), [ME.peer], ME.peer, BranchId(RUN))


def certificate_after(head: Manifest, result: Digest) -> Certificate:
    """Return the next round of a run of one member, with its vote."""
    base = next_base(head, CHARTER)
    manifest = msgspec.structs.replace(
        open_branch(base, [ME.peer], ME.peer, base.branch),
        contributions=(Counted(peer=ME.peer, tokens=Tokens(8), payload=result),),
        parts=(PartResult(owner=ME.peer, result=result),),
        committed_tokens=Tokens(base.committed_tokens + 8),
        uncounted=(),
    )
    note = RoundNote(
        branch=base.branch, round=base.round, message=Accept(attempt=Attempt(0), manifest=digest_of(manifest))
    )
    return Certificate(attempt=Attempt(0), manifest=manifest, votes=(seal(ME, note),), farewells=())


def put_state(kept: Anchored, fill: int, num_chunks: int = 3) -> Digest:
    chunks = [bytes([fill if number else 0]) * CHUNK_NBYTES for number in range(num_chunks)]
    vector = VectorIndex(
        name="outer", num=num_chunks * CHUNK_NBYTES // 4, chunks=tuple(kept.put(chunk) for chunk in chunks)
    )
    return kept.put(encode(StateIndex(vectors=(vector,))))


def rounds(kept: Anchored, head: Manifest, num: int) -> list[Certificate]:
    made = []
    for number in range(num):
        certificate = certificate_after(head, kept.put(f"result {head.round} {number}".encode()))
        assert kept.append(certificate)
        made.append(certificate)
        head = certificate.manifest
    return made


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blobs").iterdir()}


def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    kept = Anchored(tmp_path)
    index = put_state(kept, 1)
    kept.replace(FIRST, CHARTER, index)
    made = rounds(kept, FIRST, 3)
    again = Anchored(tmp_path)
    again.load()
    assert again.kept == kept.kept
    assert again.chain is not None
    assert again.chain.head == made[-1].manifest
    assert again.chain.after(Round(0), 10) == tuple(made)
    assert (again.num_since, again.results_nbytes, again.state_nbytes) == (3, kept.results_nbytes, 3 * CHUNK_NBYTES)
    for name in (index, made[0].manifest.parts[0].result):
        assert again.lookup(name) is not None


def test_a_newer_state_drops_the_older_one_and_the_rounds_before_it(tmp_path: Path) -> None:
    kept = Anchored(tmp_path)
    kept.replace(FIRST, CHARTER, put_state(kept, 1))
    made = rounds(kept, FIRST, 4)
    newer = put_state(kept, 2)
    kept.replace(made[1].manifest, CHARTER, newer)
    assert kept.chain is not None
    assert kept.chain.head == made[3].manifest
    assert kept.num_since == 2
    assert sorted(path.name for path in tmp_path.glob("round-*.bin")) == ["round-3.bin", "round-4.bin"]
    assert len(names(tmp_path)) == 1 + 2 + 2  # an index, two chunks (two are equal), two results
    assert kept.lookup(made[0].manifest.parts[0].result) is None


def test_a_round_of_an_earlier_state_that_could_not_be_removed_keeps_none_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Anchored(tmp_path)
    kept.replace(FIRST, CHARTER, put_state(kept, 1))
    made = rounds(kept, FIRST, 3)
    newer = put_state(kept, 2)

    def unlink(path: Path, **_options: bool) -> None:
        raise PermissionError(f"{path} is in use")

    monkeypatch.setattr(Path, "unlink", unlink)
    kept.replace(made[0].manifest, CHARTER, newer)
    assert kept.num_since == 2
    again = Anchored(tmp_path)
    again.load()
    assert (again.num_since, again.kept) == (2, kept.kept)


def test_a_state_that_did_not_come_whole_leaves_the_one_before(tmp_path: Path) -> None:
    kept = Anchored(tmp_path)
    first = put_state(kept, 1)
    kept.replace(FIRST, CHARTER, first)
    made = rounds(kept, FIRST, 1)
    vector = VectorIndex(name="outer", num=CHUNK_NBYTES // 4, chunks=(digest(b"never came"),))
    torn = kept.put(encode(StateIndex(vectors=(vector,))))
    with pytest.raises(DataError, match="not whole"):
        kept.replace(made[0].manifest, CHARTER, torn)
    again = Anchored(tmp_path)
    again.load()
    assert again.kept is not None
    assert again.kept.index == first
    assert again.num_since == 1
    again.make_room(set())
    assert torn not in names(tmp_path)


def test_what_is_damaged_on_the_disk_is_not_served(tmp_path: Path) -> None:
    kept = Anchored(tmp_path)
    kept.replace(FIRST, CHARTER, put_state(kept, 1))
    made = rounds(kept, FIRST, 3)
    broken = tmp_path / "blobs" / made[1].manifest.parts[0].result
    broken.chmod(0o600)
    broken.write_bytes(b"another result")
    again = Anchored(tmp_path)
    again.load()
    assert again.num_since == 1  # as far as it can be followed
    (tmp_path / "state.bin").write_bytes(b"nothing")
    third = Anchored(tmp_path)
    third.load()
    assert (third.kept, third.chain) == (None, None)


def test_a_round_that_is_not_proven_is_not_followed(tmp_path: Path) -> None:
    kept = Anchored(tmp_path)
    kept.replace(FIRST, CHARTER, put_state(kept, 1))
    result = kept.put(b"result")
    true = certificate_after(FIRST, result)
    assert not kept.append(msgspec.structs.replace(true, votes=()))
    assert not kept.append(certificate_after(true.manifest, result))
    assert not kept.append(certificate_after(FIRST, digest(b"not here")))
    assert kept.append(true)
    assert not kept.append(true)


def test_only_what_is_kept_is_served(tmp_path: Path) -> None:
    kept = Anchored(tmp_path)
    stray = kept.put(b"nobody names it")
    kept.replace(FIRST, CHARTER, put_state(kept, 1))
    assert kept.lookup(stray) is None
    assert kept.lookup(Digest("0" * 64)) is None


def test_bytes_of_another_run_are_no_outline() -> None:
    with pytest.raises(GenesisMismatch):
        read_outline(b"anything", RUN)


def test_an_outline_is_what_the_run_config_says(tmp_path: Path) -> None:
    config = run_config()
    outline = read_outline(wire.encode(config), config.run)
    assert (outline.name, outline.data, outline.train.tokens) == (config.name, config.data, config.train.tokens)
    assert outline.admission == config.admission
    assert public(outline, config.run, Home(tmp_path))(ME.peer, Digest("0" * 64)) is None
