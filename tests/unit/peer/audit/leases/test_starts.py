"""What a peer shows of its counted works, and for whom it stays when its run is complete."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from msgspec.structs import replace

from unit.anchor.test_archive import FIRST, work_for
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.leases.starts import Starts
from weft.peer.audit.trace import KeptVectors, Piece, Told, tree_of
from weft.peer.messages import WorkAnswer, WorkRequest
from weft.peer.state.checkpoint import write_vectors
from weft.store.chunks import chunks, state_index
from weft.sync.records.index import CHUNK_NBYTES
from weft.sync.records.work import Work, is_state
from weft.wire import claimed, digest, digest_of, encode

KEEPER = PeerId("ee" * 32)
NUM = CHUNK_NBYTES // 4 + 100  # two chunks


def vectors(fill: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((NUM,), fill + at) for at, name in enumerate(("local", "moment1", "moment2"))}


def told(folder: Path, counted: Round | None, fill: float = 1.0) -> Told:
    first, last = vectors(fill), vectors(fill + 10)
    start, end = f"segment-{int(fill)}.safetensors", f"end-{int(fill)}.safetensors"
    names = [digest_of(state_index(each)) for each in (first, vectors(fill + 5), last)]
    signed = work_for(FIRST, digest(str(fill).encode()))
    work: Work = claimed(signed, Work)
    return Told(
        signed=signed,
        pieces=(
            Piece(
                segment=work.segments[0],
                start=KeptVectors(file=start, index=write_vectors(folder / start, first)),
                tokens_per_step=4,
                num_before=0,
            ),
        ),
        names=bytes.fromhex("".join(names)),
        end=KeptVectors(file=end, index=write_vectors(folder / end, {"local": last["local"]})),
        last=state_index(last),
        counted=counted,
    )


class There:
    """A peer that shows works, to one that is linked."""

    def __init__(self, folder: Path) -> None:
        self.works: dict[Digest, Told] = {}
        self.is_linked = True
        self.served: dict[Any, Any] = {}
        node: Any = SimpleNamespace(
            serve=lambda kind, handler: self.served.update({kind: handler}),
            serve_blobs=lambda lookup, **_options: self.served.update(blobs=lookup),
            is_linked=lambda _peer: self.is_linked,
        )
        self.folder, self.trace_every, self.known = folder, 1, self.works.get
        self.starts = Starts(SimpleNamespace(node=node), self)  # type: ignore[arg-type]

    @property
    def counted(self) -> tuple[Told, ...]:
        return tuple(each for each in self.works.values() if each.counted is not None)

    def put(self, work: Told) -> Told:
        self.works[work.name] = work
        return work

    def ask(self, work: Digest, *, keeps_all: bool = True, is_done: bool = False) -> WorkAnswer:
        request = WorkRequest(work=work, keeps_all=keeps_all, is_done=is_done)
        return asyncio.run(self.served[WorkRequest](KEEPER, request))  # type: ignore[no-any-return]

    def blob(self, name: str) -> bytes | None:
        found = self.served["blobs"](KEEPER, Digest(name))
        return None if found is None else bytes(found)


def test_what_a_lease_began_and_ended_with_can_be_fetched(tmp_path: Path) -> None:
    there = There(tmp_path)
    work = there.put(told(tmp_path, Round(1)))
    answer = there.ask(work.name)
    assert answer.is_here
    signed = replace(work.work, trace=tree_of(work.names).root())
    (begin,), (end,) = answer.begins, answer.ends
    for named, at in ((begin, 0), (end, 2)):
        assert is_state(signed.trace, signed.segments, 1, at, named.state, named.path)
    assert there.blob(begin.state) == encode(state_index(vectors(1.0)))
    assert there.blob(end.state) == encode(work.last)
    for name, vector in vectors(1.0).items():
        assert [there.blob(digest(chunk)) for chunk in chunks(vector)] == list(map(bytes, chunks(vector))), name
    last = vectors(11.0)
    assert there.blob(digest(chunks(last["local"])[1])) == bytes(chunks(last["local"])[1])
    assert there.blob(digest(chunks(last["moment2"])[1])) is None, "it is on no disk"
    assert there.blob(digest(b"anything else")) is None


def test_what_no_round_has_counted_is_not_shown(tmp_path: Path) -> None:
    there = There(tmp_path)
    work = there.put(told(tmp_path, None))
    assert not there.ask(work.name).is_here
    assert not there.ask(digest(b"unknown")).is_here
    assert there.blob(digest_of(state_index(vectors(1.0)))) is None


def test_who_keeps_all_is_waited_for_before_anything_is_counted(tmp_path: Path) -> None:
    there = There(tmp_path)
    there.ask(digest(b"nothing of this peer"))
    assert not there.starts.is_awaited
    first = there.put(told(tmp_path, Round(4)))
    assert there.starts.is_awaited
    there.ask(first.name, is_done=True)
    assert not there.starts.is_awaited
    late = There(tmp_path)
    late.put(told(tmp_path, Round(5), 2.0))
    late.ask(digest(b"nothing of this peer"))
    assert not late.starts.is_awaited, "who comes later does not ask for what was before"


def test_what_is_gone_from_the_disk_is_not_shown(tmp_path: Path) -> None:
    there = There(tmp_path)
    work = there.put(told(tmp_path, Round(1)))
    there.ask(work.name)
    (tmp_path / work.pieces[0].start.file).unlink()
    assert there.blob(digest(chunks(vectors(1.0)["moment1"])[0])) is None


def test_a_peer_stays_for_who_keeps_its_works_until_the_last_is_kept(tmp_path: Path) -> None:
    there = There(tmp_path)
    early = there.put(told(tmp_path, Round(1)))
    assert not there.starts.is_awaited, "nobody has asked"
    second = there.put(told(tmp_path, Round(2), 2.0))
    there.ask(second.name, keeps_all=False)
    assert not there.starts.is_awaited, "who looks at one work waits for no other"
    there.ask(second.name)
    assert there.starts.is_awaited
    there.ask(second.name, is_done=True)
    assert not there.starts.is_awaited, "nobody has asked for the first"
    last = there.put(told(tmp_path, Round(3), 3.0))
    assert there.starts.is_awaited, "it will be asked for"
    there.is_linked = False
    assert not there.starts.is_awaited
    there.is_linked = True
    del there.works[last.name]  # nobody can ask for it any more
    assert not there.starts.is_awaited
    assert early.name in there.works
