"""What is left of a state that was being fetched when the process ended."""

from pathlib import Path

import pytest
import torch

from charters import charter
from weft.ids import BranchId, Digest, PeerId, RunId
from weft.peer.chain import genesis, open_branch
from weft.store.chunks import Partial, chunks, state_index
from weft.sync.records.index import CHUNK_NBYTES, StateIndex
from weft.wire import Buffer, digest

RUN, A = RunId("cc" * 32), PeerId("aa" * 32)
CHARTER = charter()
HEAD = open_branch(genesis(RUN, A, CHARTER), [A], A, BranchId(RUN))
NUM = 3 * CHUNK_NBYTES // 4 + 100  # three chunks and a rest


def vectors(seed: int = 1) -> dict[str, torch.Tensor]:
    values = torch.arange(NUM, dtype=torch.float32) * seed
    return {"momentum": torch.zeros(NUM), "outer": values}


def pieces(state: dict[str, torch.Tensor]) -> dict[Digest, Buffer]:
    return {digest(piece): piece for vector in state.values() for piece in chunks(vector)}


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return vectors()


@pytest.fixture
def index(state: dict[str, torch.Tensor]) -> StateIndex:
    return state_index(state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arriving"


def begun(folder: Path | None, index: StateIndex) -> Partial:
    partial = Partial(folder, HEAD, CHARTER, index)
    partial.begin()
    return partial


def test_equal_chunks_are_fetched_once_and_fill_all_their_places(
    folder: Path, state: dict[str, torch.Tensor], index: StateIndex
) -> None:
    partial, known = begun(folder, index), pieces(state)
    missing = partial.missing()
    assert [blob.nbytes for blob in missing] == [CHUNK_NBYTES, 400, CHUNK_NBYTES, CHUNK_NBYTES, CHUNK_NBYTES, 400]
    for blob in missing:
        partial.put(blob.digest, known[blob.digest])
    assert (partial.missing(), partial.missing_nbytes) == ([], 0)
    assert all(partial.vectors[name].equal(vector) for name, vector in state.items())


def test_what_has_come_is_there_after_a_restart(
    folder: Path, state: dict[str, torch.Tensor], index: StateIndex
) -> None:
    first, known = begun(folder, index), pieces(state)
    wanted = first.missing()
    for blob in (wanted[0], wanted[3]):
        first.put(blob.digest, known[blob.digest])
    second = Partial.open(folder)
    assert second is not None
    assert (second.head, second.index) == (HEAD, index)
    assert second.missing() == [wanted[2], wanted[4], wanted[5]]  # a hole reads as zeros, and so does wanted[1]
    for blob in second.missing():
        second.put(blob.digest, known[blob.digest])
    third = Partial.open(folder)
    assert third is not None
    assert third.missing() == []
    assert third.vectors["outer"].equal(state["outer"])
    third.drop()
    assert Partial.open(folder) is None


def test_a_chunk_that_the_disk_has_changed_is_missing(
    folder: Path, state: dict[str, torch.Tensor], index: StateIndex
) -> None:
    first, known = begun(folder, index), pieces(state)
    for blob in first.missing():
        first.put(blob.digest, known[blob.digest])
    data = bytearray((folder / "chunks.bin").read_bytes())
    data[len(data) // 2 + 2 * CHUNK_NBYTES] ^= 1
    (folder / "chunks.bin").write_bytes(data)
    again = Partial.open(folder)
    assert again is not None
    assert len(again.missing()) == 1


@pytest.mark.parametrize("content", [b"", b"nothing of ours"])
def test_what_is_no_state_is_as_if_it_were_not_there(folder: Path, content: bytes) -> None:
    assert Partial.open(folder) is None
    folder.mkdir()
    (folder / "offer.bin").write_bytes(content)
    (folder / "chunks.bin").write_bytes(content)
    assert Partial.open(folder) is None


def test_a_newer_state_takes_over_the_chunks_that_are_equal(
    folder: Path, state: dict[str, torch.Tensor], index: StateIndex
) -> None:
    first, known = begun(folder, index), pieces(state)
    for blob in first.missing():
        first.put(blob.digest, known[blob.digest])
    later = vectors(seed=2)
    second = Partial(folder, HEAD, CHARTER, state_index(later))
    second.begin(first)
    assert {blob.digest for blob in second.missing()} == set(pieces(later)) - set(known)
    assert second.vectors["momentum"].equal(later["momentum"])


def test_without_room_it_comes_into_memory_and_says_why(
    tmp_path: Path, state: dict[str, torch.Tensor], index: StateIndex
) -> None:
    (tmp_path / "file").write_bytes(b"")
    partial, known = begun(tmp_path / "file" / "arriving", index), pieces(state)
    assert partial.why_not_kept is not None
    for blob in partial.missing():
        partial.put(blob.digest, known[blob.digest])
    assert partial.vectors["outer"].equal(state["outer"])
