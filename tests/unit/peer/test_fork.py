"""What a member that has lost its majority consents to."""

import asyncio
from types import SimpleNamespace
from typing import Any

from model.world import first_base
from weft.clock import VirtualClock
from weft.ids import PeerId
from weft.peer.chain import branch_name, open_branch
from weft.peer.fork import Split
from weft.peer.messages import BranchProposal

BASE = first_base(5)
OPENER, ME, OTHER = BASE.electorate[:3]
STRANGERS = tuple(PeerId(f"{number:064x}") for number in (1, 2, 3))


def consents(*members: PeerId) -> bool:
    left = list[str]()
    node = SimpleNamespace(peer=ME, serve=lambda *_: None, on_note=lambda *_: None)
    context: Any = SimpleNamespace(node=node, clock=VirtualClock(), emit=None)
    quorum = SimpleNamespace(has_majority=lambda: False)
    rounds: Any = SimpleNamespace(
        chain=SimpleNamespace(base=BASE), quorum=quorum, leave=lambda: left.append("has left")
    )
    split = Split(SimpleNamespace(is_strict=False), context, rounds)  # type: ignore[arg-type]
    opening = open_branch(BASE, members, OPENER, branch_name(BASE, members, OPENER))
    consent = asyncio.run(split._consider(OPENER, BranchProposal(opening=opening, opener=OPENER)))
    assert bool(left) == consent.is_given
    return consent.is_given


def test_a_branch_is_one_of_members_alone() -> None:
    """Who opens it could else name keys of its own, which would be members there without a lease of work."""
    assert consents(OPENER, ME)
    assert consents(OPENER, ME, OTHER)
    assert not consents(OPENER, ME, *STRANGERS)
    assert not consents(OPENER, OTHER), "it is to be one of them"
