"""The states that a work names, and the steps between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.sync.records.work import MAX_STEPS, Link, Segment, link, link_from, num_links, num_states, state_before

PEER = PeerId("aa" * 32)
some_segments = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def segments(steps: list[int]) -> list[Segment]:
    return [Segment(head="0" * 64, round=number, holder=PEER, num_steps=num) for number, num in enumerate(steps)]


def links(made: list[Segment], every: int) -> list[Link]:
    return [link(made, every, number) for number in range(num_links(made, every))]


@given(some_segments, st.integers(1, 9))
def test_links_cover_each_step_once_and_lead_from_state_to_state(steps: list[int], every: int) -> None:
    made = segments(steps)
    found = links(made, every)
    for number, num in enumerate(steps):
        mine = [link for link in found if link.segment == number]
        assert [step for link in mine for step in range(link.first, link.first + link.num_steps)] == list(range(num))
        start = state_before(made, every, number)
        assert [link.before for link in mine] == list(range(start, start + len(mine)))
    assert all(1 <= link.num_steps <= every for link in found)
    # Each state is the first of a segment, or comes after a link.
    states = {state_before(made, every, number) for number in range(len(made))} | {link.before + 1 for link in found}
    assert states == set(range(num_states(made, every)))
    by_state = {number: link_from(made, every, number) for number in range(-1, num_states(made, every) + 1)}
    assert [each for each in by_state.values() if each is not None] == found
    assert all(each is None or each.before == number for number, each in by_state.items())


def test_of_as_many_steps_as_a_record_may_claim_no_list_is_made() -> None:
    made = segments(8 * [MAX_STEPS])
    assert num_links(made, 1) == 8 * MAX_STEPS
    assert link(made, 1, 7 * MAX_STEPS) == Link(7, 0, 1, 7 * (MAX_STEPS + 1))
    with pytest.raises(IndexError):
        link(made, 1, 8 * MAX_STEPS)


def test_a_segment_of_no_steps_has_one_state_and_no_link() -> None:
    made = segments([3, 0])
    assert num_states(made, 2) == 4
    assert [(link.segment, link.first, link.num_steps, link.before) for link in links(made, 2)] == [
        (0, 0, 2, 0),
        (0, 2, 1, 1),
    ]
