"""How much of one work a worker shows, and to whom."""

from types import SimpleNamespace
from typing import Any

import pytest

from weft.ids import PeerId
from weft.peer.audit.worker import MAX_ASKED, Worker
from weft.wire import Signed, digest

NAME = digest(b"the signed work")
A, B, LIAR, OTHER_LIAR = (PeerId(name * 64) for name in "abcd")


def ticket(signer: PeerId, before: int, kind: str = "Finding") -> Any:
    return Signed(kind=kind, body=b"%d" % before, signer=signer, signature=bytes(64))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Return one that is paused: it makes no steps, and says so where it would."""
    told = SimpleNamespace(name=NAME)
    due = lambda _self, _peer, _work, letter: (told, SimpleNamespace(before=int(letter.body)))  # noqa: E731
    monkeypatch.setattr(Worker, "_due", due)
    node = SimpleNamespace(serve_blobs=lambda *_, **__: None, serve=lambda *_: None)
    stub: Any = SimpleNamespace(node=node, is_parked=True)
    return Worker(stub, stub, stub, stub, stub, stub, stub)


def is_shown(worker: Worker, peer: PeerId, letter: Any) -> bool:
    return worker._shown_to(peer, NAME, letter) == "it is paused"


def test_each_auditor_is_shown_what_it_has_drawn_and_what_each_other_doubts(worker: Worker) -> None:
    """Who doubts something else to each of them keeps none of them from being answered."""
    assert all(is_shown(worker, peer, ticket(peer, 1, "Draw")) for peer in (A, B))
    for number, liar in enumerate((LIAR, OTHER_LIAR)):
        assert is_shown(worker, A, ticket(liar, 10 + number))
        assert is_shown(worker, B, ticket(liar, 20 + number))


def test_nobody_is_shown_a_whole_work_by_doubts_of_its_own(worker: Worker) -> None:
    shown = [is_shown(worker, LIAR, ticket(LIAR, number)) for number in range(8)]
    assert shown == [True] * MAX_ASKED + [False] * (8 - MAX_ASKED)
    assert is_shown(worker, LIAR, ticket(LIAR, 0)), "what it was shown before, again"
    assert is_shown(worker, A, ticket(LIAR, 7))
