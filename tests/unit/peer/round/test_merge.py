"""What a member finds that merges for itself: only what is here, and only while the round lasts."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from charters import charter
from weft.codec.config import Fp32Config
from weft.ids import Attempt, BranchId, PeerId, Round, RunId, Tokens
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.round.merge import RoundMerger, plan_behind
from weft.peer.round.payloads import Wanted
from weft.store.pool import Pool
from weft.sync.merge.method import Scope
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.records.messages import Collect, Contribution, PartResult, counted
from weft.sync.round.machine import Noticed, ResultHeld
from weft.tasks import Inline
from weft.wire import digest

NUM = 100
A, B = PeerId("aa" * 32), PeerId("bb" * 32)
RUN = RunId("cc" * 32)
WHOLE = Choices(every=1, send="delta", apply=SgdConfig(), codec=Fp32Config(), merged_by="all")
HERE = {peer: torch.full((NUM,), value).numpy().tobytes() for peer, value in ((A, 1.0), (B, 3.0))}
MEAN = torch.full((NUM,), 2.0).numpy().tobytes()
PLAN = Collect(
    attempt=Attempt(0),
    revision=0,
    contributions=tuple(
        Contribution(peer=peer, tokens=Tokens(8), parts=(digest(data), digest(b""))) for peer, data in HERE.items()
    ),
    owners=(B, A),
)


class FakeParts:
    """Has what `here` says, after a while in which `meanwhile` happens."""

    def __init__(self, here, meanwhile=lambda: None):
        self.blobs = {digest(data): data for data in here}
        self.meanwhile = meanwhile
        self.pool = Pool(0)
        self.held = {}

    async def here(self, wanted):
        self.meanwhile()
        return self.blobs.get(wanted)

    def alone(self, result):
        return self

    async def __aenter__(self):
        pass

    async def __aexit__(self, *error):
        pass

    async def kept(self, round, wanted, num):
        return self.held.get(wanted)

    async def keep(self, round, result, data):
        self.held[result] = bytes(data)


def chain_of(method):
    holds = msgspec.structs.replace(charter(), settings=msgspec.structs.replace(charter().settings, method=method))
    return Chain(open_branch(genesis(RUN, A, holds), [A, B], A, BranchId(RUN)), holds)


async def find(parts, chain, result=MEAN, plan=PLAN, base=None):
    """Return what a member finds of part 0 of a round, and of whom it has told."""
    events = []
    place = SimpleNamespace(node=SimpleNamespace(peer=A), compute=Inline(), emit=events.append)
    merger = RoundMerger(place, chain, parts, SimpleNamespace(announced={}), Scope(NUM))
    base = base or chain.base
    wanted = Wanted(0, digest(result), NUM, Round(base.round))
    return await merger.find(base, plan, wanted, range(NUM)), [event.member for event in events]


async def test_what_is_here_is_merged_and_held():
    parts = FakeParts(HERE.values())
    assert await find(parts, chain_of(WHOLE)) == (ResultHeld(plan=PLAN, part=0), [])
    assert parts.held == {digest(MEAN): MEAN}


@pytest.mark.parametrize("data", [HERE[A], b"\xff" * 4 * NUM], ids=["another mean", "no payload"])
async def test_its_owner_is_suspected_where_it_cannot_be_that(data):
    one, other = PLAN.contributions
    other = msgspec.structs.replace(other, parts=(digest(data), digest(b"")))
    parts = FakeParts([HERE[A], data])
    plan = msgspec.structs.replace(PLAN, contributions=(one, other))
    assert await find(parts, chain_of(WHOLE), plan=plan) == (Noticed(peer=B, status="suspected"), [B])
    assert parts.held == {}


async def test_nobody_is_suspected_of_a_round_that_is_decided_before_this_begins():
    chain = chain_of(WHOLE)
    base = msgspec.structs.replace(chain.base, round=Round(chain.base.round - 1))
    assert await find(FakeParts(HERE.values()), chain, result=HERE[A], base=base) == (None, [])


async def test_what_is_not_all_here_is_not_found():
    assert await find(FakeParts([HERE[A]]), chain_of(WHOLE)) == (None, [])


async def test_owners_merge_where_the_method_says_so():
    parts = FakeParts(HERE.values())
    assert await find(parts, chain_of(msgspec.structs.replace(WHOLE, merged_by="owners"))) == (None, [])
    assert parts.held == {}


async def test_nothing_is_found_any_more_once_the_round_is_decided():
    """What the late weigh is of the round after, then: an honest owner would be accused."""
    chain = chain_of(WHOLE)
    other = open_branch(genesis(RUN, A, chain.charter), [A], A, BranchId(RUN))
    parts = FakeParts(HERE.values(), meanwhile=lambda: chain.restart(other, chain.charter))
    assert await find(parts, chain, result=b"another") == (None, [])


def test_a_plan_is_known_by_what_was_announced_of_it():
    announced = {each.peer: each.parts for each in PLAN.contributions}
    base = chain_of(WHOLE).base
    manifest = msgspec.structs.replace(
        open_branch(base, [A, B], A, BranchId(RUN)),
        contributions=tuple(counted(each) for each in PLAN.contributions),
        parts=tuple(PartResult(owner=owner, result=digest(MEAN)) for owner in PLAN.owners),
    )
    assert plan_behind(manifest, announced) == PLAN
    assert plan_behind(manifest, {A: announced[A]}) is None
    assert plan_behind(manifest, {A: announced[A], B: announced[A]}) is None
