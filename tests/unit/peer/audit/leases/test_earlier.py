"""What the parameters were after earlier rounds: which a peer goes back to, shows others, and has itself."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from charters import charter
from unit.peer.audit.test_heads import a_row
from unit.sync.test_governance import ONE, RUN
from weft.errors import PeerError
from weft.events import Event
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.between import KeptVectors
from weft.peer.audit.heads import Heads
from weft.peer.audit.leases.earlier import Earlier
from weft.peer.audit.steps import LOCAL
from weft.peer.audit.trace import Piece
from weft.peer.state.checkpoint import write_vectors
from weft.store.chunks import chunks, state_index
from weft.sync.merge.method import OUTER
from weft.sync.records.acts import Act, Rewind, Warrant
from weft.sync.records.messages import Manifest
from weft.sync.records.work import Segment
from weft.tasks import Inline
from weft.wire import digest, digest_of, encode, seal

NUM = 300_000  # two chunks
PEER = PeerId("ab" * 32)


def vectors(fill: int) -> dict[str, Tensor]:
    return {OUTER: torch.arange(NUM, dtype=torch.float32) + fill, "momentum": torch.full((NUM,), float(fill))}


class Trial:
    """A peer that knows six rounds, and still has what its lease after round 3 began with."""

    def __init__(self, folder: Path, *, has_kept: bool = True, is_carried: bool = False) -> None:
        events: list[Event] = []
        self.row = a_row(6)
        self.heads = Heads(folder / "heads.bin", events.append)
        for each in self.row:
            self.heads.note(each, charter(1), state_index(vectors(each.round)), 0.0)
        began = {LOCAL: vectors(3)[OUTER]} if not is_carried else {LOCAL: torch.zeros(NUM), OUTER: vectors(3)[OUTER]}
        start = KeptVectors(file="segment-1.safetensors", index=write_vectors(folder / "segment-1.safetensors", began))
        segment = Segment(head=digest_of(self.row[3]), round=3, holder=PEER, num_steps=2)
        piece = Piece(segment=segment, start=start, tokens_per_step=8, num_before=0)
        found = {segment.head: piece} if has_kept else {}
        self.trace: Any = SimpleNamespace(folder=folder, began_at=lambda head: found.get(digest_of(head.manifest)))
        self.served: list[Any] = []
        node = SimpleNamespace(peers=(PEER,), serve_blobs=lambda lookup, is_patient: self.served.append(lookup))
        context: Any = SimpleNamespace(node=node, compute=Inline(), clock=None)
        replica: Any = SimpleNamespace(head=self.row[5], vectors=lambda: vectors(5))
        self.earlier = Earlier(context, replica, self.heads, self.trace)

    def back(self, **fields: Any) -> Rewind:
        named = Rewind(
            round=Round(3), manifest=digest_of(self.row[3]), state=digest_of(state_index(vectors(3))), reason=""
        )
        return replace(named, **fields)

    def manifest(self, **fields: Any) -> Manifest:
        act = Act(run=RUN, serial=1, deed=self.back(**fields))
        return replace(self.row[5], round=Round(6), acts=(Warrant(letters=(seal(ONE, act),)),))

    def find(self, manifest: Manifest) -> Tensor | None:
        return asyncio.run(self.earlier.find(manifest))


@pytest.mark.parametrize("is_carried", [False, True])
def test_what_a_lease_began_at_is_what_the_run_was_then(tmp_path: Path, is_carried: bool) -> None:
    trial = Trial(tmp_path, is_carried=is_carried)
    assert trial.earlier.why_not(trial.back()) == ""
    assert trial.earlier.is_here(trial.back())
    found = trial.find(trial.manifest())
    assert found is not None
    assert torch.equal(found, vectors(3)[OUTER])
    assert trial.find(trial.row[5]) is None, "it goes on"
    assert torch.equal(trial.earlier.here(trial.manifest()), found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"state": digest(b"poison")}, "was another"),
        ({"manifest": digest(b"no round")}, "another manifest"),
        ({"round": Round(4)}, "another manifest"),
        ({"round": Round(200)}, "no manifest of round 200"),
    ],
)
def test_to_what_was_not_so_it_does_not_go_back(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    trial = Trial(tmp_path)
    assert why in trial.earlier.why_not(trial.back(**fields))
    assert not trial.earlier.is_here(trial.back(**fields))
    with pytest.raises(PeerError, match=why):
        trial.find(trial.manifest(**fields))


def test_a_file_that_is_altered_is_not_it(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    path = tmp_path / "segment-1.safetensors"
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert trial.earlier.here(trial.manifest()) is None


def test_others_are_shown_the_list_of_the_state_and_the_chunks_of_its_parameters(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    (lookup,) = trial.served
    index = state_index(vectors(3))
    outer = index.vector(OUTER)
    assert lookup(PEER, Digest(outer.chunks[0])) is None, "before its list was asked for"
    assert lookup(PEER, digest_of(index)) == encode(index)
    assert [lookup(PEER, Digest(each)) for each in outer.chunks] == [bytes(each) for each in chunks(vectors(3)[OUTER])]
    assert lookup(PEER, Digest(index.vector("momentum").chunks[0])) is None, "nobody keeps that"
    assert lookup(PEER, digest(b"anything")) is None


class Others:
    """What other peers deliver."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    async def index(self, _wanted: Digest, _donors: Any) -> Any:
        return state_index(self.state)

    async def pull(self, index: Any, _donors: Any, put: Any, names: set[str]) -> None:
        for name in names:
            for number, chunk in enumerate(chunks(self.state[name])):
                put(name, number * (1 << 18), chunk)


def test_who_has_it_no_more_asks_others_once(tmp_path: Path) -> None:
    trial = Trial(tmp_path, has_kept=False)
    assert not trial.earlier.is_here(trial.back())
    trial.earlier._client = Others(vectors(3))  # type: ignore[assignment]
    found = trial.find(trial.manifest())
    assert found is not None
    assert torch.equal(found, vectors(3)[OUTER])
    assert trial.earlier.is_here(trial.back()), "so it may lead, too"
    trial.earlier._client = None  # type: ignore[assignment]
    assert trial.find(trial.manifest()) is found
    trial.earlier.forget()
    assert not trial.earlier.is_here(trial.back())


def test_what_is_no_state_of_this_run_is_refused(tmp_path: Path) -> None:
    trial = Trial(tmp_path, has_kept=False)
    trial.earlier._client = Others({OUTER: torch.zeros(7), "momentum": torch.zeros(7)})  # type: ignore[assignment]
    with pytest.raises(PeerError, match="no state of this run"):
        trial.find(trial.manifest())
