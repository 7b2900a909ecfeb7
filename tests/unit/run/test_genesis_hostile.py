"""A RunConfig that a stranger wrote, fetched over a socket: refused before anything is made of it."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from unit.peer.crew import Crew
from weft.clock import SystemClock
from weft.errors import ConfigError, TooLarge
from weft.ids import Digest, PeerId, RunId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.ticket import issue
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.run.genesis import seal
from weft.store.home import Home
from weft.wire import Buffer, digest, encode


async def offered(tmp_path: Path, tree: Any) -> None:
    """Join a run whose only member serves `tree` as its RunConfig."""
    data = msgspec.msgpack.encode(tree, order="sorted")
    identity = Identity.from_seed(b"m" * 32)
    passport = Passport(identity=identity, run=RunId(digest(data)), name="liar", admission=Anyone())
    node = Node(passport, [TlsTransport(identity, TlsConfig(host="127.0.0.1"))], SystemClock(), lambda event: None)

    def lookup(_peer: PeerId, wanted: Digest) -> Buffer | None:
        return data if wanted == digest(data) else None

    node.serve_blobs(lookup)
    crew = Crew(tmp_path)
    async with node, crew.deadline():
        victim = crew.join("victim", issue(RunId(digest(data)), node.contacts(), None))
        async with asyncio.timeout(60):
            await victim.task


def a_run(tmp_path: Path) -> Any:
    crew = Crew(tmp_path)
    config = seal(crew.run_file, tmp_path, Home(tmp_path / "maker"), lambda event: None).config
    return msgspec.msgpack.decode(encode(config))


async def test_a_run_that_names_a_path_is_refused(tmp_path: Path) -> None:
    tree = a_run(tmp_path)
    tree["data"]["path"] = "/etc/passwd"
    with pytest.raises(ConfigError, match="path"):
        await offered(tmp_path, tree)


async def test_a_model_of_a_trillion_parameters_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = a_run(tmp_path)
    tree["model"] |= {"num_layers": 128, "width": 32768, "ffn_width": 131072, "head_width": 16384}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("memory was taken")

    for name in ("empty", "zeros", "empty_like"):
        monkeypatch.setattr(torch, name, refuse)
    with pytest.raises(TooLarge, match="parameters"):
        await offered(tmp_path, tree)
