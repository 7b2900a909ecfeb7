"""Who holds which stage when a run begins."""

from collections.abc import Collection

import pytest

from charters import charter
from weft.ids import BranchId, PeerId, RunId
from weft.peer.chain import Chain, genesis, open_branch
from weft.stages.messages import Held
from weft.stages.placement import assigned, waits_for
from weft.sync.records.messages import Base


def peers(num: int) -> list[PeerId]:
    return [PeerId(f"{number:064x}") for number in range(num)]


@pytest.mark.parametrize(("num_peers", "num_stages"), [(1, 4), (2, 3), (3, 3), (7, 3), (12, 5)])
def test_every_stage_has_somebody_and_every_peer_a_stage_as_evenly_as_can_be(num_peers, num_stages):
    here = peers(num_peers)
    begin = assigned(here, num_stages)
    sizes = [len(begin.of(stage)) for stage in range(num_stages)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    held = [sum(peer in begin.of(stage) for stage in range(num_stages)) for peer in here]
    assert min(held) >= 1
    assert max(held) - min(held) <= 1


def voted(members: Collection[PeerId]) -> Base:
    run, first = RunId("cc" * 32), next(iter(members))
    return Chain(open_branch(genesis(run, first, charter(4)), members, first, BranchId(run)), charter(4)).base


def held(members: Collection[PeerId], round: int) -> dict[PeerId, Held]:
    return {peer: Held(stage=1, since=0, state="ready", round=round, rate=0.0, num_waiting=0) for peer in members}


def test_a_stage_waits_for_who_voted_in_it_where_the_others_are_no_majority():
    me, *others = electorate = peers(3)
    last = voted(electorate)
    assert waits_for(me, last, held(others[:1], last.round))
    assert waits_for(me, last, held([*others[:1], *peers(9)[5:]], last.round)), "who came since has no vote"
    assert not waits_for(me, last, held(others, last.round))


def test_a_stage_waits_for_nobody_where_it_goes_on_or_nobody_is_or_the_peer_had_no_vote():
    me, *others = electorate = peers(3)
    last = voted(electorate)
    assert not waits_for(me, last, held(others[:1], last.round + 1))
    assert not waits_for(me, last, {})
    assert not waits_for(peers(4)[3], last, held(others[:1], last.round))


def test_the_maker_is_in_the_first_stage():
    here = peers(6)
    assert assigned(here, 3).of(0)[0] == here[0]
