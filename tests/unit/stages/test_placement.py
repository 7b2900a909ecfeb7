"""Who holds which stage when a run begins."""

import pytest

from weft.ids import PeerId
from weft.stages.placement import assigned


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


def test_the_maker_is_in_the_first_stage():
    here = peers(6)
    assert assigned(here, 3).of(0)[0] == here[0]
