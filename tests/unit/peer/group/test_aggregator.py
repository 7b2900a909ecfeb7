"""An elector that peers offer their work to."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from model.world import first_base
from weft.clock import VirtualClock
from weft.ids import Tokens
from weft.keys import Identity
from weft.peer.group.groups import Aggregator
from weft.peer.messages import OfferNote, SponsorPlease
from weft.sync.records.charter import AuditTerms, PassageTerms
from weft.sync.round.groups import Offer
from weft.wire import digest, seal

BASE = first_base(3)
ME, LEAF = BASE.electorate[0], Identity.from_seed(bytes(32))
AUDITED = replace(BASE, charter=replace(BASE.charter, audits=AuditTerms(rate=0.1, trace_every=1)))
STAGE = replace(BASE, charter=replace(BASE.charter, passages=PassageTerms(rate=0.1)))


class Tasks:
    def spawn(self, work: Any) -> None:
        work.close()  # nothing is fetched here


@pytest.mark.parametrize("base", [BASE, AUDITED, STAGE], ids=["members", "audited", "stage"])
def test_where_members_audit_each_other_nobody_offers_through_another_asked_or_not(base: Any) -> None:
    node = SimpleNamespace(peer=ME, serve=lambda *_: None, on_note=lambda *_: None)
    context: Any = SimpleNamespace(node=node, clock=VirtualClock(), compute=None, emit=None)
    chain = SimpleNamespace(base=base, charter=base.charter, head=SimpleNamespace(contributions=()))
    rounds: Any = SimpleNamespace(chain=chain, is_member=True, on_decided=lambda _: None)
    aggregator: Any = Aggregator(context, rounds, None, None, lambda: 0.0, Tasks())  # type: ignore[arg-type]
    offer = Offer(
        run=base.run,
        branch=base.branch,
        round=base.round,
        sponsor=ME,
        tokens=Tokens(4),
        payload=digest(b"payload"),
        tokens_per_s=1.0,
    )

    async def come() -> bool:
        await aggregator._on_offer(LEAF.peer, OfferNote(signed=seal(LEAF, offer)))
        return bool(aggregator.leaves)

    assert asyncio.run(come()) == (base is BASE)
    if base is not BASE:
        please = SponsorPlease(branch=base.branch, round=base.round)
        assert "cannot be audited" in asyncio.run(aggregator._consider(LEAF.peer, please)).reason
