"""Swarms of whole peers, each test with its own folders, and a text short enough to sample."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import msgspec
import pytest

from scenarios.swarm import Swarm
from scenarios.theatre import Theatre, make_run_file
from weft.ids import Digest, PeerId
from weft.net.node import Node
from weft.net.transport.limits import Burden
from weft.peer.messages import Handed
from weft.run.config import RunFile
from weft.sim.memo import shared
from weft.wire import digest

UNCOUNTED: dict[str, Callable[..., Any]] = {
    "charge": lambda *_: None,
    "call": lambda _: None,
    "note": lambda _: None,
    "pause_s": lambda _: 0.0,
    "do": lambda _, work: work(),
    "metered": lambda _, work: work,
    "read": lambda _, reader: reader.read(),
}
Fetched = tuple[PeerId, PeerId, Digest, int]  # who fetched of whom which blob, or was handed it, and its bytes


@pytest.fixture(autouse=True, scope="module")  # of a package without `__init__` all that follows would have it, too
def _fast() -> Iterator[None]:
    """Leave out what the tests of the parts check, and what takes a third of a swarm's time.

    Shapes are not checked. Nothing is flushed to the disk: power cuts are played (`Swarm.cut_power`). What one member
    has read and found well signed is so for all of the process. What members cost each other in computing is not
    counted: where time is virtual nothing costs anything (`scenarios.test_shares` lets it cost something).
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    with pytest.MonkeyPatch.context() as patch, shared():
        for name in ("os.fsync", "weft.store.journal._flush"):
            patch.setattr(name, lambda _handle: None)
        patch.setattr("weft.store.rounds._SYNCHRONOUS", "OFF")
        for name, uncounted in UNCOUNTED.items():
            patch.setattr(Burden, name, uncounted)
        yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def make_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Swarm]:
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 4)
    swarms: list[Swarm] = []

    def make(**options: Any) -> Swarm:
        swarms.append(Swarm(tmp_path / f"swarm-{len(swarms)}", **options))
        return swarms[-1]

    return make


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 4)
    return make_run_file(tmp_path)


@pytest.fixture
def theatre(run_file: RunFile, tmp_path: Path) -> Theatre:
    return Theatre(run_file, tmp_path)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Fetched]:
    """All blobs that anybody fetched, or was handed."""
    found: list[Fetched] = []
    fetch, post = Node.fetch, Node.post

    async def noted(node: Node, peer: PeerId, wanted: Digest, into: Any) -> None:
        await fetch(node, peer, wanted, into)
        found.append((node.peer, peer, wanted, memoryview(into).nbytes))

    def noted_post(node: Node, peer: PeerId, record: msgspec.Struct) -> bool:
        is_sent = post(node, peer, record)
        if is_sent and isinstance(record, Handed):
            found.append((peer, node.peer, digest(record.data), len(record.data)))
        return is_sent

    monkeypatch.setattr(Node, "fetch", noted)
    monkeypatch.setattr(Node, "post", noted_post)
    return found
